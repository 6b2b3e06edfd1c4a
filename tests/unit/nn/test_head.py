"""The linear head's loss against torch's, chunk by chunk, and its hand-made gradient."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.errors import ConfigError
from manyheads.extras.peers.annotated_transformer import LabelSmoothing
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import loss as module
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.loss import plain_loss, smoothed_loss, smoothed_targets
from manyheads.nn.smoothing import SmoothingKind

N, D, V = 23, 6, 11
CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    row = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
    return hidden, torch.randint(0, V, (N,)), weight, row


def reference(hidden: Any, targets: Any, weight: Any, bias: Any, smoothing: float) -> Any:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 23, 1000])
def test_loss_and_gradients_are_cross_entropys(bias: bool, smoothing: float, chunk: int) -> None:
    hidden, targets, weight, row = tensors(bias=bias)
    inputs = [x for x in (hidden, weight, row) if x is not None]
    loss, nll = smoothed_loss(hidden, targets, weight, row, smoothing, chunk)
    wanted = reference(hidden, targets, weight, row, smoothing)
    torch.testing.assert_close(loss, wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(nll, reference(hidden, targets, weight, row, 0.0), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(plain_loss(hidden, targets, weight, row, smoothing), (wanted, nll))
    assert not nll.requires_grad
    ours, theirs = torch.autograd.grad(loss * 0.37, inputs), torch.autograd.grad(wanted * 0.37, inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


KINDS: tuple[SmoothingKind, ...] = ("all", "without_padding", "others")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pad", [0, 7, V - 1])
def test_every_kind_of_smoothing_is_cross_entropy_with_its_targets(kind: SmoothingKind, bias: bool, pad: int) -> None:
    hidden, targets, weight, row = tensors(bias=bias)
    targets = torch.where(targets == pad, (pad + 1) % V, targets)
    inputs = [x for x in (hidden, weight, row) if x is not None]
    given = (hidden, targets, weight, row)
    loss, nll = smoothed_loss(*given, 0.3, 4, kind, pad)
    asked = smoothed_targets(targets, V, 0.3, kind, pad).double()
    torch.testing.assert_close(asked.sum(1), torch.ones(N).double())
    log_probs = F.log_softmax(F.linear(hidden, weight, row), dim=1)
    wanted = -(asked * log_probs).sum()
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(loss, plain_loss(*given, 0.3, kind, pad)[0])
    torch.testing.assert_close(nll, reference(*given, 0.0))
    theirs = torch.autograd.grad(plain_loss(*given, 0.3, kind, pad)[0], inputs)
    for one, other in zip(torch.autograd.grad(loss, inputs), theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_the_three_kinds_by_hand() -> None:
    """Five tokens, 0 is padding, smoothing 0.3; `others` is the picture of the Annotated Transformer."""
    wanted = {
        "all": [0.06, 0.06, 0.76, 0.06, 0.06],
        "without_padding": [0.0, 0.075, 0.775, 0.075, 0.075],
        "others": [0.0, 0.1, 0.7, 0.1, 0.1],
    }
    for kind in KINDS:
        found = smoothed_targets(torch.tensor([0, 2]), 5, 0.3, kind, 0)
        torch.testing.assert_close(found, torch.tensor([[0.0] * 5, wanted[kind]]))


def test_others_is_the_loss_of_the_annotated_transformer() -> None:
    """Which adds the entropy of the targets."""
    hidden, targets, weight, row = tensors()
    targets = targets.clamp(min=1)
    peer = LabelSmoothing(V, 0, 0.3)
    asked = peer.targets(targets, torch.float64)
    entropy = -torch.special.xlogy(asked, asked).sum()
    loss, _ = smoothed_loss(hidden, targets, weight, row, 0.3, smoothing_kind="others")
    wanted = peer(F.log_softmax(F.linear(hidden, weight, row), dim=1), targets)
    torch.testing.assert_close(loss - entropy, wanted)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_padding_that_a_bias_forbids_spoils_nothing(kind: SmoothingKind) -> None:
    hidden, targets, weight, row = tensors()
    with torch.no_grad():
        row[0] = -torch.inf
    loss, _ = smoothed_loss(hidden, targets.clamp(min=1), weight, row, 0.3, 4, kind, 0)
    grads = torch.autograd.grad(loss, (hidden, weight, row))
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)


def test_too_few_tokens_to_share() -> None:
    hidden, targets = torch.randn(3, 4), torch.ones(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="at least 3 tokens, not 2"):
        smoothed_loss(hidden, targets, torch.randn(2, 4), None, 0.1, smoothing_kind="others")


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 12), st.integers(1, 40), st.floats(0.0, 0.9))
def test_tiles_and_chunks_of_any_size(rows: int, vocab: int, chunk: int, tile: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + vocab)
    hidden = torch.randn(rows, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    before, policy._TILE_NUMBERS = policy._TILE_NUMBERS, tile
    try:
        loss, _ = smoothed_loss(hidden, targets, weight, None, smoothing, chunk)
    finally:
        policy._TILE_NUMBERS = before
    wanted = reference(hidden, targets, weight, None, smoothing)
    torch.testing.assert_close(loss, wanted, atol=1e-9, rtol=1e-9)
    for one, other in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_token_that_a_bias_forbids_spoils_no_gradient() -> None:
    """Rows that only make a product's size round have that bias too, and nothing to meet it with but zeros."""
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    bias = torch.zeros(7, requires_grad=True)
    with torch.no_grad():
        bias[2] = -torch.inf
    targets = torch.tensor([0, 1, 3, 4, 5])
    loss, _ = smoothed_loss(hidden, targets, weight, bias)
    wanted = torch.nn.functional.cross_entropy(hidden @ weight.t() + bias, targets, reduction="sum")
    torch.testing.assert_close(loss, wanted)
    for one, other in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (loss, wanted)), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


