"""ReversibleSequence against its two equations and plain backpropagation."""

from __future__ import annotations

import torch

from manyheads.nn import FeedForward, MultiHeadAttention, ReversibleSequence


def test_the_two_equations_and_their_gradients() -> None:
    """In float64 with dropout: the same numbers drawn, the same gradients, also for a layer's own parameters."""
    layers = [(MultiHeadAttention(8, 2, dropout=0.3), FeedForward(8, 16, dropout=0.3)) for _ in range(3)]
    found = []
    for kind in ("equations", "reversible", "plain"):
        sequence = ReversibleSequence(layers, reversible=kind == "reversible").double().train()
        torch.manual_seed(4)
        x1, x2 = torch.randn(2, 2, 5, 8, dtype=torch.float64).requires_grad_().unbind()
        torch.manual_seed(7)
        if kind == "equations":
            y1, y2 = x1, x2
            for f, g in layers:
                y1 = y1 + f(y2)[0]
                y2 = y2 + g(y1)
        else:
            y1, y2 = sequence(x1, x2)
        loss = (y1 * y2).sin().sum()
        found.append([y1, y2, *torch.autograd.grad(loss, [x1, x2, *sequence.parameters()])])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
