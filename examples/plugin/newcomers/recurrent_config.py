"""Config of the recurrent language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """vocab_size 0: the vocabulary's."""

    task: ClassVar[Literal["language-modelling"]] = "language-modelling"
    memory_degree: ClassVar[int] = 1
    reads_forwards: ClassVar[bool] = True
    has_adaptive_softmax: ClassVar[bool] = False
    draws_hashes: ClassVar[bool] = False
    reads_segments_apart: ClassVar[bool] = False
    positions_from_start: ClassVar[bool] = False
    segment_multiple: ClassVar[int] = 1
    hash_rounds: ClassVar[None] = None

    architecture: Literal["recurrent"] = "recurrent"
    vocab_size: int = 0
    d_model: int = 64

    @property
    def longest_input(self) -> None:
        """No limit."""
        return None

    @property
    def context_settings(self) -> dict[str, int]:
        """None besides the segment's length."""
        return {}

    def lower_bounds(self) -> tuple[int, int]:
        """See `ModelConfig`."""
        return 3, self.d_model * self.vocab_size

    def describe(self) -> str:
        """See `ModelConfig`."""
        return f"a recurrent layer, d_model {self.d_model}"


PRESETS = {"debug": RecurrentConfig()}
