"""A training step of the demo's model against `torch.nn.Transformer` of the same widths, in turn in one run.

Both: same layers, widths, vocabulary, tied tables, batch and label smoothing, no dropout, fused AdamW, bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from manyheads.architectures.table import build_model
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.cli.machine import set_up_machine
from manyheads.data.batch import PairBatch

VOCAB, D_MODEL, D_FF, HEADS, LAYERS = 8000, 256, 1024, 4, 3


class Peer(nn.Module):
    """`torch.nn.Transformer` with what it lacks: embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.body = nn.Transformer(D_MODEL, HEADS, LAYERS, LAYERS, D_FF, 0.0, batch_first=True, norm_first=True)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, batch: PairBatch) -> Tensor:
        length = batch.target_input.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.body(
            self.embedding(batch.source), self.embedding(batch.target_input), tgt_mask=causal, tgt_is_causal=True
        )
        logits = nn.functional.linear(hidden, self.embedding.weight)
        loss: Tensor = self.loss(logits.flatten(0, 1).float(), batch.target_labels.flatten())
        return loss


def make_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    config = TransformerConfig(
        source_vocab_size=VOCAB, target_vocab_size=VOCAB, d_model=D_MODEL, num_heads=HEADS, d_ff=D_FF, dropout=0.0,
        num_encoder_layers=LAYERS, num_decoder_layers=LAYERS, norm_position="pre",
    )  # fmt: skip
    ours, peer = build_model(config).train(), Peer().train()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; target tokens a second, median of {rounds}")
    for rows, length in ((290, 13), (64, 32), (16, 128)):
        ids = torch.randint(4, VOCAB, (rows, length + 1))
        lengths = torch.full((rows,), length)
        batch = PairBatch(ids[:, :-1], lengths, ids, lengths + 1, torch.arange(rows))

        def our_loss(batch: PairBatch = batch) -> Tensor:
            output = ours(batch, label_smoothing=0.1)
            return output.loss_sum / output.num_tokens

        steps = (make_step(ours, our_loss), make_step(peer, lambda batch=batch: peer(batch)))  # type: ignore[misc]
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds + 2):
            for side, step in enumerate(steps):
                start = time.perf_counter()
                step()
                if turn > 1:
                    times[side].append(time.perf_counter() - start)
        a, b = (rows * length / statistics.median(side) for side in times)
        print(f"{rows:4} x {length:3} tokens: manyheads {a:7.0f}   nn.Transformer {b:7.0f}   ratio {a / b:.2f}")


if __name__ == "__main__":
    set_up_machine()
    main()
