"""A pattern, a regular expression or a JSON schema, compiled for the pieces of a vocabulary by llguidance.

llguidance builds the states of a pattern when they are needed, so `[a-z]{0,4000}` costs nothing before the first token.
What a pattern may need is limited: its length, its states in memory, the work to read it and that of each token.
A text that is forced is not computed ahead: `(a{1000}){1000}` forces a million bytes, which no limit counts.

The grammar of a search whose outputs match a pattern; see `decoding.search_problem.Grammar`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.errors import ConfigError, RequestError
from manyheads.files.safe_open import read_limited
from manyheads.installation import needing_extra
from manyheads.nn.kernels import policy
from manyheads.text.of_folder import PieceVocabulary
from manyheads.text.vocabulary import Vocabulary

MOST_REGEX_CHARS, MOST_SCHEMA_CHARS = 10_000, 50_000
MOST_SECONDS = 2.0
"""For the first look for a text that matches; what is usual takes some thousandths of a second."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# One way to write a value, so that a model cannot write spaces for ever. Escapes of single characters are not needed:
# text is UTF-8; they could spell half a character.
_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
_NOT_AHEAD = '%llguidance {"no_forcing": true}\n'
_NOTHING_FOLLOWS = "NoExtensionBias"
_LONGER = 64
_CLOSING, _OPENING = frozenset(b'"}]'), frozenset(b",:{[\\")


