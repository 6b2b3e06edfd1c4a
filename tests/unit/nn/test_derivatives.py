"""Second derivatives are right or refused, whichever way they are asked for; transforms of `torch.func` work."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

from manyheads.catalogue import build_model
from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.errors import RequestError
from manyheads.extras.parsing.span_parser import log_partition
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.models.transformer.config import PRESETS as TRANSFORMERS
from manyheads.models.transformer_xl.config import PRESETS as XLS
from manyheads.nn import Bias, Causal, Dense, Mask, MultiHeadAttention, TorchMultiheadAttention
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.attention.settings import LSHSettings
from manyheads.nn.heads.adaptive import AdaptiveHead
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.attention import dot_product_attention, plain_attention
from manyheads.nn.kernels.loss import plain_loss, smoothed_loss
from manyheads.nn.kernels.modes import fast
from manyheads.nn.kernels.reversible import ReversibleSequence, recomputed


@pytest.fixture(params=["plain", "fast"], autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """What is true outside of `fast()` and within it."""
    with fast(request.param == "fast"):
        yield request.param


WIDTH, LENGTH, VOCAB = 8, 12, 30
MASKS: dict[str, Mask | None] = {
    "all": None,
    "causal": Causal(),
    "pattern": Dense(torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.4),
    "numbers": Bias(torch.linspace(-1, 1, 25).view(5, 5)),
    "nothing": Dense(torch.zeros(5, 5)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_of_attention_are_those_of_the_formula(mask: Mask | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    found = []
    for attention in (dot_product_attention, plain_attention):
        first = torch.autograd.grad(attention(*given, mask).square().sum(), given, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_second_derivatives_of_a_trained_bias() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 5, 4).unbind()
    values = torch.randn(5, 5, requires_grad=True)
    found = []
    for attention in (dot_product_attention, plain_attention):
        [first] = torch.autograd.grad(
            attention(query, key, value, Bias(values)).square().sum(), values, create_graph=True
        )
        found.append(torch.autograd.grad(first.square().sum(), values)[0])
    torch.testing.assert_close(*found)
    assert found[0].any()


@pytest.mark.parametrize("kind", [MultiHeadAttention, partial(TorchMultiheadAttention, batch_first=True)])
def test_a_penalty_on_gradients_trains_attention(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind(WIDTH, 2)
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    out = module(x, x, x, need_weights=False)[0]
    [first] = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    first.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(one.grad is not None for name, one in module.named_parameters() if "v_" in name or "in_proj" in name)


def test_dropout_of_the_fused_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.nn.kernels.policy.attention_path", lambda *_: "sdpa")
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    out = dot_product_attention(query, query, query, dropout_rate=0.5)
    with pytest.raises(RequestError, match=r"dropout 0\.5 has no second derivative"):
        torch.autograd.grad(out.sum(), query, create_graph=True)


def by_loss(x: Tensor, weight: Tensor) -> Tensor:
    return smoothed_loss(x, torch.arange(len(x)), weight, None)[0]


def by_parts_of_a_loss(x: Tensor, weight: Tensor) -> Tensor:
    return smoothed_loss(x, torch.arange(len(x)), weight, None, 0.1, chunk_tokens=8)[0]


def by_relative(x: Tensor, weight: Tensor) -> Tensor:
    attention = RelativeAttention(WIDTH, 2).to(x)
    out: Tensor = functional_call(attention, {"q_proj.weight": weight[:WIDTH]}, (x[None],))
    return out.square().sum()


def by_hashes(x: Tensor, weight: Tensor) -> Tensor:
    torch.manual_seed(0)
    attention = LSHSelfAttention(WIDTH, 2, settings=LSHSettings(num_hashes=1, chunk_len=4), max_len=64).to(x)
    out: Tensor = functional_call(attention, {"qk_proj.weight": weight[:WIDTH]}, (x[None],), {"seed": 1})
    return out.square().sum()


def by_chart(x: Tensor, weight: Tensor) -> Tensor:
    return log_partition((x @ weight[:LENGTH].t())[None], torch.tensor([LENGTH])).sum()


def by_recomputation(x: Tensor, weight: Tensor) -> Tensor:
    linear = nn.Linear(WIDTH, WIDTH).to(x)
    return recomputed(lambda piece: linear(piece).tanh(), [x[None] @ weight[:WIDTH]], [linear], 4).sum()


def by_reversible_layers(x: Tensor, weight: Tensor) -> Tensor:
    torch.manual_seed(0)
    sequence = ReversibleSequence([(nn.Linear(WIDTH, WIDTH), nn.Tanh())]).to(x)
    first, second = sequence(x[None], x[None] @ weight[:WIDTH])
    return (first * second).sum()


CALLS = {
    call.__name__: call
    for call in (
        *(by_loss, by_parts_of_a_loss, by_relative, by_hashes, by_chart),
        *(by_recomputation, by_reversible_layers),
    )
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("asked", ["backward", "of x", "of the weight"])
def test_other_second_derivatives_are_right_or_refused(call, asked, mode):
    """They are never too small in silence: also where only a part that autograd could leave out depends on it."""
    torch.manual_seed(0)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.double, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.double, requires_grad=True)

    def penalised(x: Tensor, weight: Tensor) -> Tensor:
        torch.manual_seed(1)
        total = call(x, weight)
        [first] = torch.autograd.grad(total, x, create_graph=True)
        return total + first.square().sum()

    if mode == "plain" and call is not by_reversible_layers:
        assert torch.autograd.gradcheck(penalised, (x, weight), fast_mode=True)
        return
    found = penalised(x, weight)
    ask = {
        "backward": found.backward,
        "of x": lambda: torch.autograd.grad(found, x),
        "of the weight": lambda: torch.autograd.grad(found, weight),
    }[asked]
    with pytest.raises(RequestError, match="cannot be differentiated again"):
        ask()


def test_first_derivatives_with_a_graph_are_right() -> None:
    """`create_graph=True` alone is no error, and gives the same numbers."""
    torch.manual_seed(0)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.double, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.double, requires_grad=True)
    found = torch.autograd.grad(by_loss(x, weight), [x, weight], create_graph=True)
    expected = torch.autograd.grad(plain_loss(x, torch.arange(len(x)), weight, None)[0], [x, weight])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Loss(nn.Module):
    """A head's loss over targets, some of which do not count."""

    def __init__(self, head: nn.Module, **options: float) -> None:
        super().__init__()
        self.head, self.options = head, options

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.arange(LENGTH) * 7 % VOCAB
        out: Tensor = self.head.loss(x, targets, targets % 3 > 0, **self.options)[0]  # type: ignore[operator]
        return out


