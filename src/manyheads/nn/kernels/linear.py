"""The linear map Y = X W^T + b.

`F.linear` is the formula. On processors with AVX-512 from other makers than Intel, oneDNN multiplies float32 up to
twice as fast as MKL, which torch uses. On CPUs a step of a search reads packed weights without a copy (decision 015).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.nn.kernels import modes, policy
from manyheads.nn.shapes import Float, explained


@explained
def linear(
    x: Float[Tensor, "*batch in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*batch out_features"]:
    """Return `F.linear(x, weight, bias)`.

        >>> linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)).tolist()
        [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]

    Raises: ShapeError, TensorTypeError: see `fault_of`.
    """
    if not policy.uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return onednn_linear(x, weight, bias)


def linear_relu(module: nn.Module, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
    """Return max(0, x W^T + b) with the weights of a module: in one operation where launches count."""
    if policy.saves_launches(x.device) and not torch.is_grad_enabled() and is_readable(module):
        weight, bias = cast(Tensor, module.weight), cast("Tensor | None", module.bias)
        if bias is not None and x.dtype is weight.dtype and autocast_dtype(x) is None:
            out = torch._addmm_activation(bias, x.flatten(0, -2), weight.t())
            return out.view(*x.shape[:-1], len(weight))
    return F.relu(module(x))


def product(
    left: Float[Tensor, "*rows inner"], right: Float[Tensor, "inner columns"]
) -> Float[Tensor, "*rows columns"]:
    """Return left @ right, computed as `linear` does.

    >>> product(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    return linear(left, right.t())


def product_of_rows(left: Float[Tensor, "rows m"], right: Float[Tensor, "rows n"]) -> Float[Tensor, "m n"]:
    """Return left^T right, the sum of the outer products of the rows, as `linear` does; it may be a transposed view.

    >>> product_of_rows(torch.ones(5, 2), torch.ones(5, 3)).tolist()
    [[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]
    """
    if left.shape[1] > right.shape[1] and policy.uses_onednn(left, right.t()):
        # oneDNN copies the left factor to another layout, so the narrower factor comes first.
        return product(right.t(), left).t()
    return product(left.t(), right)


def linear_by(module: nn.Module, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
    """Return `linear` with the weight and bias of a module, or with their packed copy.

    Args: module: it has the parameters of `nn.Linear`, and an attribute `packed` with its `Packed` weights or None.
    """
    packed = cast("Packed | None", module.packed)
    if packed is not None and packed.serves(x, module):
        return packed.linear(x)
    return linear(x, cast(Tensor, module.weight), cast("Tensor | None", module.bias))


def linears(
    x: Float[Tensor, "batch length in_features"], *maps: nn.Module, packed: Packed | None = None
) -> tuple[Tensor, ...]:
    """Return each map of the same x, computed as one product where that is faster.

    The weights stay separate in memory and in files.

    Args:
        maps: modules with the parameters of `nn.Linear`, all with the same in_features.
        packed: packed weights of these maps.
    """
    if packed is not None and packed.serves(x, *maps):
        return torch.split(packed.linear(x), [len(cast(Tensor, one.weight)) for one in maps], dim=-1)
    if not all(is_readable(one) for one in maps):
        return tuple(one(x) for one in maps)
    weights, biases = [cast(Tensor, one.weight) for one in maps], [cast("Tensor | None", one.bias) for one in maps]
    mixed = any(bias is None for bias in biases) and not all(bias is None for bias in biases)
    if mixed or not policy.joins_weights(x.shape[0] * x.shape[1], weights[0].shape[0]):
        return tuple(one(x) for one in maps)
    given = [one for one in biases if one is not None]
    weight = _narrow.beside(weights)
    bias = _narrow.beside(given) if given and weight is not None else None
    if weight is None or (bias is None) != (not given):
        # Under autocast the weights are cast first, so that half as many bytes are concatenated.
        weight = torch.cat([low_precision(one) for one in weights])
        bias = torch.cat([low_precision(one) for one in given]) if given else None
    return torch.split(linear(x, weight, bias), [len(one) for one in weights], dim=-1)


def low_precision(x: Tensor) -> Tensor:
    """Return x in autocast's type while autocast is on, otherwise x.

    Called once at the start of a stack, it keeps the whole residual stream in bfloat16. Otherwise every sum with a
    float32 embedding would be promoted, and each layer would cast twice. Positions are added in float32, before this.
    """
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type of products on the device of x under autocast or with `narrowed` weights; None: that of x."""
    kind = x.device.type
    if _narrow.dtype is not None or kind == "meta":
        return _narrow.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _Narrow(threading.local):
    """Of each thread. dtype: of the weights in place of autocast's. beside: see `narrowed`."""

    dtype: torch.dtype | None = None
    beside: Callable[[Sequence[Tensor]], Tensor | None] = staticmethod(lambda parameters: None)


_narrow = _Narrow()


@contextmanager
def narrowed(dtype: torch.dtype, beside: Callable[[Sequence[Tensor]], Tensor | None]) -> Iterator[None]:
    """Within the block, modules have weights of this type, so that nothing has to be cast but activations.

    Args: beside: (parameters) -> one tensor that contains them one below the other; None: they lie elsewhere.
    """
    before = _narrow.dtype, _narrow.beside
    _narrow.dtype, _narrow.beside = dtype, beside
    try:
        yield
    finally:
        _narrow.dtype, _narrow.beside = before


READABLE: set[type[nn.Module]] = {nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear}
"""Classes of linear maps; not their subclasses, which may compute something else."""


def is_readable(module: nn.Module) -> bool:
    """Return whether to compute with the weight of a linear map means the same as to call it.

    It does not if somebody has changed what a call does: an adapter in its place, a hook (pruning, spectral norm, a
    counter), another `forward`, a compiled module, a parametrised or quantised weight.
    """
    if type(module) not in READABLE:
        return False
    parameters = module._parameters
    return (
        type(parameters.get("weight")) is nn.Parameter
        and type(parameters.get("bias")) in (nn.Parameter, type(None))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


@runtime_checkable
class Packs(Protocol):
    """A module of linear maps whose weights may be kept packed."""

    packed: Packed | None

    def packed_maps(self) -> tuple[nn.Module, ...]:
        """Return the maps of one input whose weights are packed together; the module itself if it is a map."""


class Packed:
    """A copy of the weights of one map, or of several maps of the same input, in the layout of oneDNN's products.

    A product of few rows, as in a step of a search, needs more time to read its weight than to multiply, and reads a
    packed weight without a copy: 503 instead of 1,029 us for 32 x 256 x 8,000 in float32 (decision 015). After a
    parameter or a map is changed or replaced, the copy is no longer used. Changes through `weight.data` are not
    detected, because autograd does not count them.

    Args: maps: modules with the parameters of `nn.Linear` for which `is_worthwhile` is true.
    Cost: the memory of the weights a second time, from the first use on.
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
        self._packed: tuple[Any, Tensor | None] | None = None
        # The lowest free number, so that the next run assigns the same numbers and finds the compiled program.
        self._number = next(number for number in itertools.count() if number not in _BY_NUMBER)
        _BY_NUMBER[self._number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the module does not contain packed weights

    @staticmethod
    def is_worthwhile(*maps: nn.Module) -> bool:
        """Return whether these maps can be one product, and are faster when packed."""
        if not all(one._parameters.get("weight") is not None for one in maps):  # adapters, parametrised weights
            return False
        weights = [cast(Tensor, one.weight) for one in maps]
        biased = [one.bias is not None for one in maps]
        differ = len({(w.shape[1:], w.dtype, w.device) for w in weights}) != 1 or any(biased) != all(biased)
        return not differ and policy.packs(*weights)

    def serves(self, x: Tensor, *maps: nn.Module) -> bool:
        """Return whether to multiply x by this copy: it was made of these maps, and they are unchanged.

        In a compiled step of a search it always is: `CompiledSteps` requires that weights stay unchanged.
        """
        if modes.is_compiled():  # first, because a compiler would also trace the following lines
            return modes.compiles_a_step()
        if maps != self._maps or not policy.uses_packed(x, self._dtype, self._out_features):
            return False
        if len(maps) > 1 and not all(is_readable(one) for one in maps):
            return False
        for owner, name, parameter, version in self._made_of:
            if owner.get(name) is not parameter or parameter._version != version:
                return False
        return True

    def linear(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch all_out_features"]:
        """Return the outputs of the maps, concatenated."""
        if modes.is_compiled():
            # A compiler cannot store packed weights in its cache, so the program contains their number.
            x = x.to(self._dtype)
            return cast(Tensor, torch.ops.manyheads.packed_linear(x, self._number, self._out_features))
        return self.multiply(x.to(self._dtype))

    def multiply(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch all_out_features"]:
        """Return the product of x in the weights' type."""
        if self._packed is None:
            with torch.no_grad():
                weight = torch.cat(self._weights)
                if not policy.saves_launches(x.device):
                    weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
                self._packed = weight, torch.cat(self._biases) if self._biases else None
        return onednn_linear(x, *self._packed) if self._packed[0].is_mkldnn else F.linear(x, *self._packed)


_BY_NUMBER: WeakValueDictionary[int, Packed] = WeakValueDictionary()

# The number of rows for which oneDNN optimises the layout; it works for any number.
_PACKED_ROWS = 128


@cache
def define_packed_linear() -> None:
    """Define the operation that computes `Packed.linear` in compiled graphs, from x, the number and the output width.

    Call it before compiling, not on import, because it loads the compiler.
    """
    torch.library.define("manyheads::packed_linear", "(Tensor x, int number, int out_features) -> Tensor")

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it would otherwise be compiled with the graph
    def multiplied(x: Tensor, number: int, out_features: int) -> Tensor:
        return _BY_NUMBER[number].multiply(x)

    def shaped(x: Tensor, number: int, out_features: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], out_features)

    torch.library.impl("manyheads::packed_linear", "CPU", multiplied)
    torch.library.register_fake("manyheads::packed_linear", shaped)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Call the operation that torch's compiler emits: 2,643 us instead of MKL's 5,773 for 2,048 x 256 x 1,024."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


class _Linear(torch.autograd.Function):
    """`onednn_linear` with gradients: with G that of Y, G W for X, G^T X for W, sum of the rows of G for b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        with modes.fast():  # the mode of the forward pass
            grad_x = product(grad, weight) if needs[0] else None
            if needs[1]:
                grad_weight = product_of_rows(rows, x.reshape(-1, x.shape[-1])).contiguous()
        if needs[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias
