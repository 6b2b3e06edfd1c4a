"""What a Reformer's attention and buckets look like from outside, against its own parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from manyheads.architectures.attentions import attentions_of, buckets_of
from manyheads.architectures.reformer.presets import PRESETS
from manyheads.architectures.table import build_model
from manyheads.architectures.tracing import trace
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.recording import record_attention


def reformer() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(dataclasses.replace(PRESETS["debug"](), vocab_size=20)).eval()


@pytest.mark.parametrize("length", [1, 4, 6, 11, 16])
@pytest.mark.parametrize(
    ("before", "after", "causal", "wrap"), [(1, 0, True, False), (1, 1, False, True), (2, 0, True, False)]
)
def test_local_weights_on_all_keys_give_the_layers_output(
    length: int, before: int, after: int, causal: bool, wrap: bool
) -> None:
    torch.manual_seed(0)
    layer = LocalSelfAttention(
        16, 2, 8, chunk_len=4, chunks_before=before, chunks_after=after, causal=causal, wrap=wrap
    ).eval()
    x = torch.randn(2, length, 16)
    expected = layer(x)
    with record_attention(layer) as record:
        layer(x)
    [weights] = record[""]
    assert weights.shape == (2, 2, length, length)
    value = layer._project(x)[2]
    torch.testing.assert_close(layer._finish(weights @ value), expected)
    assert not layer._forward_pre_hooks


def test_a_reformers_attentions_have_one_shape() -> None:
    model = reformer()
    ids = torch.randint(0, 20, (2, 10))
    found = attentions_of(model, ids)
    assert [tuple(weights.shape) for weights in found.decoder] == [(2, 2, 10, 10)] * 2
    assert bool((torch.stack(found.decoder).triu(1) == 0).all())


def test_buckets_are_those_that_the_layer_hashes_into() -> None:
    model = reformer()
    ids = torch.randint(0, 20, (2, 10))
    before = model.log_probs(ids)  # type: ignore[operator]
    found = buckets_of(model, ids)
    [(name, buckets)] = found.items()
    layer = model.body.get_submodule(name)  # type: ignore[union-attr]
    assert isinstance(layer, LSHSelfAttention)
    assert buckets.shape == (2, 2, 2, 10)
    assert 0 <= int(buckets.min()) <= int(buckets.max()) < layer.num_buckets
    # Who looks at whom follows from them: never at a token that no round puts into one's bucket, oneself excepted.
    weights = attentions_of(model, ids).decoder[1]
    together = (buckets[..., None] == buckets[..., None, :]).any(dim=2) | torch.eye(10, dtype=torch.bool)
    assert bool((weights[~together] == 0).all())
    assert layer.buckets_hook is None
    torch.testing.assert_close(model.log_probs(ids), before)  # type: ignore[operator]


def test_a_reformer_is_traced_from_input_to_output() -> None:
    lines = trace(reformer(), {"tokens": torch.ones(1, 6).long()})
    told = {line.module for line in lines}
    assert {"layers.0.attention.self_attn", "layers.1.attention.self_attn", "embedding", "head"} <= told
    assert all(line.equation for line in lines)
