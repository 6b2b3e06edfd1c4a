"""Names of models and of languages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyheads.errors import ConfigError

__all__ = ["names_of_models", "plain_tag"]

_MOST_NAME = 96


def plain_tag(language: str) -> str:
    """Return a language tag in the spelling in which tags are compared: `pt_BR` is `pt-br`."""
    return language.replace("_", "-").lower()


def names_of_models(given: Sequence[str]) -> dict[str, str]:
    """Return name -> path.

    The name is given as `NAME=PATH`; otherwise it is the name of the folder, or of the run if the path is `run/model`.

    Raises: ConfigError: no model, a bad name, or two models of one name.
    """
    if not given:
        raise ConfigError("no model is given; name at least one model folder, run folder or owner/name on the hub.")
    found: dict[str, str] = {}
    for text in given:
        name, is_named, path = text.partition("=")
        if not is_named:
            path = text
            folder = Path(text).resolve() if Path(text).is_dir() else Path(text)
            name = folder.parent.name if folder.name == "model" else folder.name
        if not path or not 0 < len(name) <= _MOST_NAME or not name.isprintable() or "/" in name:
            raise ConfigError(
                f"the model {text!r} has no usable name; give NAME=PATH with a name of 1 to {_MOST_NAME} printable"
                " characters without a slash."
            )
        if name in found:
            raise ConfigError(
                f"two models have the name {name!r}: {found[name]} and {path}; name one of them as OTHER={path}."
            )
        found[name] = path
    return found
