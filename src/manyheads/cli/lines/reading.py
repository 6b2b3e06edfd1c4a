"""How `manyheads evaluate` reads a text: the settings of the run, changed by the options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.cli.command_line.evaluate_options import EvaluateTextOptions
    from manyheads.evaluation.reading import Reading
    from manyheads.tasks.text.held_out import HeldText

__all__ = ["readings_of", "tokens_of"]


def tokens_of(held: HeldText, reading: Reading) -> int:
    """How many tokens are read."""
    return min(reading.max_tokens or len(held.store), len(held.store))


def readings_of(options: EvaluateTextOptions) -> list[Reading]:
    """How to read: the run's way, with what the command line changes."""
    from manyheads.config.build import build
    from manyheads.config.files import load_yaml
    from manyheads.evaluation.reading import Reading

    folder = Path(options.model)
    file = next((place / "config.yaml" for place in (folder, folder.parent) if (place / "config.yaml").is_file()), None)
    section = load_yaml(file).values.get("reading") if file is not None else None
    values = {**(section if isinstance(section, dict) else {}), "max_tokens": 0}
    for name in ("segment_len", "clamp_len", "lanes", "documents", "max_tokens"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    if options.same_length is not None:
        values["same_length"] = options.same_length == "yes"
    base = build(Reading, values, "the options")
    return [dataclasses.replace(base, memory_len=length) for length in options.memory_len] or [base]
