"""The command line: options from dataclasses, their help pages, and a command as a function of them.

A dataclass declares the options; argparse reads them as text, and pydantic converts the text to values.

Every value of an option may begin with a dash. An option that takes several values may be given several times; one that
takes one value may be repeated only with the same value. Options may stand before, between and after arguments. `_` and
`-` in the name of an option are alike. See docs/decisions/018.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_origin

from manyheads.catalogue import PLUGINS
from manyheads.cli.main import EXIT_CODES
from manyheads.config.build import REMOVED, convert
from manyheads.config.checks import did_you_mean
from manyheads.config.files import Source, dotted_names, field_types, from_dotted, list_names
from manyheads.config.options import REQUIRED, CommandPage, kind_of, names_of, show_value
from manyheads.errors import ConfigError

_INDENT = 30


def program() -> str:
    """Return the command that calls this program, with its plug-ins: its name if the shell finds it, or its path."""
    own = Path(sys.executable).with_name("manyheads")
    found = shutil.which("manyheads")
    plugins = "".join(f" --plugin {name}" for name in os.environ.get(PLUGINS, "").split(",") if name)
    if not own.exists() or (found and Path(found).resolve() == own.resolve()):
        return f"manyheads{plugins}"
    shown = os.path.relpath(own)
    return (str(own) if shown.startswith("..") else shown) + plugins


def help_page(usage: str, description: str, examples: Sequence[str], sections: Iterable[tuple[str, list[str]]]) -> str:
    """Return a whole help page.

    Args:
        usage: the command line in short.
        description: a sentence or two, or several lines.
        examples: command lines that run as they stand.
        sections: heading and lines of each.
    """
    paragraphs = re.split(r"(?<=[.:])\n", description)
    about = [line for paragraph in paragraphs for line in _wrapped(paragraph, "")]
    lines = [f"usage: {usage}", "", *about, "", "examples:"]
    lines += [f"  {example}" for example in examples]
    for heading, body in sections:
        lines += ["", f"{heading}:", *body]
    return "\n".join([*lines, "", *_wrapped(EXIT_CODES, "")])


def option_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """`  --name KIND   what it does [default]`, wrapped to the terminal's width. rows: the two columns."""
    lines: list[str] = []
    for name, text in rows:
        left, body = f"  {name}", _wrapped(text, " " * _INDENT)
        if len(left) + 2 <= _INDENT and body:
            body[0] = f"{left:<{_INDENT}}{body[0].strip()}"
            lines += body
        else:
            lines += [left, *body]
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 70), 120)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


T = TypeVar("T")


def command(page: CommandPage[T], name: str) -> Callable[[Callable[[T], int]], Callable[[Sequence[str]], int]]:
    """Turn a function of options into one of the arguments after the command's name; see `parsing.parse`.

    Args: page: of the options. name: of the command, for its help page and messages.
    """

    def of_arguments(run: Callable[[T], int]) -> Callable[[Sequence[str]], int]:
        @wraps(run)
        def parsed(arguments: Sequence[str]) -> int:
            return run(parse(page, arguments, name))

        return parsed

    return of_arguments


_NO_VALUE = object()
_FILES = {"FILE", "DIR", "MODEL", "INPUT", "RUN", "DATA", "PATH", "SOURCE"}
"""Metavars for the name of a file or folder. A shell completes such names."""


