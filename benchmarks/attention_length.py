"""Time to evaluate a token against how far back it looks: the table of Dai et al. 2019, sec. 4.5, on this machine.

All have 6 layers, d_model 256, 4 heads of 64, d_ff 1024, vocabulary 10,000; batch 1, float32, random weights. `length`
is the attention length: how many positions a token sees.

    memory            ours, a segment of 64 tokens at a time, with keys and values of `length` earlier positions
    memory, by token  ours, a token at a time, as in generation
    window            the preset vanilla-lm: the last `length` tokens are read again for each (Al-Rfou et al. 2019)
    cached vanilla    GPT-2 of `transformers`, `use_cache`, a token at a time; its positions are absolute, so when its
                      window is full it must be read again, which is not counted here

    python benchmarks/attention_length.py --out benchmarks/DATE-attention-length

Needs matplotlib for the picture, and transformers 4.35.2 for the last column (left out, and said, where it is missing).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from manyheads.catalogue import build_model
from manyheads.cli.process import set_up_machine
from manyheads.models.transformer_xl.config import PRESETS, Attending

VOCAB = 10_000
LENGTHS = (400, 800, 1800, 2800, 3800)
SEGMENT = 64
ROUNDS = 3

Step = Callable[[], None]


def with_memory(length: int, new_len: int) -> Step:
    """Ours, with a full memory; a call reads new_len tokens."""
    from dataclasses import replace

    model = build_model(replace(PRESETS["small"], vocab_size=VOCAB)).eval()
    # same_length: every token of a segment sees exactly as many positions
    state = model.start(1, Attending(memory_len=length, same_length=True))
    for start in range(0, length, 512):
        _, state = model.step(torch.randint(0, VOCAB, (1, min(512, length - start))), state)
    tokens = torch.randint(0, VOCAB, (1, new_len))

    def step() -> None:
        nonlocal state
        _, state = model.body(tokens, None, state)

    return step


def by_window(length: int) -> Step:
    """vanilla-lm: one reading of the window gives one token."""
    from dataclasses import replace

    model = build_model(replace(PRESETS["vanilla-lm"], vocab_size=VOCAB)).eval()
    tokens = torch.randint(0, VOCAB, (1, length))

    def step() -> None:
        model.body(tokens)

    return step


def cached_vanilla(length: int) -> Step | None:
    """GPT-2 with `length - 1` positions in its cache."""
    try:
        from transformers import GPT2Config, GPT2Model
    except ImportError:
        return None
    config = GPT2Config(vocab_size=VOCAB, n_positions=length, n_embd=256, n_layer=6, n_head=4, n_inner=1024)
    model = GPT2Model(config).eval()
    past = model(torch.randint(0, VOCAB, (1, length - 1)), use_cache=True).past_key_values
    token = torch.randint(0, VOCAB, (1, 1))

    def step() -> None:
        model(token, past_key_values=past, use_cache=True)

    return step


def seconds(step: Step, least: float = 1.5) -> float:
    """Median time of a call."""
    step()
    times: list[float] = []
    end = time.perf_counter() + least
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="PATH.json and PATH.png are written")
    options = parser.parse_args()
    torch.manual_seed(0)
    kinds: dict[str, tuple[Callable[[int], Step | None], int]] = {
        "memory": (lambda length: with_memory(length, SEGMENT), SEGMENT),
        "memory, by token": (lambda length: with_memory(length, 1), 1),
        "window": (by_window, 1),
        "cached vanilla": (cached_vanilla, 1),
    }
    rows: dict[int, dict[str, float]] = {}
    with torch.inference_mode():
        for length in LENGTHS:
            steps = {name: (make(length), tokens) for name, (make, tokens) in kinds.items()}
            found: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for name, (step, tokens) in steps.items():
                    if step is not None:
                        found.setdefault(name, []).append(1000 * seconds(step) / tokens)
            rows[length] = {name: statistics.median(times) for name, times in found.items()}
    missing = kinds.keys() - rows[LENGTHS[0]].keys()
    if missing:
        print(f"left out, since transformers is not installed: {', '.join(sorted(missing))}")
    names = [name for name in kinds if name not in missing]
    print("milliseconds a token; in brackets how many times as long as `memory`")
    print("| length | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for length, row in rows.items():
        cells = [f"{row[name]:.2f}" + ("" if i == 0 else f" ({row[name] / row[names[0]]:,.0f} x)") for i, name in
                 enumerate(names)]  # fmt: skip
        print(f"| {length:,} | " + " | ".join(cells) + " |", flush=True)
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        draw(rows, names, options.out.with_suffix(".png"))


def draw(rows: dict[int, dict[str, float]], names: list[str], path: Path) -> None:
    """Milliseconds a token against the attention length, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for name, marker in zip(names, "osD^", strict=False):
        axes.plot(list(rows), [row[name] for row in rows.values()], marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="attention length (tokens)", ylabel="milliseconds a token")
    axes.set_xticks(list(rows), [f"{length:,}" for length in rows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    set_up_machine()
    main()
