"""A side of `curves.py translation`: what one writes around torch.nn.Transformer after PyTorch's tutorial.

As in the tutorial: embeddings times sqrt(d_model), sinusoidal positions, separate embeddings and output layer, batches
of 128 random sentences padded to the longest, dropout 0.1, Adam with betas 0.9 and 0.98 and eps 1e-9, greedy search
that computes the whole prefix again for each token. Other than in the tutorial: sizes of the preset `demo`, label
smoothing 0.1, and a learning rate with warm-up (the tutorial's constant 1e-4 learns little in a few minutes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from looks import Run, Task, inverse_sqrt, task_of_command_line
from pairs import read_ids, write_ids
from torch import Tensor, nn

WIDTHS = {"bf16": 256, "fp32": 192}  # of the preset `demo`
SMALL = {"d_model": 32, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 64}
SETTINGS = {"sentences": 128, "peak_rate": 1e-3, "warmup_updates": 200, "label_smoothing": 0.1, "dropout": 0.1}
MOST_TOKENS = 128  # of a sentence in training; and of a translation beyond its source: 20


class Translator(nn.Module):
    positions: Tensor

    def __init__(self, vocab_size: int, pad_id: int, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        width = sizes["d_model"]
        self.pad_id, self.scale = pad_id, math.sqrt(width)
        self.source, self.target = nn.Embedding(vocab_size, width), nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(SETTINGS["dropout"])
        self.body = nn.Transformer(**sizes, dropout=SETTINGS["dropout"], batch_first=True)
        self.out = nn.Linear(width, vocab_size)
        self.register_buffer("positions", sinusoids(5000, width), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def embed(self, table: nn.Embedding, ids: Tensor) -> Tensor:
        out: Tensor = self.dropout(table(ids) * self.scale + self.positions[: ids.shape[1]])
        return out

    def encode(self, source: Tensor) -> Tensor:
        out: Tensor = self.body.encoder(self.embed(self.source, source), src_key_padding_mask=source == self.pad_id)
        return out

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        causal = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), diagonal=1)
        out: Tensor = self.body.decoder(
            self.embed(self.target, target), memory, tgt_mask=causal, tgt_key_padding_mask=target == self.pad_id,
            memory_key_padding_mask=source == self.pad_id, tgt_is_causal=True,
        )  # fmt: skip
        return out

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = self.out(self.decode(target, self.encode(source), source))
        return logits


def sizes_of(width: int) -> dict[str, int]:
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 3}
    return {"d_model": width, "nhead": 4, "dim_feedforward": 4 * width, **layers}


def sinusoids(length: int, width: int) -> Tensor:
    rates = torch.exp(-torch.arange(0, width, 2) * math.log(10_000) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)


class Side:
    def __init__(self, task: Task) -> None:
        self.task, self.facts = task, task.facts
        self.pad, self.bos, self.eos = (self.facts[name] for name in ("pad_id", "bos_id", "eos_id"))
        sources, targets = (read_ids(task.data / f"train.{side}") for side in ("source", "target"))
        self.pairs = [
            ([*source, self.eos], [self.bos, *target, self.eos])
            for source, target in zip(sources, targets, strict=True)
            if len(source) < MOST_TOKENS and len(target) < MOST_TOKENS - 1
        ]
        torch.manual_seed(task.seed)
        self.order, self.left = np.random.default_rng(task.seed), list[int]()
        sizes = SMALL if task.small else sizes_of(WIDTHS[task.sized_for])
        self.model = Translator(self.facts["vocab_size"], self.pad, sizes)
        self.settings = {**SETTINGS, **sizes}
        self.loss_of = nn.CrossEntropyLoss(ignore_index=self.pad, label_smoothing=SETTINGS["label_smoothing"])
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.task.precision == "bf16")

    def update(self, run: Run) -> int:
        if not self.left:
            self.left = self.order.permutation(len(self.pairs)).tolist()
        count = int(SETTINGS["sentences"])
        rows, self.left = [self.pairs[place] for place in self.left[:count]], self.left[count:]
        source, target = (padded(side, self.pad) for side in zip(*rows, strict=True))
        rate = inverse_sqrt(run.updates + 1, SETTINGS["peak_rate"], int(SETTINGS["warmup_updates"]))
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.model.train()
        with self.autocast():
            logits = self.model(source, target[:, :-1])
            loss = self.loss_of(logits.flatten(0, 1), target[:, 1:].flatten())
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return sum(len(one) + len(other) - 1 for one, other in rows)

    def look(self, name: str) -> Mapping[str, Any]:
        """Translate the sentences of a split greedily. name: of the file; it begins with the split."""
        path = self.task.out / f"{name}.ids"
        write_ids(path, self.translate(read_ids(self.task.data / f"{name.partition('-')[0]}.source")))
        return {"hypotheses": path.name}

    @torch.no_grad()
    def translate(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        self.model.eval()
        found: list[list[int]] = [[] for _ in sources]
        by_length = sorted(range(len(sources)), key=lambda place: len(sources[place]))
        for first in range(0, len(by_length), 64):
            places = by_length[first : first + 64]
            with self.autocast():
                for place, ids in zip(places, self._greedy([sources[place] for place in places]), strict=True):
                    found[place] = ids
        return found

    def _greedy(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        source = padded([[*row, self.eos] for row in sources], self.pad)
        memory = self.model.encode(source)
        target = torch.full((len(sources), 1), self.bos)
        ended = torch.zeros(len(sources), dtype=torch.bool)
        for _ in range(source.shape[1] + 20):
            logits = self.model.out(self.model.decode(target, memory, source)[:, -1])
            best = logits.argmax(dim=-1).masked_fill(ended, self.pad)
            target = torch.cat([target, best[:, None]], dim=1)
            ended = ended | (best == self.eos)
            if bool(ended.all()):
                break
        return [
            [one for one in (row[: row.index(self.eos)] if self.eos in row else row) if one not in (self.pad, self.bos)]
            for row in target[:, 1:].tolist()
        ]


def main() -> None:
    torch.backends.mha.set_fastpath_enabled(False)  # in evaluation it fails under autocast on a CPU
    task = task_of_command_line()
    side = Side(task)
    run = Run(task, side.look)
    run.train(side.update)
    test = {"greedy": side.look("test-greedy")} if task.num_looks else {}
    parameters = sum(parameter.numel() for parameter in side.model.parameters() if parameter.requires_grad)
    run.write(parameters, side.settings, test)


if __name__ == "__main__":
    main()
