"""The state of a decoder between two steps of a search: keys and values of its own positions and of the source."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.nn.attention.branches import BranchedKeyValueState
from manyheads.nn.attention.lsh_cache import LSHCache
from manyheads.nn.attention.masks import Dense, Lengths, Mask, dense_mask
from manyheads.nn.attention.planned import PlannedKeyValues
from manyheads.nn.attention.state import KeyValueState, register_state
from manyheads.nn.kernels import policy

# The largest number of hypotheses of a sentence whose keys are kept together: each is compared with the keys of all.
_MOST_TOGETHER = 8


@register_state
@dataclass(frozen=True)
class DecoderLayerState:
    """One decoder layer's memory.

    Shape: past: self-attention keys and values, one row per hypothesis; memory_key, memory_value: projected encoder
        output, (sentences, heads, source_len, head_dim), one row per sentence, for any number of hypotheses.
    """

    past: KeyValueState | BranchedKeyValueState | LSHCache
    memory_key: Tensor
    memory_value: Tensor


@dataclass(frozen=True)
class PlannedLayer:
    """`DecoderLayerState` during one step."""

    past: PlannedKeyValues
    memory_key: Tensor
    memory_value: Tensor


@register_state
@dataclass(frozen=True)
class DecoderState:
    """All layers' memories; rows are sentences x beams, sentence by sentence.

    Shape: source_seen (sentences, 1, 1, source_len) bool: False at the source's padding, None if there is none;
        length () int64 on the CPU: number of target positions so far.
    """

    layers: tuple[DecoderLayerState, ...]
    source_seen: Tensor | None
    length: Tensor

    @property
    def memory_mask(self) -> Mask | None:
        return None if self.source_seen is None else Dense(self.source_seen)

    def reorder(self, rows: Tensor) -> DecoderState:
        """See `protocols.SearchState.reorder`. rows: (sentences, beams) of old row ids."""
        old_sentences = self.layers[0].memory_key.shape[0]
        old_beams = max(1, self.layers[0].past.rows // max(1, old_sentences))
        sentences = torch.div(rows[:, 0], old_beams, rounding_mode="floor")
        same = rows.shape[0] == old_sentences  # sentences keep their order: an equal number means the same ones
        # As soon as a sentence has several hypotheses, their keys are kept together.
        together = old_beams == 1 < rows.shape[1] <= _MOST_TOGETHER
        layers, branches = [], None
        for layer in self.layers:
            key, value = layer.memory_key, layer.memory_value
            if not same:
                key, value = key.index_select(0, sentences), value.index_select(0, sentences)
            past = layer.past
            if together and isinstance(past, KeyValueState):
                past = BranchedKeyValueState.of(past, branches)
                branches = past.branches
            past = past.reorder(rows if isinstance(past, BranchedKeyValueState) else rows.flatten())
            layers.append(DecoderLayerState(past=past, memory_key=key, memory_value=value))
        seen = self.source_seen
        if seen is not None and not same:
            seen = seen.index_select(0, sentences)
        return DecoderState(layers=tuple(layers), source_seen=seen, length=self.length)

    def plan(self, new_len: int) -> tuple[tuple[PlannedLayer, ...], DecoderState]:
        """Return the layers for a step of new_len positions, and the state after it. See `KeyValueState.plan`."""
        during, after, slots = [], [], None
        for layer in self.layers:
            assert not isinstance(layer.past, LSHCache)  # the slot of a hashed position is known only after hashing
            planned, past = layer.past.plan(new_len, slots)
            slots = planned.slots
            during.append(PlannedLayer(planned, layer.memory_key, layer.memory_value))
            after.append(replace(layer, past=past))
        return tuple(during), replace(self, layers=tuple(after), length=self.length + new_len)

    def clone(self) -> DecoderState:
        """Return a copy for branching: steps of one do not change the other."""
        return replace(self, layers=tuple(replace(layer, past=layer.past.clone()) for layer in self.layers))


def source_mask(source_lengths: Tensor, source_len: int) -> Tensor | None:
    """Return `DecoderState.source_seen` for sources of these lengths."""
    seen = dense_mask(Lengths(source_lengths), 1, source_len, source_lengths.device)
    assert seen is not None
    # A mask costs time in every later step.
    return None if not policy.is_compiled() and bool(seen.all()) else seen
