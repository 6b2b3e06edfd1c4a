"""How often the likeliest next byte is the right one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from manyheads.data.translation.readers import ReadReport
from manyheads.decoding.generator import Generator
from manyheads.tasks.language_modelling.evaluate import held_text
from manyheads.tasks.language_modelling.options import EvaluateOptions
from manyheads.tasks.report import NoPictures


@dataclass(frozen=True)
class CountingReport(NoPictures):
    """See `tasks.report.Report`."""

    accuracy: float
    read: ReadReport = field(default_factory=ReadReport)
    output: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy}

    def to_lines(self) -> list[str]:
        return [f"accuracy = {self.accuracy:.3f}"]


def evaluate(options: EvaluateOptions, show: Any) -> CountingReport:
    """See `tasks.report.Task`."""
    generator = Generator.from_pretrained(options.model)
    held = held_text(generator, options.model, data=options.data, split=options.split)
    ids = torch.as_tensor(held.store.ids[:200].astype("int64"))[None]
    with torch.inference_mode():
        right = generator.model.log_probs(ids[:, :-1]).argmax(-1) == ids[:, 1:]
    return CountingReport(right.double().mean().item())
