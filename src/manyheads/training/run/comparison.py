"""Scores of the old and the new data before and after a run that begins from a model."""

from __future__ import annotations

import json
from typing import Any

from manyheads.config.files import to_json
from manyheads.errors import ManyHeadsError
from manyheads.files.commit import write_text
from manyheads.files.safe_open import read_limited
from manyheads.models.pretrained import load
from manyheads.training.record.report import Reporter, ValidationReport
from manyheads.training.run.assembly import Assembly
from manyheads.training.run.run_folder import RunFolder
from manyheads.training.run.signals import StopFlag

_MOST_BYTES = 1 << 20


class Comparison:
    """Evaluates the model on every held-out set at the beginning and at the end of a run; comparison.json holds the
    results.

    Args:
        assembly: the parts of the run.
        folder: of the run.
        reporter: is told what is judged.
        stop: ends a judgement; the run then reports no comparison.
    """

    def __init__(self, assembly: Assembly, folder: RunFolder, reporter: Reporter, stop: StopFlag) -> None:
        self._assembly = assembly
        self._folder = folder
        self._reporter = reporter
        self._stop = stop

    def before(self) -> None:
        """Judge the model before the first step. A run that has made steps keeps the scores from its beginning.

        Raises: DataError: a held-out set cannot be used.
        """
        if self._assembly.counters.step:
            return
        found = self._scores(self._assembly.model)
        if found is not None:
            self._write({"before": found})

    def after(self) -> tuple[tuple[str, str, str], ...]:
        """Judge the best model, which is in model/.

        Returns: name, scores before and scores after of each set; empty if one of them is unknown.
        """
        record = self._read()
        counters = self._assembly.counters
        # Without validations model/ is the model of the last step.
        judged = counters.step if counters.best_step is None else counters.best_step
        if "before" not in record:
            return ()
        if "after" not in record or record.get("step") != judged:
            try:
                model = load(self._folder.model, device=self._assembly.device)
                found = self._scores(model)
            except ManyHeadsError as error:  # the run is complete; only its comparison is not
                self._reporter.message(f"The data sets are not compared: {error}", "warning")
                return ()
            if found is None:
                return ()
            record |= {"after": found, "best_step": counters.best_step, "step": judged}
            self._write(record)
        pairs = ((name, record["before"].get(name), record["after"].get(name)) for name in record["after"])
        return tuple((name, _shown(old), _shown(new)) for name, old, new in pairs)

    def _scores(self, model: Any) -> dict[str, dict[str, Any]] | None:
        """Return the scores of each set; None if the run was told to stop. Every rank of a group computes them."""
        assembly = self._assembly
        found = {}
        for name, judge in assembly.objective.judge_sets(model, assembly.device, self._stop).items():
            self._reporter.doing(f"judging {name}")
            report = judge.run(assembly.counters.step)
            if any(assembly.group.exchange(report is None)) or report is None:
                return None
            found[name] = _numbers(report)
        return found

    def _read(self) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            try:
                record = json.loads(read_limited(self._folder.comparison, _MOST_BYTES).decode("utf-8"))
            except (OSError, ValueError):
                return {}
            return record if isinstance(record, dict) else {}

        return self._assembly.group.from_main(read)

    def _write(self, record: dict[str, Any]) -> None:
        if self._assembly.group.is_main:
            write_text(self._folder.comparison, to_json(record))


def _numbers(report: ValidationReport) -> dict[str, Any]:
    return {"loss": report.loss, "perplexity": report.perplexity, "scores": report.scores()}


def _shown(scores: dict[str, Any] | None) -> str:
    return "unknown" if scores is None else ", ".join([f"loss {scores['loss']:.3f}", *scores["scores"]])
