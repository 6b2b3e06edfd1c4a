"""Settings of a training run that do not depend on its task: one dataclass for each section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from manyheads.config.checks import ABOVE_ZERO, BELOW_ONE, FRACTION, MOST_THREADS, at_least, between, check, set_tuples
from manyheads.errors import ConfigError
from manyheads.nn.smoothing import SmoothingKind


@dataclass(frozen=True, kw_only=True)
class OptimiserSettings:
    """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019), fused if the device supports it, or Muon.

    Args:
        name: `adam`, `adamw`, or `muon` (Jordan et al. 2024): Muon for matrices of linear layers, AdamW for the rest.
        learning_rate: the peak learning rate; for the `noam` schedule it is a factor (1.0 in the paper).
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the square root of the second moment.
        weight_decay: for matrices of linear layers only, not for biases, norms, embeddings and numbers for distances.
        clip_norm: maximum global gradient norm; 0 turns clipping off.
        muon_learning_rate: the peak learning rate of Muon's matrices; the schedule scales it like the other.
        muon_momentum: decay of Muon's momentum.
    """

    name: Literal["adam", "adamw", "muon"] = "adam"
    learning_rate: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    muon_learning_rate: float = 0.02
    muon_momentum: float = 0.95

    def __post_init__(self) -> None:
        check(self, "optimiser.", ABOVE_ZERO, "learning_rate", "eps", "muon_learning_rate")
        check(self, "optimiser.", BELOW_ONE, "beta1", "beta2", "muon_momentum")
        check(self, "optimiser.", at_least(0), "weight_decay", "clip_norm")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The learning rate over the run.

    Args:
        kind: `noam` (Vaswani et al. 2017, eq. 3): factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5);
            `inverse_sqrt`: linear to the peak, then falling with the square root of the step; `cosine` and `linear`: to
            the peak, then down to min_ratio x peak at the end of the run; `constant`: to the peak, then constant.
        warmup_steps: optimiser steps to the peak.
        min_ratio: the last learning rate of `cosine` and `linear`, as a fraction of the peak.
    """

    kind: Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"] = "noam"
    warmup_steps: int = 4000
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        check(self, "schedule.", at_least(1), "warmup_steps")
        check(self, "schedule.", FRACTION, "min_ratio")


