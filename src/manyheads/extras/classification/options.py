"""The options of `manyheads classify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.checks import at_least, check
from manyheads.config.options import Shared, argument, group, option
from manyheads.data.lines import OnBadUtf8
from manyheads.decoding.options import DeviceOptions, EnsembleOptions

__all__ = ["ClassifyOptions"]


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of `manyheads classify`."""

    model: str = Shared.model()
    input: str = argument("A text file, plain or gzip; - is standard input.", default="-", metavar="INPUT")
    output: str = Shared.output("the labels")
    scores: bool = option("Write the probability of each label after a tab.", default=False)
    num_return_sequences: int | None = option(
        "The N most probable labels of each line: line number, probability, label.",
        metavar="N",
        default_is="the best one alone",
        aliases=("--nbest",),
    )
    json: bool = Shared.json(
        "Write one JSON object per line, with the text and all labels with their probabilities, best first."
    )
    max_tokens: int = option(
        "Maximum size of a batch in tokens: rows x longest text. A longer text does not fit.", 4096, metavar="N"
    )
    too_long: Literal["fail", "truncate"] = option(
        "If a text does not fit: stop and name its line, or truncate it and report how many were truncated.",
        default="fail",
    )
    on_bad_utf8: OnBadUtf8 = Shared.on_bad_utf8("the output has an empty line")
    lines_at_once: int = option("Number of lines that are classified together.", default=256, metavar="N")
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: DeviceOptions = group(DeviceOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "num_return_sequences", "lines_at_once")
        check(self, "--", at_least(2), "max_tokens")
