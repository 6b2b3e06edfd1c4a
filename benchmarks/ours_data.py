"""Our sides that do not compute: the program's start, preparing text, tokenising, and how long a step waits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from harness import Step

_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # that live as long as the process


def start_up(program: str) -> Step:
    """A process from its start to its end. program: `manyheads --help`, or `bare interpreter`, which does nothing."""
    arguments = ["-m", "manyheads", "--help"] if program == "manyheads --help" else ["-c", "pass"]
    return Step(lambda: _run(arguments), units=1.0)


def prepare(what: str) -> Step:
    """`manyheads prepare`, the whole command, in megabytes of raw text a second.

    Args: what: `pairs`: the embedded sentence pairs, their tokenizer learned; `pairs, tokenizer given`; `text`: the
        embedded novel for a language model.
    """
    folder = _folder()
    output = folder / "out"
    if what == "text":
        raw = _write_novel(folder)
        arguments = ["--task", "lm", "--corpus", str(raw), "--valid-bytes", "50000"]
    else:
        raw = _write_pairs(folder)
        arguments = ["--tsv", str(raw), "--valid-count", "500"]
    command = ["-m", "manyheads", "prepare", *arguments]
    if what == "pairs, tokenizer given":
        first = folder / "first"
        _run([*command, "--output", str(first)])
        command += ["--tokenizer", str(first)]

    def step() -> None:
        shutil.rmtree(output, ignore_errors=True)
        _run([*command, "--output", str(output)])

    return Step(step, units=raw.stat().st_size / 1e6, warm=0)


def tokenise() -> Step:
    """Ids of the embedded pairs' sentences, in batches, by a tokenizer of 8,000 pieces learned from them."""
    from manyheads.data.corpora import load_tatoeba
    from manyheads.text.of_folder import load_tokenizer

    folder = _folder()
    arguments = ["--tsv", str(_write_pairs(folder)), "--valid-count", "500", "--output", str(folder / "out")]
    _run(["-m", "manyheads", "prepare", *arguments])
    side = load_tokenizer(folder / "out").source
    texts = [text for pair in load_tatoeba("train") for text in pair]
    parts = [texts[first : first + 4096] for first in range(0, len(texts), 4096)]
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return Step(lambda: [side.encode_batch(part) for part in parts], units=num_bytes / 1e6, warm=1)


def data_loading(precision: Literal["fp32", "bf16"]) -> Step:
    """Training steps of the preset `demo` on its embedded corpus, and the share of their time spent on getting batches.

    The plan of an epoch is made once an epoch: what it takes is told apart, with the number of steps it serves.
    """
    from manyheads.cli.process import set_up_machine

    set_up_machine()
    import torch

    from manyheads.catalogue import PRESETS
    from manyheads.data.sampler import next_position
    from manyheads.training.run.components import assemble

    config: Any = replace(PRESETS["demo"](), run_dir=str(_folder() / "run"), precision=precision)
    components = assemble(config, torch.device("cpu"), _folder() / "data")
    train_step, counters = components.train_step(), components.counters
    config = components.config
    start = time.perf_counter()
    components.stream.at(0, 0)
    plan_seconds = time.perf_counter() - start
    waited = total = 0.0

    def step() -> None:
        nonlocal waited, total
        start = time.perf_counter()
        batches = components.stream.at(counters.epoch, counters.row)
        ready = time.perf_counter()
        counters.step += 1
        train_step.run(batches, counters.step, 1e-4)
        num_rows = components.stream.rows(counters.epoch)
        counters.epoch, counters.row = next_position(counters.epoch, counters.row, num_rows)
        waited, total = waited + ready - start, total + time.perf_counter() - start

    def extra() -> Mapping[str, float]:
        nonlocal waited, total
        share = waited / total if total else 0.0
        waited = total = 0.0
        rows = components.stream.rows(0)
        return {"waiting_share": share, "plan_seconds": plan_seconds, "steps_an_epoch": float(rows)}

    return Step(step, units=1.0, warm=2, precision=precision, extra=extra)


def _run(arguments: list[str]) -> None:
    """Raises: RuntimeError: it failed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def _folder() -> Path:
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="manyheads-bench-"))
    return Path(_FOLDERS[-1].name)


def _write_pairs(folder: Path) -> Path:
    from manyheads.data.corpora import load_tatoeba

    path = folder / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in load_tatoeba("train")), encoding="utf-8")
    return path


def _write_novel(folder: Path) -> Path:
    from manyheads.data.corpora import load_novel

    path = folder / "novel.txt"
    path.write_bytes(b"".join(load_novel().values()))
    return path
