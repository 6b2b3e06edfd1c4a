"""Multi-head attention: heads, sizes, caches, hooks, and the whole layer against the loop."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from naive_attention import naive_dot_product_attention
from torch import Tensor

from manyheads.errors import ConfigError, ShapeError
from manyheads.extras.peers.conventions import Sizes, from_additive, from_blocked, from_valid_lens
from manyheads.extras.peers.one_head import AdditiveAttention, DotProductAttention
from manyheads.extras.peers.torch_compatible import TorchMultiheadAttention
from manyheads.nn.attention.cache import KeyValueCache
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.masks import Bias, Causal, Dense, KeyPadding, Lengths, Mask, dense_mask
from manyheads.nn.attention.multi_head import MultiHeadAttention, merge_heads, split_heads
from manyheads.nn.attention.observing import observe
from manyheads.nn.attention.relative import LearnedRelativeAttention, RelativeAttention
from manyheads.nn.attention.settings import LSHSettings
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.attention import dot_product_attention, dot_product_weights
from manyheads.nn.kernels.relative import relative_shift
from manyheads.nn.kernels.reversible import ReversibleSequence
from manyheads.nn.layers import FeedForward
from manyheads.nn.positions import (
    AxialPositions,
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    TokenEmbedding,
    sinusoidal_table,
)

B, L, W, H = 2, 5, 12, 3
MakeMask = Callable[[int, int, int], Mask | None]


def slow(layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
    """The layer in float64, projection by projection, query by query."""

    def project(linear: torch.nn.Linear, x: Tensor) -> Tensor:
        out = x.double() @ linear.weight.double().t()
        out = out if linear.bias is None else out + linear.bias.double()
        return out.view(*x.shape[:2], layer.num_heads, layer.head_dim).permute(0, 2, 1, 3)

    q, k, v = project(layer.q_proj, query), project(layer.k_proj, key), project(layer.v_proj, value)
    merged = naive_dot_product_attention(q, k, v, allowed).permute(0, 2, 1, 3).flatten(2)
    out = merged @ layer.out_proj.weight.double().t()
    return out if layer.out_proj.bias is None else out + layer.out_proj.bias.double()


def randomised(layer: MultiHeadAttention) -> MultiHeadAttention:
    for parameter in layer.parameters():  # zero biases would hide mistakes
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def test_split_and_merge_undo_each_other() -> None:
    x = torch.randn(B, L, W)
    heads = split_heads(x, H)
    assert heads.shape == (B, H, L, W // H)
    assert torch.equal(heads[:, 1], x[:, :, 4:8])
    assert heads.data_ptr() == x.data_ptr()
    assert torch.equal(merge_heads(heads), x)
    assert torch.equal(split_heads(merge_heads(heads), H), heads)


@pytest.mark.parametrize("bias", [True, False])
def test_self_attention(path: str, make_mask: MakeMask, bias: bool) -> None:
    layer = randomised(MultiHeadAttention(W, H, bias=bias))
    x = torch.randn(B, L, W)
    mask = make_mask(B, L, L)
    out, state = layer(x, mask=mask)
    assert state is None
    wanted = slow(layer, x, x, x, dense_mask(mask, L, L, x.device))
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ({}, "key"),
        ({}, "key and value"),
        ({}, "value"),
        ({"query_dim": 7, "key_dim": 5}, "key"),
        ({"query_dim": 7, "key_dim": 5, "value_dim": 3}, "key and value"),
        ({"head_dim": 6}, "key"),
        ({"query_dim": 7, "key_dim": 7, "head_dim": 2}, "none"),
    ],
    ids=str,
)
def test_cross_attention_and_sizes(path: str, make_mask: MakeMask, sizes: dict[str, int], given: str) -> None:
    """Two lengths, three widths; a missing value is the key, a missing key the query."""
    layer = randomised(MultiHeadAttention(W, H, **sizes))
    k_len = 4 if "key" in given else L
    key_dim = sizes.get("key_dim", W)
    query = torch.randn(B, L, sizes.get("query_dim", W))
    key = torch.randn(B, k_len, key_dim) if "key" in given else None
    value = torch.randn(B, k_len, sizes.get("value_dim", key_dim)) if "value" in given else None
    mask = make_mask(B, L, k_len)
    out, _ = layer(query, key, value, mask=mask)
    real_key = query if key is None else key
    wanted = slow(
        layer, query, real_key, real_key if value is None else value, dense_mask(mask, L, k_len, query.device)
    )
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_projections_together_and_apart_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for three maps, three for a decoding step: the same numbers, the same gradients."""
    layer = randomised(MultiHeadAttention(W, H))
    x = torch.randn(4, 8, W)  # 32 positions: more than the width, so joined
    joined, _ = layer(x)
    grads = torch.autograd.grad(joined.square().sum(), list(layer.parameters()))
    monkeypatch.setattr(policy, "joins_weights", lambda rows, out_features: False)
    apart, _ = layer(x)
    torch.testing.assert_close(joined, apart, atol=1e-5, rtol=1e-5)
    for one, other in zip(grads, torch.autograd.grad(apart.square().sum(), list(layer.parameters())), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_hook_sees_weights_and_changes_nothing(make_mask: MakeMask) -> None:
    layer = randomised(MultiHeadAttention(W, H))
    x = torch.randn(B, L, W)
    mask = make_mask(B, L, L)
    plain, _ = layer(x, mask=mask)
    with observe(torch.nn.ModuleDict({"one": layer})) as record:
        hooked, _ = layer(x, mask=mask)
        layer(x)
    assert layer.weights_hook is None
    assert list(record) == ["one"]
    assert [w.shape for w in record["one"]] == [(B, H, L, L)] * 2
    torch.testing.assert_close(hooked, plain, atol=1e-5, rtol=1e-5)
    allowed = dense_mask(mask, L, L, x.device)
    sums = record["one"][0].sum(-1)
    wanted = torch.ones_like(sums) if allowed is None else allowed.any(-1).expand_as(sums).float()
    torch.testing.assert_close(sums, wanted)


def test_weights_are_computed_for_no_one_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hook nobody asks for weights; the recorder takes its hook back after an error too."""
    layer = MultiHeadAttention(W, H)
    monkeypatch.setattr(layer, "attention_weights", lambda *_: pytest.fail("weights without a request"))
    layer(torch.randn(B, L, W))
    with pytest.raises(RuntimeError, match="stop"), observe(layer):
        raise RuntimeError("stop")
    assert layer.weights_hook is None


def test_dropout_on_weights_in_training_alone() -> None:
    layer = randomised(MultiHeadAttention(W, H, dropout=0.5))
    x = torch.randn(B, L, W)
    trained = layer(x)[0]
    assert not torch.equal(trained, layer(x)[0])
    torch.manual_seed(5)
    first = layer(x)[0]
    torch.manual_seed(5)
    assert torch.equal(first, layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    mean = layer.train()(x[:1].expand(4000, L, W))[0].mean(0)
    torch.testing.assert_close(mean, layer.eval()(x[:1])[0][0], atol=0.1, rtol=0.1)


def test_a_score_function_of_ones_own() -> None:
    """A constant score: every allowed key counts alike."""
    layer = randomised(MultiHeadAttention(W, H, score=lambda q, k: q.new_zeros(*q.shape[:3], k.shape[2])))
    x = torch.randn(B, L, W)
    out, _ = layer(x, mask=Causal())
    means = layer.v_proj(x).cumsum(1) / torch.arange(1.0, L + 1)[:, None]
    torch.testing.assert_close(out, layer.out_proj(means), atol=1e-5, rtol=1e-5)


def test_initial_weights() -> None:
    layer = MultiHeadAttention(64, 4)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        bound = (6 / 128) ** 0.5
        assert linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert (linear.bias == 0).all()


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="10 is not divisible by num_heads 3"):
        MultiHeadAttention(10, 3)
    with pytest.raises(ShapeError, match="width of 10 cannot be split into 3"):
        split_heads(torch.zeros(1, 1, 10), 3)
    for heads in (0, -2):
        with pytest.raises(ConfigError, match=f"num_heads is {heads}; it must be a whole number of at least 1"):
            MultiHeadAttention(10, heads)
        with pytest.raises(ShapeError, match=f"cannot be split into {heads} heads"):
            split_heads(torch.zeros(1, 1, 10), heads)
    with pytest.raises(ConfigError, match="head_dim is -1"):
        MultiHeadAttention(10, 2, head_dim=-1)
    with pytest.raises(ShapeError, match="cannot be split into '2' heads"):
        getattr(split_heads, "__wrapped__", split_heads)(torch.zeros(1, 1, 10), "2")


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("q_len", "k_len", "mask"),
    [
        (L, L, Lengths(torch.tensor([0, 0]))),
        (L, L, Causal() & Lengths(torch.tensor([0, 3]))),
        (L, L, Dense(torch.eye(L) > 2)),
        (1, 1, None),
        (1, 1, Lengths(torch.tensor([0, 1]))),
        (0, L, None),
        (L, 0, None),
        (0, 0, Causal()),
    ],
    ids=str,
)
def test_nothing_to_attend_to(path: str, bf16: bool, q_len: int, k_len: int, mask: Any) -> None:
    """All-padding batches, lengths 0 and 1: zeros before the output map, finite gradients."""
    layer = randomised(MultiHeadAttention(W, H))
    query, key = torch.randn(B, q_len, W, requires_grad=True), torch.randn(B, k_len, W, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out, _ = layer(query, key, mask=mask)
    assert out.shape == (B, q_len, W)
    assert out.isfinite().all()
    allowed = dense_mask(mask, q_len, k_len, query.device)
    empty = torch.zeros(B, q_len, dtype=torch.bool) if k_len else torch.ones(B, q_len, dtype=torch.bool)
    if allowed is not None and k_len:
        empty = ~allowed.any(-1)[:, 0].expand(B, q_len)
    bias = layer.out_proj.bias.to(out.dtype)
    assert torch.equal(out[empty], bias.expand_as(out[empty]))
    out.float().sum().backward()
    for tensor in (query, key, *layer.parameters()):
        assert tensor.grad.isfinite().all()


def test_weights_by_request(path: str, make_mask: MakeMask) -> None:
    """The same output as without them, and the weights that a hook would see."""
    layer = randomised(MultiHeadAttention(W, H))
    x = torch.randn(B, L, W)
    mask = make_mask(B, L, L)
    plain, _ = layer(x, mask=mask)
    with observe(layer) as record:
        out, state, weights = layer(x, mask=mask, need_weights=True)
    assert state is None
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(record[""][0], weights)


@pytest.mark.parametrize("cross", [False, True])
def test_one_sequence_without_a_batch(cross: bool) -> None:
    layer = randomised(MultiHeadAttention(W, H))
    x, memory = torch.randn(B, L, W), torch.randn(B, 3, W) if cross else None
    whole, _, all_weights = layer(x, memory, mask=None if cross else Causal(), need_weights=True)
    one = None if memory is None else memory[1]
    out, state, weights = layer(x[1], one, mask=None if cross else Causal(), need_weights=True)
    assert state is None
    torch.testing.assert_close(out, whole[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights, all_weights[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x[1], one, mask=None if cross else Causal())[0], whole[1], atol=1e-5, rtol=1e-5)
    empty = KeyValueCache.empty(1, H, W // H, like=x)
    out, state = layer(x[1], mask=Causal(), state=empty)
    assert out.shape == (L, W)
    assert int(state.length) == L
    with pytest.raises(ShapeError, match=r"\(2, 2, 5, 12\) has 4 axes"):
        layer(torch.zeros(2, 2, L, W))


def test_scores_by_a_subclass(make_mask: MakeMask) -> None:
    """The tutorials' `get_scores`: overridden it is heeded, and can call the plain one."""

    class Doubled(MultiHeadAttention):
        def get_scores(self, q: Tensor, k: Tensor) -> Tensor:
            return 2 * super().get_scores(q, k)

    torch.manual_seed(0)
    doubled, plain = randomised(Doubled(W, H)), MultiHeadAttention(W, H)
    plain.load_state_dict(doubled.state_dict())
    x, mask = torch.randn(B, L, W), make_mask(B, L, L)
    by_argument = MultiHeadAttention(W, H, score=lambda q, k: 2 * plain.get_scores(q, k))
    by_argument.load_state_dict(doubled.state_dict())
    wanted = by_argument(x, mask=mask)[0]
    torch.testing.assert_close(doubled(x, mask=mask)[0], wanted, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        plain.q_proj.weight *= 2
        plain.q_proj.bias *= 2
    torch.testing.assert_close(plain(x, mask=mask)[0], wanted, atol=1e-5, rtol=1e-5)

    class Heir(Doubled):
        pass

    heir = Heir(W, H)
    heir.load_state_dict(doubled.state_dict())
    assert torch.equal(heir(x, mask=mask)[0], doubled(x, mask=mask)[0])


def test_biases_by_name() -> None:
    layer = randomised(MultiHeadAttention(W, H, bias=("v_proj", "out_proj")))
    assert [name for name, _ in layer.named_parameters() if name.endswith("bias")] == ["v_proj.bias", "out_proj.bias"]
    x = torch.randn(8, L, W)  # enough positions for the projections to be joined, were they alike
    torch.testing.assert_close(layer(x)[0].double(), slow(layer, x, x, x, None), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="bias is"):
        MultiHeadAttention(W, H, bias=("gate_proj",))


def test_a_score_that_cannot_be_called_is_refused() -> None:
    for score in ("cosine", 3):
        with pytest.raises(ConfigError, match=f"score is {score!r}; it must be a module or a function"):
            MultiHeadAttention(12, 3, score=score)  # type: ignore[arg-type]


def test_a_wrong_width_or_a_tensor_as_mask_is_named() -> None:
    attention = MultiHeadAttention(8, num_heads=2, key_dim=6)
    forward = MultiHeadAttention.forward.__wrapped__  # type: ignore[attr-defined]  # without the tests' own checks
    with pytest.raises(ShapeError, match=r"the query has shape \(1, 3, 5\), so its width is 5, .* width of 8"):
        forward(attention, torch.randn(1, 3, 5), torch.randn(1, 3, 6))
    with pytest.raises(ShapeError, match=r"the key .* width of 6; .* key_dim=7"):
        forward(attention, torch.randn(1, 3, 8), torch.randn(1, 3, 7))
    for wrong in (torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bool)):
        names = r"from_allowed.*from_blocked.*from_additive.*from_valid_lens.*from_sequence_first"
        with pytest.raises(ShapeError, match=names):
            forward(attention, torch.randn(1, 3, 8), torch.randn(1, 3, 6), mask=wrong)
        with pytest.raises(ShapeError, match="from_allowed"):
            Causal() & wrong  # type: ignore[operator]


@pytest.mark.unhooked
@pytest.mark.parametrize("need_weights", [False, True])
def test_each_key_needs_one_value(need_weights: bool) -> None:
    """SDPA on CPUs would compute something, from memory behind the shorter of the two."""
    attention, short, long = MultiHeadAttention(16, 4), torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    for key, value, said in ((short, long, "5 keys and 7 values"), (long, short, "7 keys and 5 values")):
        with pytest.raises(ShapeError, match=said):
            attention(short, key, value, need_weights=need_weights)
        with pytest.raises(ShapeError, match=said):
            attention(short[0], key[0], value[0], need_weights=need_weights)


LENGTHS = Lengths(torch.tensor([5, 3]))


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("shapes", "mask", "said"),
    [
        (((3, 16), (2, 5, 16)), None, r"\(3, 16\), \(2, 5, 16\).*all as \(length, width\)"),
        (((2, 3, 16), (5, 16)), None, r"\(2, 3, 16\), \(5, 16\)"),
        (((2, 3, 16), (4, 5, 16)), None, "one batch size"),
        (((3, 16), (5, 16)), LENGTHS, "2 rows for a batch of 1"),
        (((5, 2, 16), (5, 2, 16)), LENGTHS, r"2 rows for a batch of 5.*x.transpose\(0, 1\)"),
        (((5, 2, 16), (5, 2, 16)), KeyPadding(torch.ones(2, 5) > 0), r"5 keys but there are 2.*x.transpose\(0, 1\)"),
        (((5, 2, 16), (5, 2, 16)), Dense(torch.ones(2, 5, 5)), r"\(2, 5, 5\) does not fit 2 .*x.transpose\(0, 1\)"),
        (((5, 2, 16), (5, 2, 16)), Dense(torch.ones(5, 5)), r"\(5, 5\) does not fit 2 .*x.transpose\(0, 1\)"),
        (((5, 2, 16), (5, 2, 16)), Lengths(torch.ones(2, 5).long()), r"fit 2 queries.*x.transpose\(0, 1\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("need_weights", [False, True])
def test_other_axes_and_length_first_are_noticed(shapes: Any, mask: Any, said: str, need_weights: bool) -> None:
    query, key = (torch.randn(shape) for shape in shapes)
    kinds = (MultiHeadAttention(16, 4), DotProductAttention(), AdditiveAttention(16, 16, 8))
    for attention in kinds:
        with pytest.raises(ShapeError, match=said):
            attention(query, key, key, mask=mask, need_weights=need_weights)
    if query.dim() == 3 and mask is LENGTHS:
        for kind in (RelativeAttention(16, 4), LearnedRelativeAttention(16, 4, max_len=8)):
            with pytest.raises(ShapeError, match=said):
                kind(query, mask=mask, need_weights=need_weights)
        with pytest.raises(ShapeError, match="lengths has 2 rows for a batch of 5"):
            LocalSelfAttention(16, 4, chunk_len=4)(query, lengths=mask.lengths, need_weights=need_weights)


@pytest.mark.unhooked
@pytest.mark.parametrize("call", [dot_product_attention, lambda q, k, v: dot_product_weights(q, k)])
def test_the_functions_need_four_axes_and_one_width(call: Any) -> None:
    for shape in ((3, 4), (2, 3, 4)):
        with pytest.raises(ShapeError, match=r"each must be \(batch, heads, length, head_dim\)"):
            call(*torch.randn(3, *shape))
    with pytest.raises(ShapeError, match="queries have width 4 and keys 6"):
        call(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 6), torch.randn(1, 1, 5, 4))


def kinds_of_attention() -> dict[str, Callable[[Any], Any]]:
    """Every module that attends, and the functions for their masks, each as a function of one wrong argument."""
    x, key, sizes = torch.randn(2, 5, 16), torch.randn(2, 7, 16), Sizes(batch=2, num_heads=4, q_len=5, k_len=5)
    settings = LSHSettings(num_buckets=2, chunk_len=4)
    several, local = MultiHeadAttention(16, 4), LocalSelfAttention(16, 4, chunk_len=4)
    hashed, relative = LSHSelfAttention(16, 4, settings=settings, max_len=8), RelativeAttention(16, 4)
    return {
        "query": several,
        "key": lambda wrong: several(x, wrong),
        "value": lambda wrong: several(x, key, wrong),
        "mask": lambda wrong: several(x, mask=wrong),
        "mask of relative attention": lambda wrong: relative(x, mask=wrong),
        "lengths": lambda wrong: several(x, mask=Lengths(wrong)),
        "keep": lambda wrong: several(x, mask=KeyPadding(wrong)),
        "pattern": lambda wrong: several(x, mask=Dense(wrong)),
        "values": lambda wrong: several(x, mask=Bias(wrong)),
        "x of local attention": local,
        "lengths of local attention": lambda wrong: local(x, lengths=wrong),
        "x of hashed attention": lambda wrong: hashed(wrong, seed=0),
        "lengths of hashed attention": lambda wrong: hashed(x, seed=0, lengths=wrong),
        "x of relative attention": relative,
        "memory of relative attention": lambda wrong: relative(x, wrong),
        "x of learned distances": LearnedRelativeAttention(16, 4, max_len=8),
        "query of torch's interface": lambda wrong: TorchMultiheadAttention(16, 4)(wrong, x, x),
        "attn_mask of torch's interface": lambda wrong: TorchMultiheadAttention(16, 4)(x, x, x, attn_mask=wrong),
        "key of dot products": lambda wrong: DotProductAttention()(x, wrong, x),
        "value of additive attention": lambda wrong: AdditiveAttention(16, 16, 8)(x, x, wrong),
        "query of the function": lambda wrong: dot_product_attention(wrong, x[:, None], x[:, None]),
        "valid_lens": from_valid_lens,
        "mask of blocked pairs": lambda wrong: from_blocked(wrong, sizes),
        "mask of added numbers": lambda wrong: from_additive(wrong, sizes),
        "x1": lambda wrong: ReversibleSequence([])(wrong, x),
        "x2": lambda wrong: ReversibleSequence([])(x, wrong),
        "ids": TokenEmbedding(9, 16),
        "positions": lambda wrong: sinusoidal_table(wrong, 16),
        **{f"x of {name}": call for name, (call, _, _) in SINGLE_STEPS.items()},
    }


VECTORS = r"\(batch, length, d_model\), and the last one 16"
SINGLE_STEPS: dict[str, tuple[Callable[[Any], Any], str, list[tuple[int, ...]]]] = {
    "split heads": (lambda x: split_heads(x, 2), r"\(\.\.\., length, width\)", [(), (16,)]),
    "merged heads": (merge_heads, r"\(\.\.\., heads, length, head_dim\)", [(), (2, 5)]),
    "shifted distances": (relative_shift, r"\(\.\.\., q_len, k_len\)", [(), (16,)]),
    "feed-forward": (FeedForward(16, 32), r"\(\.\.\., d_model\), and the last one 16", [(), (2, 5, 15)]),
    "sinusoids": (SinusoidalPositions(16), VECTORS, [(), (5, 16), (2, 5, 15)]),
    "learned positions": (LearnedPositions(16, max_len=9), VECTORS, [(), (5, 16), (2, 5, 15)]),
    "axial positions": (AxialPositions((3, 3), (4, 12)), VECTORS, [(), (5, 16), (2, 5, 15)]),
    "rotary positions": (RotaryPositions(16), r"\(batch, heads, length, head_dim\), .* 16", [(), (2, 5, 16)]),
}
"""name -> a function of x, what is said of its axes, and shapes of another kind."""


@pytest.mark.unhooked
@pytest.mark.parametrize("name", SINGLE_STEPS)
def test_other_axes_are_named(name: str) -> None:
    call, said, shapes = SINGLE_STEPS[name]
    for shape in shapes:
        with pytest.raises(ShapeError, match=rf"^x has shape {re.escape(str(shape))}; its axes must be {said}\.$"):
            call(torch.zeros(shape))


@pytest.mark.unhooked
def test_two_streams_of_other_shapes_are_named() -> None:
    with pytest.raises(ShapeError, match=r"x1 has shape \(2, 5, 16\) and x2 \(1, 5, 16\)"):
        ReversibleSequence([])(torch.zeros(2, 5, 16), torch.zeros(1, 5, 16))


@pytest.mark.unhooked
@pytest.mark.parametrize("name", kinds_of_attention())
def test_arrays_and_lists_are_named_with_what_makes_a_tensor_of_them(name: str) -> None:
    """The error is of our kind, and of both types that torch raises."""
    call, argument = kinds_of_attention()[name], name.split()[0]
    array = np.zeros((2, 5, 16))
    for wrong, said in ((array, r", dtype=torch\.float32\)"), (array.astype(np.float32), r"\)"), ([1, 2], r"\)")):
        kind = type(wrong).__name__
        with pytest.raises(
            ShapeError, match=rf"^{argument} is {kind}; .*torch\.as_tensor\({argument}{said}\.$"
        ) as caught:
            call(wrong)
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, AttributeError)
    with pytest.raises(TypeError, match=rf"^{argument} is list; give a tensor( \(.*\))?\.$"):
        call(["words"])
