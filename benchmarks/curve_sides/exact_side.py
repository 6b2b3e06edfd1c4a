"""A side of `curves.py long`: a decoder with exact attention (SDPA) on whole pieces, with the Reformer's sizes.

Blocks with norms before attention and feed-forward, sinusoidal positions, one table for input and output; no dropout,
as the preset `reformer-demo`.
"""

from __future__ import annotations

import math

import torch
from looks import task_of_command_line
from text_side import TextSide
from torch import Tensor, nn
from torch.nn import functional

SIZES = {"d_model": 192, "num_heads": 4, "d_ff": 768, "num_layers": 4}
SMALL = {"d_model": 32, "num_heads": 2, "d_ff": 64, "num_layers": 1}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.first(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.feed_forward(self.second(x))
        return out


class Decoder(nn.Module):
    positions: Tensor

    def __init__(self, vocab_size: int, length: int, sizes: dict[str, int]) -> None:
        super().__init__()
        width = sizes["d_model"]
        self.embedding = nn.Embedding(vocab_size, width)
        blocks = [Block(width, sizes["num_heads"], sizes["d_ff"]) for _ in range(sizes["num_layers"])]
        self.blocks, self.last = nn.Sequential(*blocks), nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        rates = torch.exp(-torch.arange(0, width, 2) * math.log(10_000) / width)
        angles = torch.arange(length)[:, None] * rates
        self.register_buffer("positions", 0.02 * torch.cat([angles.sin(), angles.cos()], dim=-1), persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.blocks(self.embedding(ids) + self.positions[: ids.shape[1]]))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embedding.weight)


def main() -> None:
    task = task_of_command_line()
    sizes, length = SMALL if task.small else SIZES, task.length
    side = TextSide(
        task, lambda vocab_size: Decoder(vocab_size, length, sizes), length=length, rows=task.lanes, stride=length,
        warm=20,
    )  # fmt: skip
    side.settings |= sizes
    side.run()


if __name__ == "__main__":
    main()
