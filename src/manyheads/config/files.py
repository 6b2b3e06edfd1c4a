"""Reading of YAML, and writing of YAML and JSON. Plain data only: no tags, no Python objects, no duplicate keys.

Merging of layers of settings: a preset, then files, then the command line.

Later layers override earlier ones key by key.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from manyheads.catalogue import ModelTask, configs_of
from manyheads.errors import ConfigError
from manyheads.files.safe_open import read_limited, read_stream

MAX_BYTES = 2**20
"""Maximum size of a settings file.

Such a file has a page or two; that of a classifier with 10,000 labels is longer. A larger file is a mistake, and
parsing it would take very long.
"""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
_OTHER_BREAKS = re.compile("[\x85\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_NODES = 50_000
"""Maximum number of values after aliases are expanded: a page of nested aliases can expand to billions."""


@dataclass(frozen=True)
class Source:
    """Settings and their origin.

    Args:
        values: nested plain data.
        name: the name of the source in messages: a file's path, `the command line`, `preset demo`.
        lines: dotted path of a key -> its line in the file, counted from 1.
    """

    values: dict[str, Any]
    name: str
    lines: dict[str, int] = field(default_factory=dict)

    def where(self, path: str) -> str:
        """Return `name, line 3` for a dotted path, or the name."""
        line = self.lines.get(path)
        return f"{self.name}, line {line}" if line else self.name

    def section(self, name: str) -> dict[str, Any]:
        """Return the settings of a section; empty where it is missing or no section."""
        section = self.values.get(name)
        return section if isinstance(section, dict) else {}


def load_yaml(path: Path | str, *, may_be_pipe: bool = False) -> Source:
    """Read one settings file.

    Args:
        path: the file.
        may_be_pipe: also read a pipe, into which somebody writes. This is for a name that the user typed, because a
            shell may replace `<(command)` by one. Files found in a folder must be regular files.

    Raises: ConfigError: the file cannot be read, is too large, is not UTF-8, YAML or a mapping, or has a duplicate key.
    """
    path = Path(path)
    try:
        raw = read_stream(path, MAX_BYTES) if may_be_pipe else read_limited(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the settings file {path} cannot be read: {reason}.") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"the settings file {path} is over {MAX_BYTES:,} bytes; is it really a settings file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the settings file {path} is not UTF-8: bad byte at offset {error.start}.") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Source:
    """Read settings from YAML text; `name` is its name in messages.

    Raises: ConfigError: as `load_yaml`.
    """
    lines: dict[str, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return Source({}, name)
            if not isinstance(node, yaml.MappingNode):
                found = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
                raise ConfigError(f"{name} contains no settings: expected lines such as `seed: 1`, found {found}.")
            _walk(node, "", name, lines, {})
            values = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{name}{place}: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply.") from error
    except (ValueError, OverflowError) as error:  # for example a number with too many digits, or month 13
        raise ConfigError(f"{name} contains a value that cannot be read: {error}.") from error
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # PyYAML's, for `!!bool x` or `!!timestamp 1`
        raise ConfigError(f"{name}: a value does not fit its tag, such as `!!int x`; leave out the tag.") from error
    return Source(values, name, lines)


def _walk(node: yaml.Node, path: str, name: str, lines: dict[str, int], sizes: dict[int, int]) -> int:
    """Record the line of every key; refuse duplicate keys, aliases that expand to too many values, and recursive
    aliases.

    Returns: the number of values with aliases expanded; an aliased node is visited once.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ConfigError(f"{name}, line {node.start_mark.line + 1}: an alias refers to a value that contains it.")
        return sizes[id(node)]
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.ScalarNode):
        _join_surrogates(node, name)
        _refuse_other_bases(node, name)
    if isinstance(node, yaml.SequenceNode):
        size += sum(_walk(item, path, name, lines, sizes) for item in node.value)
    if isinstance(node, yaml.MappingNode):
        size += _walk_mapping(node, path, name, lines, sizes)
    if size > MAX_NODES:
        raise ConfigError(
            f"{name}, line {node.start_mark.line + 1}: the value here has over {MAX_NODES:,} values after its aliases"
            " are expanded."
        )
    sizes[id(node)] = size
    return size


