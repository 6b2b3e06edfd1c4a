"""First derivatives only: for autograd functions whose backward pass is computed by hand and not differentiable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import RequestError
from manyheads.nn.kernels import policy

__all__ = ["first_derivative_only"]


def first_derivative_only(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Mark the `backward` of an autograd function: to differentiate its results raises an error.

    They depend on the function's inputs, but autograd does not know it, so a second derivative would be too small by
    this part. `torch.autograd.function.once_differentiable` raises an error only if the gradient that comes in can be
    differentiated, which that of a loss or a sum cannot.
    """

    @functools.wraps(backward)
    def computed(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if policy.is_compiled() or not torch.is_grad_enabled():  # no `create_graph=True`
            return found
        return tuple(None if one is None else _refusing(one) for one in found)

    return computed


def _refusing(grad: Tensor) -> Tensor:
    refusing: Tensor = _Refusing.apply(grad.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return refusing


class _Refusing(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RequestError(
            "these gradients cannot be differentiated again, because a fast implementation computed them. For second"
            " derivatives use the formula under autograd: `plain_loss`, `attend_pairs`, `relative_weights`, or"
            " reversible=False."
        )
