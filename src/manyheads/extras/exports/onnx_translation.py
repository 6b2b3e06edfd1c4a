"""The encoder and the decoder of a translation model as ONNX files, and the JSON files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.architectures.pretrained import GENERATION
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.config.build import build
from manyheads.decoding.settings import DecodingSettings
from manyheads.extras.exports import onnx_files as files
from manyheads.extras.exports.compare import tokenizer_of
from manyheads.extras.exports.onnx_graphs import CrossProjections, DecoderStep, EncoderGraph, prepare
from manyheads.extras.peers import hf_tokenizer
from manyheads.extras.peers.marian_generation import MarianIds, generation_to_peer
from manyheads.text.sides import TranslationTokenizer
from manyheads.text.tokenizer import Tokenizer

__all__ = ["write_translation"]

# The limit of tokens that is written for a model with positions of any length.
_MOST_TOKENS = 512


def write_translation(module: Seq2Seq, model: Path, target: Path, suffix: str) -> list[str]:
    """Write all files. Returns: notes.

    Raises: ConfigError: there is no tokenizer, or the model is a parser.
    """
    tokenizer = tokenizer_of(model, "onnx")
    notes = _write_json(module, tokenizer, model, target)
    _write_graphs(module, target, suffix)
    return notes


def _write_graphs(module: Seq2Seq, target: Path, suffix: str) -> None:
    """Write the encoder and the decoder."""
    prepare(module)
    config = module.config
    heads = config.heads_of("decoder")
    head_dim = config.d_model // heads
    num_layers = config.num_decoder_layers

    # The second row is empty, so that the graph has the zeros of a query that may attend to nothing.
    ids, mask = torch.zeros(2, 5, dtype=torch.int64), torch.tensor([[1, 1, 1, 1, 0], [0] * 5])
    encoder = files.traced(
        EncoderGraph(module),
        {
            "input_ids": (ids, ("batch_size", "encoder_sequence_length")),
            "attention_mask": (mask, ("batch_size", "encoder_sequence_length")),
        },
        {"last_hidden_state": ("batch_size", "encoder_sequence_length", "")},
    )
    hidden = torch.zeros(2, 5, config.d_model)
    of_source = ("batch_size", "", "encoder_sequence_length", "")
    projected = {f"present.{i}.encoder.{kind}": of_source for i in range(num_layers) for kind in ("key", "value")}
    project = files.traced(
        CrossProjections(module),
        {"encoder_hidden_states": (hidden, ("batch_size", "encoder_sequence_length", ""))},
        projected,
    )
    inputs: dict[str, tuple[Tensor, tuple[str, ...]]] = {
        "encoder_attention_mask": (mask, ("batch_size", "encoder_sequence_length")),
        "input_ids": (ids[:, :4], ("batch_size", "decoder_sequence_length")),
    }
    outputs: dict[str, tuple[str, ...]] = {"logits": ("batch_size", "decoder_sequence_length", "")}
    past, source = torch.zeros(2, heads, 3, head_dim), torch.zeros(2, heads, 5, head_dim)
    for i in range(num_layers):
        for kind in ("key", "value"):
            inputs[f"past_key_values.{i}.decoder.{kind}"] = (past, ("batch_size", "", "past_sequence_length", ""))
            outputs[f"present.{i}.decoder.{kind}"] = ("batch_size", "", "total_sequence_length", "")
        for kind in ("key", "value"):
            inputs[f"present.{i}.encoder.{kind}"] = (source, of_source)
    step = files.traced(DecoderStep(module), inputs, outputs)
    if suffix:
        encoder, project, step = map(files.quantized, (encoder, project, step))
    files.save(encoder, target / "onnx" / f"encoder_model{suffix}.onnx")
    files.save(files.with_source_branch(step, project), target / "onnx" / f"decoder_model_merged{suffix}.onnx")


def _write_json(module: Seq2Seq, tokenizer: TranslationTokenizer, model: Path, target: Path) -> list[str]:
    writer = tokenizer.target
    ids = MarianIds(pad=writer.pad_id, eos=writer.eos_id, start=writer.bos_id)
    path = model / GENERATION
    given = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    settings = build(DecodingSettings, given, str(path))
    longest = module.max_len or _MOST_TOKENS
    generation, differs = generation_to_peer(settings, ids, longest)
    written = {"config.json": _config(module, ids, longest), "generation_config.json": generation}
    for name, content in written.items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    notes = [f"Generation differs: {what}." for what in differs]
    if isinstance(tokenizer, Tokenizer):
        for name, data in hf_tokenizer.to_files(tokenizer, longest).items():
            (target / name).write_bytes(data)
        return notes + hf_tokenizer.notes_of(tokenizer)
    return [*notes, f"A tokenizer of the kind {tokenizer.kind} is not written; the folder takes ids, not text."]


def _config(module: Seq2Seq, ids: MarianIds, longest: int) -> dict[str, Any]:
    """Return MarianConfig's options: the loaders read sizes and special ids from it, and the graphs are ours."""
    config = module.config
    heads = config.heads_of("decoder")
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": config.source_vocab_size,
        "decoder_vocab_size": config.target_vocab_size,
        "share_encoder_decoder_embeddings": config.source_vocab_size == config.target_vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "num_hidden_layers": config.num_encoder_layers,
        # Loaders size the caches of both attentions by these two.
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff_of("decoder"),
        "max_position_embeddings": longest,
        "pad_token_id": ids.pad,
        "eos_token_id": ids.eos,
        "decoder_start_token_id": ids.start,
        "forced_eos_token_id": None,
        "use_cache": True,
    }
