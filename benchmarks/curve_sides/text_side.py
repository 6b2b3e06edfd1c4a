"""What the peers of `curves.py language` and `long` share: random pieces of text, AdamW, cosine decay, bits of a text.

As in nanoGPT: each update reads pieces that begin anywhere; AdamW with betas 0.9 and 0.99 and a weight decay of 0.1 on
matrices; gradients clipped to a norm of 1; a linear warm-up, then a cosine from 1e-3 to 1e-4, which is 1e-4 when the
minutes are over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from looks import Run, Task
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["TextSide", "cosine", "windows"]

RATES = {"peak_rate": 1e-3, "least_rate": 1e-4}
SETTINGS: dict[str, Any] = {**RATES, "betas": (0.9, 0.99), "weight_decay": 0.1, "clip_norm": 1.0}
READ_TOKENS = 16_384  # of windows that are read together in an evaluation
CHUNK_TOKENS = 2048  # rows of logits that exist at once in an evaluation


def cosine(update: int, progress: float, warm: int) -> float:
    """The rate of an update, counted from 1. progress: of the run, from 0 to 1."""
    peak, least = RATES["peak_rate"], RATES["least_rate"]
    return min(update / warm, 1.0) * (least + 0.5 * (peak - least) * (1 + math.cos(math.pi * progress)))


def windows(count: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The windows that score each token of a text but the first once.

    Args:
        count: tokens of the text.
        length: tokens that are read at once; stride: from one window's begin to the next, at most the length.

    Returns: first position read, tokens read, and how many of the window's first targets were scored before.
    """
    scored = first = 0
    while scored < count - 1:
        size = min(length, count - 1 - first)
        yield first, size, scored - first
        scored = first + size
        first += stride


class TextSide:
    """A language model that is trained and judged as above.

    Args:
        task: data, precision and seed.
        build: makes the model, whose `hidden(ids)` and `logits(hidden)` are called, from the size of the vocabulary.
        length: tokens of a piece.
        rows: pieces of an update.
        stride: of the windows in evaluation.
        warm: updates of the warm-up.
    """

    def __init__(
        self, task: Task, build: Callable[[int], Any], *, length: int, rows: int, stride: int, warm: int
    ) -> None:
        self.task, self.length, self.rows, self.stride, self.warm = task, length, rows, stride, warm
        self.text = {split: np.load(task.data / f"{split}.npy", mmap_mode="r") for split in ("train", "valid", "test")}
        if len(self.text["train"]) <= length + 1:
            raise SystemExit(f"The training text has {len(self.text['train'])} tokens; a piece needs {length + 2}.")
        torch.manual_seed(task.seed)
        self.places = np.random.default_rng(task.seed)
        self.model: nn.Module = build(task.facts["vocab_size"])
        matrices = [one for one in self.model.parameters() if one.dim() >= 2]
        others = [one for one in self.model.parameters() if one.dim() < 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": SETTINGS["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
            lr=0.0, betas=SETTINGS["betas"],
        )  # fmt: skip
        self.settings = {**SETTINGS, "length": length, "rows": rows, "stride": stride, "warmup_updates": warm}

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.task.precision == "bf16")

    def _rows(self, split: str, places: list[tuple[int, int]]) -> Tensor:
        text = self.text[split]
        return torch.from_numpy(np.stack([text[first : first + size] for first, size in places]).astype(np.int64))

    def update(self, run: Run) -> int:
        firsts = self.places.integers(0, len(self.text["train"]) - self.length, self.rows)
        ids = self._rows("train", [(int(first), self.length + 1) for first in firsts])
        for group in self.optimiser.param_groups:
            group["lr"] = cosine(run.updates + 1, run.progress(), self.warm)
        self.model.train()
        with self.autocast():
            logits = self.model.logits(self.model.hidden(ids[:, :-1]))  # type: ignore[operator]
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), SETTINGS["clip_norm"])
        self.optimiser.step()
        return self.rows * self.length

    @torch.no_grad()
    def look(self, name: str) -> Mapping[str, Any]:
        """Nats of the whole held-out text; each token but the first is scored once. name: begins with the split."""
        split = name.partition("-")[0]
        self.model.eval()
        found, count = 0.0, 0
        together: list[tuple[int, int, int]] = []
        planned = list(windows(len(self.text[split]), self.length, self.stride))
        for number, window in enumerate(planned):
            together.append(window)
            is_full = (len(together) + 1) * self.length > READ_TOKENS
            if is_full or number + 1 == len(planned) or planned[number + 1][1] != window[1]:
                nats, tokens = self._read(split, together)
                found, count, together = found + nats, count + tokens, []
        return {"nats": found, "scored_tokens": count}

    def _read(self, split: str, together: list[tuple[int, int, int]]) -> tuple[float, int]:
        ids = self._rows(split, [(first, size + 1) for first, size, _ in together])
        total, count = 0.0, 0
        with self.autocast():
            hidden = self.model.hidden(ids[:, :-1])  # type: ignore[operator]
            for row, targets, (_, _, known) in zip(hidden, ids[:, 1:], together, strict=True):
                parts = zip(row[known:].split(CHUNK_TOKENS), targets[known:].split(CHUNK_TOKENS), strict=True)
                for part, wanted in parts:
                    logits = self.model.logits(part).float()  # type: ignore[operator]
                    total += float(functional.cross_entropy(logits, wanted, reduction="sum"))
                    count += len(wanted)
        return total, count

    def run(self) -> None:
        """Train, look, and write the result."""
        run = Run(self.task, self.look)
        run.train(self.update)
        test = {"own": self.look("test-own")} if self.task.num_looks else {}
        run.write(sum(one.numel() for one in self.model.parameters() if one.requires_grad), self.settings, test)