class _Once(argparse.Action):
    """Stores the only value of an option. Raises: argparse.ArgumentError: it already has another value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, values)
        if before != values:
            shown = " and as ".join("true" if one is True else repr(one) for one in (before, values))
            raise argparse.ArgumentError(self, f"takes one value, but is given as {shown}; give it once")
        setattr(namespace, self.dest, values)


@dataclass(frozen=True)
class _Option:
    """One option or argument of a dataclass, or of a dataclass inside it.

    Attributes:
        path: names of the fields that lead to it, joined by dots.
        names: `--output` and its aliases; of an argument, its metavar alone.
        annotation: its type.
        about: the field's metadata.
        default: of the field.
    """

    path: str
    names: tuple[str, ...]
    annotation: Any
    about: Mapping[str, Any]
    default: Any

    @property
    def is_positional(self) -> bool:
        return bool(self.about.get("positional"))

    @property
    def is_flag(self) -> bool:
        return self.annotation is bool

    @property
    def takes_several(self) -> bool:
        return get_origin(self.annotation) in (tuple, list)

    @property
    def choices(self) -> list[str]:
        """The words that a value may be; empty if it may be any."""
        return [word for word in kind_of(self.annotation).split("|") if word not in ("null", word.upper())]

    @property
    def metavar(self) -> str:
        """The form of a value on the help page."""
        return self.about["metavar"] or kind_of(self.annotation).removesuffix("|null")

    @property
    def names_files(self) -> bool:
        """Whether a value is the name of a file or folder."""
        return bool(_FILES & set(re.findall(r"[A-Z]+", self.about["metavar"])))

    def row(self) -> tuple[str, str]:
        """The two columns of the help page."""
        default = self.about["default_is"]
        if default is None:
            default = "" if self.default in (REQUIRED, None, False, (), "") else show_value(self.default)
        elif default:
            default = f"default: {default}"
        left = (
            ", ".join(self.names) if self.is_flag or self.is_positional else f"{', '.join(self.names)} {self.metavar}"
        )
        return left, f"{self.about['text']}{f' [{default}]' if default else ''}"


def _ordered(cls: type) -> list[Field[Any]]:
    """The fields in the order of the help page: required ones first, inherited ones last, but see `option(after=)`."""
    names = inspect.get_annotations(cls)
    own = [item for item in fields(cls) if item.name in names]
    if not any(item.metadata.get("after") for item in own):
        return sorted(fields(cls), key=lambda item: (item.default is not REQUIRED, item.name not in names))
    found, place = [item for item in _ordered(cls.__mro__[1]) if item.name not in names], 0
    for item in own:
        after = item.metadata.get("after")
        place = 1 + (next(n for n, one in enumerate(found) if one.name == after) if after else place)
        found.insert(place, item)
    return found


def _options(cls: type, path: str = "") -> Iterator[_Option]:
    for item in _ordered(cls):
        about, inner = item.metadata, f"{path}{item.name}"
        if "group" in about:
            yield from _options(about["group"], f"{inner}.")
            continue
        yield _Option(inner, names_of(item), field_types(cls)[item.name], about, item.default)


@dataclass
class Given:
    """The parts of a command line, as text.

    Attributes:
        options: path of the field -> a string, several, or True.
        settings: those that were given by dotted names.
        mistakes: a sentence each.
        wants_help: -h or --help is among them.
    """

    options: dict[str, Any]
    settings: Source
    mistakes: list[str]
    wants_help: bool


def make_parser(
    cls: type, settings: Sequence[type] = (), architecture: str = "", *, complete: bool = False
) -> argparse.ArgumentParser:
    """The parser of a dataclass of options.

    Args:
        cls: the dataclass.
        settings: classes whose settings are options, too, by their dotted names, such as `--model.d_model`.
        architecture: leave out the settings of models of others; empty: none.
        complete: for tab completion: with the words that a value may be, and which values are files.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this page")
    for one in _options(cls):
        about: dict[str, Any] = {"help": one.about["text"].replace("%", "%%")}
        if one.is_flag:
            parser.add_argument(*one.names, action="store_true", dest=one.path, **about)
            continue
        about |= {"nargs": "*"} if one.takes_several else {"nargs": "?"}
        if one.is_positional:
            action = parser.add_argument(one.path, metavar=one.names[0], **about)
        else:
            about |= {"action": "extend"} if one.takes_several else {"const": _NO_VALUE, "action": _Once}
            action = parser.add_argument(*one.names, dest=one.path, **about)
        if complete:
            action.choices = one.choices or None
            if one.about["metavar"].partition(" ")[0] in _FILES:
                import shtab

                action.complete = shtab.FILE  # type: ignore[attr-defined]
    several = {name for one in settings for name in list_names(one, architecture=architecture)}
    for name in [*_dotted(settings, architecture), *([] if complete else _removed(settings, architecture))]:
        # With underscores for completion, as the help page has them; else with dashes, see `_tokens`.
        shown = name if complete and "." in name else name.replace("_", "-")
        number: dict[str, Any] = {"nargs": "?", "const": True, "action": _Once}
        if name in several:
            number = {"nargs": "*", "action": "extend"}
        parser.add_argument(f"--{shown}", dest=f"setting {name}", **number)
    return parser


