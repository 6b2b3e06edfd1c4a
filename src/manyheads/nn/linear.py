"""The linear map, by whichever of torch's two libraries of products is the faster here.

torch leaves float32 products on x86 to MKL, which keeps its AVX-512 code for Intel's own processors. oneDNN, also in
those builds of torch, asks what a processor can do and not who made it. On such processors it is asked instead, by the
operation that torch's own compiler emits: twice as fast (decision 015). Everywhere else, and whenever something looks
over torch's shoulder (compilers, tracers, counters, `torch.func`), this is `F.linear`.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Linear", "Packed", "linear", "onednn_is_faster", "product", "product_of_rows"]

# Fewer multiplications than these take microseconds in either library, and oneDNN makes a kernel for each new shape;
# with a packed weight it is worth asking earlier.
_LEAST_WORK, _LEAST_PACKED_WORK = 1 << 20, 1 << 17
# Rows that a layout is chosen for; it serves any number of them.
_PACKED_ROWS = 128


class Packed:
    """A weight once more, in the layout in which oneDNN multiplies it: for a model that only runs from now on.

    A product of few rows, as in a step of a search, spends more time on reading its weight than on multiplying; from a
    packed one it reads without copying. Once the weight is changed or exchanged, the copy is no longer used; only what
    is changed behind autograd's back, through `weight.data`, goes unseen.

    Args: weight: (out_features, in_features), on a CPU. Cost: as much memory again.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._version = weight, _version(weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()  # what is copied or sent elsewhere is packed anew there, or not at all

    @staticmethod
    def pays(weight: Tensor) -> bool:
        """Whether products with this weight go to oneDNN on this machine, and are faster when it is packed."""
        if weight.device.type != "cpu" or weight.dim() != 2:
            return False
        if weight.dtype is torch.float32:
            return onednn_is_faster()
        return weight.dtype is torch.bfloat16 and _has_packing() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `linear(x, weight)` may be made by this."""
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return (
            weight is self._weight
            and kind is weight.dtype
            and not torch.is_grad_enabled()
            and (kind is torch.bfloat16 or x.numel() * weight.shape[0] >= _LEAST_PACKED_WORK)
            and _version(weight) == self._version
            and _is_plain(x)
        )

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _by_onednn(x.to(self._weight.dtype), self._packed, bias)


class Linear(nn.Linear):
    """`nn.Linear`, of which it has the parameters and the answers, by `linear`.

    >>> Linear(16, 32)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 32])
    """

    packed: Packed | None = None

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        return linear(x, self.weight, self.bias, self.packed)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
    """As `F.linear`: (*batch, in_features), (out_features, in_features), (out_features,) -> (*batch, out_features).

        >>> linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)).tolist()
        [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]

    Args: packed: of the weight, used where that is faster.
    """
    if packed is not None and packed.serves(x, weight):
        return packed.linear(x, bias)
    if not _asks_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return _by_onednn(x, weight, bias)


def product(
    left: Float[Tensor, "*rows inner"], right: Float[Tensor, "inner columns"]
) -> Float[Tensor, "*rows columns"]:
    """left @ right, as `linear` makes it.

    >>> product(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    return linear(left, right.t())


def product_of_rows(left: Float[Tensor, "rows m"], right: Float[Tensor, "rows n"]) -> Float[Tensor, "m n"]:
    """left^T right, the sum of the rows' outer products, as `linear` makes it; it may be a view of its transpose.

    >>> product_of_rows(torch.ones(5, 2), torch.ones(5, 3)).tolist()
    [[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]
    """
    if left.shape[1] > right.shape[1] and _asks_onednn(left, right.t()):
        # What stands on the left is copied into another layout: rather the narrower of the two.
        return product(right.t(), left).t()
    return product(left.t(), right)


@cache
def onednn_is_faster() -> bool:
    """Whether float32 products go to oneDNN on this machine: AVX-512, and a maker whom MKL has no such code for."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and _maker() not in ("GenuineIntel", "")
        and _has_packing()
    )


@cache
def _has_packing() -> bool:
    """Whether this build of torch has oneDNN, and its operations on packed weights."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")  # type: ignore[no-untyped-call]


def _maker() -> str:
    """The processor's vendor as it names itself, such as `AuthenticAMD`; empty where it cannot be learned."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor().rpartition(", ")[2]  # Windows: `AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD`
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _version(weight: Tensor) -> int | None:
    """How often it was changed; of what was made in inference mode nobody keeps count."""
    return None if weight.is_inference() else weight._version


def _none() -> None:
    return None


def _asks_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        onednn_is_faster()
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and _is_plain(x)
    )


def _is_plain(x: Tensor) -> bool:
    """Whether x is a tensor on a CPU whose operations nobody follows, and oneDNN is not turned off."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


class _Linear(torch.autograd.Function):
    """Y = X W^T + b. With G the gradient of Y: G W of X, G^T X of W, and G's sum of b; differentiable again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_x = product(grad, weight) if needs[0] else None
        grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if needs[1]:
            grad_weight = product_of_rows(rows, x.reshape(-1, x.shape[-1])).contiguous()
        if needs[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias
