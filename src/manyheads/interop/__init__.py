"""Weights and habits of other implementations: one file a peer, all of them listed in `PEERS`.

    from manyheads.interop import PEERS
    wrapper = PEERS["torch/Transformer"].from_peer(config, state_dict)

A loader is a module with the functions of `manyheads.interop.protocols.Loader`. Importing this package imports no
torch; a loader is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from manyheads.interop.protocols import Loader

__all__ = ["PEERS"]


class _Peers(Mapping[str, "Loader"]):
    """Peer id -> loader, imported on access."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules

    def __getitem__(self, peer: str) -> Loader:
        return cast("Loader", importlib.import_module(self._modules[peer]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        return f"PEERS({', '.join(self._modules)})"


PEERS: Mapping[str, Loader] = _Peers(
    {
        "annotated-transformer": "manyheads.interop.annotated_transformer",
        "kimiyoung/TransformerXL": "manyheads.interop.kimiyoung_transformer_xl",
        "kimiyoung/sample_logits": "manyheads.interop.kimiyoung_sample_logits",
        "reformer-pytorch/LSHAttention": "manyheads.interop.reformer_pytorch",
        "reformer-pytorch/LSHSelfAttention": "manyheads.interop.reformer_pytorch_self",
        "torch/Transformer": "manyheads.interop.torch_transformer",
        "transformers/Marian": "manyheads.interop.marian",
        "transformers/Reformer": "manyheads.interop.reformer",
        "transformers/TransfoXL": "manyheads.interop.transfo_xl",
    }
)
