"""Models as plain modules, with one flat list of tensors in and out, from which ONNX graphs are made.

The sublayers are the model's own. Code that a graph cannot represent is replaced: growing tables of positions by their
formula, and caches by inputs and outputs. A masked softmax gives zeros to a query that may attend to nothing.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.nn.attention.cache import DecoderLayerStep
from manyheads.nn.attention.masks import Causal, KeyPadding, Mask
from manyheads.nn.attention.multi_head import MultiHeadAttention, merge_heads
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.kernels.attention import masked_weights
from manyheads.nn.positions import NoPositions

if TYPE_CHECKING:
    from manyheads.models.composites import Seq2Seq


def prepare(model: nn.Module) -> None:
    """Make all attention layers compute their weights explicitly instead of by SDPA, in evaluation mode: in ONNX, SDPA
    gives NaN for an empty row."""
    model.eval()
    for module in model.modules():
        attention: Any = module
        if getattr(module, "kind", None) == MultiHeadAttention.kind:
            attention.weights_hook = lambda weights: None
        if getattr(module, "kind", None) == RelativeAttention.kind:
            attention.attend = partial(_attend_by_distance, attention)


def _attend_by_distance(
    attention: RelativeAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    distance_bias: Tensor | None,
    mask: Mask | None,
) -> Tensor:
    """`RelativeAttention.attend` with the scores of distances gathered, because views that shift them have fixed sizes.

    Dai et al. 2019, sec. 3.3. Column k_len - 1 - d of the distances' scores belongs to distance d.
    """
    q_len, k_len = q.shape[2], k.shape[2]
    by_content = torch.matmul(q + attention.content_bias[:, None], k.transpose(-1, -2))
    if attention.position_bias is not None:
        q = q + attention.position_bias[:, None]
    by_distance = torch.matmul(q, positions.transpose(-1, -2))
    scale = attention.head_dim**-0.5
    if distance_bias is not None:
        by_distance = by_distance + distance_bias[:, None]
    queries = torch.arange(k_len - q_len, k_len)
    columns = (k_len - 1 - queries[:, None] + torch.arange(k_len)).clamp(max=k_len - 1)
    shifted = by_distance.gather(3, columns.expand(q.shape[0], q.shape[1], q_len, k_len))
    weights = masked_weights((by_content + shifted) * scale, mask, k_len - q_len)
    return attention.out_proj(merge_heads(torch.matmul(weights, v)))  # type: ignore[no-any-return]


def graph_positions(module: nn.Module, first: int, length: int, like: Tensor) -> Tensor:
    """Return the addends of positions first, first + 1, ...: (length, d_model).

    Args: module: `SinusoidalPositions`, `LearnedPositions` or `NoPositions`.
    """
    if isinstance(module, NoPositions):
        return torch.zeros(1, 1)
    places = torch.arange(first, first + length, device=like.device)
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight[places]
    return sinusoidal(places, module.d_model, module.layout)  # type: ignore[arg-type]


def sinusoidal(places: Tensor, d_model: int, layout: str) -> Tensor:
    """As `nn.positions.sinusoidal_table`, for positions below 65,536, without float64, which browsers do not have.

    A position is 256 times a high number plus a low one; sines of sums follow from tables of both, computed in float64.
    """
    frequency = np.exp(np.arange(0, d_model, 2) * (-math.log(10_000.0) / d_model))
    angle = np.arange(256)[:, None] * frequency
    high, low = torch.div(places, 256, rounding_mode="floor"), places % 256
    tables = (np.sin(256 * angle), np.cos(256 * angle), np.sin(angle), np.cos(angle))
    high_sine, high_cosine, low_sine, low_cosine = (torch.from_numpy(one.astype(np.float32)) for one in tables)
    sine = high_sine[high] * low_cosine[low] + high_cosine[high] * low_sine[low]
    cosine = high_cosine[high] * low_cosine[low] - high_sine[high] * low_sine[low]
    if layout == "halves":
        return torch.cat([sine, cosine[:, : d_model // 2]], dim=1)
    return torch.stack([sine, cosine], dim=2).flatten(1)[:, :d_model]


class Past:
    """One layer's keys and values of earlier positions, in the interface of `CacheStep`; new ones are appended.

    Shape: key, value (rows, heads, past_len, head_dim).
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value, self.length = key, value, key.shape[2]

    def write(self, key: Tensor, value: Tensor) -> Past:
        """Append the new positions."""
        self.key, self.value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        return self

    def among_real(self, mask: Mask | None) -> Mask | None:
        """All keys are real."""
        return mask

    def shared(self) -> None:
        """No rows share keys."""

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        return self.key, self.value


class EncoderGraph(nn.Module):
    """input_ids, attention_mask (batch, source_len) -> last_hidden_state (batch, source_len, d_model)."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.body = model.body

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        body = self.body
        x = body.source_embedding(input_ids)
        x = x + graph_positions(body.source_positions, 0, input_ids.shape[1], x)
        return body.encoder(x, KeyPadding(attention_mask.bool()))  # type: ignore[no-any-return]


class CrossProjections(nn.Module):
    """encoder_hidden_states -> keys and values of each decoder layer's attention to the source."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.body = model.body

    def forward(self, encoder_hidden_states: Tensor) -> tuple[Tensor, ...]:
        pairs = [layer.cross_attn.project_memory(encoder_hidden_states) for layer in self.body.decoder.layers]
        return tuple(one for pair in pairs for one in pair)


class DecoderStep(nn.Module):
    """The next target positions: logits, and the keys and values of all positions.

    Shape: encoder_attention_mask (rows, source_len); input_ids (rows, new_len); past: for each layer own keys, own
        values, keys of the source, values of the source. Returns: logits (rows, new_len, vocab_size), then each layer's
        own keys and values.
    """

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.body, self.head = model.body, model.head

    def forward(self, encoder_attention_mask: Tensor, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        body: Any = self.body
        layers = [
            DecoderLayerStep(Past(*past[first : first + 2]), *past[first + 2 : first + 4])  # type: ignore[arg-type]
            for first in range(0, len(past), 4)
        ]
        x = body.target_embedding(input_ids)
        x = x + graph_positions(body.target_positions, past[0].shape[2], input_ids.shape[1], x)
        hidden = body.decoder.step(x, tuple(layers), Causal(), KeyPadding(encoder_attention_mask.bool()))
        presents = [one for layer in layers for one in layer.past.filled()]
        return self.head.logits(hidden), *presents


def logits_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """Return a head's logits, or its log-probabilities if it is adaptive."""
    score: Any = head.log_probs if hasattr(head, "clusters") else head.logits
    return cast(Tensor, score(hidden))
