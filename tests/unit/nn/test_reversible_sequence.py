"""ReversibleSequence against its two equations and plain backpropagation."""

import copy

import torch
from torch import Tensor, nn

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


def test_statistics_count_a_batch_once() -> None:
    norm = nn.BatchNorm1d(2, momentum=0.5)
    sequence = ReversibleSequence([(nn.Sequential(Turned(), norm, Turned()), nn.Identity())])
    x = torch.tensor([[[1.0, 3.0], [3.0, 5.0]]], requires_grad=True)
    torch.cat(sequence(x, x)).sum().backward()
    assert norm.num_batches_tracked == 1
    assert norm.running_mean.tolist() == [1.0, 2.0]


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def test_weights_that_a_forward_pass_normalises_are_replayed() -> None:
    """spectral_norm improves its vectors in each forward pass; the second one must begin where the first one did."""
    torch.manual_seed(0)
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    found = []
    for reversible in (True, False):
        sequence = ReversibleSequence([(copy.deepcopy(linear), nn.Tanh())], reversible=reversible).train()
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.cat(sequence(x, x)).square().sum().backward()
        found.append([x.grad, *(one.grad for one in sequence.parameters()), *sequence.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