def _join_surrogates(node: yaml.ScalarNode, name: str) -> None:
    """Make one character of each pair of surrogates, as in JSON: `"\\ud800\\udc00"`.

    Raises: ConfigError: there is half of a pair, which is no character and cannot be written into a file.
    """
    if not _SURROGATE.search(node.value):
        return
    try:
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        line = node.start_mark.line + 1
        raise ConfigError(
            f"{name}, line {line}: {node.value!r} has half of a surrogate pair, which is no character; remove it."
        ) from None


def _refuse_other_bases(node: yaml.ScalarNode, name: str) -> None:
    """Raises: ConfigError: YAML 1.1 reads the number to the base 60 or 8 (1:30 is 90, 010 is 8), of which few know."""
    if node.tag in _NUMBERS and _OTHER_BASE.fullmatch(node.value):
        line = node.start_mark.line + 1
        raise ConfigError(
            f"{name}, line {line}: {node.value} would be read as {yaml.safe_load(node.value):,} (1:30 counts in 60s,"
            " 010 in 8s). Write the number without a colon and without a leading 0; put a text in quotes."
        )


def _walk_mapping(node: yaml.MappingNode, path: str, name: str, lines: dict[str, int], sizes: dict[int, int]) -> int:
    size = 0
    keys: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(f"{name}, line {line}: a key must be a plain name, not {shown}.")
        _join_surrogates(key, name)
        if key.value in keys:
            raise ConfigError(
                f"{name}, line {line}: `{key.value}` was already set at line {keys[key.value]}; keep one of them."
            )
        keys[key.value] = line
        inner = f"{path}.{key.value}" if path else key.value
        lines[inner] = line
        size += _walk(value, inner, name, lines, sizes)
    return size