@dataclass(frozen=True, kw_only=True)
class JudgingSettings:
    """Validation during training.

    Args:
        every_steps: optimiser steps between two validations; 0 validates at the end only.
        every_minutes: validate also after the first step that ends so many minutes of training after the last
            validation; 0: by steps alone. Such a run is not bit-reproducible.
        num_samples: number of outputs that are written to samples/ and shown.
        best_by: the score that selects the best checkpoint; `bleu` for translation, `f1` for parsing. If a model
            overfits, its loss rises again before the learning rate has fallen, while the other scores still improve;
            then `loss` selects a checkpoint from the middle of the run.
        patience: stop after this many validations without an improvement; 0 never stops.

    Attributes: judged, scores: what is judged, and the values of best_by that it has.

    Raises: ConfigError: a number is out of range, or the task has no such score.
    """

    judged: ClassVar[str] = "a translator or parser"
    scores: ClassVar[tuple[str, ...]] = ("loss", "bleu", "f1")

    every_steps: int = 1000
    every_minutes: float = 0.0
    num_samples: int = 5
    best_by: Literal["loss", "bleu", "f1"] = "loss"
    patience: int = 0

    def __post_init__(self) -> None:
        check(self, "validation.", at_least(0), "every_steps", "every_minutes", "num_samples", "patience")
        if self.best_by not in self.scores:
            known = " or ".join(map(repr, self.scores))
            raise ConfigError(
                f"validation.best_by is {self.best_by!r}, but {self.judged} is judged by {known}.", fields=["best_by"]
            )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The training loop.

    Attributes: removed: settings of earlier versions, with the value that has no effect; another one is refused.

    Args:
        max_steps: optimiser steps of the whole run; 0 means no limit (then max_minutes must be set).
        max_minutes: wall-clock limit of the training, including validations before its end; 0 means none. With it,
            `cosine` and `linear` schedules use the larger progress of steps and minutes, so the rate always ends low;
            such a run is not bit-reproducible.
        label_smoothing: probability that is spread evenly over other tokens (sec. 5.4).
        smoothing_kind: the tokens that share it: `all`, the correct one and padding included; `without_padding`;
            or `others`, those besides the correct one and padding, as in the Annotated Transformer.
        num_sampled: number of candidates that replace the whole vocabulary in the training loss (sampled softmax, Jean
            et al. 2015), for ids ordered by decreasing frequency; 0 uses the whole vocabulary. Validation always does.
        ema_decay: exponential moving average of the weights, used for validation and the model folder; 0 is off.
        freeze: patterns of parameters that are not trained, such as `encoder.*` or `embedding.weight`; a pattern
            without wildcards also names everything inside, as `encoder.layers.0` does. The start of a run says how many
            there are.
        log_every: optimiser steps between two lines of metrics.
        save_every: optimiser steps between two checkpoints; 0 saves only at the end and on a signal.
        save_every_minutes: save also after the first step that ends so many minutes of training after the last
            checkpoint; 0: by steps alone.
        keep: checkpoints kept besides the best one; at least 2, because a crash can damage the newest.
        on_nonfinite: `stop` at a NaN or infinite loss or gradient, or `skip` that update.
        max_skips: stop after this many consecutive skipped updates.
        on_save_error: if a checkpoint cannot be written, `stop` with the error, or `continue` with a warning.
        chunk_tokens: rows of logits that exist at once in the loss.
        parallel: with several ranks (torchrun): `ddp`, every rank has a copy of the model; or `fsdp` (FSDP2), every
            rank has a shard of each tensor, for models whose weights, gradients and moments do not fit into one device.
        deterministic: use torch's deterministic algorithms.
        plain: compute with torch's own operations alone, which is slower; see `kernels.fast`.
        same_arithmetic: refuse to resume under other arithmetic (torch version, processor, instruction sets, threads,
            precision, ranks), where the run would not have the bytes of an uninterrupted one; false: warn.
        ignore_memory: train although a model seems too large for the free memory: warn instead of refusing.
        plots: redraw the learning curve at every validation (needs matplotlib; a notice says if it is missing).
        tensorboard: write TensorBoard files if that package is installed.
    """

    max_steps: int = 100_000
    max_minutes: float = 0.0
    label_smoothing: float = 0.1
    smoothing_kind: SmoothingKind = "all"
    num_sampled: int = 0
    ema_decay: float = 0.0
    freeze: tuple[str, ...] = ()
    log_every: int = 50
    save_every: int = 1000
    save_every_minutes: float = 0.0
    keep: int = 3
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10
    on_save_error: Literal["stop", "continue"] = "stop"
    chunk_tokens: int = 2048
    parallel: Literal["ddp", "fsdp"] = "ddp"
    deterministic: bool = False
    plain: bool = False
    same_arithmetic: bool = False
    ignore_memory: bool = False
    plots: bool = True
    tensorboard: bool = True

    def __post_init__(self) -> None:
        set_tuples(self)
        check(
            self,
            "training.",
            at_least(0),
            "max_steps",
            "save_every",
            "save_every_minutes",
            "num_sampled",
            "max_minutes",
        )
        check(self, "training.", at_least(1), "log_every", "max_skips", "chunk_tokens")
        check(self, "training.", at_least(2), "keep")
        check(self, "training.", BELOW_ONE, "label_smoothing", "ema_decay")
        if not self.max_steps and not self.max_minutes:
            raise ConfigError(
                "training.max_steps and training.max_minutes are both 0; set one, or the run would never end.",
                fields=("max_steps", "max_minutes"),
            )
        if self.num_sampled and self.label_smoothing:
            raise ConfigError(
                f"training.num_sampled is {self.num_sampled} and training.label_smoothing {self.label_smoothing};"
                " sampled candidates have no probabilities of other tokens. Set one of them to 0.",
                fields=("num_sampled", "label_smoothing"),
            )


@dataclass(frozen=True, kw_only=True)
class InitialSettings:
    """The model from which a run begins. A resumed run does not read it again.

    Args:
        model: a model folder, a run folder, or owner/name on the hub; empty: random weights. Tokenizer and sizes come
            from it; the data must have its ids.
        sha256: of its model.safetensors; filled in when the run begins, and recorded in config.yaml.
        data: prepared data that the model was trained on. Its test set (or validation set) is judged before and after
            the run, like that of the new data; empty: the data of the model's run, if that folder is there.
    """

    model: str = ""
    sha256: str = ""
    data: str = ""

    @property
    def needs_data(self) -> bool:
        """Whether the first weights depend on more than the seed. A resumed run should then not compute them again."""
        return bool(self.model)


@dataclass(frozen=True, kw_only=True)
class TokenInitialSettings(InitialSettings):
    """The weights from which a translator, parser or language model begins.

    Args:
        embeddings: without a model: `random`; or `cooccurrence`: tokens begin with similar embeddings if they occur in
            the same sentence pairs, as a word and its translation do, or, in a language model, beside the same tokens
            (see `extras.cooccurrence`); a language model's output begins with the frequencies of the tokens. This takes
            some seconds before the first step. A run of a few hundred or thousand steps reaches a lower loss.
    """

    embeddings: Literal["random", "cooccurrence"] = "random"

    @property
    def needs_data(self) -> bool:
        return super().needs_data or self.embeddings != "random"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that every run has. Each task adds its own sections (`tasks/*/settings.py`).

    Args:
        run_dir: the run's folder.
        seed: seed of initial weights, dropout, and the order of samples.
        device: the device for training; `auto` chooses cuda, then mps, then cpu.
        precision: `fp32`; `tf32` (float32, with factors of 10 bits in products, on NVIDIA GPUs); `bf16` (autocast over
            float32 weights); or `auto`: bf16 if the device multiplies matrices at
            least 1.3 times as fast in it, otherwise fp32. `auto` is resolved when a run begins and recorded in its
            config.yaml; a resumed run keeps its checkpoint's precision.
        num_threads: CPU threads; 0: torch's default.
    """

    run_dir: str = "runs/run"
    seed: int = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "tf32"] = "auto"
    num_threads: int = 0
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    initial: InitialSettings = field(default_factory=InitialSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    validation: JudgingSettings = field(default_factory=JudgingSettings)

    def __post_init__(self) -> None:
        check(self, "", between(0, MOST_THREADS), "num_threads")
        if not self.run_dir:
            raise ConfigError(
                "run_dir is empty, perhaps from an unset shell variable; name a folder, or leave it out.",
                fields=["run_dir"],
            )

    @property
    def task(self) -> str:
        """The task's name in `catalogue.TASKS`."""
        raise NotImplementedError
