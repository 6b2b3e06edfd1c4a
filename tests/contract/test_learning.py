"""The debug preset learns one batch by heart, in fp32 and bf16."""

from typing import Any

import pytest
import torch


@pytest.mark.one_in(2, "learned by heart")
@pytest.mark.first_variant
def test_one_batch_is_learned_by_heart(subject: Any, precision: Any, make_batch: Any) -> None:
    """And said again token by token from the cache: what was learned is what is decoded."""
    # With dropout the end would be luck: a Reformer ends at 0.09 to 0.11 nats a token, by the seed; at 0.005 without.
    model, batch = subject.build(dropout=0.0).train(), make_batch([5, 3], [6, 8])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        with precision.on():
            output = model(batch)
        loss = output.loss_sum / output.num_tokens
        loss.backward()
        if float(loss.detach()) < 0.008:  # learned, with a margin for the hashes of evaluation
            break
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimiser.step()
    model.eval()
    with torch.no_grad(), precision.on():
        output = model(batch)
        assert output.nll_sum / output.num_tokens < 0.1
        state = model.start(batch.source, batch.source_lengths)
        token, said = batch.target[:, :1], []
        for _ in range(7):
            log_probs, state = model.step(token, state)
            token = log_probs.argmax(-1, keepdim=True)
            said.append(token)
    for row, length, labels in zip(torch.cat(said, 1), batch.target_lengths, batch.target_labels, strict=True):
        assert torch.equal(row[: length - 1], labels[: length - 1])
