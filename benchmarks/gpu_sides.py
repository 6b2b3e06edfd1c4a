"""How `gpu.py` measures sides, and our own side: the step of a run."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
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
    with the sides that torch compiles. limit: seconds of a part. only: build this side and measure nothing, so that
    what it compiles is kept for later. partial: the file into which go the figures after each round.
    """

    device: str
    tiny: bool
    seconds: float
    rounds: int
    compiles: bool = True
    limit: float = PART_SECONDS
    only: str = ""
    partial: str = ""

    @property
    def measured(self) -> dict[str, Any]:
        """What must be equal in all parts of a file."""
        return {name: getattr(self, name) for name in ("device", "tiny", "seconds", "rounds", "compiles")}

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; float32 where Triton kernels are interpreted, which cannot compute in bfloat16."""
        return torch.float32 if os.environ.get("TRITON_INTERPRET") == "1" else torch.bfloat16


@dataclass
class Side:
    """One implementation.

    step: computes one step without waiting for the device. tokens: of a step. flops: of the products of a step; 0: not
    counted. ours: whether it is compared with the peers. cycle: after so many steps the batches begin again; the side
    warms up with all of them, and a turn has each equally often.
    """

    name: str
    step: Callable[[], Any]
    tokens: int = 0
    flops: float = 0.0
    ours: bool = False
    cycle: int = 1


Maker = Callable[[], Side]
PRODUCTS = "bf16 products"


def report(text: str) -> None:
    print(f"  {text}", flush=True)


def reason(error: BaseException) -> str:
    """Return one line for an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def missing(error: BaseException) -> str:
    """Return the module, or the variable, whose absence an error tells; empty: it tells something else."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ImportError):
        cause = cause.__cause__
    name = (cause.name if cause is not None else None) or ""
    return "" if is_there(name) else name


def is_there(name: str) -> bool:
    """Return whether a module can be found now, or a variable of that name is set."""
    return not name or name in os.environ or find_spec(name.partition(".")[0]) is not None


# Measuring.


def compare(makers: dict[str, Maker], options: Options, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Build and warm up all sides, then let them compute in turn; a side that fails is left out with its error.

    Args: before: the result of another call, to which this one's is added.
    """
    began = time.monotonic()
    makers = {PRODUCTS: lambda: products(options), **makers}
    if options.only:
        makers = {options.only: makers[options.only]}
    before = before or {"sides": {}, "ratios": {}}
    sides, errors = _built(makers, options, began, before)
    times: dict[str, list[float]] = {name: [] for name in sides}
    found = before
    for number in range(0 if options.only else options.rounds):
        round_began = time.monotonic()
        for name, side in sides.items():
            times[name].append(_turn(side, options))
        found = _joined(before, _figures(sides, times, errors))
        _keep(found, options)
        last = (f"{name} {1e3 * own[-1]:.2f}" for name, own in times.items())
        report(f"round {number + 1} of {options.rounds}, ms: {', '.join(last)}")
        now = time.monotonic()
        if now - began + (now - round_began) > options.limit and number + 1 < options.rounds:
            report("no further round: it would not end in time")
            break
    return found if sides else _joined(before, {"sides": errors, "ratios": {}})


def _built(
    makers: dict[str, Maker], options: Options, began: float, before: dict[str, Any]
) -> tuple[dict[str, Side], dict[str, Any]]:
    """Return the sides that work, and for the others the reason."""
    sides: dict[str, Side] = {}
    errors: dict[str, Any] = {}
    for name, make in makers.items():
        if len(sides) > 1 and time.monotonic() - began > options.limit / 2:
            errors[name] = {"error": "left out: to build the sides before it took half of the time"}
            report(f"{name}: {errors[name]['error']}")
            continue
        now = time.monotonic()
        _keep(_joined(before, {"sides": errors, "ratios": {}, "building": name}), options)
        try:
            side = make()
            for _ in range(max(1 if options.tiny else 3, side.cycle)):
                side.step()
            wait(options)
            sides[name] = side
            report(f"{name}: ready after {time.monotonic() - now:.1f} s")
        except Exception as error:
            errors[name] = {"error": reason(error)} | ({"missing": name_of} if (name_of := missing(error)) else {})
            report(f"{name}: {reason(error)}")
        if name in errors and options.device == "cuda":  # without what the error held, the next side has its memory
            gc.collect()
            torch.cuda.empty_cache()
    return sides, errors


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**one, **other, **{kind: {**one[kind], **other[kind]} for kind in ("sides", "ratios")}}


def _keep(found: dict[str, Any], options: Options) -> None:
    if options.partial:
        beside = Path(f"{options.partial}.new")
        beside.write_text(json.dumps(found), encoding="utf-8")
        beside.replace(options.partial)


