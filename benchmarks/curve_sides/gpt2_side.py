"""A side of `curves.py language`: GPT-2 of transformers with the sizes of the preset `xl-demo`, on contexts of 256.

Dropout is that of the preset: 0.2 where a run is in bf16, none where it is in fp32. In evaluation a window begins every
128 tokens, so all but the first tokens have at least 128 before them.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from looks import task_of_command_line
from text_side import TextSide
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {"n_embd": 192, "n_head": 4, "n_layer": 4, "n_positions": 256}
SMALL = {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 32}


class Gpt2(nn.Module):
    def __init__(self, vocab_size: int, sizes: dict[str, int], dropout: float) -> None:
        super().__init__()
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        ends = {"bos_token_id": 0, "eos_token_id": 0}  # its own are beyond a vocabulary of bytes
        self.body = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, use_cache=False, **sizes, **drops, **ends))

    def hidden(self, ids: Tensor) -> Tensor:
        out: Tensor = self.body.transformer(ids).last_hidden_state
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.body.lm_head(hidden)
        return out


def main() -> None:
    task = task_of_command_line()
    sizes = SMALL if task.small else SIZES
    dropout = 0.2 if task.sized_for == "bf16" else 0.0
    length = sizes["n_positions"]
    side = TextSide(
        task, lambda vocab_size: Gpt2(vocab_size, sizes, dropout), length=length, rows=8, stride=length // 2, warm=50
    )
    side.settings |= {**sizes, "dropout": dropout, "transformers": transformers.__version__}
    side.run()


if __name__ == "__main__":
    main()
