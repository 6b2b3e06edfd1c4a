"""Weights and conventions of other implementations: `PEERS`, of which `FORMATS` are whole models.

    from manyheads.extras.peers import PEERS
    wrapper = PEERS["torch/Transformer"].from_peer(config, state_dict)

A peer is a subclass of `manyheads.extras.peers.peer.Peer`, whose module is imported on first access. Importing this
package does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manyheads.catalogue import PEERS

__all__ = ["FORMATS", "PEERS", "Format"]


@dataclass(frozen=True)
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
        "transformer", "OPUS-MT, with its tokenizer and generation options; needs the extra spm", model_type="marian"
    ),
    "transformers/Pegasus": Format("transformer", "pre-norm models", model_type="pegasus"),
    "annotated-transformer": Format(
        "transformer",
        "with vocab_src.txt and vocab_tgt.txt; without them the model translates ids",
        options=frozenset(("src_vocab", "tgt_vocab")),
    ),
    "torch/Transformer": Format(
        "transformer", "--to only: encoder and decoder, without embeddings and output layer", is_read=False
    ),
    "transformers/TransfoXL": Format("transformer-xl", "weights only", model_type="transfo-xl"),
    "transformers/Reformer": Format("reformer", "weights only", model_type="reformer"),
    "transformers/GPT2": Format("decoder", "weights only; the model reads and writes ids", model_type="gpt2"),
    "karpathy/nanoGPT": Format(
        "decoder", "weights only; its ckpt.pt needs --from-pickle", options=frozenset(("block_size", "n_embd"))
    ),
    "kimiyoung/TransformerXL": Format(
        "transformer-xl",
        "the original code, weights only; its model.pt needs --from-pickle",
        options=frozenset(("n_token", "n_layer")),
    ),
    "tf/Transformer-XL": Format(
        "transformer-xl",
        "--from only: the original TensorFlow code; a checkpoint and corpus-info.json, with --from-pickle"
        " also the vocabulary in cache.pkl",
        is_written=False,
    ),
    "fairseq/Transformer": Format(
        "transformer",
        "--from only: a checkpoint with --from-pickle, dict.LANG.txt and a sentencepiece model",
        is_written=False,
    ),
    "opennmt-py/Transformer": Format(
        "transformer", "--from only: a checkpoint with --from-pickle, weights only", is_written=False
    ),
    "joeynmt/Transformer": Format(
        "transformer",
        "--from only: config.yaml, a checkpoint with --from-pickle, vocabularies, a sentencepiece model",
        is_written=False,
    ),
    "marian-nmt": Format(
        "transformer",
        "--from only: Marian's own files, .npz, decoder.yml, vocab.yml or .spm; needs manyheads[spm]",
        is_written=False,
    ),
}
"""Those of PEERS that are whole models."""
