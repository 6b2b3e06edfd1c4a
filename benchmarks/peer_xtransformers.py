"""x-transformers as a peer: an encoder-decoder of the widths of the others, everything else by its defaults."""

from __future__ import annotations

import torch
from harness import Step

VOCAB, D_MODEL, HEADS, LAYERS, BATCH, LENGTH = 8000, 256, 4, 3, 64, 32


def seq2seq(bf16: bool) -> Step:
    """Training as the shared peers train: 64 x 32 tokens, fused Adam at 1e-4, label smoothing 0.1.

    Its defaults: heads of 64, d_ff 4 x 256, no dropout, trained positions, three tables of the vocabulary. Its own loss
    smooths no labels, so logits are asked for.
    """
    from x_transformers import XTransformer

    torch.manual_seed(0)
    sizes = {"num_tokens": VOCAB, "depth": LAYERS, "heads": HEADS, "max_seq_len": LENGTH}
    options = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    model = XTransformer(dim=D_MODEL, **options).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    source = torch.randint(3, VOCAB, (BATCH, LENGTH))
    target = torch.randint(3, VOCAB, (BATCH, LENGTH + 1))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            memory = model.encoder(source, return_embeddings=True)
            logits = model.decoder.net(target[:, :-1], context=memory)
            loss = loss_of(logits.flatten(0, 1), target[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Step(step, BATCH * LENGTH, precision="bf16" if bf16 else "fp32", parameters=parameters)
