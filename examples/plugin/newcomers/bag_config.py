"""Config of the encoder-decoder that adds up embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class BagConfig:
    """Both vocabulary sizes 0: the tokenizer's."""

    task: ClassVar[Literal["translation"]] = "translation"
    memory_degree: ClassVar[int] = 1

    architecture: Literal["bag"] = "bag"
    source_vocab_size: int = 0
    target_vocab_size: int = 0
    d_model: int = 16
    tie_embeddings: Literal["none"] = "none"

    @property
    def longest_input(self) -> None:
        """No limit."""
        return None

    def lower_bounds(self) -> tuple[int, int]:
        """See `ModelConfig`."""
        return 3, self.d_model * self.target_vocab_size

    def describe(self) -> str:
        """See `ModelConfig`."""
        return f"a bag of words, d_model {self.d_model}"


PRESETS = {"debug": BagConfig()}
