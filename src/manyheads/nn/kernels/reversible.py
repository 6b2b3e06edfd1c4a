"""Reversible residual layers: the backward pass computes the input of a layer from its output instead of storing it.

Two streams a and b pass through sublayers f_0, f_1, f_2, ..., which change them in turn:

    a <- a + f_0(b),   b <- b + f_1(a),   a <- a + f_2(b),   ...

Each step can be undone: a - f_0(b) is the a before it, because b has not changed. With f_0 = F (attention) and f_1 = G
(feed-forward), two sublayers are the layer of the paper, y1 = x1 + F(x2), y2 = x2 + G(y1).

`ReversibleSequence` makes such layers of any modules, for your own models.

Paper: Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, sec. 3, eq. 7 to 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.errors import ShapeError
from manyheads.nn.chunking import chunk_slices, in_chunks
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.modes import first_derivative_only
from manyheads.nn.shapes import Float, check_tensors, explained

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
    if modes.is_transformed():
        return function(*inputs)
    if not modes.is_fast():
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
    again: AbstractContextManager[None] = modes.fast(modes.is_fast())
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
    if not policy.has_autocast(torch.device(kind)):
        return nullcontext()
    enabled, dtype = like or (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


class Replay(AbstractContextManager[None]):
    """Restores, within the block, what a second call of the same modules depends on besides its arguments.

    These are the random generators, autocast, `modes.fast` and `using_triton`, and the modules' modes (training or
    evaluation) and buffers, as they were when this object was created. So statistics such as those of
    `nn.BatchNorm1d` count each batch once.

    Args: device: of the computation; modules: those that are called, whose modes may change before the second call.
    """

    def __init__(self, device: torch.device, *modules: nn.Module) -> None:
        self._device = device
        self._is_fast, self._asks_triton = modes.is_fast(), modes.asks_triton()
        self._autocast_state: tuple[bool, torch.dtype] | None = None
        if policy.has_autocast(device):
            self._autocast_state = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self._cpu_state = torch.get_rng_state()
        self._device_state = None
        if policy.has_generator(device):
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
        self._open.enter_context(modes.fast(self._is_fast))
        self._open.enter_context(modes.using_triton(self._asks_triton))
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


Kept = tuple[Tensor, ...]


class Sublayer(Protocol):
    """A module that reads one stream and returns what is added to the other.

    chunk_len: number of positions that it gets at once; only for a sublayer that treats all positions alike and
        returns no `kept`. 0: all positions.
    """

    chunk_len: int

    def __call__(self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept]:
        """Compute f(x).

        Args:
            x: the stream that is read, (batch, length, width).
            context: the `context` of `through_sublayers`, the same in the recomputation.
            shared: further tensors that may have gradients, for example the output of an encoder.
            kept: None in the forward pass; in the recomputation, the second result of the forward pass.

        Returns: what is added to the other stream; and small tensors without gradients that the recomputation must
            reuse because its input differs by rounding, for example a sorting order.
        """


def through_sublayers(
    sublayers: Iterable[nn.Module],
    x1: Tensor,
    x2: Tensor,
    context: Any = None,
    shared: tuple[Tensor, ...] = (),
    *,
    reversible: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return both streams after all sublayers, which change the streams in turn; the first one changes x1.

    Args:
        sublayers: modules with the interface of `Sublayer`.
        x1: the stream that the first sublayer changes, (batch, length, width). At least float32, so that a subtraction
            in the backward pass undoes an addition.
        x2: the stream that the first sublayer reads, of the same shape.
        context: passed to each sublayer unchanged.
        shared: tensors passed to each sublayer; they may have gradients.
        reversible: store two streams for the backward pass, whatever the number of sublayers; False: the formula under
            autograd, which stores the inputs of every operation and saves one forward pass. So do transforms of
            `torch.func`.

    The gradients equal those of autograd up to rounding: random numbers, the state of autocast, the modes of the
    modules (training or evaluation) and `kept` are replayed. Each sublayer is one operation for autograd, with the
    parameters as inputs, so hooks on parameters run once and in the usual order.

    Cost: with `reversible`, memory for two streams and one sublayer, whatever the depth, and the time of one more
        forward pass in the backward pass.
    """
    streams = (x1, x2)
    del x1, x2  # these may be the last references to them
    tape = _Tape()
    replaying = reversible and torch.is_grad_enabled() and not modes.is_transformed()
    modules = list(sublayers)
    for index, module in enumerate(modules):
        sublayer, target = cast(Sublayer, module), index % 2
        if replaying:
            job = _Job(
                sublayer, target, context, len(shared), tape, is_last=index + 1 == len(modules), is_first=index == 0
            )
            streams = apply_uncompiled(_Coupling, job, *streams, *shared, *module.parameters())
        else:
            added, _ = _call(sublayer, streams[1 - target], context, shared, None)
            streams = _changed(streams, target, streams[target] + added)
    return streams


@dataclass
class _Tape:
    """Both streams between two sublayers, passed on by the backward pass from one sublayer to the one before it.

    ours: for each stream, whether it may be overwritten.
    """

    streams: tuple[Tensor, Tensor] | None = None
    ours: tuple[bool, bool] = (False, False)


@dataclass
class _Job:
    """The call of one sublayer: the stream that it changes (`target`), its arguments, and the state to replay it."""

    sublayer: Sublayer
    target: int
    context: Any
    num_shared: int
    tape: _Tape
    is_last: bool
    is_first: bool
    kept: Kept = ()
    replay: Replay | None = None


