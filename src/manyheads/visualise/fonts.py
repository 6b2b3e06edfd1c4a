"""Which of a machine's fonts a picture needs, so that Chinese, emoji and other scripts are letters and not boxes."""

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
"""Fonts of pictures in place of outlines, which cannot be drawn, and of boxes for whatever there is."""
_MOST_OPENED = 400


def legible_texts(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Texts as they can be drawn here, and the families to draw them in, the first that has a sign first.

    A sign that no font here has becomes its code point: `⟨1F600⟩`.
    """
    texts = list(texts)
    strange = frozenset(char for text in texts for char in text if char > "\x7f")
    families, missing = _families(strange)
    shown = ["".join(f"⟨{ord(char):04X}⟩" if char in missing else char for char in text) for text in texts]
    return shown, [_FIRST, *families]


@lru_cache(maxsize=64)
def _families(chars: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Families beside the first that have these signs, and signs that none has."""
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
    """Add fonts that were installed since matplotlib made its list, which it keeps in a file for good."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {entry.fname for entry in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - known):
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError):  # a damaged font, or of another kind
            fontManager.addfont(path)


@lru_cache(maxsize=512)
def _signs(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError, ValueError):
        return frozenset()  # a font that matplotlib lists and cannot read
