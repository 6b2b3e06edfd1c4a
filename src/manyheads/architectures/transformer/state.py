"""What a Transformer remembers between two steps of a search."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyheads.nn.attention.branches import BranchedKeyValueState
from manyheads.nn.attention.placed import PlacedKeyValueState
from manyheads.nn.attention.state import KeyValueState, register_state

__all__ = ["DecoderLayerState", "PlacedLayer", "PlacedStep", "TransformerState"]

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
class PlacedLayer:
    """`DecoderLayerState` during one step whose bookkeeping is done."""

    past: PlacedKeyValueState
    memory_key: Tensor
    memory_value: Tensor


@dataclass(frozen=True)
class PlacedStep:
    """All that the decoder needs for a step of one token, and nothing to decide: see `Transformer.place_step`.

    Shape: tokens (rows, 1) ids; positions (1, d_model), what is added to their embeddings; source_seen as in
        `TransformerState`, and all True where that has none: two kinds of steps would be compiled twice.
    """

    tokens: Tensor
    positions: Tensor
    layers: tuple[PlacedLayer, ...]
    source_seen: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """See `protocols.Placing`."""
        past = self.layers[0].past
        return past.key.dtype, len(past.key) == 1, past.is_shared


@dataclass(frozen=True)
class TransformerState:
    """All layers' memories; rows are sentences x beams, sentence by sentence.

    Shape: source_seen (sentences, 1, 1, source_len) bool: what of the source is no padding; None, or all True after a
        step that was placed, if there is none at all; length () int64 on the CPU: target positions read so far.
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

    def placed(self, new_len: int) -> tuple[tuple[PlacedLayer, ...], TransformerState]:
        """The layers for a step of new_len positions, and the state after it. See `KeyValueState.placed`."""
        during, after, place = [], [], None
        for layer in self.layers:
            placed, past = layer.past.placed(new_len, place)
            place = placed.place
            during.append(PlacedLayer(placed, layer.memory_key, layer.memory_value))
            after.append(replace(layer, past=past))
        return tuple(during), replace(self, layers=tuple(after), length=self.length + new_len)

    def clone(self) -> TransformerState:
        """A copy to branch from: the next step of either leaves the other alone."""
        return replace(self, layers=tuple(replace(layer, past=layer.past.clone()) for layer in self.layers))


register_state(DecoderLayerState, "past", "memory_key", "memory_value")
register_state(TransformerState, "layers", "source_seen", "length")
