"""Options of a command, as fields of a dataclass. `cli.command_line.parsing` fills them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from manyheads.errors import ConfigError

REQUIRED = dataclasses.MISSING
"""The default of an option that must be given."""


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CommandPage(Generic[T]):
    """The options of a command and the other parts of its help page.

    options: a dataclass. description: one or two sentences. examples: command lines that run as they stand.
    """

    options: type[T]
    description: str
    examples: Sequence[str]


def option(
    text: str,
    default: Any = REQUIRED,
    *,
    metavar: str = "",
    default_is: str | None = None,
    aliases: Sequence[str] = (),
    name: str = "",
    after: str = "",
) -> Any:
    """A field of a dataclass of options.

    Args:
        text: for the help page.
        default: its value if it is not given; without one, it must be given, or is None if `default_is` is there.
        metavar: what a value looks like; from the type if empty.
        default_is: for the help page, in place of `default`: what holds if it is not given.
        aliases: other names, such as `-o`.
        name: on the command line, if it is not the field's.
        after: of a class that adds options to those of its base: the field that it and the following ones stand
            behind on the help page.
    """
    about = {
        "text": text,
        "metavar": metavar,
        "default_is": default_is,
        "aliases": aliases,
        "name": name,
        "after": after,
    }
    return _field(default, about)


def argument(
    text: str, default: Any = REQUIRED, *, metavar: str = "", default_is: str | None = None, after: str = ""
) -> Any:
    """As `option`, for an argument that is given by its place."""
    about = {"text": text, "metavar": metavar, "default_is": default_is, "positional": True, "after": after}
    return _field(default, about)


def _field(default: Any, about: dict[str, Any]) -> Any:
    if default is REQUIRED and about["default_is"] is not None:
        default = None
    return dataclasses.field(default=default, metadata=about)


class Shared:
    """Options that several commands have, each declared once."""

    @staticmethod
    def model(default: Any = REQUIRED) -> Any:
        """The model of a command."""
        return argument(
            "A model folder, a run folder, or owner/name on the Hugging Face hub.", default, metavar="MODEL"
        )

    @staticmethod
    def output(what: str) -> Any:
        """The file of a command that writes lines. what: they are."""
        return option(f"File for {what}; - is standard output.", default="-", metavar="FILE", aliases=("-o",))

    @staticmethod
    def json(text: str = "Print one JSON object.") -> Any:
        """A command's output in JSON."""
        return option(text, default=False)

    @staticmethod
    def on_bad_utf8(skipped: str = "") -> Any:
        """The treatment of lines that are not UTF-8. skipped: the effect of skipping one; empty: none is skipped."""
        ways = f"fail, replace its bad bytes, or skip it ({skipped})" if skipped else "fail, or replace its bad bytes"
        return option(f"If a line is not UTF-8: {ways}.", default="fail")


def group(cls: type) -> Any:
    """A field that holds another dataclass of options. On the help page, the class's docstring is their heading."""
    return dataclasses.field(default_factory=cls, metadata={"group": cls})


def names_of(item: dataclasses.Field[Any]) -> tuple[str, ...]:
    """`--output` and its aliases; of an argument, what stands for it on the help page."""
    about = item.metadata
    if about.get("positional"):
        return (about["metavar"] or item.name.upper(),)
    return (f"--{(about.get('name') or item.name).replace('_', '-')}", *about.get("aliases", ()))


def refuse_given(values: Mapping[str, object], reason: str) -> None:
    """Raises: ConfigError: one of these options is given.

    Args:
        values: an option's name -> its value, which is false if it is not given.
        reason: the message, with {} where the names go.
    """
    if found := [name for name, value in values.items() if value]:
        raise ConfigError(reason.replace("{}", " and ".join(found), 1))


def given_options(*groups: Any) -> list[str]:
    """The options of these objects that are not at their defaults, such as `--num-beams`."""
    return [
        names_of(item)[0]
        for options in groups
        for item in dataclasses.fields(options)
        if "group" not in item.metadata and getattr(options, item.name) != item.default
    ]
