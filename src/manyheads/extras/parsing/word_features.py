"""The features of a word that a parser reads: its subwords, and hashes of its beginnings, endings and shape.

A small treebank has few occurrences of each word, but many of each ending (`-ing`, `-ly`), and capital letters and
digits tell names and numbers. Hashes need no list of known affixes (Weinberger et al. 2009, arXiv:0902.2206).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from manyheads.text.tokenizer import Tokenizer

__all__ = ["MOST_HASHES", "MOST_PIECES", "affix_hashes", "word_pieces"]

MOST_PIECES = 8
"""Subwords of a word that count: of a longer one the first four and the last four."""

MOST_HASHES = 10
"""Number of hashes of a word: itself, endings of one to four characters, beginnings of one to three, shape, capital."""

_SHAPE_LEN = 12
_HASHES = 65_535


def word_pieces(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of the subwords of each word, at most MOST_PIECES, at least one."""
    half = MOST_PIECES // 2
    encoded = tokenizer.encode_batch(list(words))
    kept = [ids if len(ids) <= MOST_PIECES else [*ids[:half], *ids[-half:]] for ids in encoded]
    return [ids or [tokenizer.unk_id] for ids in kept]


def affix_hashes(word: str) -> list[int]:
    """Return MOST_HASHES numbers from 0 to 65,535. 0: a feature that a short word does not have."""
    lower = word.lower()
    features = [f"w={lower}"]
    features += [f"s={lower[-size:]}" if len(lower) > size else "" for size in (1, 2, 3, 4)]
    features += [f"p={lower[:size]}" if len(lower) > size else "" for size in (1, 2, 3)]
    features += [f"h={_shape(word)}", f"c={word[:1].isupper():d}"]
    return [1 + zlib.crc32(one.encode(errors="surrogatepass")) % _HASHES if one else 0 for one in features]


def _shape(word: str) -> str:
    """`Mc-Donald's2` -> `AaA-Aa'a0` without repetitions: A, a and 0 stand for runs of letters and digits."""
    shape = ""
    for character in word[:_SHAPE_LEN]:
        kind = "A" if character.isupper() else "a" if character.islower() else "0" if character.isdigit() else character
        if shape[-1:] != kind:
            shape += kind
    return shape
