"""Settings of a run that learns a language model, and complete runs by name, some with the sizes of the papers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from manyheads.catalogue import ARCHITECTURES, first_config
from manyheads.config.checks import at_least, check
from manyheads.config.files import model_choice
from manyheads.data.settings import DUPLICATION, SegmentSettings
from manyheads.decoding.settings import GenerationSettings
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import Reading
from manyheads.text.settings import VocabularySettings
from manyheads.training.settings import (
    JudgingSettings,
    OptimiserSettings,
    RunConfig,
    ScheduleSettings,
    TokenInitialSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from manyheads.models.protocols import LanguageModelConfig
else:
    LanguageModelConfig = model_choice("language-modelling")

MOST_ABOVE = 15
"""Tokens by which a segment of varied length may be longer than segment_len (`data.language.segments`)."""


@dataclass(frozen=True, kw_only=True)
class TextValidationSettings(JudgingSettings):
    """Validation of language models: likelihood of held-out text, and samples.

    Args:
        sample_tokens: length of each sample.
        prompt: what samples continue; empty begins a text.
    """

    judged = "a language model"
    scores = ("loss",)

    num_samples: int = 1
    sample_tokens: int = 200
    prompt: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "validation.", at_least(1), "sample_tokens")


@dataclass(frozen=True, kw_only=True)
class TextConfig(RunConfig):
    """The settings of a language model's run.

    Raises: ConfigError: segments are longer than the model's positions, or memory is set for a model without memory.
    """

    data: SegmentSettings = field(default_factory=SegmentSettings)
    vocabulary: VocabularySettings = field(default_factory=VocabularySettings)
    model: LanguageModelConfig = field(default_factory=lambda: first_config("language-modelling"))
    initial: TokenInitialSettings = field(default_factory=TokenInitialSettings)
    validation: TextValidationSettings = field(default_factory=TextValidationSettings)
    reading: Reading = field(default_factory=Reading)
    generation: GenerationSettings = field(default_factory=GenerationSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.smoothing_kind != "all":
            raise ConfigError(
                f"training.smoothing_kind is {self.training.smoothing_kind!r}, but the targets of a language model have"
                " no padding; set it to 'all'.",
                fields=["training"],
            )
        if self.training.num_sampled and self.model.has_adaptive_softmax:
            raise ConfigError(
                f"training.num_sampled is {self.training.num_sampled}, and the model's softmax is adaptive; take one"
                " of the two: set num_sampled to 0, or make the model's plain.",
                fields=("training", "model"),
            )
        if self.initial.embeddings != "random":
            self._check_embeddings()
        if not self.model.reads_forwards:
            raise ConfigError(
                "model.causal is false; an encoder cannot learn to generate, set it to true.", fields=["model"]
            )
        if self.model.longest_input is not None:
            self._check_lengths(self.model.longest_input)
        if self.data.length_schedule:
            self._check_length_schedule()
        if self.data.memory_len_range:
            self._check_memory_len_range(self.data.memory_len_range[1])
        self.reading.attending(self.model)  # raises its own errors

    @property
    def task(self) -> Literal["duplication", "text"]:
        """See `RunConfig.task`. Prepared ids make a text task one of ids, which has the same settings."""
        return "duplication" if self.data.path == DUPLICATION else "text"

    def _check_embeddings(self) -> None:
        kind, model = self.initial.embeddings, self.model
        if self.task == "duplication":
            raise ConfigError(
                f"initial.embeddings is {kind!r}, but data.path is {DUPLICATION!r}, whose tokens are drawn at random;"
                " take 'random'.",
                fields=["initial"],
            )
        if model.has_narrow_embeddings:
            raise ConfigError(
                f"initial.embeddings is {kind!r}, but model.div_value gives rare tokens narrower embeddings; set"
                " model.div_value to 1, or take 'random'.",
                fields=("initial", "model"),
            )

    def _check_length_schedule(self) -> None:
        model, multiple = self.model, self.model.segment_multiple
        if self.task == "duplication":
            raise ConfigError(
                f"data.length_schedule is for texts, and data.path is {DUPLICATION!r}; leave one of them out.",
                fields=["data"],
            )
        if not model.reads_segments_apart:
            raise ConfigError(
                "data.length_schedule changes the number of lanes, but the model continues each lane from its earlier"
                " segments; set model.memory_len (and ext_len) to 0, or leave the schedule out.",
                fields=("data", "model"),
            )
        odd = next((stage.length for stage in self.data.stages if stage.length % multiple), None)
        if odd is not None:
            raise ConfigError(
                f"data.length_schedule contains {odd:,}, which is no multiple of {multiple}, the chunks of the model"
                " (model.chunk_len, local_chunk_len); take a multiple.",
                fields=("data", "model"),
            )

    def _check_memory_len_range(self, longest: int) -> None:
        memory_len = self.model.context_settings.get("memory_len", 0)
        if self.task == "duplication" or not memory_len:
            what = f"data.path {DUPLICATION}" if self.task == "duplication" else f"this {self.model.architecture}"
            raise ConfigError(
                f"data.memory_len_range is {list(self.data.memory_len_range)}, but {what} has no memory of earlier"
                " segments; leave it out.",
                fields=("data", "model"),
            )
        if longest > memory_len:
            raise ConfigError(
                f"data.memory_len_range reaches {longest:,}, but model.memory_len, the positions that are stored, is"
                f" {memory_len:,}; lower the first, or raise the second.",
                fields=("data", "model"),
            )

    def _check_lengths(self, longest: int) -> None:
        """The segment is the context of a model without memory, so it must fit into its positions."""
        lengths = [("data", self.data.segment_len)]
        if self.task != "duplication":  # its validation uses whole sequences, not `reading`
            lengths.append(("reading", self.reading.segment_len))
        for name, length in lengths:
            if length > longest:
                raise ConfigError(
                    f"{name}.segment_len is {length:,}, but the model has {longest:,} positions (model.max_len);"
                    " lower the first, or raise the second.",
                    fields=(name, "model"),
                )
        most = self.data.segment_len + MOST_ABOVE
        if self.data.segment_lengths == "varied" and most > longest:
            raise ConfigError(
                f"data.segment_lengths is 'varied', up to {most:,} tokens, above model.max_len {longest:,}; use"
                " 'fixed', or raise max_len.",
                fields=("data", "model"),
            )


def xl_debug() -> TextConfig:
    """A language model's run in seconds on a CPU: a little Transformer-XL on the bytes of the embedded novel."""
    return TextConfig(
        run_dir="runs/xl-debug",
        precision="fp32",
        num_threads=1,
        data=SegmentSettings(lanes=4, segment_len=16, accumulate=2),
        model=ARCHITECTURES["transformer-xl"].presets["debug"],
        optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="inverse_sqrt", warmup_steps=10),
        training=TrainingSettings(
            max_steps=20, label_smoothing=0.0, log_every=5, save_every=10, ema_decay=0.99, keep=2
        ),
        validation=TextValidationSettings(every_steps=10, sample_tokens=40, prompt="He "),
        reading=Reading(segment_len=32, memory_len=32, max_tokens=2000),
    )


