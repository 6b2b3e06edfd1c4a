"""The common part of the settings of runs that learn an encoder with one head: classifiers and chart parsers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from manyheads.data.settings import RowSettings
from manyheads.errors import ConfigError
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(RunConfig):
    """The settings of a run of such a model (`TrainConfig` is the same for translators).

    predicts: what the model predicts, for messages.

    Raises: ConfigError: rows may be longer than the model's positions, or a setting is for models that predict tokens.
    """

    predicts: ClassVar[str]

    data: RowSettings
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, usual in (("num_sampled", 0), ("smoothing_kind", "all")):
            if getattr(self.training, name) != usual:
                raise ConfigError(
                    f"training.{name} is {getattr(self.training, name)!r}, but {self.predicts} and no tokens to"
                    f" predict; set it to {usual!r}.",
                    fields=["training"],
                )
        longest = self.model.longest_input
        if longest is not None and self.data.max_len > longest:
            raise ConfigError(
                f"data.max_len is {self.data.max_len:,}, but the model has {longest:,} positions (model.max_len); lower"
                " the first, or raise the second.",
                fields=("data", "model"),
            )
