"""Weights and conventions of other implementations: `PEERS`, of which `FORMATS` are whole models.

    from manyheads.extras.peers import PEERS
    wrapper = PEERS["torch/Transformer"].from_peer(config, state_dict)

A peer is a subclass of `manyheads.extras.peers.peer.Peer`. Importing this package does not import torch; a peer's module is
imported on first access.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Peer

__all__ = ["FORMATS", "PEERS", "Format"]


class _Peers(Mapping[str, "type[Peer]"]):
    """Peer id -> class, imported on access."""

    def __init__(self, classes: dict[str, str]) -> None:
        self._classes = classes

    def __getitem__(self, peer: str) -> type[Peer]:
        module, _, name = self._classes[peer].partition(":")
        return cast("type[Peer]", getattr(importlib.import_module(module), name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __repr__(self) -> str:
        return f"PEERS({', '.join(self._classes)})"


PEERS: Mapping[str, type[Peer]] = _Peers(
    {
        "annotated-transformer": "manyheads.extras.peers.annotated_transformer:AnnotatedTransformer",
        "d2l/AdditiveAttention": "manyheads.extras.peers.d2l:AdditivePeer",
        "d2l/DotProductAttention": "manyheads.extras.peers.d2l:DotProductPeer",
        "d2l/MultiHeadAttention": "manyheads.extras.peers.d2l:MultiHeadPeer",
        "d2l/TransformerEncoderBlock": "manyheads.extras.peers.d2l:BlockPeer",
        "d2l/attention": "manyheads.extras.peers.d2l:AllOfD2l",
        "d2l/masked_softmax": "manyheads.extras.peers.d2l:SoftmaxPeer",
        "fairseq/Transformer": "manyheads.extras.peers.fairseq:Fairseq",
        "fused-qkv/MultiheadAttention": "manyheads.extras.peers.fused_qkv:FusedQkv",
        "joeynmt/Transformer": "manyheads.extras.peers.joeynmt:JoeyNMT",
        "kimiyoung/TransformerXL": "manyheads.extras.peers.kimiyoung_transformer_xl:OfficialTransformerXL",
        "kimiyoung/sample_logits": "manyheads.extras.peers.kimiyoung_sample_logits:SampleLogits",
        "labml/MultiHeadAttention": "manyheads.extras.peers.labml:MultiHeadPeer",
        "labml/RelativeMultiHeadAttention": "manyheads.extras.peers.labml:RelativePeer",
        "labml/attention": "manyheads.extras.peers.labml:AllOfLabml",
        "opennmt-py/Transformer": "manyheads.extras.peers.opennmt_py:OpenNMT",
        "reformer-pytorch/LSHAttention": "manyheads.extras.peers.reformer_pytorch:BareAttentionPeer",
        "reformer-pytorch/LSHSelfAttention": "manyheads.extras.peers.reformer_pytorch:SelfAttentionPeer",
        "tf/Transformer-XL": "manyheads.extras.peers.tf_transformer_xl:TensorFlowXL",
        "torch/MultiheadAttention": "manyheads.extras.peers.torch_multihead_attention:TorchAttention",
        "torch/Transformer": "manyheads.extras.peers.torch_transformer:TorchTransformer",
        "transformers/Marian": "manyheads.extras.peers.marian:Marian",
        "transformers/Pegasus": "manyheads.extras.peers.pegasus:Pegasus",
        "transformers/Reformer": "manyheads.extras.peers.reformer:HFReformer",
        "transformers/TransfoXL": "manyheads.extras.peers.transfo_xl:TransfoXL",
    }
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A peer's model folder, which `manyheads convert` reads and writes.

    architecture: that of our model. description: for the help. is_read: whether it can become a model of ours.
    is_written: whether a model of ours can become one. model_type: in its config.json; or instead, options: names of
    some of the options under `model` in it.
    """

    architecture: str
    description: str
    is_read: bool = True
    is_written: bool = True
    model_type: str = ""
    options: frozenset[str] = frozenset()


FORMATS: Mapping[str, Format] = {
    "transformers/Marian": Format(
        architecture="transformer",
        description="OPUS-MT, with its tokenizer and generation options; needs manyheads[spm]",
        model_type="marian",
    ),
    "transformers/Pegasus": Format(
        architecture="transformer",
        description="pre-norm models",
        model_type="pegasus",
    ),
    "annotated-transformer": Format(
        architecture="transformer",
        description="weights only",
        options=frozenset(("src_vocab", "tgt_vocab")),
    ),
    "torch/Transformer": Format(
        architecture="transformer",
        description="--to only: encoder and decoder, without embeddings and output layer",
        is_read=False,
    ),
    "transformers/TransfoXL": Format(
        architecture="transformer-xl",
        description="weights only",
        model_type="transfo-xl",
    ),
    "transformers/Reformer": Format(
        architecture="reformer",
        description="weights only",
        model_type="reformer",
    ),
    "kimiyoung/TransformerXL": Format(
        architecture="transformer-xl",
        description="the original code, weights only; its model.pt needs --from-pickle",
        options=frozenset(("n_token", "n_layer")),
    ),
    "tf/Transformer-XL": Format(
        architecture="transformer-xl",
        description="--from only: the original TensorFlow code; a checkpoint and corpus-info.json, with --from-pickle"
        " also the vocabulary in cache.pkl",
        is_written=False,
    ),
    "fairseq/Transformer": Format(
        architecture="transformer",
        description="--from only: a checkpoint with --from-pickle, dict.LANG.txt and a sentencepiece model",
        is_written=False,
    ),
    "opennmt-py/Transformer": Format(
        architecture="transformer",
        description="--from only: a checkpoint with --from-pickle, weights only",
        is_written=False,
    ),
    "joeynmt/Transformer": Format(
        architecture="transformer",
        description="--from only: config.yaml, a checkpoint with --from-pickle, vocabularies, a sentencepiece model",
        is_written=False,
    ),
}
"""Those of PEERS that are whole models."""
