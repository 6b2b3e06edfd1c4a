"""A training step of each architecture on the device, compiled steps, and steps of a search that never wait for it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.models.reformer import config as reformers
from manyheads.models.reformer.model import build as build_reformer
from manyheads.models.reformer.translator import build_seq2seq
from manyheads.models.transformer import config as transformers
from manyheads.models.transformer.model import build as build_transformer
from manyheads.models.transformer_xl import config as xls
from manyheads.models.transformer_xl.model import build as build_xl
from manyheads.nn.kernels import policy

VOCAB = 23
_BOTH = {"source_vocab_size": VOCAB, "target_vocab_size": VOCAB, "dropout": 0.0}
MODELS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: build_transformer(replace(transformers.PRESETS["debug"], **_BOTH)),
    "reformer-seq2seq": lambda: build_seq2seq(replace(reformers.SEQ2SEQ_PRESETS["debug"], **_BOTH)),
    "transformer-xl": lambda: build_xl(replace(xls.PRESETS["debug"], vocab_size=VOCAB, dropout=0.0)),
    "reformer": lambda: build_reformer(replace(reformers.PRESETS["debug"], vocab_size=VOCAB, dropout=0.0)),
}
HASHED = ("reformer", "reformer-seq2seq")
UNHASHED = [name for name in MODELS if name not in HASHED]


def make_batch(name: str) -> PairBatch | SegmentBatch:
    ids, rows = torch.randint(4, VOCAB, (2, 16)), torch.arange(2)
    lengths = torch.tensor([16, 12])
    if name in ("transformer", "reformer-seq2seq"):
        return PairBatch(ids, lengths, ids.flip(1), lengths, rows)
    return SegmentBatch(ids, ids.roll(-1, 1), lengths, torch.zeros(2, dtype=torch.bool), rows)


def gradients(model: Any, batch: Any, run: Any = None) -> list[Tensor]:
    """The loss per token and the gradient of every parameter, in float64 on the CPU."""
    torch.manual_seed(1)  # a model that hashes draws its rotations
    output = (model if run is None else run)(batch)
    loss = output.loss_sum / output.num_tokens
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [x.detach().double().cpu() for x in (loss, *grads) if x is not None]


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_in_float32_is_that_in_float64(name: str, device: torch.device) -> None:
    """Hashing takes the same side of every rotation in either type, unless a number is near zero."""
    model, batch = MODELS[name]().train(), make_batch(name)
    wanted = gradients(copy.deepcopy(model).double(), batch)
    found = gradients(model.to(device), batch.to(device))
    for one, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, true, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_training_in_bfloat16_lowers_the_loss(name: str, device: torch.device) -> None:
    model, batch = MODELS[name]().train().to(device), make_batch(name).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=device.type == "cuda")
    losses = []
    for _ in range(12):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output = model(batch)
        loss = output.loss_sum / output.num_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow  # other tests compile on a CPU; on a GPU it runs with the others
@pytest.mark.unhooked
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_training_step_equals_the_eager_one(name, device, monkeypatch):
    from torch._inductor import config as inductor  # takes a second, in each process that collects tests

    model, batch = MODELS[name]().train().to(device), make_batch(name).to(device)
    # Otherwise Inductor draws other numbers than eager mode from the same seed: other rotations, so other buckets.
    monkeypatch.setattr(inductor, "fallback_random", True)
    wanted = gradients(model, batch)
    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    found = gradients(model, batch, torch.compile(model, backend=backend))
    torch._dynamo.reset()
    for one, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, true, atol=1e-4, rtol=1e-4)


def start(name: str, model: Any, device: torch.device) -> Any:
    if name == "transformer":
        return model.start(torch.randint(4, VOCAB, (3, 7), device=device), torch.tensor([7, 5, 2], device=device))
    return model.start(3)


@pytest.mark.parametrize("name", UNHASHED)
def test_no_step_of_a_search_waits_for_the_device(name, device, monkeypatch):
    """Not the Reformers: where a hashed position goes depends on numbers."""
    model = MODELS[name]().eval().to(device)
    with torch.no_grad():
        state = start(name, model, device)
        tokens = torch.full((3, 1), 2, device=device)
        log_probs, state = model.step(tokens, state)  # prepares what all later steps share
        chosen: list[Tensor] = []
        with never_waiting(device, monkeypatch):
            for _ in range(6):
                tokens = log_probs.argmax(dim=-1, keepdim=True)
                chosen.append(tokens)
                log_probs, state = model.step(tokens, state)
    assert torch.cat(chosen, dim=1).shape == (3, 6)
    assert log_probs.isfinite().all()


@contextmanager
def never_waiting(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, an operation for which the program waits until the device is done is an error.

    On a CPU these are the operations that read a number or whose result's shape depends on numbers, where the program
    takes the branches of a GPU as far as it asks `policy.can_look`.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.__name__.partition(".")[0]
            assert name not in ("nonzero", "masked_select", "unique_dim"), name
            # The lengths in states are int64 numbers that stay on the CPU on every machine.
            assert name != "_local_scalar_dense" or args[0].dtype is torch.int64, name
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(policy, "can_look", lambda _: False)
    with Refuse():
        yield


@pytest.mark.slow  # other tests compile on a CPU; on a GPU it runs with the others
@pytest.mark.unhooked
@pytest.mark.parametrize("name", UNHASHED)
def test_a_compiled_step_of_a_search_equals_the_eager_one(name: str, device: torch.device) -> None:
    model = MODELS[name]().eval().to(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    torch._dynamo.reset()
    compiled = torch.compile(model.compute_step, backend=backend, dynamic=True)
    with torch.no_grad():
        said = []
        for compute in (model.compute_step, compiled):
            torch.manual_seed(2)
            state, answers = start(name, model, device), []
            for number in range(5):
                step, state = model.prepare_step(torch.full((3, 1), 2 + number, device=device), state)
                answers.append(compute(step).clone())
            said.append(torch.stack(answers))
    torch._dynamo.reset()
    torch.testing.assert_close(said[1], said[0], atol=1e-4, rtol=1e-4)
