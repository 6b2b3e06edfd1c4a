"""Checks of the options of `evaluate` for several models: which may be given together.

Imports neither torch nor sacreBLEU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.config.options import refuse_given
from manyheads.errors import ConfigError

MOST_MODELS = 26
"""Each has a letter in the table."""


def check_comparison(options: Any, unusable: Mapping[str, Any]) -> None:
    """Check the options of `evaluate` about several models.

    Args:
        options: with `model`, `others`, `page` and `differences`.
        unusable: name of an option that applies to one model only -> its value, which is false if it is not given.

    Raises: ConfigError: they contradict each other.
    """
    models = (options.model, *options.others)
    if not options.others:
        given = {"--page": options.page, "--differences": options.differences != type(options).differences}
        refuse_given(given, "{} compares models; name two models or more.")
        return
    if len(models) > MOST_MODELS:
        raise ConfigError(f"{len(models)} models are given; at most {MOST_MODELS} are compared at once.")
    folders = [Path(name) for name in models]
    if twice := [name for place, name in enumerate(models) if folders[place] in folders[:place]]:
        raise ConfigError(f"{twice[0]} is named twice; name each model once.")
    refuse_given(unusable, f"{{}} is for one model, but {len(models)} are named; leave it out.")
    if options.differences < 0:
        raise ConfigError(f"--differences is {options.differences}; it must be at least 0.")
    if options.page is not None:
        page = Path(options.page)
        if page.is_dir() or page.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"--page is {options.page}; name a file that ends in .html.")
