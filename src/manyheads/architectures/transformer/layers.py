"""The two layers of the Transformer: three sublayers in the decoder, two in the encoder.

Paper: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.1, figure 1.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.nn.attention.cache import DecoderLayerStep
from manyheads.nn.attention.masks import Mask
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative_bias import RelativeBias
from manyheads.nn.layers import FeedForward, Residual, build_norm


def relative_biases(config: TransformerConfig, stack: Literal["encoder", "decoder"]) -> list[RelativeBias | None]:
    """Return the relative bias of each layer's self-attention: one for all, or one for each if heads are pruned."""
    heads = config.heads_by_layer()[stack]
    if not config.relative_bias:
        return [None] * len(heads)
    made: list[RelativeBias | None] = [
        RelativeBias(count, config.relative_bias, causal=stack == "decoder")
        for count in (heads if config.has_pruned(stack) else heads[:1])
    ]
    return made if len(made) == len(heads) else made * len(heads)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward. Shape: (batch, source_len, d_model) in and out.

    Args: index: number of the layer, from 0. relative_bias: of self-attention.
    """

    def __init__(self, config: TransformerConfig, index: int = 0, relative_bias: RelativeBias | None = None) -> None:
        super().__init__()
        self.self_attn = _attention(config, "encoder", config.heads_in_layer("encoder", index), relative_bias)
        self.feed_forward = _feed_forward(config, "encoder")
        self.self_attn_residual = _residual(config)
        self.feed_forward_residual = _residual(config)

    def forward(self, x: Tensor, mask: Mask | None) -> Tensor:
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, mask=mask)[0])
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the source, feed-forward. Shape: (batch, target_len, d_model) in and out.

    Args: index: number of the layer, from 0. relative_bias: of self-attention.
    """

    def __init__(self, config: TransformerConfig, index: int = 0, relative_bias: RelativeBias | None = None) -> None:
        super().__init__()
        self.self_attn = _attention(config, "decoder", config.heads_in_layer("decoder", index), relative_bias)
        self.cross_attn = _attention(config, "decoder", config.heads_in_layer("cross", index))
        self.feed_forward = _feed_forward(config, "decoder")
        self.self_attn_residual = _residual(config)
        self.cross_attn_residual = _residual(config)
        self.feed_forward_residual = _residual(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | None,
        memory_mask: Mask | None,
    ) -> Tensor:
        """All target positions at once, as in training."""
        x = self.self_attn_residual(x, lambda h: self.self_attn(h, mask=mask)[0])
        x = self.cross_attn_residual(x, lambda h: self.cross_attn(h, memory, mask=memory_mask)[0])
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]

    def step(self, x: Tensor, layer: DecoderLayerStep, mask: Mask | None, memory_mask: Mask | None) -> Tensor:
        """`forward` for the next target positions of every row. Shape: (rows, new_len, d_model) in and out."""

        def attend_memory(h: Tensor) -> Tensor:
            return self.cross_attn.step_across(h, layer.source_key, layer.source_value, memory_mask)

        x = self.self_attn_residual(x, lambda h: self.self_attn.step(h, layer.past, mask))
        x = self.cross_attn_residual(x, attend_memory)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


def _attention(
    config: TransformerConfig,
    stack: Literal["encoder", "decoder"],
    heads: int,
    relative_bias: RelativeBias | None = None,
) -> MultiHeadAttention:
    head_dim = config.head_dim_of(stack)
    return MultiHeadAttention(
        config.d_model,
        heads,
        head_dim=head_dim,
        value_head_dim=config.value_dim_of(stack),
        dropout=config.attention_dropout,
        bias=config.bias,
        score=config.attention.score(heads, head_dim),
        relative_bias=relative_bias,
    )


def _feed_forward(config: TransformerConfig, stack: Literal["encoder", "decoder"]) -> FeedForward:
    return FeedForward(
        config.d_model,
        config.d_ff_of(stack),
        activation=config.activation,
        dropout=config.feed_forward_dropout,
        bias=config.bias,
    )


def _residual(config: TransformerConfig) -> Residual:
    norm = build_norm(config.norm, config.d_model, config.norm_eps, config.bias)
    return Residual(norm, position=config.norm_position, dropout=config.dropout)