def _dotted(settings: Sequence[type], architecture: str) -> list[str]:
    return list(dict.fromkeys(name for one in settings for name in dotted_names(one, architecture=architecture)))


def _removed(settings: Sequence[type], architecture: str) -> list[str]:
    """The settings of earlier versions, which are accepted at their neutral values; see `REMOVED`."""
    sections = {name.partition(".")[0] for name in _dotted(settings, architecture)}
    return [name for name in REMOVED if name.partition(".")[0] in sections]


def read(
    cls: type,
    arguments: Sequence[str],
    settings: Sequence[type] = (),
    elsewhere: Mapping[str, str] | None = None,
    architecture: str = "",
) -> Given:
    """Sort arguments into options, settings and mistakes.

    Args:
        cls: the dataclass of options.
        arguments: after the command's name.
        settings: classes of settings; `--section.key value` is a setting of any of them, `--section.flag` means true.
        elsewhere: options of other tasks -> the message for each.
        architecture: as for `make_parser`.
    """
    names = _dotted(settings, architecture)
    parser = make_parser(cls, settings, architecture)
    known = {name: action for action in parser._actions for name in action.option_strings}
    mistakes: list[str] = []
    try:
        found, rest = parser.parse_known_intermixed_args(list(_tokens(arguments, known, mistakes)))
    except argparse.ArgumentError as error:
        return Given({}, Source({}, ""), [*mistakes, f"{error.argument_name}: {error.message}."], False)
    # As the help page has them: the sections of settings with underscores.
    shown = [name[2:] for one in _options(cls) for name in one.names if name.startswith("--")]
    shown += ["help", *(name if "." in name else name.replace("_", "-") for name in names)]
    strange = [argument.partition("=")[0] for argument in rest if re.match(r"--?[A-Za-z]", argument)]
    for name in dict.fromkeys(strange):
        if elsewhere and name in elsewhere:
            mistakes.append(elsewhere[name])
            continue
        near = did_you_mean(name[2:], shown, prefix="--") if name.startswith("--") else ""
        mistakes.append(f"There is no option {name}.{near}")
    if rest and not strange:
        mistakes.append(f"Unexpected argument{'s' * (len(rest) > 1)}: {', '.join(map(repr, rest))}.")
    options = vars(found)
    wants_help = options.pop("help", False)
    known_names = [*names, *_removed(settings, architecture)]
    given = {name: options.pop(f"setting {name}") for name in known_names if f"setting {name}" in options}
    for one in _options(cls):
        if options.get(one.path) in (_NO_VALUE, []):
            mistakes.append(f"{one.names[0]} needs a value.")
            del options[one.path]
    return Given(options, from_dotted(settings, given, architecture=architecture), mistakes, wants_help)


def _tokens(arguments: Sequence[str], known: Mapping[str, argparse.Action], mistakes: list[str]) -> Iterator[str]:
    """Return the arguments in the form that argparse needs: names with dashes, and a value that begins with a dash
    joined to its option."""
    left = list(arguments)
    while left:
        token = left.pop(0)
        if token == "--":  # noqa: S105  (a token of text, not a password)
            yield from (token, *left)
            return
        name, has_value, value = token.partition("=")
        if not token.startswith("--"):
            yield token
            continue
        name = name.replace("_", "-")
        action = known.get(name)
        if action is not None and action.nargs == 0:
            if has_value and value not in ("true", "false"):
                mistakes.append(f"{name} is {value!r}; it takes no value.")
            if value != "false":
                yield name
            continue
        begins = not has_value and action is not None and action.nargs == "?" and left
        if begins and re.match(r"-[^-]", left[0]) and left[0] not in known:
            has_value, value = "=", left.pop(0)
        yield f"{name}{has_value}{value}"


