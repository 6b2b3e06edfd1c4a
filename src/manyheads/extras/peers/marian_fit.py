"""Conversion of a Transformer to the form of Marian and Pegasus in `transformers`, with the same outputs.

Our default positions interleave sines and cosines, theirs have all sines first. Both have the same frequencies, so one
order of the d_model features turns into the other: everything that reads or writes the residual stream is reordered,
and no value changes. Biases that our model lacks become zeros.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.architectures.pretrained import load_portable_state, portable_state
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.catalogue import build_model

__all__ = ["fitted", "halves_order"]

_ROWS = re.compile(r"(.*\.)?(norm|out_proj)\.(weight|bias)")  # the first axis is the residual stream
_APART = re.compile(r".*_proj\.bias|head\.bias")  # outside the residual stream


def fitted(model: Seq2Seq) -> Seq2Seq:
    """Return a model of the same outputs (up to rounding) with `sinusoidal_halves` positions and with biases.

    A model that is in this form already is returned itself.
    """
    config = model.config
    is_interleaved = config.positions == "sinusoidal"
    if config.bias and not is_interleaved:
        return model
    with torch.random.fork_rng(devices=[]):
        made: Seq2Seq = build_model(
            replace(config, bias=True, positions="sinusoidal_halves" if is_interleaved else config.positions)
        )
    ours = portable_state(model)
    state = {name: torch.zeros_like(tensor) for name, tensor in portable_state(made).items()}
    order = halves_order(config.d_model) if is_interleaved else torch.arange(config.d_model)
    load_portable_state(made, state | {name: _reordered(name, tensor, order) for name, tensor in ours.items()})
    return made.eval()


def halves_order(d_model: int) -> Tensor:
    """Return the order of interleaved features in the other layout: the even ones (sines), then the odd ones."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def _reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    if _ROWS.fullmatch(name):
        return tensor.index_select(0, order)
    return tensor if _APART.fullmatch(name) else tensor.index_select(1, order)
