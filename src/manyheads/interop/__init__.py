"""Weights and conventions of other implementations: one file per peer, all listed in `PEERS`.

    from manyheads.interop import PEERS
    wrapper = PEERS["torch/Transformer"].from_peer(config, state_dict)

A loader is a module with the functions of `manyheads.interop.protocols.Loader`, or an object in a module if a peer has
several parts. Importing this package does not import torch; a loader is imported on first access.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from manyheads.interop.protocols import Loader

__all__ = ["MODEL_PEERS", "PEERS"]


class _Peers(Mapping[str, "Loader"]):
    """Peer id -> loader, imported on access."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules

    def __getitem__(self, peer: str) -> Loader:
        module, _, part = self._modules[peer].partition(":")
        found = importlib.import_module(module)
        return cast("Loader", getattr(found, part) if part else found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        return f"PEERS({', '.join(self._modules)})"


PEERS: Mapping[str, Loader] = _Peers(
    {
        "annotated-transformer": "manyheads.interop.annotated_transformer",
        "d2l/AdditiveAttention": "manyheads.interop.d2l:ADDITIVE",
        "d2l/DotProductAttention": "manyheads.interop.d2l:DOT_PRODUCT",
        "d2l/MultiHeadAttention": "manyheads.interop.d2l:MULTI_HEAD",
        "d2l/TransformerEncoderBlock": "manyheads.interop.d2l:BLOCK",
        "d2l/attention": "manyheads.interop.d2l:ALL",
        "d2l/masked_softmax": "manyheads.interop.d2l:SOFTMAX",
        "fused-qkv/MultiheadAttention": "manyheads.interop.fused_qkv",
        "kimiyoung/TransformerXL": "manyheads.interop.kimiyoung_transformer_xl",
        "kimiyoung/sample_logits": "manyheads.interop.kimiyoung_sample_logits",
        "labml/MultiHeadAttention": "manyheads.interop.labml:MULTI_HEAD",
        "labml/RelativeMultiHeadAttention": "manyheads.interop.labml:RELATIVE",
        "labml/attention": "manyheads.interop.labml:ALL",
        "reformer-pytorch/LSHAttention": "manyheads.interop.reformer_pytorch",
        "reformer-pytorch/LSHSelfAttention": "manyheads.interop.reformer_pytorch_self",
        "tf/Transformer-XL": "manyheads.interop.tf_transformer_xl",
        "torch/MultiheadAttention": "manyheads.interop.torch_multihead_attention",
        "torch/Transformer": "manyheads.interop.torch_transformer",
        "transformers/Marian": "manyheads.interop.marian",
        "transformers/Reformer": "manyheads.interop.reformer",
        "transformers/TransfoXL": "manyheads.interop.transfo_xl",
    }
)

MODEL_PEERS: tuple[str, ...] = (
    "transformers/Marian",
    "annotated-transformer",
    "torch/Transformer",
    "transformers/TransfoXL",
    "transformers/Reformer",
    "kimiyoung/TransformerXL",
)
"""Those of PEERS that are whole models, which `manyheads convert` takes; the others are single modules."""