def _turn(side: Side, options: Options) -> float:
    """Seconds of a step: as many steps as fit the turn, the device waited for at its ends."""
    wait(options)
    began, steps, batch = time.perf_counter(), 0, side.cycle
    while True:
        for _ in range(batch):
            side.step()
        wait(options)
        steps += batch
        spent = time.perf_counter() - began
        if spent >= options.seconds:
            return spent / steps
        cycles = int((options.seconds - spent) / (spent / steps)) // side.cycle
        batch = side.cycle * max(1, min(4 * batch // side.cycle, cycles))


def wait(options: Options) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def _figures(sides: dict[str, Side], times: dict[str, list[float]], errors: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of every side, and of ours the ratio to each peer and to the best one."""
    found = {name: _figures_of(side, times[name], sides, times) for name, side in sides.items()}
    each = {  # seconds of a token, or of a step where tokens are not counted
        name: [seconds / max(1, side.tokens) for seconds in times[name]] for name, side in sides.items()
    }
    ratios = {
        f"{one} / {other}": spread([b / a for a, b in zip(each[one], each[other], strict=True)])
        for one, side in sides.items()
        for other, peer in sides.items()
        if side.ours and not peer.ours and other != PRODUCTS
    }
    peers = [name for name, side in sides.items() if not side.ours and name != PRODUCTS]
    best = min(peers, key=lambda name: statistics.median(each[name]), default=None)
    for name, side in sides.items():
        if side.ours and best is not None:
            found[name]["of_best_peer"] = {"peer": best, **ratios[f"{name} / {best}"]}
    return {"sides": {**found, **errors}, "ratios": ratios}


def _figures_of(side: Side, own: list[float], sides: dict[str, Side], times: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"step_seconds": spread(own)}
    if side.tokens:
        figures["tokens_per_second"] = spread([side.tokens / seconds for seconds in own])
    if side.flops:
        figures["flops_per_second"] = spread([side.flops / seconds for seconds in own])
    rates = sides.get(PRODUCTS)
    if side.flops and rates is not None and side is not rates:
        of_rounds = zip(own, times[PRODUCTS], strict=True)
        figures["share_of_products"] = spread([side.flops / one / (rates.flops / other) for one, other in of_rounds])
    return figures


def spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "rounds": len(values)}


# Sides.


def products(options: Options) -> Side:
    size = 64 if options.tiny else 8192 if options.device == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=options.device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return Side(PRODUCTS, lambda: torch.mm(a, b, out=out), flops=2.0 * size**3)


def training(
    name: str, model: nn.Module, loss: Callable[[], Tensor], options: Options, tokens: int, flops: float,
    cycle: int = 1, in_bf16: bool = True,
) -> Side:  # fmt: skip
    """Forward and backward pass in bf16 autocast, clipping, one read, fused AdamW on float32 weights: for peers.

    Args: in_bf16: False: in float32, with products in TF32.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with modes.tf32_products(not in_bf16 and options.device == "cuda"):
            with modes.fast(), torch.autocast(options.device, dtype=torch.bfloat16, enabled=in_bf16):
                value = loss()
            value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(float(norm)):
            raise FloatingPointError("the gradient is not finite")
        optimizer.step()
        optimizer.zero_grad()

    return Side(name, step, tokens, flops, cycle=cycle)


def of_layer(
    name: str, layer: nn.Module, run: Callable[[Tensor], Tensor], shape: tuple[int, int, int], options: Options,
    ours: bool = False,
) -> Side:  # fmt: skip
    """Forward and backward pass of one layer. shape: rows, length, width."""
    x = torch.randn(shape, device=options.device, dtype=options.dtype, requires_grad=True)
    factor, leaves = torch.randn_like(x), [x, *layer.parameters()]

    def step() -> None:
        with modes.fast():
            torch.autograd.grad(run(x), leaves, factor, allow_unused=True)

    return Side(name, step, shape[0] * shape[1], ours=ours)


# As in `tasks.translation.settings.demo`.
DEMO_OPTIMISER = OptimiserSettings(
    name="muon", learning_rate=6e-3, muon_learning_rate=0.02, weight_decay=0.1, clip_norm=1.0
)


def train_step(
    model: nn.Module, options: Options, optimiser: OptimiserSettings | None = None, precision: str | None = None
) -> TrainStep:
    """The step of a run with Adam, or with this optimiser. precision: bf16, or what `Options.dtype` allows."""
    optimiser = optimiser or OptimiserSettings(clip_norm=1.0)
    precision = precision or ("bf16" if options.dtype is torch.bfloat16 else "fp32")
    config: Any = SimpleNamespace(precision=precision, seed=1, optimiser=optimiser, training=TrainingSettings())
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
    runner, turn = train_step(model, options, DEMO_OPTIMISER if of_demo else None), itertools.count(1)

    def step() -> None:
        number = next(turn)
        with modes.fast(), inside():
            result = runner.run([batches[number % len(batches)]], number, 1e-4)
        assert result.fault is None, result.fault

    return Side("ours", step, tokens, flops, ours=True, cycle=len(batches))


BOTH: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ours, plain": nullcontext,
    "ours, fewer launches": modes.saving_launches,
}


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
