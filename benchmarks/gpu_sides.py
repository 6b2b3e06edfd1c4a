"""The sides that `gpu.py` measures, ours and bare models of torch's operations, and how they are measured."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.nn.kernels import modes
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.run.step import TrainStep
from manyheads.training.settings import OptimiserSettings, TrainingSettings

PART_SECONDS = 360


@dataclass(frozen=True)
class Options:
    """device: `cuda` or `cpu`. tiny: smallest sizes and one round. seconds: of a turn. rounds: of each part. compiles:
    with the sides that torch compiles. limit: seconds of a part.
    """

    device: str
    tiny: bool
    seconds: float
    rounds: int
    compiles: bool = True
    limit: float = PART_SECONDS

    @property
    def measured(self) -> dict[str, Any]:
        """What must be equal in all parts of a file."""
        return {name: getattr(self, name) for name in ("device", "tiny", "seconds", "rounds", "compiles")}


@dataclass
class Side:
    """One implementation.

    step: computes one step without waiting for the device. tokens: of a step. flops: of the products of a step; 0: not
    counted. ours: whether it is compared with the peers.
    """

    name: str
    step: Callable[[], Any]
    tokens: int = 0
    flops: float = 0.0
    ours: bool = False


Maker = Callable[[], Side]
# Measuring.


def compare(makers: dict[str, Maker], options: Options) -> dict[str, Any]:
    """Build and warm up all sides, then let them compute in turn; a side that fails is left out with its error."""
    began = time.monotonic()
    sides: dict[str, Side] = {}
    found: dict[str, Any] = {}
    for name, make in {"bf16 products": lambda: products(options), **makers}.items():
        if len(sides) > 1 and time.monotonic() - began > options.limit / 2:
            found[name] = {"error": "left out: to build the sides before it took half of the time"}
            continue
        try:
            side = make()
            for _ in range(1 if options.tiny else 3):
                side.step()
            wait(options)
            sides[name] = side
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        round_began = time.monotonic()
        for name, side in sides.items():
            times[name].append(_turn(side, options))
        now = time.monotonic()
        if now - began + (now - round_began) > options.limit and number + 1 < options.rounds:
            break  # another round would not end in time
    found.update({name: _figures(side, times[name], sides, times) for name, side in sides.items()})
    ratios = {
        f"{one} / {other}": spread([b / a for a, b in zip(times[one], times[other], strict=True)])
        for one, side in sides.items()
        for other, peer in sides.items()
        if side.ours and not peer.ours and other != "bf16 products"
    }
    return {"sides": found, "ratios": ratios}


def _turn(side: Side, options: Options) -> float:
    """Seconds of a step: as many steps as fit the turn, the device waited for at its ends."""
    wait(options)
    began, steps, batch = time.perf_counter(), 0, 1
    while True:
        for _ in range(batch):
            side.step()
        wait(options)
        steps += batch
        spent = time.perf_counter() - began
        if spent >= options.seconds:
            return spent / steps
        batch = max(1, min(4 * batch, int((options.seconds - spent) / (spent / steps))))


def wait(options: Options) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def _figures(side: Side, own: list[float], sides: dict[str, Side], times: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"step_seconds": spread(own)}
    if side.tokens:
        figures["tokens_per_second"] = spread([side.tokens / seconds for seconds in own])
    if side.flops:
        figures["flops_per_second"] = spread([side.flops / seconds for seconds in own])
    rates = sides.get("bf16 products")
    if side.flops and rates is not None and side is not rates:
        of_rounds = zip(own, times["bf16 products"], strict=True)
        figures["share_of_products"] = spread([side.flops / one / (rates.flops / other) for one, other in of_rounds])
    return figures


def spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "rounds": len(values)}


# Sides.


def products(options: Options) -> Side:
    size = 64 if options.tiny else 8192 if options.device == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=options.device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return Side("bf16 products", lambda: torch.mm(a, b, out=out), flops=2.0 * size**3)


def training(
    name: str, model: nn.Module, loss: Callable[[], Tensor], options: Options, tokens: int, flops: float, ours: bool
) -> Side:
    """Forward and backward pass in bf16 autocast, clipping, one read, fused AdamW on float32 weights: for peers."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with modes.fast(), torch.autocast(options.device, dtype=torch.bfloat16):
            value = loss()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(float(norm)):
            raise FloatingPointError("the gradient is not finite")
        optimizer.step()
        optimizer.zero_grad()

    return Side(name, step, tokens, flops, ours)


