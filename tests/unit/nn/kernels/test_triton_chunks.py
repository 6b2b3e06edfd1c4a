"""Hashed and local attention by Triton kernels, interpreted on a CPU, against loops and formulas in float64."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive_attention import naive_dot_product_attention, naive_lsh_attention
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.errors import RequestError, ShapeError
from manyheads.models.reformer.config import PRESETS
from manyheads.nn.attention.local import LocalSelfAttention, local_attention
from manyheads.nn.attention.lsh import LSHSelfAttention, LSHSettings, hash_vectors, lsh_attention, rotations
from manyheads.nn.attention.lsh_hash import mark_padding
from manyheads.nn.kernels import modes
from manyheads.nn.kernels.lsh import attend_pairs, hashed_order, sorting_order

pytest.importorskip("triton", reason="the package triton is not installed; make check-triton installs it")

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="make check-triton sets TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
B, H, CHUNK, FACTORS = 2, 2, 4, (4, 2)

LOCAL: dict[str, tuple[int, int, dict[str, Any]]] = {
    "causal": (13, 4, {}),
    "several blocks in a chunk": (70, 40, {}),
    "shorter than a chunk": (3, 4, {"causal": False, "chunks_after": 1}),
    "two before, one after": (18, 4, {"causal": False, "chunks_before": 2, "chunks_after": 1}),
    "after alone": (9, 4, {"causal": False, "chunks_before": 0, "chunks_after": 1}),
    "around the end, a chunk twice": (8, 4, {"causal": False, "chunks_after": 1, "wrap": True}),
    "penalties": (21, 8, {"penalties": 16}),
    "penalties, fewer than distances": (
        13,
        4,
        {"penalties": 3, "causal": False, "chunks_before": 2, "chunks_after": 1},
    ),
}
HASHED: dict[str, LSHSettings] = {
    "one round": LSHSettings(chunk_len=CHUNK, num_hashes=1),
    "four rounds, scaled": LSHSettings(chunk_len=CHUNK, num_hashes=4, scale=0.3, key_eps=0.1),
    "several blocks": LSHSettings(chunk_len=20, num_hashes=2),
    "both ways": LSHSettings(
        chunk_len=CHUNK, num_hashes=2, visible="chunk", causal=False, chunks_before=2, chunks_after=1
    ),
    "causal chunks": LSHSettings(chunk_len=CHUNK, num_hashes=1, visible="chunk", within_bucket=True),
    "around the end": LSHSettings(chunk_len=10, num_hashes=2, visible="chunk", wrap=True, chunks_before=3),
    "ring of rounds": LSHSettings(
        chunk_len=CHUNK, num_hashes=3, visible="chunk", look_across_rounds=True, wrap=True, within_bucket=True
    ),
    "rounds in a row": LSHSettings(
        chunk_len=CHUNK, num_hashes=2, visible="chunk", causal=False, look_across_rounds=True
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def vectors(length: int, *widths: int, size: float = 1.0) -> list[Tensor]:
    """(B, H, length, width) of each width; in memory heads follow the length."""
    return [(torch.randn(B, length, H, width) * size).transpose(1, 2) for width in widths]


def compare(
    attend: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    given: list[Tensor],
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> None:
    """Compare results and all gradients with those in float64, up to a part of the largest number.

    Args: size: of the scores, whose rounding becomes an error of the weights.
    """
    given = [x.to(dtype).requires_grad_() for x in given]
    wide = [x.detach().double().requires_grad_() for x in given]
    with modes.using_triton():
        found = attend(*given)
    wanted = exact(*wide)
    factor = torch.randn(found.shape).to(dtype)
    pairs = [(found, wanted)]
    grads = torch.autograd.grad((found * factor).sum(), given)
    pairs += zip(grads, torch.autograd.grad((wanted * factor).sum(), wide), strict=True)
    for one, other in pairs:
        assert one.dtype == dtype
        assert one.isfinite().all()
        atol = TOLERANCE[dtype] * size * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double(), other.double(), atol=atol, rtol=0)


def compare_local(
    length: int, chunk_len: int, kind: dict[str, Any], dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    options = dict(kind)
    distances = options.pop("penalties", None)
    lengths = torch.tensor([length, length // 2])

    def attend(query: Tensor, key: Tensor, value: Tensor, penalties: Tensor | None = None) -> Tensor:
        more = {**options, "chunk_len": chunk_len, "lengths": lengths, "penalties": penalties}
        return local_attention(query, key, value, **more)

    given = vectors(length, widths[0], widths[0], widths[1])
    compare(attend, attend, given + ([] if distances is None else [torch.randn(H, distances)]), dtype)


@pytest.mark.parametrize(("length", "chunk_len", "kind"), LOCAL.values(), ids=LOCAL)
def test_local(length: int, chunk_len: int, kind: dict[str, Any]) -> None:
    compare_local(length, chunk_len, kind, torch.float32, (5, 7))


@pytest.mark.parametrize("name", ["several blocks in a chunk", "penalties"])
def test_local_in_float16(name: str) -> None:
    compare_local(*LOCAL[name], torch.float16, (32, 40))


def test_local_against_the_loop() -> None:
    """Chunks of 4: a query sees its own chunk and the one before, and nothing later."""
    chunks = torch.arange(11) // 4
    behind = chunks[:, None] - chunks
    allowed = (behind >= 0) & (behind <= 1) & (torch.arange(11)[:, None] >= torch.arange(11))
    penalties = torch.randn(H, 8)
    compare(
        lambda *given: local_attention(*given, chunk_len=4, penalties=penalties),
        lambda *given: naive_dot_product_attention(*given, allowed[None, None], penalties=penalties.double()),
        vectors(11, 5, 5, 3),
    )


def compare_hashed(
    settings: LSHSettings, length: int, dtype: torch.dtype, widths: tuple[int, int], size: float = 1.0
) -> None:
    qk, v = vectors(length, *widths, size=size)
    lengths = torch.tensor([length, length // 2])
    buckets = hash_vectors(qk, rotations(0, H, widths[0], settings.num_hashes, FACTORS), FACTORS)
    compare(
        lambda *given: lsh_attention(*given, buckets, settings, lengths=lengths),
        lambda *given: attend_pairs(*given, buckets, settings, lengths),
        [qk, v], dtype, size,
    )  # fmt: skip


@pytest.mark.parametrize("settings", HASHED.values(), ids=HASHED)
def test_hashed(settings: LSHSettings) -> None:
    compare_hashed(settings, 22, torch.float32, (8, 6))


@pytest.mark.parametrize(("name", "widths"), [("one round", (20, 64)), ("ring of rounds", (64, 16))])
def test_hashed_in_float16(name: str, widths: tuple[int, int]) -> None:
    compare_hashed(HASHED[name], 19, torch.float16, widths)


def test_scores_beyond_what_exp_can_bear() -> None:
    compare_hashed(HASHED["several blocks"], 70, torch.float32, (8, 6), 60.0)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_hashed_against_the_loop(rounds: int) -> None:
    """By the rule of buckets; some queries see nothing in any round, and keep their own value."""
    settings = LSHSettings(chunk_len=CHUNK, num_hashes=rounds, scale=0.7, key_eps=0.0)
    buckets = torch.randint(0, 5, (B, H, rounds, 15))
    compare(
        lambda *given: lsh_attention(*given, buckets, settings, lengths=torch.tensor([15, 6])),
        lambda *given: naive_lsh_attention(*given, buckets, CHUNK, [15, 6], 0.7),
        vectors(15, 8, 6),
    )


@pytest.mark.parametrize("visible", ["bucket", "chunk"])
def test_one_bucket(visible: Any) -> None:
    settings = LSHSettings(chunk_len=CHUNK, num_hashes=2, visible=visible)
    buckets = torch.zeros(B, H, 2, 10, dtype=torch.int64)
    compare(
        lambda *given: lsh_attention(*given, buckets, settings),
        lambda *given: attend_pairs(*given, buckets, settings),
        vectors(10, 8, 8),
    )


def test_padding_is_not_read() -> None:
    settings, lengths = HASHED["one round"], torch.tensor([6, 0])
    qk, v = vectors(9, 8, 6)
    noise = [x.clone().index_fill_(2, torch.tensor([6, 7, 8]), torch.inf).requires_grad_() for x in (qk, v)]
    for x in noise:
        x.data[1] = torch.nan
    buckets = torch.randint(0, 2, (B, H, 1, 9))
    with modes.using_triton():
        hashed = lsh_attention(*noise, buckets, settings, lengths=lengths)
        local = local_attention(noise[0], *noise, chunk_len=4, lengths=lengths)
    cut = [x[:1, :, :6] for x in (qk, v)]
    torch.testing.assert_close(hashed[:1, :, :6], lsh_attention(*cut, buckets[:1, ..., :6], settings))
    torch.testing.assert_close(local[:1, :, :6], local_attention(cut[0], *cut, chunk_len=4))
    for out in (hashed, local):
        assert not out[0, :, 6:].any()
        assert not out[1].any()
        for grad in torch.autograd.grad(out.sum(), noise):
            assert grad.isfinite().all()
            assert not grad[1].any()


@pytest.mark.parametrize("factors", [(6,), (40, 6), (2,) * 30])
@pytest.mark.parametrize("padded", [False, True])
def test_order_is_that_of_the_same_buckets(factors: tuple[int, ...], padded: bool) -> None:
    """Small whole numbers are exact in float32, and often equal, so that the first of equal directions counts."""
    settings = LSHSettings(chunk_len=5, num_hashes=2)
    rows, heads, length = (1, 1, 9) if len(factors) > 2 else (B, H, 39)  # with many factors keys have 64 bits
    qk = torch.randint(-2, 3, (rows, length, heads, 6)).float().transpose(1, 2)
    drawn = torch.randint(-2, 3, (heads, 6, 2, sum(factors) // 2)).float()
    lengths = torch.tensor([length, 17])[-rows:].clamp(max=5 if rows == 1 else length) if padded else None
    buckets = hash_vectors(qk, drawn, factors)
    wanted = sorting_order(mark_padding(buckets, lengths, 1 << 31), settings, lengths)
    with modes.using_triton():
        found = hashed_order(qk, drawn, factors, settings, lengths)
        half = hashed_order(qk.half(), drawn, factors, settings, lengths)
        with pytest.raises(ShapeError, match="do not hash vectors"):
            hashed_order(qk, drawn, (2, *factors), settings, lengths)
        broken = hashed_order(torch.full_like(qk, torch.nan), drawn, factors, settings)
    assert torch.equal(found, wanted)
    assert torch.equal(half, wanted)
    assert torch.equal((broken >> 1).sort(-1).values, torch.arange(broken.shape[-1]).int().expand_as(broken))


@pytest.mark.parametrize("reversible", [True, False])
def test_a_model_outside_of_the_block(reversible: bool) -> None:
    """The backward pass is outside of it, and computes the layers again."""
    config = replace(PRESETS["debug"], dropout=0.0, vocab_size=17, reversible=reversible, keep_attention=reversible)
    model = build_model(config).train()
    x, found = torch.randint(17, (1, 14)), []
    for by_name in (False, True):
        torch.manual_seed(1)
        with modes.using_triton(by_name):
            loss = model(x).loss_sum
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * max(1.0, other.abs().max().item()), rtol=0)


def test_what_is_refused() -> None:
    x = torch.randn(1, 9, 16, requires_grad=True)
    hashed, local = (
        LSHSelfAttention(16, 2, settings=HASHED["one round"], max_len=32),
        LocalSelfAttention(16, 2, chunk_len=4),
    )
    with modes.using_triton():
        for out in (hashed(x, seed=0), local(x)):
            [grad] = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            with pytest.raises(RequestError, match="cannot be differentiated again"):
                grad.square().sum().backward()
        assert local(x, need_weights=True)[1].shape == hashed(x, seed=0, need_weights=True)[1].shape == (1, 2, 9, 9)
        for module in (hashed, local):
            assert module(x[:0], **({"seed": 0} if module is hashed else {})).shape == (0, 9, 16)
            assert module(x[:, :0], **({"seed": 0} if module is hashed else {})).shape == (1, 0, 16)
        with pytest.raises(RequestError, match="The Triton kernel of chunk attention computes in float32, float16"):
            local_attention(*[x.double()[:, None]] * 3, chunk_len=4)
