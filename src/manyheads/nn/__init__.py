"""Building blocks for your own models: every kind of attention, positions, norms and heads.

    >>> from manyheads.nn import Causal, MultiHeadAttention
    >>> out, _ = MultiHeadAttention(d_model=16, num_heads=4)(torch.randn(2, 5, 16), mask=Causal())
    >>> out.shape
    torch.Size([2, 5, 16])

The batch is the first axis. In masks True = may attend. A query that may attend to nothing gets zeros.
`manyheads.extras.peers.conventions` converts the masks of other libraries. Importing this package does not import
torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyheads.catalogue import HOOKS, load

if TYPE_CHECKING:
    from manyheads.extras.peers.one_head import AdditiveAttention, DotProductAttention
    from manyheads.extras.peers.torch_compatible import TorchMultiheadAttention
    from manyheads.nn.attention.cache import KeyValueCache
    from manyheads.nn.attention.local import LocalSelfAttention
    from manyheads.nn.attention.lsh import LSHSelfAttention
    from manyheads.nn.attention.masks import Bias, Causal, Dense, KeyPadding, Lengths, Mask, Window
    from manyheads.nn.attention.multi_head import MultiHeadAttention, merge_heads, split_heads
    from manyheads.nn.attention.observing import observe
    from manyheads.nn.attention.relative import LearnedRelativeAttention as LearnedRelativeMultiHeadAttention
    from manyheads.nn.attention.relative import RelativeAttention as RelativeMultiHeadAttention
    from manyheads.nn.attention.scores import AdditiveScore
    from manyheads.nn.attention.settings import LSHSettings
    from manyheads.nn.heads.adaptive import AdaptiveEmbedding
    from manyheads.nn.heads.adaptive import AdaptiveHead as AdaptiveLogSoftmax
    from manyheads.nn.heads.linear import LinearHead
    from manyheads.nn.kernels.attention import dot_product_attention, dot_product_weights, masked_softmax
    from manyheads.nn.kernels.modes import fast
    from manyheads.nn.kernels.relative import relative_shift
    from manyheads.nn.kernels.reversible import ReversibleSequence
    from manyheads.nn.kernels.triton import fused_relative_attention, fused_relative_attention_of_segments
    from manyheads.nn.layers import FeedForward, Residual
    from manyheads.nn.positions import (
        AxialPositions,
        LearnedPositions,
        RotaryPositions,
        SinusoidalPositions,
        sinusoidal_table,
    )

_LAZY = {
    "AdaptiveEmbedding": "heads.adaptive",
    "AdaptiveLogSoftmax": "heads.adaptive:AdaptiveHead",
    "AdditiveScore": "attention.scores",
    "AxialPositions": "positions",
    "Bias": "attention.masks",
    "Causal": "attention.masks",
    "Dense": "attention.masks",
    "FeedForward": "layers",
    "KeyPadding": "attention.masks",
    "KeyValueCache": "attention.cache",
    "LSHSelfAttention": "attention.lsh",
    "LSHSettings": "attention.settings",
    "LearnedPositions": "positions",
    "LearnedRelativeMultiHeadAttention": "attention.relative:LearnedRelativeAttention",
    "Lengths": "attention.masks",
    "LinearHead": "heads.linear",
    "LocalSelfAttention": "attention.local",
    "Mask": "attention.masks",
    "MultiHeadAttention": "attention.multi_head",
    "RelativeMultiHeadAttention": "attention.relative:RelativeAttention",
    "Residual": "layers",
    "ReversibleSequence": "kernels.reversible",
    "RotaryPositions": "positions",
    "SinusoidalPositions": "positions",
    "Window": "attention.masks",
    "dot_product_attention": "kernels.attention",
    "dot_product_weights": "kernels.attention",
    "fast": "kernels.modes",
    "fused_relative_attention": "kernels.triton",
    "fused_relative_attention_of_segments": "kernels.triton",
    "masked_softmax": "kernels.attention",
    "merge_heads": "attention.multi_head",
    "observe": "attention.observing",
    "relative_shift": "kernels.relative",
    "sinusoidal_table": "positions",
    "split_heads": "attention.multi_head",
}
"""Name -> module below this package, and the name there if it is another."""
_OF_EXTRAS = {
    "AdditiveAttention": "additive attention",
    "DotProductAttention": "dot-product attention",
    "TorchMultiheadAttention": "attention of torch",
}
"""Name -> that of `HOOKS`."""

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveLogSoftmax",
    "AdditiveAttention",
    "AdditiveScore",
    "AxialPositions",
    "Bias",
    "Causal",
    "Dense",
    "DotProductAttention",
    "FeedForward",
    "KeyPadding",
    "KeyValueCache",
    "LSHSelfAttention",
    "LSHSettings",
    "LearnedPositions",
    "LearnedRelativeMultiHeadAttention",
    "Lengths",
    "LinearHead",
    "LocalSelfAttention",
    "Mask",
    "MultiHeadAttention",
    "RelativeMultiHeadAttention",
    "Residual",
    "ReversibleSequence",
    "RotaryPositions",
    "SinusoidalPositions",
    "TorchMultiheadAttention",
    "Window",
    "dot_product_attention",
    "dot_product_weights",
    "fast",
    "fused_relative_attention",
    "fused_relative_attention_of_segments",
    "masked_softmax",
    "merge_heads",
    "observe",
    "relative_shift",
    "sinusoidal_table",
    "split_heads",
]


def __getattr__(name: str) -> Any:
    if name in _OF_EXTRAS:
        return load(HOOKS[_OF_EXTRAS[name]])
    if name in _LAZY:
        module, _, inside = _LAZY[name].partition(":")
        return getattr(importlib.import_module(f"manyheads.nn.{module}"), inside or name)
    raise AttributeError(f"module 'manyheads.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
