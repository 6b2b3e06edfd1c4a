"""The sentences of a segment (text for the model, words that are kept, positions of markup), and placing of markup in
a translation, at the words that attention aligns with the source words inside the markup.

Each target token is aligned to the source token that it attends to most. Markup that enclosed source words encloses the
target words aligned to them. If no target word is aligned to them, the markup goes to the end of the sentence and is
counted.

Paper: Garg et al. 2019, arXiv:1909.02074, sec. 3.1, average the heads of one layer, the last but one. Differs: the
heads of the upper half of the layers are averaged, because small models have few layers, and because this aligned the
equal words of both sides best in a model of three layers (107 of 171 words; single layers 90 to 105).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from manyheads.decoding.inputs_and_results import with_end
from manyheads.extras.documents.parts import Part, Tag, Text
from manyheads.models.ensemble import averaged_models
from manyheads.nn.attention.observing import attentions_of
from manyheads.text.words import KEPT, MAX_KEPT, PRIVATE, has_words, kept_index, private, with_letters

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator
    from manyheads.text.sides import Side


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


def align(translator: Translator, source: str, target: str) -> list[tuple[int, int, int, int]]:
    """Return (target begin, target end, source begin, source end) of each target token, in characters.

    Each target token is aligned to the source token to which it gives most weight; target tokens that attend to EOS
    are left out. A source token that no target token is aligned to is aligned to the target token that gives it most
    weight. Of an ensemble, the first model's weights are taken.

    Returns: an empty list for a model without cross-attention weights.
    """
    model = averaged_models(translator.model)[0]
    if not isinstance(model, nn.Module):
        return []
    reader, writer = translator.tokenizer.source, translator.tokenizer.target
    source_ids, target_ids = reader.encode(source), writer.encode(target)
    if not source_ids or not target_ids:
        return []
    read = with_end(source_ids, reader)
    inputs = (
        torch.tensor([read], device=translator.device),
        torch.tensor([len(read)], device=translator.device),
        torch.tensor([[writer.bos_id, *target_ids]], device=translator.device),
    )
    with translator.runner.inference():
        cross = attentions_of(model, *inputs).cross
    # A layer of which 0.1.0 pruned all heads attends evenly, and says nothing.
    layers = [layer[0].float().mean(0) for layer in cross if layer.amax() > layer.amin()]
    if not layers:
        return []
    upper = torch.stack(layers[len(layers) // 2 :])
    weights = upper.mean(0)[: len(target_ids)]  # (target_len, source_len + EOS); row i chooses target token i
    pairs = [(index, place) for index, place in enumerate(weights.argmax(1).tolist()) if place < len(source_ids)]
    aligned = {place for _, place in pairs}
    pairs += [(index, place) for place, index in enumerate(weights.argmax(0).tolist()) if place not in aligned]
    source_places = _places(reader, source_ids, source)
    target_places = _places(writer, target_ids, target)
    return [(*target_places[index], *source_places[place]) for index, place in pairs if place < len(source_ids)]


def _places(side: Side, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Return begin and end of each token in the text: the length of the text before the token, and with it."""
    found = []
    done = 0
    for count in range(1, len(ids) + 1):
        end = min(max(len(side.decode(ids[:count]).rstrip()), done), len(text))
        shown = text[done:end]
        found.append((done + len(shown) - len(shown.lstrip()), end))
        done = end
    return found


AlignedToken = tuple[int, int, int, int]
"""Begin and end of a target token and of the source token that it is aligned to, in characters."""

WORD = re.compile(r"\S+")
MOST_TRIED = 50
"""Number of words that are tried for markup without a place. Each is compared with all other markup."""
MOST_PLACED = 500
"""Number of pairs, and of single tags, of a sentence that are placed by attention; later ones go to its end."""
EDGE = re.compile(rf"^[^\w{chr(PRIVATE)}-\U000fffff]+|[^\w{chr(PRIVATE)}-\U000fffff]+$")


@dataclass
class _Span:
    """Markup around source characters start to end, and where it goes in the target.

    opening, closing: its tags; None if a tag is in another sentence. Both are the same for a tag that stands alone.
    """

    start: int
    end: int
    opening: Tag | None
    closing: Tag | None
    low: int = -1
    high: int = -1

    @property
    def is_alone(self) -> bool:
        return self.opening is self.closing