# As in `tasks.presets.demo`.
DEMO_OPTIMISER = OptimiserSettings(
    name="muon", learning_rate=6e-3, muon_learning_rate=0.02, weight_decay=0.1, clip_norm=1.0
)


def _train_step(model: nn.Module, options: Options, of_demo: bool = False) -> TrainStep:
    """of_demo: with the optimiser of `manyheads train --preset demo`, Muon."""
    optimiser = DEMO_OPTIMISER if of_demo else OptimiserSettings(clip_norm=1.0)
    config: Any = SimpleNamespace(precision="bf16", seed=1, optimiser=optimiser, training=TrainingSettings())
    return TrainStep(model, build_optimiser(model, optimiser), config, torch.device(options.device))


def of_a_run(
    model: nn.Module,
    batches: list[Any],
    options: Options,
    tokens: int,
    flops: float,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    of_demo: bool = False,
) -> Side:
    """The step of `manyheads train`: checks, clipping and update included; batches come from the CPU, in turn."""
    train_step, turn = _train_step(model, options, of_demo), itertools.count(1)

    def step() -> None:
        number = next(turn)
        with modes.fast(), inside():
            result = train_step.run([batches[number % len(batches)]], number, 1e-4)
        assert result.fault is None, result.fault

    return Side("ours", step, tokens, flops, ours=True)


BOTH: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ours, plain": nullcontext,
    "ours, fewer launches": modes.saving_launches,
}


class TorchTransformer(nn.Module):
    """`nn.Transformer` with tied embeddings and the sinusoidal positions of the paper."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__()
        self.width = config.d_model
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
        def embedded(ids: Tensor) -> Tensor:
            places: Any = self.positions
            out: Tensor = self.dropout(self.embedding(ids) * math.sqrt(self.width) + places[: ids.shape[1]])
            return out

        mask: Any = self.mask
        length = target.shape[1]
        hidden = self.body(embedded(source), embedded(target), tgt_mask=mask[:length, :length], tgt_is_causal=True)
        logits = F.linear(hidden, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)


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


def count_flops(model: nn.Module, tokens: int, attention: float, looked_up: Iterable[Tensor] = ()) -> float:
    """Products of a training step: six for each weight of a matrix and token, and those of attention.

    attention: multiply-adds of the scores and of the weighted sums, forward. looked_up: tables that no product reads.
    """
    tables = {id(table) for table in looked_up}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in tables)
    return 6.0 * (weights * tokens + attention)


def random_ids(shape: tuple[int, ...], vocab_size: int, options: Options) -> Tensor:
    return torch.randint(4, vocab_size, shape, device=options.device)


def pairs(config: Any, batch: int, source_len: int, target_len: int, options: Options) -> PairBatch:
    """Return random sentences on the CPU, where a run has them."""
    here = replace(options, device="cpu")
    source = random_ids((batch, source_len), config.source_vocab_size, here)
    target = random_ids((batch, target_len + 1), config.target_vocab_size, here)
    sizes = torch.full((batch,), source_len), torch.full((batch,), target_len + 1)
    return PairBatch(source, sizes[0], target, sizes[1], torch.arange(batch))


def segments(batch: int, length: int, vocab_size: int, options: Options) -> SegmentBatch:
    """Return random segments on the CPU."""
    ids = random_ids((batch, length + 1), vocab_size, replace(options, device="cpu"))
    lengths, resets = torch.full((batch,), length), torch.zeros(batch, dtype=torch.bool)
    return SegmentBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), lengths, resets, torch.arange(batch))


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
