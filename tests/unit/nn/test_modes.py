"""The plain and the fast implementations give the same numbers, with the same random draws."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.catalogue import build_model
from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.extras.parsing.span_parser import log_partition
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.models.transformer.config import PRESETS as TRANSFORMERS
from manyheads.models.transformer_xl.config import PRESETS as XLS
from manyheads.nn import Causal, MultiHeadAttention
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.attention.settings import LSHSettings
from manyheads.nn.heads.adaptive import AdaptiveHead
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.modes import fast, first_derivative_only, is_fast, tf32_products
from manyheads.nn.kernels.reversible import ReversibleSequence, recomputed

WIDTH, LENGTH, VOCAB = 16, 40, 50


@pytest.fixture(autouse=True)
def mode() -> None:
    """Each test selects the modes itself."""


class Loss(nn.Module):
    def __init__(self, head: nn.Module, **options: float) -> None:
        super().__init__()
        self.head, self.options = head, options

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.arange(x.shape[0] * LENGTH).view(-1, LENGTH) * 7 % VOCAB
        out: Tensor = self.head.loss(x, targets, targets % 3 > 0, **self.options)[0]  # type: ignore[operator]
        return out


class Chart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return log_partition(x @ x.transpose(1, 2), torch.tensor([LENGTH, 5, 1]))


class Normalised(nn.Module):
    """It changes its buffers in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReversibleSequence([(Normalised(), RelativeAttention(WIDTH, 2, dropout=0.2))])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.inner(x, x.flip(1)))


def hashed(**options: Any) -> LSHSelfAttention:
    settings = LSHSettings(num_hashes=2, chunk_len=4, **options)
    return LSHSelfAttention(WIDTH, 2, settings=settings, max_len=64, dropout=0.2)


LENGTHS = torch.tensor([LENGTH, 7, 1])
MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "attention": (lambda: MultiHeadAttention(WIDTH, 2), {"mask": Causal()}),
    "attention with dropout": (lambda: MultiHeadAttention(WIDTH, 2, dropout=0.2), {}),
    "relative": (lambda: RelativeAttention(WIDTH, 2), {}),
    "relative with dropout": (lambda: RelativeAttention(WIDTH, 2, dropout=0.2), {}),
    "hashed": (lambda: hashed(), {"seed": 1}),
    "hashed, in parts": (lambda: hashed(), {"seed": 1, "lengths": LENGTHS}),
    "hashed, once each": (lambda: hashed(correct_duplicates=True), {"seed": 1}),
    "hashed, by chunks": (
        lambda: hashed(visible="chunk", chunks_after=1, causal=False, look_across_rounds=True),
        {"seed": 1},
    ),
    "hashed, exact at first": (lambda: hashed(exact_len=8), {"seed": 1}),
    "local": (lambda: LocalSelfAttention(WIDTH, 2, chunk_len=4, dropout=0.2), {}),
    "loss": (lambda: Loss(LinearHead(WIDTH, VOCAB, bias=True)), {}),
    "loss in parts": (lambda: Loss(LinearHead(WIDTH, VOCAB), label_smoothing=0.1, chunk_tokens=8), {}),
    "adaptive loss": (lambda: Loss(AdaptiveHead(VOCAB, WIDTH, cutoffs=(9, 20), d_embed=16, div_value=2)), {}),
    "chart": (Chart, {}),
    "reversible": (Reversible, {}),
}


def computed(
    module: nn.Module, options: dict[str, Any], x: Tensor, forward: bool, backward: bool, *, aside: bool = False
) -> dict[str, Tensor]:
    """Output, gradients and buffers. Args: forward, backward: whether it is fast; aside: backward in another thread."""
    module = copy.deepcopy(module).train()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    with fast(forward):
        out = module(x, **options)
        out = out[0] if isinstance(out, tuple) else out

    def go_back() -> None:
        with fast(backward):
            out.square().sum().backward()

    if aside:
        thread = threading.Thread(target=go_back)
        thread.start()
        thread.join()
    else:
        go_back()
    assert x.grad is not None
    grads = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    return {"output": out.detach(), "input": x.grad, **grads, **dict(module.named_buffers())}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], **limits: float) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name], msg=lambda text, name=name: f"{name}: {text}", **limits)


