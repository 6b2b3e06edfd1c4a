"""Contracts of language models with reversible layers: plain gradients, and memory that does not grow with depth."""

import copy
from typing import Any

import pytest
import torch
from segment_batches import batch_of, ids
from torch import Tensor


@pytest.mark.parametrize("chunk", [0, 3])
def test_reversible_gradients_are_plain_ones(reversible: Any, chunk: int) -> None:
    """In float64, with dropout everywhere, ragged rows, and another chunking of the feed-forward layers."""
    changes = {"dropout": 0.2, "attention_dropout": 0.3, "ff_chunk_len": chunk}
    found = []
    for is_reversible in (True, False):
        model = reversible.build(reversible=is_reversible, **changes).double().train()
        torch.manual_seed(8)
        output = model(batch_of(ids(3, 15), [14, 9, 2]), model.start(3, projected=False, hash_seed=5))
        torch.manual_seed(9)
        grads = torch.autograd.grad(output.loss_sum, list(model.parameters()), allow_unused=True)
        found.append((output.loss_sum.detach(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-10, rtol=1e-10)
    for mine, plain in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-9, rtol=1e-9)


def test_gradients_are_those_of_float64_in_both_precisions(reversible: Any, precision: Any) -> None:
    """Through hashing, sorting, caches of nothing and reversible layers, under autocast too."""
    model = reversible.build(reversible=True)
    batch = batch_of(ids(2, 13), [12, 7])

    def grads(m: Any, low: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = m(batch).loss_sum
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(m.parameters()))])

    exact = grads(copy.deepcopy(model).double(), low=False)
    low = precision.name == "bf16"
    plain = reversible.build(reversible=False)
    allowed = 2 * (grads(plain, low) - exact).abs().max() if low else 1e-5 * exact.abs().max()
    assert (grads(model, low) - exact).abs().max() <= allowed


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_depth(reversible: Any) -> None:
    """Numbers in the graph of a loss, weights and whole numbers (buckets) not counted."""

    def kept(num_layers: int) -> int:
        model, sizes = reversible.build(num_layers=num_layers, reversible=True, keep_attention=False), {}
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            place = tensor.untyped_storage().data_ptr()
            if tensor.is_floating_point() and place not in weights:
                sizes[place] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.train()(batch_of(ids(2, 14)))
        held = sum(sizes.values())
        del output
        return held

    assert kept(2) == kept(8)
