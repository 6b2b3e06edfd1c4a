"""What a run tells whoever is watching, as plain records; the command line shows them with rich."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["Reporter", "RunStart", "Sample", "StepReport", "StopReason", "TrainResult", "ValidationReport"]

StopReason = Literal["steps", "minutes", "patience", "signal"]


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Told once, before the first step. data: a few lines about the data; step: 0, or where the run goes on."""

    run_dir: Path
    device: str
    precision: str
    num_parameters: int
    data: str
    step: int
    max_steps: int
    max_minutes: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Told after every optimiser step.

    loss: with label smoothing, a token. nll: without, in nats a token. progress: share of the run that is over.
    eta_seconds: None while unknown. logged: this step is one that metrics are written at, and figures are means since
    the last such step.
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
    """What the model makes of a source: a translation, beside its reference; or a text that goes on from a prompt."""

    source: str
    text: str
    reference: str | None = None

    def labelled(self) -> list[tuple[str, str]]:
        """Each part with its name."""
        if self.reference is None:
            return [("prompt", self.source), ("text", self.text)] if self.source else [("text", self.text)]
        return [("source", self.source), ("reference", self.reference), ("translation", self.text)]


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Told after every validation.

    loss: nats a target token, no smoothing. bleu, chrf: None if not asked for. Of a parser instead: f1 of labelled
    brackets, exact_match, both in percent, and ill_formed, the number of sentences whose trees were mended. Of a
    language model: bits_per_byte of the text; of the duplication task: accuracy in percent.
    """

    step: int
    loss: float
    perplexity: float
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
    best: bool = False
    samples: tuple[Sample, ...] = ()

    def scores(self) -> list[str]:
        """`BLEU 31.41` and the like, for people."""
        named = (
            ("BLEU", self.bleu, ""),
            ("chrF", self.chrf, ""),
            ("F1", self.f1, ""),
            ("exact", self.exact_match, "%"),
            ("accuracy", self.accuracy, "%"),
        )
        shown = [f"{name} {value:.2f}{unit}" for name, value, unit in named if value is not None]
        if self.bits_per_byte is not None:
            shown.append(f"{self.bits_per_byte:.3f} bits/byte")
        return [*shown, *([] if self.ill_formed is None else [f"ill-formed {self.ill_formed}"])]

    def signatures(self) -> list[str]:
        """What the scores depend on."""
        found = (self.bleu_signature, self.chrf_signature, self.brackets_signature)
        return [signature for signature in found if signature]

    def merit(self, best_by: Literal["loss", "bleu", "f1"]) -> float:
        """What decides which checkpoint is the best: the loss, or a score negated; lower is better."""
        score = {"loss": None, "bleu": self.bleu, "f1": self.f1}[best_by]
        return self.loss if score is None else -score


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended.

    stopped_by: with `signal`, signal_number says which one, and the exit code is to be 128 + it. model_dir: the best
    model so far, None if there is none yet. checkpoint: the last one. best_score: lower is better (see
    `ValidationReport.merit`); best_by: what it is of.
    next_command: what to do with the model, `{run}` standing for the run's folder.
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
    last_validation: ValidationReport | None = None
    plots: tuple[Path, ...] = ()
    next_command: str = "translate {run}"

    def best(self) -> str | None:
        """`step 3,000, BLEU 31.41` and the like, for people; None before the first validation."""
        if self.best_step is None or self.best_score is None:
            return None
        named = {"bleu": f"BLEU {-self.best_score:.2f}", "f1": f"F1 {-self.best_score:.2f}"}
        return f"step {self.best_step:,}, {named.get(self.best_by, f'validation loss {self.best_score:.4f}')}"


class Reporter(Protocol):
    """Called from the training loop's thread, in the order of its methods."""

    def start(self, start: RunStart) -> None: ...

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Told before anything that may take long. done, total: how far it is; 0 where that is unknown."""
        ...

    def step(self, report: StepReport) -> None: ...

    def validation(self, report: ValidationReport) -> None: ...

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None: ...

    def done(self, result: TrainResult) -> None: ...
