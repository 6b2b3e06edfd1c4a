"""The grammar of a search whose outputs match a pattern; see `decoding.search_problem.Grammar`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.errors import ConfigError, RequestError
from manyheads.extras.constrained.patterns import MOST_SECONDS, Matcher, Pieces, compiled
from manyheads.nn.kernels import policy
from manyheads.text.of_folder import PieceVocabulary
from manyheads.text.vocabulary import Vocabulary

_SECONDS_A_TOKEN = 0.02
_LOOK_AHEAD = 512
"""Tokens before the limit from which on the way to the end of the text is known at each token."""
_WINDOW = 128
"""Tokens that may be left over, at most, when no further part of a JSON value is begun."""
_SPARE = 4
"""Tokens that may be left over when the text goes straight to its end: a character can have 4 bytes."""

_pieces: WeakKeyDictionary[Any, dict[tuple[int, ...], Pieces]] = WeakKeyDictionary()


def grammar_of(settings: Any, reader: Any, *, check: bool = False) -> PatternGrammar:
    """Return the grammar for the `regex` or the `json_schema` of settings.

    Args: settings: `GenerationSettings`, or `DecodingSettings`. reader: the vocabulary of a language model, or the
        tokenizer of a translator. check: whether the model can write a text that matches within the limit.

    Raises: ConfigError: the pattern is not valid or is too complex; there is no such text; or the model writes no text,
        or no pieces of this package. MissingExtraError: llguidance is not installed.
    """
    vocabulary = _vocabulary_of(reader)
    end = vocabulary.line_id if vocabulary.end_id is None else vocabulary.end_id
    own = _pieces.setdefault(reader, {})
    pieces = own.get(settings.banned_ids)
    if pieces is None:
        _check_installed()
        pieces = own[settings.banned_ids] = _pieces_of(vocabulary, {*settings.banned_ids, end, vocabulary.unk_id})
    start = compiled(settings.regex, settings.json_schema, pieces)
    if check:
        _check_limit(settings, start)
    return PatternGrammar(start, pieces, end, vocabulary.line_id, is_json=bool(settings.json_schema))


def _check_limit(settings: Any, start: Matcher) -> None:
    most = settings.max_new_tokens or settings.max_len_offset
    for is_first in (True, False):
        try:
            way, why = start.way_to_end(most, MOST_SECONDS, is_first=is_first)
        except RequestError as error:
            raise ConfigError(str(error), fields=["json_schema" if settings.json_schema else "regex"]) from error
        if way is None or len(way) >= most:
            name = "json_schema" if settings.json_schema else "regex"
            why = why or (
                f"the shortest text found that matches has {len(way or ()):,} tokens and an end, and max_new_tokens is"
                f" {most:,}; raise it, or write another pattern"
            )
            raise ConfigError(f"{name}: {why}.", fields=[name])


def _check_installed() -> None:
    from manyheads.installation import needing_extra

    with needing_extra("regex and json_schema need the package llguidance", "constrained"):
        import llguidance  # noqa: F401


def _vocabulary_of(reader: Any) -> Vocabulary:
    if isinstance(reader, Vocabulary):
        if not reader.is_text:
            raise ConfigError("regex and json_schema are for text, but this model writes ids; leave them out.")
        return reader
    target = reader.target.in_pieces
    if target is None or target.kind == "word" or target.symbols:
        raise ConfigError(
            "regex and json_schema need a model that writes subwords of this package, but this one writes other pieces;"
            " leave them out."
        )
    return PieceVocabulary(target, "lines")  # its text ends at EOS


def _pieces_of(vocabulary: Vocabulary, never: set[int | None]) -> Pieces:
    """Return the bytes that each id adds, in a line and at its beginning; none for ids that are not to be produced."""
    inside = next(
        index
        for index in range(vocabulary.vocab_size)
        if index not in never and index != vocabulary.line_id and vocabulary.decode_bytes([index]).strip()
    )
    before = len(vocabulary.decode_bytes([inside]))
    texts = [vocabulary.decode_bytes([inside, index])[before:] for index in range(vocabulary.vocab_size)]
    first = [vocabulary.decode_bytes([index]) for index in range(vocabulary.vocab_size)]
    for index in never:
        if index is not None:
            texts[index] = first[index] = b""
    return Pieces(texts, first)


class PatternGrammar:
    """Outputs match a pattern.

    Args: start: the beginning of an output. end: the id that ends it. line: the id of a line break, after which some
        vocabularies leave out a space.
    """

    def __init__(self, start: Matcher, pieces: Pieces, end: int, line: int, *, is_json: bool) -> None:
        self.start, self.pieces, self.end, self.line, self.is_json = start, pieces, end, line, is_json

    def of(self, source: Tensor, source_lengths: Tensor) -> PatternTexts:
        """Return the grammar of a batch of translations."""
        return PatternTexts(self, [True] * source.size(0))

    def after(self, prompts: Sequence[Sequence[int]], vocabulary: Vocabulary) -> PatternTexts:
        """Return the grammar of the continuations of prompts, given as ids."""
        spaced = next((ids[0] for ids in vocabulary.spaced_ids()[::-1] if ids), None)
        if spaced is None:
            return PatternTexts(self, [vocabulary.kind == "words" and ids[-1] == self.line for ids in prompts])
        piece = vocabulary.decode_bytes([self.line, spaced])[len(vocabulary.decode_bytes([self.line])) :]
        return PatternTexts(self, [vocabulary.continuation(ids, [spaced]) == piece for ids in prompts])


@dataclass
class _Text:
    """A text so far.

    matcher: None: it has ended, or does not match. way: to its end, in pieces; None: not known. guesses: ways that may
    lead to its end: those from the text without its last token.
    """

    matcher: Matcher | None
    way: list[int] | None = None
    guesses: tuple[list[int], ...] = ()
    mask: NDArray[np.bool_] | None = None


class PatternTexts:
    """The permitted tokens of the texts of one batch; see `SentenceGrammar`.

    Args: begins: for each prompt or sentence, whether its output begins a text or a line.
    """

    def __init__(self, grammar: PatternGrammar, begins: list[bool]) -> None:
        self._grammar, self._begins = grammar, begins
        self._texts: dict[tuple[int, tuple[int, ...]], _Text] = {}
        self._room: int | None = None

    def allowed(self, history: Tensor, sentence: Tensor, room: Tensor) -> Tensor:
        """Return the permitted next tokens. Shapes: see `SentenceGrammar.allowed`.

        Raises: RequestError: no token of the vocabulary goes on, or finding it needs too much work.
        """
        # A device is waited for once.
        read = torch.cat([sentence[:, None], room[:, None], history], 1).tolist()
        if self._room is None:
            self._room = min(tokens for _, tokens, *_ in read)
        keys = [(number, tuple(ids)) for number, _, *ids in read]
        left = Counter((number, ids[:-1]) for number, ids in set(keys))
        texts: dict[tuple[int, tuple[int, ...]], _Text] = {}
        for key, (_, tokens, *_) in zip(keys, read, strict=True):
            if key not in texts:
                texts[key] = self._text(key, left)
                texts[key].mask = self._mask(texts[key], key, tokens)
        self._texts = texts
        masks = np.stack([texts[key].mask for key in keys])  # type: ignore[misc]
        return policy.sent(torch.from_numpy(masks), history.device)

    def _text(self, key: tuple[int, tuple[int, ...]], left: Counter[tuple[int, tuple[int, ...]]]) -> _Text:
        """Return a text, from the one without its last token if that is known."""
        number, ids = key
        known = self._texts.get((number, ids[:-1])) if ids else None
        if known is None:
            matcher = self._grammar.start.copy()
            for place, token in enumerate(ids):
                if not matcher.add(int(self._index(number, ids[:place])[token])):
                    raise RequestError("the forced prefix does not begin a text that matches; leave one of them out.")
            return _Text(matcher)
        if known.matcher is None or ids[-1] == self._grammar.end:
            return _Text(None)
        left[number, ids[:-1]] -= 1
        matcher = known.matcher.copy() if left[number, ids[:-1]] else known.matcher
        piece = int(self._index(number, ids[:-1])[ids[-1]])
        if known.mask is None or not known.mask[ids[-1]] or not matcher.add(piece):
            return _Text(None)  # a beam that nothing can follow
        if known.way is None:
            return _Text(matcher)
        if known.way[:1] == [piece]:
            return _Text(matcher, known.way[1:])
        return _Text(matcher, guesses=(known.way, known.way[1:]))

    def _index(self, number: int, before: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the piece of each id after these ids."""
        begins = before[-1] == self._grammar.line if before else self._begins[number]
        index: NDArray[np.int64] = self._grammar.pieces.of_first if begins else self._grammar.pieces.of
        return index

    def _mask(self, text: _Text, key: tuple[int, tuple[int, ...]], room: int) -> NDArray[np.bool_]:
        """Return the permitted ids after a text. room: number of tokens that may follow, the end included."""
        grammar, index = self._grammar, self._index(*key)
        end: NDArray[np.bool_] = np.arange(len(index)) == grammar.end
        if text.matcher is None:
            return end
        mask: NDArray[np.bool_] = text.matcher.allowed()[index]
        if text.matcher.can_end:
            mask = mask | end
        if not mask.any():
            raise RequestError(
                f"after {len(key[1]):,} tokens no token of this model goes on with a text that matches; write another"
                " pattern."
            )
        if room > _LOOK_AHEAD:
            return mask
        if text.way is None:
            text.way = self._way(text, text.matcher, room, is_first=index is grammar.pieces.of_first)
        return mask if text.way is None else self._ending(mask, text.way, index, end, room)

    @staticmethod
    def _way(text: _Text, matcher: Matcher, room: int, *, is_first: bool) -> list[int] | None:
        """Return a way to the end. Inside a word or a string the one from the text before usually still leads there."""
        if not is_first:
            for way in text.guesses:
                if len(way) < room and matcher.ends_after(way):
                    return way
        return matcher.way_to_end(room, _SECONDS_A_TOKEN, is_first=is_first)[0]

    def _ending(
        self, mask: NDArray[np.bool_], way: list[int], index: NDArray[np.int64], end: NDArray[np.bool_], room: int
    ) -> NDArray[np.bool_]:
        """Restrict the permitted ids so that the text ends within its limit."""
        spare = room - 1 - len(way)
        straight: NDArray[np.bool_] = index == way[0] if way else end
        if spare <= _SPARE:
            return straight
        assert self._room is not None
        if not self._grammar.is_json or spare > min(_WINDOW, self._room // 2):
            return mask
        if not way or self._grammar.pieces.tokens[way[0]][:1] in (b"}", b"]"):
            return straight
        opened: NDArray[np.bool_] = self._grammar.pieces.opens
        return mask & ~opened | straight
