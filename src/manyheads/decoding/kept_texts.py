"""Texts for a search in which some words are kept (see `text.words`), and the translations with these words.

A text becomes one row or several for the search, or none: a text without a letter is copied. Of a text in capitals a
second row is searched in sentence case; of both, the translation with the higher log-probability a token is taken.

A model seldom copies an address, and spells it wrongly where it has never seen one. It copies a name that it knows. So
such a name stands in the source, and the translation has the address in its place.

Two checks find repetitive output: one for a warning about the model, and a stricter one that starts a second search.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.decoding.inputs_and_results import Candidate, Hypothesis, Translation, is_degenerate
from manyheads.text.sides import TAG, Side, TranslationTokenizer, can_force
from manyheads.text.words import AFTER, BEFORE, LETTER, has_words, hide, is_loose, kept_index, stands, unhide

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings

_NAMES = ("Tom", "Maria", "Anna", "Peter", "David", "Martin", "Daniel", "Robert", "Linda", "Paul", "Laura", "Alex")
"""First names that many languages spell alike."""
_NAME_LETTERS = "XYZQWVKJ"
MOST_STAND_INS = 16
_FINAL_MARKS = ".!?…。！？"


@dataclass(frozen=True, slots=True)
class Shown:
    """A text as the model reads it.

    Args:
        text: with stand-ins.
        names: the stand-ins, in their order. kept: the private characters for which they stand.
        tight: for each, whether a letter or another kept word stands directly before it, and directly after it.
        before, after: emoji at the ends and white space beside them, which the model does not read.
        is_inside: `after` stands in front of the marks that end the text.
        lost: private characters for which there is no stand-in.
    """

    text: str
    names: tuple[str, ...] = ()
    kept: str = ""
    tight: tuple[tuple[bool, bool], ...] = ()
    before: str = ""
    after: str = ""
    is_inside: bool = False
    lost: str = ""


def find_stand_ins(
    tokenizer: TranslationTokenizer, search: Callable[[list[str]], list[list[Hypothesis]]]
) -> Sequence[str]:
    """Return the words that a model can have as stand-ins, the best first: names that it copies, then letters.

    Args: search: texts -> a hypothesis of each.
    """
    reader, writer = tokenizer.source, tokenizer.target

    def is_known(word: str) -> bool:
        return reader.decode(reader.encode(word)) == word and can_force(writer, word)

    names = [word for word in (*_NAMES, *map(str.lower, _NAMES)) if is_known(word)]
    letters = [letter for letter in (*_NAME_LETTERS, *_NAME_LETTERS.lower()) if is_known(letter)]
    copied = {
        name: hypothesis.sum_log_prob / len(hypothesis.token_log_probs)
        for name, [hypothesis] in zip(names, search([f"{name}." for name in names]), strict=True)
        if re.findall(r"\w+", writer.decode(hypothesis.ids)) == [name]
    }
    return (*sorted(copied, key=lambda name: -copied[name]), *letters)[:MOST_STAND_INS]


def show(text: str, names: Sequence[str], *, whole: bool = False, is_aligned: bool = False) -> Shown:
    """Return a text as the model reads it.

    Args:
        text: with private characters in place of kept words.
        names: stand-ins.
        whole: nothing is cut off at the ends.
        is_aligned: only characters are replaced, by single letters.
    """
    stop = len(text.rstrip(_FINAL_MARKS))
    start, end = 0, stop
    if not (whole or is_aligned) and any(map(is_loose, text)):
        start = len(text) - len(_without_loose_start(text))
        end = start + len(_without_loose_start(text[start:stop][::-1]))
    core = text[start:end] + text[stop:]
    used = core.casefold()
    free = [name for name in names if name.casefold() not in used]
    shown: list[str] = []
    stands_for: list[tuple[str, str, tuple[bool, bool]]] = []
    lost = ""
    for place, char in enumerate(core):
        if kept_index(char) is None:
            shown.append(char)
        elif len(stands_for) == len(free):
            lost += char
        else:
            before, after = core[place - 1 : place] if place else "", core[place + 1 : place + 2]
            tight = tuple(not is_aligned and _is_joined(one) for one in (before, after))
            shown += [" " * (tight[0] and shown[-1:] != [" "]), free[len(stands_for)], " " * tight[1]]
            stands_for.append((free[len(stands_for)], char, (tight[0], tight[1])))
    return Shown(
        text="".join(shown),
        names=tuple(name for name, _, _ in stands_for),
        kept="".join(char for _, char, _ in stands_for),
        tight=tuple(tight for _, _, tight in stands_for),
        before=text[:start],
        after=text[end:stop],
        is_inside=stop < len(text),
        lost=lost,
    )


def _is_joined(char: str) -> bool:
    """Whether a stand-in beside this character, or nothing, would be a part of its word."""
    return char != "" and (re.match(LETTER, char) is not None or kept_index(char) is not None)


def _without_loose_start(text: str) -> str:
    """Return a text without emoji at its start, and the white space beside them; as it is if it begins with none."""
    place = next((place for place, char in enumerate(text) if not (char.isspace() or is_loose(char))), len(text))
    return text[place:] if any(map(is_loose, text[:place])) else text


def has_all(shown: Shown, translation: str) -> bool:
    """Whether a translation contains every stand-in as a word."""
    return all(re.search(stands(name), translation) for name in shown.names)


def restored(shown: Shown, translation: str) -> tuple[str, str]:
    """Return a translation with private characters in place of stand-ins, and those that have no place in it."""
    text, lost = translation, shown.lost
    for name, char, tight in zip(shown.names, shown.kept, shown.tight, strict=True):
        # A stand-in may have become the beginning of a word; the rest of that word goes with it.
        found = re.search(stands(name), text) or re.search(rf"{BEFORE}{re.escape(name)}{LETTER}*", text)
        if found is None:
            lost += char
            continue
        before, after = text[: found.start()], text[found.end() :]
        text = (before.rstrip(" ") if tight[0] else before) + char + (after.lstrip(" ") if tight[1] else after)
        text = re.sub(rf"{BEFORE}{re.escape(name)}{AFTER}\s?", "", text)  # it stands for one word, and occurs once
    if shown.after and shown.is_inside:
        place = len(text.rstrip(_FINAL_MARKS))
        return shown.before + text[:place] + shown.after + text[place:], lost
    return shown.before + text + shown.after, lost


_LETTERS = re.compile(r"[^\W\d_]+")
_LEAST_CAPITALS = 4
_SENTENCE_ENDS = frozenset(".!?…。！？")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a text. text: with private characters. words: the kept words of the whole text.

    rows: number of a row -> what the model reads in it; empty: the part is copied.
    """

    text: str
    words: list[str]
    rows: dict[int, Shown]


