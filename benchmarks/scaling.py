"""What training on many machines would take: memory, communication and time a step, computed from stated rates.

Nothing here was measured on such machines. Rates are those of the makers' data sheets times a share that is said; the
counts of parameters are those of our models, built without memory.

    python benchmarks/scaling.py            # the tables of docs/scaling.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from manyheads.catalogue import build_model
from manyheads.models.transformer import config as transformers
from manyheads.models.transformer_xl import config as xls

BYTES = 4  # of a weight, a gradient, a moment: float32


@dataclass(frozen=True)
class Machine:
    """One kind of accelerator.

    flops: products a second, bf16. share: of them that training reaches. link_bytes: a second and rank, within a node
    and between nodes. memory_bytes: of one.
    """

    name: str
    flops: float
    share: float
    within: float
    between: float
    memory_bytes: float
    per_node: int


CPU = Machine("2 cores with AMX", 1.0e12, 0.25, 5e9, 1.25e8, 16e9, 1)
A100 = Machine("A100 40 GB", 312e12, 0.35, 300e9, 25e9, 40e9, 8)
H100 = Machine("H100 80 GB", 989e12, 0.35, 450e9, 50e9, 80e9, 8)


@dataclass(frozen=True)
class Task:
    """A training run.

    tokens: of one optimiser step, that are predicted. steps: in all. flops: a step, products alone, forward and
    backward. weights: how many. kept_bytes: activations of a token, about.
    """

    name: str
    weights: int
    tokens: int
    steps: int
    flops: float
    kept_bytes: float


def count(config: Any) -> int:
    """Parameters of a model, tied ones once."""
    with torch.device("meta"):
        model = build_model(config)
    return sum(parameter.numel() for parameter in model.parameters())


def wmt14_big() -> Task:
    """Vaswani et al. 2017, sec. 5: 37,000 shared pieces, 25,000 source and 25,000 target tokens a step, 300,000 steps.

    Products: 6 for each weight and token that meets it (2 forward, 4 backward), sentences of about 30 tokens, so those
    of attention itself are left out (2%).
    """
    config = replace(transformers.PRESETS["big"], source_vocab_size=37_000, target_vocab_size=37_000)
    total, width = count(config), config.d_model
    layer = 4 * width**2 + 2 * width * config.d_ff  # of an encoder; a decoder has another attention
    encoder, decoder = config.num_encoder_layers * layer, config.num_decoder_layers * (layer + 4 * width**2)
    tokens = 25_000
    flops = 6.0 * tokens * (encoder + decoder + 37_000 * width)
    kept = 2.0 * width * (12 * config.num_encoder_layers + 18 * config.num_decoder_layers) + 4.0 * config.d_ff * 12
    return Task("Transformer big, WMT14", total, tokens, 300_000, flops, kept)


def billion_xl() -> Task:
    """A Transformer-XL of 24 layers (enwik8 large's sizes, 32,000 pieces) over 10^9 tokens, four times.

    64 lanes of 768 tokens a step, each of which sees 768 + 768 positions: attention's own products count here.
    """
    config = replace(xls.PRESETS["enwik8-large"], vocab_size=32_000)
    lanes, length = 64, 768
    seen = config.memory_len + length / 2
    width, inner = config.d_model, config.num_heads * config.width_of_heads
    # Keys and values of memory are projected again; distances once a layer, whatever the number of lanes.
    layer = 2 * width * inner + 2 * width * inner * (1 + config.memory_len / length) + 2 * width * config.d_ff
    pairs = 3 * inner * seen  # content, position and values
    tokens = lanes * length
    flops = 6.0 * tokens * (config.num_layers * (layer + pairs) + 32_000 * width)
    kept = config.num_layers * (
        2.0 * (14 * width + 2 * config.d_ff) + 2.0 * config.num_heads * (config.memory_len + length)
    )
    return Task("Transformer-XL, 10^9 tokens x 4", count(config), tokens, round(4e9 / tokens), flops, kept)


@dataclass(frozen=True)
class Estimate:
    """Of one rank, in bytes and seconds."""

    state_bytes: float
    activation_bytes: float
    sent_bytes: float
    compute_seconds: float
    sending_seconds: float
    hours: float

    @property
    def memory_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes


def estimate(task: Task, machine: Machine, ranks: int, parallel: str, accumulate: int = 1) -> Estimate:
    """What each of several ranks needs.

    Args: parallel: `ddp`: a rank holds weights, gradients and two moments, and sends and receives 2 (n - 1) / n of the
        gradients once a step. `fsdp`: a rank holds its share of those and a whole copy of the weights (for validation);
        weights travel twice (forward and backward) and gradients once, each (n - 1) / n, every micro-batch.
    """
    weights = BYTES * task.weights
    share = (ranks - 1) / ranks
    link = machine.within if ranks <= machine.per_node else machine.between
    if parallel == "ddp":
        state, sent = 4.0 * weights, 2 * share * weights
    else:
        state, sent = 4.0 * weights / ranks + weights, 3 * share * weights * accumulate
    compute = task.flops / ranks / (machine.flops * machine.share)
    sending = sent / link
    # DDP and FSDP send while they compute; what cannot be hidden behind it is taken to be a fifth.
    seconds = max(compute, sending) + 0.2 * min(compute, sending)
    kept = task.kept_bytes * task.tokens / ranks / accumulate
    return Estimate(state, kept, sent, compute, sending, task.steps * seconds / 3600)


PLANS: dict[str, Sequence[tuple[Machine, int, str, int]]] = {
    "wmt14": [
        (CPU, 1, "ddp", 25), (A100, 1, "ddp", 4), (A100, 8, "ddp", 1), (H100, 8, "ddp", 1), (H100, 32, "ddp", 1),
        (H100, 32, "fsdp", 1),
    ],
    "billion": [
        (A100, 1, "ddp", 16), (A100, 8, "ddp", 2), (A100, 8, "fsdp", 2), (H100, 8, "ddp", 1), (H100, 64, "ddp", 1),
    ],
}  # fmt: skip


def table(task: Task, plans: Sequence[tuple[Machine, int, str, int]]) -> list[str]:
    """A table in Markdown."""
    columns = (
        "ranks",
        "parallel",
        "accumulate",
        "state",
        "activations",
        "sent a step",
        "computing",
        "sending",
        "whole run",
    )
    lines = [f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * (len(columns) - 2)]
    for machine, ranks, parallel, accumulate in plans:
        one = estimate(task, machine, ranks, parallel, accumulate)
        sizes = (one.state_bytes, one.activation_bytes, one.sent_bytes)
        cells = [f"{ranks} x {machine.name}", parallel if ranks > 1 else "-", str(accumulate)]
        cells += [f"{size / 1e9:.1f} GB" for size in sizes]
        cells += [f"{1e3 * seconds:,.0f} ms" for seconds in (one.compute_seconds, one.sending_seconds)]
        lines.append(f"| {' | '.join(cells)} | {one.hours:,.1f} h |")
    return lines


def page() -> list[str]:
    """All that docs/scaling.md quotes."""
    lines = []
    for task, name in ((wmt14_big(), "wmt14"), (billion_xl(), "billion")):
        lines.append(
            f"{task.name}: {task.weights / 1e6:,.0f}M parameters, {task.tokens:,} predicted tokens a step,"
            f" {task.steps:,} steps, {task.flops / 1e12:,.1f} TFLOP a step."
        )
        lines += ["", *table(task, PLANS[name]), ""]
    return lines


if __name__ == "__main__":
    print("\n".join(page()))
