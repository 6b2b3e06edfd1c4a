"""The sentences of a segment: the text for the model, the words that are kept, and the positions of markup."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from manyheads.extras.documents.parts import Part, Tag, Text
from manyheads.text.words import KEPT, MAX_KEPT, PRIVATE, has_words, private

# Where a long sentence is divided, the best places first: after clauses, before conjunctions, between words.
CLAUSE_ENDS = (
    re.compile(r"(?<=[;:])\s+|(?<=[。；：])|(?<!\s)\s+(?=[–—]\s)"),
    re.compile(r"(?<=,)\s+|(?<=[，、])|(?<=\))\s+|(?<!\s)\s+(?=\()"),
    re.compile(
        r"(?<!\s)\s+(?=(?:and|or|but|because|which|that|while|when|if|und|oder|aber|weil|dass|wenn|et|ou|mais|que)\b)"
    ),
    re.compile(r"\s+"),
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence, or a clause of one that was too long.

    Args:
        text: has a private character in place of each word that is kept: `private(index in kept)`.
        kept: those words, of the whole segment.
        marks: (place in the text, tag) of markup, which has no characters in the text; in order.
        before: white space between the last sentence and this one.
    """

    text: str
    kept: tuple[Tag, ...]
    marks: tuple[tuple[int, Tag], ...]
    before: str = ""

    @property
    def is_text(self) -> bool:
        """Whether there is a letter to translate."""
        return has_words(self.text)


def protected(parts: Sequence[Part]) -> list[Part]:
    """Return the parts; URLs, addresses, placeholders and identifiers are now words that are kept."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Tag):
            found.append(part)
            continue
        done = 0
        for match in KEPT.finditer(part.text):
            found.append(Text(part.text[done : match.start()]))
            found.append(Tag(match[0], "word", is_text=True, is_loose=match["loose"] is not None))
            done = match.end()
        found.append(Text(part.text[done:]))
    return [part for part in found if part != Text("")]


def sentences_of(
    parts: Sequence[Part], split: Callable[[str], Sequence[str]], *, keep_words: bool = True
) -> list[Sentence] | None:
    """Return the sentences of a segment.

    Args:
        split: a text -> its sentences, which together are the text (see `extras.documents.sentence_ends`).
        keep_words: see `DecodingSettings`; markup that stands for a word is kept anyway.

    Returns: None if the text contains one of the private characters that stand for kept words.
    """
    if any(isinstance(part, Text) and any(ord(char) >= PRIVATE for char in part.text) for part in parts):
        return None
    flat: list[str] = []
    kept: list[Tag] = []
    marks: list[tuple[int, Tag]] = []
    length = 0
    for part in protected(parts) if keep_words else parts:
        if isinstance(part, Text):
            flat.append(part.text)
        elif part.kind == "word":
            flat.append(private(len(kept), part.is_loose))
            kept.append(part)
        else:
            marks.append((length, part))
            continue
        length += len(flat[-1])
    if len(kept) > MAX_KEPT:
        return None
    text = "".join(flat)
    return list(_cut(text, tuple(kept), marks, [len(piece) for piece in split(text)]))


def split_at_clauses(sentence: Sentence, fits: Callable[[str], bool]) -> list[Sentence]:
    """Return the sentence in pieces that fit: divided at clauses, then at words, then anywhere, near the middle."""
    if fits(sentence.text) or len(sentence.text) < 2:
        return [sentence]
    middle = len(sentence.text) / 2
    for pattern in CLAUSE_ENDS:
        ends = [found.end() for found in pattern.finditer(sentence.text) if 0 < found.end() < len(sentence.text)]
        # A piece of a few words is worse than a cut at a lesser place.
        ends = [end for end in ends if pattern is CLAUSE_ENDS[-1] or middle / 3 < end < len(sentence.text) - middle / 3]
        if ends:
            cut = min(ends, key=lambda end: abs(end - middle))
            break
    else:
        cut = int(middle)
    pieces = list(_cut(sentence.text, sentence.kept, sentence.marks, [cut, len(sentence.text) - cut]))
    if len(pieces) < 2:
        return [sentence]
    first, *others = pieces
    first = Sentence(first.text, first.kept, first.marks, sentence.before + first.before)
    return [piece for one in (first, *others) for piece in split_at_clauses(one, fits)]


def _cut(
    text: str, kept: tuple[Tag, ...], marks: Sequence[tuple[int, Tag]], lengths: Sequence[int]
) -> Iterator[Sentence]:
    """Cut a text into pieces of these lengths; white space around a piece goes into the `before` of the next one.

    A closing mark at a border belongs to the piece before it, any other mark to the piece after it.
    """
    bounds = []
    start = 0
    for length in lengths:
        piece = text[start : start + length]
        if piece.strip():
            bounds.append((start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())))
        start += length
    done, behind, waiting = 0, 0, deque(marks)
    for number, (low, high) in enumerate(bounds):
        is_last = number == len(bounds) - 1
        mine = []
        while waiting and (waiting[0][0] < high or is_last or _closes(waiting, high)):
            place, tag = waiting.popleft()
            if place > max(high, behind):  # behind the last word, a tag brings the white space before it along
                tag = replace(tag, code=text[max(high, behind) : place] + tag.code)
                behind = place
            mine.append((min(max(place - low, 0), high - low), tag))
        yield Sentence(text[low:high], kept, tuple(mine), text[done:low] if number else "")
        done = high


def _closes(waiting: deque[tuple[int, Tag]], place: int) -> bool:
    return waiting[0][0] == place and waiting[0][1].kind != "open"
