"""Merging of layers of settings: a preset, then files, then the command line.

Later layers override earlier ones key by key.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from manyheads.config.files import Source


@lru_cache(maxsize=64)
def field_types(cls: type) -> dict[str, Any]:
    """Name -> type of each field of a dataclass, annotations resolved."""
    hints = get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if item.init}


@lru_cache(maxsize=1024)
def variants(annotation: Any) -> tuple[type, ...]:
    """Return the dataclasses that a field may hold: one: a section; several: a choice, distinguished by a tag; none: a
    leaf."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return tuple(option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option))


def tag_of(classes: Sequence[type]) -> tuple[str, dict[str, type]]:
    """The field that distinguishes the classes of a choice: its name, and its value -> class.

    It is the first field that is in all of them a literal of one word, another in each: `kind`, `architecture`.
    """
    for name in field_types(classes[0]):
        annotations = [field_types(cls).get(name) for cls in classes]
        words = [get_args(annotation) for annotation in annotations if get_origin(annotation) is Literal]
        if len(words) == len(classes) == len({word for word, *_ in words}) and all(len(word) == 1 for word in words):
            return name, {word: cls for (word,), cls in zip(words, classes, strict=True)}
    raise TypeError(f"nothing tells {', '.join(cls.__name__ for cls in classes)} apart")


def dotted_names(cls: type, prefix: str = "") -> list[str]:
    """Every setting's dotted path, sections and choices included: `model`, `model.d_model`, `model.attention.kind`."""
    names: list[str] = []
    for name, annotation in field_types(cls).items():
        names.append(prefix + name)
        for variant in variants(annotation):
            names += [inner for inner in dotted_names(variant, f"{prefix}{name}.") if inner not in names]
    return names


@lru_cache(maxsize=16)
def list_names(cls: type, prefix: str = "") -> frozenset[str]:
    """The dotted paths of the settings that are lists, such as `data.mix`."""
    names: set[str] = set()
    for name, annotation in field_types(cls).items():
        if get_origin(annotation) is tuple:
            names.add(prefix + name)
        for variant in variants(annotation):
            names |= list_names(variant, f"{prefix}{name}.")
    return frozenset(names)


def merge(cls: type, sources: Sequence[Source]) -> dict[str, Any]:
    """The sources as one nested dict, later ones winning key by key.

    Where a later source names another kind of a choice, the earlier kind's own settings are dropped with it.
    """
    merged: dict[str, Any] = {}
    for source in sources:
        merged = _merge((cls,), merged, source.values)
    return merged


def _merge(classes: tuple[type, ...], base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    if len(classes) > 1:
        tag, kinds = tag_of(classes)
        if tag in new and new[tag] != base.get(tag, next(iter(kinds))):
            return dict(new)
    annotations = {name: annotation for cls in classes for name, annotation in field_types(cls).items()}
    merged = dict(base)
    for name, value in new.items():
        inner = variants(annotations.get(name))
        if len(inner) > 1 and isinstance(value, str):
            value = {tag_of(inner)[0]: value}
        if inner and isinstance(value, Mapping):
            old = merged.get(name)
            merged[name] = _merge(inner, old if isinstance(old, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


def to_dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value in nested sections by its dotted name, such as `model.d_model`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = f"{prefix}{name}"
        found |= to_dotted(value, f"{inner}.") if isinstance(value, Mapping) else {inner: value}
    return found


def from_dotted(classes: Sequence[type], given: Mapping[str, Any], name: str = "the command line") -> Source:
    """Settings given by dotted names, such as `model.d_model`, as a nested dict.

    Values stay text (types are checked later), but `null` is None, and `[...]` or several values are a list.

    Args:
        classes: the settings' classes; a name may belong to any of them.
        given: dotted name -> text, or a list of texts; True for a name without a value.
        name: what to call the source in messages.
    """
    values: dict[str, Any] = {}
    for path, value in given.items():
        if isinstance(value, list):
            # One bracketed value is the list itself; the shell may have divided it at its spaces.
            joined = " ".join(value)
            value = _value(joined) if joined.startswith("[") or joined == "null" else list(value) or True
        _set(classes, values, path.split("."), _value(value) if isinstance(value, str) else value)
    return Source(values, name)


def _set(classes: Sequence[type], values: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        fields = [field_types(cls).get(part) for cls in classes]
        own = next(filter(None, map(variants, fields)), ())
        classes = [inner for annotation in fields for inner in variants(annotation)]
        inner = values.get(part)
        if not isinstance(inner, dict):
            # `--model.attention additive` may stand before `--model.attention.hidden_dim 64`
            chosen = isinstance(inner, str) and len(own) > 1
            values[part] = inner = {tag_of(own)[0]: inner} if chosen else {}
        values = inner
    values[path[-1]] = value


def _value(text: str) -> Any:
    if text == "null":
        return None
    if text.startswith("[") and text.endswith("]"):
        return [item.strip() for item in text[1:-1].split(",") if item.strip()]
    return text