def test_gradcheck() -> None:
    hidden, targets, weight, row = tensors()
    assert torch.autograd.gradcheck(lambda h, w, b: smoothed_loss(h, targets, w, b, 0.2, 5)[0], (hidden, weight, row))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_a_part_that_needs_no_gradient(frozen: str) -> None:
    parts = dict(zip(("hidden", "targets", "weight", "bias"), tensors(), strict=True))
    parts[frozen] = parts[frozen].detach()
    names = [name for name in ("hidden", "weight", "bias") if name != frozen]
    loss, _ = smoothed_loss(*parts.values(), 0.1, 7)
    wanted = reference(*parts.values(), 0.1)
    inputs = [parts[name] for name in names]
    for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_bfloat16_loses_no_more_than_the_plain_formula() -> None:
    """Autocast with float32 masters: within twice the error of linear in bfloat16, then softmax in float32."""
    hidden, targets, weight, row = tensors(torch.float32)
    exact_in = [x.detach().double().requires_grad_() for x in (hidden, weight, row)]
    exact = reference(exact_in[0], targets, exact_in[1], exact_in[2], 0.1)
    exact_grads = torch.autograd.grad(exact, exact_in)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nll = smoothed_loss(hidden, targets, weight, row, 0.1, 8)
        logits = F.linear(hidden, weight, row)
        assert logits.dtype == torch.bfloat16
        plain = F.cross_entropy(logits.float(), targets, label_smoothing=0.1, reduction="sum")
    assert loss.dtype == nll.dtype == torch.float32
    assert abs(loss - exact) <= 2 * abs(plain - exact) + 1e-3
    ours, theirs = torch.autograd.grad(loss, (hidden, weight, row)), torch.autograd.grad(plain, (hidden, weight, row))
    for one, other, wanted in zip(ours, theirs, exact_grads, strict=True):
        assert one.dtype == torch.float32
        assert (one - wanted).abs().max() <= 2 * (other - wanted).abs().max() + 1e-6


def test_nothing_to_say() -> None:
    """No row at all, or none to keep: zero, with zero gradients."""
    head = LinearHead(D, V, bias=True)
    hidden = torch.randn(2, 3, D, requires_grad=True)
    for rows, keep in ((hidden, torch.zeros(2, 3, dtype=torch.bool)), (hidden[:, :0], torch.zeros(2, 0).bool())):
        loss, nll = head.loss(rows, torch.zeros(keep.shape, dtype=torch.int64), keep, label_smoothing=0.1)
        assert loss.item() == nll.item() == 0.0
        grads = torch.autograd.grad(loss, [hidden, *head.parameters()], allow_unused=True)
        assert all(grad is None or not grad.any() for grad in grads)


def test_padding_costs_nothing_and_is_never_multiplied() -> None:
    head = LinearHead(D, V)
    hidden = torch.randn(2, 4, D)
    hidden[1, 2:] = float("nan")
    keep = torch.tensor([[True] * 4, [True, True, False, False]])
    targets = torch.randint(0, V, (2, 4))
    loss, _ = head.loss(hidden, targets, keep, chunk_tokens=3)
    torch.testing.assert_close(loss, reference(hidden[keep], targets[keep], head.weight, None, 0.0))


