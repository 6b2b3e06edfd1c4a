"""`manyheads evaluate --dynamic`: the rule, its statistics from a training text, and what the report says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from manyheads.data.progress import Progress, telling
from manyheads.decoding.generator import Generator
from manyheads.distributed.group import Group
from manyheads.errors import ConfigError
from manyheads.evaluation.likelihood import Likelihood
from manyheads.evaluation.reading import Reading
from manyheads.extras.research.dynamic import STATISTICS_LANES, Adaptation, evaluate_dynamically, gradient_rms
from manyheads.extras.research.text_task.options import EvaluateOptions
from manyheads.tasks.held_out import run_file
from manyheads.tasks.text import options as task
from manyheads.tasks.text.evaluate import Scoring
from manyheads.tasks.text.held_out import HeldText, held_text

__all__ = ["NOTE", "Dynamic"]

NOTE = "weights are adapted to the test text as it is read; not comparable with static figures"


class Dynamic(Scoring):
    """Dynamic evaluation as the options say.

    Args:
        options: with `dynamic`.
        generator: the model, which keeps its weights.
        group: of one process.

    Raises: ConfigError: a precision that cannot be trained, or several processes.
    """

    note = " (dynamic evaluation)"

    def __init__(self, options: task.EvaluateOptions, generator: Generator, group: Group) -> None:
        if generator.precision != "fp32":
            raise ConfigError(
                f"--dynamic changes weights, which needs fp32, but the precision is {generator.precision}; give"
                " --precision fp32."
            )
        if group.world > 1:
            raise ConfigError(
                f"--dynamic adapts one set of weights to a text in its order, but {group.world} processes were started;"
                " run it in one."
            )
        assert isinstance(options, EvaluateOptions)
        assert options.dynamic is not None
        self._options, self._generator, self._kind = options, generator, options.dynamic
        self._source: HeldText | None = None

    def _statistics(self, reading: Reading, show: Progress) -> tuple[dict[str, Tensor], Reading]:
        options, generator = self._options, self._generator
        if self._source is None:
            text = options.dynamic_statistics
            if text is None and options.data is None and run_file(options.model) is None:
                raise ConfigError(
                    f"{options.model} is no run folder, so its training text is unknown; give --dynamic-statistics"
                    " FILE."
                )
            data, split = (None, None) if text else (options.data, "train")
            self._source = held_text(generator, options.model, text=text, data=data, split=split)
        wanted = replace(reading, lanes=STATISTICS_LANES, max_tokens=options.dynamic_tokens or 0)
        rms = gradient_rms(
            generator.single_model,
            self._source.store,
            wanted,
            generator.vocabulary,
            device=generator.device,
            told=telling(show, "gradients of the training text", self._source.num_read(wanted)),
        )
        return rms, wanted

    def score(self, held: HeldText, reading: Reading, show: Progress, phase: str) -> tuple[Likelihood, dict[str, Any]]:
        """Score a text, and describe how.

        Raises: DataError: there is no training text. NonFiniteError: the learning rate is too high.
        """
        options, generator, length = self._options, self._generator, reading.segment_len
        rate, decay = options.dynamic_rate, options.dynamic_decay
        adaptation = Adaptation(
            kind=self._kind,
            learning_rate=Adaptation.default_rate(length) if rate is None else rate,
            decay=Adaptation.default_decay(length) if decay is None else decay,
            epsilon=options.dynamic_epsilon,
        )
        record: dict[str, Any] = {
            "note": NOTE,
            "kind": self._kind,
            "learning_rate": adaptation.learning_rate,
            "decay": adaptation.decay,
        }
        rms = None
        if self._kind == "rms":
            rms, wanted = self._statistics(reading, show)
            assert self._source is not None
            record |= {
                "epsilon": adaptation.epsilon,
                "statistics": self._source.name,
                "statistics_tokens": self._source.num_read(wanted),
                "statistics_lanes": wanted.lanes,
            }
        found = evaluate_dynamically(
            generator.single_model,
            held.store,
            reading,
            generator.vocabulary,
            adaptation,
            rms,
            device=generator.device,
            told=telling(show, phase, held.num_read(reading)),
        )
        self.lines = self.lines or _lines(record)  # of the first memory
        return found, {"dynamic": record}


def _lines(record: dict[str, Any]) -> tuple[str, str]:
    """The lines of the protocol about dynamic evaluation."""
    line = f"  dynamic    {record['kind']}, learning rate {record['learning_rate']:g}, decay {record['decay']:g}"
    if record["kind"] == "rms":
        line += (
            f", epsilon {record['epsilon']:g}, gradients of {record['statistics_tokens']:,} tokens of"
            f" {record['statistics']} in {record['statistics_lanes']} lanes"
        )
    return line, f"             {record['note']}"
