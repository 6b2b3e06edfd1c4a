"""What a Reformer's attention and buckets look like from outside, against its own parts."""

import dataclasses
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.extras.inspect.tracing import trace
from manyheads.models.reformer.config import PRESETS, SEQ2SEQ_PRESETS
from manyheads.models.reformer.model import Call
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.observing import attentions_of, buckets_of, observe


def reformer() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(dataclasses.replace(PRESETS["debug"], vocab_size=20)).eval()


@pytest.mark.parametrize("length", [1, 4, 6, 11, 16])
@pytest.mark.parametrize(
    ("before", "after", "causal", "wrap"), [(1, 0, True, False), (1, 1, False, True), (2, 0, True, False)]
)
def test_local_weights_on_all_keys_give_the_layers_output(length, before, after, causal, wrap):
    torch.manual_seed(0)
    layer = LocalSelfAttention(
        16, 2, 8, chunk_len=4, chunks_before=before, chunks_after=after, causal=causal, wrap=wrap
    ).eval()
    x = torch.randn(2, length, 16)
    expected = layer(x)
    with observe(layer) as record:
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
    model = reformer()
    ids = torch.randint(0, 20, (1, 11))
    before = model.log_probs(ids)  # type: ignore[operator]
    lines = trace(model, {"tokens": ids})
    told = {(line.module, line.name): (line.shape, line.equation) for line in lines}
    hashed, local = "layers.1.attention.self_attn", "layers.0.attention.self_attn"
    names = ["queries, shared", "keys", "values", "rotations", "buckets", "order", "output"]
    assert [line.name for line in lines if line.module == hashed] == names
    assert told[hashed, "queries, shared"] == ((1, 2, 11, 12), "Q = x W_QK, in heads")
    assert told[hashed, "keys"] == ((1, 2, 11, 12), "K = Q / |Q|")
    assert told[hashed, "values"] == ((1, 2, 11, 12), "V = x W_V, in heads")
    assert told[hashed, "rotations"][0] == (2, 12, 2, 8)
    assert told[hashed, "buckets"] == ((1, 2, 2, 11), "h = argmax [Q R; -Q R], in each round")
    assert told[hashed, "order"][0] == (1, 2, 2, 12)  # in whole chunks of 4
    assert "over the last 4 earlier positions of Q's bucket" in told[hashed, "output"][1]
    assert [line.name for line in lines if line.module == local] == ["queries", "keys", "values", "output"]
    # Eleven positions, eight at a time: one line, of all of them.
    assert told["layers.0.feed_forward.net", "feed-forward"][0] == (1, 11, 32)
    assert told["layers.0.feed_forward.net", "feed-forward"][1].endswith("8 positions at a time")
    assert told["layers.1.feed_forward", "changed stream"][0] == (1, 11, 32)
    assert told["norm", "hidden states"][0] == (1, 11, 64)
    torch.testing.assert_close(model.log_probs(ids), before)  # type: ignore[operator]
    for module in model.modules():
        assert not {"_prepare", "_project"} & set(vars(module))
        assert not module._forward_hooks
        assert vars(module).get("buckets_hook") is None


@pytest.mark.parametrize(
    ("changes", "equation"),
    [
        ({"layers": ("full",)}, "A = softmax(Q Kᵀ) over all earlier positions, oneself if there are none"),
        ({"layers": ("lsh",), "exact_len": 6}, "; below position 6, over all earlier ones"),
        (
            {"layers": ("lsh",), "visible": "chunk", "causal": False, "chunks_after": 1},
            "over sorted chunks of 4: its own and the one before and the one after, in all rounds",
        ),
        (
            {"layers": ("lsh",), "visible": "chunk", "within_bucket": True},
            "in Q's bucket, in all rounds, nothing later",
        ),
    ],
)
def test_what_hashed_attention_sees_is_told_as_it_is_set(changes: dict[str, Any], equation: str) -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS["debug"], vocab_size=20, **changes)
    lines = trace(build_model(config).eval(), {"tokens": torch.ones(1, 9).long()})
    [output] = [line for line in lines if line.module == "layers.1.attention.self_attn" and line.name == "output"]
    assert equation in output.equation
    assert ("buckets" in {line.name for line in lines}) == (changes["layers"] == ("lsh",))


def test_factored_buckets_are_put_together_as_the_table_says() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS["debug"], vocab_size=20, layers=("lsh",), num_buckets=(4, 6))
    model, ids = build_model(config).eval(), torch.randint(0, 20, (1, 9))
    lines = {(line.module, line.name): line for line in trace(model, {"tokens": ids})}
    name = "layers.0.attention.self_attn"
    assert lines[name, "buckets"].equation == "h = h₁ + 4 h₂, each argmax [Q Rᵢ; -Q Rᵢ], in each round"
    assert lines[name, "rotations"].shape == (2, 12, 2, 5)
    # The equation, by hand, with the rotations of the layer's own seed.
    layer = model.get_submodule(f"body.{name}")
    assert isinstance(layer, LSHSelfAttention)
    seen: list[torch.Tensor] = []
    hook = layer.qk_proj.register_forward_hook(lambda _, __, out: seen.append(out))
    found = buckets_of(model, ids)[name]
    hook.remove()
    q = seen[0].view(1, 9, 2, 12).transpose(1, 2)
    rotations = layer.draw(Call(None, config.hash_seed).seed_of(0))
    rotated = torch.einsum("bhlw,hwrd->bhrld", q, rotations)
    one, two = (torch.cat([part, -part], dim=-1).argmax(-1) for part in rotated.split([2, 3], dim=-1))
    assert torch.equal(found, one + 4 * two)


def test_a_translators_hashed_layers_are_seen() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(SEQ2SEQ_PRESETS["debug"], source_vocab_size=20, target_vocab_size=20)
    model = build_model(config).eval()
    source, lengths, target = torch.randint(1, 20, (2, 9)), torch.tensor([9, 4]), torch.randint(1, 20, (2, 7))
    found = buckets_of(model, source, lengths, target)
    assert sorted(found) == [
        f"{side}_layers.{i}.attention.self_attn" for side in ("decoder", "encoder") for i in (0, 1)
    ]
    assert found["encoder_layers.0.attention.self_attn"].shape == (2, 4, 2, 9)
    assert found["decoder_layers.0.attention.self_attn"].shape == (2, 4, 2, 7)