def test_validation_computes_no_gradient() -> None:
    """Under no_grad the error p - t is not even formed: no operation writes it at the targets, or sums it up."""
    hidden, targets, weight, row = tensors()

    def run() -> tuple[torch.Tensor, set[str]]:
        with Operations() as seen:
            loss, _ = smoothed_loss(hidden, targets, weight, row, 0.1)
        return loss, seen.names & {"aten.scatter_", "aten.addmv_"}

    trained, seen_in_training = run()
    with torch.no_grad():
        loss, seen = run()
    with torch.inference_mode():
        again, seen_in_inference = run()
    assert seen_in_training == {"aten.scatter_", "aten.addmv_"}
    assert seen == seen_in_inference == set()
    assert torch.equal(loss, trained)
    assert torch.equal(again, trained)


class Operations(TorchDispatchMode):
    """Records the names of the operations of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def test_no_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    inner = F.linear

    def spy(x: Any, weight: Any, bias: Any = None) -> Any:
        seen.append(x.shape[0])
        return inner(x, weight, bias)

    monkeypatch.setattr(module, "linear", spy)
    hidden, targets, weight, row = tensors()
    smoothed_loss(hidden, targets, weight, row, 0.1, 5)[0].backward()
    assert seen == [5, 5, 5, 5, 5]  # the last 3 padded up, never beyond a chunk


@pytest.mark.parametrize(
    ("chunk_tokens", "vocab_size", "by_mkl", "by_onednn"),
    [
        (2048, 100, 2048, 2048),
        (300, 10_000, 300, 300),
        (4096, 8_000, 640, 2560),  # 655 rows are 10 MB, 2,621 are 40 in bf16; whole multiples of 64
        (2048, 32_000, 512, 640),
        (2048, 100_000, 192, 192),
        (2048, 1 << 20, 64, 64),
    ],
)
def test_on_a_cpu_a_chunk_is_large_within_limits_and_its_rows_are_whole(
    chunk_tokens, vocab_size, by_mkl, by_onednn, monkeypatch
):
    for is_faster, expected in ((False, by_mkl), (True, by_onednn)):
        monkeypatch.setattr(policy, "onednn_is_faster", lambda faster=is_faster: faster)
        assert policy.logit_rows_at_once(chunk_tokens, vocab_size, CPU) == expected


def test_the_error_of_a_confident_row_keeps_its_digits_in_bfloat16() -> None:
    """p - 1 of a token that is all but certain is not the difference of two rounded numbers."""
    weight = torch.tensor([[8.0], [0.0]], requires_grad=True)
    hidden = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = smoothed_loss(hidden, torch.tensor([0]), weight, None)
    loss.backward()
    error = 1 / (1 + torch.tensor(8.0).exp())
    torch.testing.assert_close(weight.grad, torch.stack([-error, error])[:, None], rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_large_logits_stay_finite(scale: float) -> None:
    hidden, targets, weight, _ = tensors(torch.float32)
    loss, _ = smoothed_loss(hidden * scale, targets, weight, None, 0.1)
    wanted = reference(hidden * scale, targets, weight, None, 0.1)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_log_probs() -> None:
    head = LinearHead(D, V, bias=True)
    torch.nn.init.normal_(head.bias)
    hidden = torch.randn(2, 3, D)
    log_probs = head.log_probs(hidden)
    torch.testing.assert_close(log_probs, (hidden @ head.weight.t() + head.bias).log_softmax(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = head.log_probs(hidden)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.exp().sum(-1), torch.ones(2, 3))
    torch.testing.assert_close(low, log_probs, atol=0.05, rtol=0.02)


def test_smoothing_over_two_words() -> None:
    """The printed label smoothing divides by zero here; ours spreads over the whole vocabulary, target included."""
    hidden, weight = torch.randn(3, D), torch.randn(2, D)
    targets = torch.tensor([0, 1, 1])
    loss, _ = smoothed_loss(hidden, targets, weight, None, 0.1)
    log_probs = (hidden @ weight.t()).log_softmax(-1)
    share = torch.full((3, 2), 0.05).scatter_(1, targets[:, None], 0.95)
    torch.testing.assert_close(loss, -(share * log_probs).sum())


def test_products_have_few_shapes() -> None:
    """oneDNN makes a kernel, and keeps it, for every number of rows that a product ever had: so they are rounded up."""
    sizes: set[int] = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                sizes.update(size for x in args if isinstance(x, torch.Tensor) for size in x.shape)
            return func(*args, **(kwargs or {}))

    head = LinearHead(d_model=16, vocab_size=100)
    for rows in (1, 63, 130, 191):
        hidden, targets = torch.randn(rows, 16, requires_grad=True), torch.randint(100, (rows,))
        with Products(), torch.autocast("cpu", dtype=torch.bfloat16):
            head.loss(hidden, targets, torch.ones(rows, dtype=torch.bool), label_smoothing=0.1)[0].backward()
    assert {64, 192} <= sizes <= {16, 100, 64, 192}
