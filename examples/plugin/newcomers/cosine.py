"""Attention by the cosine of query and key: a kind in one file, of the plug-in `newcomers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class CosineAttentionConfig:
    """Scores are sharpness x cos(q, k)."""

    kind: Literal["cosine"] = "cosine"
    sharpness: float = 4.0

    def score(self, num_heads: int, head_dim: int) -> nn.Module:
        """See `AttentionConfig.score`."""
        import torch
        from torch import nn

        sharpness = self.sharpness

        class CosineScore(nn.Module):
            def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                query, key = (nn.functional.normalize(one, dim=-1) for one in (query, key))
                return sharpness * query @ key.transpose(-1, -2)

        return CosineScore()