def place(sentence: Sentence, target: str, alignment: Sequence[AlignedToken]) -> tuple[list[Part], int]:
    """Return the parts of a sentence's translation, and the number of tags and kept words that were moved to its end.

    Args:
        sentence: the source.
        target: its translation, with the private characters of the words that are kept.
        alignment: of tokens that have one.
    """
    target, num_moved = _with_all_kept(sentence, target)
    spans = _spans(sentence)
    words = [found.span() for found in WORD.finditer(target)]
    centres = _centres(words, alignment)
    placed: list[_Span] = []
    pairs = sorted((one for one in spans if not one.is_alone), key=lambda one: (one.start, -one.end))
    alone = [one for one in spans if one.is_alone]
    for span in pairs[:MOST_PLACED]:
        _find(span, sentence.text, target, words, centres)
        if span.low < 0 or not _fits(span, placed):
            num_moved += 1
            _to_the_end(span, words, target, placed)
        placed.append(span)
    for span in alone[:MOST_PLACED]:
        num_moved += not _find_alone(span, sentence.text, target, words, centres)
        placed.append(span)
    for span in [*pairs[MOST_PLACED:], *alone[MOST_PLACED:]]:
        num_moved += 1
        _to_the_end(span, (), target, placed)
        placed.append(span)
    return _parts(target, placed, sentence.kept), num_moved


def unchanged(sentence: Sentence) -> list[Part]:
    """Return the parts of a sentence as they are, for one that has no text to translate."""
    parts: list[Part] = []
    done = 0
    for where, tag in sentence.marks:
        parts += [*_with_kept(sentence.text[done:where], sentence.kept), tag]
        done = where
    return [*parts, *_with_kept(sentence.text[done:], sentence.kept)]


def _with_all_kept(sentence: Sentence, target: str) -> tuple[str, int]:
    """Return the target with each kept word of the sentence exactly once, and how many were missing."""
    wanted = [char for char in sentence.text if kept_index(char) is not None]
    seen: set[str] = set()
    chars = []
    for char in target:
        if kept_index(char) is not None and (char in seen or char not in wanted):
            continue
        seen.add(char)
        chars.append(char)
    missing = [char for char in wanted if char not in seen]
    text = "".join(chars)
    if not missing:
        return text, 0
    cut = len(text.rstrip().rstrip(".!?。！？…"))
    return f"{text[:cut]} {' '.join(missing)}{text[cut:]}".lstrip(), len(missing)


def _spans(sentence: Sentence) -> list[_Span]:
    spans: list[_Span] = []
    opened: dict[int, _Span] = {}
    for where, tag in sentence.marks:
        if tag.kind == "open":
            opened[tag.pair] = _Span(where, len(sentence.text), tag, None)
            spans.append(opened[tag.pair])
        elif tag.kind == "close" and tag.pair in opened:
            span = opened.pop(tag.pair)
            span.end, span.closing = where, tag
        elif tag.kind == "close":
            spans.append(_Span(0, where, None, tag))
        else:
            spans.append(_Span(where, where, tag, tag))
    return spans


def _centres(words: Sequence[tuple[int, int]], alignment: Sequence[AlignedToken]) -> list[list[float]]:
    """Return for each target word the centres of the source tokens to which its tokens are aligned."""
    return [[(s0 + s1) / 2 for t0, t1, s0, s1 in alignment if t0 < end and t1 > start] for start, end in words]


def _find(
    span: _Span, source: str, target: str, words: Sequence[tuple[int, int]], centres: Sequence[Sequence[float]]
) -> None:
    """Give a pair of tags the target words that are aligned to its source words; without such words, nothing."""
    before, after = source[: span.start], source[span.end :]
    if not re.search(r"\w", with_letters(before)) and not re.search(r"\w", with_letters(after)):
        # All words: the same punctuation as in the source stays outside.
        lead = re.match(r"\W*", target) if before.strip() else None
        trail = re.search(r"\W*$", target) if after.strip() else None
        span.low = lead.end() if lead else 0
        span.high = max(span.low, trail.start() if trail else len(target))
        if any(kept_index(char) is not None for char in target[: span.low] + target[span.high :]):
            span.low, span.high = 0, len(target)
        return
    if not words:
        return
    gains = [sum(1 if span.start <= one < span.end else -1 for one in each) or -0.1 for each in centres]
    best, first, last, total, begin = 0.0, -1, -1, 0.0, 0
    for index, gain in enumerate(gains):  # the stretch of words with the greatest sum (Kadane)
        if total <= 0:
            total, begin = 0.0, index
        total += gain
        if total > best:
            best, first, last = total, begin, index
    if first < 0:  # words that are aligned to others too
        inside = [sum(span.start <= one < span.end for one in each) for each in centres]
        first = last = inside.index(max(inside))
        if not inside[first]:
            return
    span.low, span.high = words[first][0], words[last][1]
    if span.closing is None:
        span.high = len(target)
    if span.opening is None:
        span.low = 0
    marked = source[span.start : span.end].strip()
    shown = target[span.low : span.high]
    lead = re.match(r"[^\w\U000f0000-\U000fffff]+", shown)
    if span.opening is not None and lead and marked[:1].isalnum() and lead.end() < len(shown):
        span.low += lead.end()
    trail = re.search(r"[^\w\U000f0000-\U000fffff]+$", shown)
    if span.closing is not None and trail and marked[-1:].isalnum() and span.low < span.high - len(trail[0]):
        span.high -= len(trail[0])


