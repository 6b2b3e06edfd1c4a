"""Options of a command, as fields of a dataclass. `cli.command_line.parsing` fills them.

The settings of a class: every field with its type, default and text, from the docstring or from the field.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from manyheads.config.files import choice_of, field_types, section_of
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


_ENTRY = re.compile(r"(\w+): (.*)", re.DOTALL)
_HEADING = re.compile(r"[A-Z]\w+:(\s|$)")


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        path: dotted name.
        kind: what a value looks like: `INT`, `noam|cosine`.
        default: the default as a user types it; empty if there is none.
        help: a sentence or two.
    """

    path: str
    kind: str
    default: str
    help: str


def describe(cls: type, values: Any = None, prefix: str = "") -> Iterator[Setting]:
    """Return every setting of a dataclass, including those in its sections and choices.

    Args:
        cls: the dataclass.
        values: an instance, whose values stand in for the defaults.
        prefix: of the dotted names.
    """
    docs = dict(argument_docs(cls))
    for item in dataclasses.fields(cls):
        docs.setdefault(item.name, item.metadata.get("text", ""))
        annotation = field_types(cls)[item.name]
        value = _default(item) if values is None else getattr(values, item.name)
        section, choice = section_of(annotation), choice_of(annotation)
        path = f"{prefix}{item.name}"
        if section is not None:
            yield from describe(section, value, f"{path}.")
            continue
        if choice is None:
            default = "" if value is dataclasses.MISSING else show_value(value)
            yield Setting(path, kind_of(annotation), default, docs.get(item.name, ""))
            continue
        tag, kinds = choice
        if tag != "kind":
            yield from _sections(kinds, tag, value, path)
            continue
        yield Setting(path, "|".join(kinds), getattr(value, tag, ""), docs.get(item.name, ""))
        for kind, one in kinds.items():
            for inner in describe(one, value if isinstance(value, one) else None, f"{path}."):
                if inner.path != f"{path}.{tag}":
                    yield dataclasses.replace(inner, help=f"({kind}) {inner.help}")


def _sections(kinds: Mapping[str, type], tag: str, value: Any, path: str) -> Iterator[Setting]:
    """A choice of whole sections: the chosen one's settings, then what others have besides, with their names."""
    chosen = next((kind for kind, cls in kinds.items() if isinstance(value, cls)), next(iter(kinds)))
    known: set[str] = set()
    for kind in [chosen, *(kind for kind in kinds if kind != chosen)]:
        cls = kinds[kind]
        for inner in describe(cls, value if kind == chosen and isinstance(value, cls) else None, f"{path}."):
            if inner.path == f"{path}.{tag}":
                if kind == chosen:
                    yield dataclasses.replace(inner, kind="|".join(kinds))
            elif kind == chosen or inner.path not in known:
                yield inner if kind == chosen else dataclasses.replace(inner, help=f"({kind}) {inner.help}")
            known.add(inner.path)


@lru_cache(maxsize=64)
def argument_docs(cls: type) -> dict[str, str]:
    """Name -> text of each entry below `Args:` in a class's docstring, and in those of the classes that it extends."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        docs |= {} if base is object else argument_docs(base)
    name, indent, inside = "", 0, False
    for line in inspect.cleandoc(cls.__doc__ or "").split("\n"):
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if depth == 0 and _HEADING.match(text):
            inside, name, indent = text.startswith("Args:"), "", 0
            text = text.removeprefix("Args:").strip() if inside else ""
        if not inside or not text:
            continue
        entry = _ENTRY.fullmatch(text)
        indent = indent or depth
        if entry and (not name or depth <= indent):
            name = entry[1]
            docs[name] = entry[2].strip()
        elif name:
            docs[name] += f" {text}"
    return docs


def show_value(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show_value, value))}]"
    return repr(value) if isinstance(value, float) else str(value)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    return dataclasses.MISSING if item.default_factory is dataclasses.MISSING else item.default_factory()


def kind_of(annotation: Any) -> str:
    """The form of a value of this type on a command line: `INT`, `noam|cosine`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return "|".join("null" if part is type(None) else kind_of(part) for part in arguments)
    if origin in (tuple, list):
        return f"[{kind_of(arguments[0])}, ...]"
    return {bool: "true|false", str: "TEXT"}.get(annotation, getattr(annotation, "__name__", "VALUE").upper())