def to_plain(value: Any) -> Any:
    """Convert dataclasses to dicts in the order of their fields, tuples to lists, paths to strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


class _Dumper(yaml.SafeDumper):
    """Escapes characters that are line breaks in YAML and Unicode only; otherwise they would be read back as spaces."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _OTHER_BREAKS.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(settings: Any) -> str:
    """Return a dataclass (or plain data) as YAML. The same settings give the same bytes, and `load_yaml` reads them
    back.
    """
    text: str = yaml.dump(to_plain(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)
    return text


def to_json(settings: Any) -> str:
    """Return a dataclass (or plain data) as JSON, indented, with a newline at the end."""
    return json.dumps(to_plain(settings), indent=2, ensure_ascii=False) + "\n"


@lru_cache(maxsize=64)
def field_types(cls: type) -> dict[str, Any]:
    """Name -> type of each field of a dataclass, annotations resolved."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls) if item.init}


def model_choice(task: ModelTask) -> Any:
    """Return the annotation of a field that holds the config of an architecture for a task.

    Only the class that is chosen is imported.
    """
    return Annotated[Any, configs_of(task)]


@lru_cache(maxsize=1024)
def section_of(annotation: Any) -> type | None:
    """Return the dataclass of a section; None: the field is a leaf or a choice."""
    classes = _members(annotation)
    return classes[0] if len(classes) == 1 else None


@lru_cache(maxsize=1024)
def choice_of(annotation: Any) -> tuple[str, Mapping[str, type]] | None:
    """Return the tag of a choice between sections, and its value -> class; None: the field is no choice."""
    if get_origin(annotation) is Annotated:
        return "architecture", annotation.__metadata__[0]
    classes = _members(annotation)
    return tag_of(classes) if len(classes) > 1 else None


def _members(annotation: Any) -> tuple[type, ...]:
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return tuple(option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option))


def variants(annotation: Any, architecture: str = "") -> tuple[type, ...]:
    """Return the dataclasses that a field may hold: one: a section; several: a choice; none: a leaf.

    Args: architecture: leave out, and do not import, the configs of others.
    """
    choice = choice_of(annotation)
    if choice is None:
        return _members(annotation)
    tag, kinds = choice
    if tag == "architecture" and architecture in kinds:
        return (kinds[architecture],)
    return tuple(kinds.values())


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


def dotted_names(cls: type, prefix: str = "", architecture: str = "") -> list[str]:
    """Every setting's dotted path, sections and choices included: `model`, `model.d_model`, `model.attention.kind`.

    Args: architecture: see `variants`.
    """
    names: list[str] = []
    for name, annotation in field_types(cls).items():
        names.append(prefix + name)
        for variant in variants(annotation, architecture):
            inner = dotted_names(variant, f"{prefix}{name}.", architecture)
            names += [one for one in inner if one not in names]
    return names


@lru_cache(maxsize=16)
def list_names(cls: type, prefix: str = "", architecture: str = "") -> frozenset[str]:
    """The dotted paths of the settings that are lists, such as `data.mix`."""
    names: set[str] = set()
    for name, annotation in field_types(cls).items():
        if get_origin(annotation) is tuple:
            names.add(prefix + name)
        for variant in variants(annotation, architecture):
            names |= list_names(variant, f"{prefix}{name}.", architecture)
    return frozenset(names)


def merge(cls: type, sources: Sequence[Source]) -> dict[str, Any]:
    """The sources as one nested dict, later ones winning key by key.

    Where a later source names another kind of a choice, the earlier kind's own settings are dropped with it.
    """
    merged: dict[str, Any] = {}
    for source in sources:
        merged = _merge(cls, merged, source.values)
    return merged


def _merge(cls: type | None, base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    annotations = {} if cls is None else field_types(cls)
    merged = dict(base)
    for name, value in new.items():
        section, choice = section_of(annotations.get(name)), choice_of(annotations.get(name))
        if choice is not None and isinstance(value, str):
            value = {choice[0]: value}
        if (section or choice) and isinstance(value, Mapping):
            old = merged.get(name)
            old = old if isinstance(old, Mapping) else {}
            if choice is not None:
                tag, kinds = choice
                kind = old.get(tag, next(iter(kinds)))
                if value.get(tag, kind) != kind:
                    old = {}
                section = kinds.get(str(value.get(tag, kind)))
            merged[name] = _merge(section, old, value)
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


def from_dotted(
    classes: Sequence[type], given: Mapping[str, Any], name: str = "the command line", architecture: str = ""
) -> Source:
    """Settings given by dotted names, such as `model.d_model`, as a nested dict.

    Values stay text (types are checked later), but `null` is None, and `[...]` or several values are a list.

    Args:
        classes: the settings' classes; a name may belong to any of them.
        given: dotted name -> text, or a list of texts; True for a name without a value.
        name: what to call the source in messages.
        architecture: see `variants`.
    """
    values: dict[str, Any] = {}
    for path, value in given.items():
        if isinstance(value, list):
            # One bracketed value is the list itself; the shell may have divided it at its spaces.
            joined = " ".join(value)
            value = _value(joined) if joined.startswith("[") or joined == "null" else list(value) or True
        plain = _value(value) if isinstance(value, str) else value
        _set(classes, values, path.split("."), plain, architecture)
    return Source(values, name)


def _set(classes: Sequence[type], values: dict[str, Any], path: list[str], value: Any, architecture: str) -> None:
    for part in path[:-1]:
        fields = [field_types(cls).get(part) for cls in classes]
        choice = next(filter(None, map(choice_of, fields)), None)
        classes = [inner for annotation in fields for inner in variants(annotation, architecture)]
        inner = values.get(part)
        if not isinstance(inner, dict):
            # `--model.attention additive` may stand before `--model.attention.hidden_dim 64`
            values[part] = inner = {choice[0]: inner} if isinstance(inner, str) and choice else {}
        values = inner
    values[path[-1]] = value


def _value(text: str) -> Any:
    if text == "null":
        return None
    if text.startswith("[") and text.endswith("]"):
        return [item.strip() for item in text[1:-1].split(",") if item.strip()]
    return text
