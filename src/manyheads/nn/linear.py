"""The linear map, by whichever of torch's two libraries of products is the faster here.

torch leaves float32 products on x86 to MKL, which keeps its AVX-512 code for Intel's own processors. oneDNN, also in
those builds of torch, asks what a processor can do and not who made it. On such processors it is asked instead, by the
operation that torch's own compiler emits: twice as fast (decision 015). Everywhere else, and whenever something looks
over torch's shoulder (compilers, tracers, counters, `torch.func`), this is `F.linear`.
"""

from __future__ import annotations

import itertools
import platform
from functools import cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.nn.compiling import compiles_a_step

__all__ = ["Linear", "Packed", "define_packed_linear", "linear", "onednn_is_faster", "product", "product_of_rows"]

# Fewer multiplications than these take microseconds in either library, and oneDNN makes a kernel for each new shape;
# with a packed weight it is worth asking earlier.
_LEAST_WORK, _LEAST_PACKED_WORK = 1 << 20, 1 << 17
# Rows that a layout is chosen for; it serves any number of them.
_PACKED_ROWS = 128


class Packed:
    """The weights of one map, or of several of one input, once more: in the layout in which oneDNN multiplies them.

    A product of few rows, as in a step of a search, spends more time on reading its weight than on multiplying; from a
    packed one it reads without copying. Once a parameter or a map is changed or exchanged, its copy is no longer used;
    only what is changed behind autograd's back, through `weight.data`, goes unseen.

    Args: maps: modules with the parameters of `nn.Linear`, that pass `pays`. Cost: as much memory again, from the first
        use on.
    """

    def __init__(self, *maps: nn.Module) -> None:
        self._maps = maps
        given = [(one._parameters, name) for one in maps for name in ("weight", "bias")]
        self._made_of = [
            (owner, name, one, one._version) for owner, name in given if (one := owner.get(name)) is not None
        ]
        self._weights = [one.detach() for _, name, one, _ in self._made_of if name == "weight"]
        self._biases = [one.detach() for _, name, one, _ in self._made_of if name == "bias"]
        self._dtype, self._out_features = self._weights[0].dtype, sum(len(weight) for weight in self._weights)
        self._least = 0 if self._dtype is torch.bfloat16 else _LEAST_PACKED_WORK
        self._packed: tuple[Tensor, Tensor | None] | None = None
        # The lowest that is free, so that another run gives the same ones and finds what was compiled.
        self._number = next(number for number in itertools.count() if number not in _BY_NUMBER)
        _BY_NUMBER[self._number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()  # what is copied or sent elsewhere is packed anew there, or not at all

    @staticmethod
    def pays(*maps: nn.Module) -> bool:
        """Whether products with these weights go to oneDNN on this machine and are faster when packed."""
        weights = [cast(Tensor, one.weight) for one in maps]
        biased = [one.bias is not None for one in maps]
        if len({(w.shape[1:], w.dtype, w.device) for w in weights}) != 1 or any(biased) != all(biased):
            return False
        first = weights[0]
        if first.device.type != "cpu" or any(w.is_inference() for w in weights):
            return False
        return onednn_is_faster() if first.dtype is torch.float32 else first.dtype is torch.bfloat16 and _has_bf16()

    def serves(self, x: Tensor, *maps: nn.Module) -> bool:
        """Whether what these maps make of x may be made by this: they are those that it was made of, and unchanged.

        In a step of a search that is compiled they may: who has it compiled says that they stay unchanged.
        """
        if torch.compiler.is_compiling():  # asked first: a compiler reads on from here
            return compiles_a_step()
        if maps != self._maps:
            return False
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if kind is not self._dtype or torch.is_grad_enabled() or x.numel() * self._out_features < self._least:
            return False
        for owner, name, parameter, version in self._made_of:
            if owner.get(name) is not parameter or parameter._version != version:
                return False
        return _is_plain(x)

    def linear(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch all_out_features"]:
        """What the maps make of x, side by side."""
        if torch.compiler.is_compiling():
            # Packed weights are nothing that a compiler could write into its cache: it is told a number.
            x = x.to(self._dtype)
            return cast(Tensor, torch.ops.manyheads.packed_linear(x, self._number, self._out_features))
        return _by_onednn(x.to(self._dtype), *self.made())

    def made(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as oneDNN takes them, from the first time on the same."""
        if self._packed is None:
            weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(self._weights), _PACKED_ROWS)
            self._packed = weight, torch.cat(self._biases) if self._biases else None
        return self._packed


_BY_NUMBER: WeakValueDictionary[int, Packed] = WeakValueDictionary()


@cache
def define_packed_linear() -> None:
    """Define the operation that stands for `Packed.linear` in compiled graphs: x, the number, its outcome's width.

    To be called before one is compiled, and not on import: it loads the compiler.
    """
    torch.library.define("manyheads::packed_linear", "(Tensor x, int number, int out_features) -> Tensor")
    multiply: Any = torch.ops.mkldnn._linear_pointwise.default if _has_packing() else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what a compiled graph calls would be compiled, too
    def multiplied(x: Tensor, number: int, out_features: int) -> Tensor:
        return cast(Tensor, multiply(x, *_BY_NUMBER[number].made(), "none", [], ""))

    def shaped(x: Tensor, number: int, out_features: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], out_features)

    torch.library.impl("manyheads::packed_linear", "CPU", multiplied)
    torch.library.register_fake("manyheads::packed_linear", shaped)


class Linear(nn.Linear):
    """`nn.Linear`, of which it has the parameters and the answers, by `linear`.

    >>> Linear(16, 32)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 32])
    """

    packed: Packed | None = None

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        if self.packed is not None and self.packed.serves(x, self):
            return self.packed.linear(x)
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`: (*batch, in_features), (out_features, in_features), (out_features,) -> (*batch, out_features).

    >>> linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)).tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    if not _asks_onednn(x, weight):
        return _by_onednn(x, weight, bias) if _saves_a_copy(x, weight, bias) else F.linear(x, weight, bias)
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


@cache
def _has_bf16() -> bool:
    return _has_packing() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _none() -> None:
    return None


def _asks_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # asked first: a compiler reads on from here
        and onednn_is_faster()
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and _is_plain(x)
    )


def _saves_a_copy(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operation that also adds the bias is the better way to ask oneDNN, which multiplies bfloat16 anyway.

    `F.linear` first lays the bias over the whole outcome: a third of the time at a vocabulary's width.
    """
    return (
        not torch.compiler.is_compiling()  # asked first: a compiler reads on from here
        and bias is not None
        and x.dtype is weight.dtype is bias.dtype is torch.bfloat16
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad))
        and type(weight) in (Tensor, nn.Parameter)
        and _is_plain(x)
        and _has_bf16()
    )


def _is_plain(x: Tensor) -> bool:
    """Whether x is a tensor on a CPU whose operations nobody follows, and oneDNN is not turned off."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and torch._C._get_mkldnn_enabled()
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
