"""Attention kinds: how a head scores a query and a key. A new kind is one file and one line of `catalogue.ATTENTIONS`.

Nothing here imports torch: `--help` reads the settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from manyheads.config.checks import MOST_UNITS, between, check

if TYPE_CHECKING:
    from torch import nn


class AttentionConfig(Protocol):
    """One kind: a frozen dataclass of its settings."""

    @property
    def kind(self) -> str:
        """Its name in ATTENTIONS: a field whose type is `Literal` of it."""

    def score(self, num_heads: int, head_dim: int) -> nn.Module | None:
        """Return the module (query, key) -> scores (batch, heads, q_len, k_len); None: scaled dot products."""


@dataclass(frozen=True, kw_only=True)
class DotProductAttentionConfig:
    """Scaled dot-product scores (Vaswani et al. 2017, eq. 1)."""

    kind: Literal["dot_product"] = "dot_product"

    def score(self, num_heads: int, head_dim: int) -> None:
        """See `AttentionConfig.score`."""


@dataclass(frozen=True, kw_only=True)
class AdditiveAttentionConfig:
    """Additive scores (Bahdanau et al. 2015): w_v . tanh(W_q q + W_k k) in every head.

    Args: hidden_dim: width of the tanh layer; 0: the head's width.

    Raises: ConfigError: hidden_dim is negative or too large.
    """

    kind: Literal["additive"] = "additive"
    hidden_dim: int = 0

    def __post_init__(self) -> None:
        check(self, "model.attention.", between(0, MOST_UNITS), "hidden_dim")

    def score(self, num_heads: int, head_dim: int) -> nn.Module:
        """See `AttentionConfig.score`."""
        from manyheads.nn.attention.scores import AdditiveScore

        return AdditiveScore(num_heads, head_dim, self.hidden_dim)
