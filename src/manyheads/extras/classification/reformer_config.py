"""Config and presets of the Reformer's encoder as a classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from manyheads.architectures.reformer.config import ReformerConfig
from manyheads.config.checks import check_labels

if TYPE_CHECKING:
    from manyheads.extras.classification.pooling import Pooling
else:
    Pooling = Literal["mean", "first"]

__all__ = ["PRESETS", "ReformerClassifierConfig"]


@dataclass(frozen=True, kw_only=True)
class ReformerClassifierConfig(ReformerConfig):
    """The Reformer as an encoder in both directions, whose states are pooled into one vector for a linear layer.

    Its other settings are those of the language model; `causal`, `visible` and the chunks after a query's own have
    other defaults, so that every token attends to later ones, too.

    Args:
        architecture: identifies the architecture.
        labels: the labels, in the order of the scores; empty: those of the data.
        pooling: the vector of a text: `mean` of the states of its tokens, or the state of the `first` one.

    Raises: ConfigError: as `ReformerConfig`, or a label is empty or occurs twice.
    """

    task: ClassVar[Literal["classification"]] = "classification"  # type: ignore[assignment]

    architecture: Literal["reformer-classifier"] = "reformer-classifier"  # type: ignore[assignment]
    labels: tuple[str, ...] = ()
    pooling: Pooling = "mean"
    causal: bool = False
    visible: Literal["bucket", "chunk"] = "chunk"
    chunks_after: int = 1
    local_chunks_after: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels)

    def describe(self) -> str:
        """Return the sizes in one line."""
        return f"{super().describe()}, {len(self.labels)} labels"


PRESETS: dict[str, ReformerClassifierConfig] = {
    # A model that learns one batch in a second or two, with local and hashed layers.
    "debug": ReformerClassifierConfig(
        labels=("no", "yes"),
        d_model=32,
        num_heads=2,
        head_dim=12,
        d_ff=64,
        num_layers=2,
        layers=("local", "lsh"),
        max_len=64,
        chunk_len=4,
        local_chunk_len=4,
        num_hashes=2,
    ),
    # Three layers for texts of up to 4,096 tokens, for minutes of training on a CPU.
    "small": ReformerClassifierConfig(
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_layers=3,
        layers=("local", "lsh", "local"),
        max_len=4096,
        chunk_len=32,
        local_chunk_len=32,
        num_hashes=2,
    ),
}