class KeptTexts:
    """The rows of texts, and the translations of texts from those of the rows.

    Args:
        tokenizer: of a translator.
        texts: to be translated.
        settings: of the search.
        stand_ins: returns what `find_stand_ins` found.
        is_on: whether words are kept; otherwise a text is a row.
        has_tags: texts begin with the tag of their target language.

    Attributes: rows: what is to be searched. owners: the number of the text of each row.
    """

    def __init__(
        self,
        tokenizer: TranslationTokenizer,
        texts: Sequence[str],
        settings: DecodingSettings,
        stand_ins: Callable[[], Sequence[str]],
        *,
        is_on: bool,
        has_tags: bool = False,
    ) -> None:
        self._tokenizer, self._decode, self._stand_ins = tokenizer, tokenizer.target.decode, stand_ins
        self._is_whole = bool(settings.forced_prefix_ids)  # with which the one output of a text begins
        self._has_tags = has_tags
        self.rows: list[str] = []
        self.owners: list[int] = []
        self._pieces = [self._of_text(text, number, is_on) for number, text in enumerate(texts)]

    def _of_text(self, text: str, owner: int, is_on: bool) -> list[_Piece]:
        tag = TAG.match(text) if self._has_tags else None
        hidden, words = hide(text[tag.end() :] if tag else text) if is_on else (text, [])
        if not is_on or not text.strip() or not (words or is_in_capitals(hidden) or not has_words(hidden)):
            return [_Piece(text, [], {self._add_row(text, owner): Shown(text)})]
        parts = [hidden] if self._is_whole else _parts(hidden)
        return [self._piece(part, words, owner, tag[0] + " " if tag else "") for part in parts]

    def _piece(self, text: str, words: list[str], owner: int, tag: str) -> _Piece:
        if not has_words(text) and not self._is_whole:
            return _Piece(text, words, {})
        cases = [text, in_sentence_case(text, self._tokenizer.source)] if is_in_capitals(text) else [text]
        names = self._stand_ins() if words else ()
        shown = [show(one, names, whole=self._is_whole) for one in dict.fromkeys(cases)]
        return _Piece(text, words, {self._add_row(tag + one.text, owner): one for one in shown})

    def _add_row(self, text: str, owner: int) -> int:
        self.rows.append(text)
        self.owners.append(owner)
        return len(self.rows) - 1

    def lacking(
        self,
        found: Sequence[list[Hypothesis]],
        terms: Callable[[str, str], Sequence[str]] | None = None,
    ) -> dict[int, tuple[str, ...]]:
        """Return number of a row -> its phrases, for rows whose best translation lacks one: stand-ins, and terms.

        These are to be searched again with the phrases forced.

        Args:
            found: the hypotheses of each row.
            terms: what the model read, and its translation -> its terms, if the translation lacks one; None: none.
        """
        phrases: dict[int, tuple[str, ...]] = {}
        for row, shown in (self._chosen(piece, found) for pieces in self._pieces for piece in pieces if piece.rows):
            if found[row] and (shown.names or terms is not None):
                text = self._decode(found[row][0].ids)
                wanted = () if terms is None else terms(shown.text, text)
                if wanted or not has_all(shown, text):
                    phrases[row] = (*wanted, *shown.names)
        return phrases

    def candidates(
        self, found: Sequence[list[Hypothesis]], forced: Mapping[int, Hypothesis] | None = None
    ) -> list[list[Candidate]]:
        """Return the translations of each text, best first; none for an empty text.

        Args: found: the hypotheses of each row. forced: those of the rows that `lacking` named.
        """
        results = []
        for pieces in self._pieces:
            each = [self._of_piece(piece, found, forced or {}) for piece in pieces]
            ranks = range(max(map(len, each), default=0)) if all(each) else ()
            results.append([self._joined([one[min(rank, len(one) - 1)] for one in each]) for rank in ranks])
        return results

    def _of_piece(
        self, piece: _Piece, found: Sequence[list[Hypothesis]], forced: Mapping[int, Hypothesis]
    ) -> list[Candidate]:
        if not piece.rows:
            return [Candidate(unhide(piece.text, piece.words), Hypothesis([], 0.0, [], False))]
        row, shown = self._chosen(piece, found)
        best, others = found[row][:1], found[row][1:]
        candidates = []
        for hypothesis in [*([forced[row]] if row in forced else best), *others]:
            text, lost = restored(shown, self._decode(hypothesis.ids))
            text = " ".join([text, *lost]) if lost else text
            candidates.append(Candidate(unhide(text, piece.words), hypothesis))
        return candidates

    def _joined(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the translation of a text of several parts; EOS stands between the ids of two parts."""
        if len(candidates) == 1:
            return candidates[0]
        parts = [one.hypothesis for one in candidates if one.hypothesis.ids]
        eos_id, is_ended = self._tokenizer.target.eos_id, bool(parts) and parts[-1].ended
        ids = [index for part in parts for index in [*part.ids, *([eos_id] if part.ended else [])]]
        log_probs = [each for part in parts for each in part.token_log_probs]
        whole = Hypothesis(ids[:-1] if is_ended else ids, sum(part.score for part in parts), log_probs, is_ended)
        return Candidate("".join(one.text for one in candidates), whole)

    def _chosen(self, piece: _Piece, found: Sequence[list[Hypothesis]]) -> tuple[int, Shown]:
        """Return the row with the best translation, and what the model read in it."""

        def of_row(row: int) -> tuple[bool, float]:
            if not found[row]:
                return False, -math.inf
            best = found[row][0]
            return quality(piece.rows[row].text, self._decode(best.ids), best)

        if len(piece.rows) == 1:
            return next(iter(piece.rows.items()))
        row = max(piece.rows, key=of_row)
        return row, piece.rows[row]


def _parts(text: str) -> list[str]:
    """Return a text in parts: emoji behind the end of a sentence are the start of another part."""
    parts, start, stop = [], 0, 0  # stop: the place behind the last character that is no white space
    for place, char in enumerate(text):
        if is_loose(char) and stop > start and text[stop - 1] in _SENTENCE_ENDS:
            parts.append(text[start:stop])
            start = stop
        stop = stop if char.isspace() else place + 1
    return [*parts, text[start:]]


def quality(source: str, text: str, found: Hypothesis | Translation) -> tuple[bool, float]:
    """Return what is greater for the better one of two translations, of a text and of its sentence case."""
    each = found.token_log_probs
    return not is_degenerate(source, text), sum(each) / len(each) if each else found.score


def is_in_capitals(text: str) -> bool:
    """Whether a text, with private characters in place of kept words, is to be searched in sentence case, too."""
    return not any(map(str.islower, text)) and sum(map(str.isupper, text)) >= _LEAST_CAPITALS


def in_sentence_case(text: str, reader: Side) -> str:
    """Return a text in capitals with each word in the case that the vocabulary knows best."""

    def known(found: re.Match[str]) -> str:
        def cost(word: str) -> tuple[int, list[int]]:  # of two pieces the more frequent one has the lower id
            ids = reader.encode(word)
            return len(ids), ids

        word = found[0]
        return min((word.lower(), word.capitalize(), word), key=cost)

    cased = _LETTERS.sub(known, text)
    first = _LETTERS.search(cased)
    return cased if first is None else cased[: first.start()] + first[0][0].upper() + cased[first.start() + 1 :]
