"""A language model as one ONNX file: Transformer-XL with memories, Reformer with exact attention.

    Transformer-XL   input_ids (batch, length), mems.{i} (batch, columns, d_model)
                     -> logits (batch, length, vocab_size), present_mems.{i} (batch, at most memory_len, d_model)
    Reformer         input_ids, attention_mask (batch, length) -> logits (batch, length, vocab_size)

Models with an adaptive softmax give log-probabilities as logits, which have the same softmax.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.extras.exports import onnx_files as files
from manyheads.extras.exports.onnx_graphs import graph_positions, logits_of, prepare, sinusoidal
from manyheads.extras.peers import hf_tokenizer
from manyheads.models.composites import LanguageModel
from manyheads.models.transformer_xl.model import distances_back
from manyheads.nn.attention.local import LocalSelfAttention, distance_penalty
from manyheads.nn.attention.lsh_hash import keys_of
from manyheads.nn.attention.masks import Causal, Dense, Mask, Window
from manyheads.nn.attention.multi_head import merge_heads, split_heads
from manyheads.nn.kernels.attention import dot_product_weights, masked_softmax
from manyheads.nn.positions import SinusoidalPositions
from manyheads.text.of_folder import tokenizer_of_folder
from manyheads.text.vocabulary import Vocabulary

# The limit of tokens that is written for a model with positions of any length.
_MOST_TOKENS = 1024


def write_language_model(module: LanguageModel, model: Path, target: Path, suffix: str) -> list[str]:
    """Write all files. Returns: notes. Raises: ConfigError: a setting that the graph cannot hold."""
    prepare(module)
    graph, notes, options = _WRITERS[module.config.architecture](module)
    config = {
        "model_type": f"manyheads-{module.config.architecture}",
        "vocab_size": module.config.vocab_size,
        **options,
    }
    own = tokenizer_of_folder(model)
    pieces = None if own is None else own.in_pieces
    if pieces is not None:
        written = hf_tokenizer.to_files(pieces, module.body.max_len or _MOST_TOKENS)
        for name, content in {**written, "tokenizer.json": pieces.to_json().encode()}.items():
            (target / name).write_bytes(content)  # a language model reads texts without EOS
        config |= {"bos_token_id": pieces.bos_id, "eos_token_id": pieces.eos_id}
        if isinstance(own, Vocabulary):
            notes.append(f"The tokenizer reads single lines; between two of them put the id {own.line_id}.")
    elif own is not None:
        notes.append(f"A vocabulary of the kind {own.kind} is not written; the graph takes ids, not text.")
    else:
        notes.append("The model has no tokenizer; the graph takes ids, not text.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    files.save(files.quantized(graph) if suffix else graph, target / "onnx" / f"model{suffix}.onnx")
    return notes


class MemoryGraph(nn.Module):
    """A segment and the inputs of all layers before it (Dai et al. 2019, sec. 3.2).

    Shape: input_ids (batch, length); memories: for each layer (batch, columns, d_model). Returns: logits (batch,
        length, vocab_size), and the memories for the next segment; none with memory_len 0.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.body, self.head, self.attending = model.body, model.head, model.config.attending

    def forward(self, input_ids: Tensor, memories: list[Tensor] | None = None) -> tuple[Tensor, ...]:
        memories = memories or []
        body: Any = self.body
        x = _embedded(body.embedding, input_ids)
        before = memories[0].shape[1] if memories else 0
        keys = torch.arange(before + input_ids.shape[1])
        mask: Mask = Causal()
        if self.attending.window is not None:
            mask = mask & Window(left=self.attending.window, right=None)
        seen = Dense(mask.allowed(keys[before:], keys))
        places: Tensor | None = distances_back(keys.shape[0], self.attending.clamp_len, x.device)
        if body.encoding is not None:
            places = sinusoidal(places, body.config.d_model, "halves")  # type: ignore[arg-type]
        inputs = []
        for index, layer in enumerate(body.layers):
            inputs.append(x)
            x = layer(x, memories[index] if memories else None, places, seen)
            if body.config.attention == "absolute":
                places = None  # at the input alone
        joined = [torch.cat([old, new], dim=1) for old, new in zip(memories, inputs, strict=bool(memories))]
        return logits_of(self.head, x), *(one[:, -self.attending.memory_len :] for one in joined)


def _embedded(embedding: Any, ids: Tensor) -> Tensor:
    """As `AdaptiveEmbedding`, with every cluster computed for every id, because a graph has fixed operations."""
    if len(embedding.tables) == 1:
        return embedding(ids)  # type: ignore[no-any-return]
    parts = []
    for index, (low, high) in enumerate(embedding.clusters.ranges):
        rows = torch.nn.functional.embedding((ids - low).clamp(0, high - low - 1), embedding.tables[index])
        inside = ((ids >= low) & (ids < high))[..., None]
        parts.append(embedding._project(index, rows) * inside.to(rows.dtype))
    return sum(parts[1:], parts[0]) * embedding.scale  # type: ignore[no-any-return]


