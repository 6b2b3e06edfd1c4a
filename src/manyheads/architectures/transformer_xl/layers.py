"""The two layers of a Transformer-XL: one for relative positions, one for absolute ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.architectures.transformer_xl.config import TransformerXLConfig
from manyheads.nn.attention.cache import CacheStep
from manyheads.nn.attention.masks import Mask
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import LearnedRelativeAttention, RelativeAttention
from manyheads.nn.attention.relative_bias import RelativeBias
from manyheads.nn.layers import FeedForward, Residual, build_norm
from manyheads.nn.shapes import Float


class RelativeLayer(nn.Module):
    """Attention by content and distance over memory and segment, then feed-forward.

    Paper: Dai et al. 2019, the summary at the end of sec. 3.3. Symbols: h = x, m = memory, in which nothing has a
        gradient; keys and values are those of m followed by h, queries those of h.
    Args: index: number of the layer, from 0.

    Shape: (lanes, len, d_model) in and out.
    """

    def __init__(self, config: TransformerXLConfig, index: int = 0) -> None:
        super().__init__()
        self.attention = _relative_attention(config, config.heads_by_layer()["decoder"][index])
        self.feed_forward = FeedForward(config.d_model, config.d_ff, dropout=config.dropout)
        self.attention_residual = _residual(config)
        self.feed_forward_residual = _residual(config)

    def forward(
        self,
        x: Float[Tensor, "lanes len d_model"],
        memory: Float[Tensor, "lanes columns d_model"] | None,
        distances: Tensor,
        mask: Mask | None,
    ) -> Float[Tensor, "lanes len d_model"]:
        """Args: memory: this layer's input at earlier positions. distances: as `project_positions` takes them."""
        memory = _seen_as(self.attention_residual, memory)
        x = self.attention_residual(x, lambda h: self.attention(h, memory, distances, mask))
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]

    def extend(
        self,
        x: Float[Tensor, "lanes len d_model"],
        past: CacheStep,
        positions: Tensor,
        distance_bias: Tensor | None,
        mask: Mask | None,
    ) -> Float[Tensor, "lanes len d_model"]:
        """`forward` with stored keys and values.

        Args:
            past: keys and values of the memory, to which those of the segment are added.
            positions, distance_bias: projected, one column per key.
        """

        def attend(h: Tensor) -> Tensor:
            q, k, v = self.attention.project_together(h)
            return self.attention.attend(q, *past.write(k, v).filled(), positions, distance_bias, mask)

        x = self.attention_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class AbsoluteLayer(nn.Module):
    """Attention over memory and segment as in the Transformer, then feed-forward. Shape: (lanes, len, d_model).

    Shape: positions (max_len, d_model), if they are trained: by increasing distance from the segment's last token.
    Args: index: number of the layer, from 0.
    """

    without_decay: tuple[str, ...] = ("positions",)

    def __init__(self, config: TransformerXLConfig, index: int = 0) -> None:
        super().__init__()
        heads, width = config.heads_by_layer()["decoder"][index], config.width_of_heads
        rate = config.attention_dropout
        self.attention = MultiHeadAttention(config.d_model, heads, head_dim=width, dropout=rate, bias=False)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, dropout=config.dropout)
        self.attention_residual = _residual(config)
        self.feed_forward_residual = _residual(config)
        learned = config.attention == "absolute_learned"
        self.positions = nn.Parameter(torch.empty(config.max_len, config.d_model)) if learned else None
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)

    def forward(
        self,
        x: Float[Tensor, "lanes len d_model"],
        memory: Float[Tensor, "lanes columns d_model"] | None,
        positions: Tensor | None,
        mask: Mask | None,
    ) -> Float[Tensor, "lanes len d_model"]:
        """Args: memory: this layer's input at earlier positions, as it was before positions were added to it.

        positions: addends of memory and x, (columns + len, d_model), or with a leading lanes axis; for trained
            positions their distances from the segment's last token, whole numbers; None: nothing is added.
        """
        if positions is not None:
            if self.positions is not None:
                positions = self.positions[positions.clamp(max=self.positions.shape[0] - 1)]
            split = positions.shape[-2] - x.shape[1]
            x = (x + positions[..., split:, :]).to(x.dtype)
            memory = None if memory is None else (memory + positions[..., :split, :]).to(memory.dtype)
        memory = _seen_as(self.attention_residual, memory)

        def attend(h: Tensor) -> Tensor:
            key = h if memory is None else torch.cat([memory, h], dim=1)
            out: Tensor = self.attention(h, key=key, mask=mask)[0]
            return out

        x = self.attention_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


def _relative_attention(config: TransformerXLConfig, heads: int) -> RelativeAttention:
    sizes = (config.d_model, heads, config.width_of_heads)
    if config.attention != "relative_learned":
        bias = RelativeBias(heads, config.relative_bias, causal=True) if config.relative_bias else None
        return RelativeAttention(*sizes, dropout=config.attention_dropout, relative_bias=bias)
    return LearnedRelativeAttention(*sizes, max_len=config.max_len, dropout=config.attention_dropout)


def _seen_as(residual: Residual, memory: Tensor | None) -> Tensor | None:
    """Return the memory as the sublayer reads its input: normalised under pre-norm."""
    if memory is None or residual.position == "post":
        return memory
    seen: Tensor = residual.norm(memory)
    return seen


def _residual(config: TransformerXLConfig) -> Residual:
    norm = build_norm("layer", config.d_model, config.norm_eps)
    return Residual(norm, position=config.norm_position, dropout=config.dropout)