def parse(
    page: CommandPage[T], arguments: Sequence[str], command: str, elsewhere: Mapping[str, str] | None = None
) -> T:
    """Read the options of a command. If help is asked for, print the page and raise SystemExit.

    Args:
        page: the options and the rest of the help page.
        arguments: after the command's name.
        command: the command's name.
        elsewhere: options of other tasks -> the message for each.

    Raises: ConfigError: an option is unknown (with the nearest name), lacks its value, or has one that does not fit.
    """
    cls = page.options
    given = read(cls, arguments, elsewhere=elsewhere)
    if given.wants_help:
        print(help_page(f"manyheads {command} {_usage(cls)}", page.description, page.examples, _sections(cls)))
        raise SystemExit(0)
    missing = [one.names[0] for one in _options(cls) if one.default is REQUIRED and one.path not in given.options]
    if missing and not given.mistakes:
        given.mistakes.append(f"Missing: {', '.join(missing)}.")
    values = _values(cls, given)
    if given.mistakes:
        raise ConfigError(f"{' '.join(given.mistakes)} See manyheads {command} --help.")
    return _build(cls, values)


def fill(cls: type[T], given: Given) -> T:
    """Return the options with their values. Values that do not fit are left out and added to the mistakes."""
    return _build(cls, _values(cls, given))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _values(cls: type, given: Given) -> dict[str, Any]:
    values = {}
    for one in _options(cls):
        if one.path in given.options:
            if one.names_files and "" in _as_list(given.options[one.path]):
                told = "is empty, perhaps from an unset shell variable; name a file or folder."
                given.mistakes.append(f"{one.names[0]} {told}")
                continue
            try:
                values[one.path] = convert(one.annotation, given.options[one.path], one.names[0])
            except ConfigError as error:
                given.mistakes.append(str(error))
    return values


def _build(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    own = {}
    for item in fields(cls):  # type: ignore[arg-type]
        inner = f"{path}{item.name}"
        if "group" in item.metadata:
            own[item.name] = _build(item.metadata["group"], values, f"{inner}.")
        elif inner in values:
            own[item.name] = values[inner]
    return cls(**own)


def _usage(cls: type) -> str:
    """Return the arguments, then the required options."""
    shown = []
    for one in sorted(_options(cls), key=lambda one: not one.is_positional):
        if one.default is REQUIRED:
            shown.append(one.names[0] if one.is_positional else f"{one.names[0]} {one.metavar}")
        elif one.is_positional:
            shown.append(f"[{one.names[0]}]")
    return " ".join([*shown, "[OPTIONS]"])


def option_names(cls: type) -> set[str]:
    """All names of the options of a dataclass, such as `--num-beams` and `--beam`."""
    return {name for one in _options(cls) if not one.is_positional for name in one.names}


def option_rows(cls: type) -> list[tuple[str, str]]:
    """Rows of the help page for the options of a dataclass, without those of the groups in it."""
    return [one.row() for one in _options(cls) if not one.is_positional and "." not in one.path]


def _sections(cls: type) -> Iterator[tuple[str, list[str]]]:
    arguments = [one.row() for one in _options(cls) if one.is_positional]
    if arguments:
        yield "arguments", option_lines(arguments)
    yield "options", option_lines([*option_rows(cls), ("-h, --help", "Show this page.")])
    for item in fields(cls):
        if "group" in item.metadata:
            inner = item.metadata["group"]
            yield (inner.__doc__ or item.name).strip().rstrip("."), option_lines(one.row() for one in _options(inner))
