"""Peers of `gpu.py`: bare models of torch's operations, and the packages of others. A package that is not installed is
an error of its side, which names it; nothing is installed here (benchmarks/README.md says from which wheels).
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from gpu_sides import Options, Side, count_flops, of_layer, training
from torch import Tensor, nn


class TorchTransformer(nn.Module):
    """`nn.Transformer` with tied embeddings and the sinusoidal positions of the paper."""

    def __init__(self, config: Any, length: int, pads: bool = False, by_liger: bool = False) -> None:
        super().__init__()
        self.width, self.pads, self.loss = config.d_model, pads, liger_loss() if by_liger else None
        self.embedding = nn.Embedding(config.target_vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.body = nn.Transformer(
            config.d_model,
            config.num_heads,
            config.num_encoder_layers,
            config.num_decoder_layers,
            config.d_ff,
            config.dropout,
            batch_first=True,
        )
        self.dropout = nn.Dropout(config.dropout)
        angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(0, config.d_model, 2) / config.d_model)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """Return the loss. Id 0 is padding, without a loss; its keys are masked if the model `pads`."""

        def embedded(ids: Tensor) -> Tensor:
            places: Any = self.positions
            out: Tensor = self.dropout(self.embedding(ids) * math.sqrt(self.width) + places[: ids.shape[1]])
            return out

        mask: Any = self.mask
        length, padding = target.shape[1], source == 0 if self.pads else None
        hidden = self.body(
            embedded(source), embedded(target), tgt_mask=mask[:length, :length], tgt_is_causal=True,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        if self.loss is not None:  # which knows no autocast
            rows, weight = (x.bfloat16() for x in (hidden.flatten(0, 1), self.embedding.weight))
            found: Tensor = self.loss(weight, rows, labels.flatten())
            return found
        return smoothed(F.linear(hidden, self.embedding.weight), labels)


class Decoder(nn.Module):
    """A language model around causal SDPA, with learned positions and without memory: what exact attention costs."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int, num_layers: int, vocab_size: int, length: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Parameter(torch.randn(length, d_model) * 0.02)

        def layer() -> nn.ModuleDict:
            return nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(d_model),
                    "qkv": nn.Linear(d_model, 3 * d_model, bias=False),
                    "out": nn.Linear(d_model, d_model, bias=False),
                    "ff": nn.Sequential(
                        nn.LayerNorm(d_model), nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)
                    ),
                }
            )

        self.layers = nn.ModuleList([layer() for _ in range(num_layers)])
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.layers:
            parts: Any = layer
            q, k, v = (
                y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for y in parts["qkv"](parts["norm"](x)).chunk(3, dim=-1)
            )
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + parts["out"](attended.transpose(1, 2).flatten(2))
            x = x + parts["ff"](x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class StaticDecoder(nn.Module):
    """One greedy step of a decoder whose cache has a fixed size, so that a compiler and a CUDA graph take it whole.

    Args: length: positions of the cache. source_len: keys of a source that every layer reads, too; 0: none.
    """

    def __init__(
        self, d_model: int, num_heads: int, d_ff: int, num_layers: int, vocab_size: int, rows: int, length: int,
        source_len: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.reads_source = num_heads, source_len > 0
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Parameter(torch.randn(length, d_model) * 0.02)

        def layer() -> nn.ModuleDict:
            maps = {name: nn.Linear(d_model, d_model) for name in ("out", "across", "out_across")}
            norms = {name: nn.LayerNorm(d_model) for name in ("norm", "norm_across", "norm_ff")}
            inner, outer = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
            return nn.ModuleDict(
                {**maps, **norms, "qkv": nn.Linear(d_model, 3 * d_model), "inner": inner, "outer": outer}
            )

        self.layers = nn.ModuleList([layer() for _ in range(num_layers)])
        caches = torch.zeros(2, num_layers, rows, num_heads, length, d_model // num_heads)
        self.register_buffer("caches", caches)
        self.register_buffer("sources", torch.randn(2, num_layers, rows, num_heads, source_len, caches.shape[-1]))
        self.register_buffer("places", torch.arange(length))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens: (rows, 1), position: (1,). Returns: the most probable next tokens, (rows, 1)."""
        caches, sources, places = map(self.get_buffer, ("caches", "sources", "places"))
        x = self.embedding(tokens) + self.positions[position]
        for number, layer in enumerate(self.layers):
            parts: Any = layer
            q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in parts["qkv"](x).chunk(3, dim=-1))
            for cache, new in zip(caches[:, number], (k, v), strict=True):
                cache.index_copy_(2, position, new)
            attended = F.scaled_dot_product_attention(q, *caches[:, number], attn_mask=(places <= position)[None, None])
            x = parts["norm"](x + parts["out"](attended.transpose(1, 2).flatten(2)))
            if self.reads_source:
                q = parts["across"](x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                attended = F.scaled_dot_product_attention(q, *sources[:, number])
                x = parts["norm_across"](x + parts["out_across"](attended.transpose(1, 2).flatten(2)))
            x = parts["norm_ff"](x + parts["outer"](F.relu(parts["inner"](x))))
        return F.linear(x, self.embedding.weight).argmax(dim=-1)


def static_steps(decoder: StaticDecoder, options: Options, rows: int, first: int, count: int, compiled: bool) -> Side:
    """Return the side that makes `count` steps from position `first` on, on CUDA as a graph if compiled.

    Args: rows: whose tokens count: of several beams one.
    """
    decoder = decoder.to(options.device, torch.bfloat16).eval()
    mode = "reduce-overhead" if options.device == "cuda" else None
    run: Any = torch.compile(decoder, mode=mode) if compiled else decoder
    places = torch.arange(first, first + count, device=options.device)

    @torch.no_grad()
    def step() -> None:
        tokens = torch.zeros(decoder.get_buffer("caches").shape[2], 1, dtype=torch.int64, device=options.device)
        for position in places.split(1):
            tokens = run(tokens, position).clone()

    return Side("static cache", step, rows * count)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the labels that are not padding, 0."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=0, label_smoothing=0.1)


# Packages of others.


def liger_loss() -> Any:
    """Liger's product of the head and loss in one, with the smoothing of `smoothed`; Triton kernels, for GPUs."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(ignore_index=0, label_smoothing=0.1)


def disentangled_flash(rows: int, length: int, width: int, heads: int, options: Options) -> Side:
    """DeBERTa's attention both ways, with a vector for each distance as ours, but without its vectors for keys."""
    from disentangled_flash import TritonTrainingDisentangledSelfAttention as Attention

    sizes = {"hidden_size": width, "num_attention_heads": heads, "attention_head_size": None, "share_att_key": False}
    distances = {"position_buckets": -1, "max_relative_positions": length, "max_position_embeddings": length}
    rates = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    config = SimpleNamespace(**sizes, **distances, **rates, relative_attention=True, pos_att_type=["c2p"])
    layer = Attention(config, assume_unpadded=True).to(options.device, options.dtype)
    vectors = torch.randn(2 * length, width, device=options.device, dtype=options.dtype)
    keep = torch.ones(rows, length, dtype=torch.bool, device=options.device)
    return of_layer(
        "disentangled-flash", layer, lambda x: layer(x, keep, rel_embeddings=vectors)[0], (rows, length, width), options
    )


def marian(config: Any, length: int) -> Any:
    """A MarianMT of the same widths, for sentences of that length."""
    from transformers import MarianConfig, MarianMTModel

    sizes = {
        f"{side}_{name}": value
        for side, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers))
        for name, value in (("layers", layers), ("attention_heads", config.num_heads), ("ffn_dim", config.d_ff))
    }
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 1}
    return MarianMTModel(
        MarianConfig(
            vocab_size=config.target_vocab_size, d_model=config.d_model, dropout=config.dropout,
            activation_function="relu", max_position_embeddings=max(length, 64), scale_embedding=True, **sizes, **ids,
        )
    )  # fmt: skip


