"""The Triton kernel of the loss, interpreted on a CPU, against loops over rows and tokens in float64."""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.loss import smoothed_loss
from manyheads.nn.smoothing import SmoothingKind, spread

pytest.importorskip("triton", reason="the package triton is not installed; make check-triton installs it")

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="make check-triton sets TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
WIDTH, PAD = 8, 3
KINDS: list[tuple[float, SmoothingKind]] = [(0.0, "all"), (0.1, "all"), (0.2, "without_padding"), (0.3, "others")]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def naive_row(z: list[float], target: int, smoothing: float, kind: SmoothingKind) -> tuple[float, float, list[float]]:
    """Return a row's loss, the target's negative log-likelihood, and p - t, one token at a time.

    Szegedy et al. 2016, sec. 7; a token of probability 0 in t adds nothing, also where log p is -inf.
    """
    highest = max(z)
    normaliser = highest + math.log(sum(math.exp(x - highest) for x in z))
    without = {"all": set(), "without_padding": {PAD}, "others": {PAD, target}}[kind]
    loss, errors = 0.0, []
    for token, x in enumerate(z):
        wanted = 0.0 if token in without else smoothing / (len(z) - len(without))
        wanted += 1 - smoothing if token == target else 0.0
        loss -= wanted * (x - normaliser) if wanted else 0.0
        errors.append(math.exp(x - normaliser) - wanted)
    return loss, normaliser - z[target], errors


def naive_loss(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, smoothing: float, kind: SmoothingKind, keep: Tensor
) -> tuple[float, float, list[Tensor]]:
    """Return the loss of the kept rows, their negative log-likelihood, and the gradients of hidden, weight, bias."""
    h, w, b = hidden.tolist(), weight.tolist(), bias.tolist()
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (hidden, weight, bias)]
    loss_sum = nll_sum = 0.0
    for row in range(len(h)):
        if not keep[row]:
            continue
        z = [sum(map(float.__mul__, h[row], w[token])) + b[token] for token in range(len(b))]
        loss, nll, errors = naive_row(z, int(targets[row]), smoothing, kind)
        loss_sum, nll_sum = loss_sum + loss, nll_sum + nll
        for token, error in enumerate(errors):
            grads[2][token] += error
            for column in range(WIDTH):
                grads[0][row, column] += error * w[token][column]
                grads[1][token, column] += error * h[row][column]
    return loss_sum, nll_sum, grads


def close(found: Tensor, wanted: Any, dtype: torch.dtype) -> None:
    """Up to a part of the largest number, because every number is a sum of numbers as large as it."""
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    assert found.isfinite().all()
    atol = TOLERANCE[dtype] * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab_size", [11, 1030])
