"""Softmax under a mask: exp(score) / sum of exp(scores) over the keys that may be attended to."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.nn.kernels import policy
from manyheads.nn.shapes import Bool, Float


def masked_softmax(
    scores: Float[Tensor, "*rows k_len"],
    allowed: Bool[Tensor, ...] | None,
    fully_masked: Literal["zeros", "uniform"] = "zeros",
) -> Float[Tensor, "*rows k_len"]:
    """Return the softmax over the last axis, with weight 0 for keys that may not be attended to.

        >>> masked_softmax(torch.zeros(2, 4), torch.tensor([[True, True, False, False], [False] * 4])).tolist()
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]

    Args:
        scores: any leading axes.
        allowed: broadcastable to scores, True = may attend; None allows all.
        fully_masked: weights of a row without allowed keys: all zeros, or 1 / k_len each (as in d2l).

    Returns: weights in the dtype of scores, summed at least in float32. The gradient of a row without allowed keys is
        zero, never NaN.
    Raises: ConfigError: fully_masked has another value.
    """
    if fully_masked not in ("zeros", "uniform"):
        raise ConfigError(f"fully_masked is {fully_masked!r}; it must be 'zeros' or 'uniform'.")
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    blocked, lowest = ~allowed, torch.finfo(scores.dtype).min
    # With a finite fill a row without allowed keys has equal weights and no NaN. `zeros` then sets them to zero.
    if fully_masked == "zeros" and policy.adds_masks(scores, blocked):
        # Half the time of `masked_fill`, forward and backward: 301 instead of 528 us for 64 x 4 x 32 x 32 (decision
        # 001). score + lowest number = lowest number in floating point, and a weight of zero has no gradient.
        filled = scores + torch.zeros_like(blocked, dtype=scores.dtype).masked_fill_(blocked, lowest)
    else:
        filled = scores.masked_fill(blocked, lowest)
    # torch's softmax sums at least in float32, whatever the dtype of the scores.
    weights = torch.softmax(filled, dim=-1)
    if fully_masked == "zeros" and some_row_is_empty(allowed):
        weights = weights.masked_fill(blocked, 0.0)
    return weights


def weighted_by_sums(
    scores: Float[Tensor, "batch heads q_len k_len"],
    value: Float[Tensor, "batch heads k_len value_dim"],
    allowed: Bool[Tensor, ...] | None,
) -> Float[Tensor, "batch heads q_len value_dim"]:
    """Return `masked_softmax(scores, allowed) @ value` without matrix products, in the dtype of the scores.

    For compiled steps on CPUs: the compiler fuses this and the sums of the scores into one loop that reads the values
    in place, without a copy or a library call (decision 016).
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    exps = (scores - scores.amax(-1, keepdim=True)).exp()
    if allowed is not None:
        exps = exps.masked_fill(~allowed, 0.0)
    # The division comes last: one per feature instead of one per key (325 instead of 346 us per layer). The largest
    # allowed exp is 1, so the sum is at least 1, unless no key is allowed.
    weighted = (exps[..., None] * value.to(scores.dtype)[:, :, None]).sum(3)
    return weighted / exps.sum(-1, keepdim=True).clamp(min=1)


def some_row_is_empty(allowed: Tensor) -> bool:
    """Return whether a row has no allowed key; True where reading the values would wait (GPU) or fail (compiler)."""
    return not policy.can_look(allowed) or not bool(allowed.any(dim=-1).all())