def x_transformers(config: Any, batch: Any, options: Options, tokens: int, attention: float) -> Side:
    """x-transformers' encoder-decoder with SDPA, without dropout as its defaults say, on a batch without padding."""
    from x_transformers import XTransformer

    sizes = {
        "num_tokens": config.target_vocab_size, "heads": config.num_heads, "max_seq_len": batch.source.shape[1],
        "attn_dim_head": config.d_model // config.num_heads, "attn_flash": True,
        "ff_mult": config.d_ff // config.d_model, "depth": config.num_encoder_layers,
    }  # fmt: skip
    given = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    model = XTransformer(dim=config.d_model, tie_token_emb=True, **given).to(options.device)

    def loss() -> Tensor:
        memory = model.encoder(batch.source, return_embeddings=True)
        return smoothed(model.decoder.net(batch.target_input, context=memory), batch.target_labels)

    return training("x-transformers", model, loss, options, tokens, count_flops(model, tokens, attention))


def transfo_xl(config: Any, batch: Any, options: Options) -> Side:
    """TransfoXL of transformers 4.35.2, from the folder that TRANSFO_XL names; it fails in bf16 autocast."""
    folder = os.environ.get("TRANSFO_XL")
    if folder:
        sys.path.insert(0, folder)
    transformers = importlib.import_module("transformers")
    if not hasattr(transformers, "TransfoXLConfig"):
        raise ImportError(
            f"transformers {transformers.__version__} has no TransfoXL; install 4.35.2 into a folder of its own, and"
            " name that by TRANSFO_XL",
            name="TRANSFO_XL",
        )
    settings = transformers.TransfoXLConfig(
        vocab_size=config.vocab_size, cutoffs=[], d_model=config.d_model, d_embed=config.d_model,
        n_head=config.num_heads, d_head=config.width_of_heads, d_inner=config.d_ff, div_val=1,
        n_layer=config.num_layers, mem_len=config.memory_len, clamp_len=-1, same_length=False, dropout=0.0,
        dropatt=0.0,
    )  # fmt: skip
    model = transformers.TransfoXLLMHeadModel(settings).to(options.device)
    memory: list[Any] = [None]

    def loss() -> Tensor:
        output = model(input_ids=batch.tokens, labels=batch.tokens, mems=memory[0])
        memory[0] = output.mems
        found: Tensor = output.losses.float().mean()
        return found

    return training("TransfoXL", model, loss, options, batch.tokens.numel(), 0.0, in_bf16=False)


