"""transformers' GPT-2 as a peer of our decoder: 4 layers of 256, training and greedy generation with random weights."""

from __future__ import annotations

from typing import Any

import torch
from harness import Step

VOCAB, D_MODEL, HEADS, LAYERS, LENGTH = 10_000, 256, 4, 4, 1024
LANES, SEGMENT = 16, 128
PROMPT, NEW = 32, 128


def _model(dropout: float) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": VOCAB, "n_embd": D_MODEL, "n_head": HEADS, "n_layer": LAYERS, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def training(bf16: bool) -> Step:
    """16 rows of 128 tokens, dropout 0.1, fused Adam at 1e-4."""
    model = _model(0.1).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    ids = torch.randint(0, VOCAB, (LANES, SEGMENT + 1))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(ids[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Step(step, LANES * SEGMENT, precision="bf16" if bf16 else "fp32", parameters=parameters)


def generation(rows: int) -> Step:
    """Prompts of 32 tokens, 128 new ones by greedy search with its cache, fp32."""
    model = _model(0.0).eval()
    ids = torch.randint(0, VOCAB, (rows, PROMPT))
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}

    def step() -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Step(step, rows * NEW, 1, "fp32", parameters)
