"""Kernel launches of a GPU, counted on the `meta` device: operations other than views and allocations.

Torch chooses some operations by device: attention, dropout, and updates of many tensors at once. `as_on_cuda` makes
them on `meta` what they are on CUDA. What it cannot show is time.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

_NO_KERNEL = {
    "_has_compatible_shallow_copy_type", "_record_function_enter_new", "_record_function_exit", "empty", "empty_like",
    "empty_strided", "is_same_size", "new_empty", "new_empty_strided", "promote_types", "_unsafe_view",
}  # fmt: skip
_WAITING = {"_local_scalar_dense", "masked_select", "nonzero"}


class Launches(TorchDispatchMode):
    """Counts operations by name within the block.

    Raises: AssertionError: an operation waits for values of a tensor that is not on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode torch does not take it apart before: a product may copy its operands
                return func.decompose(*args, **(kwargs or {}))
        found = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = any(x.device.type == "meta" for x in found)
        assert not (name in _WAITING and on_device), f"{name} waits for the device"
        out = func(*args, **(kwargs or {}))
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        returns_given = bool(made) and all(any(x is y for y in found) for x in made)
        is_view = func.is_view or (returns_given and not func._schema.is_mutable)  # `out=` returns what it writes
        if name not in _NO_KERNEL and not is_view and (on_device or any(x.device.type == "meta" for x in made)):
            self.by_name[name] += 1
            self.by_name["zeros"] += name == "_varlen_attn"  # on CUDA it makes a state of random numbers
        return out

    @property
    def count(self) -> int:
        """Number of launches so far."""
        return sum(self.by_name.values())


class _AsOnCuda(TorchFunctionMode):
    """Attention by one kernel, dropout by one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].device.type == "meta":
            return _attention(*args, **given)
        if func is torch.nn.functional.dropout and args[0].device.type == "meta":
            return _dropped(*args, **given)
        return func(*args, **given)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    bias = attn_mask
    if bias.dtype is torch.bool:  # torch converts a mask to a bias, once a call
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -torch.inf)
    if any(stride % 8 for stride in bias.stride()[:-1]):  # torch aligns the rows of a bias, once a call
        bias = torch.constant_pad_nd(bias, [0, -bias.shape[-1] % 8])[..., : bias.shape[-1]]
    bias = bias.expand(*query.shape[:3], key.shape[2])
    needs = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs, dropout_p, is_causal, scale=scale
    )[0]


def _dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0]


@contextmanager
def reads(number: float, size: int = 0) -> Iterator[Counter[str]]:
    """Within the block, whoever reads a tensor on `meta` finds this number everywhere, or this size if it is one.

    Each is a wait for the device, and is counted in the result.
    """
    values, single, counts = Tensor.tolist, Tensor.__int__, Counter[str]()

    def listed(x: Tensor) -> Any:
        counts["tolist"] += x.is_meta
        return values(torch.full(x.shape, number, device="cpu")) if x.is_meta else values(x)

    def whole(x: Tensor) -> int:
        counts["int"] += x.is_meta
        return size if x.is_meta else single(x)

    with patch.object(Tensor, "tolist", listed), patch.object(Tensor, "__int__", whole):
        yield counts


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within the block, torch takes the operations on `meta` that it takes on CUDA."""
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "meta"]
    with ExitStack() as stack:
        for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
            for place in (_foreach_utils, torch_optimizer):
                if hasattr(place, name):
                    stack.enter_context(patch.object(place, name, lambda: devices))
        stack.enter_context(_AsOnCuda())
        yield
