"""The common part of the peers of plain Transformers (fairseq, OpenNMT-py, JoeyNMT): options that must be neutral,
positions, inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.peers.peer import Peer, require
from manyheads.extras.peers.scores import decode, encode
from manyheads.nn.positions import sinusoidal_table

__all__ = ["ACTIVATIONS", "PlainTransformer", "is_formula", "tie_of"]

ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "tanh": "tanh", "linear": "linear", "swish": "swish", "silu": "swish"},
    **dict.fromkeys(("gelu_accurate", "gelu_fast"), "gelu_tanh"),
}
_TOLERANCE = 1e-5


class PlainTransformer(Peer):
    """A translation model with in.src, in.src_mask (1: a token) and in.decoder_input_ids; it gives out.logits.

    Attributes: neutral: options of the peer that our model does not have, and the only values that can be converted.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignores_others = True
    inputs = ("src", "src_mask", "decoder_input_ids")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Peer.read`. Raises: ConfigError: an option has a value that our model does not support."""
        given = config.get("model")
        for name, allowed in cls.neutral.items():
            value = given.get(name) if isinstance(given, Mapping) else None
            if value is not None and value not in allowed:
                known = " or ".join(map(repr, allowed))
                raise ConfigError(f"{name} is {value!r}; a model of {cls.name} can be converted with {known} only.")
        return super().read(config)

    @classmethod
    def activation_of(cls, name: str) -> Any:
        """Return our name of an activation. Raises: ConfigError: we do not have it."""
        if name not in ACTIVATIONS:
            raise ConfigError(f"the activation is {name!r}; of {cls.name} those are known: {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS[name]

    @classmethod
    def equal_of(cls, options: Mapping[str, Any], *names: str) -> Any:
        """Return the value of several options. Raises: ConfigError: they differ, and our model has one for all."""
        values = [options[name] for name in names]
        if any(value != values[0] for value in values):
            shown = ", ".join(f"{name} {value!r}" for name, value in zip(names, values, strict=True))
            raise ConfigError(f"{shown} in a model of {cls.name}: our model has one value for both.")
        return values[0]

    @classmethod
    def vocab_sizes(cls, weights: Mapping[str, Tensor], source: str, target: str) -> tuple[int, int]:
        """Return the rows of the two tables of embeddings. Raises: ModelFileError: one is missing or no matrix."""
        tables = [weights[name] for name in (source, target) if name in weights and weights[name].dim() == 2]
        if len(tables) < 2:
            raise ModelFileError(f"{source} and {target} are needed, with two axes.")
        return tables[0].shape[0], tables[1].shape[0]

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        source, target = require(inputs, "src", "decoder_input_ids")
        mask = inputs.get("in.src_mask", torch.ones_like(source)) != 0
        allowed = mask[:, None, None]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()[None, None]
        module: Seq2Seq = self.module
        hidden = decode(module, target, encode(module, source, allowed), causal, allowed)
        return {"out.logits": module.head.logits(hidden)}


def is_formula(table: Tensor, d_model: int) -> bool:
    """Return whether a table of positions has the interleaved sines and cosines of the paper."""
    rows = sinusoidal_table(torch.arange(float(table.shape[0])), d_model)
    return table.shape == rows.shape and torch.allclose(table.float(), rows, rtol=0.0, atol=10 * _TOLERANCE)


def tie_of(*, embeddings: bool, output: bool) -> Any:
    """Return `tie_embeddings` for two switches: source and target, and target and output."""
    if embeddings:
        return "all" if output else "embeddings"
    return "decoder" if output else "none"
