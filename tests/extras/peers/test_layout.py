"""Weights of a peer in several precisions."""

import torch
from torch import nn

from manyheads.extras.peers.peer import import_weights


def test_weights_of_several_types_keep_their_values() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    half = {"0.weight": torch.randn(2, 2).half(), "0.bias": torch.randn(2).half()}
    weights = {**half, "1.weight": torch.full((2, 2), 1 / 3), "1.bias": torch.full((2,), 1e-9)}
    import_weights(module, weights, {"*.*": "*.*"})
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, weights[name].float())
    import_weights(module, {name: tensor.half() for name, tensor in weights.items()}, {"*.*": "*.*"})
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float16}
