"""The state of a Transformer between two steps of a search."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.nn.attention.branches import BranchedKeyValueState
from manyheads.nn.attention.masks import Dense, Mask
from manyheads.nn.attention.planned import PlannedKeyValues
from manyheads.nn.attention.state import KeyValueState, register_state

__all__ = ["DecoderLayerState", "PlannedLayer", "PlannedStep", "TransformerState"]

# Most hypotheses of a sentence whose keys are kept together: each is compared with the keys of all.
_MOST_TOGETHER = 8


@dataclass(frozen=True)
class DecoderLayerState:
    """One decoder layer's memory.

    Shape: past: self-attention keys and values, one row a hypothesis; memory_key, memory_value: projected encoder
        output, (sentences, heads, source_len, head_dim), one row a sentence however many hypotheses it has.
    """

    past: KeyValueState | BranchedKeyValueState
    memory_key: Tensor
    memory_value: Tensor


@dataclass(frozen=True)
class PlannedLayer:
    """`DecoderLayerState` during one step."""

    past: PlannedKeyValues
    memory_key: Tensor
    memory_value: Tensor


@dataclass(frozen=True)
class PlannedStep:
    """All that `Transformer.compute` needs; see `protocols.PlansSteps`.

    Shape: tokens (rows, new_len) ids; positions (new_len, d_model), added to their embeddings; source_seen as in
        `TransformerState`.
    """

    tokens: Tensor
    positions: Tensor
    layers: tuple[PlannedLayer, ...]
    mask: Mask | None
    source_seen: Tensor | None
    can_compile: bool

    @property
    def memory_mask(self) -> Mask | None:
        return None if self.source_seen is None else Dense(self.source_seen)

    @property
    def kind(self) -> tuple[object, ...]:
        """See `protocols.PlannedStep`."""
        past = self.layers[0].past
        return past.key.dtype, len(past.key) == 1, past.slots.seen is not None

    def for_compiler(self) -> PlannedStep:
        """See `protocols.PlannedStep`: with or without padding in the source, one program."""
        seen = self.source_seen
        if seen is None:
            sentences, _, source_len, _ = self.layers[0].memory_key.shape
            seen = torch.ones(sentences, 1, 1, source_len, dtype=torch.bool, device=self.tokens.device)
        # A copy, because a view that begins elsewhere would be compiled anew.
        return replace(self, positions=self.positions.clone(), source_seen=seen)


@dataclass(frozen=True)
class TransformerState:
    """All layers' memories; rows are sentences x beams, sentence by sentence.

    Shape: source_seen (sentences, 1, 1, source_len) bool: False at the source's padding, None if there is none;
        length () int64 on the CPU: target positions read so far.
    """

    layers: tuple[DecoderLayerState, ...]
    source_seen: Tensor | None
    length: Tensor

    def reorder(self, rows: Tensor) -> TransformerState:
        """See `protocols.SearchState.reorder`. rows: (sentences, beams) of old row ids."""
        old_sentences = self.layers[0].memory_key.shape[0]
        old_beams = max(1, self.layers[0].past.rows // max(1, old_sentences))
        sentences = torch.div(rows[:, 0], old_beams, rounding_mode="floor")
        same = rows.shape[0] == old_sentences  # lines keep their order, so as many as before are the same ones
        # From where a sentence has several hypotheses, their keys are kept together.
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
            past = past.reorder(rows.flatten()) if isinstance(past, KeyValueState) else past.reorder(rows)
            layers.append(DecoderLayerState(past=past, memory_key=key, memory_value=value))
        seen = self.source_seen
        if seen is not None and not same:
            seen = seen.index_select(0, sentences)
        return TransformerState(layers=tuple(layers), source_seen=seen, length=self.length)

    def plan(self, new_len: int) -> tuple[tuple[PlannedLayer, ...], TransformerState]:
        """The layers for a step of new_len positions, and the state after it. See `KeyValueState.plan`."""
        during, after, slots = [], [], None
        for layer in self.layers:
            planned, past = layer.past.plan(new_len, slots)
            slots = planned.slots
            during.append(PlannedLayer(planned, layer.memory_key, layer.memory_value))
            after.append(replace(layer, past=past))
        return tuple(during), replace(self, layers=tuple(after), length=self.length + new_len)

    def clone(self) -> TransformerState:
        """A copy to branch from: the next step of either leaves the other alone."""
        return replace(self, layers=tuple(replace(layer, past=layer.past.clone()) for layer in self.layers))


register_state(DecoderLayerState, "past", "memory_key", "memory_value")
register_state(TransformerState, "layers", "source_seen", "length")
