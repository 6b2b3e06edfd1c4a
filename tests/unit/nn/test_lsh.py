"""Hashed attention: chunk by chunk against pair by pair, that against the loop; caches against the whole."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive_attention import naive_dot_product_attention, naive_lsh_attention
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention, LSHSettings, hash_vectors, lsh_attention, rotations
from manyheads.nn.attention.lsh_hash import shared_qk_attention, visible_pairs
from manyheads.nn.attention.multi_head import merge_heads, split_heads
from manyheads.nn.attention.settings import automatic_buckets
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.lsh import attend_pairs

B, H, D, E, CHUNK = 2, 2, 8, 6, 4
FACTORS = (6,)
CHUNKS: dict[str, dict[str, Any]] = {
    "ring of rounds": {"num_hashes": 3, "look_across_rounds": True, "wrap": True},
    "ring, duplicates once": {"num_hashes": 3, "look_across_rounds": True, "wrap": True, "correct_duplicates": True},
    "own bucket": {"num_hashes": 2, "within_bucket": True, "correct_duplicates": True, "wrap": True},
    "both ways": {"num_hashes": 2, "causal": False, "chunks_before": 2, "chunks_after": 1},
    "after alone": {"num_hashes": 2, "causal": False, "chunks_before": 0, "chunks_after": 1, "within_bucket": True},
    "rounds in a row": {"num_hashes": 3, "causal": False, "look_across_rounds": True, "correct_duplicates": True},
}
KINDS: dict[str, LSHSettings] = {
    "one round": LSHSettings(chunk_len=CHUNK, num_hashes=1),
    "three rounds": LSHSettings(chunk_len=CHUNK, num_hashes=3),
    "duplicates once": LSHSettings(chunk_len=CHUNK, num_hashes=3, correct_duplicates=True),
    "scaled": LSHSettings(chunk_len=CHUNK, num_hashes=2, scale=0.3, key_eps=0.0),
    **{name: LSHSettings(chunk_len=CHUNK, visible="chunk", **options) for name, options in CHUNKS.items()},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def settings(request: pytest.FixtureRequest) -> LSHSettings:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[bool]]:
    """Works on all at once first, then on one row and a few chunks at a time."""

    def sizes() -> Iterator[bool]:
        for few in (False, True):
            most_scores, most_rows = (128, 1) if few else (1 << 30, 1 << 30)
            monkeypatch.setattr(policy, "lsh_chunks_at_once", lambda each, _, most=most_scores: max(1, most // each))
            monkeypatch.setattr(policy, "lsh_rows_at_once", lambda *_, most=most_rows: most)
            yield few

    return sizes


def inputs(length: int, settings: LSHSettings, size: float = 1.0, dtype: torch.dtype = torch.float64) -> Any:
    """qk, v, buckets, and a gradient for the output."""
    qk = (torch.randn(B, length, H, D, dtype=dtype) * size).transpose(1, 2).requires_grad_()
    v = torch.randn(B, length, H, E, dtype=dtype).transpose(1, 2).requires_grad_()
    buckets = hash_vectors(qk, rotations(0, H, D, settings.num_hashes, FACTORS), FACTORS)
    return qk, v, buckets, torch.randn(B, H, length, E, dtype=dtype)


def with_gradients(out: Tensor, grad: Tensor, *wanted: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_rounds_without_torchs_bags(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch cannot read /proc/cpuinfo, its embedding_bag raises; the sums are the same without."""
    settings = KINDS["three rounds"]
    qk, v, buckets, grad = inputs(22, settings, dtype=dtype)
    found = []
    for has_bags in (True, False):
        monkeypatch.setattr(policy, "has_embedding_bag", lambda device, has_bags=has_bags: has_bags)
        out = lsh_attention(qk, v, buckets, settings)
        found.append(with_gradients(out, grad, qk, v))
    bounds = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}  # a rounding or two of bfloat16
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **bounds)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("length", "size"), [(22, 1.0), (22, 60.0), (3, 1.0), (16, 1.0)])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_against_pairs(tiles, settings, length, size, padded):
    """Output and gradients, with scores beyond what exp can bear, and with tiles that end anywhere."""
    qk, v, buckets, grad = inputs(length, settings, size)
    lengths = torch.tensor([length, length // 2]) if padded else None
    slow = with_gradients(attend_pairs(qk, v, buckets, settings, lengths), grad, qk, v)
    for _ in tiles():
        fast = with_gradients(lsh_attention(qk, v, buckets, settings, lengths=lengths), grad, qk, v)
        for ours, wanted in zip(fast, slow, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("rounds", [1, 3])
def test_pairs_against_the_loop(rounds: int) -> None:
    settings = LSHSettings(chunk_len=CHUNK, num_hashes=rounds, scale=0.7, key_eps=0.0)
    qk, v, buckets, _ = inputs(23, settings)
    lengths = torch.tensor([23, 11])
    wanted = naive_lsh_attention(qk.detach(), v.detach(), buckets, CHUNK, lengths.tolist(), 0.7)
    torch.testing.assert_close(attend_pairs(qk, v, buckets, settings, lengths).detach(), wanted)


def test_float32_and_bfloat16_are_as_near_as_plain_autograd() -> None:
    settings = LSHSettings(chunk_len=16, num_hashes=2)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, None)):
        qk, v = (torch.randn(2, 2, 150, 64).to(dtype).requires_grad_() for _ in range(2))
        buckets = hash_vectors(qk, rotations(0, 2, 64, 2, (8,)), (8,))
        grad = torch.randn(2, 2, 150, 64).to(dtype)
        exact = [x.detach().double().requires_grad_() for x in (qk, v)]
        truth = with_gradients(attend_pairs(*exact, buckets, settings), grad.double(), *exact)
        slow = with_gradients(attend_pairs(qk, v, buckets, settings), grad, qk, v)
        fast = with_gradients(lsh_attention(qk, v, buckets, settings), grad, qk, v)
        for ours, plain, true in zip(fast, slow, truth, strict=True):
            assert ours.dtype == dtype
            if most is not None:
                assert (ours - true).abs().max() < most
            else:
                assert (ours - true).abs().mean() < 2 * (plain - true).abs().mean()


def test_codes_tell_every_bucket_apart() -> None:
    """bfloat16 hides other buckets by codes in the product: as many buckets as positions, and large scores."""
    settings = LSHSettings(chunk_len=8, num_hashes=2)
    qk = torch.nn.functional.normalize(torch.randn(1, 1, 64, 32), dim=-1).mul(50).bfloat16()
    v = torch.randn(1, 1, 64, 32).bfloat16()
    for number in (1, 2, 63, 64):
        buckets = torch.arange(128).view(1, 1, 2, 64) * 37 % number
        wanted = attend_pairs(qk.double(), v.double(), buckets, settings)
        assert (lsh_attention(qk, v, buckets, settings) - wanted).abs().max() < 0.15


@pytest.mark.parametrize("visible", ["bucket", "chunk"])
def test_one_bucket_is_exact_attention(visible: Any) -> None:
    settings = LSHSettings(chunk_len=32, num_hashes=2, visible=visible)
    qk, v, buckets, _ = inputs(20, settings)
    exact = shared_qk_attention(qk, v)
    torch.testing.assert_close(lsh_attention(qk, v, torch.zeros_like(buckets), settings), exact)
    keys = qk.detach() / qk.detach().norm(dim=-1, keepdim=True)
    earlier = torch.tril(torch.ones(20, 20, dtype=torch.bool), -1)
    earlier[0, 0] = True
    wanted = naive_dot_product_attention(qk.detach(), keys, v.detach(), earlier, scale=1.0)
    torch.testing.assert_close(exact.detach(), wanted, atol=1e-5, rtol=1e-5)


def test_who_sees_whom() -> None:
    """By buckets: 0 0 1 0 0 0 with chunks of 2."""
    buckets = torch.tensor([0, 0, 1, 0, 0, 0]).view(1, 1, 1, 6)
    seen = visible_pairs(buckets, LSHSettings(chunk_len=2))[0, 0, 0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[], [0], [], [0, 1], [1, 3], [3, 4]]


def test_dropout_is_replayed_and_keeps_the_mean() -> None:
    settings = LSHSettings(chunk_len=CHUNK, num_hashes=2)
    qk, v, buckets, grad = inputs(24, settings)

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return lsh_attention(x, v, buckets, settings, dropout_rate=0.4)

    torch.testing.assert_close(run(qk), run(qk))
    (gradient,) = torch.autograd.grad(run(qk), qk, grad)
    step = torch.randn_like(qk) * 1e-6
    moved = ((run(qk + step) - run(qk - step)) * grad).sum() / 2
    torch.testing.assert_close((gradient * step).sum(), moved, rtol=1e-6, atol=1e-12)
    with torch.no_grad():
        many = torch.stack([lsh_attention(qk, v, buckets, settings, dropout_rate=0.4) for _ in range(400)])
    assert (many.mean(0) - lsh_attention(qk, v, buckets, settings)).abs().max() < 0.35


def test_hashing_is_the_argmax_of_rotations() -> None:
    vectors, drawn = torch.randn(B, H, 50, D), rotations(3, H, D, 2, (6, 4))
    turned = torch.einsum("bhld,hdrw->bhrlw", vectors, drawn)
    first = torch.cat([turned[..., :3], -turned[..., :3]], dim=-1).argmax(-1)
    second = torch.cat([turned[..., 3:], -turned[..., 3:]], dim=-1).argmax(-1)
    assert torch.equal(hash_vectors(vectors, drawn, (6, 4)), first + 6 * second)
    assert hash_vectors(vectors, drawn, (6, 4)).unique().numel() > 12
    with pytest.raises(ShapeError, match="do not hash"):
        hash_vectors(vectors, drawn, (6,))


def test_rotations_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    assert torch.equal(rotations(7, H, D, 2, (4,)), rotations(torch.tensor(7), H, D, 2, (4,)))
    assert not torch.equal(rotations(7, H, D, 2, (4,)), rotations(8, H, D, 2, (4,)))
    assert torch.equal(before, torch.get_rng_state())


def test_automatic_buckets() -> None:
    assert automatic_buckets(10, 64) == (2,)
    assert automatic_buckets(4096, 64) == (64,)
    assert automatic_buckets(4097, 64) == (8, 16)
    assert automatic_buckets(16384, 64) == (16, 16)
    assert automatic_buckets(1 << 20, 64) == (128, 128)


def attention(**options: Any) -> LSHSelfAttention:
    settings = replace(LSHSettings(chunk_len=CHUNK, num_hashes=3), **options)
    return LSHSelfAttention(12, H, D, settings=settings, max_len=32).double().eval()


def test_steps_of_ragged_rows_and_reordered_caches() -> None:
    module, x = attention(), torch.randn(3, 27, 12, dtype=torch.float64)
    whole, lengths = module(x, seed=4), torch.tensor([7, 12, 3])
    _, cache = module.step(x[:, :12], module.start(3, seed=4), lengths)
    order = torch.tensor([2, 0, 1])
    branch = cache.clone().reorder(order)
    module.step(x[:, :5], cache)  # uses this one up, and not the branch
    following = torch.stack([x[row, n : n + 9] for row, n in enumerate(lengths.tolist())])[order]
    wanted = torch.stack([whole[row, n : n + 9] for row, n in enumerate(lengths.tolist())])[order]
    out, branch = module.step(following[:, :2], branch)
    torch.testing.assert_close(out, wanted[:, :2])
    counts = torch.tensor([7, 4, 1])
    out, branch = module.step(following[:, 2:], branch, counts)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(out[row, :count], wanted[row, 2 : 2 + count])
    assert branch.past.row_lengths().tolist() == [12, 13, 15]
    assert all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(branch))


