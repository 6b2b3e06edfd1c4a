"""Settings of a run that learns to translate or to parse, and complete runs by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from manyheads.catalogue import ARCHITECTURES, first_config
from manyheads.config.checks import at_least, check
from manyheads.config.files import model_choice
from manyheads.data.settings import DataSettings
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import BleuTokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import (
    JudgingSettings,
    OptimiserSettings,
    RunConfig,
    ScheduleSettings,
    TokenInitialSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from manyheads.models.protocols import Seq2SeqConfig
else:
    Seq2SeqConfig = model_choice("translation")


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(JudgingSettings):
    """Validation of translators and parsers.

    Args:
        bleu_sentences: validation sentences translated (by the `decoding` settings) for BLEU and chrF, or of a parser
            for F1; 0 skips it; -1 is all.
        bleu_tokenize: BLEU's tokenizer: `none` for text that is tokenised already; `auto` is the target language's, or
            without a recorded language that of the script of the references: `13a` for text with spaces.
    """

    bleu_sentences: int = 500
    bleu_tokenize: BleuTokenizer = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "validation.", at_least(-1), "bleu_sentences")
        if self.best_by != "loss" and self.bleu_sentences == 0:
            raise ConfigError(
                f"validation.best_by is {self.best_by!r} but validation.bleu_sentences is 0; translate some, or use"
                " 'loss'.",
                fields=("best_by", "bleu_sentences"),
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The settings of a translator's or parser's run.

    Presets, files and single options fill them in, and `config.yaml` records them.
    """

    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: Seq2SeqConfig = field(default_factory=lambda: first_config("translation"))
    initial: TokenInitialSettings = field(default_factory=TokenInitialSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    decoding: DecodingSettings = field(default_factory=DecodingSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.batching == "packed":
            packing_lack = getattr(self.model, "packing_lack", None)
            lack = (
                f"data.batching is packed, but a {self.model.architecture} computes padded batches alone; set it to"
                " padded, or model.architecture to transformer."
            )
            if packing_lack is not None:
                lack = packing_lack(self.data.longest)
            if lack is not None:
                raise ConfigError(lack, fields=("data", "model"))

    @property
    def task(self) -> Literal["translation"]:
        """See `RunConfig.task`. Prepared trees make it parsing, which has the same settings."""
        return "translation"


def debug() -> TrainConfig:
    """Every part of a run in under 5 seconds on a CPU: the copy task, two small layers, twenty steps."""
    return TrainConfig(
        run_dir="runs/debug",
        precision="fp32",
        num_threads=1,
        data=DataSettings(
            path="copy-task", max_tokens=512, max_source_len=128, max_target_len=128, accumulate=2, num_train_pairs=500
        ),
        tokenizer=TokenizerSettings(kind="word", vocab_size=32),
        model=ARCHITECTURES["transformer"].presets["debug"],
        optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=10),
        training=TrainingSettings(max_steps=20, log_every=5, save_every=10, ema_decay=0.99, keep=2),
        validation=ValidationSettings(every_steps=10, bleu_sentences=8, num_samples=2),
        decoding=DecodingSettings(num_beams=2, max_len_offset=10),
    )


def copy() -> TrainConfig:
    """The copy task (Annotated Transformer): unseen sequences are copied exactly in under a minute on two cores."""
    return TrainConfig(
        run_dir="runs/copy",
        precision="fp32",
        num_threads=1,
        data=DataSettings(path="copy-task", max_tokens=768, max_source_len=32, max_target_len=32),
        tokenizer=TokenizerSettings(kind="word", vocab_size=64),
        model=ARCHITECTURES["transformer"].config(
            d_model=64,
            num_heads=4,
            d_ff=128,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dropout=0.0,
            norm_position="pre",
        ),
        optimiser=OptimiserSettings(learning_rate=5e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="cosine", warmup_steps=50),
        training=TrainingSettings(max_steps=500, label_smoothing=0.0, log_every=20, save_every=250, keep=2),
        validation=ValidationSettings(every_steps=250, bleu_sentences=100, num_samples=3),
        decoding=DecodingSettings(num_beams=1, max_len_offset=10),
    )


def demo(precision: str = "bf16") -> TrainConfig:
    """A translator from 60,000 embedded sentence pairs in five minutes on two cores.

    Small batches, two layers, Muon, distances in place of positions, and embeddings that begin from co-occurrence,
    because the time allows only a few passes over the data, so more steps help more than more layers. See
    experiments/demo.md.

    Args: precision: of the run. In fp32 a machine has a quarter of the speed or less, and a smaller model learns more
        in the same time.
    """
    is_fast = precision == "bf16"
    return TrainConfig(
        run_dir="runs/demo",
        data=DataSettings(max_tokens=2048, max_source_len=128, max_target_len=128, pad_to_multiple=2),
        tokenizer=TokenizerSettings(vocab_size=8000, normalize_spaces=True),
        model=ARCHITECTURES["transformer"].config(
            d_model=256 if is_fast else 192,
            num_heads=4,
            d_ff=1024 if is_fast else 768,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dropout=0.0,
            norm_position="pre",
            positions="none",
            relative_bias=16,
        ),
        optimiser=OptimiserSettings(
            name="muon",
            learning_rate=6e-3 if is_fast else 0.01,
            muon_learning_rate=0.02 if is_fast else 0.03,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        schedule=ScheduleSettings(kind="linear", warmup_steps=50 if is_fast else 20),
        training=TrainingSettings(max_steps=0, max_minutes=5.0, log_every=20, save_every=500, keep=2),
        validation=ValidationSettings(every_steps=500, bleu_sentences=100, num_samples=3),
        # After few steps the model prefers sentences that are too short.
        decoding=DecodingSettings(num_beams=4, length_penalty=1.2, max_len_offset=20),
        initial=TokenInitialSettings(embeddings="cooccurrence"),
    )


def sample() -> TrainConfig:
    """The translator of `manyheads sample-model`: the demo's smaller size and its data, 30 minutes on two cores.

    About ten epochs, so with dropout. Steps, precision, threads and seed are fixed, so that it can be trained again.
    """
    small = demo("fp32")
    return replace(
        small,
        run_dir="runs/sample-model",
        seed=1,
        device="cpu",
        precision="fp32",
        num_threads=2,
        model=replace(small.model, dropout=0.1),
        optimiser=replace(small.optimiser, learning_rate=6e-3, muon_learning_rate=0.02),
        schedule=ScheduleSettings(kind="linear", warmup_steps=100),
        training=replace(small.training, max_steps=2400, max_minutes=0.0, save_every=200),
        validation=replace(small.validation, every_steps=400, bleu_sentences=-1),
    )


def tiny() -> TrainConfig:
    """Multi30k as in Wu et al. 2021 (ACL), sec. 4.1: joint BPE of 10K, Adam at 0.005, 8,000 updates, beam 5.

    data.path must be set to the prepared corpus.
    """
    return TrainConfig(
        run_dir="runs/tiny",
        data=DataSettings(max_tokens=8192, max_source_len=128, max_target_len=128),
        tokenizer=TokenizerSettings(vocab_size=10_000),
        model=ARCHITECTURES["transformer"].presets["tiny"],
        optimiser=OptimiserSettings(learning_rate=5e-3, beta2=0.98, eps=1e-9),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=2000),
        training=TrainingSettings(max_steps=8000, log_every=50, save_every=400, keep=10),
        validation=ValidationSettings(every_steps=400, bleu_sentences=200),
        decoding=DecodingSettings(num_beams=5),
    )


def base() -> TrainConfig:
    """Vaswani et al. 2017, table 3 "base" and sec. 5: 25K + 25K tokens a step, Noam with 4,000, 100K steps."""
    return TrainConfig(
        run_dir="runs/base",
        data=DataSettings(max_tokens=25_000),
        tokenizer=TokenizerSettings(vocab_size=37_000),
        model=ARCHITECTURES["transformer"].presets["base"],
        training=TrainingSettings(max_steps=100_000, save_every=1500, keep=5),
        validation=ValidationSettings(every_steps=1500),
    )


def big() -> TrainConfig:
    """Vaswani et al. 2017, table 3 "big": 300K steps, the last 20 checkpoints for averaging."""
    small = base()
    training = replace(small.training, max_steps=300_000, keep=20)
    return replace(small, run_dir="runs/big", model=ARCHITECTURES["transformer"].presets["big"], training=training)