def _write_memory(module: LanguageModel) -> tuple[Any, list[str], dict[str, Any]]:
    config = module.config
    attending = config.attending
    num_memories = config.num_layers if attending.memory_len else 0
    memory = torch.zeros(2, 3, config.d_model)
    axes = ("batch_size", "sequence_length")
    inputs: dict[str, Any] = {"input_ids": (torch.zeros(2, 5, dtype=torch.int64), axes)}
    outputs: dict[str, Any] = {"logits": (*axes, "")}
    for i in range(num_memories):
        inputs[f"mems.{i}"] = (memory, ("batch_size", "memory_length", ""))
        outputs[f"present_mems.{i}"] = ("batch_size", "present_memory_length", "")
    graph = files.traced(MemoryGraph(module), inputs, outputs, num_single=1)
    notes = []
    if attending.initial_memory == "zeros":
        notes.append(f"The first segment needs memories of {attending.memory_len} columns of zeros (initial_memory).")
    sizes = {"d_model": config.d_model, "num_layers": config.num_layers, "memory_len": attending.memory_len}
    return graph, notes, {**sizes, "initial_memory": attending.initial_memory}


class ExactReformer(nn.Module):
    """A Reformer's layers with exact attention, without recomputation."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.body, self.head = model.body, model.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        body: Any = self.body
        x = body.embedding(input_ids)
        if isinstance(body.positions, SinusoidalPositions):
            x = x + graph_positions(body.positions, 0, input_ids.shape[1], x)
        elif body.positions is not None:
            x = body.positions(x)
        x1 = x2 = x
        real = attention_mask.bool()[:, None, None]
        for layer in body.layers:
            h = layer.attention.norm(x2)
            x1 = x1 + (local_exactly if layer.attention.kind == "local" else attend_exactly)(
                layer.attention.self_attn, h, real
            )
            x2 = x2 + layer.feed_forward.net(layer.feed_forward.norm(x1))
        return logits_of(self.head, body.norm(torch.cat([x1, x2], dim=-1)))


def attend_exactly(attention: Any, h: Tensor, real: Tensor) -> Tensor:
    """Attention with shared queries and keys, without hashing. Args: real: (batch, 1, 1, length), False at padding."""
    qk, v = (
        split_heads(attention.qk_proj(h), attention.num_heads),
        split_heads(attention.v_proj(h), attention.num_heads),
    )
    settings, places = attention.settings, torch.arange(h.shape[1])
    others = places[:, None] > places if settings.causal else places[:, None] != places
    allowed = others & real
    # A position that sees no other sees itself.
    alone = ~allowed.any(dim=-1, keepdim=True) & (places[:, None] == places)
    weights = masked_softmax(
        torch.matmul(qk, keys_of(qk, settings.scale, settings.key_eps).transpose(-1, -2)), allowed | alone
    )
    return attention.out_proj(merge_heads(torch.matmul(weights, v)))  # type: ignore[no-any-return]


def local_exactly(attention: LocalSelfAttention, h: Tensor, real: Tensor) -> Tensor:
    """Attention within chunks and their neighbours, as a mask over all pairs."""
    q, k, v = attention._project(h)
    places = torch.arange(h.shape[1])
    chunks = torch.div(places, attention.chunk_len, rounding_mode="floor")
    back = chunks[:, None] - chunks
    allowed = (back <= attention.chunks_before) & (back >= -attention.chunks_after)
    if attention.causal:
        allowed = allowed & (places <= places[:, None])
    penalties = attention.penalties()
    if penalties is None:
        weights = dot_product_weights(q, k, Dense(allowed & real))
    else:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = masked_softmax(scores - distance_penalty(places, places, penalties), allowed & real)
    return attention._finish(torch.matmul(weights, v))


def _write_reformer(module: LanguageModel) -> tuple[Any, list[str], dict[str, Any]]:
    config = module.config
    if config.local_wrap and "local" in config.kinds:
        raise ConfigError("the format onnx cannot hold a model with model.local_wrap; use the format transformers.")
    axes = ("batch_size", "sequence_length")
    mask = torch.tensor([[1, 1, 1, 1, 0], [0] * 5])
    inputs = {"input_ids": (torch.zeros(2, 5, dtype=torch.int64), axes), "attention_mask": (mask, axes)}
    graph = files.traced(ExactReformer(module), inputs, {"logits": (*axes, "")})
    notes = []
    if "lsh" in config.kinds:
        notes.append(
            "Attention is exact: hashing sorts by numbers, which a graph cannot hold. Time and memory grow with the"
            " square of the length."
        )
    longest = module.body.max_len
    return graph, notes, {"max_position_embeddings": longest} if longest else {}


_WRITERS = {"transformer-xl": _write_memory, "reformer": _write_reformer}