def test_a_cache_that_is_reset_does_not_grow() -> None:
    """Row 1 begins again and again, then both: the buffers stay as large as after two turns, the outputs the same."""
    module, x = attention(), torch.randn(2, 27, 12, dtype=torch.float64)
    cache, sizes = module.start(2, seed=4), []
    for turn in range(8):
        out, cache = module.step(x[:, :9], cache, torch.tensor([9 if turn == 0 else 0, 9]))
        torch.testing.assert_close(out[1], module(x[1:, :9], seed=4)[0])
        cache = cache.reset(torch.tensor([False, True]))
        assert int(cache.past.length) == 9
        sizes.append(cache.past.keys[0].shape[2])
    assert sizes[2:] == [sizes[2]] * 6
    cache = cache.reset(torch.tensor([True, True]))
    assert cache.is_empty
    torch.testing.assert_close(module.step(x, cache)[0], module(x, seed=4))


@pytest.mark.parametrize("shape", [(0, 9, 12), (2, 0, 12), (0, 0, 12)])
@pytest.mark.parametrize("kind", ["lsh", "exact", "local"])
def test_no_rows_or_no_positions(kind: str, shape: tuple[int, ...]) -> None:
    hashed, local = attention(num_hashes=0 if kind == "exact" else 3), LocalSelfAttention(12, 2, chunk_len=4).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for lengths in (None, torch.zeros(shape[0], dtype=torch.int64)):
        out = local(x, lengths=lengths) if kind == "local" else hashed(x, seed=0, lengths=lengths)
        assert out.shape == shape
        out.sum().backward()


