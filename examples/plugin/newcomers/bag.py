"""The encoder-decoder that adds up embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.models.composites import Seq2Seq
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.pytrees import register_state
from newcomers.bag_config import BagConfig


@register_state
@dataclass(frozen=True)
class BagState:
    """Shape: memory, total (rows, d_model)."""

    memory: Tensor
    total: Tensor

    def reorder(self, rows: Tensor) -> BagState:
        rows = rows.flatten()
        return BagState(self.memory[rows], self.total[rows])

    def clone(self) -> BagState:
        return BagState(self.memory.clone(), self.total.clone())


class Bag(nn.Module):
    """The source's mean embedding, and the sum of the target's embeddings so far."""

    def __init__(self, config: BagConfig) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(config.source_vocab_size, config.d_model)
        self.target_embedding = nn.Embedding(config.target_vocab_size, config.d_model)

    def tie_weights(self) -> None:
        """Nothing is tied."""

    def start(self, source: Tensor, source_lengths: Tensor) -> BagState:
        real = torch.arange(source.shape[1], device=source.device) < source_lengths[:, None]
        memory = (self.source_embedding(source) * real[..., None]).sum(1) / source_lengths[:, None].clamp(min=1)
        return BagState(memory, torch.zeros_like(memory))

    def step(self, tokens: Tensor, state: BagState) -> tuple[Tensor, BagState]:
        sums = state.total[:, None] + self.target_embedding(tokens).cumsum(1)
        return torch.tanh(state.memory[:, None] + sums), replace(state, total=sums[:, -1])

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Any:
        return self.step(target, self.start(source, source_lengths))[0]


def build(config: BagConfig) -> Seq2Seq:
    """See `Architecture.build`."""
    return Seq2Seq(Bag(config), LinearHead(config.d_model, config.target_vocab_size), config)
