"""The options that several kinds of `manyheads inspect` have: a model and its text, and files of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.printing import say
from manyheads.config.options import argument, group, option
from manyheads.decoding.options import InspectionDeviceOptions
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.decoding.generator import Generator
    from manyheads.decoding.translator import Translator

__all__ = ["PICTURES", "ModelOptions", "check_kinds", "picture_option", "write_figure"]

PICTURES = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, and what it reads."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    text: str = option("What the model reads.", metavar="TEXT")
    run_on: InspectionDeviceOptions = group(InspectionDeviceOptions)

    def open(self) -> Translator | Generator:
        """Load the model. Raises: see `decoding.attending.open_model`."""
        from manyheads.decoding.attending import open_model

        return open_model(self.model, self.run_on.device, self.run_on.fixed_precision())


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