def test_a_module_in_float16() -> None:
    """It is computed in float32, and gives back its own type."""
    module = attention()
    x = torch.randn(2, 27, 12, dtype=torch.float64)
    buckets = module.buckets_of(x, seed=4)  # rounding may change a bucket
    exact, given = module(x, buckets=buckets), x.half().requires_grad_()
    out = module.half()(given, buckets=buckets)
    assert out.dtype == torch.float16
    out.sum().backward()
    assert given.grad.dtype == torch.float16
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.02)


def test_the_weights_that_are_asked_for_are_those_that_are_used() -> None:
    for options in ({}, {"exact_len": 6}, {"num_hashes": 0}):
        module, x = attention(**options), torch.randn(2, 19, 12, dtype=torch.float64)
        lengths, caught = torch.tensor([19, 8]), []
        wanted = module(x, seed=1, lengths=lengths)
        module.weights_hook = caught.append
        shown = module(x, seed=1, lengths=lengths)
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(shown[row, :length], wanted[row, :length])
        torch.testing.assert_close(caught[0].sum(-1), torch.ones(2, H, 19, dtype=torch.float64))


def test_given_buckets_and_other_rounds() -> None:
    module, x = attention(), torch.randn(2, 19, 12, dtype=torch.float64)
    lengths = torch.tensor([19, 8])
    buckets = module.buckets_of(x, lengths=lengths, seed=1)
    assert bool((buckets[1, :, :, 8:] == module.num_buckets).all())
    torch.testing.assert_close(module(x, lengths=lengths, buckets=buckets), module(x, lengths=lengths, seed=1))
    more = module(x, seed=1, num_hashes=8)
    assert (more - module(x, seed=1)).abs().max() > 1e-3
    torch.testing.assert_close(module(x, num_hashes=0), attention_like(module, num_hashes=0)(x))


