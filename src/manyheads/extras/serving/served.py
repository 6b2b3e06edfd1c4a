"""The models of a server: loading, names, languages, and the conversion of requests to rows of the engine."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch

from manyheads.decoding.generation import READ_AT_ONCE, PrefixCache, context_settings
from manyheads.decoding.inputs_and_results import encode_texts, source_limit, with_end
from manyheads.decoding.search_problem import length_limits
from manyheads.extras.inspect.attending import open_model
from manyheads.extras.serving.jobs import (
    GenerationBatch,
    PairBatch,
    Prompt,
    Row,
    RuntimeBatch,
    TextBatch,
    TranslationBatch,
)
from manyheads.extras.serving.refusals import Refusal, too_long
from manyheads.extras.serving.settings import ServingSettings, names_of_models, plain_tag
from manyheads.files.safe_open import read_limited
from manyheads.models.hub import resolve_model_path

if TYPE_CHECKING:
    from manyheads.decoding.generator import Generator
    from manyheads.decoding.settings import DecodingSettings, GenerationSettings
    from manyheads.decoding.translator import Translator

M = TypeVar("M", bound="ServedModel")
_MOST_BYTES = 1 << 20
_MOST_CHECKED = 64


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The common part of all served models.

    Args:
        name: in requests. pairs: (source, target) language codes; empty for language models and where they are unknown.
        limits: of the server. created: time of loading, in seconds since 1970.
    """

    name: str
    limits: ServingSettings
    pairs: tuple[tuple[str, str], ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def _check_row(self, what: str, cost: int, width: int, explained: str) -> None:
        if cost > self.limits.max_batch_tokens:
            raise too_long(
                what, f"the work for one text ({explained})", cost, self.limits.max_batch_tokens,
                "Send a shorter text, or ask for fewer tokens, beams or samples.",
            )  # fmt: skip
        if width > self.limits.max_batch_rows:
            raise too_long(
                what, "the number of beams or samples of one text", width, self.limits.max_batch_rows, "Ask for fewer."
            )


@dataclass(frozen=True, kw_only=True)
class ServedTranslator(ServedModel):
    """A model that translates. reader: the translator. checked: settings of earlier requests, by their options."""

    task: ClassVar[Literal["translation"]] = "translation"
    reader: Translator
    checked: dict[frozenset[tuple[str, type, Any]], DecodingSettings] = field(default_factory=dict, repr=False)

    @property
    def source_lang(self) -> str | None:
        """The language of the sources; None: unknown, or there are several."""
        sources = {source for source, _ in self.pairs}
        return sources.pop() if len(sources) == 1 else None

    def into(self, target: str | None) -> ServedTranslator:
        """Return the model for a target language; of a model without tags, the model itself.

        Raises: Refusal: it translates into several languages, and none or another one is named.
        """
        known = self.reader.tokenizer.target_languages
        if target is not None:
            spelled = {plain_tag(one): one for one in known}
            target = spelled.get(plain_tag(target), target)
        if not known or (target not in known and not self.reader.tokenizer.needs_language):
            return self
        if target is None or target not in known:
            raise Refusal(
                422, f"target_lang: this model translates into {', '.join(known)}; choose one of them.",
                code="language", field="target_lang",
            )  # fmt: skip
        return dataclasses.replace(self, reader=self.reader.into(target))

    def settings(self, overrides: dict[str, Any]) -> DecodingSettings:
        """Return the options of a request.

        Raises: ConfigError, RequestError: an option is invalid.
        """
        most = self.limits.max_batch_tokens  # the engine forms the batches
        options = {"num_return_sequences": 1, **overrides, "max_tokens": most}
        if "forced_prefix_ids" in options:  # they can be many
            return self.reader.options(**options)
        # Checking the options takes a third of the time that the event loop needs for a short request.
        key = frozenset((name, type(value), value) for name, value in options.items())  # True equals 1
        found = self.checked.get(key)
        if found is None:
            found = self.reader.options(**options)
            if len(self.checked) >= _MOST_CHECKED:
                self.checked.clear()
            self.checked[key] = found
        return found

    def rows(
        self,
        texts: Sequence[str],
        settings: DecodingSettings,
        what: str = "text",
        *,
        owners: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[Row | None]:
        """Return a row for each text; None for a text without words.

        Args: numbers: of the texts among those of the request; default 0, 1, 2 ... owners: the texts with these numbers
            are sentences of these texts of the request.

        Raises: Refusal: a text is too long. DataError: a text is not valid Unicode.
        """
        side = self.reader.tokenizer.source
        limit, reason = source_limit(settings, self.reader.model.max_len)
        width = settings.num_return_sequences if settings.do_sample else settings.num_beams
        rows: list[Row | None] = []
        encoded = encode_texts(texts, side)
        lengths = torch.tensor([len(ids) + 1 for ids in encoded])
        limits = length_limits(lengths, settings, self.reader.model.max_len).tolist()
        for number, text, ids, most in zip(numbers or range(len(texts)), texts, encoded, limits, strict=True):
            if not ids or not text.strip():
                rows.append(None)
                continue
            source = with_end(ids, side)
            if len(source) > limit:
                which = f"text {number + 1}" if owners is None else f"a sentence of text {owners[number] + 1}"
                raise too_long(what, f"the length of {which} in tokens", len(source), limit, f"({reason})")
            cost = width * (len(source) + most)
            explained = f"{width} beams or samples x ({len(source)} source + {most} target tokens)"
            self._check_row(what, cost, width, explained)
            rows.append(Row((source, number), cost, width))
        return rows

    def begin(self, settings: DecodingSettings, rows: Sequence[Row | None]) -> tuple[Hashable, Any]:
        """Return the key of the engine's batches, and the function that begins one."""
        longest = max((len(row.content[0]) for row in rows if row is not None), default=0)
        runtime = self.reader.search.engine_for(settings, longest)
        if runtime is not None:
            return (self.name, settings, "runtime"), lambda contents: RuntimeBatch(runtime, settings, contents)
        return (self.name, settings), lambda contents: TranslationBatch(self.reader, settings, contents)

    def scoring(self) -> tuple[Hashable, Any]:
        """Return the key of batches that score pairs, and the function that begins one."""
        return (self.name, "score"), partial(PairBatch, self.reader)


@dataclass(frozen=True, kw_only=True)
class ServedGenerator(ServedModel):
    """A language model. reader: the generator. cache: of the beginnings of earlier prompts."""

    task: ClassVar[Literal["language-modelling"]] = "language-modelling"
    reader: Generator
    cache: PrefixCache

    def settings(self, overrides: dict[str, Any]) -> GenerationSettings:
        """Return the options of a request.

        Raises: ConfigError, RequestError: an option is invalid.
        """
        given = {"num_return_sequences": 1, **overrides, "max_rows": self.limits.max_batch_rows}
        settings = self.reader.options(**given)
        context_settings(self.reader.model, settings)  # checks memory_len, before an answer can begin
        return settings

    def rows(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        what: str = "prompt",
        *,
        num_top: int = 0,
    ) -> list[Row]:
        """Return a row for each prompt of ids.

        Args: num_top: alternatives of each token that the client asked for.

        Raises: Refusal: a prompt is too long for the server or the model.
        """
        rows = []
        width = settings.num_return_sequences
        config = self.reader.model.config
        each = getattr(config, "each", (config,))  # of an ensemble
        starts_full = any(getattr(one, "initial_memory", "") == "zeros" for one in each)
        memory = (settings.memory_len or 0) if starts_full else 0
        for number, ids in enumerate(prompts):
            most = self.reader.most_new_tokens(len(ids), settings)
            if most < 1:
                raise too_long(
                    what, f"the length of prompt {number + 1} in tokens", len(ids), len(ids) + most - 1,
                    "Send a shorter prompt.",
                )  # fmt: skip
            cost = width * (len(ids) + most + memory)
            held = f" + {memory} of memory" if memory else ""
            self._check_row(what, cost, width, f"{width} samples x ({len(ids)} prompt + {most} new tokens{held})")
            rows.append(Row(Prompt(list(ids), number, settings, num_top), cost, width))
        return rows

    def scored_rows(self, texts: Sequence[list[int]], num_top: int, what: str = "text") -> list[Row | None]:
        """Return a row for each text of ids to score; None for a text without tokens.

        Raises: Refusal: a text is too long for the server or the model.
        """
        limit = self.reader.model.max_len
        for number, ids in enumerate(texts):
            if limit is not None and len(ids) > limit:
                raise too_long(what, f"the length of text {number + 1} in tokens", len(ids), limit, "Send less.")
            self._check_row(what, len(ids), 1, f"{len(ids)} tokens")
        return [Row((ids, num_top), len(ids)) if ids else None for ids in texts]

    def begin(self, settings: GenerationSettings, rows: Sequence[Row]) -> tuple[Hashable, Any]:
        """Return the key of the engine's batches, and the function that begins one.

        Requests that differ only in their seed, stop texts and length share a batch. A single prompt whose beginning
        was read before gets a batch of its own, which continues from there.
        """
        reader, cache = self.reader, self.cache
        shared = dataclasses.replace(settings, seed=0, stop=(), max_new_tokens=max(1, settings.min_new_tokens))
        key: tuple[Hashable, ...] = (self.name, shared)
        if len(rows) == 1 and cache.longest(rows[0].content.ids, repr(context_settings(reader.model, settings))):
            key = (*key, object())
        return key, lambda contents: GenerationBatch(reader, shared, contents, cache)

    def scoring(self) -> tuple[Hashable, Any]:
        """Return the key of batches that score texts, and the function that begins one."""
        return (self.name, "score"), partial(TextBatch, self.reader)


AnyServed = ServedTranslator | ServedGenerator


def load_models(settings: ServingSettings, stop: Callable[[], bool] = lambda: False) -> dict[str, AnyServed]:
    """Load all models of a server. Returns: name -> model, in the given order.

    Args: stop: asked before each model; True ends the loading.

    Raises: ConfigError: see `names_of_models`. ModelFileError, DataError: a model cannot be loaded.
    """
    models: dict[str, AnyServed] = {}
    for name, path in names_of_models(settings.models).items():
        if stop():
            break
        reader = open_model(path, settings.device, settings.precision, settings.engine)
        if reader.task == "translation":
            pairs = _pairs(resolve_model_path(path), reader, settings)
            models[name] = ServedTranslator(name=name, limits=settings, reader=reader, pairs=pairs)
        else:
            cache = PrefixCache(settings.prefix_cache_mb << 20, READ_AT_ONCE)
            models[name] = ServedGenerator(name=name, limits=settings, reader=reader, cache=cache)
    return models


def _pairs(folder: Path, translator: Translator, settings: ServingSettings) -> tuple[tuple[str, str], ...]:
    """Return the language pairs that the model's config or tokenizer records, else those of the server's settings, of
    which the target is not needed for a model whose tokenizer has tags of target languages.

    The target that the tokenizer of an OPUS-MT model names can be a group, such as `roa`; then its codes are the
    targets, because without one the model chooses the language.
    """
    recorded = json.loads(read_limited(folder / "config.json", _MOST_BYTES)).get("languages")
    if isinstance(recorded, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in recorded):
        return tuple((str(source), str(target)) for source, target in recorded)
    described = translator.tokenizer.describe()
    source, target = described.get("source_lang"), described.get("target_lang")
    if isinstance(source, str) and isinstance(target, str):
        codes = translator.tokenizer.target_languages
        is_group = bool(codes) and plain_tag(target) not in map(plain_tag, codes)
        return tuple((source, code) for code in codes) if is_group else ((source, target),)
    targets = (settings.target_lang,) if settings.target_lang else translator.tokenizer.target_languages
    return tuple((settings.source_lang, one) for one in targets) if settings.source_lang else ()


def find_model(models: dict[str, AnyServed], name: str | None, kind: type[M]) -> M:
    """Return the model of a request: the named one, or without a name the first of its kind.

    Raises: Refusal: there is none.
    """
    possible = [one for one in models.values() if isinstance(one, kind)]
    found = next((one for one in possible if name in (None, one.name)), None)
    if found is not None:
        return found
    what = "translates" if kind is ServedTranslator else "generates text"
    known = ", ".join(one.name for one in possible) or "none"
    if name is not None and name in models:
        raise Refusal(400, f"model: this model does not do that. Models that do: {known}.", code="model", field="model")
    raise Refusal(
        404, f"model: there is no such model here that {what}. Models: {known}.", code="model_not_found", field="model"
    )