@pytest.mark.parametrize(("make", "options"), MODULES.values(), ids=MODULES)
def test_both_modes_agree(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Values, gradients and buffers; the same elements are dropped."""
    module, x = make().double(), torch.randn(3, LENGTH, WIDTH, dtype=torch.double)
    agree(computed(module, options, x, False, False), computed(module, options, x, True, True), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("aside", [False, True], ids=["here", "in another thread"])
@pytest.mark.parametrize("forward", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize(("make", "options"), MODULES.values(), ids=MODULES)
def test_the_backward_pass_is_that_of_the_forward_pass(make, options, forward, aside):
    module, x = make(), torch.randn(3, LENGTH, WIDTH)
    expected = computed(module, options, x, forward, forward)
    agree(computed(module, options, x, forward, not forward, aside=aside), expected, rtol=0, atol=0)


def pairs() -> PairBatch:
    source, target = torch.randint(4, VOCAB, (3, LENGTH)), torch.randint(4, VOCAB, (3, LENGTH))
    return PairBatch(source, LENGTHS.clamp(min=2), target, LENGTHS.clamp(min=2), torch.arange(3))


def segments() -> SegmentBatch:
    tokens = torch.randint(VOCAB, (3, LENGTH))
    return SegmentBatch(tokens, tokens.roll(-1, 1), LENGTHS, torch.zeros(3, dtype=torch.bool), torch.arange(3))


MODELS = {
    "transformer": (replace(TRANSFORMERS["debug"], source_vocab_size=VOCAB, target_vocab_size=VOCAB), pairs),
    "transformer-xl": (replace(XLS["debug"], vocab_size=VOCAB, dropout=0.1), segments),
    "reformer": (replace(REFORMERS["debug"], vocab_size=VOCAB, dropout=0.1), segments),
}


@pytest.mark.parametrize(("config", "make"), MODELS.values(), ids=MODELS)
def test_models_train_alike(config: Any, make: Callable[[], Any]) -> None:
    batch, model = make(), build_model(config).double().train()
    losses = []
    for enabled in (False, True):
        trained = copy.deepcopy(model)
        optimiser = torch.optim.SGD(trained.parameters(), lr=0.01)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(3):
            with fast(enabled):
                out = trained(batch)
                (out.loss_sum / out.num_tokens).backward()
            optimiser.step()
            optimiser.zero_grad()
            losses[-1].append(float(out.loss_sum.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_the_mode_is_of_one_thread_and_of_one_block() -> None:
    seen = []
    with fast():
        thread = threading.Thread(target=lambda: seen.append(is_fast()))
        thread.start()
        thread.join()
        with fast(False):
            seen.append(is_fast())
        seen.append(is_fast())
    with contextlib.suppress(ValueError), fast():
        raise ValueError
    assert [*seen, is_fast()] == [False, False, True, False]


def test_it_decorates_nothing() -> None:
    """Held by a generator, it would be the mode of whoever reads from the generator."""
    with pytest.raises(TypeError):

        @fast()  # type: ignore[operator]
        def numbers() -> Iterator[int]:
            yield 1


@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "fast"])
def test_what_is_computed_again_sees_the_mode_of_the_first_time(enabled: bool) -> None:
    seen = []
    module, x = nn.Linear(WIDTH, WIDTH), torch.randn(1, 4, WIDTH, requires_grad=True)

    def noted(piece: Tensor) -> Tensor:
        seen.append(is_fast())
        out: Tensor = module(piece)
        return out

    with fast(enabled):
        out = recomputed(noted, [x], [module], 2)
    with fast(not enabled):
        out.sum().backward()
    assert seen == [enabled] * 4


@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "fast"])
def test_a_backward_pass_of_our_own_sees_the_mode_of_its_forward_pass(enabled: bool) -> None:
    seen = []

    @first_derivative_only
    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
            seen.append(is_fast())
            return (grad,)

    x = torch.randn(3, requires_grad=True)
    with fast(enabled):
        out = Noting.apply(x)  # type: ignore[no-untyped-call]
    with fast(not enabled):
        out.sum().backward()
    assert seen == [enabled]


@pytest.fixture
def products() -> Iterator[Any]:
    """torch's settings of products, which are those of a process that has set none; afterwards, too."""

    def reset() -> None:
        torch.set_float32_matmul_precision("highest")
        for place in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
            place.fp32_precision = "none"

    reset()
    yield torch.backends.cuda.matmul
    reset()


def product_settings() -> tuple[str, str, str]:
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:
        whole = "refused"
    return whole, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["none", "older", "tf32", "ieee", "older, then ieee", "all"])
def test_tf32_with_either_setting_of_torch(way: str, products: Any) -> None:
    """torch refuses to read the older setting after the newer one; both are as before when the block ends."""
    if "older" in way:
        torch.set_float32_matmul_precision("high")
    if way == "all":
        torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
    elif way in ("tf32", "ieee", "older, then ieee"):
        products.fp32_precision = way[-4:]
    before = product_settings()
    assert (before[0] == "refused") == (way == "tf32")
    for _ in range(2):
        with tf32_products(), tf32_products():
            assert product_settings() == ("high", "tf32", "tf32")
        assert product_settings() == before
        with tf32_products(enabled=False):
            assert product_settings() == before
    if way == "all":
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        assert products.fp32_precision == "tf32"  # still that of all
