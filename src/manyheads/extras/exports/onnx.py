"""Models as ONNX files, with the names of files, inputs and outputs that Optimum and transformers.js expect.

    Transformer      onnx/encoder_model.onnx   onnx/decoder_model_merged.onnx
    Transformer-XL   onnx/model.onnx: input_ids, mems.{i} -> logits, present_mems.{i}
    Reformer         onnx/model.onnx: input_ids, attention_mask -> logits; its encoder-decoder is refused

Beside them: config.json, generation_config.json, tokenizer.json, tokenizer_config.json as in transformers. With int8
the names end in `_quantized`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.decoding.settings import load_settings
from manyheads.errors import ConfigError
from manyheads.extras.exports import Check, ExportOptions, check_architecture
from manyheads.extras.exports.engine import LIMIT, MOST_TOKENS, never_produced, reference, tokenizer_of
from manyheads.extras.exports.onnx_graphs import (
    CrossProjections,
    DecoderStep,
    EncoderGraph,
    check_size,
    graph_positions,
    logits_of,
    package,
    prepare,
    quantized,
    save,
    sinusoidal,
    traced,
    with_source_branch,
)
from manyheads.extras.peers import hf_tokenizer
from manyheads.extras.peers.marian_generation import MarianIds, generation_to_peer
from manyheads.extras.peers.peer import REFORMER, TRANSFORMER, TRANSFORMER_XL, any_of, check_held
from manyheads.models.pretrained import load, read_config
from manyheads.models.transformer_xl.model import distances_back
from manyheads.nn.attention.local import LocalSelfAttention, distance_penalty
from manyheads.nn.attention.lsh_hash import keys_of
from manyheads.nn.attention.masks import Causal, Dense, Mask, Window
from manyheads.nn.attention.multi_head import merge_heads, split_heads
from manyheads.nn.attention.settings import AdditiveAttentionConfig, DotProductAttentionConfig
from manyheads.nn.kernels.attention import dot_product_weights, masked_softmax
from manyheads.nn.positions import SinusoidalPositions
from manyheads.text.of_folder import tokenizer_of_folder
from manyheads.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from manyheads.models.composites import LanguageModel, Seq2Seq
    from manyheads.text.sides import TranslationTokenizer

_LONGEST = 512
"""The limit of tokens that is written for a translation model with positions of any length."""
HOLDS = {
    "transformer": {
        **TRANSFORMER,
        **any_of("activation relative_bias ffn"),
        "norm": ("layer", "unbiased"),
        "attention": (DotProductAttentionConfig, AdditiveAttentionConfig),
    },
    "transformer-xl": {**TRANSFORMER_XL, "ext_len": (0,), "relative_bias": ()},
    "reformer": REFORMER,
}
"""See `peers.peer`, for each architecture."""


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`."""
    package("onnx")
    if options.quantization:
        package("onnxruntime.quantization")
    config = read_config(model)
    check_architecture("onnx", config.architecture)
    check_held("the format onnx", config, HOLDS[config.architecture], "model.")
    if config.architecture == "transformer" and config.num_encoder_layers == 0:
        raise ConfigError(
            "the format onnx cannot hold a model with model.num_encoder_layers 0, whose encoder's graph has no mask; it"
            " needs at least 1. Use --to transformers, or manyheads itself."
        )
    module: Any = load(model).eval()
    check_size(module)
    if config.architecture == "transformer":
        return write_translation(module, model, target, suffix_of(options))
    return write_language_model(module, model, target, suffix_of(options))


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """See `extras.exports`. The runtime is onnxruntime, on the CPU."""
    package("onnxruntime")
    module: Any = load(model).eval()
    compare = compare_translation if module.config.architecture == "transformer" else compare_language_model
    return compare(module, model, target, sentences, options)


