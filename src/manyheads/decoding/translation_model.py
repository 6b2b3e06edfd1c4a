"""A translation model with its tokenizer and settings: loading, saving, moving, choosing the target language, and the
search for translations of texts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, Unpack, cast

import torch

from manyheads.catalogue import HOOKS
from manyheads.catalogue import load as load_entry
from manyheads.decoding.inputs_and_results import (
    OnProgress,
    check_target_limit,
    encode_texts,
    fit,
    source_limit,
    with_end,
)
from manyheads.decoding.model_runner import (
    ModelRunner,
    Precision,
    RunsModel,
    check_same_vocabulary,
    choose_device,
    choose_precision,
    model_folder,
)
from manyheads.decoding.search import Shortlist, search_all
from manyheads.decoding.settings import (
    DecodingOverrides,
    DecodingSettings,
    check_ids,
    load_settings,
    overridden,
    pattern_grammar,
)
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.models.composites import Seq2Seq
from manyheads.models.pretrained import load, read_languages, save_pretrained, unmixed
from manyheads.models.protocols import Searchable
from manyheads.text.sides import IntoLanguage, LanguagePair, TranslationTokenizer, check_target, tag_of

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import EngineName, Hypothesis, SearchEngine, Stop
    from manyheads.decoding.kept_texts import KeptTexts


class Reranker(Protocol):
    """Ranks the hypotheses of a beam again."""

    def check(self, settings: DecodingSettings) -> None:
        """Raises: ConfigError: the search keeps no hypotheses to choose from."""

    def rerank(
        self,
        sources: Sequence[str],
        found: Sequence[list[Hypothesis]],
        outputs: Sequence[list[str]],
        settings: DecodingSettings,
        *,
        numbers: Sequence[int],
        stop: Stop | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each source, best first.

        Args: outputs: the texts of the hypotheses. numbers: of the sources in messages.
        """


