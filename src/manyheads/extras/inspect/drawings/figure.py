"""Common code of all plots: new figures, style, and saving as PNG and SVG.

Only matplotlib's object interface is used, so there is no global state, no window is opened, and threads can draw at
the same time.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manyheads.files.commit import write_file
from manyheads.installation import needing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_BACKEND = "MPLBACKEND"


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


Array = npt.NDArray[np.float64]

COLOURS = ("#2563a8", "#d9622b", "#2f8a57", "#8a4fa3", "#b8921e", "#5b6770")
"""Colours that colour-blind readers can distinguish, also in print."""
INK = "#1f2933"
MUTED = "#7b8794"
_TITLE_LETTERS = 8
"""Letters of a title on an inch."""
_SETTINGS: Any = {"svg.hashsalt": "manyheads", "svg.fonttype": "none", "pdf.fonttype": 42}
"""Text is stored as text: in SVG by the name of its font, in PDF with an embedded font."""
_DATED = {"svg": "Date", "png": "Software", "pdf": "CreationDate"}
"""The metadata field of each format that would make two files differ."""


def as_array(values: Any) -> Array:
    """Convert a tensor on any device and of any float type, an array or nested lists to float64."""
    if hasattr(values, "detach"):
        values = values.detach().to("cpu").double().numpy()
    return np.asarray(values, dtype=np.float64)


def check_plots() -> None:
    """Check that plots are possible, before the work whose result is drawn.

    Raises: MissingExtraError: matplotlib is not installed.
    """
    # A notebook names its own backend to all programs that it starts, also to those of other environments, where
    # matplotlib does not know it and could not be imported. No picture needs a backend.
    backend = "" if sys.modules.get("matplotlib") else os.environ.pop(_BACKEND, "")
    try:
        with needing_extra("plots need matplotlib, which is not installed", "plot"):
            import matplotlib.figure
    finally:
        if backend:
            os.environ[_BACKEND] = backend
    try:
        if backend:
            matplotlib.rcParams["backend"] = backend
    except ValueError:
        print(f"{_BACKEND}={backend} is unknown here; pictures are drawn without it.", file=sys.stderr)  # noqa: T201


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """Return an empty figure, size in inches, with a title on the left, on several lines if it is long.

    Raises: MissingExtraError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    # A character that the font lacks is drawn as a box; a warning about each is not needed.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.05, hspace=0.05)  # type: ignore[union-attr,call-arg]
    if title:
        title = "\n".join(textwrap.wrap(title, max(20, int(width * _TITLE_LETTERS))))
        plain_text([figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK, fontweight="bold")])
    return figure


def style_axes(axes: Axes, *, title: str = "", x_label: str = "", y_label: str = "", grid: bool = True) -> None:
    """Set the title on the left and a light grid, and remove the box."""
    plain_text([axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")])
    axes.set_xlabel(x_label, fontsize=9.5, color=INK)
    axes.set_ylabel(y_label, fontsize=9.5, color=INK)
    axes.tick_params(labelsize=8.5, colors=INK, length=3, color=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    if grid:
        axes.grid(True, color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)


def add_colour_bar(figure: Figure, image: Any, axes: Any, **options: Any) -> Any:
    """Add the scale of an image beside its axes, and return it. options: of matplotlib's `colorbar`."""
    bar = figure.colorbar(image, ax=axes, **options)
    bar.ax.tick_params(labelsize=8, colors=INK, length=2)
    bar.outline.set_visible(False)
    return bar


def plain_text(texts: Any) -> None:
    """Show `$` in tokens as text, not as the start of a formula."""
    for text in texts:
        text.set_parse_math(False)


def slant_long(texts: Any) -> None:
    """Rotate long labels below columns; labels of one or two characters stay upright, because a rotated `▁` looks like
    a slash.
    """
    for text in texts:
        upright = len(text.get_text()) <= 2
        text.set_rotation(0 if upright else 55)
        text.set_horizontalalignment("center" if upright else "right")
        text.set_rotation_mode("anchor")


def save_figure(figure: Figure, path: Path | str, kinds: Sequence[str] = ("png", "svg")) -> tuple[Path, ...]:
    """Write `path`.png, `path`.svg and so on, each in one step. If `path` has such a suffix, it is replaced.

    The same figure gives the same bytes.

    Args: kinds: any of png, svg and pdf.

    Returns: a path for each kind. Raises: SaveError: they cannot be written.
    """
    from matplotlib import rc_context

    paths = picture_paths(path, kinds)
    with rc_context(_SETTINGS), _laid_out(figure):
        for kind, final in zip(kinds, paths, strict=True):
            content = io.BytesIO()
            metadata: dict[str, str | None] = {_DATED[kind]: None}
            figure.savefig(content, format=kind, metadata=metadata, dpi=150 if kind == "png" else 72)
            write_file(final, content.getvalue())
    return paths


def picture_paths(path: Path | str, kinds: Sequence[str] = ("png", "svg")) -> tuple[Path, ...]:
    """Return the paths that `save_figure` writes."""
    stem = Path(path)
    stem = stem.with_suffix("") if stem.suffix[1:].lower() in _DATED else stem
    return tuple(stem.with_name(f"{stem.name}.{kind}") for kind in kinds)


def save_by_name(figure: Figure, path: Path | str) -> Path:
    """Write a figure in the format that the end of its name selects. Returns and raises: as `save_figure`."""
    return save_figure(figure, path, [Path(path).suffix[1:].lower()])[0]


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Compute the layout once and keep it inside the block; otherwise every `savefig` would compute it again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.draw_without_rendering()
        engine = figure.get_layout_engine()
        figure.set_layout_engine("none")
        try:
            yield
        finally:
            figure.set_layout_engine(engine)
