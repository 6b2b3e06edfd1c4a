"""A pattern, a regular expression or a JSON schema, compiled for the pieces of a vocabulary by llguidance.

llguidance builds the states of a pattern when they are needed, so `[a-z]{0,4000}` costs nothing before the first token.
What a pattern may need is limited: its length, its states in memory, the work to read it and that of each token.
A text that is forced is not computed ahead: `(a{1000}){1000}` forces a million bytes, which no limit counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.errors import ConfigError, RequestError
from manyheads.files.safe_open import read_limited
from manyheads.installation import needing_extra

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