@dataclass(frozen=True)
class TextSearch:
    """The search of a translator: this package's own, or that of another engine where there is one.

    Args:
        runner: runs the model.
        tokenizer: of both sides.
        shortlist: search only candidates for each batch and not the whole vocabulary; not with compiled steps.
        engine: another runtime with the same model.
        reranker: ranks all hypotheses of the beam before the best ones are returned.

    Raises: RequestError: the shortlist cannot be used with this tokenizer, or with compiled steps.
    """

    runner: ModelRunner[Searchable]
    tokenizer: TranslationTokenizer
    shortlist: Shortlist | None = None
    engine: SearchEngine | None = None
    reranker: Reranker | None = None

    def __post_init__(self) -> None:
        if self.shortlist is None:
            return
        if self.runner.is_compiled:
            raise RequestError(
                "a shortlist changes the vocabulary of every batch, so steps with it cannot be compiled;"
                " leave out --compile or --shortlist."
            )
        if (kind := self.tokenizer.model_kind) != "translator":
            raise RequestError(f"shortlists are for translators; this model is a {kind}, so leave out --shortlist.")
        if self.shortlist.vocabulary != self.tokenizer.digest:
            raise RequestError(
                f"the shortlist was learned with another vocabulary ({self.shortlist.vocabulary[:12]}) than the model's"
                f" ({self.tokenizer.digest[:12]}); learn it again: manyheads shortlist."
            )

    def engine_for(self, settings: DecodingSettings, longest: int = 0) -> SearchEngine | None:
        """Return the engine that does a search with these settings instead of torch, if there is one.

        Unlike `hypotheses`, it returns None for options that the engine does not support, whether or not the engine was
        asked for by name.

        Args: longest: tokens of the longest source.
        """
        if self.engine is None or longest > self.engine.longest_source:
            return None
        try:
            return self.engine if self._engine_takes(settings) else None
        except RequestError:
            return None

    def choose_engine(self, settings: DecodingSettings) -> str:
        """Decide which engine searches with these settings, and return a sentence that names it and the reason.

        With `auto` the first call measures both. `hypotheses` makes the same decision itself, so this method only
        reports it.

        Raises: RequestError: the engine that was asked for has no such option.
        """
        self._engine_takes(self._keeping_all(settings))
        return "engine torch" if self.engine is None else self.engine.choice

    def _engine_takes(self, settings: DecodingSettings) -> bool:
        return self.engine is not None and self.engine.takes(settings, self._by_torch)

    def runs_as(self) -> str:
        """Return "" if the model computes in float32 on the CPU, uncompiled; otherwise a description of how it runs."""
        if self.runner.device.type != "cpu":
            return f"is on {self.runner.device}"
        if self.runner.precision != "fp32":
            return f"has precision {self.runner.precision}"
        if self.shortlist is not None:
            return "has a shortlist"
        return "has compiled steps" if self.runner.is_compiled else ""

    def hypotheses(
        self,
        texts: Sequence[str],
        settings: DecodingSettings,
        stop: Stop | None,
        first: int = 0,
        on_progress: OnProgress | None = None,
        numbers: Sequence[int] | None = None,
        draws: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each text; an empty list for an empty text.

        Args:
            first: number of earlier texts.
            numbers: of the texts in messages; None: first + 1, first + 2, ...
            draws: of the texts for sampling; None: first, first + 1, ...

        Raises: see `Translator.translate`.
        """
        reader = self.tokenizer.source
        encoded = encode_texts(texts, reader)
        full = [place for place, ids in enumerate(encoded) if ids and texts[place].strip()]
        sources = [with_end(encoded[place], reader) for place in full]
        named = [first + place + 1 if numbers is None else numbers[place] for place in full]
        limit, reason = source_limit(settings, self.runner.model.max_len)
        sources = fit(sources, named, limit, reason, too_long=settings.too_long)
        results: list[list[Hypothesis]] = [[] for _ in texts]
        all_of_beam = self._keeping_all(settings)
        if self.engine is not None and self._engine_takes(all_of_beam):
            found = self.engine.search(sources, all_of_beam, stop=stop, on_progress=on_progress)
        else:
            indices = [first + place if draws is None else draws[place] for place in full]
            found = self._by_torch(sources, all_of_beam, indices, stop, on_progress)
        if self.reranker is not None:
            found = self._reranked([texts[place] for place in full], found, settings, named, stop)
        for place, hypotheses in zip(full, found, strict=True):
            results[place] = hypotheses
        return results

    def _keeping_all(self, settings: DecodingSettings) -> DecodingSettings:
        """Return the settings of the search itself, which returns the whole beam if it is ranked again."""
        return settings if self.reranker is None else replace(settings, num_return_sequences=settings.num_beams)

    def _reranked(
        self,
        texts: Sequence[str],
        found: list[list[Hypothesis]],
        settings: DecodingSettings,
        numbers: Sequence[int],
        stop: Stop | None,
    ) -> list[list[Hypothesis]]:
        assert self.reranker is not None
        writer = self.tokenizer.target
        outputs = [writer.decode_batch([one.ids for one in hypotheses]) for hypotheses in found]
        ranked = self.reranker.rerank(texts, found, outputs, settings, numbers=numbers, stop=stop)
        return [hypotheses[: settings.num_return_sequences] for hypotheses in ranked]

    def _by_torch(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        indices: Sequence[int] | None = None,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[list[Hypothesis]]:
        """Search with our own search. indices: see `search_all`."""
        writer = self.tokenizer.target
        with self.runner.inference():
            return search_all(
                self.runner.steps,
                sources,
                settings,
                pad_id=writer.pad_id,
                bos_id=writer.bos_id,
                eos_id=writer.eos_id,
                device=self.runner.device,
                indices=indices,
                grammar=pattern_grammar(settings, self.tokenizer) or self.tokenizer.grammar(settings),
                stop=stop,
                on_progress=on_progress,
                shortlist=self.shortlist,
            )


class TranslationModel(RunsModel[Searchable]):
    """The model of a `Translator`, which adds the methods that take texts.

    Attributes: search: the search for translations, with this package or another engine.
    """

    task: Literal["translation"] = "translation"

    def __init__(
        self,
        model: Searchable,
        tokenizer: TranslationTokenizer,
        settings: DecodingSettings | None = None,
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
        shortlist: Shortlist | None = None,
        plain: bool = False,
    ) -> None:
        self.runner = ModelRunner(model, device, precision, compile_steps=compile_steps, plain=plain)
        self.tokenizer = tokenizer
        self.settings = DecodingSettings() if settings is None else settings
        self.search = TextSearch(self.runner, tokenizer, shortlist)
        self.languages: tuple[LanguagePair, ...] = ()
        self.target_lang: str | None = None
        self._stand_ins: dict[str | None, Sequence[str]] = {}  # of each target language
        self._whole: Self | None = None

    def __repr__(self) -> str:
        config = getattr(self.model, "config", None)
        name = getattr(config, "architecture", type(self.model).__name__)
        pairs = ", ".join(f"{source} to {target}" for source, target in self.languages) or "languages not recorded"
        ids = f"{self.tokenizer.target.vocab_size:,} ids"
        return f"{type(self).__name__}({name}, {pairs}, {ids}, {self.device}, {self.precision})"

    @classmethod
    @unmixed
    def from_pretrained(
        cls,
        path: str | Path | Sequence[str | Path],
        device: str | torch.device = "auto",
        precision: Precision | Literal["int8"] = "fp32",
        *,
        compile_steps: bool = False,
        revision: str | None = None,
        shortlist: int | None = None,
        engine: EngineName | None = None,
        plain: bool = False,
    ) -> Self:
        """Load a translator from a model folder, a run folder, or `owner/name` on the Hugging Face hub.

        Several paths are an ensemble, which averages the models' probabilities in each step (see
        `models.ensemble`). Their tokenizers must be equal. Settings and shortlist are those of the first one.

        `revision` is a branch, tag or commit of a model on the hub.
        With `bf16` its linear layers are cast permanently (see `device.narrow`): the model cannot be trained or saved.
        With `int8` the engine ctranslate2 searches, with weights and their inputs rounded to 8 bits; all else, such as
        scores and attention, is computed in fp32.
        On a CPU a second copy of the linear layers' weights may be kept in a faster layout (see `device.pack`).

        Args:
            shortlist: use the folder's shortlist, with so many frequent words and translations of each source word.
            engine: what searches: `torch`; `ctranslate2`, on the CPU in fp32 or int8 and without token
                log-probabilities, with an export that is kept beside the model; `auto`: ctranslate2 in fp32 if it has
                all options of a call and is faster in a measurement, else torch (see `TextSearch.choose_engine`). None:
                ctranslate2 for int8, otherwise torch.

        Raises: ModelFileError: a file is missing, damaged or refused. ConfigError, DataError: the content of a file is
            invalid, CTranslate2 cannot hold the model, or the models cannot be averaged. RequestError: the engine has
            no such device or precision, or searches one model only. MissingExtraError: the engine is not installed.
        """
        paths = [path] if isinstance(path, str | Path) else list(path)
        if not paths:
            raise ConfigError("an ensemble needs at least one model, but the list of paths is empty.")
        from manyheads.decoding.inputs_and_results import engine_named, open_engine
        from manyheads.models.ensemble import Ensemble
        from manyheads.text.of_folder import load_tokenizer

        engine = engine_named(engine, precision)
        if len(paths) > 1 and engine != "torch":
            otherwise = "precision fp32 or bf16" if precision == "int8" else "engine torch"
            raise RequestError(f"engine {engine} searches one model, but {len(paths)} are given; use {otherwise}.")
        folders = [model_folder(one, "translation", revision) for one in paths]
        folder = folders[0]
        tokenizer = load_tokenizer(folder)
        for other in folders[1:]:
            _check_alike(folder, tokenizer, other)
        chosen = choose_device(device)
        of_torch: Precision = "fp32" if precision == "int8" else precision
        choose_precision(of_torch, chosen)  # its errors come before weights are read
        models = [_load_model(one, tokenizer, chosen) for one in folders]
        model = models[0] if len(models) == 1 else Ensemble(models)
        words: Shortlist | None = None
        if shortlist is not None:
            sizes = models[0].config.source_vocab_size, models[0].config.target_vocab_size
            words = load_entry(HOOKS["shortlist"]).load(folder, shortlist, vocabulary=tokenizer.digest, sizes=sizes)
        settings = load_settings(folder)
        options: dict[str, Any] = {"compile_steps": compile_steps, "shortlist": words, "plain": plain}
        made = cls(model, tokenizer, settings, device, of_torch, **options)
        made.runner.prepare_weights()
        made.languages = read_languages(folder)
        opened = open_engine(engine, folder, runs_plainly=made.search.runs_as(), is_int8=precision == "int8")
        made.search = replace(made.search, engine=opened)
        return made

    @property
    def precision(self) -> str:
        """Of the search: `int8` if another engine computes in it, otherwise the model's."""
        engine = self.search.engine
        return "int8" if engine is not None and engine.is_int8 else self.runner.precision

    def save_pretrained(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a model folder that `from_pretrained` reads: weights, tokenizer, settings and languages.

        An existing folder is replaced, at once and completely.

        Args: dtype: round the weights to this type, such as torch.bfloat16, which halves the file; None: as they are.

        Raises: RequestError: the model is not one of this package, or dtype is no floating type. SaveError: it could
            not be written, or its weights were rounded by `precision` bf16.
        """
        from manyheads.models.ensemble import averaged_models

        [model, *others] = averaged_models(self.model)
        if others:
            raise RequestError("an ensemble cannot be saved as one model folder; save each of its models.")
        if not hasattr(model, "config"):
            raise RequestError(f"a {type(self.model).__name__} has no config, so it cannot be saved as a model folder.")
        whole = self._whole or self  # into one language, it is still a model of all of them
        save_pretrained(
            model,
            path,
            tokenizer=whole.tokenizer,
            generation=self.settings,
            languages=whole.languages,
            dtype=dtype,
        )

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device, also that of translators that `into` made. Returns: this translator.

        Raises: RequestError: there is no such device, or it has no products in this precision.
        """
        chosen = choose_device(device)
        if self.search.engine is not None and chosen.type != "cpu":
            raise RequestError(
                f"the engine of this translator runs on the CPU, not on {chosen}; load it with engine torch."
            )
        return super().to(chosen)

    def into(self, language: str | None, option: str = "language") -> Self:
        """Return a translator into one language, of a model that translates into several. It shares the model.

        Args:
            language: one of `tokenizer.target_languages`; None: this is a model for one pair of languages.
            option: what messages call the language.

        Raises: ConfigError: see `text.sides.check_target`.
        """
        whole = self._whole or self
        tokenizer = whole.tokenizer
        is_needed = tokenizer.needs_language
        chosen = check_target(tokenizer.target_languages, language, "this model", option, is_needed=is_needed)
        if chosen is None:
            return whole
        made = copy(whole)
        made._whole, made.target_lang = whole, chosen
        made.tokenizer = IntoLanguage(tokenizer, chosen)
        made.search = replace(whole.search, tokenizer=made.tokenizer, reranker=None)
        made.languages = tuple(pair for pair in whole.languages if pair[1] == chosen)
        return made

    def by_ids(self) -> Self:
        """Return a translator whose texts are ids with spaces between them. It shares the model.

        A source is read exactly as it is given: its own marks of beginning and end are part of it.
        Raises: ConfigError: a shortlist, another engine or another model that ranks is in use.
        """
        if self.tokenizer.kind == "ids":
            return self
        search, config = self.search, getattr(self.model, "config", None)
        if search.shortlist is not None or search.engine is not None or search.reranker is not None or config is None:
            raise ConfigError(
                "ids are translated by the model's own search; leave out --shortlist, --rerank and another --engine,"
                " and give one model."
            )
        from manyheads.text.word_sides import sides_of_ids

        made = copy(self)
        made.tokenizer = sides_of_ids(config.source_vocab_size, config.target_vocab_size, self.tokenizer.target)
        made.search = replace(search, tokenizer=made.tokenizer)
        return made

    def reranked_by(self, reverse: TranslationModel, weight: float = 1.0) -> Self:
        """Return a translator that ranks each beam again with a model of the reverse direction. It shares the model.

        See `extras.reranking` for the scores. Of a model of several languages, call `into` first; of such a reverse
        model, the source language of this one is chosen.

        Args:
            reverse: translates the targets of this model into its sources.
            weight: of the reverse model's score.

        Raises: ConfigError: the reverse model translates other languages, a model is a parser, a target language is not
            chosen, or the weight is no finite number of at least 0.
        """
        made = copy(self)
        made.search = replace(self.search, reranker=load_entry(HOOKS["reranking"])(self, reverse, weight))
        return made

    @property
    def _has_to_choose(self) -> bool:
        """Whether each text names its target language, as none of several is chosen."""
        return bool(self.tokenizer.target_languages) and self.target_lang is None

    def stand_ins(self) -> Sequence[str]:
        """Return what `find_stand_ins` finds, once for a target language."""
        from manyheads.decoding.kept_texts import find_stand_ins

        if self.target_lang not in self._stand_ins:
            tag = tag_of(self.tokenizer.target_languages[0]) + " " if self._has_to_choose else ""
            settings = DecodingSettings(num_beams=1, max_new_tokens=8, rules=self.settings.rules)
            search = self.by_torch().search
            self._stand_ins[self.target_lang] = find_stand_ins(
                self.tokenizer, lambda texts: search.hypotheses([tag + text for text in texts], settings, None)
            )
        return self._stand_ins[self.target_lang]

    def _keeps_words(self, settings: DecodingSettings) -> bool:
        """Whether a search keeps words as they are; those of parsers and of tokenizers of words do not."""
        tokenizer = self.tokenizer
        is_on = settings.keep_words and not settings.is_constrained
        return is_on and tokenizer.kind != "word" and tokenizer.splits_lines

    def kept(self, texts: Sequence[str], settings: DecodingSettings) -> KeptTexts:
        """Return the rows of texts for a search in which some words are kept."""
        from manyheads.decoding.kept_texts import KeptTexts

        is_on, has_tags = self._keeps_words(settings), self._has_to_choose
        return KeptTexts(self.tokenizer, texts, settings, self.stand_ins, is_on=is_on, has_tags=has_tags)

    def by_torch(self) -> Self:
        """Return a translator that searches with this package's own search. It shares the model."""
        made = copy(self)
        made.search = replace(self.search, engine=None)
        return made

    def options(self, **overrides: Unpack[DecodingOverrides]) -> DecodingSettings:
        """Return the settings of a call. `do_sample=True` alone also sets num_beams to 1.

        Raises: ConfigError: an option is unknown, of the wrong type, out of range or without effect, or there is no
            beam to rerank.
            RequestError: see `check_ids`.
        """
        if overrides.get("do_sample") and "num_beams" not in overrides:
            overrides["num_beams"] = 1
        settings = self.settings
        if overrides:
            settings = overridden(settings, overrides)
        token = self.tokenizer.target
        check_ids(settings, vocab_size=token.vocab_size, pad_id=token.pad_id, eos_id=token.eos_id)
        check_target_limit(settings, self.model.max_len)
        pattern_grammar(settings, self.tokenizer, check=True)
        if self.search.reranker is not None:
            self.search.reranker.check(settings)
        return settings


def _load_model(folder: Path, tokenizer: TranslationTokenizer, device: torch.device) -> Seq2Seq:
    model = cast(Seq2Seq, load(folder, device=device))  # `model_folder` has checked what the folder is for
    _check_vocabularies(model.config, tokenizer, folder)
    return model


def _check_alike(first: Path, tokenizer: TranslationTokenizer, other: Path) -> None:
    """Raises: ConfigError: a model has another tokenizer or other languages than the first one of an ensemble."""
    from manyheads.text.of_folder import load_tokenizer

    check_same_vocabulary(first, tokenizer.digest, other, load_tokenizer(other).digest)
    mine, its = read_languages(first), read_languages(other)
    if mine and its and set(mine) != set(its):
        shown = [", ".join(f"{source} to {target}" for source, target in pairs) for pairs in (its, mine)]
        raise ConfigError(
            f"{other} translates {shown[0]}, but {first} {shown[1]}; the models of an ensemble translate the same"
            " languages."
        )


def _check_vocabularies(config: Any, tokenizer: TranslationTokenizer, folder: Path) -> None:
    """Check that the model has a row for every id of a text, and the tokenizer a text for every id of the model.

    Raises: ModelFileError: model and tokenizer do not match.
    """
    if not tokenizer.fits(config.source_vocab_size, config.target_vocab_size):
        raise ModelFileError(
            f"{folder}: the model knows {config.source_vocab_size:,} source and {config.target_vocab_size:,} target"
            f" ids, its tokenizer {tokenizer.source.vocab_size:,} and {tokenizer.target.vocab_size:,}; they do not fit."
        )
