"""Choice of fonts for a plot, so that Chinese, emoji and other scripts are shown correctly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

__all__ = ["legible_texts"]

_FIRST = "DejaVu Sans"
"""Comes with matplotlib: Latin, Greek, Cyrillic, Hebrew, Arabic, many signs, and some faces."""
_PREFERRED = (
    "Noto Sans CJK",
    "Source Han Sans",
    "PingFang",
    "Hiragino Sans",
    "Microsoft YaHei",
    "WenQuanYi",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Sans",
    "Noto Emoji",
    "Segoe UI Emoji",
    "Symbola",
)
_UNFIT = ("Noto Color Emoji", "Apple Color Emoji", "Last Resort", "LastResort")
"""Fonts that are not used: those with pictures instead of outlines, which cannot be drawn, and those with a box for
every character."""
_MOST_OPENED = 400


def legible_texts(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the texts as they can be drawn on this machine, and the font families in order of preference.

    A character without a font becomes its code point: `⟨1F600⟩`.
    """
    texts = list(texts)
    strange = frozenset(char for text in texts for char in text if char > "\x7f")
    families, missing = _families(strange)
    shown = ["".join(f"⟨{ord(char):04X}⟩" if char in missing else char for char in text) for text in texts]
    return shown, [_FIRST, *families]


@lru_cache(maxsize=64)
def _families(chars: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Return font families with these characters, besides the first family, and the characters that no font has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    missing = {ord(char) for char in chars} - _signs(findfont(FontProperties(family=[_FIRST])))
    families: list[str] = []

    def rank(entry: Any) -> tuple[int, int, str, str]:
        preferred = next((place for place, name in enumerate(_PREFERRED) if entry.name.startswith(name)), 99)
        plain = entry.style == "normal" and str(entry.weight) in ("400", "normal", "regular")
        return preferred, 0 if plain else 1, entry.name, entry.fname

    if missing:
        _look_again()
    for entry in sorted(fontManager.ttflist, key=rank)[:_MOST_OPENED] if missing else []:
        if entry.name.startswith(_UNFIT) or entry.name in (_FIRST, *families):
            continue
        found = missing & _signs(entry.fname)
        if found:
            families.append(entry.name)
            missing -= found
        if not missing:
            break
    return families, frozenset(map(chr, missing))


@lru_cache(maxsize=1)
def _look_again() -> None:
    """Add fonts that were installed after matplotlib cached its list in a file."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {entry.fname for entry in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - known):
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):  # a damaged or unsupported font
            fontManager.addfont(path)


@lru_cache(maxsize=512)
def _signs(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError, ValueError):
        return frozenset()  # a font that matplotlib lists but cannot read
