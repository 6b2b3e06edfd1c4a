"""Files of pictures: the ends of their names select the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.printing import say
from manyheads.config.options import option
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "check_kinds", "picture_option", "write_figure"]

PICTURES = ("png", "svg", "pdf")


def picture_option(default: str, kinds: Sequence[str] = PICTURES) -> Any:
    """The option `--output` of a command that draws."""
    text = f"Files to write; the ends of their names select the format: .{', .'.join(kinds)}."
    return option(text, default=(default,), metavar="FILE ...", default_is=default, aliases=("-o",))


def check_kinds(names: Sequence[str], kinds: Sequence[str] = PICTURES, *, given_by: str = "--output") -> None:
    """Check the names of the files that an option gives.

    Raises: ConfigError: there is no file for `--output`, or one of another kind.
    """
    if not names and given_by == "--output":
        raise ConfigError(f"--output names no file; give one that ends in .{', .'.join(kinds)}.")
    for name in names:
        if Path(name).suffix[1:].lower() not in kinds:
            raise ConfigError(f"{given_by} {name}: it must end in .{', .'.join(kinds)}.")


def write_figure(figure: Figure, names: Sequence[str]) -> None:
    """Write a figure to each of these files, and print their paths. Raises: SaveError: one cannot be written."""
    from manyheads.visualise.figure import save_by_name

    for name in names:
        say(save_by_name(figure, name))
