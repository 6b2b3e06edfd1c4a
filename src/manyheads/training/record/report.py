"""Reports of a run as plain records, for reporters and callbacks; the command line shows them with rich."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

StopReason = Literal["steps", "minutes", "patience", "callback", "signal"]


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Reported once, before the first step. data: a few lines about the data; step: 0, or the step of a resumed run;
    config: the settings as in config.yaml.
    """

    run_dir: Path
    device: str
    precision: str
    num_parameters: int
    data: str
    step: int
    max_steps: int
    max_minutes: float
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Reported after every optimiser step.

    loss: per token, with label smoothing. nll: per token in nats, without label smoothing. progress: fraction of the
    run that is done. tokens_per_second: target tokens, by the time of the steps alone, without validations and saving.
    eta_seconds: None while unknown. logged: metrics are written at this step, and values are means
    since the last such step.
    """

    step: int
    max_steps: int
    epoch: int
    loss: float
    nll: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    elapsed_seconds: float
    eta_seconds: float | None
    memory_bytes: int
    progress: float
    logged: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One output of the model: a translation with its reference, or the continuation of a prompt."""

    source: str
    text: str
    reference: str | None = None

    def labelled(self) -> list[tuple[str, str]]:
        """Return each part with its name."""
        if self.reference is None:
            return [("prompt", self.source), ("text", self.text)] if self.source else [("text", self.text)]
        return [("source", self.source), ("reference", self.reference), ("translation", self.text)]


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Reported after every validation.

    loss: nats per target token, without label smoothing. bleu, chrf: None if not computed. For a parser instead: f1 of
    labelled brackets and exact_match, both in percent, and ill_formed, the number of sentences whose trees were
    repaired.
    For a language model: bits_per_byte of the text; for the duplication task: accuracy in percent.
    of_the_first: if the scores are of a part, the number of its sentences, or of a language model's tokens.
    """

    step: int
    loss: float
    bleu: float | None = None
    chrf: float | None = None
    bleu_signature: str | None = None
    chrf_signature: str | None = None
    f1: float | None = None
    exact_match: float | None = None
    ill_formed: int | None = None
    brackets_signature: str | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    of_the_first: int | None = None
    best: bool = False
    samples: tuple[Sample, ...] = ()

    @property
    def perplexity(self) -> float:
        """exp(loss), without overflow."""
        return math.exp(min(self.loss, 700.0))

    def scores(self) -> list[str]:
        """Return texts such as `BLEU 31.41`, or `BLEU 31.41 of the first 100`."""
        named = (
            ("BLEU", self.bleu, ""),
            ("chrF", self.chrf, ""),
            ("F1", self.f1, ""),
            ("exact", self.exact_match, "%"),
            ("accuracy", self.accuracy, "%"),
        )
        part = of_the_first(self.of_the_first)
        shown = [f"{name} {value:.2f}{unit}{part}" for name, value, unit in named if value is not None]
        if self.bits_per_byte is not None:
            shown.append(f"{self.bits_per_byte:.3f} bits/byte")
        if part and self.bleu is None and self.f1 is None:
            shown.append(f"all{part} tokens")
        return [*shown, *([] if self.ill_formed is None else [f"ill-formed {self.ill_formed}"])]

    def signatures(self) -> list[str]:
        """Return the signatures of the scores, each after its score's name."""
        found = (("BLEU", self.bleu_signature), ("chrF", self.chrf_signature), ("F1", self.brackets_signature))
        return [f"{name} {signature}" for name, signature in found if signature]

    def merit(self, best_by: Literal["loss", "bleu", "f1"]) -> float:
        """Return the value that selects the best checkpoint: the loss, or a negated score; lower is better."""
        score = {"loss": None, "bleu": self.bleu, "f1": self.f1}[best_by]
        return self.loss if score is None else -score


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """Reported after every checkpoint. best: it is the best one so far."""

    step: int
    path: Path
    best: bool


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run.

    stopped_by: the reason; for `signal`, signal_number is the signal, and the exit code should be 128 + it. model_dir:
    the best model so far, None if there is none yet. checkpoint: the last one. best_score: lower is better (see
    `ValidationReport.merit`); best_by: the name of the score; of_the_first: see `ValidationReport`. next_command: a
    command to use the model, in which `{run}` stands for the run's folder. compared: for a run that began from a model:
    of each held-out set its name, the scores before and the scores after.
    """

    run_dir: Path
    step: int
    epoch: int
    tokens: int
    elapsed_seconds: float
    stopped_by: StopReason
    signal_number: int | None
    checkpoint: Path | None
    model_dir: Path | None
    best_step: int | None
    best_score: float | None
    best_by: Literal["loss", "bleu", "f1"] = "loss"
    of_the_first: int | None = None
    last_validation: ValidationReport | None = None
    plots: tuple[Path, ...] = ()
    next_command: str = "translate {run}"
    compared: tuple[tuple[str, str, str], ...] = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A line for IPython and notebooks; `repr` has all fields."""
        printer.text(f"TrainResult of {self.run_dir}: ended at step {self.step:,}; best: {self.best() or 'none yet'}")

    def best(self) -> str | None:
        """Return a text such as `step 3,000, BLEU 31.41`; None before the first validation."""
        if self.best_step is None or self.best_score is None:
            return None
        part = of_the_first(self.of_the_first)
        named = {"bleu": f"BLEU {-self.best_score:.2f}{part}", "f1": f"F1 {-self.best_score:.2f}{part}"}
        return f"step {self.best_step:,}, {named.get(self.best_by, f'validation loss {self.best_score:.4f}')}"


def of_the_first(count: int | None) -> str:
    """Return ` of the first 100` of a part, and nothing of the whole."""
    return "" if count is None else f" of the first {count:,}"


class Reporter(Protocol):
    """Receives the reports. The training loop's thread calls its methods, in their order in this class."""

    def start(self, start: RunStart) -> None: ...

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Report work that may take long, before it begins. done, total: its progress; 0 if unknown."""

    def step(self, report: StepReport) -> None: ...

    def validation(self, report: ValidationReport) -> None: ...

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None: ...

    def done(self, result: TrainResult) -> None: ...
