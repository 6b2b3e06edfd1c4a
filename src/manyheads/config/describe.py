"""The settings of a class: every field with its type, default and text, from the docstring or from the field."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin

from manyheads.config.files import choice_of, field_types, section_of

_ENTRY = re.compile(r"(\w+): (.*)", re.DOTALL)
_HEADING = re.compile(r"[A-Z]\w+:(\s|$)")


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        path: dotted name.
        kind: what a value looks like: `INT`, `noam|cosine`.
        default: as it would be typed; empty if there is none.
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