def _fits(span: _Span, placed: Sequence[_Span]) -> bool:
    """Whether the target of a span lies inside, around or apart from the targets of others as in the source."""
    for other in placed:
        if other.is_alone:
            continue
        if other.start <= span.start and span.end <= other.end:
            if not (other.low <= span.low and span.high <= other.high):
                return False
        elif not (span.high <= other.low or other.high <= span.low):
            return False
    return True


def _to_the_end(span: _Span, words: Sequence[tuple[int, int]], target: str, placed: Sequence[_Span]) -> None:
    """Put a pair around the last word that has no other markup; without one among the last ones, at the end.

    The tag of a pair whose other half is in another sentence goes to the border that they share.
    """
    if span.opening is None:
        span.low = span.high = 0
        return
    if span.closing is None:
        span.low = span.high = len(target)
        return
    for start, end in words[: -MOST_TRIED - 1 : -1]:
        core = EDGE.sub("", target[start:end])
        if not core:
            continue
        start += target[start:end].index(core)
        span.low, span.high = start, start + len(core)
        if _fits(span, placed):
            return
    span.low = span.high = len(target)


def _find_alone(
    span: _Span, source: str, target: str, words: Sequence[tuple[int, int]], centres: Sequence[Sequence[float]]
) -> bool:
    """Place a tag that stands alone: after the target word that is aligned to the source word before it."""
    before, after = source[: span.start], source[span.start :]
    if not with_letters(before).strip():
        span.low = span.high = 0
        return True
    if not re.search(r"\w", with_letters(after)):
        span.low = span.high = len(target.removesuffix(after))
        return True
    word_end = len(before.rstrip())
    word_start = word_end - len(before.split()[-1])
    found = [
        end for (_, end), each in zip(words, centres, strict=True) if any(word_start <= one < word_end for one in each)
    ]
    where = found[-1] if found else len(target)
    if before[-1:].isspace():  # it stands apart from the word before it
        where += len(target[where:]) - len(target[where:].lstrip())
        if after[:1].isspace() and where < len(target):  # and from the word after it
            span.opening = span.closing = replace(span.opening, code=span.opening.code + " ") if span.opening else None
    span.low = span.high = where
    return bool(found)


def _parts(target: str, spans: Sequence[_Span], kept: Sequence[Tag]) -> list[Part]:
    """Return text, kept words and tags in order; at one place, inner tags close first and outer tags open first."""
    events: list[tuple[tuple[float, ...], int, Tag]] = []
    for number, span in enumerate(spans):
        if span.is_alone:
            assert span.opening is not None
            events.append(((1, number), span.low, span.opening))
            continue
        is_empty = span.low == span.high
        if span.opening is not None:
            events.append(((1 if is_empty else 2, -span.high, span.start - span.end, number), span.low, span.opening))
        if span.closing is not None:
            rank = (1, -span.high, span.start - span.end, number + 0.5) if is_empty else (0, -span.low, -number)
            events.append((rank, span.high, span.closing))
    parts: list[Part] = []
    done = 0
    for _, where, tag in sorted(events, key=lambda one: (one[1], one[0])):
        parts += _with_kept(target[done:where], kept)
        parts.append(tag)
        done = where
    return [*parts, *_with_kept(target[done:], kept)]


def _with_kept(text: str, kept: Sequence[Tag]) -> list[Part]:
    parts: list[Part] = []
    plain: list[str] = []
    for char in text:
        index = kept_index(char)
        if index is None:
            plain.append(char)
            continue
        if plain:
            parts.append(Text("".join(plain)))
        plain = []
        parts.append(kept[index])
    return [*parts, Text("".join(plain))] if plain else parts
