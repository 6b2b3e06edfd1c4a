"""Dynamic evaluation against a plain loop over the text, and that it leaves the model as it was."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.data.store import TokenStore
from manyheads.errors import NonFiniteError
from manyheads.evaluation.likelihood import evaluate_text
from manyheads.evaluation.reading import Reading
from manyheads.extras.research.dynamic import Adaptation, evaluate_dynamically, gradient_rms
from manyheads.models.transformer_xl.config import PRESETS
from manyheads.text.vocabulary import ByteVocabulary
from tests.segment_batches import ids
from tests.tiny_run import TINY_REFORMER

READING = Reading(segment_len=6, memory_len=8, lanes=1)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS["debug"], vocab_size=256, dropout=0.3)
    return build_model(config).double().requires_grad_(False)


def store_of(tokens: torch.Tensor) -> TokenStore:
    return TokenStore.from_lists([tokens.tolist()], 256)


def plain(model: Any, tokens: torch.Tensor, rule: Adaptation, rms: list[torch.Tensor] | None) -> float:
    """A loop over segments: score, differentiate the mean, step. Memory is what each segment's own weights made."""
    one = copy.deepcopy(model).eval().requires_grad_(True)
    trained = [weight.detach().clone() for weight in one.parameters()]
    memory = one.start(1, READING.attending(one.config), projected=False)
    total = 0.0
    for first in range(0, len(tokens) - 1, 6):
        last = min(first + 6, len(tokens) - 1)
        log_probs, memory = one.read(tokens[None, first:last], None, memory)
        nll = -log_probs[0].gather(1, tokens[first + 1 : last + 1, None])[:, 0]
        total += float(nll.sum().detach())
        gradients = torch.autograd.grad(nll.mean(), list(one.parameters()), allow_unused=True)
        scales = [1.0] * len(trained) if rms is None else rms
        typical = 1.0 if rms is None else sum(float(size.mean()) for size in rms) / len(rms)
        with torch.no_grad():
            for weight, start, gradient, size in zip(one.parameters(), trained, gradients, scales, strict=True):
                back = rule.decay if rms is None else (rule.decay * size / typical).clamp(max=1)
                step = 0.0 if gradient is None else gradient / (1.0 if rms is None else size + rule.epsilon)
                weight += back * (start - weight) - rule.learning_rate * step
    return total


@pytest.mark.parametrize("kind", ["sgd", "rms"])
def test_it_is_the_plain_loop(model: Any, kind: Any) -> None:
    tokens, vocabulary = ids(1, 40)[0], ByteVocabulary()
    rule = Adaptation(kind=kind, learning_rate=0.5 if kind == "sgd" else 1e-3, decay=0.1)
    before = copy.deepcopy(model.state_dict())
    rms = None
    if kind == "rms":
        rms = gradient_rms(model, store_of(ids(1, 90)[0].flip(0)), READING, vocabulary)
    found = evaluate_dynamically(model, store_of(tokens), READING, vocabulary, rule, rms)
    assert found.num_tokens == 39
    assert found.nll_sum == pytest.approx(
        plain(model, tokens, rule, None if rms is None else list(rms.values())), rel=1e-5
    )
    static = evaluate_text(model, store_of(tokens), READING, vocabulary)
    assert abs(found.nll_sum - static.nll_sum) > 1e-2
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())
    assert not any(one.requires_grad or one.grad is not None for one in model.parameters())


def test_without_a_step_it_is_the_static_figure(model: Any) -> None:
    tokens, vocabulary = ids(1, 40)[0], ByteVocabulary()
    rule = Adaptation(kind="sgd", learning_rate=0.0, decay=0.5)
    found = evaluate_dynamically(model, store_of(tokens), READING, vocabulary, rule)
    static = evaluate_text(model, store_of(tokens), READING, vocabulary)
    assert found.nll_sum == pytest.approx(static.nll_sum, rel=1e-6)


def test_a_repeated_text_is_learned(model: Any) -> None:
    tokens, vocabulary = ids(1, 12)[0].repeat(20), ByteVocabulary()
    rule = Adaptation(kind="sgd", learning_rate=0.5, decay=0.0)
    static = evaluate_text(model, store_of(tokens), READING, vocabulary)
    assert evaluate_dynamically(model, store_of(tokens), READING, vocabulary, rule).nll_sum < 0.9 * static.nll_sum


def test_statistics_are_of_the_gradients_of_means(model: Any) -> None:
    tokens, vocabulary = ids(1, 13)[0], ByteVocabulary()
    found = gradient_rms(model, store_of(tokens), Reading(segment_len=12, memory_len=0, lanes=1), vocabulary)
    one = copy.deepcopy(model).eval().requires_grad_(True)
    nll = -one.log_probs(tokens[None, :-1])[0].gather(1, tokens[1:, None]).mean()
    nll.backward()
    for name, weight in one.named_parameters():
        wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad.abs()
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-7)


def test_a_loss_that_is_not_finite_ends_it_and_restores_the_weights(model: Any) -> None:
    before = copy.deepcopy(model.state_dict())
    rule = Adaptation(kind="sgd", learning_rate=math.inf, decay=0.0)
    with pytest.raises(NonFiniteError, match=r"lower the learning rate \(--dynamic-rate\), which is inf"):
        evaluate_dynamically(model, store_of(ids(1, 40)[0]), READING, ByteVocabulary(), rule)
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())


def test_the_defaults_are_the_authors() -> None:
    assert Adaptation.default_rate(5) == pytest.approx(5e-5)
    assert Adaptation.default_decay(5) == pytest.approx(0.002)
    assert Adaptation.default_decay(10_000) == 1


def test_a_reformer_is_adapted_too() -> None:
    torch.manual_seed(0)
    reformer = build_model(dataclasses.replace(TINY_REFORMER.model, vocab_size=256, hash_seed=1))
    before = copy.deepcopy(reformer.state_dict())
    tokens, vocabulary = ids(1, 12)[0].repeat(10), ByteVocabulary()
    reading = Reading(segment_len=12, lanes=1)
    static = evaluate_text(reformer, store_of(tokens), reading, vocabulary)
    for rate, share in ((0.0, 1.0), (0.5, 0.95)):
        rule = Adaptation(kind="sgd", learning_rate=rate, decay=0.0)
        found = evaluate_dynamically(reformer, store_of(tokens), reading, vocabulary, rule).nll_sum
        assert found == pytest.approx(static.nll_sum, rel=1e-4) if share == 1 else found < share * static.nll_sum
    assert all(torch.equal(one, reformer.state_dict()[name]) for name, one in before.items())
