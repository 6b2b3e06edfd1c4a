"""Recomputation: store only the inputs of a function, and compute it again in the backward pass.

`recomputed` returns `function(*inputs)`; what it adds is the memory that autograd would use for intermediate tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.nn.chunking import chunk_slices
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.derivatives import first_derivative_only

_uncompiled: Any = None


def apply_uncompiled(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return function.apply(*arguments), not compiled: a compiler cannot trace a backward pass that calls autograd.

    `torch.compiler.disable` is called late, because it imports the compiler, which takes as long as importing torch.
    """
    global _uncompiled
    if _uncompiled is None:
        _uncompiled = torch.compiler.disable(_applied)  # type: ignore[no-untyped-call]
    return _uncompiled(function, *arguments)


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def recomputed(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], modules: Sequence[nn.Module], chunk_len: int
) -> Tensor:
    """Return function(*inputs), computed for chunk_len positions at a time, and again in the backward pass.

    Args:
        function: maps pieces of the inputs, (batch, some, width) each, to (batch, some, out_width), and treats all
            positions alike. Random numbers, the state of autocast and the modes of `modules` are replayed.
        inputs: (batch, length, width) each, of the same length.
        modules: those that the function calls; it reads no other tensors with gradients than their parameters.
        chunk_len: positions at once; 0: all.

    Cost: memory for the inputs, and for the intermediate tensors of chunk_len positions; time of one more forward pass.
    """
    if policy.is_transformed():
        return function(*inputs)
    if not policy.is_fast():
        pieces = ([one[:, part] for one in inputs] for part in chunk_slices(inputs[0].shape[1], chunk_len))
        return torch.cat([checkpointed(function, *some, modules=modules) for some in pieces], dim=1)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return cast(Tensor, apply_uncompiled(_Recomputed, function, modules, len(inputs), chunk_len, *inputs, *parameters))


def checkpointed(
    function: Callable[..., Tensor], *arguments: Any, modules: Sequence[nn.Module] | None = None
) -> Tensor:
    """Return function(*arguments) by `torch.utils.checkpoint`, which autograd can differentiate again.

    Args: modules: those that the function calls; None: none, and it draws no random numbers.
    """
    again: AbstractContextManager[None] = policy.fast(policy.is_fast())
    if modules is not None and torch.is_grad_enabled():
        again = Replay(next(one.device for one in arguments if isinstance(one, Tensor)), *modules)
    contexts = (nullcontext(), again)
    found: Tensor = checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
    )
    return found


@first_derivative_only
class _Recomputed(torch.autograd.Function):
    """See `recomputed`."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        modules: Sequence[nn.Module],
        num_inputs: int,
        chunk_len: int,
        *tensors: Tensor,
    ) -> Tensor:
        inputs = tensors[:num_inputs]
        ctx.function, ctx.num_inputs, ctx.chunk_len = function, num_inputs, chunk_len
        ctx.replay = Replay(inputs[0].device, *modules)
        ctx.save_for_backward(*tensors)
        out: Tensor | None = None
        with autocast_as_now(inputs[0].device.type):
            for part in chunk_slices(inputs[0].shape[1], chunk_len):
                piece = function(*(one[:, part] for one in inputs))
                if out is None:
                    out = piece.new_empty(*inputs[0].shape[:2], piece.shape[2])
                out[:, part] = piece
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, count = ctx.saved_tensors, ctx.num_inputs
        needed = ctx.needs_input_grad[4:]
        inputs, parameters = tensors[:count], [one for one in tensors[count:] if one.requires_grad]
        grads = [torch.empty_like(one) if wanted else None for one, wanted in zip(inputs, needed, strict=False)]
        sums = Sums(len(parameters))
        with ctx.replay:
            for part in chunk_slices(inputs[0].shape[1], ctx.chunk_len):
                pieces = [
                    one[:, part].detach().requires_grad_(wanted) for one, wanted in zip(inputs, needed, strict=False)
                ]
                with torch.enable_grad():
                    out = ctx.function(*pieces)
                asked = [one for one in pieces if one.requires_grad]
                found = torch.autograd.grad(out, [*asked, *parameters], grad[:, part], allow_unused=True)
                of_pieces = iter(found)
                for one in grads:
                    if one is not None:
                        piece = next(of_pieces)
                        one[:, part] = 0.0 if piece is None else piece
                sums.add(found[len(asked) :])
        of_parameters = iter(sums.totals)
        others = [next(of_parameters) if one.requires_grad else None for one in tensors[count:]]
        return *[None] * 4, *grads, *others


class Sums:
    """Sums of the gradients of the same tensors over several chunks."""

    def __init__(self, count: int) -> None:
        self.totals: list[Tensor | None] = [None] * count
        self._ours = [False] * count

    def add(self, found: Sequence[Tensor | None]) -> None:
        for index, one in enumerate(found):
            total = self.totals[index]
            if total is None or one is None:
                self.totals[index] = one if total is None else total
            elif self._ours[index]:
                total.add_(one)
            else:  # autograd may share a gradient's memory, so the first sum gets memory of its own
                self.totals[index], self._ours[index] = total + one, True


def autocast_as_now(kind: str, like: tuple[bool, torch.dtype] | None = None) -> AbstractContextManager[Any]:
    """Return autocast in the current state, or in the state `like` (enabled, dtype), without its cache of weights.

    The cache would return a copy of a weight that was made in the forward pass without a gradient.
    """
    enabled, dtype = like or (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


class Replay(AbstractContextManager[None]):
    """Restores, within the block, what a second call of the same modules depends on besides its arguments.

    These are the random generators, autocast, `policy.fast`, and the modules' modes (training or evaluation) and
    buffers, as they were when this object was created. So statistics such as those of `nn.BatchNorm1d` count each batch
    once.

    Args: device: of the computation; modules: those that are called, whose modes may change before the second call.
    """

    def __init__(self, device: torch.device, *modules: nn.Module) -> None:
        self._device = device
        self._is_fast = policy.is_fast()
        self._autocast_state = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self._cpu_state = torch.get_rng_state()
        self._device_state = None
        if device.type != "cpu":
            self._device_state = torch.get_device_module(device).get_rng_state(device)
        self._modes = [(one, one.training) for module in modules for one in module.modules()]
        self._buffers = [
            (one._buffers, name, buffer.detach().clone())
            for one, _ in self._modes
            for name, buffer in one._buffers.items()
            if buffer is not None
        ]
        self._open = ExitStack()

    def __enter__(self) -> None:
        kind = self._device.type
        devices = [] if self._device_state is None else [self._device]
        self._open.enter_context(torch.random.fork_rng(devices, device_type=kind if devices else "cuda"))
        self._open.enter_context(autocast_as_now(kind, self._autocast_state))
        self._open.enter_context(policy.fast(self._is_fast))
        self._open.callback(_set_modes, [(one, one.training) for one, _ in self._modes])
        for owner, name, before in self._buffers:
            self._open.callback(owner.__setitem__, name, owner[name])
            owner[name] = before.clone()  # the second call changes it again
        _set_modes(self._modes)
        torch.set_rng_state(self._cpu_state)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, self._device)

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def _set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, is_training in modes:
        if module.training != is_training:
            module.training = is_training
