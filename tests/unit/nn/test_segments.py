"""Attention over sequences that lie one after the other in one row."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from naive_attention import naive_dot_product_attention
from torch import Tensor

from manyheads.errors import RequestError, ShapeError
from manyheads.nn.attention.masks import Causal, Segments, dense_mask
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.attention import dot_product_attention
from manyheads.nn.kernels.dropout import dropout, numbered_rows, numbered_tokens

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda")
QUERIES, KEYS = [0, 2, 2, 5, 6], [0, 3, 4, 4, 7]  # of the second only keys, of the third only queries


def starts(bounds: list[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def segments(causal: bool = False, **changes: Any) -> Segments:
    """Of the same queries and keys if causal."""
    made = {"query_starts": starts(QUERIES), "key_starts": starts(QUERIES if causal else KEYS), "longest": 3}
    return Segments(**{**made, **changes}, causal=causal)


def seen(causal: bool) -> Tensor:
    keys = QUERIES if causal else KEYS
    pattern = torch.zeros(QUERIES[-1], keys[-1], dtype=torch.bool)
    for (start, stop), (first, end) in zip(pairwise(QUERIES), pairwise(keys), strict=True):
        for query in range(start, stop):
            pattern[query, first:end] = True
            if causal:
                pattern[query, query + 1 : end] = False
    return pattern[None, None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", ["loop", "products"])
def test_each_sequence_attends_to_its_own_keys(path: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "segments_path", lambda *given: path)
    pattern = dense_mask(segments(causal), *seen(causal).shape[2:], CPU)
    assert pattern is not None
    assert torch.equal(pattern, seen(causal))
    sizes = (QUERIES[-1], *[seen(causal).shape[3]] * 2)
    q, k, v = (torch.randn(1, 2, size, 4, dtype=torch.float64, requires_grad=True) for size in sizes)
    factor = torch.randn(1, 2, QUERIES[-1], 4, dtype=torch.float64)
    wanted = naive_dot_product_attention(q, k, v, seen(causal))
    found = dot_product_attention(q, k, v, segments(causal))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((out * factor).sum(), [q, k, v]) for out in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    both = Causal() & segments(True)  # a mask of several parts is a pattern
    if causal:
        torch.testing.assert_close(dot_product_attention(q, k, v, both), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "changes", "rate", "error", "message"),
    [
        (1, {}, 0.1, RequestError, "no dropout of weights, here 0.1; set attention_dropout to 0"),
        (2, {}, 0.0, ShapeError, "there are 2 rows of queries"),
        (1, {"longest": 2}, 0.0, ShapeError, "up to 3 tokens.* at most 2; fill the row, or raise `longest`"),
        (1, {"key_starts": starts([0, 3, 4, 4, 6])}, 0.0, ShapeError, "the key sequences end at 6 .* the row has 7"),
    ],
)
def test_what_cannot_be_attended(rows, changes, rate, error, message):
    q, k = torch.zeros(rows, 2, 6, 4), torch.zeros(rows, 2, 7, 4)
    with pytest.raises(error, match=message):
        dot_product_attention(q, k, k, segments(**changes), rate)


@pytest.mark.parametrize(
    ("dtype", "widths", "lack"),
    [
        (torch.bfloat16, (64, 64), ""),
        (torch.float16, (256, 256), ""),
        (torch.float32, (64, 64), "bfloat16 or float16 on a GPU, not in float32; train in bf16, or use padded batches"),
        (torch.bfloat16, (60, 60), "a multiple of 8 up to 256, here 60 and 60; change num_heads"),
        (torch.bfloat16, (264, 264), "a multiple of 8 up to 256, here 264 and 264"),
        (torch.bfloat16, (64, 32), "heads of one width .* here 64 and 32"),
    ],
)
def test_what_the_kernel_of_a_gpu_lacks(dtype: torch.dtype, widths: tuple[int, int], lack: str) -> None:
    """On `meta`, whose own kernel refuses nothing."""
    q, v = (torch.zeros(1, 2, 6, width, dtype=dtype, device=META) for width in widths)
    bounds = starts(QUERIES).to(META)
    mask = Segments(bounds, bounds, longest=3, causal=True)
    if lack:
        with pytest.raises(RequestError, match=lack):
            dot_product_attention(q, q, v, mask)
    else:
        assert dot_product_attention(q, q, v, mask).shape == v.shape


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_an_old_gpu_is_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    lack = policy.segments_lack(CUDA, torch.bfloat16, 64, 64)
    assert (lack is None) is (capability >= (8, 0))
    assert lack is None or "compute capability 8.0" in lack


def test_dropout_by_sentence_and_position() -> None:
    """Wherever a token lies, and on whichever rank, it has the mask of its sentence's number and its position."""
    x = torch.ones(1, 6, 40)

    def masks(sizes: list[int], first: int) -> list[Tensor]:
        bounds = torch.tensor([0, *sizes]).cumsum(0)
        places = torch.cat([torch.arange(size) for size in sizes])
        torch.manual_seed(0)
        with numbered_rows(first, len(sizes), 9), numbered_tokens(bounds.int(), places):
            out = dropout(x[:, : len(places)], 0.4)
        return list(out[0].split(sizes))

    one, two, three = masks([3, 2, 1], 0)
    assert torch.equal(masks([2, 4], 1)[0], two)
    assert torch.equal(masks([1], 2)[0], three)
    assert torch.equal(masks([2, 4], 1)[1][:1], three)
    rows = torch.cat([one, two, three])
    assert len({tuple(row.tolist()) for row in rows}) == 6
    many = dropout(torch.ones(1, 1, 1), 0.0)
    assert many.eq(1).all()
    bounds, places = torch.arange(0, 4001, 4).int(), torch.arange(4).repeat(1000)
    with numbered_tokens(bounds, places):
        kept = dropout(torch.ones(1, 4000, 32), 0.3).ne(0).double()[0]
    assert kept.mean().item() == pytest.approx(0.7, abs=0.006)
    correlation = torch.corrcoef(kept.T)
    assert (correlation - torch.eye(32)).abs().max() < 0.08
    assert torch.corrcoef(torch.stack([kept[:-4].flatten(), kept[4:].flatten()]))[0, 1].abs() < 0.02