def suffix_of(options: ExportOptions) -> str:
    """Return the suffix of the files' names."""
    return "_quantized" if options.quantization else ""


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
    encoder = traced(
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
    project = traced(
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
    step = traced(DecoderStep(module), inputs, outputs)
    if suffix:
        encoder, project, step = map(quantized, (encoder, project, step))
    save(encoder, target / "onnx" / f"encoder_model{suffix}.onnx")
    save(with_source_branch(step, project), target / "onnx" / f"decoder_model_merged{suffix}.onnx")


def _write_json(module: Seq2Seq, tokenizer: TranslationTokenizer, model: Path, target: Path) -> list[str]:
    writer = tokenizer.target
    ids = MarianIds(pad=writer.pad_id, eos=writer.eos_id, start=writer.bos_id)
    longest = module.max_len or _LONGEST
    generation, differs = generation_to_peer(load_settings(model), ids, longest)
    written = {"config.json": _config(module, ids, longest), "generation_config.json": generation}
    for name, content in written.items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    notes = [f"Generation differs: {what}." for what in differs]
    if (pieces := tokenizer.in_pieces) is not None:
        for name, data in hf_tokenizer.to_files(pieces, longest).items():
            (target / name).write_bytes(data)
        return notes + hf_tokenizer.notes_of(pieces)
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


def open_file(path: Path, threads: int = 0) -> Any:
    """Return an `onnxruntime.InferenceSession` on the CPU. threads: 0: as many as it finds cores.

    Raises: MissingExtraError: onnxruntime is not installed.
    """
    runtime = package("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Decoder:
    """Encoder and merged decoder of a folder, as the clients run them.

    Args: folder: of the export. suffix: `_quantized` or nothing. threads: see `open_file`.
    """

    def __init__(self, folder: Path, suffix: str = "", threads: int = 0) -> None:
        self._encoder = open_file(folder / "onnx" / f"encoder_model{suffix}.onnx", threads)
        self._decoder = open_file(folder / "onnx" / f"decoder_model_merged{suffix}.onnx", threads)
        self._outputs = [one.name for one in self._decoder.get_outputs()]
        self._pasts = {one.name: one for one in self._decoder.get_inputs() if one.name.startswith("past_")}

    def start(self, sources: Sequence[Sequence[int]], pad_id: int) -> dict[str, Any]:
        """Return the inputs of the first step, without input_ids."""
        longest = max(map(len, sources))
        ids = np.array([[*one, *[pad_id] * (longest - len(one))] for one in sources], dtype=np.int64)
        mask = np.array([[1] * len(one) + [0] * (longest - len(one)) for one in sources], dtype=np.int64)
        (hidden,) = self._encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        empty = {
            name: np.zeros((len(ids), one.shape[1], 0, one.shape[3]), np.float32) for name, one in self._pasts.items()
        }
        return {
            "encoder_hidden_states": hidden,
            "encoder_attention_mask": mask,
            "use_cache_branch": np.array([False]),
            **empty,
        }

    def step(self, ids: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return logits (rows, new_len, vocab_size), and the inputs of the next step."""
        found = dict(zip(self._outputs, self._decoder.run(None, {**inputs, "input_ids": ids}), strict=True))
        pasts = {name: found[name.replace("past_key_values", "present")] for name in self._pasts}
        return found["logits"], {**inputs, **pasts, "use_cache_branch": np.array([True])}

    def greedy(
        self, source: Sequence[int], *, bos_id: int, eos_id: int, banned: Sequence[int], limit: int
    ) -> list[int]:
        """Return the ids of one translation, with EOS."""
        inputs, ids = self.start([source], banned[0]), [bos_id]
        while len(ids) <= limit and (ids[-1] != eos_id or len(ids) == 1):
            logits, inputs = self.step(np.array([ids[-1:]], dtype=np.int64), inputs)
            row = logits[0, -1]
            row[list(banned)] = -np.inf
            ids.append(int(row.argmax()))
        return ids[1:]


@torch.inference_mode()
def compare_translation(
    module: Seq2Seq, model: Path, target: Path, sentences: list[list[int]], options: ExportOptions
) -> Check:
    """Compare the log-probabilities of the model's greedy outputs, and the greedy outputs."""
    writer = tokenizer_of(model, options.to).target
    ours = reference(module, tokenizer_of(model, options.to), sentences)
    decoder = Decoder(target, "_quantized" if options.quantization else "")
    largest, num_equal = 0.0, 0
    ids = {"bos_id": writer.bos_id, "eos_id": writer.eos_id, "banned": never_produced(writer)}
    limit = min(MOST_TOKENS, (module.max_len or MOST_TOKENS + 1) - 1)
    for source, output, rows in zip(ours.sources, ours.outputs, ours.log_probs, strict=True):
        start = np.array([[writer.bos_id, *output[:-1]]], dtype=np.int64)
        logits, _ = decoder.step(start, decoder.start([source], writer.pad_id))
        found = torch.from_numpy(logits[0]).log_softmax(dim=-1)
        largest = max(largest, float((found - rows).abs().max()))
        num_equal += decoder.greedy(source, **ids, limit=limit) == output  # type: ignore[arg-type]
    return Check(
        what="log-probabilities",
        deviation=largest,
        limit=None if options.quantization else LIMIT,
        num_sentences=len(sentences),
        num_equal=num_equal,
    )


@torch.inference_mode()
def compare_language_model(
    module: LanguageModel, model: Path, target: Path, sentences: list[list[int]], options: ExportOptions
) -> Check:
    """Compare the log-probabilities; of a Transformer-XL those of two segments, the second with memories."""
    session = open_file(target / "onnx" / ("model_quantized.onnx" if options.quantization else "model.onnx"))
    memories = [one for one in session.get_inputs() if one.name.startswith("mems.")]
    attending = module.config.attending if memories else None
    columns = attending.memory_len if attending and attending.initial_memory == "zeros" else 0
    largest = 0.0
    for ids in sentences:
        whole = torch.tensor([ids])
        parts = [whole]
        given = {one.name: np.zeros((1, columns, one.shape[2]), np.float32) for one in memories}
        if memories:
            parts = [whole[:, : len(ids) // 2 + 1], whole[:, len(ids) // 2 + 1 :]]
        state = exact_start(module, len(whole))
        for part in filter(torch.numel, parts):
            hidden, state = exact_forward(module, part, state)
            rows = module.head.log_probs(hidden)
            mask = {} if memories else _mask_for(session, part)
            logits, *after = session.run(None, {"input_ids": part.numpy(), **given, **mask})
            given = {one.name: new for one, new in zip(memories, after, strict=True)}
            found = torch.from_numpy(logits).log_softmax(dim=-1)
            largest = max(largest, float((found - rows).abs().max()))
    limit = None if options.quantization else LIMIT
    return Check(what="log-probabilities", deviation=largest, limit=limit, num_sentences=0, num_equal=0)


def exact_start(module: LanguageModel, lanes: int) -> Any:
    """Return the state before the first segment; a Transformer-XL's is without memory or full of zeros."""
    return module.body.start(lanes, projected=False)


def exact_forward(module: LanguageModel, ids: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Return the hidden states of a segment, by exact attention, and the next state."""
    exact = {"num_hashes": 0} if module.config.architecture == "reformer" else {}
    hidden, after = module.body(ids, None, state, **exact)
    return hidden, after


def _mask_for(session: Any, ids: torch.Tensor) -> dict[str, Any]:
    names = [one.name for one in session.get_inputs()]
    return {"attention_mask": np.ones(ids.shape, np.int64)} if "attention_mask" in names else {}


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
    save(quantized(graph) if suffix else graph, target / "onnx" / f"model{suffix}.onnx")
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
    graph = traced(MemoryGraph(module), inputs, outputs, num_single=1)
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
    graph = traced(ExactReformer(module), inputs, {"logits": (*axes, "")})
    notes = []
    if "lsh" in config.kinds:
        notes.append(
            "Attention is exact: hashing sorts by numbers, which a graph cannot hold. Time and memory grow with the"
            " square of the length."
        )
    longest = module.body.max_len
    return graph, notes, {"max_position_embeddings": longest} if longest else {}


_WRITERS = {"transformer-xl": _write_memory, "reformer": _write_reformer}