def _changed(streams: tuple[Tensor, Tensor], target: int, new: Tensor) -> tuple[Tensor, Tensor]:
    return (new, streams[1]) if target == 0 else (streams[0], new)


def _call(
    sublayer: Sublayer, source: Tensor, context: Any, shared: tuple[Tensor, ...], kept: Kept | None
) -> tuple[Tensor, Kept]:
    """Compute f(source), in chunks if the sublayer has a `chunk_len`; see `Sublayer.__call__`."""
    if not sublayer.chunk_len:
        return sublayer(source, context, shared, kept)
    return in_chunks(lambda piece: sublayer(piece, context, shared, None)[0], source, sublayer.chunk_len), ()


@first_derivative_only
class _Coupling(torch.autograd.Function):
    """streams[target] += f(streams[1 - target]). Backwards it restores the stream and computes the gradients of f.

    Inputs after the two streams: the shared tensors, then the parameters of the sublayer.
    """

    @staticmethod
    def forward(ctx: Any, job: _Job, x1: Tensor, x2: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.job = job
        streams = (x1, x2)
        target, shared = job.target, tensors[: job.num_shared]
        job.replay = Replay(x1.device, cast(nn.Module, job.sublayer))
        with autocast_as_now(x1.device.type):
            added, job.kept = _call(job.sublayer, streams[1 - target], job.context, shared, None)
        streams = _changed(streams, target, streams[target] + added)
        # The parameters are saved only so that autograd refuses ones that were changed in between.
        ctx.save_for_backward(*tensors, *(streams if job.is_last else ()))
        return streams

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        target, tape = job.target, job.tape
        saved = ctx.saved_tensors  # read once, because `torch.utils.checkpoint` allows no second access
        shared = tuple(
            one.detach().requires_grad_(needed)
            for one, needed in zip(saved[: job.num_shared], ctx.needs_input_grad[3:], strict=False)
        )
        if job.is_last:
            x1, x2 = saved[-2:]
            tape.streams, tape.ours = (x1.detach(), x2.detach()), (False, False)
        assert tape.streams is not None  # set by the backward pass of the next sublayer
        streams, ours = tape.streams, tape.ours
        source = streams[1 - target]
        parameters = list(cast(nn.Module, job.sublayer).parameters())
        wanted = [one for one in (*shared, *parameters) if one.requires_grad]
        restored = streams[target] if ours[target] else torch.empty_like(streams[target])
        grad_source = torch.empty_like(source)
        sums = Sums(len(wanted))
        assert job.replay is not None  # set by the forward pass
        with job.replay:
            for part in chunk_slices(source.shape[1], job.sublayer.chunk_len):
                piece = source[:, part].detach().requires_grad_()
                with torch.enable_grad():
                    added, _ = job.sublayer(piece, job.context, shared, job.kept)
                torch.sub(streams[target][:, part], added.detach(), out=restored[:, part])
                grad = grads[target][:, part].to(added.dtype)
                found = cast(
                    tuple[Tensor | None, ...],
                    torch.autograd.grad(added, [piece, *wanted], grad, allow_unused=True),
                )
                if found[0] is None:
                    grad_source[:, part] = grads[1 - target][:, part]
                else:
                    torch.add(grads[1 - target][:, part], found[0], out=grad_source[:, part])
                sums.add(found[1:])
                del added, found, piece  # free their memory before the next chunk
        tape.streams = None if job.is_first else _changed(streams, target, restored)
        tape.ours = (True, ours[1]) if target == 0 else (ours[0], True)
        totals = iter(sums.totals)
        others = [next(totals) if one.requires_grad else None for one in (*shared, *parameters)]
        through = _changed((grads[0], grads[1]), 1 - target, grad_source)
        return None, *through, *others


class ReversibleSequence(nn.Module):
    """Layers of two modules each, F and G. The backward pass stores two streams, whatever the number of layers.

        >>> from manyheads.nn import FeedForward, MultiHeadAttention
        >>> layers = [(MultiHeadAttention(16, 4), FeedForward(16, 64)) for _ in range(3)]
        >>> y1, y2 = ReversibleSequence(layers)(torch.randn(2, 5, 16), torch.randn(2, 5, 16))
        >>> y1.shape, y2.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 16]))

    Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 3, eq. 7: y1 = x1 + F(x2), y2 = x2 + G(y1).
    Args:
        layers: pairs of modules that map a stream to one of the same shape; of a tuple the first element is used.
        reversible: False: ordinary backpropagation, for comparison.

    torch.compile produces one graph without gradients, or with `reversible=False`; otherwise use `fullgraph=False`.
    Cost: see `nn.reversible.through_sublayers`: the backward pass computes every F and G once more.
    """

    def __init__(self, layers: Iterable[tuple[nn.Module, nn.Module]], *, reversible: bool = True) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(_Added(module) for layer in layers for module in layer)
        self.reversible = reversible

    @explained
    def forward(
        self, x1: Float[Tensor, "batch length d_model"], x2: Float[Tensor, "batch length d_model"]
    ) -> tuple[Float[Tensor, "batch length d_model"], Float[Tensor, "batch length d_model"]]:
        """Return both streams after all layers."""
        check_tensors(x1=x1, x2=x2)
        if x1.shape != x2.shape:
            raise ShapeError(f"x1 has shape {tuple(x1.shape)} and x2 {tuple(x2.shape)}; both streams need one shape.")
        return through_sublayers(self.sublayers, x1, x2, reversible=self.reversible)


class _Added(nn.Module):
    """A module as `nn.reversible.Sublayer`."""

    chunk_len = 0

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = self.module(x)
        return (out[0] if isinstance(out, tuple) else out), ()
