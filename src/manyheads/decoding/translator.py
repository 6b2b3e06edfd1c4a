"""Translation of text: model, tokenizer and decoding settings in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from pathlib import Path
from typing import Any, Self, Unpack, cast, overload

import torch

from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.pretrained import load, read_config, read_languages, save_pretrained
from manyheads.architectures.protocols import Scorable, Searchable
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import ARCHITECTURES
from manyheads.config.build import build
from manyheads.decoding.compiled import CompiledSteps
from manyheads.decoding.constraints import check_ids
from manyheads.decoding.device import Precision, choose_device, choose_precision, inference, narrow, pack
from manyheads.decoding.engines import EngineName, SearchEngine, open_engine
from manyheads.decoding.generation_config import load_settings
from manyheads.decoding.grammar import Grammar, TreeGrammar
from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.scoring import token_log_probs
from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingOverrides, DecodingSettings
from manyheads.decoding.shortlist import Shortlist
from manyheads.decoding.translation import Scored, Translation, one_line
from manyheads.decoding.truncation import check_target_limit, fit, scored_limit, source_limit
from manyheads.errors import ModelFileError, RequestError
from manyheads.text.into_language import IntoLanguage
from manyheads.text.languages import LanguagePair
from manyheads.text.marian import MarianTokenizer
from manyheads.text.parsing_tokenizer import ParsingTokenizer
from manyheads.text.sides import Side, TranslationTokenizer, has_tokenizer, load_tokenizer
from manyheads.text.tags import check_target
from manyheads.text.tokenizer import Tokenizer

__all__ = ["Scored", "Translation", "Translator"]

Told = Callable[[int], None]


class Translator:
    """A model that translates text.

        translator = Translator.from_pretrained("runs/demo")
        translator("I am hungry.")  # a text for a text, a list for a list; the same as `translate`
        translator(["I am hungry.", "Thank you."], num_beams=8)

    Args:
        model: searchable; `score` also needs it to be `Scorable`. It is put into evaluation mode.
        tokenizer: of both sides: a `Tokenizer` for both languages, or another toolkit's.
        settings: default decoding options of all calls; default `DecodingSettings()`.
        device: the device of the model; `auto` chooses one.
        precision: `fp32`; `bf16` by autocast; `auto`: the faster one of these on the device; `int8`: large products
            with weights and rows quantised to 8 bits, on a CPU where that is faster.
        compile_steps: compile a step of the search (see `compiled.CompiledSteps`); the first batch is slow.
        shortlist: search only candidates for each batch and not the whole vocabulary; not with compile_steps.

    Attributes: languages: source and target of each direction that the model folder records; empty if unknown.
        target_lang: the target language, of a translator made by `into`.

    Raises: RequestError: no such device or precision; an option contains ids outside the vocabulary; the model's steps
        cannot be compiled, or there is no compiler.
    """

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
    ) -> None:
        self.device = choose_device(device)
        self.model = model.to(self.device).eval() if isinstance(model, torch.nn.Module) else model
        self.tokenizer = tokenizer
        self.settings = DecodingSettings() if settings is None else settings
        self.precision = choose_precision(precision, self.device)
        if self.precision == "int8" and isinstance(self.model, torch.nn.Module):
            pack(self.model, "int8")
        self.languages: tuple[LanguagePair, ...] = ()
        self._whole: Self | None = None
        self.target_lang: str | None = None
        if shortlist is not None:
            _check_shortlist(shortlist, tokenizer, compile_steps)
        self._shortlist = shortlist
        self._searched: Searchable = CompiledSteps(self.model) if compile_steps else self.model
        self._engine: SearchEngine | None = None

    def __repr__(self) -> str:
        config = getattr(self.model, "config", None)
        name = getattr(config, "architecture", type(self.model).__name__)
        pairs = ", ".join(f"{source} to {target}" for source, target in self.languages) or "languages not recorded"
        return f"Translator({name}, {pairs}, {self.tokenizer.target.vocab_size:,} ids, {self.device}, {self.precision})"

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
        revision: str | None = None,
        shortlist: int | None = None,
        engine: EngineName = "torch",
    ) -> Self:
        """Load a translator from a model folder, a run folder, or `owner/name` on the Hugging Face hub.

        `revision` is a branch, tag or commit of a model on the hub.
        With `bf16` its linear layers are cast permanently (see `device.narrow`): the model cannot be trained or saved.
        On a CPU a second copy of their weights may be kept in a faster layout (see `device.pack`).

        Args:
            shortlist: use the folder's shortlist, with so many frequent words and translations of each source word.
            engine: what searches: `torch`; `ctranslate2`, on the CPU in fp32 and without token log-probabilities, with
                an export that is kept beside the model; `auto`: ctranslate2 if it has all options of a call and is
                faster in a measurement, else torch (see `choose_engine`).

        Raises: ModelFileError: a file is missing, damaged or refused. ConfigError, DataError: the content of a file is
            invalid, or CTranslate2 cannot hold the model. RequestError: the engine has no such device or precision.
            MissingExtraError: the engine is not installed.
        """
        folder = resolve_model_path(path, revision=revision)
        chosen = choose_device(device)
        architecture = read_config(folder).architecture
        if ARCHITECTURES[architecture].task != "translation":
            raise ModelFileError(
                f"{folder} holds a {architecture}, a language model, which does not translate; generate text with it:"
                " manyheads generate."
            )
        if not has_tokenizer(folder):
            raise ModelFileError(
                f"{folder} has no tokenizer.json, so it cannot translate text; save the model with its tokenizer."
            )
        tokenizer = load_tokenizer(folder)
        model = cast(Seq2Seq, load(folder, device=chosen))
        words: Shortlist | None = None
        if shortlist is not None:
            sizes = model.config.source_vocab_size, model.config.target_vocab_size
            words = Shortlist.load(folder, shortlist, vocabulary=tokenizer.digest, sizes=sizes)
        _check_vocabularies(model.config, tokenizer, folder)
        chosen_precision = choose_precision(precision, chosen)
        narrow(model, chosen_precision)
        pack(model, chosen_precision)
        made = cls(
            model,
            tokenizer,
            load_settings(folder),
            chosen,
            chosen_precision,
            compile_steps=compile_steps,
            shortlist=words,
        )
        made.languages = read_languages(folder)
        made._engine = open_engine(engine, folder, runs_plainly=made._other_way())
        return made

    def engine_for(self, settings: DecodingSettings, longest: int = 0) -> SearchEngine | None:
        """Return the engine that does a search with these settings instead of torch, if there is one.

        Unlike `translate`, it returns None for options that the engine does not support, whether or not the engine was
        asked for by name.

        Args: longest: tokens of the longest source.
        """
        if self._engine is None or longest > self._engine.longest_source:
            return None
        try:
            return self._engine if self._takes(settings) else None
        except RequestError:
            return None

    def choose_engine(self, settings: DecodingSettings) -> str:
        """Decide which engine searches with these settings, and return a sentence that names it and the reason.

        With `auto` the first call measures both; calls of `translate` decide by themselves, so this one only tells.

        Raises: RequestError: the engine that was asked for has no such option.
        """
        self._takes(settings)
        return "engine torch" if self._engine is None else self._engine.choice

    def _takes(self, settings: DecodingSettings) -> bool:
        """Return whether the other engine does a search."""

        def own_search(sources: Sequence[list[int]], settings: DecodingSettings) -> list[list[Hypothesis]]:
            return self._search_ids(sources, settings, range(len(sources)))

        return self._engine is not None and self._engine.takes(settings, own_search)

    def _other_way(self) -> str:
        """Return how the model runs if not in float32 on the CPU by its own steps; "" if it does."""
        if self.device.type != "cpu":
            return f"is on {self.device}"
        if self.precision != "fp32":
            return f"has precision {self.precision}"
        if self._shortlist is not None:
            return "has a shortlist"
        return "has compiled steps" if isinstance(self._searched, CompiledSteps) else ""

    def save_pretrained(self, path: str | Path) -> None:
        """Write a model folder that `from_pretrained` reads: weights, tokenizer, settings and languages.

        An existing folder is replaced, at once and completely.

        Raises: RequestError: the model is not one of this package. SaveError: it could not be written, or its weights
            were rounded by `precision` bf16.
        """
        if not isinstance(self.model, Seq2Seq):
            raise RequestError(f"a {type(self.model).__name__} has no config, so it cannot be saved as a model folder.")
        whole = self._whole or self  # into one language, it is still a model of all of them
        save_pretrained(
            self.model, path, tokenizer=whole.tokenizer, generation=self.settings, languages=whole.languages
        )

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device. Returns: this translator.

        Translators that `into` made before share the model, and must be made again.

        Raises: RequestError: there is no such device, or it has no products in this precision.
        """
        chosen = choose_device(device)
        choose_precision(self.precision, chosen)
        if self._whole is not None:
            self._whole.to(chosen)
        if self._engine is not None and chosen.type != "cpu":
            raise RequestError(
                f"the engine of this translator runs on the CPU, not on {chosen}; load it with engine torch."
            )
        if isinstance(self.model, torch.nn.Module):
            self.model.to(chosen)
            pack(self.model)  # the copies of weights in a faster layout belong to a device
        self.device = chosen
        if isinstance(self._searched, CompiledSteps):
            self._searched = CompiledSteps(self.model)
        return self

    def into(self, language: str | None, option: str = "language") -> Self:
        """Return a translator into one language, of a model that translates into several. It shares the model.

        Args:
            language: one of `tokenizer.target_languages`; None: this is a model for one pair of languages.
            option: what messages call the language.

        Raises: ConfigError: see `text.tags.check_target`.
        """
        whole = self._whole or self
        needed = not isinstance(whole.tokenizer, MarianTokenizer)
        chosen = check_target(whole.tokenizer.target_languages, language, "this model", option, is_needed=needed)
        if chosen is None:
            return whole
        made = copy(whole)
        made._whole, made.target_lang = whole, chosen
        made.tokenizer = IntoLanguage(whole.tokenizer, chosen)
        made.languages = tuple(pair for pair in whole.languages if pair[1] == chosen)
        return made

    def options(self, **overrides: Unpack[DecodingOverrides]) -> DecodingSettings:
        """Return the settings of a call. `do_sample=True` alone also sets num_beams to 1.

        Raises: ConfigError: an option is unknown, of the wrong type or out of range. RequestError: see `check_ids`.
        """
        if overrides.get("do_sample") and "num_beams" not in overrides:
            overrides["num_beams"] = 1
        settings = self.settings
        if overrides:
            settings = build(DecodingSettings, {**vars(settings), **overrides}, "the decoding options")
        token = self.tokenizer.target
        check_ids(settings, vocab_size=token.vocab_size, pad_id=token.pad_id, eos_id=token.eos_id)
        check_target_limit(settings, self.model.max_len)
        return settings

    @overload
    def translate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        texts: str,
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> str: ...
    @overload
    def translate(
        self,
        texts: Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[str]: ...
    def translate(
        self,
        texts: str | Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> str | list[str]:
        """Return the best translation of each text, in order; a string for a string. An empty text gives an empty text.

        The lines of a text are translated one by one, and the line breaks are kept. (For a parser, a line break stands
        between two words, as a space does.)

        Args:
            texts: one text or several.
            stop: called before each step; if it returns true, SearchStopped is raised.
            told: called after each batch with the number of finished lines (empty lines are not counted).
            overrides: any field of `DecodingSettings`, for this call.

        Raises: RequestError: a text is too long or not a string. ConfigError: a bad option. DataError: a text is not
            valid Unicode.
        """
        if isinstance(texts, str):
            return self.translate([texts], stop=stop, told=told, **overrides)[0]
        _check_texts(texts)
        settings = self.options(**overrides)
        lines = [[text] if isinstance(self.tokenizer, ParsingTokenizer) else text.split("\n") for text in texts]
        numbers = [number for number, of_text in enumerate(lines, 1) for _ in of_text]
        flat = [line for of_text in lines for line in of_text]
        found = iter(self._best_texts(self._search(flat, settings, stop, told=told, numbers=numbers)))
        return [_joined(list(islice(found, len(of_text)))) for of_text in lines]

    __call__ = translate

    @overload
    def translate_nbest(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        texts: str,
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        first_number: int = 1,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[Translation]: ...
    @overload
    def translate_nbest(
        self,
        texts: Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        first_number: int = 1,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[list[Translation]]: ...
    def translate_nbest(
        self,
        texts: str | Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        first_number: int = 1,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[Translation] | list[list[Translation]]:
        """Return up to num_return_sequences translations of each text, best first; one list for a string.

        Other arguments and errors are those of `translate`. A text is one sentence here: a line break in it counts as a
        space. An empty text gives one empty translation with score 0 and no tokens.

        Args: first_number: number of the first text in messages and for sampling, if the texts are one block of many.
        """
        if isinstance(texts, str):
            return self.translate_nbest([texts], stop=stop, told=told, first_number=first_number, **overrides)[0]
        found = self._search(texts, self.options(**overrides), stop, first_number - 1, told)
        empty = Translation("", 0.0, [], [])
        return [[self._translation(hypothesis) for hypothesis in hypotheses] or [empty] for hypotheses in found]

    def translate_lines(
        self,
        lines: Iterable[str],
        *,
        lines_at_once: int = 256,
        stop: Callable[[], bool] | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> Iterator[str]:
        """Translate a stream: read `lines_at_once` lines, yield their translations in order, and repeat.

        One line gives one line: a line break in the model's output becomes a space. Options are checked before the
        first line is read.

        Raises: as `translate`; texts are numbered over the whole stream.
        """
        return self._stream(iter(lines), lines_at_once, self.options(**overrides), stop)

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        sources: str,
        references: str,
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        first_number: int = 1,
    ) -> Scored: ...
    @overload
    def score(
        self,
        sources: Sequence[str],
        references: Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        first_number: int = 1,
    ) -> list[Scored]: ...
    def score(
        self,
        sources: str | Sequence[str],
        references: str | Sequence[str],
        *,
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
        first_number: int = 1,
    ) -> Scored | list[Scored]:
        """Return the token log-probabilities of each reference given its source; one result for two strings.

        An empty reference consists of EOS only. A text that is too long for the model or for max_tokens is refused or
        truncated, as `too_long` says.

        Args:
            told: called after each batch with the number of finished pairs.
            first_number: number of the first pair in messages, if the pairs are one block of many.

        Raises: RequestError: unequal counts, a text that is too long, or a model that cannot score.
        """
        if isinstance(sources, str) and isinstance(references, str):
            return self.score([sources], [references], stop=stop, told=told, first_number=first_number)[0]
        if not isinstance(self.model, Scorable):
            raise RequestError(f"a {type(self.model).__name__} gives no log-probabilities of whole targets.")
        if isinstance(sources, str) or isinstance(references, str) or len(sources) != len(references):
            raise RequestError(
                f"{len(sources)} sources but {len(references)} references; give two lists of equal length, or two"
                " strings."
            )
        reader, token = self.tokenizer.source, self.tokenizer.target
        source_ids = [[*ids, reader.eos_id] for ids in self._encode(sources, reader)]
        labels = [[*ids, token.eos_id] for ids in self._encode(references, token)]
        numbers = range(first_number, first_number + len(labels))
        limit, reason = scored_limit(self.settings, self.model.max_len)
        source_ids, labels = (
            fit(rows, numbers, limit, reason, too_long=self.settings.too_long, what=what)
            for what, rows in (("source", source_ids), ("reference", labels))
        )
        with inference(self.device, self.precision):
            found = token_log_probs(
                self.model,
                source_ids,
                [[token.bos_id, *ids] for ids in labels],
                pad_id=token.pad_id,
                max_tokens=self.settings.max_tokens,
                vocab_size=token.vocab_size,
                device=self.device,
                stop=stop,
                told=told,
            )
        return [Scored(token.tokens(ids), row) for ids, row in zip(labels, found, strict=True)]

    def _stream(
        self, lines: Iterator[str], count: int, settings: DecodingSettings, stop: Callable[[], bool] | None
    ) -> Iterator[str]:
        first = 0
        while texts := list(islice(lines, count)):
            yield from map(one_line, self._best_texts(self._search(texts, settings, stop, first)))
            first += len(texts)

    def _search(
        self,
        texts: Sequence[str],
        settings: DecodingSettings,
        stop: Callable[[], bool] | None,
        first: int = 0,
        told: Told | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each text; an empty list for an empty text.

        Args: first: number of earlier texts. numbers: of the texts in messages; None: first + 1, first + 2, ...
        """
        reader = self.tokenizer.source
        encoded = self._encode(texts, reader)
        full = [place for place, ids in enumerate(encoded) if ids and texts[place].strip()]
        sources = [[*encoded[place], reader.eos_id] for place in full]
        named = [first + place + 1 if numbers is None else numbers[place] for place in full]
        sources = fit(sources, named, *source_limit(settings, self.model.max_len), too_long=settings.too_long)
        results: list[list[Hypothesis]] = [[] for _ in texts]
        if self._engine is not None and self._takes(settings):
            found = self._engine.search(sources, settings, stop=stop, told=told)
        else:
            found = self._search_ids(sources, settings, [first + place for place in full], stop, told)
        for place, hypotheses in zip(full, found, strict=True):
            results[place] = hypotheses
        return results

    def _search_ids(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        indices: Sequence[int],
        stop: Callable[[], bool] | None = None,
        told: Told | None = None,
    ) -> list[list[Hypothesis]]:
        """Search with our own search. indices: see `search_all`."""
        writer = self.tokenizer.target
        with inference(self.device, self.precision):
            return search_all(
                self._searched,
                sources,
                settings,
                pad_id=writer.pad_id,
                bos_id=writer.bos_id,
                eos_id=writer.eos_id,
                device=self.device,
                indices=indices,
                grammar=self.grammar(settings),
                stop=stop,
                told=told,
                shortlist=self._shortlist,
            )

    def grammar(self, settings: DecodingSettings) -> Grammar | None:
        """Return the outputs that the options permit; None: all."""
        if not (settings.well_formed and isinstance(self.tokenizer, ParsingTokenizer)):
            return None
        return TreeGrammar(self.tokenizer)

    def _encode(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        _check_texts(texts)
        return side.encode_batch(list(texts))

    def _best_texts(self, found: list[list[Hypothesis]]) -> list[str]:
        return self.tokenizer.target.decode_batch([hypotheses[0].ids if hypotheses else [] for hypotheses in found])

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        writer = self.tokenizer.target
        ids = [*hypothesis.ids, writer.eos_id] if hypothesis.ended else hypothesis.ids
        text = writer.decode(hypothesis.ids)
        return Translation(text, hypothesis.score, writer.tokens(ids), hypothesis.token_log_probs)


def _check_texts(texts: Sequence[str]) -> None:
    """Raises: RequestError: a text is not a string."""
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"text {place + 1} is a {type(text).__name__}; texts are strings.")


def _joined(lines: list[str]) -> str:
    """Return the translations of a text's lines as one text with as many lines."""
    return lines[0] if len(lines) == 1 else "\n".join(map(one_line, lines))


def _check_vocabularies(config: Any, tokenizer: TranslationTokenizer, folder: Path) -> None:
    """Check that the model has a row for every id of a text, and the tokenizer a text for every id of the model.

    Raises: ModelFileError: model and tokenizer do not match.
    """
    target = tokenizer.target
    fewest = target.num_target_ids if isinstance(target, Tokenizer) else target.vocab_size
    most = target.vocab_size if isinstance(target, Tokenizer) else config.target_vocab_size
    if tokenizer.source.vocab_size > config.source_vocab_size or not fewest <= config.target_vocab_size <= most:
        raise ModelFileError(
            f"{folder}: the model knows {config.source_vocab_size:,} source and {config.target_vocab_size:,} target"
            f" ids, its tokenizer {tokenizer.source.vocab_size:,} and {target.vocab_size:,}; they do not fit."
        )


def _check_shortlist(shortlist: Shortlist, tokenizer: TranslationTokenizer, compile_steps: bool) -> None:
    """Raises: RequestError: the shortlist cannot be used with this tokenizer, or with compiled steps."""
    if compile_steps:
        raise RequestError(
            "a shortlist changes the vocabulary of every batch, so steps with it cannot be compiled;"
            " leave out --compile or --shortlist."
        )
    if isinstance(tokenizer, ParsingTokenizer):
        raise RequestError("shortlists are for translators; this model is a parser, so leave out --shortlist.")
    if shortlist.vocabulary != tokenizer.digest:
        raise RequestError(
            f"the shortlist was learned with another vocabulary ({shortlist.vocabulary[:12]}) than the model's"
            f" ({tokenizer.digest[:12]}); learn it again: manyheads shortlist."
        )
