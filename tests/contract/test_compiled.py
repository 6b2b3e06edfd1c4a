"""Compiled, the model says and learns the same. Dynamo cannot trace the shape checks, hence `unhooked`."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.unhooked, pytest.mark.first_variant]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def losses_and_gradients(model: Any, run: Any, batches: list[Any]) -> list[torch.Tensor]:
    found = []
    for batch in batches:
        torch.manual_seed(0)  # a model that hashes draws its rotations
        out = run(batch, label_smoothing=0.1)
        found += [out.loss_sum.detach(), out.nll_sum]
        found += torch.autograd.grad(out.loss_sum, list(model.parameters()))
    return found


def check_training(subject: Any, precision: Any, make_batch: Any, backend: str) -> None:
    model = subject.build(dropout=0.0, num_encoder_layers=1, num_decoder_layers=1).train()
    batches = [make_batch([5, 3], [6, 4])]
    exact = losses_and_gradients(*(2 * [copy.deepcopy(model).double()]), batches)
    with precision.on():
        eager = losses_and_gradients(model, model, batches)
        compiled = losses_and_gradients(model, torch.compile(model, backend=backend), batches)
    for one, other, true in zip(compiled, eager, exact, strict=True):
        scale = max(1.0, true.abs().max().item())
        allowed = 1e-5 * scale if precision.name == "fp32" else 2 * (other - true).abs().max().item() + 1e-3 * scale
        assert (one - true).abs().max().item() <= allowed


@pytest.mark.one_in(2, "compiled contracts")
def test_compiled_training_step(subject: Any, precision: Any, make_batch: Any) -> None:
    check_training(subject, precision, make_batch, "aot_eager")


@pytest.mark.one_in(2, "compiled contracts")
@pytest.mark.first_variant("reformer-seq2seq")  # its cache breaks the graph into a hundred
def test_compiled_decoding_step(subject: Any, precision: Any, make_batch: Any) -> None:
    model, batch = subject.build(num_encoder_layers=1, num_decoder_layers=1), make_batch([5, 2], [6, 6])
    compiled = torch.compile(model.step, backend="aot_eager")

    def decode(step: Any) -> Any:
        def run(m: Any) -> torch.Tensor:
            state, said = m.start(batch.source, batch.source_lengths), []
            for tokens in batch.target_input.split([3, 1, 1], dim=1):
                log_probs, state = (m.step if step is None else step)(tokens, state)
                said.append(log_probs)
            return torch.stack(said, dim=1)

        return run

    precision.assert_same(model, decode(None), decode(compiled))


@pytest.mark.slow
@pytest.mark.compiles
def test_inductor(make_batch: Any) -> None:
    """One smoke run of the real compiler, on the first debug preset."""
    from dataclasses import replace

    from manyheads.catalogue import ARCHITECTURES, build_model

    config = replace(
        ARCHITECTURES["transformer"].presets["debug"],
        source_vocab_size=23,
        target_vocab_size=23,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    torch.manual_seed(0)
    model = build_model(config).eval()
    batch = make_batch([5, 3], [6, 4])
    compiled = torch.compile(model.body, backend="inductor")
    with torch.no_grad():
        wanted = model.body(batch.source, batch.source_lengths, batch.target_input)
        got = compiled(batch.source, batch.source_lengths, batch.target_input)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def segments(lengths: list[int], seed: int = 0) -> Any:
    from manyheads.data.language.segments import SegmentBatch

    tokens = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(seed))
    resets = torch.tensor([seed == 1, False])
    return SegmentBatch(tokens[:, :-1], tokens[:, 1:], torch.tensor(lengths), resets, torch.arange(2))


@pytest.mark.one_in(2, "compiled contracts")
def test_compiled_training_with_memory(language_model: Any, precision: Any) -> None:
    """Segments in a row, one of them ragged, a lane forgotten."""
    model = language_model.build(dropout=0.0, num_layers=1, memory_len=5).train()
    batches = [segments([6, 6]), segments([6, 6], seed=1), segments([4, 6], seed=2), segments([6, 6], seed=3)]

    def run(m: Any, forward: Any) -> list[torch.Tensor]:
        found, state = [], None
        for batch in batches:
            out = forward(batch, state)
            state = out.state
            found += [out.loss_sum.detach(), out.nll_sum]
            found += torch.autograd.grad(out.loss_sum, list(m.parameters()))
        return found

    exact = run(*(2 * [copy.deepcopy(model).double()]))
    with precision.on():
        eager = run(model, model)
        compiled = run(model, torch.compile(model, backend="aot_eager"))
    for one, other, true in zip(compiled, eager, exact, strict=True):
        scale = max(1.0, true.abs().max().item())
        allowed = 1e-5 * scale if precision.name == "fp32" else 2 * (other - true).abs().max().item() + 1e-3 * scale
        assert (one - true).abs().max().item() <= allowed


@pytest.mark.one_in(2, "compiled contracts")
def test_compiled_generation_step(language_model: Any, precision: Any) -> None:
    model = language_model.build(num_layers=1)
    compiled = torch.compile(model.step, backend="aot_eager")
    tokens = torch.arange(12).view(2, 6)

    def generate(step: Any) -> Any:
        def run(m: Any) -> torch.Tensor:
            state, said = m.start(2), []
            for some in tokens.split([3, 1, 1, 1], dim=1):
                log_probs, state = (m.step if step is None else step)(some, state)
                said.append(log_probs)
            return torch.stack(said, dim=1)

        return run

    precision.assert_same(model, generate(None), generate(compiled))
