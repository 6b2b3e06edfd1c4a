"""The settings under which a Reformer hashes as that of transformers: `shared_rotations` and `pad_to_chunks`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads.catalogue import build_model
from manyheads.models.reformer.config import ReformerConfig
from manyheads.nn.attention.observing import attentions_of, buckets_of

PEERS = ReformerConfig(
    vocab_size=19,
    d_model=16,
    num_heads=2,
    d_ff=24,
    num_layers=3,
    layers=("lsh", "local", "lsh"),
    positions="learned",
    max_len=64,
    num_hashes=2,
    num_buckets=(4,),
    chunk_len=4,
    local_chunk_len=8,
    visible="chunk",
    look_across_rounds=True,
    wrap=True,
    hash_seed=7,
    shared_rotations=True,
    pad_to_chunks=True,
)


def built(config: ReformerConfig) -> Any:
    torch.manual_seed(0)
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.no_grad()
def test_shared_rotations_are_those_of_torchs_generator() -> None:
    model = built(PEERS)
    ids = torch.randint(0, 19, (2, 24))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        drawn = torch.randn(2, 8, 2, 2)
    found = model.body(ids)[0]
    assert torch.equal(found, model.body(ids, rotations={0: drawn, 2: drawn})[0])
    own = built(replace(PEERS, shared_rotations=False))
    assert not torch.allclose(own.body(ids)[0], found, atol=1e-2)


@torch.no_grad()
def test_padding_takes_part_in_sorting() -> None:
    model = built(PEERS)
    ids = torch.randint(1, 19, (2, 21))
    found = model.body(ids)[0]
    assert found.shape == (2, 21, 32)
    padded = F.pad(ids, (0, 3), value=5)
    assert torch.equal(found, model.body(padded, torch.tensor([21, 21]))[0][:, :21])
    rows = model.body(ids, torch.tensor([21, 17]))[0]
    assert torch.equal(rows[1, :17], model.body(padded, torch.tensor([21, 17]))[0][1, :17])
    # 17 tokens: hashed layers alone complete 20, all layers together 24.
    alone = built(replace(PEERS, pad_to_chunks=False)).body(ids[:, :17])[0]
    assert not torch.allclose(alone, model.body(ids[:, :17])[0], atol=1e-2)


def test_padding_is_no_position_of_what_is_seen() -> None:
    model = built(PEERS)
    ids = torch.randint(1, 19, (2, 21))
    assert {tuple(one.shape) for one in buckets_of(model, ids).values()} == {(2, 2, 2, 21)}
    assert {tuple(one.shape) for one in attentions_of(model, ids).decoder} == {(2, 2, 21, 21)}


@pytest.mark.parametrize(
    ("changes", "lengths", "longest"),
    [
        ({}, {3: 0, 4: 0, 5: 3, 8: 0, 9: 7, 64: 0}, 64),
        ({"max_len": 61}, {56: 0, 57: 7}, 56),
        ({"max_len": 6}, {4: 0}, 4),
        ({"layers": ("local",)}, {8: 0, 9: 7}, 64),
        ({"layers": ("full",)}, {9: 0}, 64),
        ({"pad_to_chunks": False}, {9: 0}, 64),
    ],
)
def test_the_padding_of_a_length(changes: dict[str, Any], lengths: dict[int, int], longest: int) -> None:
    config = replace(PEERS, **changes)
    assert {length: config.padding(length) for length in lengths} == lengths
    assert config.longest_input == longest
