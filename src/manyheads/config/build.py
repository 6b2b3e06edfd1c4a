"""Conversion of plain data to frozen dataclasses. All mistakes are reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from manyheads.catalogue import refusal
from manyheads.config.checks import did_you_mean, one_or_more
from manyheads.config.files import Source, choice_of, field_types, merge, section_of
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

REMOVED: dict[str, Any] = {
    "training.r_drop": 0.0,
}
"""Settings of earlier versions, by their names in a run's settings -> the value without effect, which is accepted."""

T = TypeVar("T")
_MISSING = object()
MOST_NUMBER = 2**64
"""Largest whole number. Most settings have a narrower range; a seed, for example, does not."""
MOST_HINTS = 50
"""For this many unknown settings the nearest name is suggested; further ones are only listed, because the search takes
time."""


def build(cls: type[T], values: Mapping[str, Any], name: str = "the settings", section: str = "") -> T:
    """Build one dataclass from plain data.

    Args: name: what the data is called in messages, a file's path for example. section: of a run's settings, if `cls`
        is one, such as `model`; see `REMOVED`.
    Raises: ConfigError: unknown keys (with the nearest name), wrong types, values that the class itself refuses;
        all of them in one message, a line each.
    """
    return resolve(cls, [Source(dict(values), name)], section)


def resolve(cls: type[T], sources: Sequence[Source], section: str = "") -> T:
    """Build one dataclass from layers of settings; later layers override earlier ones.

    Raises: ConfigError: as `build`; each mistake names the source, and the line where it is a file.
    """
    mistakes: list[tuple[str, str]] = []
    result = _section(cls, _without_removed(merge(cls, sources), section, mistakes), "", mistakes)
    if not mistakes:
        if not isinstance(result, cls):
            raise TypeError(f"building {cls.__name__} gave {result!r}")
        return result
    lines = [f"{_origin(path, sources)}: {message}" for path, message in mistakes]
    if len(lines) == 1:
        raise ConfigError(lines[0])
    raise ConfigError(f"{len(lines)} mistakes in the settings:\n" + "\n".join(f"  {line}" for line in lines))


def _without_removed(values: dict[str, Any], section: str, mistakes: list[tuple[str, str]]) -> dict[str, Any]:
    """Leave out the settings of `REMOVED`, and note those whose values had an effect."""
    for full, neutral in REMOVED.items():
        name = full.removeprefix(f"{section}.") if section else full
        head, _, rest = name.partition(".")
        inner = values.get(head) if rest else values
        last = rest or head
        if (section and name == full) or not isinstance(inner, Mapping) or last not in inner:
            continue
        if not _is_neutral(inner[last], neutral):
            remedy = f"it is no longer there; set it to {neutral!r}, or leave it out."
            mistakes.append((name, f"{name} is {_shown(inner[last])}, but {remedy}"))
        others = {key: value for key, value in inner.items() if key != last}
        values = {**values, head: others} if rest else others
    return values


def _is_neutral(value: Any, neutral: Any) -> bool:
    """Whether a value, which the command line gives as text, is the neutral one."""
    if isinstance(value, str) and isinstance(neutral, float):
        with suppress(ValueError):
            value = float(value)
    return bool(value == neutral)


def _origin(path: str, sources: Sequence[Source]) -> str:
    """The last source that sets `path`; for the mistake of a whole section, the last that sets anything in it."""
    for source in reversed(sources):
        value: Any = source.values
        for part in path.split(".") if path else []:
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING:
            return source.where(path)
    return sources[-1].name if sources else "the settings"


