"""One step of a Transformer's decoder, prepared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.nn.attention.cache import DecoderLayerStep
from manyheads.nn.attention.masks import Dense, Mask


@dataclass(frozen=True)
class PreparedStep:
    """All that `Transformer.compute_step` needs; see `protocols.PreparesSteps`.

    Shape: tokens (rows, new_len) ids; positions (new_len, d_model), added to their embeddings; source_seen as in
        `DecoderState`.
    """

    tokens: Tensor
    positions: Tensor
    layers: tuple[DecoderLayerStep, ...]
    mask: Mask | None
    source_seen: Tensor | None
    can_compile: bool

    @property
    def memory_mask(self) -> Mask | None:
        return None if self.source_seen is None else Dense(self.source_seen)

    @property
    def kind(self) -> tuple[object, ...]:
        past = self.layers[0].past
        return past.key.dtype, len(past.key) == 1, past.slots.seen is not None

    def for_compiler(self) -> PreparedStep:
        """See `protocols.PreparedStep`: with or without padding in the source, one program."""
        seen = self.source_seen
        if seen is None:
            sentences, _, source_len, _ = self.layers[0].source_key.shape
            seen = torch.ones(sentences, 1, 1, source_len, dtype=torch.bool, device=self.tokens.device)
        # A copy, because a view that begins elsewhere would be compiled anew.
        return replace(self, positions=self.positions.clone(), source_seen=seen)
