"""Plain and fast: the same loss, gradients and buffers, whatever the architecture and its parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from segment_batches import batch_of, ids
from torch import Tensor

from manyheads.nn.kernels.modes import fast


@pytest.fixture(autouse=True)
def mode() -> None:
    """Each test selects the modes itself."""


def trained(subject: Any, loss: Callable[[Any], Tensor], enabled: bool) -> dict[str, Tensor]:
    """The loss, the gradients, and the buffers after a step, in training mode with dropout."""
    model = subject.build().double().train()
    torch.manual_seed(0)
    with fast(enabled):
        value = loss(model)
    value.backward()  # type: ignore[no-untyped-call]
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": value.detach(), **grads, **dict(model.named_buffers())}


def agree(subject: Any, loss: Callable[[Any], Tensor]) -> None:
    plain, quick = trained(subject, loss, False), trained(subject, loss, True)
    assert plain.keys() == quick.keys()
    for name, one in plain.items():
        torch.testing.assert_close(
            one, quick[name], rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_translators(subject: Any, make_batch: Any) -> None:
    batch = make_batch([5, 3], [6, 8])
    agree(subject, lambda model: model(batch, label_smoothing=0.1).loss_sum)


def test_language_models(language_model: Any) -> None:
    first, second = ids(3, 14, seed=1), ids(3, 14, seed=2)

    def loss(model: Any) -> Tensor:
        before = model(batch_of(first))
        return before.loss_sum + model(batch_of(second, [9, 13, 1]), before.state).loss_sum  # type: ignore[no-any-return]

    agree(language_model, loss)


def test_language_models_without_memory(memoryless: Any) -> None:
    agree(memoryless, lambda model: model(batch_of(ids(3, 14), [9, 13, 1])).loss_sum)


def test_searches(subject: Any, make_batch: Any) -> None:
    """Steps from a cache, in evaluation."""
    batch, model = make_batch([5, 3], [6, 8]), subject.build().double()
    found = []
    for enabled in (False, True):
        with fast(enabled), torch.no_grad():
            state = model.start(batch.source, batch.source_lengths)
            steps = []
            for token in batch.target[:, :5].split(1, dim=1):
                log_probs, state = model.step(token, state)
                steps.append(log_probs)
            found.append(torch.stack(steps))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)