class Pieces:
    """The bytes of the ids of a vocabulary, as llguidance reads them: each string of bytes once, all single bytes among
    them, and the end of a text.

    Args:
        texts: the bytes that an id adds to a text; empty for ids that may not be produced.
        first: the same at the beginning of a text or a line, where some vocabularies leave out a space.

    Attributes:
        of, of_first: (ids,) number of each id's piece; that of a piece that is never permitted, where it has none.
        end: number of the end of a text. usable, usable_first: (pieces,) whether an id has it.
        rank: (pieces,) lower for pieces that are likely to end a value; quotes: whether it begins with a quote.
        opens: (ids,) whether an id begins another part of a JSON value.
    """

    def __init__(self, texts: Sequence[bytes], first: Sequence[bytes]) -> None:
        from llguidance import LLTokenizer

        known = {bytes([byte]): byte for byte in range(256)}
        for text in (*texts, *first):
            if text:
                known.setdefault(text, len(known))
        self.end = len(known)
        self.of = np.array([known.get(text, self.end + 1) for text in texts])
        self.of_first = np.array([known.get(text, self.end + 1) for text in first])
        self.usable, self.usable_first = (np.isin(np.arange(self.end + 2), one) for one in (self.of, self.of_first))
        self.usable[self.end :] = self.usable_first[self.end :] = False
        self.opens = np.array([any(byte in _OPENING for byte in text) for text in texts])
        self.quotes = np.array([*(text[:1] == b'"' for text in known), False, False])
        self.rank = np.array([*map(_rank, known), 0, 0])
        # The names that llguidance reads of a tokenizer.
        self.tokens = [*known, b"\xff<end>"]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = self.end, None, [self.end]
        self.is_tokenizer_wrapper = True
        self.tokenizer = LLTokenizer(self, slices=[])  # type: ignore[arg-type]

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the pieces of a text that is forced: single bytes, as it is not used; see `_NOT_AHEAD`."""
        return [*(text.encode() if isinstance(text, str) else text)]


def _rank(text: bytes) -> int:
    if all(byte in _CLOSING for byte in text):
        return -len(text) - (text[0] != ord('"'))  # an object or a list is rather closed than filled
    if any(byte in _OPENING for byte in text):
        rank = 9
    else:
        rank = 2 + text.isalnum() + (text != text.strip())
    return _LONGER * rank - min(len(text), _LONGER - 1)  # of pieces alike, the longest is taken: the way is short then


@dataclass(frozen=True)
class Pattern:
    """A pattern that an output must match.

    grammar: the pattern in llguidance's form. is_json: the pattern is a JSON schema. shown: its text in messages.
    """

    grammar: str
    is_json: bool
    shown: str

    @classmethod
    def of(cls, regex: str, schema: str) -> Pattern:
        """Read the options, of which one is given.

        Raises: ConfigError: it is too long, or not JSON. MissingExtraError: llguidance is not installed.
        """
        with needing_extra("regex and json_schema need the package llguidance", "constrained"):
            from llguidance import LLMatcher
        name, text, most = ("regex", regex, MOST_REGEX_CHARS) if regex else ("json_schema", schema, MOST_SCHEMA_CHARS)
        if len(text) > most:
            raise ConfigError(f"{name} has {len(text):,} characters; at most {most:,} are allowed.", fields=[name])
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name} is not valid Unicode.", fields=[name]) from error
        if regex:
            return cls(_not_ahead(LLMatcher.grammar_from_regex(regex)), False, name)
        try:
            value = json.loads(schema)
            if value is True:
                value = {}
            if not isinstance(value, dict):
                raise ValueError("it is no object" if value is not False else "false permits no value")
            if '"x-guidance"' in json.dumps(value):
                raise ValueError("it holds x-guidance, which would change how it is read")
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=_FORM)  # type: ignore[arg-type]
            return cls(_not_ahead(grammar), True, name)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema is not a JSON schema: {_first_line(error)}.", fields=[name]) from error

    def refusal(self, why: str) -> ConfigError:
        """Return the error of a pattern that cannot be used."""
        return ConfigError(f"{self.shown} cannot be used: {why}.", fields=[self.shown])


def _not_ahead(grammar: str) -> str:
    """Return a grammar of llguidance with the option for which its own form of JSON schemas has no place."""
    read = json.loads(grammar)
    for one in read["grammars"]:
        schema, lark = one.pop("json_schema"), one["lark_grammar"]
        one["lark_grammar"] = _NOT_AHEAD + (f"start: %json {json.dumps(schema)}" if lark is None else lark)
    return json.dumps(read)


def _first_line(error: object) -> str:
    """Return what llguidance says, in one line, without a full stop and without what it says about its own state."""
    lines = [line.strip() for line in str(error).split("<")[0].splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]  # of a regex parser
    text = (reasons or lines or ["it is not clear why"])[0].rpartition("failed to compile JSON schema: ")[2]
    return (text if len(text) <= 300 else text[:300] + "...").rstrip(".")


class Matcher:
    """A text so far, and what can follow it. Its texts are numbers of `Pieces`.

    Raises: RequestError: what follows needs more work or memory than allowed.
    """

    def __init__(self, matcher: Any, pattern: Pattern, pieces: Pieces) -> None:
        self._matcher, self._pattern, self._pieces = matcher, pattern, pieces

    @classmethod
    def begin(cls, pattern: Pattern, pieces: Pieces) -> Matcher:
        """Raises: ConfigError: the pattern is not valid, matches nothing, or is too complex."""
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(pieces.tokenizer, pattern.grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise pattern.refusal(_first_line(matcher.get_error()))
        return cls(matcher, pattern, pieces)

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._pattern, self._pieces)

    @property
    def can_end(self) -> bool:
        """Whether the text so far matches."""
        found: bool = self._matcher.is_accepting()
        return found

    def add(self, piece: int) -> bool:
        """Add a piece. Returns: whether the pattern permits it."""
        found: bool = self._matcher.consume_token(piece)
        return found

    def allowed(self) -> NDArray[np.bool_]:
        """Return which pieces can follow, and the end. (pieces + 1,)"""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if _NOTHING_FOLLOWS in self._matcher.get_error():
            return np.zeros(self._pieces.end + 2, dtype=bool)
        if self._matcher.is_error():
            raise RequestError(
                f"{self._pattern.shown} needs too much work for one token ({_first_line(self._matcher.get_error())});"
                " write a simpler one."
            )
        bits = np.unpackbits(mask, count=self._pieces.end + 1, bitorder="little")
        return np.append(bits.astype(bool), False)

    def ends_after(self, way: list[int]) -> bool:
        """Return whether the text matches after these pieces. Cost: no mask, unlike `way_to_end`."""
        num_permitted: int = self._matcher.validate_tokens([*way, self._pieces.end])
        return num_permitted == len(way) + 1

    def way_to_end(self, most: int, seconds: float, *, is_first: bool = False) -> tuple[list[int] | None, str]:
        """Look for pieces with which the text can end, not necessarily the fewest.

        Under one set of pieces that can follow, a piece is taken again only after the others; so `[a-z]*9` ends, too.

        Args: is_first: whether the next piece is one of `Pieces.of_first`.

        Returns: the pieces, without the end; or None, and why.
        """
        stop = time.monotonic() + seconds
        taken: dict[bytes, NDArray[np.int64]] = {}
        too_long = (
            f"no text of at most {most:,} tokens was found that matches, and max_new_tokens is {most:,}; raise it, or"
            " write another pattern"
        )
        for _ in range(20):
            way: list[int] = []
            matcher, here = self.copy(), (b"", -1)
            while not matcher.can_end:
                if time.monotonic() > stop:
                    return None, f"no text that matches was found in {seconds:g} seconds; write another pattern"
                if len(way) >= most:
                    return None, too_long
                allowed = matcher.allowed()
                usable = self._pieces.usable_first if is_first and not way else self._pieces.usable
                pieces = np.flatnonzero(allowed & usable)
                if not len(pieces):
                    break
                under = allowed.tobytes()
                # Where any letter can follow, brackets are text. What ends a value is needed often, so it is
                # taken again.
                rank = self._pieces.rank[pieces]
                if allowed[ord("z")]:
                    rank = np.where(self._pieces.quotes[pieces], -100, rank)
                times = taken.setdefault(under, np.zeros(len(allowed), dtype=np.int64))[pieces]
                piece = int(pieces[(1_000 * (times // np.where(rank < 0, 50, 1)) + rank).argmin()])
                here = (under, piece)
                taken[under][piece] += 1
                way.append(piece)
                matcher.add(piece)
            else:
                return way, ""
            if not way:
                break
            taken[here[0]][here[1]] += 1_000_000  # the piece that led nowhere
        return None, "no sequence of this model's tokens matches it; write another pattern"


@lru_cache(maxsize=64)
def compiled(regex: str, schema: str, pieces: Pieces) -> Matcher:
    """Return the beginning of texts that match, to be copied. Raises: as `Pattern.of` and `Matcher.begin`."""
    return Matcher.begin(Pattern.of(regex, schema), pieces)


def read_schema(given: str) -> str:
    """Return a JSON schema: of the file with this name, or the text itself, if it begins with a brace.

    Raises: ConfigError: the file cannot be read.
    """
    if given.lstrip()[:1] in ("{", ""):
        return given
    try:
        return read_limited(Path(given), 4 * MOST_SCHEMA_CHARS).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"json_schema: the file {given} cannot be read ({reason}); give the name of a file, or the schema itself."
        ) from None


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
