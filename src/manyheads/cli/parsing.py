"""A command's arguments: a dataclass that tyro fills from the command line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import tyro

from manyheads.cli.main import EXIT_CODES
from manyheads.config.suggest import did_you_mean
from manyheads.errors import ConfigError

__all__ = ["given_options", "parse"]

T = TypeVar("T")

_MARKERS = (tyro.conf.FlagCreatePairsOff,)


def parse(cls: type[T], arguments: Sequence[str], *, command: str, description: str, examples: Sequence[str]) -> T:
    """Fill `cls` from `arguments`; prints help and leaves by SystemExit where that is asked for.

    Args:
        cls: a dataclass whose fields are the options; docstrings below the fields are their help.
        command: the subcommand's name.
        description: one or two sentences.
        examples: command lines that run as they stand.

    Raises: ConfigError: an option is unknown (with the nearest name), lacks its value, or has one that does not fit.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                cls,
                args=list(arguments),
                prog=f"manyheads {command}",
                description=f"{description}\n\nexamples:\n{lines}\n\n{EXIT_CODES}",
                config=_MARKERS,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        reason = _unknown(cls, arguments) or _in_words(complaint.getvalue())
        raise ConfigError(f"{reason} See manyheads {command} --help.") from None


def given_options(*groups: Any) -> list[str]:
    """The options that were given, such as `--num-beams`, of dataclasses of options: those not at their defaults."""
    return [
        f"--{option.name.replace('_', '-')}"
        for group in groups
        for option in fields(group)
        if getattr(group, option.name) != option.default
    ]


def _unknown(cls: type, arguments: Sequence[str]) -> str:
    """A sentence for each option that the command does not have; empty if there is none."""
    options = _options(cls)
    known = [option for option in options if option.startswith("--")]
    folded = {option.replace("_", "-") for option in options}
    typed = [argument.partition("=")[0] for argument in arguments]
    strange = [
        option for option in typed if re.match(r"--?[A-Za-z]", option) and option.replace("_", "-") not in folded
    ]
    return " ".join(f"There is no option {option}.{did_you_mean(option, known)}" for option in dict.fromkeys(strange))


def _options(cls: type) -> list[str]:
    """Every option that the help names; it is the only public place where tyro lists them."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        tyro.cli(cls, args=["--help"], config=_MARKERS)
    return re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", page.getvalue())


def _in_words(box: str) -> str:
    """tyro's complaint, a box with a title and hints below a rule, as a sentence or two.

    A form that is not recognised stays in tyro's words.
    """
    rows = [row.strip(" │") for row in box.split("\n")]
    rows = [row for row in rows if row][1:]  # the first is the title
    if rows and _is_rule(rows[0]):  # where the terminal has no box characters, the title is underlined
        del rows[0]
    rows = rows[: next((place for place, row in enumerate(rows) if _is_rule(row)), len(rows))]
    if rows and rows[0].startswith("Missing from"):
        names = [name for row in rows[1:] if (name := _option_of(row))]
        return f"Missing: {', '.join(names)}."
    text = " ".join(rows)
    text = text.partition(" Got errors:")[0]
    text = re.sub(r"no type matching (?:\{None\}\|)?(\S+) could be instantiated from \[(.*)\]", r"\2 is no \1", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"\1 is no INT", text)
    text = re.sub(r"could not convert string to float: ('.*')", r"\1 is no FLOAT", text)
    text = re.sub(r"Could not find valid parse for arguments: \[(.*)\]", r"\1 does not fit", text)
    text = re.sub(r"Expected one of \((.*)\)", _choices, text)
    text = re.sub(r"^Unrecognized options:", "There is no place for", text)
    text = re.sub(r"^Error parsing ", "", text)
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if not text.startswith("-") else f"{text.rstrip('.')}."


def _is_rule(row: str) -> bool:
    return set(row) <= set("─-╰╯")


def _option_of(row: str) -> str:
    """The long option or the capital name that a row of a help page begins with; empty where it is prose."""
    found = re.match(r"(?:-\w[^,]*, )?(--[a-z][\w-]*)|([A-Z][A-Z_]+)(?= |$)", row)
    return (found[1] or found[2]) if found else ""


def _choices(listed: re.Match[str]) -> str:
    names = sorted(re.findall(r"'([^']*)'", listed[1]))
    return "Choose one of: " + ", ".join(name for name in names if name != "None")