def xl_demo() -> TextConfig:
    """Crime and Punishment, byte by byte, in ten minutes on two cores; a sample is printed as it learns.

    Muon, as in `demo`. Ten minutes are at most six passes over the novel, too few to overfit: no dropout.
    """
    return TextConfig(
        run_dir="runs/xl-demo",
        data=SegmentSettings(lanes=16, segment_len=128),
        model=ARCHITECTURES["transformer-xl"].presets["demo"],
        optimiser=OptimiserSettings(name="muon", learning_rate=3e-3, muon_learning_rate=0.02, clip_norm=1.0),
        schedule=ScheduleSettings(kind="linear", warmup_steps=50),
        training=TrainingSettings(
            max_steps=0, max_minutes=10.0, label_smoothing=0.0, log_every=20, save_every=200, keep=2
        ),
        validation=TextValidationSettings(every_steps=400, sample_tokens=300, prompt="Raskolnikov "),
        reading=Reading(segment_len=128, memory_len=256, max_tokens=20_000),
        generation=GenerationSettings(temperature=0.8),
    )


def lm_demo() -> TextConfig:
    """`xl-demo` with a decoder alone, as GPT and Llama: each segment of 256 bytes is read by itself, without memory."""
    return replace(
        xl_demo(),
        run_dir="runs/lm-demo",
        data=SegmentSettings(lanes=8, segment_len=256),
        model=ARCHITECTURES["decoder"].presets["demo"],
        reading=Reading(segment_len=256, max_tokens=20_000),
    )


def reformer_debug() -> TextConfig:
    """A Reformer's run in seconds on a CPU: two small layers, local and hashed, on the bytes of the embedded novel."""
    small = xl_debug()
    return replace(
        small,
        run_dir="runs/reformer-debug",
        data=SegmentSettings(lanes=4, segment_len=48, accumulate=2),
        model=ARCHITECTURES["reformer"].presets["debug"],
        validation=TextValidationSettings(every_steps=10, sample_tokens=20, prompt="He "),
        reading=Reading(segment_len=64, max_tokens=2000),
    )