def reformer_pytorch(config: Any, batch: Any, options: Options) -> Side:
    """reformer-pytorch with the widths, chunks and rounds of ours."""
    from reformer_pytorch import ReformerLM

    length = batch.tokens.shape[1]
    hashing = config.lsh
    model = ReformerLM(
        num_tokens=config.vocab_size, dim=config.d_model, depth=config.num_layers, max_seq_len=length,
        heads=config.num_heads, bucket_size=hashing.chunk_len, n_hashes=hashing.num_hashes, causal=True,
        ff_mult=config.d_ff // config.d_model,
    ).to(options.device)  # fmt: skip

    def loss() -> Tensor:
        return F.cross_entropy(model(batch.tokens).flatten(0, 1).float(), batch.targets.flatten())

    return training("reformer-pytorch", model, loss, options, length, 0.0)


def ctranslate2(model: Any, source: Tensor, beams: int, length: int, options: Options) -> Side:
    """CTranslate2 with the weights of our model, in float16 on CUDA, each sentence to the full length."""
    from manyheads.extras.exports.ctranslate2 import _spec, runtime

    package, pieces = runtime(), [f"t{number}" for number in range(model.config.target_vocab_size)]
    with torch.no_grad():
        spec = _spec(model.float().cpu(), banned=())
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.unk_token, spec.config.eos_token = pieces[3], pieces[2]
    spec.config.bos_token = spec.config.decoder_start_token = pieces[1]
    spec.validate()
    rows = [[pieces[number] for number in row] for row in source.tolist()]
    kind = "float16" if options.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        spec.optimize(quantization=kind)
        target = Path(folder)
        spec.save(str(target))
        translator = package.Translator(str(target), device=options.device, compute_type=kind)

    def step() -> None:
        found = translator.translate_batch(
            rows, beam_size=beams, max_decoding_length=length, min_decoding_length=length, max_input_length=0
        )
        sizes = {len(one.hypotheses[0]) for one in found}
        if sizes != {length}:
            raise ValueError(f"CTranslate2 wrote {sizes} tokens, not {length}")

    return Side("CTranslate2", step, source.shape[0] * length)


# Names of the packages, for the record.
PACKAGES = (
    "transformers",
    "x-transformers",
    "reformer-pytorch",
    "ctranslate2",
    "liger-kernel",
    "disentangled-flash",
    "numpy",
)
