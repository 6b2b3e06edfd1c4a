"""Reversible residual layers: what a layer read is computed again from what it wrote, so nothing need be kept.

Two streams a and b pass through sublayers f_0, f_1, f_2, ..., which change them in turn:

    a <- a + f_0(b),   b <- b + f_1(a),   a <- a + f_2(b),   ...

and back: the last one's b was b - f(a), with the a that still stands there. With f_0 = F (attention) and f_1 = G
(feed-forward) two of them are the paper's layer y1 = x1 + F(x2), y2 = x2 + G(y1).

Paper: Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, sec. 3, eq. 7 to 9.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from manyheads.nn.chunking import chunk_slices, in_chunks
from manyheads.nn.kernels.recomputation import Replay, Sums, apply_uncompiled, autocast_as_now

__all__ = ["Sublayer", "through_sublayers"]

Kept = tuple[Tensor, ...]


class Sublayer(Protocol):
    """A module that reads one stream and says what to add to the other.

    chunk_len: 0; or the sublayer works on every position alike, keeps nothing, and so many positions are to be given to
        it at once.
    """

    chunk_len: int

    def __call__(self, x: Tensor, context: Any, shared: tuple[Tensor, ...], kept: Kept | None) -> tuple[Tensor, Kept]:
        """f(x).

        Args:
            x: the stream that is read, (batch, length, width).
            context: whatever the sequence was given, the same in the recomputation.
            shared: further tensors that may have gradients, as an encoder's output.
            kept: None at first; in the recomputation, what the first call returned.

        Returns: what to add to the other stream, and decisions that must not come out otherwise in the recomputation,
            whose input differs by rounding (an order, for one): tensors without gradients, small ones.
        """
        ...


def through_sublayers(
    sublayers: Iterable[nn.Module],
    x1: Tensor,
    x2: Tensor,
    context: Any = None,
    shared: tuple[Tensor, ...] = (),
    *,
    reversible: bool = True,
) -> tuple[Tensor, Tensor]:
    """Both streams after all sublayers, which change them in turn, the first one x1.

    Args:
        sublayers: modules that are `Sublayer`s.
        x1: the stream that the first sublayer changes, (batch, length, width); in float32 at least, for what is
            subtracted on the way back must have been added without loss.
        x2: the stream that it reads.
        context: handed to every sublayer as it is.
        shared: tensors handed to every sublayer, which may have gradients.
        reversible: keep two streams for the backward pass, however many sublayers there are; False: backpropagate as
            torch does, which keeps what every operation read, and saves a forward pass.

    The gradients are those of plain backpropagation up to rounding: random numbers, autocast's state and kept decisions
    are replayed, in training and in evaluation mode. Every sublayer's gradients are returned to torch as soon as they
    are known, as those of one operation whose inputs are the parameters, so hooks on parameters run once, and in the
    usual order.

    Cost: with `reversible`, memory for two streams and one sublayer, whatever the depth, and time of another forward
        pass in the backward one.
    """
    streams = (x1, x2)
    del x1, x2  # which may be the last that is known of them
    tape = _Tape()
    replaying = reversible and torch.is_grad_enabled()
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
    """The values that the backward pass of a sublayer gives to the one before it: both streams between the two.

    ours: whether each may be written to.
    """

    streams: tuple[Tensor, Tensor] | None = None
    ours: tuple[bool, bool] = (False, False)


@dataclass
class _Job:
    """One sublayer's call: what it changes, and with what it is to be replayed."""

    sublayer: Sublayer
    target: int
    context: Any
    num_shared: int
    tape: _Tape
    is_last: bool
    is_first: bool
    kept: Kept = ()
    replay: AbstractContextManager[None] = field(default_factory=nullcontext)


def _changed(streams: tuple[Tensor, Tensor], target: int, new: Tensor) -> tuple[Tensor, Tensor]:
    return (new, streams[1]) if target == 0 else (streams[0], new)


def _call(
    sublayer: Sublayer, source: Tensor, context: Any, shared: tuple[Tensor, ...], kept: Kept | None
) -> tuple[Tensor, Kept]:
    """f(source), in chunks if it has any: what to add, and what was kept."""
    if not sublayer.chunk_len:
        return sublayer(source, context, shared, kept)
    return in_chunks(lambda piece: sublayer(piece, context, shared, None)[0], source, sublayer.chunk_len), ()


class _Coupling(torch.autograd.Function):
    """streams[target] += f(streams[1 - target]); backwards, first the stream is restored, then f's gradients are made.

    Inputs after the two streams: shared tensors, then the sublayer's parameters.
    """

    @staticmethod
    def forward(ctx: Any, job: _Job, x1: Tensor, x2: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.job = job
        streams = (x1, x2)
        target, shared = job.target, tensors[: job.num_shared]
        job.replay = Replay(x1.device)
        with autocast_as_now(x1.device.type):
            added, job.kept = _call(job.sublayer, streams[1 - target], job.context, shared, None)
        streams = _changed(streams, target, streams[target] + added)
        ctx.save_for_backward(*shared, *(streams if job.is_last else ()))
        return streams

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        target, tape = job.target, job.tape
        shared = tuple(
            one.detach().requires_grad_(needed)
            for one, needed in zip(ctx.saved_tensors[: job.num_shared], ctx.needs_input_grad[3:], strict=False)
        )
        if job.is_last:
            x1, x2 = ctx.saved_tensors[job.num_shared :]
            tape.streams, tape.ours = (x1.detach(), x2.detach()), (False, False)
        assert tape.streams is not None  # the sublayer after this one has left them there
        streams, ours = tape.streams, tape.ours
        source = streams[1 - target]
        parameters = list(cast(nn.Module, job.sublayer).parameters())
        wanted = [one for one in (*shared, *parameters) if one.requires_grad]
        restored = streams[target] if ours[target] else torch.empty_like(streams[target])
        grad_source = torch.empty_like(source)
        sums = Sums(len(wanted))
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
                del added, found, piece  # before the next chunk takes their room
        tape.streams = None if job.is_first else _changed(streams, target, restored)
        tape.ours = (True, ours[1]) if target == 0 else (ours[0], True)
        by_place = iter(sums.totals)
        others = [next(by_place) if one.requires_grad else None for one in (*shared, *parameters)]
        through = _changed((grads[0], grads[1]), 1 - target, grad_source)
        return None, *through, *others
