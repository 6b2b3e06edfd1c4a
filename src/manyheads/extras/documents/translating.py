"""Translation of a document: the model translates its sentences, and the document is rebuilt from the translations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from manyheads.decoding.inputs_and_results import Hypothesis, Translation, is_degenerate, source_limit
from manyheads.decoding.kept_texts import (
    MOST_STAND_INS,
    Shown,
    has_all,
    in_sentence_case,
    is_in_capitals,
    quality,
    restored,
    show,
)
from manyheads.extras.constrained.forced import translate_forced
from manyheads.extras.documents.parts import Document, Part, Text
from manyheads.extras.documents.placing import Sentence, align, place, sentences_of, split_at_clauses, unchanged
from manyheads.extras.documents.terms import Terms, contains
from manyheads.text.words import is_loose, kept_index, private, with_letters

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator

AGAIN: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "min_new_tokens": 2}
"""Decoding settings of the second search, after an output that degenerated."""
MOST_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Unit:
    """A text that is translated once, even if it occurs several times.

    aligned: its words are aligned with those of the translation, to place markup.
    """

    text: str
    aligned: bool


@dataclass(frozen=True, slots=True)
class Work:
    """Work for the model within the translation of units.

    Args:
        kind: `search`: translate the texts; `compare`: translate each and its other form, and return whether the other
            one's translation is better (see `kept_texts.quality`), and the better translation; `force`: translate them
            with the phrases in the translations (see `forced.translate_forced`); `align`: align each text with its
            translation (see `alignment.align`).
        texts: sources; may be empty. others: for each text its other form, its phrases, its translation, or nothing.
        overrides: fields of `DecodingSettings` for the search.
    """

    kind: Literal["search", "compare", "force", "align"]
    texts: list[str]
    others: list[Any] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)

    def better(self, found: Sequence[tuple[str, Hypothesis | Translation] | None]) -> list[tuple[bool, str]]:
        """Return the results of `compare`. Args: found: the best translations of the texts, then of the others."""
        every = zip([*self.texts, *self.others], found, strict=True)
        rated = [(quality(text, *one), one[0]) if one else ((False, -math.inf), "") for text, one in every]
        pairs = zip(rated[: len(self.texts)], rated[len(self.texts) :], strict=True)
        return [(other[0] > own[0], (other if other[0] > own[0] else own)[1]) for own, other in pairs]


# Yields work; is sent its results, one for each text; returns a JSON record of each unit's translation.
WorkOfUnits: TypeAlias = Generator[Work, list[Any], list[str]]


@dataclass(frozen=True, slots=True)
class _Found:
    """A unit's translation.

    text: with the private characters of kept words. alignment: see `placing.AlignedToken`. again: it was searched
    again. degenerate: the second search did not help. wanted, met: the number of its terms, and of those in it.
    """

    text: str
    alignment: list[tuple[int, int, int, int]] = field(default_factory=list)
    again: bool = False
    degenerate: bool = False
    wanted: int = 0
    met: int = 0


@dataclass
class DocumentReport:
    """Counts of a translated document, and for some of them the first lines where they occurred."""

    segments: int = 0
    sentences: int = 0
    repeated: int = 0
    divided: int = 0
    moved: int = 0
    again: int = 0
    degenerate: int = 0
    terms: int = 0
    terms_met: int = 0
    kept: int = 0
    outside: int = 0
    lines: dict[str, list[int]] = field(default_factory=dict)

    def note(self, what: str, count: int, line: int) -> None:
        """Add to a count, and keep the line if it is one of the first."""
        if count:
            setattr(self, what, getattr(self, what) + count)
            known = self.lines.setdefault(what, [])
            if len(known) < MOST_EXAMPLES and line not in known:
                known.append(line)

    def describe(self) -> list[str]:
        """Return the counts as lines for a reader."""
        repeated = f", {self.repeated:,} of them repeated" if self.repeated else ""
        told = [f"{self.segments:,} segments, {self.sentences:,} sentences{repeated}"]
        if self.terms:
            told.append(f"terms in the translation: {self.terms_met:,} of {self.terms:,}{self._where('terms_met')}")
        for name, what in _TOLD.items():
            if count := getattr(self, name):
                told.append(f"{what}: {count:,}{self._where(name)}")
        return told

    def _where(self, name: str) -> str:
        lines = self.lines.get(name)
        return f" (line {', '.join(str(one) for one in lines)})" if lines and name != "terms_met" else ""


_TOLD = {
    "divided": "sentences that are too long for the model, divided at clauses",
    "moved": "tags and kept words without a place, moved to the end of their sentence",
    "again": "empty or repetitive translations, searched again with a repetition penalty",
    "degenerate": "of these, still empty or repetitive",
    "kept": "segments left in the source language, because they cannot be changed without damage",
    "outside": "texts that belong to no subtitle, not translated",
}


class DocumentTranslation:
    """The sentences of a document, and the translated document.

    Args:
        document: see `documents.formats.read_document`.
        split: cuts a text into sentences (see `extras.documents.sentence_ends.split_sentences`).
        fits: whether a text is short enough for the model (see `UnitTranslator.fits`).
        keep_words: see `UnitTranslator.keep_words`.

    Attributes: units: what is to be translated, each once.
    """

    def __init__(
        self,
        document: Document,
        split: Callable[[str], Sequence[str]],
        fits: Callable[[str], bool],
        *,
        keep_words: bool = True,
    ) -> None:
        self._document = document
        self._report = DocumentReport(segments=len(document.segments))
        for what, places in (("kept", document.left), ("outside", document.outside)):
            for start in places:
                self._report.note(what, 1, document.line_at(start))
        self._segments: list[list[Sentence] | None] = []
        units: dict[Unit, int] = {}
        for segment in document.segments:
            sentences = sentences_of(segment.parts, split, keep_words=keep_words)
            if sentences is None:
                self._report.note("kept", 1, document.line_of(segment))
                self._segments.append(None)
                continue
            pieces = []
            for sentence in sentences:
                divided = split_at_clauses(sentence, fits) if sentence.is_text else [sentence]
                self._report.sentences += sentence.is_text
                self._report.note("divided", len(divided) > 1, document.line_of(segment))
                pieces += divided
            self._segments.append(pieces)
            for piece in pieces:
                if piece.is_text:
                    unit = _unit(piece)
                    self._report.repeated += unit in units
                    units.setdefault(unit, len(units))
        self._numbers = units
        self.units = list(units)

    def finish(self, records: Sequence[str]) -> tuple[str, DocumentReport]:
        """Return the translated document.

        Args: records: of `UnitTranslator.translate`, for all units in order.
        """
        found = [_Found(**json.loads(record)) for record in records]
        translations: list[list[Part] | None] = []
        for segment, sentences in zip(self._document.segments, self._segments, strict=True):
            if sentences is None or not any(sentence.is_text for sentence in sentences):
                translations.append(None)
                continue
            line = self._document.line_of(segment)
            parts: list[Part] = []
            for sentence in sentences:
                if sentence.before:
                    parts.append(Text(sentence.before))
                if not sentence.is_text:
                    parts += unchanged(sentence)
                    continue
                one = found[self._numbers[_unit(sentence)]]
                placed, moved = place(sentence, _restored(one.text, sentence), one.alignment)
                parts += placed
                counts = {"moved": moved, "again": one.again, "degenerate": one.degenerate}
                for name, count in (counts | {"terms": one.wanted, "terms_met": one.met}).items():
                    self._report.note(name, int(count), line)
            translations.append(parts)
        text, kept = self._document.with_translations(translations)
        for index in kept:
            self._report.note("kept", 1, self._document.line_of(self._document.segments[index]))
        return text, self._report


def _unit(sentence: Sentence) -> Unit:
    """Kept words are numbered within the unit, so that equal sentences of different segments are one unit."""
    numbers: dict[str, int] = {}
    chars = []
    for char in sentence.text:
        if kept_index(char) is not None:
            char = private(numbers.setdefault(char, len(numbers)), is_loose(char))
        chars.append(char)
    return Unit("".join(chars), any(0 < place < len(sentence.text) for place, _ in sentence.marks))


def _restored(text: str, sentence: Sentence) -> str:
    """Return a unit's translation with the sentence's own numbers of kept words."""
    own = list(dict.fromkeys(char for char in sentence.text if kept_index(char) is not None))
    return "".join(
        own[index] if (index := kept_index(char)) is not None and index < len(own) else char for char in text
    )


class UnitTranslator:
    """Translates units.

    Args:
        translator: the model.
        terms: forced into the translations.
        overrides: fields of `DecodingSettings`.

    Attributes: keep_words: see `DecodingSettings`.
    """

    def __init__(self, translator: Translator, terms: Terms, overrides: dict[str, Any]) -> None:
        self._translator = translator
        self._terms = terms
        self._overrides = {**overrides, "num_return_sequences": 1}
        settings = translator.options(**self._overrides)
        self.keep_words = settings.keep_words
        self._again = self._overrides | AGAIN
        if settings.max_new_tokens == 1:
            self._again["min_new_tokens"] = 1
        self._limit = source_limit(settings, translator.model.max_len)[0]

    def fits(self, text: str) -> bool:
        """Whether a sentence is short enough for the model, and has few enough kept words."""
        kept = sum(kept_index(char) is not None for char in text)
        size = len(self._translator.tokenizer.source.encode(with_letters(text))) + 1
        return size <= self._limit and kept <= MOST_STAND_INS

    def translate(
        self,
        units: Sequence[Unit],
        on_progress: Callable[[int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Return a JSON record of each unit's translation.

        Raises: as `Translator.translate`.
        """
        work = self.work(units)
        results: list[Any] | None = None
        is_first = True
        while True:
            try:
                one = work.send(results) if results is not None else next(work)
            except StopIteration as end:
                records: list[str] = end.value
                return records
            results = self._do(one, on_progress if is_first else None, stop)
            is_first = False

    def _do(self, work: Work, on_progress: Callable[[int], None] | None, stop: Callable[[], bool] | None) -> list[Any]:
        if not work.texts:
            return []
        if work.kind == "search":
            is_again = work.overrides == self._again  # with options that another engine may lack
            translator = self._translator.by_torch() if is_again else self._translator
            return translator.translate(work.texts, on_progress=on_progress, stop=stop, **work.overrides)
        if work.kind == "compare":
            both = [*work.texts, *work.others]
            best = [one[0] for one in self._translator.translate_nbest(both, stop=stop, **work.overrides)]
            return work.better([(one.text, one) for one in best])
        if work.kind == "force":
            settings = self._translator.options(**work.overrides)
            runner, tokenizer = self._translator.runner, self._translator.tokenizer
            found = translate_forced(runner, tokenizer, work.texts, work.others, settings, stop=stop)
            return [one.text for one in found]
        return [align(self._translator, *pair) for pair in zip(work.texts, work.others, strict=True)]

    def work(self, units: Sequence[Unit]) -> WorkOfUnits:
        """Return a generator that yields the work for the model, so that a server can do it among other requests."""
        shown = [self._shown(unit) for unit in units]
        sources = [one.text for one in shown]
        texts = list((yield Work("search", sources, overrides=self._overrides)))
        cased = self._in_sentence_case(units)
        compared = [sources[one] for one in cased], [one.text for one in cased.values()]
        better = yield Work("compare", *compared, self._overrides)
        for (where, other), (is_other, text) in zip(cased.items(), better, strict=True):
            texts[where] = text
            if is_other:
                shown[where], sources[where] = other, other.text
        bad = [place for place, text in enumerate(texts) if is_degenerate(sources[place], text)]
        repaired = yield Work("search", [sources[one] for one in bad], overrides=self._again)
        for where, text in zip(bad, repaired, strict=True):
            texts[where] = text if text.strip() else texts[where]
        terms = [self._terms.of(text) for text in sources]
        lacking = [
            where
            for where, text in enumerate(texts)
            if not has_all(shown[where], text) or not all(contains(text, term.target) for term in terms[where])
        ]
        phrases_of = [[*(term.target for term in terms[one]), *shown[one].names] for one in lacking]
        forced = yield Work("force", [sources[one] for one in lacking], phrases_of, self._overrides)
        for where, text in zip(lacking, forced, strict=True):
            if not is_degenerate(sources[where], text) or is_degenerate(sources[where], texts[where]):
                texts[where] = text
        # Spaces around a sentence are the document's; two at the end of a line would be a line break in Markdown.
        texts = [_ended_like(source, text.strip()) for source, text in zip(sources, texts, strict=True)]
        marked = [where for where, unit in enumerate(units) if unit.aligned]
        pairs = [sources[one] for one in marked], [texts[one] for one in marked]
        alignments = dict(zip(marked, (yield Work("align", *pairs)), strict=True))
        return [
            json.dumps(
                asdict(
                    _Found(
                        text=restored(shown[where], texts[where])[0],
                        alignment=alignments.get(where, []),
                        again=where in bad,
                        degenerate=is_degenerate(sources[where], texts[where]),
                        wanted=len(terms[where]),
                        met=sum(contains(texts[where], term.target) for term in terms[where]),
                    )
                ),
                ensure_ascii=False,
            )
            for where in range(len(units))
        ]

    def _in_sentence_case(self, units: Sequence[Unit]) -> dict[int, Shown]:
        """Return number of a unit in capitals -> what the model reads of it in sentence case."""
        if not self.keep_words:
            return {}
        reader = self._translator.tokenizer.source
        found = {}
        for where, unit in enumerate(units):
            cased = in_sentence_case(unit.text, reader) if is_in_capitals(unit.text) else unit.text
            # Marks are places in the text, so its length must stay.
            if cased != unit.text and len(cased) == len(unit.text):
                found[where] = self._shown(replace(unit, text=cased))
        return found

    def _shown(self, unit: Unit) -> Shown:
        """Return what the model reads of a unit. Alignment counts characters, so each stand-in is then one letter."""
        names = self._translator.stand_ins()
        if unit.aligned:
            return show(unit.text, [name for name in names if len(name) == 1], is_aligned=True)
        return show(unit.text, names)


def _ended_like(source: str, text: str) -> str:
    """Return a translation without a final full stop if the source ends in a word, as headings do."""
    is_stop = text.endswith(".") and not text.endswith("..")
    return text[:-1] if is_stop and source.rstrip()[-1:].isalnum() else text
