"""Pictures and sound as bytes: small models on generated data, and their bits per dimension.

    python benchmarks/byte_models.py [--steps 200] [--folder byte-models]

Generated, not real: pictures of 16 x 16 x 3 with two colours that run into one another, and mu-law sound of 1,024
samples with two tones and noise. The commands are those for real files (docs/long-sequences.md, "Data other than
text"). Beside each model stands the entropy of single bytes, which a model without context reaches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import markdown_table

SIZE, SAMPLES, RATE = 16, 1024, 8000
LENGTHS = {"pictures": SIZE * SIZE * 3, "sound": SAMPLES}
COUNTS = {"train": 400, "valid": 40, "test": 40}


def pictures(random: np.random.Generator, count: int) -> np.ndarray:
    """Return (count, bytes of a picture): row by row, pixel by pixel, red, green, blue."""
    corners = random.integers(0, 256, (2, count, 1, 1, 3))
    angle = random.uniform(0, 2 * np.pi, (count, 1, 1))
    rows, columns = np.mgrid[:SIZE, :SIZE] / (SIZE - 1) - 0.5
    share = (0.5 + (np.cos(angle) * rows + np.sin(angle) * columns) / np.sqrt(2))[..., None]
    values = corners[0] * share + corners[1] * (1 - share) + random.normal(0, 2, (count, SIZE, SIZE, 3))
    return values.clip(0, 255).astype(np.uint8).reshape(count, -1)


def sound(random: np.random.Generator, count: int) -> np.ndarray:
    """Return (count, samples): mu-law with 256 levels."""
    time = np.arange(SAMPLES) / RATE
    pitch, phase = random.uniform(100, 800, (2, count, 1)), random.uniform(0, 2 * np.pi, (2, count, 1))
    wave = sum(0.4 * np.sin(2 * np.pi * pitch[tone] * time + phase[tone]) for tone in (0, 1))
    wave = np.clip(wave + random.normal(0, 0.01, (count, SAMPLES)), -1, 1)
    return ((np.sign(wave) * np.log1p(255 * np.abs(wave)) / np.log(256) + 1) * 127.5).round().astype(np.uint8)


def bits_of_bytes(data: np.ndarray) -> float:
    """Return the entropy of single bytes."""
    share = np.bincount(data.ravel(), minlength=256) / data.size
    return float(-(share[share > 0] * np.log2(share[share > 0])).sum())


def manyheads(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "manyheads", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def measure(kind: str, folder: Path, steps: int) -> list[str]:
    """Prepare, train and evaluate. Returns: a row of the table."""
    random, length = np.random.default_rng(0), LENGTHS[kind]
    data = (pictures if kind == "pictures" else sound)(random, sum(COUNTS.values()))
    folder.mkdir(parents=True, exist_ok=True)
    data.tofile(folder / "all.raw")
    held = [str(COUNTS[name] * length) for name in ("valid", "test")]
    manyheads(
        *("prepare", "--task", "lm", "--format", "bytes", "--vocab-size", "256", "--document-len", str(length)),
        *("--corpus", str(folder / "all.raw"), "--valid-bytes", held[0], "--test-bytes", held[1]),
        *("--output", str(folder / "data")),
    )
    axes = [SIZE, SIZE, 3] if kind == "pictures" else [32, 32]
    widths = [32, 32, 32] if kind == "pictures" else [48, 48]
    run = str(folder / "run")
    manyheads(
        *("train", "--preset", "reformer-debug", "--run-dir", run, "--data.path", str(folder / "data")),
        *("--data.documents", "separate", "--data.order", "shuffled", "--data.segment-len", str(length)),
        *("--reading.documents", "separate", "--reading.segment-len", str(length), "--reading.lanes", "4"),
        *("--data.lanes", "4", "--model.d-model", "96", "--model.d-ff", "256", "--model.num-layers", "2"),
        *("--model.max-len", str(length), "--model.positions", "axial", "--model.axial-shape", *map(str, axes)),
        *("--model.axial-dims", *map(str, widths), "--model.chunk-len", "32", "--training.max-steps", str(steps)),
        *("--training.max-minutes", "0", "--schedule.kind", "cosine", "--schedule.warmup-steps", str(steps // 10)),
        *("--optimiser.learning-rate", "2e-3", "--validation.every-steps", str(steps)),
    )
    [figures] = json.loads(manyheads("evaluate", run, "--split", "test", "--json"))["results"]
    return [kind, f"{length:,}", f"{steps:,}", f"{bits_of_bytes(data):.2f}", f"{figures['bits_per_byte']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("byte-models"))
    options = parser.parse_args()
    rows = [measure(kind, options.folder / kind, options.steps) for kind in LENGTHS]
    head = ["data (generated)", "bytes", "steps", "bits of single bytes", "bits per dimension"]
    print("\n".join(markdown_table(head, rows)))


if __name__ == "__main__":
    main()
