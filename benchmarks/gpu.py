"""Measures training and decoding on a GPU, side by side with peers. It needs torch and nothing else.

    python benchmarks/gpu.py --output gpu.json                  # all parts, those in gpu.json excepted
    python benchmarks/gpu.py --minutes 9 --output gpu.json      # the most important parts that fit, in their order
    python benchmarks/gpu.py xl --output gpu.json               # one part
    python benchmarks/gpu.py --device cpu --tiny --output a.json  # checks in seconds that every part runs

Every part runs in a process of its own for six minutes at most, and is written to the JSON file when it ends, so a
run that was cut off continues with the next part. In a part all sides compute in turn, A B A B, in one process. The
ratio of a round is the peer's time for one step divided by ours; the file has the median, the lowest and the highest.
The share of products is a side's matrix products per second (`_flops` counts them: full rectangles, nothing twice)
divided by the rate of a bf16 product of square matrices in the same round.
A step of ours is the step of a run: checks, clipping, update and the copy of the batch included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.models.reformer import config as reformers
from manyheads.models.reformer.model import build as build_reformer
from manyheads.models.transformer import config as transformers
from manyheads.models.transformer.model import build as build_transformer
from manyheads.models.transformer_xl import config as xls
from manyheads.models.transformer_xl.model import build as build_xl
from manyheads.nn.attention.local import local_attention
from manyheads.nn.attention.lsh import LSHSettings, lsh_attention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.relative import relative_attention
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.run.step import TrainStep
from manyheads.training.settings import OptimiserSettings, TrainingSettings

PART_SECONDS = 360
FIRST = [
    "ceilings",
    "correct",
    "profile-base",
    "profile-demo",
    "profile-xl",
    "base-real",
    "demo",
    "xl",
    "decode-greedy",
]
FIRST += ["reformer-64k"]


@dataclass(frozen=True)
class Options:
    """device: `cuda` or `cpu`. tiny: smallest sizes and one round. seconds: of a turn. rounds: of each part."""

    device: str
    tiny: bool
    seconds: float
    rounds: int

    @property
    def measured(self) -> dict[str, Any]:
        return {"device": self.device, "tiny": self.tiny, "seconds": self.seconds, "rounds": self.rounds}


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training and decoding on a GPU, beside peers.")
    parser.add_argument("parts", nargs="*", help=f"which parts (all): {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the parts in it are not run again")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, one round: checks that all parts run")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a turn (3)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a part (5), fewer where time is short")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--minutes", type=float, help="begin no part after this; without parts: the most important ones, in order"
    )
    given = parser.parse_args()
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; use a machine with one, or check the script by --device cpu --tiny")
    options = Options(given.device, given.tiny, 0.0 if given.tiny else given.seconds, 1 if given.tiny else given.rounds)
    names = given.parts or (FIRST if given.minutes else list(PARTS))
    if given.in_this_process:
        given.output.write_text(json.dumps(PARTS[names[0]](options)), encoding="utf-8")
        return 0
    return _run(names, options, given.output, 60 * given.minutes if given.minutes else math.inf)


def _run(names: Iterable[str], options: Options, output: Path, seconds: float = math.inf) -> int:
    """Run the parts that the file does not hold; write the file after each. Returns the exit code.

    Args: seconds: a part ends with them, and none begins in the last twenty.
    """
    end = time.monotonic() + seconds
    machine = {**_machine(options), **options.measured}
    record: dict[str, Any] = {"machine": machine, "parts": {}}
    if output.exists():
        record = json.loads(output.read_text(encoding="utf-8"))
        different = [name for name in machine if name != "date" and record["machine"].get(name) != machine[name]]
        if different:
            print(f"{output} holds results with another {different[0]}; give another --output.", file=sys.stderr)
            return 2
    failed = False
    for name in names:
        if "error" not in record["parts"].get(name, {"error": ""}):
            print(f"{name}: already in {output}")
            continue
        left = min(PART_SECONDS, end - time.monotonic())
        if left < 20:
            print(f"{name}: left out, the time is over")
            continue
        record["parts"][name] = part = _in_a_process(name, options, left)
        _write(output, record)
        failed |= "error" in part
        for line in _lines(part):
            print(f"{name}: {line}", flush=True)
    return int(failed)


def _in_a_process(name: str, options: Options, limit: float) -> dict[str, Any]:
    """A part's result; where the process failed or took too long, `error` says so."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "part.json"
        command = [sys.executable, __file__, name, "--in-this-process", "--output", str(answer)]
        command += ["--device", options.device, "--seconds", str(options.seconds), "--rounds", str(options.rounds)]
        command += ["--tiny"] * options.tiny
        began = time.monotonic()
        # A session of its own, so that the processes that a part starts end with it.
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"error": f"took longer than {limit:.0f} seconds"}
        if process.returncode or not answer.exists():
            return {"error": (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
        part: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return {**part, "wall_seconds": round(time.monotonic() - began, 1)}


def _write(output: Path, record: dict[str, Any]) -> None:
    """In one piece: a run that is cut off leaves the file as it was."""
    beside = output.with_name(output.name + ".new")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    beside.replace(output)


def _machine(options: Options) -> dict[str, Any]:
    cuda = options.device == "cuda"
    return {
        "name": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "count": torch.cuda.device_count() if cuda else 1,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def _lines(part: dict[str, Any]) -> list[str]:
    """For people."""
    if "error" in part or "skipped" in part:
        return [part.get("error") or f"left out: {part['skipped']}"]
    lines = [f"{name}: {text}" for name, text in part.get("facts", {}).items()]
    for name, side in part.get("sides", {}).items():
        if "error" in side:
            lines.append(f"{name}: {side['error']}")
            continue
        share = f", {side['share_of_products']['median']:.0%} of the products" if "share_of_products" in side else ""
        tokens = f", {side['tokens_per_second']['median']:,.0f} tokens/s" if "tokens_per_second" in side else ""
        lines.append(f"{name}: {side['step_seconds']['median'] * 1e3:.2f} ms a step{tokens}{share}")
    for pair, ratio in part.get("ratios", {}).items():
        lines.append(f"{pair}: {ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})")
    return lines


# Measuring.


def _compare(makers: dict[str, Maker], options: Options, *, products: bool = True) -> dict[str, Any]:
    """Build and warm up all sides, then let them compute in turn; a side that fails is left out with its error."""
    began = time.monotonic()
    sides: dict[str, Side] = {}
    found: dict[str, Any] = {}
    makers = {**({"bf16 products": lambda: _products(options)} if products else {}), **makers}
    for name, make in makers.items():
        try:
            side = make()
            for _ in range(1 if options.tiny else 3):
                side.step()
            _wait(options)
            sides[name] = side
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        # At least one round; then another one only if it ends in time.
        if number and (time.monotonic() - began) * (number + 1) / number > PART_SECONDS - 30:
            break
        for name, side in sides.items():
            times[name].append(_turn(side, options))
    found.update({name: _figures(side, times[name], sides, times) for name, side in sides.items()})
    ratios = {
        f"{one} / {other}": _spread([b / a for a, b in zip(times[one], times[other], strict=True)])
        for one, side in sides.items()
        for other, peer in sides.items()
        if side.ours and not peer.ours and other != "bf16 products"
    }
    return {"sides": found, "ratios": ratios}


def _turn(side: Side, options: Options) -> float:
    """Seconds of a step: as many steps as fit the turn, the device waited for at its ends."""
    _wait(options)
    began, steps, batch = time.perf_counter(), 0, 1
    while True:
        for _ in range(batch):
            side.step()
        _wait(options)
        steps += batch
        spent = time.perf_counter() - began
        if spent >= options.seconds:
            return spent / steps
        batch = max(1, min(4 * batch, int((options.seconds - spent) / (spent / steps))))


def _wait(options: Options) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def _figures(side: Side, own: list[float], sides: dict[str, Side], times: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"step_seconds": _spread(own)}
    if side.tokens:
        figures["tokens_per_second"] = _spread([side.tokens / seconds for seconds in own])
    if side.flops:
        figures["flops_per_second"] = _spread([side.flops / seconds for seconds in own])
    rates = sides.get("bf16 products")
    if side.flops and rates is not None and side is not rates:
        of_rounds = zip(own, times["bf16 products"], strict=True)
        figures["share_of_products"] = _spread([side.flops / one / (rates.flops / other) for one, other in of_rounds])
    return figures


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "rounds": len(values)}


# Sides.


def _products(options: Options) -> Side:
    size = 64 if options.tiny else 8192 if options.device == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=options.device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return Side("bf16 products", lambda: torch.mm(a, b, out=out), flops=2.0 * size**3)


def _training(
    name: str, model: nn.Module, loss: Callable[[], Tensor], options: Options, tokens: int, flops: float, ours: bool
) -> Side:
    """Forward and backward pass in bf16 autocast, clipping, one read, fused AdamW on float32 weights: for peers."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with policy.fast(), torch.autocast(options.device, dtype=torch.bfloat16):
            value = loss()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(float(norm)):
            raise FloatingPointError("the gradient is not finite")
        optimizer.step()
        optimizer.zero_grad()

    return Side(name, step, tokens, flops, ours)


def _train_step(model: nn.Module, options: Options, muon: bool = False) -> TrainStep:
    kind: Any = "muon" if muon else "adamw"
    optimiser = OptimiserSettings(name=kind, clip_norm=1.0)
    config: Any = SimpleNamespace(precision="bf16", seed=1, optimiser=optimiser, training=TrainingSettings())
    return TrainStep(model, build_optimiser(model, optimiser), config, torch.device(options.device))


def _of_a_run(
    model: nn.Module,
    batches: list[Any],
    options: Options,
    tokens: int,
    flops: float,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    muon: bool = False,
) -> Side:
    """The step of `manyheads train`: checks, clipping and update included; batches come from the CPU, in turn."""
    train_step, turn = _train_step(model, options, muon), itertools.count(1)

    def step() -> None:
        number = next(turn)
        with policy.fast(), inside():
            result = train_step.run([batches[number % len(batches)]], number, 1e-4)
        assert result.fault is None, result.fault

    return Side("ours", step, tokens, flops, ours=True)


BOTH: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ours, plain": nullcontext,
    "ours, fewer launches": policy.saving_launches,
}


class _TorchTransformer(nn.Module):
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


class _Decoder(nn.Module):
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


def _flops(model: nn.Module, tokens: int, attention: float, looked_up: Iterable[Tensor] = ()) -> float:
    """Products of a training step: six for each weight of a matrix and token, and those of attention.

    attention: multiply-adds of the scores and of the weighted sums, forward. looked_up: tables that no product reads.
    """
    tables = {id(table) for table in looked_up}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in tables)
    return 6.0 * (weights * tokens + attention)


def _ids(shape: tuple[int, ...], vocab_size: int, options: Options) -> Tensor:
    return torch.randint(4, vocab_size, shape, device=options.device)


# Parts.


def _pairs(config: Any, batch: int, length: int, options: Options) -> PairBatch:
    """On the CPU, where a run has them."""
    here = replace(options, device="cpu")
    source = _ids((batch, length), config.source_vocab_size, here)
    target = _ids((batch, length + 1), config.target_vocab_size, here)
    sizes = torch.full((batch,), length)
    return PairBatch(source, sizes, target, sizes + 1, torch.arange(batch))


def _transformer_config(size: str, options: Options) -> Any:
    vocab = 100 if options.tiny else 32_000
    config = transformers.PRESETS["debug" if options.tiny else "tiny" if size == "demo" else size]
    return replace(config, source_vocab_size=vocab, target_vocab_size=vocab)


def _transformer(size: str, options: Options, is_real: bool = False) -> dict[str, Any]:
    """Training on sentences of one length, without padding; is_real: of many lengths, padded to the longest."""
    config = _transformer_config(size, options)
    batch, length = (2, 8) if options.tiny else (64 if size == "big" else 128, 64)
    batches = [_pairs(config, batch, length, options)]
    if is_real:  # sentences of similar length together; their lengths spread as those of news do, 26 tokens on average
        draw = torch.Generator().manual_seed(1)
        lengths = torch.randn(64, generator=draw).mul(0.6).add(3.1).exp().long().clamp(4, length).tolist()
        batches = [_pairs(config, max(1, batch * length // one), one, options) for one in lengths[: 8 * batch]]
    on_device = [one.to(options.device) for one in batches]
    tokens = sum(one.target_input.numel() for one in batches) // len(batches)
    # Encoder, decoder and cross-attention: scores and sums, length x length x d_model each.
    layers = config.num_encoder_layers + 2 * config.num_decoder_layers
    attention = 2.0 * layers * batch * length**2 * config.d_model

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            model = build_transformer(config).to(options.device)
            flops = _flops(model, tokens, attention)
            return _of_a_run(model, batches, options, tokens, flops, inside, muon=size == "demo")

        return make

    def torch_transformer(compiled: bool) -> Maker:
        def make() -> Side:
            model: Any = _TorchTransformer(config, length).to(options.device)
            flops = _flops(model, tokens, attention)
            run, turn = torch.compile(model, dynamic=is_real) if compiled else model, itertools.cycle(on_device)

            def loss() -> Tensor:
                data = next(turn)
                out: Tensor = run(data.source, data.target_input, data.target_labels)
                return out

            return _training("nn.Transformer", model, loss, options, tokens, flops, ours=False)

        return make

    def marian() -> Side:
        from transformers import MarianConfig, MarianMTModel

        model = MarianMTModel(
            MarianConfig(
                vocab_size=config.target_vocab_size,
                d_model=config.d_model,
                encoder_layers=config.num_encoder_layers,
                decoder_layers=config.num_decoder_layers,
                encoder_attention_heads=config.num_heads,
                decoder_attention_heads=config.num_heads,
                encoder_ffn_dim=config.d_ff,
                decoder_ffn_dim=config.d_ff,
                dropout=config.dropout,
                activation_function="relu",
                max_position_embeddings=max(length, 64),
                pad_token_id=0,
                eos_token_id=1,
                decoder_start_token_id=2,
                forced_eos_token_id=1,
                scale_embedding=True,
            )
        ).to(options.device)

        turn = itertools.cycle(on_device)

        def loss() -> Tensor:
            data = next(turn)
            logits = model(input_ids=data.source, decoder_input_ids=data.target_input, use_cache=False).logits
            labels = data.target_labels.flatten()
            return F.cross_entropy(logits.flatten(0, 1).float(), labels, label_smoothing=0.1)

        flops = _flops(model, tokens, attention)
        return _training("MarianMT", model, loss, options, tokens, flops, ours=False)

    makers: dict[str, Maker] = {name: ours(inside) for name, inside in BOTH.items()}
    makers["nn.Transformer"] = torch_transformer(False)
    if not options.tiny:
        makers["nn.Transformer, compiled"] = torch_transformer(True)
    return _compare({**makers, "MarianMT": marian}, options)


def _segments(batch: int, length: int, vocab_size: int, options: Options) -> SegmentBatch:
    ids = _ids((batch, length + 1), vocab_size, options)
    lengths = torch.full((batch,), length, device=options.device)
    resets = torch.zeros(batch, dtype=torch.bool, device=options.device)
    rows = torch.arange(batch, device=options.device)
    return SegmentBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), lengths, resets, rows)


def _xl(options: Options) -> dict[str, Any]:
    """The base model for enwik8 with a full memory, by each implementation of relative attention."""
    preset = xls.PRESETS["debug"] if options.tiny else xls.PRESETS["enwik8-base"]
    # The decoder has no dropout, so no side has.
    config = replace(preset, vocab_size=32 if options.tiny else 204, dropout=0.0, attention_dropout=0.0)
    batch, length = (2, config.memory_len) if options.tiny else (22, 512)
    data = _segments(batch, length, config.vocab_size, options)
    tokens, inner = batch * length, config.num_heads * (config.head_dim or config.d_model // config.num_heads)
    keys = length + config.memory_len
    # Scores by content and by distance, and the sums of values.
    attention = 3.0 * config.num_layers * batch * length * keys * inner

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            model = build_xl(config).to(options.device)
            return _of_a_run(model, [data], options, tokens, _flops(model, tokens, attention), inside)

        return make

    def decoder() -> Side:
        width = (config.d_model, config.num_heads, config.d_ff, config.num_layers, config.vocab_size, length)
        model = _Decoder(*width).to(options.device)
        products = 2.0 * config.num_layers * batch * length**2 * config.d_model
        flops = _flops(model, tokens, products, [model.embedding.weight, model.positions])
        loss = lambda: model(data.tokens, data.targets)  # noqa: E731
        return _training("SDPA decoder", model, loss, options, tokens, flops, ours=False)

    makers = {name: ours(inside) for name, inside in BOTH.items()}
    if policy.triton_lack(torch.device(options.device), torch.bfloat16) is None:
        makers["ours, Triton"] = ours(policy.using_triton)
    return _compare({**makers, "SDPA decoder without memory": decoder}, options)


def _reformer(length: int, options: Options) -> dict[str, Any]:
    """One sequence a step; beside it exact attention of the same widths."""
    if options.tiny:
        config = replace(reformers.PRESETS["debug"], vocab_size=32)
        length = config.max_len
    else:
        config = replace(reformers.PRESETS["small"], vocab_size=256, max_len=length)
    data = _segments(1, length, config.vocab_size, options)

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        return lambda: _of_a_run(build_reformer(config).to(options.device), [data], options, length, 0.0, inside)

    def decoder() -> Side:
        width = (config.d_model, config.num_heads, config.d_ff, config.num_layers, config.vocab_size, length)
        model = _Decoder(*width).to(options.device)
        products = 2.0 * config.num_layers * length**2 * config.d_model
        flops = _flops(model, length, products, [model.embedding.weight, model.positions])
        loss = lambda: model(data.tokens, data.targets)  # noqa: E731
        return _training("SDPA decoder", model, loss, options, length, flops, ours=False)

    makers = {name: ours(inside) for name, inside in BOTH.items()}
    return _compare({**makers, "SDPA decoder": decoder}, options)


def _ceilings(options: Options) -> dict[str, Any]:
    """Products, copies in memory (bytes/s are 2 x its bytes) and a launch: what no step can pass."""
    size = 1 << (10 if options.tiny else 28)
    one = torch.zeros(size, device=options.device)
    other, small = torch.empty_like(one), torch.zeros(1, device=options.device)
    made: dict[str, Maker] = {
        "copy": lambda: Side("copy", lambda: other.copy_(one), tokens=2 * one.nbytes),
        "launch": lambda: Side("launch", lambda: small.add_(1)),
    }
    return _compare(made, options)


def _profile(name: str, options: Options) -> dict[str, Any]:
    """Kernels of a step, the share of time in which the device computes, its longest kernels, and waits."""
    if name == "xl":
        config: Any = replace(xls.PRESETS["debug" if options.tiny else "enwik8-base"], vocab_size=204)
        model: nn.Module = build_xl(config).to(options.device)
        batch: Any = _segments(2 if options.tiny else 22, 8 if options.tiny else 512, 204, options)
    else:
        config = _transformer_config(name, options)
        model = build_transformer(config).to(options.device)
        batch = _pairs(config, *((2, 8) if options.tiny else (128, 64)), options)
    side, steps = _of_a_run(model, [batch], options, 0, 0.0, muon=name == "demo"), 2 if options.tiny else 10
    for _ in range(3):
        side.step()
    _wait(options)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + (options.device != "cpu")]
    with torch.profiler.profile(activities=kinds) as profile:
        began = time.perf_counter()
        for _ in range(steps):
            side.step()
        _wait(options)
        spent = time.perf_counter() - began
    on_device = [one for one in profile.events() if one.device_type != torch.autograd.DeviceType.CPU]
    by_name: dict[str, float] = {}
    for one in on_device:
        by_name[one.name] = by_name.get(one.name, 0.0) + one.time_range.elapsed_us() / steps
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:10]
    waits = sum("Synchronize" in one.name or one.name == "aten::_local_scalar_dense" for one in profile.events())
    facts = {
        "ms a step, profiled": round(1e3 * spent / steps, 3),
        "kernels a step": len(on_device) / steps,
        "busy share": round(sum(by_name.values()) * steps / 1e6 / spent, 3),
        "waits a step": waits / steps,
    }
    return {"facts": {**facts, **{f"us in {kernel[:80]}": round(us, 1) for kernel, us in longest}}}


def _correct(options: Options) -> dict[str, Any]:
    """Errors against float64, and against those of the formula in the same type; any above its limit fails the part."""
    torch.manual_seed(0)
    device, facts, failed = torch.device(options.device), {}, []
    has_triton = policy.triton_lack(device, torch.bfloat16) is None
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "default": policy.fast, "fewer launches": lambda: _both(policy.fast(), policy.saving_launches()),
    }  # fmt: skip
    if has_triton:
        ways["Triton"] = lambda: _both(policy.fast(), policy.using_triton())
    else:
        facts["Triton"] = f"left out: it {policy.triton_lack(device, torch.bfloat16)}"

    def compare(what: str, run: Callable[..., Tensor], given: list[Tensor]) -> None:
        def results(inputs: list[Tensor]) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = run(*leaves)
            factor = torch.sin(torch.arange(out.numel(), device=device)).view(out.shape)
            return [out.detach(), *torch.autograd.grad((out * factor.to(out.dtype)).sum(), leaves)]

        with policy.fast(False):
            true, rough = results([x.double() for x in given]), results(given)
        for way, inside in ways.items():
            with inside():
                found = results(given)
            for number, (mine, plain, exact) in enumerate(zip(found, rough, true, strict=True)):
                size = exact.norm().clamp(min=1e-30)
                error, allowed = ((x.double() - exact).norm() / size for x in (mine, plain))
                passed = bool(mine.isfinite().all()) and float(error) <= 2 * float(allowed) + 1e-3
                facts[f"{what}, {way}, {number or 'output'}"] = f"{float(error):.2e}, plain {float(allowed):.2e}"
                failed.extend([] if passed else [f"{what}, {way}, {number or 'output'}"])
            del found

    rows, heads, q_len, k_len, width = (2, 2, 8, 16, 8) if options.tiny else (22, 8, 512, 1024, 64)
    shapes = [(rows, heads, q_len, width), (rows, heads, k_len, width), (rows, heads, k_len, width)]
    shapes += [(heads, k_len, width), (heads, width), (heads, width)]
    given = [torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes]
    compare("relative attention", relative_attention, given)
    shape = (2, heads, 40 if options.tiny else 16_384, width)
    given = [torch.randn(shape, device=device).bfloat16() for _ in range(3)]
    compare("local attention", partial(local_attention, chunk_len=16 if options.tiny else 128), given)
    hashing = LSHSettings(chunk_len=8 if options.tiny else 64)
    buckets = torch.randint(0, 4 if options.tiny else 256, (*shape[:2], 4, shape[2]), device=device)
    compare("hashed attention", partial(lsh_attention, buckets=buckets, settings=hashing), given[:2])
    del given
    tokens, size, vocab = (8, 16, 50) if options.tiny else (8192, 512, 32_000)
    head = LinearHead(size, vocab, bias=False).to(device)
    targets = torch.randint(1, vocab, (1, tokens), device=device)
    keep = torch.arange(tokens, device=device)[None] % 7 > 0

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        call = lambda *inputs: head.loss(*inputs, label_smoothing=0.1)  # noqa: E731
        found: Tensor = _with_weight(head, weight, lambda: call(hidden, targets, keep)[0])
        return found / tokens

    compare("loss", loss, [torch.randn(1, tokens, size, device=device).bfloat16(), head.weight.detach().bfloat16()])
    return {"facts": facts, **({"error": "wrong: " + "; ".join(failed)} if failed else {})}


def _with_weight(head: LinearHead, weight: Tensor, call: Callable[[], Tensor]) -> Tensor:
    before = head.weight
    del head._parameters["weight"]
    head.weight = weight  # type: ignore[assignment]
    try:
        return call()
    finally:
        del head.weight
        head.weight = before


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _decoding(options: Options) -> dict[str, Any]:
    """Greedy search in bfloat16 with random weights, every sentence to the full length; with and without `--compile`.

    A step of `Side` is one batch, whose tokens are all that it wrote.
    """
    config = _transformer_config("base", options)
    batch, source_len, length = (2, 5, 4) if options.tiny else (64, 32, 64)
    torch.manual_seed(0)
    model = build_transformer(config).to(options.device, torch.bfloat16).eval()
    source = _ids((batch, source_len), config.source_vocab_size, options)
    lengths = torch.full((batch,), source_len, device=options.device)

    def search(steps: Any) -> Tensor:
        tokens = torch.full((batch, 1), 2, device=options.device)
        state = steps.start(source, lengths)
        written = []
        for _ in range(length):
            log_probs, state = steps.step(tokens, state)
            tokens = log_probs.argmax(dim=-1, keepdim=True)
            written.append(tokens)
        return torch.cat(written, dim=1)

    def make(compiled: bool) -> Maker:
        def made() -> Side:
            steps: Any = model
            if compiled:
                from manyheads.decoding.compiled import CompiledSteps

                steps = CompiledSteps(model)
            step = torch.no_grad()(lambda: search(steps))
            return Side("greedy", step, batch * length, 0.0, ours=compiled)

        return made

    return _compare({"compiled steps": make(True), "eager steps": make(False)}, options)


def _ddp(options: Options) -> dict[str, Any]:
    """The base model on one GPU alone and on all of them, in turn, with the same batch on each."""
    ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    if ranks < 2:
        return {"skipped": "this machine has one GPU"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, options, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads((Path(folder) / "rank0.json").read_text(encoding="utf-8"))
    return found


def _rank(rank: int, ranks: int, options: Options, folder: str) -> None:
    """One process of `_ddp`; the first writes the result."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    init = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("nccl" if cuda else "gloo", init_method=init, rank=rank, world_size=ranks)
    try:
        config = _transformer_config("base", options)
        batch, length = (2, 8) if options.tiny else (128, 64)
        data = _pairs(config, batch, length, options).to(options.device)
        models = {"one GPU": build_transformer(config).to(options.device)}
        together = build_transformer(config).to(options.device)
        models[f"{ranks} GPUs"] = nn.parallel.DistributedDataParallel(together, device_ids=[rank] if cuda else None)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        steps, sides = 1 if options.tiny else 40, {}
        for name, model in models.items():

            def loss(model: nn.Module = model) -> Tensor:
                output = model(data, label_smoothing=0.1)
                loss: Tensor = output.loss_sum / output.num_tokens
                return loss

            sides[name] = _training(name, model, loss, options, batch * length, 0.0, ours=False)
        for number in range(options.rounds + 1):  # the first one warms up
            for name, side in sides.items():
                dist.barrier()
                _wait(options)
                began = time.perf_counter()
                if rank == 0 or name != "one GPU":
                    for _ in range(steps):
                        side.step()
                _wait(options)
                if number or options.tiny:
                    seconds[name].append((time.perf_counter() - began) / steps)
        if rank == 0:
            alone, all_of_them = seconds["one GPU"], seconds[f"{ranks} GPUs"]
            found = {
                "sides": {
                    name: {
                        "step_seconds": _spread(seconds[name]),
                        "tokens_per_second": _spread([count * batch * length / one for one in seconds[name]]),
                    }
                    for name, count in zip(models, (1, ranks), strict=True)
                },
                "ratios": {
                    f"{ranks} GPUs / one GPU": _spread([ranks * a / b for a, b in zip(alone, all_of_them, strict=True)])
                },
            }
            (Path(folder) / "rank0.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "ceilings": _ceilings,
    "correct": _correct,
    "profile-base": lambda options: _profile("base", options),
    "profile-demo": lambda options: _profile("demo", options),
    "profile-xl": lambda options: _profile("xl", options),
    "base": lambda options: _transformer("base", options),
    "base-real": lambda options: _transformer("base", options, is_real=True),
    "demo": lambda options: _transformer("demo", options),
    "big": lambda options: _transformer("big", options),
    "xl": _xl,
    "reformer-16k": lambda options: _reformer(16_384, options),
    "reformer-64k": lambda options: _reformer(65_536, options),
    "reformer-256k": lambda options: _reformer(262_144, options),
    "decode-greedy": _decoding,
    "ddp": _ddp,
}
"""Every part returns `sides` and `ratios`, or `facts`, or `skipped` with the reason; `error` if it failed."""

if __name__ == "__main__":
    sys.exit(main())