def attention_like(module: LSHSelfAttention, **options: Any) -> LSHSelfAttention:
    other = attention(**options)
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hashes": -1}, "num_hashes is -1"),
        ({"chunk_len": 0}, "chunk_len is 0"),
        ({"exact_len": -2}, "exact_len is -2"),
        ({"num_buckets": 5}, "even"),
        ({"num_buckets": (4, 3)}, "even"),
        ({"causal": False}, "set visible to 'chunk'"),
        ({"chunks_before": 2}, "apply to visible 'chunk' only"),
        ({"wrap": True}, "wrap applies to visible 'chunk' only"),
    ],
)
def test_settings_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LSHSettings(**options)


def test_requests_that_cannot_be_served() -> None:
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    with pytest.raises(RequestError, match="a seed"):
        attention()(x)
    with pytest.raises(RequestError, match="a seed"):
        attention().start(1)
    with pytest.raises(RequestError, match="visible 'chunk', so its outputs depend on later tokens"):
        attention(visible="chunk").start(1, seed=0)
    with pytest.raises(ConfigError, match="not divisible"):
        LSHSelfAttention(10, 3, settings=LSHSettings(), max_len=8)
    with pytest.raises(ShapeError, match="do not match"):
        lsh_attention(*(torch.randn(1, 1, 4, 2) for _ in range(2)), torch.zeros(1, 1, 1, 5).long(), LSHSettings())


@pytest.mark.parametrize("kind", ["lsh", "exact", "local"])
def test_weights_on_request_and_one_sequence_alone(kind: str) -> None:
    """Weights times values are what comes out; a sequence alone is a batch of one; other ranks are refused."""
    torch.manual_seed(0)
    settings = LSHSettings(num_hashes=0 if kind == "exact" else 2, chunk_len=4)
    local = LocalSelfAttention(16, 2, chunk_len=4).eval()
    hashed = LSHSelfAttention(16, 2, settings=settings, max_len=32).eval()
    module: Any = local if kind == "local" else hashed
    more: dict[str, Any] = {} if kind == "local" else {"seed": 3}
    x, lengths = torch.randn(2, 18, 16), torch.tensor([18, 11])
    out, weights = module(x, lengths=lengths, need_weights=True, **more)
    assert weights.shape == (2, 2, 18, 18)
    plain = module(x, lengths=lengths, **more)
    real = torch.arange(18) < lengths[:, None]
    torch.testing.assert_close(out[real], plain[real], atol=1e-5, rtol=1e-5)
    values = split_heads(module.v_proj(x), 2)
    torch.testing.assert_close(module.out_proj(merge_heads(weights @ values))[real], plain[real], atol=1e-5, rtol=1e-5)
    for row, length in zip(range(2), lengths, strict=True):
        alone, of_one = module(x[row], lengths=length, need_weights=True, **more)
        torch.testing.assert_close(alone[:length], plain[row, :length], atol=1e-5, rtol=1e-5)
        assert of_one.shape == (2, 18, 18)
        torch.testing.assert_close(module(x[row, :length], **more), plain[row, :length], atol=1e-5, rtol=1e-5)
    with pytest.raises(ShapeError, match="must be"):
        module(x[None], **more)
