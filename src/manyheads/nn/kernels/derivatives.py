"""First derivatives only: for autograd functions whose backward pass is computed by hand and not differentiable."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import RequestError
from manyheads.nn.kernels import modes


def first_derivative_only(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Change an autograd function so that to differentiate its gradients raises an error.

    They depend on the function's inputs and on the gradient that comes in, but autograd does not know it, so a second
    derivative would be too small by this part. `torch.autograd.function.once_differentiable` raises an error only if
    the gradient that comes in can be differentiated, which that of a loss or a sum cannot.
    """
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def computed(ctx: Any, *arguments: Any) -> Any:
        if not modes.is_compiled():
            ctx.is_fast = modes.is_fast()
            with torch.enable_grad():
                ctx.inputs = _Joined.apply(*_differentiable(arguments))  # type: ignore[no-untyped-call]
        return forward(ctx, *arguments)

    @functools.wraps(backward)
    def differentiated(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if modes.is_compiled() or not hasattr(ctx, "is_fast"):  # the forward pass was compiled
            return backward(ctx, *grads)  # type: ignore[no-any-return]
        with torch.no_grad(), modes.fast(ctx.is_fast):  # in the mode of the forward pass
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no `create_graph=True`
            return found  # type: ignore[no-any-return]
        reasons = (ctx.inputs, *_differentiable(grads))
        return tuple(None if one is None else _Refusing.apply(one, *reasons) for one in found)  # type: ignore[no-untyped-call]

    function.forward, function.backward = staticmethod(computed), staticmethod(differentiated)  # type: ignore[method-assign]
    return function


def _differentiable(values: tuple[Any, ...]) -> list[Tensor]:
    return [one for one in values if isinstance(one, Tensor) and one.requires_grad]


class _Joined(torch.autograd.Function):
    """An empty tensor that depends on tensors, as far as autograd knows, and keeps none of them in memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise AssertionError("only _Refusing, which raises an error, depends on this")


class _Refusing(torch.autograd.Function):
    """The first of its inputs, without a derivative in any of them."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RequestError(
            "these gradients cannot be differentiated again, because a fast implementation or a reversible layer"
            " computed them. For second derivatives compute outside of kernels.fast(), and with reversible=False."
        )