@pytest.mark.parametrize(("smoothing", "kind"), KINDS)
def test_loss_and_gradients(
    smoothing: float, kind: SmoothingKind, vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several blocks of columns and of rows. One row has no loss, and a target that does not exist; padding is
    forbidden where nothing is due to it.
    """
    from manyheads.nn.kernels.triton import loss

    monkeypatch.setattr(loss, "COLUMNS", 512)
    monkeypatch.setattr(policy, "logit_rows_of_a_gpu", lambda vocab_size, dtype: 2)
    hidden, weight, bias = torch.randn(5, WIDTH), torch.randn(vocab_size, WIDTH), torch.randn(vocab_size)
    bias[PAD], bias[-1] = (
        0.0 if smoothing and kind == "all" else -math.inf,
        4.0,
    )  # the maximum changes in the last block
    targets, keep = torch.tensor([4, vocab_size - 1, -100, 9, 4]), torch.arange(5) != 2
    given = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    loss_sum, nll_sum, grads = naive_loss(given[0], targets, *given[1:], smoothing, kind, keep)
    more = (smoothing, 2048, kind, PAD, keep)
    with modes.using_triton():
        found, found_nll = smoothed_loss(given[0], targets, *given[1:], *more)
        with torch.no_grad():
            assert smoothed_loss(given[0], targets, *given[1:], *more)[0] == found
    assert found.dtype == torch.float32
    close(found, loss_sum, dtype)
    close(found_nll, nll_sum, dtype)
    for one, other in zip(torch.autograd.grad(found * 0.5, given), grads, strict=True):
        close(one, other * 0.5, dtype)


@pytest.mark.parametrize(("smoothing", "kind"), KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_any_size(dtype: torch.dtype, smoothing: float, kind: SmoothingKind) -> None:
    """Logits whose exponentials are beyond every type, equal ones, and forbidden ones before the first finite one."""
    from manyheads.nn.kernels.triton.loss import COLUMNS, loss_of_rows

    size = COLUMNS + 5
    logits = torch.randn(5, size)
    logits[0] *= 1e4
    logits[1] = 6e4
    logits[2] = -6e4
    logits[3], logits[3, COLUMNS:] = 5.0, 6.0  # the maximum grows in the last block, and the others count
    if not smoothing:
        logits[4, :COLUMNS] = -math.inf  # the whole first block
    logits, targets = logits.to(dtype), torch.tensor([8, 0, size - 1, 8, size - 2])
    wanted = [naive_row(z, int(target), smoothing, kind) for z, target in zip(logits.tolist(), targets, strict=True)]
    parts = spread(kind, smoothing, size)
    excluded = PAD if parts.count < size else None
    rows, found = logits.clone(), []
    for row in range(5):
        sums = loss_of_rows(rows[row, None], targets[row, None], None, parts, excluded, True).double()
        found.append([-parts.on_target * sums[0] - parts.share * sums[1], -sums[0]])
    for (loss, nll), (wanted_loss, wanted_nll, errors), row in zip(found, wanted, rows, strict=True):
        torch.testing.assert_close(loss.item(), wanted_loss, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(nll.item(), wanted_nll, rtol=1e-5, atol=1e-3)
        close(row, errors, dtype)


def test_what_has_no_loss_is_not_read_and_what_is_wrong_is_not_a_number() -> None:
    """A row of -inf, of NaN, or with a target outside of the vocabulary, has no loss that is a number, as by the
    formula; and the rows beside it have theirs.
    """
    from manyheads.nn.kernels.triton.loss import loss_of_rows

    for smoothing in (0.0, 0.1):
        parts = spread("all", smoothing, 10)
        logits = torch.randn(3, 10)
        logits[1] = math.nan
        keep, targets = torch.tensor([True, False, True]), torch.tensor([1, -100, 9])
        wanted = [naive_row(logits[row].tolist(), int(targets[row]), smoothing, "all") for row in (0, 2)]
        sums = loss_of_rows(logits, targets, keep, parts, None, True)
        close(-sums[0], sum(nll for _, nll, _ in wanted), torch.float32)
        close(logits[[0, 2]], [errors for *_, errors in wanted], torch.float32)
        assert not logits[1].any()
        for z, target in ((torch.full((10,), -math.inf), 1), (logits[0].index_fill(0, keep[:1].long(), math.nan), 2),
                          (torch.randn(10), 10), (torch.randn(10), -1)):  # fmt: skip
            assert loss_of_rows(z[None].clone(), torch.tensor([target]), None, parts, None, True)[0].isnan()


def test_loss_of_a_head_in_the_fast_mode() -> None:
    head, hidden = LinearHead(WIDTH, 11, bias=True), torch.randn(2, 3, WIDTH)
    keep = torch.tensor([[True] * 3, [True, False, False]])
    targets = torch.randint(4, 11, (2, 3))
    wanted = head.loss(hidden, targets, keep, label_smoothing=0.1)
    with modes.fast(), modes.using_triton():
        found = head.loss(hidden, targets, keep, label_smoothing=0.1)
    torch.testing.assert_close(found, wanted)


def test_no_rows() -> None:
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.zeros(11, WIDTH, requires_grad=True)
    with modes.using_triton():
        loss, nll = smoothed_loss(hidden, torch.zeros(0, dtype=torch.int64), weight, None, 0.1)
    assert loss == nll == 0
    assert not torch.autograd.grad(loss, weight, allow_unused=True, materialize_grads=True)[0].any()