def reformer_demo(precision: str = "bf16") -> TextConfig:
    """Crime and Punishment in segments of 16,384 bytes, on two cores; each byte sees the text of its chapter before it.

    Three local layers attend to near positions and a hashed layer to far ones, as in trax's enwik8 model. Scores of
    local layers decrease with the distance, by amounts that are trained. If they did not, the first hundred steps or
    more would learn only which byte follows which.

    Args: precision: of the run. In fp32 the pieces are 4,096 bytes long: ten minutes are enough for only about 180
        steps of 16,384 bytes, and the loss depends mostly on the number of steps.
    """
    length, side = (16_384, 128) if precision == "bf16" else (4_096, 64)
    return TextConfig(
        run_dir="runs/reformer-demo",
        data=SegmentSettings(lanes=1, segment_len=length),
        model=ARCHITECTURES["reformer"].config(
            d_model=192,
            num_heads=4,
            head_dim=48,
            d_ff=768,
            num_layers=4,
            layers=("local", "local", "lsh", "local"),
            max_len=length,
            axial_shape=(side, side),
            axial_dims=(96, 96),
            local_chunk_len=64,
            local_slopes=True,
            train_slopes=True,
            chunk_len=64,
            num_hashes=2,
            ff_chunk_len=4096,
            dropout=0.0,
        ),
        optimiser=OptimiserSettings(name="muon", learning_rate=3e-3, muon_learning_rate=0.02, clip_norm=1.0),
        schedule=ScheduleSettings(kind="linear", warmup_steps=20),
        training=TrainingSettings(
            max_steps=0, max_minutes=10.0, label_smoothing=0.0, log_every=10, save_every=50, keep=2
        ),
        validation=TextValidationSettings(
            every_steps=50 if precision == "bf16" else 200, sample_tokens=300, prompt="Raskolnikov "
        ),
        reading=Reading(segment_len=length, lanes=1, max_tokens=16_384),
        generation=GenerationSettings(temperature=0.8),
    )


def million() -> TextConfig:
    """A Reformer that reads the embedded novel, 1,044,000 bytes, as one sequence. A step takes minutes and 18 GiB.

    That is what `info million --length 1048576` predicts in fp32; in bf16, which it takes where that is faster, it
    predicts 14 GiB, and 14.5 were measured. In fp32, steps of up to 262,144 bytes were measured; docs/long-sequences.md
    has the figures.
    """
    return TextConfig(
        run_dir="runs/million",
        data=SegmentSettings(lanes=1, segment_len=1 << 20),
        model=ARCHITECTURES["reformer"].presets["million"],
        optimiser=OptimiserSettings(learning_rate=1e-3, clip_norm=1.0),
        schedule=ScheduleSettings(kind="constant", warmup_steps=10),
        training=TrainingSettings(max_steps=100, label_smoothing=0.0, log_every=1, save_every=5, keep=2),
        validation=TextValidationSettings(every_steps=20, num_samples=0),
        reading=Reading(segment_len=1 << 20, lanes=1),
    )


def enwik8() -> TextConfig:
    """A Reformer for enwik8 in sequences of 65,536 bytes (Kitaev et al. 2020, sec. 5): a batch of 8, 20K steps.

    Set data.path to the prepared corpus. Schedule and optimiser are those of `imagenet64`.
    """
    return TextConfig(
        run_dir="runs/enwik8",
        data=SegmentSettings(path="data/enwik8", lanes=8, segment_len=65_536, accumulate=8),
        model=ARCHITECTURES["reformer"].presets["enwik8"],
        optimiser=OptimiserSettings(learning_rate=1.0),
        schedule=ScheduleSettings(kind="noam", warmup_steps=8000),
        training=TrainingSettings(max_steps=20_000, label_smoothing=0.0, save_every=1000),
        validation=TextValidationSettings(every_steps=1000),
        reading=Reading(segment_len=65_536, lanes=1),
    )


def imagenet64() -> TextConfig:
    """A Reformer for ImageNet64 (Kitaev et al. 2020, sec. 5): pictures of 12,288 bytes, a batch of 8.

    Set data.path to the prepared pictures. The optimiser and its schedule are those of trax
    (`configs/reformer_imagenet64.gin`).
    """
    return TextConfig(
        run_dir="runs/imagenet64",
        data=SegmentSettings(
            path="data/imagenet64", lanes=8, segment_len=12_288, documents="separate", order="shuffled", accumulate=8
        ),
        model=ARCHITECTURES["reformer"].presets["imagenet64"],
        optimiser=OptimiserSettings(learning_rate=1.0),
        schedule=ScheduleSettings(kind="noam", warmup_steps=8000),
        training=TrainingSettings(max_steps=500_000, label_smoothing=0.0, save_every=1000),
        validation=TextValidationSettings(every_steps=1000),
        reading=Reading(segment_len=12_288, lanes=8, documents="separate"),
    )
