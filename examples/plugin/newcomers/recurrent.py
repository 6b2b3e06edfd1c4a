"""The recurrent language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.models.composites import LanguageModel
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.pytrees import register_state
from newcomers.recurrent_config import RecurrentConfig


@register_state
@dataclass(frozen=True)
class RecurrentState:
    """Shape: hidden (lanes, d_model)."""

    hidden: Tensor

    def reset(self, lanes: Tensor) -> RecurrentState:
        return RecurrentState(self.hidden.masked_fill(lanes[:, None], 0.0))

    def reorder(self, rows: Tensor) -> RecurrentState:
        return RecurrentState(self.hidden[rows.flatten()])

    def clone(self) -> RecurrentState:
        return RecurrentState(self.hidden.clone())

    def detach(self) -> RecurrentState:
        return RecurrentState(self.hidden.detach())


class Recurrent(nn.Module):
    """h_t = tanh(W x_t + U h_(t-1))."""

    max_len = None

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.cell = nn.RNNCell(config.d_model, config.d_model)

    def tie_weights(self) -> None:
        """Nothing is tied."""

    def tie_head(self, head: nn.Module) -> None:
        """Nothing is tied."""

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> RecurrentState:
        return RecurrentState(self.embedding.weight.new_zeros(lanes, self.cell.hidden_size))

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, state: Any = None) -> tuple[Tensor, Any]:
        hidden = self.start(len(tokens)).hidden if state is None else state.hidden
        found = []
        for place, x in enumerate(self.embedding(tokens).unbind(1)):
            after = self.cell(x, hidden)
            hidden = after if lengths is None else torch.where((place < lengths)[:, None], after, hidden)
            found.append(hidden)
        out = torch.stack(found, 1) if found else hidden.new_zeros(len(tokens), 0, hidden.shape[1])
        return out, RecurrentState(hidden.detach())


def build(config: RecurrentConfig) -> LanguageModel:
    """See `Architecture.build`."""
    return LanguageModel(Recurrent(config), LinearHead(config.d_model, config.vocab_size, bias=True), config)
