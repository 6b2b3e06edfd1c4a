"""Likelihood: the same whatever the batches, and modes are put back."""

import math

import pytest
import torch
from torch import Tensor, nn

from manyheads.data.batch import PairBatch
from manyheads.errors import DataError
from manyheads.evaluation.likelihood import Likelihood, evaluate_likelihood
from manyheads.evaluation.reading import perplexity_of, show_perplexity
from manyheads.models.protocols import Output


class Uniform(nn.Module):
    """Every token has probability 1 / 8; notes the mode it was called in."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: set[bool] = set()

    def forward(self, batch: PairBatch) -> Output:
        self.modes.add(self.training)
        count = torch.tensor(batch.num_target_tokens())
        return Output(count * 99.0, count * math.log(8), count)


def pairs(*target_lengths: int) -> PairBatch:
    lengths = torch.tensor(target_lengths)
    size = len(target_lengths)
    target: Tensor = torch.ones(size, int(lengths.max()), dtype=torch.int64)
    return PairBatch(target, lengths, target, lengths, torch.arange(size))


@pytest.mark.parametrize("training", [True, False])
def test_uniform_model(training: bool) -> None:
    model = Uniform().train(training)
    found = evaluate_likelihood(model, [pairs(5, 2), pairs(9)])
    assert found.num_tokens == 4 + 1 + 8
    assert found.perplexity == pytest.approx(8)
    assert found.nats_per_token == pytest.approx(math.log(8))
    assert model.modes == {False}
    assert model.training is training


def test_mode_is_put_back_after_an_error() -> None:
    model = Uniform().train()

    def broken() -> PairBatch:
        raise ValueError

    with pytest.raises(ValueError):
        evaluate_likelihood(model, (broken() for _ in range(1)))
    assert model.training


def test_nothing_to_measure() -> None:
    with pytest.raises(DataError, match="no target token"):
        evaluate_likelihood(Uniform(), [])


def test_stop() -> None:
    answers = iter([False, True])
    assert evaluate_likelihood(Uniform(), [pairs(3), pairs(3)], stop=lambda: next(answers)).num_tokens == 2


def test_overflow_is_infinite() -> None:
    assert Likelihood(1e6, 1).perplexity == math.inf


@pytest.mark.parametrize(
    ("nats", "shown"), [(2.0, "7.39"), (13.8, "984609.11"), (80.0, "5.54e+34"), (1e4, "inf"), (math.nan, "nan")]
)
def test_a_large_perplexity_is_a_power_of_ten(nats: float, shown: str) -> None:
    assert show_perplexity(perplexity_of(nats)) == shown
