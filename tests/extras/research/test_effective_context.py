"""RECL: the lengths of models whose loss by context is known, and losses that have exactly that context."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.data.store import TokenStore
from manyheads.errors import DataError
from manyheads.extras.research.text_task.evaluate import losses_by_context, relative_lengths
from manyheads.models.transformer_xl.config import PRESETS
from tests.segment_batches import VOCAB, ids

STEP = 4


class Reaches:
    """A model that uses `reach` tokens of context: each makes the loss of a target 0.02 smaller.

    hard: only targets of this id, which have a larger loss; None: all.
    """

    def __init__(self, reach: int, hard: int | None = None) -> None:
        self.reach, self.hard = reach, hard

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> Any:
        raise AssertionError("nothing is remembered")

    def losses_at(
        self, tokens: Tensor, columns: Tensor, targets: Tensor, lengths: Tensor | None = None, state: Any = None
    ) -> Tensor:
        gained = 0.02 * (columns + 1).clamp(max=self.reach).expand_as(targets)
        if self.hard is None:
            return 4.0 - gained
        return torch.where(targets == self.hard, 6.0 - gained, torch.ones(()))


def text(length: int = 400) -> TokenStore:
    return TokenStore.from_lists([ids(1, length)[0].tolist()], VOCAB)


def measured(*models: Any, longest: int = 40, **more: Any) -> list[Tensor]:
    return [losses_by_context(model, text(), step=STEP, longest=longest, **more) for model in models]


def test_a_length_is_known_by_construction() -> None:
    found = relative_lengths(measured(Reaches(12), Reaches(28), Reaches(100)), step=STEP, hardest=1.0)
    assert [(one.length, one.is_longest) for one in found] == [(12, False), (28, False), (40, True)]


def test_only_gains_over_the_best_model_of_the_group_count() -> None:
    weak = measured(Reaches(28))[0] + 0.5  # gains as much as the other, but from a larger loss
    assert relative_lengths([weak, measured(Reaches(4))[0]], step=STEP, hardest=1.0)[0].length == STEP


def test_the_hardest_tokens_can_have_a_longer_context() -> None:
    losses = measured(Reaches(20, hard=3), Reaches(8, hard=3))
    assert [one.length for one in relative_lengths(losses, step=STEP, hardest=0.02)] == [20, 8]
    assert [one.length for one in relative_lengths(losses, step=STEP, hardest=1.0)] == [STEP, STEP]


def test_the_gain_is_the_papers() -> None:
    """Two models, two contexts, three tokens, by hand: b = (1, 2, 4), the two hardest are 2 and 4."""
    first = torch.tensor([[1.0, 3.0, 4.0], [0.0, 1.0, 5.0]])
    second = torch.tensor([[2.0, 2.0, 5.0], [2.0, 2.5, 3.0]])
    gains = [one.gains[0] for one in relative_lengths([first, second], step=1, hardest=0.67)]
    # f(c, c) = 3; f(c, c') = (1 + 4) / 2 and (2 + 3) / 2
    assert gains == pytest.approx([1 - torch.tensor(-0.5).exp().item()] * 2)


def test_every_loss_has_exactly_its_context() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(PRESETS["debug"], vocab_size=VOCAB, dropout=0.0)
    model, store = build_model(config).eval(), text(50)
    attending = dataclasses.replace(config.attending, memory_len=0)
    found = losses_by_context(model, store, step=5, longest=20, attending=attending)
    assert found.shape == (4, 6)  # of the tokens 20, 25 ... 45
    tokens = torch.tensor(store.ids[:].astype("int64"))
    for row, context in enumerate((5, 10, 15, 20)):
        for column, place in enumerate(range(20, 50, 5)):
            with torch.no_grad():
                log_probs = model.log_probs(tokens[None, place - context : place])
            assert found[row, column].item() == pytest.approx(-log_probs[0, -1, tokens[place]].item(), abs=1e-5)


def test_a_short_text_is_refused() -> None:
    with pytest.raises(DataError, match="leaves none to predict"):
        losses_by_context(Reaches(4), text(40), step=STEP, longest=40)