def squares(module: nn.Module, **options: Any) -> Callable[..., Tensor]:
    """The sum of squares of a module's output for one sequence, with some parameters."""

    def total(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out = functional_call(module, parameters, (x,), options)
        out = out[0] if isinstance(out, tuple) else out
        return out.square().sum()

    return total


HASHES = LSHSettings(num_hashes=2, chunk_len=4)
TRANSFORMED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "attention": (lambda: MultiHeadAttention(WIDTH, 2), {"mask": Causal()}),
    "relative": (lambda: RelativeAttention(WIDTH, 2), {}),
    "hashed": (lambda: LSHSelfAttention(WIDTH, 2, settings=HASHES, max_len=64), {"seed": 3}),
    "local": (lambda: LocalSelfAttention(WIDTH, 2, chunk_len=4), {}),
    "loss": (lambda: Loss(LinearHead(WIDTH, VOCAB, bias=True)), {}),
    "smoothed loss": (lambda: Loss(LinearHead(WIDTH, VOCAB), label_smoothing=0.1), {}),
    "adaptive loss": (lambda: Loss(AdaptiveHead(VOCAB, WIDTH, cutoffs=(5, 12), d_embed=WIDTH, div_value=2)), {}),
}


@pytest.mark.parametrize(("make", "options"), TRANSFORMED.values(), ids=TRANSFORMED)
def test_transforms_of_torch_func(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, x = make().double(), torch.randn(3, LENGTH, WIDTH, dtype=torch.double)
    parameters = dict(module.named_parameters())
    total = squares(module, **options)
    each = vmap(grad(total), (None, 0), randomness="same")(parameters, x)
    directions = {name: torch.randn_like(one) for name, one in parameters.items()}
    for row in range(len(x)):
        expected = torch.autograd.grad(total(parameters, x[row]), list(parameters.values()))
        for name, one in zip(parameters, expected, strict=True):
            torch.testing.assert_close(each[name][row], one)
        _, slope = jvp(lambda given, row=row: total(given, x[row]), (parameters,), (directions,))
        inner = sum((one * directions[name]).sum() for name, one in zip(parameters, expected, strict=True))
        torch.testing.assert_close(slope, inner)


def test_a_hessian() -> None:
    x, weight = torch.randn(3, 2, dtype=torch.double), torch.randn(4, 2, dtype=torch.double)
    targets = torch.tensor([0, 3, 1])
    found, expected = (
        hessian(lambda given, loss=loss: loss(x, targets, given, None)[0])(weight)
        for loss in (smoothed_loss, plain_loss)
    )
    torch.testing.assert_close(found, expected)
    assert found.any()


def pairs() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    def batch(source: Tensor, source_lengths: Tensor, target: Tensor, target_lengths: Tensor) -> PairBatch:
        return PairBatch(source, source_lengths, target, target_lengths, torch.zeros(len(source), dtype=torch.long))

    source, target = torch.randint(4, VOCAB, (3, 7)), torch.randint(4, VOCAB, (3, 6))
    return batch, (source, torch.tensor([7, 3, 5]), target, torch.tensor([6, 4, 6]))


def segments() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    def batch(tokens: Tensor, targets: Tensor, lengths: Tensor, resets: Tensor) -> SegmentBatch:
        return SegmentBatch(tokens, targets, lengths, resets, torch.zeros(len(tokens), dtype=torch.long))

    tokens, targets = torch.randint(VOCAB, (2, 3, 40)).unbind()
    return batch, (tokens, targets, torch.tensor([40, 20, 40]), torch.zeros(3, dtype=torch.bool))


MODELS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "transformer": (replace(TRANSFORMERS["debug"], source_vocab_size=VOCAB, target_vocab_size=VOCAB), pairs),
    "transformer-xl": (replace(XLS["debug"], vocab_size=VOCAB), segments),
    "reformer": (replace(REFORMERS["debug"], vocab_size=VOCAB), segments),
}


@pytest.mark.parametrize(("config", "make"), MODELS.values(), ids=MODELS)
def test_gradients_of_each_row_of_a_batch(config: Any, make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = build_model(config).double().eval()
    batch, rows = make()
    parameters = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], *row: Tensor) -> Tensor:
        total: Tensor = functional_call(model, given, (batch(*(one[None] for one in row)),)).loss_sum
        return total

    each = vmap(grad(loss), (None,) + (0,) * len(rows), randomness="same")(parameters, *rows)
    expected = torch.autograd.grad(model(batch(*rows)).loss_sum, list(parameters.values()), materialize_grads=True)
    for name, one in zip(parameters, expected, strict=True):
        torch.testing.assert_close(each[name].sum(0), one, msg=lambda text, name=name: f"{name}: {text}")
