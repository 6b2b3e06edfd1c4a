"""Settings of a training run: one dataclass a section, all of them together in `TrainConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from manyheads.architectures.reformer.config import ReformerConfig, ReformerSeq2SeqConfig
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.data.settings import DUPLICATION, DataSettings, SegmentSettings
from manyheads.decoding.generation_settings import GenerationSettings
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import Reading
from manyheads.text.settings import TokenizerSettings, VocabularySettings

__all__ = [
    "RUNS",
    "JudgingSettings",
    "OptimiserSettings",
    "RunConfig",
    "ScheduleSettings",
    "TextConfig",
    "TextValidationSettings",
    "TrainConfig",
    "TrainingSettings",
    "ValidationSettings",
]

MOST_ABOVE = 15
"""Tokens by which a segment of varied length may be longer than segment_len (`data.lanes`)."""


@dataclass(frozen=True, kw_only=True)
class OptimiserSettings:
    """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019), fused where the device has it, or Muon.

    Args:
        name: `adam`, `adamw`, or `muon` (Jordan et al. 2024): matrices of maps by Muon, everything else by AdamW.
        learning_rate: the peak; for the `noam` schedule it is a factor (1.0 is the paper's).
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: on matrices only, never on biases, norms and embeddings.
        clip_norm: largest global gradient norm; 0 turns clipping off.
        muon_learning_rate: the peak for Muon's matrices; the schedule moves it along with the other.
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
        for name in ("learning_rate", "eps", "muon_learning_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optimiser.{name} is {getattr(self, name)}; it must be above 0.")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimiser.{name} is {getattr(self, name)}; it must be in [0, 1).")
        for name in ("weight_decay", "clip_norm"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"optimiser.{name} is {getattr(self, name)}; it must not be negative.")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How the learning rate moves.

    Args:
        kind: `noam` (Vaswani et al. 2017, eq. 3): factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5);
            `inverse_sqrt`: linear to the peak, then falling with the root of the step; `cosine` and `linear`: to the
            peak, then down to min_ratio x peak at the end of the run; `constant`: to the peak, and there.
        warmup_steps: optimiser steps to the peak.
        min_ratio: the last learning rate of `cosine` and `linear`, as a share of the peak.
    """

    kind: Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"] = "noam"
    warmup_steps: int = 4000
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ConfigError(f"schedule.warmup_steps is {self.warmup_steps}; it must be at least 1.")
        if not 0 <= self.min_ratio <= 1:
            raise ConfigError(f"schedule.min_ratio is {self.min_ratio}; it must be in [0, 1].")


@dataclass(frozen=True, kw_only=True)
class JudgingSettings:
    """Looking at held-out data during training.

    Args:
        every_steps: optimiser steps between two validations; 0 validates at the end only.
        num_samples: how many outputs are written to samples/ and shown.
        best_by: what decides which checkpoint is the best; `bleu` is of translators, `f1` of parsers.
        patience: stop after so many validations without a better one; 0 never stops.
    """

    every_steps: int = 1000
    num_samples: int = 5
    best_by: Literal["loss", "bleu", "f1"] = "loss"
    patience: int = 0

    def __post_init__(self) -> None:
        self._refuse_below(every_steps=0, num_samples=0, patience=0)

    def _refuse_below(self, **least: int) -> None:
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"validation.{name} is {getattr(self, name)}; it must be at least {bound}.")


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(JudgingSettings):
    """How translators and parsers are judged.

    Args:
        bleu_sentences: validation sentences translated (by the `decoding` settings) for BLEU and chrF, or of a parser
            for F1; 0 skips it; -1 is all.
        bleu_tokenize: BLEU's tokenizer: `none` for text that is tokenised already, `13a` (sacreBLEU's default) else.
    """

    bleu_sentences: int = 500
    bleu_tokenize: Literal["13a", "none", "intl", "char", "zh"] = "13a"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_below(bleu_sentences=-1)
        if self.best_by != "loss" and self.bleu_sentences == 0:
            raise ConfigError(
                f"validation.best_by is {self.best_by!r} but validation.bleu_sentences is 0; translate some, or use"
                " 'loss'."
            )


@dataclass(frozen=True, kw_only=True)
class TextValidationSettings(JudgingSettings):
    """How language models are judged: by the likelihood of held-out text, and by what they write.

    Args:
        sample_tokens: length of each sample.
        prompt: what samples continue; empty begins a text.
    """

    num_samples: int = 1
    sample_tokens: int = 200
    prompt: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_below(sample_tokens=1)
        if self.best_by != "loss":
            raise ConfigError(f"validation.best_by is {self.best_by!r}; a language model has no score but its 'loss'.")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The loop.

    Args:
        max_steps: optimiser steps of the whole run; 0 means no limit (then max_minutes must be set).
        max_minutes: wall-clock limit of the training, validations before its end included; 0 means none. With it,
            `cosine` and `linear` schedules follow whichever of steps and minutes is further, so the rate always ends
            low; such a run is not bit-reproducible.
        label_smoothing: share of probability spread evenly over the vocabulary (sec. 5.4).
        r_drop: weight alpha of R-Drop (Liang et al. 2021): every pair is read twice, under different dropout, and the
            two predictions must agree; 0 is off. A step takes twice the work, and small data lasts longer; 5 is the
            paper's for translation.
        num_sampled: draws of candidates that stand for the whole vocabulary in the training loss (sampled softmax, Jean
            et al. 2015), the ids being ordered by falling frequency; 0 takes all of it. Validation always does.
        ema_decay: exponential moving average of the weights, used for validation and the model folder; 0 is off.
        log_every: optimiser steps between two lines of metrics.
        save_every: optimiser steps between two checkpoints; 0 saves at the end (and on a signal) only.
        keep: checkpoints kept besides the best one; at least 2, since the newest may be the one that a crash cuts.
        on_nonfinite: `stop` at a NaN or infinite loss or gradient, or `skip` that update.
        max_skips: most updates skipped in a row before stopping all the same.
        on_save_error: when a checkpoint cannot be written, `stop` with the error, or `continue` with a warning.
        chunk_tokens: rows of logits that exist at once in the loss.
        parallel: with several ranks (torchrun): `ddp`, every rank a copy of the model; or `fsdp` (FSDP2), every rank a
            part of each tensor, for models whose weights, gradients and moments do not fit into one device.
        deterministic: ask torch for deterministic algorithms.
        plots: redraw the learning curve at every validation (needs matplotlib; without it a notice says so).
        tensorboard: write TensorBoard files if that package is installed.
    """

    max_steps: int = 100_000
    max_minutes: float = 0.0
    label_smoothing: float = 0.1
    r_drop: float = 0.0
    num_sampled: int = 0
    ema_decay: float = 0.0
    log_every: int = 50
    save_every: int = 1000
    keep: int = 3
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10
    on_save_error: Literal["stop", "continue"] = "stop"
    chunk_tokens: int = 2048
    parallel: Literal["ddp", "fsdp"] = "ddp"
    deterministic: bool = False
    plots: bool = True
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name, least in (
            ("max_steps", 0),
            ("log_every", 1),
            ("save_every", 0),
            ("keep", 2),
            ("max_skips", 1),
            ("num_sampled", 0),
            ("chunk_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"training.{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("max_minutes", "r_drop"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"training.{name} is {getattr(self, name)}; it must be a number of at least 0.")
        if not self.max_steps and not self.max_minutes:
            raise ConfigError(
                "training.max_steps and training.max_minutes are both 0; set one, or the run would never end."
            )
        for name in ("label_smoothing", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"training.{name} is {getattr(self, name)}; it must be in [0, 1).")
        for name in ("label_smoothing", "r_drop"):
            if self.num_sampled and getattr(self, name):
                raise ConfigError(
                    f"training.num_sampled is {self.num_sampled} and training.{name} {getattr(self, name)}; candidates"
                    f" know nothing of the other tokens' probabilities. Set training.{name} to 0, or num_sampled."
                )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every run has, whatever it learns.

    Args:
        run_dir: the run's folder.
        seed: of initial weights, dropout, and the order of samples.
        device: where to train; `auto` takes cuda, then mps, then cpu.
        precision: `fp32`; `bf16` (autocast over float32 weights); or `auto`: bf16 where the device multiplies matrices
            at least 1.3 times as fast in it, else fp32. `auto` is resolved when a run begins and recorded in its
            config.yaml; a resumed run keeps what its checkpoint has.
        num_threads: CPU threads; 0 leaves torch's choice.
    """

    run_dir: str = "runs/run"
    seed: int = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    num_threads: int = 0
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    validation: JudgingSettings = field(default_factory=JudgingSettings)

    def __post_init__(self) -> None:
        if self.num_threads < 0:
            raise ConfigError(f"num_threads is {self.num_threads}; it must not be negative.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """A translator's or parser's run: what presets, files and single options fill in, and `config.yaml` records."""

    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: TransformerConfig | ReformerSeq2SeqConfig = field(default_factory=TransformerConfig)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    decoding: DecodingSettings = field(default_factory=DecodingSettings)


@dataclass(frozen=True, kw_only=True)
class TextConfig(RunConfig):
    """A language model's run, as `TrainConfig` is a translator's.

    Raises: ConfigError: segments are longer than the model's positions, or memory is asked of a model without any.
    """

    data: SegmentSettings = field(default_factory=SegmentSettings)
    vocabulary: VocabularySettings = field(default_factory=VocabularySettings)
    model: TransformerXLConfig | ReformerConfig = field(default_factory=TransformerXLConfig)
    validation: TextValidationSettings = field(default_factory=TextValidationSettings)
    reading: Reading = field(default_factory=Reading)
    generation: GenerationSettings = field(default_factory=GenerationSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.r_drop:
            raise ConfigError(
                f"training.r_drop is {self.training.r_drop}; it is for translators and parsers, set it to 0."
            )
        adaptive = isinstance(self.model, TransformerXLConfig) and (self.model.cutoffs or self.model.has_projections)
        if self.training.num_sampled and adaptive:
            raise ConfigError(
                f"training.num_sampled is {self.training.num_sampled}, and the model's softmax is adaptive; take one"
                " of the two: set num_sampled to 0, or make the model's plain."
            )
        if isinstance(self.model, ReformerConfig):
            self._check_lengths(self.model)

    def _check_lengths(self, model: ReformerConfig) -> None:
        """Segments are all that such a model sees, so they must fit, and it has to be one that reads forwards."""
        if not model.causal:
            raise ConfigError("model.causal is false; an encoder cannot learn to write, set it to true.")
        if model.positions != "sinusoidal":
            lengths = [("data", self.data.segment_len)]
            if self.data.path != DUPLICATION:  # which is not read, but judged by whole sequences
                lengths.append(("reading", self.reading.segment_len))
            for name, length in lengths:
                if length > model.max_len:
                    raise ConfigError(
                        f"{name}.segment_len is {length:,}, but model.max_len {model.max_len:,} positions are all that"
                        " the model has; lower the first, or raise the second."
                    )
        if self.data.segment_lengths == "varied" and model.positions != "sinusoidal":
            longest = self.data.segment_len + MOST_ABOVE
            if longest > model.max_len:
                raise ConfigError(
                    f"data.segment_lengths is 'varied', up to {longest:,} tokens, above model.max_len"
                    f" {model.max_len:,}; use 'fixed', or raise max_len."
                )
        self.reading.attending(model)  # its own complaints


RUNS: dict[str, type[RunConfig]] = {
    "transformer": TrainConfig,
    "transformer-xl": TextConfig,
    "reformer": TextConfig,
    "reformer-seq2seq": TrainConfig,
}
"""model.architecture -> the settings of a run that trains one."""