def _section(cls: type, values: Any, path: str, mistakes: list[tuple[str, str]]) -> Any:
    """Build one dataclass; on a mistake note it and return None."""
    if not isinstance(values, Mapping):
        shown = "empty" if values is None else _shown(values)
        names = [f"{path}.{name}" if path else name for name in field_types(cls)]
        known = f"it is a section with these settings: {', '.join(names)}. Give one of these instead."
        mistakes.append((path, f"{path} is {shown}; {known}"))
        return None
    annotations = field_types(cls)
    dot = f"{path}." if path else ""
    before = len(mistakes)
    given: dict[str, Any] = {}
    wrong: set[str] = set()
    for name, value in values.items():
        if name not in annotations:
            near = did_you_mean(str(name), annotations, prefix=dot) if len(mistakes) < MOST_HINTS else ""
            mistakes.append((f"{dot}{name}", f"there is no setting {dot}{name}.{near}"))
            continue
        noted = len(mistakes)
        given[name] = _field(annotations[name], value, f"{dot}{name}", mistakes)
        if len(mistakes) > noted:
            wrong.add(name)
            del given[name]
    required = [
        item.name
        for item in dataclasses.fields(cls)
        if item.init and item.default is item.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in values:
            mistakes.append((path, f"{dot}{name} is missing."))
            wrong.add(name)
    if wrong.intersection(required):
        return None
    result = _construct(cls, given, wrong, path, mistakes)
    return result if len(mistakes) == before else None


def _construct(cls: type, given: dict[str, Any], wrong: set[str], path: str, mistakes: list[tuple[str, str]]) -> Any:
    """Call the class repeatedly to find more than the first error.

    Before each call the fields of the last error are reset to their defaults. A later error that involves any of these
    fields is ignored, because the user did not write that combination.
    """
    given, doubtful = dict(given), set(wrong)
    while True:
        try:
            return cls(**given)
        except ConfigError as error:
            if not doubtful.intersection(error.fields):
                about = next((name for name in given if name in error.fields), "")
                mistakes.append((".".join(part for part in (path, about) if part), str(error)))
            reset = set(error.fields).intersection(given)
            if not reset:
                return None
            doubtful |= reset
            for name in reset:
                del given[name]


def _field(annotation: Any, value: Any, path: str, mistakes: list[tuple[str, str]]) -> Any:
    section, choice = section_of(annotation), choice_of(annotation)
    if section is not None and (value is not None or type(None) not in get_args(annotation)):
        return _section(section, value, path, mistakes)
    if choice is not None:
        return _choice(*choice, value, path, mistakes)
    try:
        return convert(annotation, value, path)
    except ConfigError as error:
        mistakes.append((path, str(error)))
        return None


def _choice(tag: str, kinds: Mapping[str, type], value: Any, path: str, mistakes: list[tuple[str, str]]) -> Any:
    """Build a tagged choice.

    The tag selects one of the classes; a name without settings selects that kind with its defaults.
    """
    listed = ", ".join(kinds)
    if isinstance(value, str):
        value = {tag: value}
    if not isinstance(value, Mapping):
        mistakes.append((path, f"{path} is {value!r}; give its {tag}, one of: {listed}."))
        return None
    kind = value.get(tag, next(iter(kinds)))
    if not isinstance(kind, str) or kind not in kinds:
        mistakes.append((f"{path}.{tag}", f"{path}.{tag} is {kind!r}; {_not_among(kind, kinds)}"))
        return None
    return _section(kinds[kind], value, path, mistakes)


def convert(annotation: Any, value: Any, name: str) -> Any:
    """A value of this type from plain data, such as the text of a command line.

    One text or number in place of a tuple is its only item.

    Args: name: of the setting or option, for the message.

    Raises: ConfigError: it does not fit the type.
    """
    given = value
    if get_origin(annotation) is tuple:
        value = one_or_more(given)
    elif isinstance(value, str) and (annotation is str or str in get_args(annotation)):
        return value
    from pydantic import ValidationError  # importing it takes a tenth of a second, which `--help` should not need

    _refuse_bool(annotation, value, name)
    try:
        result = _adapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{name} is {_shown(given)}; {_reason(annotation, value, error)}") from None
    for number in result if isinstance(result, tuple | list) else (result,):
        if isinstance(number, int) and abs(number) > MOST_NUMBER:
            raise ConfigError(f"{name} is {_shown(number)}; it must be from {-MOST_NUMBER:,} to {MOST_NUMBER:,}.")
    return result


def _refuse_bool(annotation: Any, value: Any, name: str) -> None:
    """Raises: ConfigError: there is a truth value in place of a number, which pydantic would convert to 1 or 0."""
    parts = (annotation, *get_args(annotation))
    takes_numbers = any(part in (int, float) for part in parts) and bool not in parts
    wrong = [one for one in (value if isinstance(value, list | tuple) else (value,)) if isinstance(one, bool)]
    if takes_numbers and wrong:
        raise ConfigError(f"{name} is {_shown(value)}; {'it' if value is wrong[0] else wrong[0]} must be a number.")


def _reason(annotation: Any, value: Any, error: Any) -> str:
    parts = (annotation, *get_args(annotation))
    choices = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if choices and get_origin(annotation) is not tuple:
        return _not_among(value, choices)
    first = error.errors(include_url=False, include_input=False)[0]
    inner = f" (item {first['loc'][0] + 1})" if first["loc"] and isinstance(first["loc"][0], int) else ""
    message = first["msg"]
    return f"{message[:1].lower()}{message[1:]}{inner}."


def _not_among(value: Any, choices: Iterable[Any]) -> str:
    names = [*map(str, choices)]
    refused = refusal(str(value))  # such a name is not among the choices
    return str(refused) if refused else f"choose one of: {', '.join(names)}.{did_you_mean(str(value), names)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@lru_cache(maxsize=256)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)
