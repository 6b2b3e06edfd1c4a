"""Attention sublayers after pruning: with fewer heads, or with none, where only the residual connection remains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from manyheads.nn.attention.cache import CacheStep, KeyValueCache
from manyheads.nn.attention.masks import Mask

__all__ = ["NoHeads", "NoRelativeHeads", "copy_heads"]

# The axis of heads in each parameter of an attention module, by the first part of its name; out_proj has it in its
# weight only.
_AXES = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "out_proj": 1,
    "score": 0,
    "relative_bias": 0,
    "position_proj": 0,
    "content_bias": 0,
    "position_bias": 0,
    "distance_embedding": 1,
    "distance_bias": 1,
}


@torch.no_grad()
def copy_heads(old: nn.Module, new: nn.Module, kept: Sequence[int]) -> None:
    """Copy the weights of some heads into a smaller attention module of the same kind, or into one without heads.

    Args: kept: numbers of the heads in the old module, from 0.
    """
    before = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        if name == "out_proj.bias":  # of all heads together
            parameter.copy_(before[name])
            continue
        axis = _AXES[name.partition(".")[0]]
        shape = before[name].shape
        by_head = before[name].view(*shape[:axis], cast(int, old.num_heads), -1, *shape[axis + 1 :])
        chosen = by_head.index_select(axis, torch.tensor(kept, device=parameter.device))
        parameter.copy_(chosen.flatten(axis, axis + 1))


class NoHeads(nn.Module):
    """A `MultiHeadAttention` without heads, because all were pruned: its output is the bias of the output projection.

        >>> NoHeads(d_model=4, head_dim=2)(torch.ones(1, 3, 4))[0].abs().sum().item()
        0.0

    It has the methods that the layers of a model call. Keys, values and weights have no heads.

    Args: d_model, head_dim, value_head_dim: as of the layer before it was pruned. bias: whether the output had one.
    """

    num_heads = 0
    needs_weights = False

    def __init__(self, d_model: int, head_dim: int, value_head_dim: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.head_dim, self.value_head_dim = head_dim, value_head_dim or head_dim
        self.out_proj = nn.Module()
        self.out_proj.register_parameter("bias", nn.Parameter(torch.zeros(d_model)) if bias else None)
        self.weights_hook: Callable[[Tensor], None] | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        state: KeyValueCache | None = None,
        need_weights: bool = False,
        head_mask: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueCache | None] | tuple[Tensor, KeyValueCache | None, Tensor]:
        """Return the bias at every position, the state, and with `need_weights` weights of no head."""
        if state is not None:
            state = state.append(*self.project_memory(query))
        weights = query.new_zeros(query.shape[0], 0, query.shape[1], (query if key is None else key).shape[1])
        if self.weights_hook is not None:
            self.weights_hook(weights)
        return (self._output(query), state, weights) if need_weights else (self._output(query), state)

    def _output(self, x: Tensor) -> Tensor:
        bias = cast(Tensor | None, self.out_proj.bias)
        return torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)

    def empty_cache(self, rows: int, like: Tensor) -> KeyValueCache:
        """See `MultiHeadAttention.empty_cache`."""
        return KeyValueCache.empty(rows, 0, self.head_dim, like, value_dim=self.value_head_dim)

    def step(self, x: Tensor, past: CacheStep, mask: Mask | None = None) -> Tensor:
        """See `MultiHeadAttention.step`; there is nothing to write to `past`."""
        return self._output(x)

    def step_across(self, x: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """See `MultiHeadAttention.step_across`."""
        return self._output(x)

    def project_memory(self, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `MultiHeadAttention.project_memory`: keys and values of no head."""
        rows, k_len = key.shape[:2]
        return key.new_zeros(rows, 0, k_len, self.head_dim), key.new_zeros(rows, 0, k_len, self.value_head_dim)


class NoRelativeHeads(nn.Module):
    """A `RelativeAttention` without heads, because all were pruned: its output is zeros.

    Args: head_dim: as before. biased: whether distances had scores of their own.
    """

    num_heads = 0

    def __init__(self, head_dim: int, *, biased: bool) -> None:
        super().__init__()
        self.head_dim, self.biased = head_dim, biased
        self.weights_hook: Callable[[Tensor], None] | None = None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        distances: Tensor | None = None,
        mask: Mask | None = None,
        *,
        head_mask: Tensor | None = None,
    ) -> Tensor:
        """Return zeros. Shape: as x."""
        if self.weights_hook is not None:
            k_len = x.shape[1] + (0 if memory is None else memory.shape[1])
            self.weights_hook(x.new_zeros(x.shape[0], 0, x.shape[1], k_len))
        return torch.zeros_like(x)

    def project_together(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RelativeAttention.project_together`: no heads; the queries are x, whose shape the output has."""
        nothing = x.new_zeros(x.shape[0], 0, x.shape[1], self.head_dim)
        return x, nothing, nothing

    def project_positions(self, distances: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `RelativeAttention.project_positions`. distances: encoded, or whole numbers if they are learned."""
        dtype = distances.dtype if distances.is_floating_point() else torch.get_default_dtype()
        positions = torch.zeros(0, len(distances), self.head_dim, dtype=dtype, device=distances.device)
        return positions, positions[:, :, 0] if self.biased else None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        distance_bias: Tensor | None,
        mask: Mask | None,
        head_mask: Tensor | None = None,
    ) -> Tensor:
        """See `RelativeAttention.attend`."""
        return torch.zeros_like(q)
