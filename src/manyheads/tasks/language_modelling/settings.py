"""Settings of a run that learns a language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Union

from manyheads.catalogue import configs_of
from manyheads.config.checks import at_least, check
from manyheads.data.settings import DUPLICATION, SegmentSettings
from manyheads.decoding.settings import GenerationSettings
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import Reading
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.settings import VocabularySettings
from manyheads.training.settings import JudgingSettings, RunConfig, TokenInitialSettings

if TYPE_CHECKING:
    from manyheads.models.protocols import LanguageModelConfig
else:
    LanguageModelConfig = Union[configs_of("language-modelling")]  # noqa: UP007  (the classes are in the table)

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
    model: LanguageModelConfig = field(default_factory=TransformerXLConfig)
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
