"""One step: accumulation, clipping, precision, and NaN found before the update."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from launches import Launches
from torch import nn

from manyheads.catalogue import build_model
from manyheads.config.build import build as build_settings
from manyheads.data.batch import PairBatch
from manyheads.errors import ConfigError
from manyheads.models.composites import Seq2Seq
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative_bias import RelativeBias
from manyheads.nn.attention.scores import AdditiveScore
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.optim.optimiser import (
    MovingAverage,
    MuonWithAdam,
    build_optimiser,
    load_optimiser_tensors,
    optimiser_tensors,
    orthogonalise,
    split_by_decay,
)
from manyheads.training.run.state import ParallelModel, named_parameters
from manyheads.training.run.step import StepResult, TrainStep, first_bad
from manyheads.training.settings import OptimiserSettings, RunConfig, TrainingSettings

CPU = torch.device("cpu")
MODEL = TransformerConfig(
    d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0,
    source_vocab_size=20, target_vocab_size=20,
)  # fmt: skip


def batch(rows: int, seed: int = 0, first_id: int = 0) -> PairBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 8, (2, rows), generator=generator)
    lengths[:, 0] = 8
    source, target = torch.randint(4, 20, (2, rows, 8), generator=generator)
    for row in range(rows):
        source[row, lengths[0, row] :] = 0
        target[row, lengths[1, row] :] = 0
    return PairBatch(source, lengths[0], target, lengths[1], torch.arange(first_id, first_id + rows))


def part(whole: PairBatch, rows: slice) -> PairBatch:
    return whole.rows(rows)


def config(**changes: object) -> TrainConfig:
    training = TrainingSettings(label_smoothing=0.1)
    made = TrainConfig(
        model=MODEL, precision="fp32", optimiser=OptimiserSettings(learning_rate=1e-2), training=training
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def build(settings: TrainConfig) -> tuple[Seq2Seq, TrainStep]:
    torch.manual_seed(0)
    model = build_model(settings.model)
    return model, TrainStep(model, build_optimiser(model, settings.optimiser), settings, CPU)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


class Wrapped(nn.Module):
    """A model in a module that does not change its own mode with it, as in a group of ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.module(*given, **options)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_step_after_a_validation_drops_units_again(is_wrapped: bool) -> None:
    settings = config(model=replace(MODEL, dropout=0.5))
    model = build_model(settings.model)
    parallel_model = ParallelModel(model, model, Wrapped(model) if is_wrapped else model)
    train_step = TrainStep(
        model, build_optimiser(model, settings.optimiser), settings, CPU, parallel_model=parallel_model
    )
    model.eval()
    result = train_step.run([batch(8)], 1, 0.0)
    assert model.training
    assert all(module.training for module in model.modules())
    assert result.loss_sum != train_step.run([batch(8)], 2, 0.0).loss_sum


def test_splitting_a_step_changes_nothing() -> None:
    """Micro-batches of unlike token counts: dividing each by its own tokens would show."""
    whole = batch(8)
    split = [part(whole, slice(0, 1)), part(whole, slice(1, 8))]
    results, found = [], []
    for batches in ([whole], split, [split[0], part(whole, slice(0, 0)), split[1]]):
        model, train_step = build(config())
        results.append(train_step.run(batches, 1, 1e-2))
        found.append(gradients(model))
    for result, other in zip(results[1:], found[1:], strict=True):
        assert result.num_tokens == results[0].num_tokens == int(whole.target_lengths.sum()) - 8
        assert result.loss_sum == pytest.approx(results[0].loss_sum, rel=1e-5)
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


def test_clipping_is_by_the_global_norm() -> None:
    plain, train_step = build(config())
    norm = train_step.run([batch(4)], 1, 0.0).grad_norm
    clipped, train_step = build(config(optimiser=OptimiserSettings(clip_norm=norm / 4)))
    assert train_step.run([batch(4)], 1, 0.0).grad_norm == pytest.approx(norm)  # the norm before clipping is reported
    for name, gradient in gradients(clipped).items():
        torch.testing.assert_close(gradient * 4, gradients(plain)[name], rtol=1e-3, atol=1e-7)


def test_dropout_depends_on_seed_step_and_micro_batch_alone() -> None:
    settings = config(model=replace(MODEL, dropout=0.5))

    def loss(step: int, micro: int, seed: int = 1) -> float:
        _, train_step = build(replace(settings, seed=seed))
        torch.manual_seed(torch.seed() % 1000)
        empty = part(batch(4), slice(0, 0))
        return train_step.run([empty] * micro + [batch(4)], step, 0.0).loss_sum

    assert loss(3, 0) == loss(3, 0)
    assert len({loss(3, 0), loss(4, 0), loss(3, 1), loss(3, 0, seed=2)}) == 4


def test_bf16_keeps_float32_weights_and_moments() -> None:
    model, train_step = build(config(precision="bf16"))
    result = train_step.run([batch(4)], 1, 1e-2)
    assert result.fault is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {value.dtype for value in optimiser_tensors(train_step._optimiser, named_parameters(model)).values()} == {
        torch.float32
    }


def take_bad(model: Seq2Seq, train_step: TrainStep, batches: list[PairBatch]) -> StepResult:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train_step.run(batches, 7, 1e-2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name
    assert not optimiser_tensors(train_step._optimiser, named_parameters(model))
    return result


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_weight_is_named_before_the_update(value: float) -> None:
    model, train_step = build(config())
    with torch.no_grad():
        model.body.decoder.layers[0].feed_forward.out_proj.weight[0, 0] = value
    result = take_bad(model, train_step, [batch(3, first_id=40), batch(3, first_id=50)])
    assert result.fault.module == "body.decoder.layers.0.feed_forward.out_proj (Linear)"
    assert result.fault.sample_ids == [40, 41, 42]
    assert result.fault.bad_parameters == ["body.decoder.layers.0.feed_forward.out_proj.weight"]
    assert "Step 7" in str(result.fault)


def test_a_bad_gradient_is_named_with_its_micro_batch() -> None:
    model, train_step = build(config())
    weight = model.body.encoder.layers[0].self_attn.out_proj.weight
    calls = []

    def poison(gradient: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        return gradient * float("nan") if len(calls) in (2, 4) else None  # the second micro-batch, both times

    weight.register_hook(poison)
    result = take_bad(model, train_step, [batch(3, first_id=40), batch(3, first_id=50)])
    assert result.fault.micro_batch == 1
    assert result.fault.sample_ids == [50, 51, 52]
    assert result.fault.module == "body.encoder.layers.0.self_attn.out_proj (in the backward pass)"
    assert result.fault.bad_gradients == ["body.encoder.layers.0.self_attn.out_proj.weight"]
    assert result.fault.what == "the gradient's norm is nan"


def test_a_fault_in_the_head_and_one_that_does_not_come_again() -> None:
    model, train_step = build(config(model=replace(MODEL, tie_embeddings="none")))
    with torch.no_grad():
        model.head.weight[5, 5] = float("nan")
    result = take_bad(model, train_step, [batch(3)])
    assert "the head" in (result.fault.module or "")
    assert result.fault.bad_parameters == ["head.weight"]
    model, train_step = build(config())
    once = [True]
    handle = model.body.encoder.register_forward_hook(
        lambda module, inputs, output: output * float("nan") if once and once.pop() else None
    )
    result = take_bad(model, train_step, [batch(20)])
    handle.remove()
    assert result.fault.module is None
    assert "hardware" in str(result.fault)
    assert "(20 in all)" in str(result.fault)


def test_only_matrices_of_maps_decay() -> None:
    model = build_model(replace(MODEL, positions="learned"))
    decayed, spared = split_by_decay(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in spared if p.ndim > 1} == {
        "body.source_embedding.weight",
        "body.source_positions.weight",
        "body.target_positions.weight",
    }
    assert all(name.endswith("weight") and "norm" not in name for name in (names[id(p)] for p in decayed))
    assert len(decayed) + len(spared) == len(names)
    untied = build_model(replace(MODEL, tie_embeddings="none"))
    assert any(parameter is untied.head.weight for parameter in split_by_decay(untied)[0])


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {"content_bias", "position_bias"}),
        ({"cutoffs": (8, 14), "div_value": 2}, {"content_bias", "position_bias"}),
        ({"attention": "relative_learned"}, {"content_bias", "distance_bias", "distance_embedding"}),
        ({"attention": "absolute_learned", "tie_embeddings": False}, {"positions"}),
    ],
)
def test_embeddings_and_biases_of_a_transformer_xl_are_no_matrices_of_maps(changes, more):
    """Its tables are adaptive embeddings, and u and v have an axis of heads: Muon would make them orthogonal."""
    model = build_model(TransformerXLConfig(vocab_size=20, d_model=16, num_heads=2, d_ff=32, num_layers=2, **changes))
    decayed, spared = split_by_decay(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    short = {names[id(p)].rpartition(".")[2] for p in spared if p.ndim > 1 and "tables" not in names[id(p)]}
    assert short == more
    assert {names[id(p)] for p in spared} >= {
        f"body.embedding.tables.{n}" for n in range(len(model.body.embedding.tables))
    }
    assert {name for name in (names[id(p)] for p in decayed) if not name.endswith("weight")} <= {
        f"{part}.projections.{number}" for part in ("body.embedding", "head") for number in range(3)
    }
    optimiser = build_optimiser(model, OptimiserSettings(name="muon", learning_rate=1e-3))
    assert isinstance(optimiser, MuonWithAdam)
    assert optimiser.matrices == {id(parameter) for parameter in decayed if parameter.ndim == 2}


def test_the_vectors_of_additive_scores_are_no_matrix_of_a_map() -> None:
    """One vector for each head: Muon would make those of different heads orthogonal."""
    score = AdditiveScore(4, 8)
    assert [id(one) for one in split_by_decay(score)[1]] == [id(score.score_weight)]


def test_parameters_behind_a_parametrization() -> None:
    """The matrix of a weight-normalised layer decays, the lengths of its rows and a table that is computed do not."""
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 6))
    table = torch.nn.utils.parametrizations.orthogonal(torch.nn.Embedding(4, 4))
    decayed, spared = split_by_decay(torch.nn.Sequential(table, layer))
    lengths, directions = layer.parametrizations.weight.parameters(recurse=False)
    assert lengths.shape == (6, 1)
    assert [id(one) for one in decayed] == [id(directions)]
    wanted = [*table.parametrizations.weight.parameters(), lengths, layer.bias]
    assert {id(one) for one in spared} == {id(one) for one in wanted}
    optimiser = build_optimiser(layer, OptimiserSettings(name="muon", learning_rate=1e-3))
    assert isinstance(optimiser, MuonWithAdam)
    assert optimiser.matrices == {id(directions)}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["penalties", "relative bias"])
def test_numbers_for_distances_belong_to_muon_and_do_not_decay(name: str, kind: str) -> None:
    """With Muon they learn faster than with AdamW (docs/decisions/033)."""
    layer: nn.Module
    if kind == "penalties":
        layer = LocalSelfAttention(8, 2, chunk_len=4, sloped=True, train_slopes=True)
        numbers = layer.distance_penalties
    else:
        bias = RelativeBias(2, 4, causal=True)
        layer = MultiHeadAttention(8, 2, relative_bias=bias)
        numbers = bias.table
    settings = OptimiserSettings(name=name, learning_rate=1e-3, weight_decay=0.5)  # type: ignore[arg-type]
    optimiser = build_optimiser(layer, settings)
    if name == "muon":
        assert isinstance(optimiser, MuonWithAdam)
        assert id(numbers) in optimiser.matrices
    before = {id(parameter): parameter.detach().clone() for parameter in layer.parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    kept = [parameter for parameter in layer.parameters() if torch.equal(parameter, before[id(parameter)])]
    assert any(parameter is numbers for parameter in kept)
    assert not any(parameter is layer.q_proj.weight for parameter in kept)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_moments_come_back_and_the_next_step_is_the_same(name: str) -> None:
    settings = config(optimiser=OptimiserSettings(name=name, weight_decay=0.1))  # type: ignore[arg-type]
    model, train_step = build(settings)
    for step in (1, 2):
        train_step.run([batch(4, step)], step, 1e-2)
    other, fresh = build(settings)
    other.load_state_dict(model.state_dict())
    saved = {
        key: value.clone() for key, value in optimiser_tensors(train_step._optimiser, named_parameters(model)).items()
    }
    load_optimiser_tensors(fresh._optimiser, named_parameters(other), saved)
    for one in (train_step, fresh):
        one.run([batch(4, 3)], 3, 1e-2)
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def test_muon_takes_the_matrices_of_maps_and_adam_the_rest() -> None:
    settings = OptimiserSettings(name="muon", learning_rate=1e-3, muon_learning_rate=0.02)
    model, train_step = build(config(optimiser=settings))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train_step.run([batch(4)], 1, 5e-4)  # half of the peak, for both
    saved = optimiser_tensors(train_step._optimiser, named_parameters(model))
    assert {name.partition(".")[0] for name in saved} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert all(saved[name].ndim == 2 and "embedding" not in name for name in saved if name.startswith("momentum"))
    for name, parameter in model.named_parameters():
        moved = parameter.detach() - before[name]
        if f"momentum_buffer.{name.removeprefix('body.')}" in saved:
            # An orthogonal update moves every direction alike: by the rate times max(1, rows / columns)^0.5.
            singular = torch.linalg.svdvals(moved)
            expected = 0.01 * max(1.0, moved.shape[0] / moved.shape[1]) ** 0.5
            assert 0.4 * expected < singular.mean() < 1.4 * expected
        else:
            assert moved.abs().max() < 6e-4  # Adam's first step is as long as its rate


def test_muon_is_that_of_torch_but_for_the_order_of_sums() -> None:
    torch.manual_seed(0)
    shapes = [(16, 16), (32, 16), (16, 16), (16, 32)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in ours]
    rest = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    optimiser = MuonWithAdam(ours, rest, rate_scale=0.02, momentum=0.95, weight_decay=0.1, dtype=torch.bfloat16)
    oracle = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimiser.step()
        oracle.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)  # a hundredth of what three steps move


def _muon(dtype: torch.dtype | None, device: str = "cpu") -> tuple[MuonWithAdam, list[nn.Parameter]]:
    shapes = [(16, 16), (32, 16), (16, 16), (16, 32), (32, 16)]
    matrices = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    rest = torch.optim.AdamW([nn.Parameter(torch.zeros(1, device=device))])
    options: dict[str, Any] = {"rate_scale": 0.02, "momentum": 0.95, "weight_decay": 0.1, "dtype": dtype}
    return MuonWithAdam(matrices, rest, **options), matrices


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_muon_of_many_matrices_at_once_has_the_bytes_of_one_at_a_time(dtype: torch.dtype | None) -> None:
    optimiser, matrices = _muon(dtype)
    weights, momenta = [one.detach().clone() for one in matrices], [torch.zeros_like(one) for one in matrices]
    for _ in range(3):
        for weight, momentum, matrix in zip(weights, momenta, matrices, strict=True):
            matrix.grad = torch.randn_like(matrix)
            momentum.lerp_(matrix.grad, 1 - 0.95)
            update = orthogonalise(matrix.grad.lerp(momentum, 0.95)[None], dtype)[0].float()
            rate = 0.02 * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            weight.mul_(1 - 0.02 * 0.1).add_(update, alpha=-rate)
        optimiser.step()
    for matrix, weight in zip(matrices, weights, strict=True):
        assert torch.equal(matrix, weight)


def test_launches_of_muon() -> None:
    """Three shapes: each takes 15 products, and the operations on all its matrices; tall ones are made contiguous."""
    optimiser, matrices = _muon(torch.bfloat16, "meta")
    for _ in range(2):
        for matrix in matrices:
            matrix.grad = torch.zeros_like(matrix)
        with Launches() as launches:
            optimiser.step()
    # lerp_, lerp, stack, norm, clamp, div, cast, 15 products, cast, mul_, add_; two copies where rows > columns
    assert launches.count == 3 * 25 + 2, launches.by_name
    strides: list[Any] = []
    add = torch._foreach_add_
    with patch.object(torch, "_foreach_add_", lambda a, b, **more: (strides.append((a, b)), add(a, b, **more))):
        optimiser.step()
    for group, updates in strides:  # without equal strides, CUDA would start a kernel for each
        assert [one.stride() for one in group] == [one.stride() for one in updates]


def test_the_moving_average_follows_and_steps_aside() -> None:
    model, train_step = build(config())
    named = named_parameters(model)
    average = MovingAverage(named, 0.9)
    first = {name: parameter.detach().clone() for name, parameter in named.items()}
    train_step.run([batch(4)], 1, 1e-2)
    average.update(1)
    decay = 2 / 11  # the start's short memory
    trained = {name: parameter.detach().clone() for name, parameter in named.items()}
    for name, value in average.tensors.items():
        torch.testing.assert_close(value, decay * first[name] + (1 - decay) * trained[name])
    with average.applied():
        assert all(torch.equal(named[name], value) for name, value in average.tensors.items())
    assert all(torch.equal(named[name], value) for name, value in trained.items())
    average.update(1000)
    with pytest.raises(RuntimeError), average.applied():
        raise RuntimeError
    assert all(torch.equal(named[name], value) for name, value in trained.items())


def test_the_kind_of_smoothing_reaches_the_loss() -> None:
    """And padding is the id that the batch says."""
    losses = {}
    for kind in ("all", "without_padding", "others"):
        for pad_id in (0, 3):
            training = TrainingSettings(label_smoothing=0.3, smoothing_kind=kind)
            _, train_step = build(config(training=training))
            losses[kind, pad_id] = train_step.run([replace(batch(6), pad_id=pad_id)], 1, 1e-2).loss_sum
    assert losses["all", 0] == losses["all", 3]
    assert len(set(losses.values())) == 5


def test_candidates_serve_translators_too() -> None:
    training = TrainingSettings(label_smoothing=0.0, num_sampled=7)
    model, train_step = build(config(training=training))
    result = train_step.run([batch(6)], 1, 1e-2)
    _, whole = build(config(training=replace(training, num_sampled=0)))
    full = whole.run([batch(6)], 1, 1e-2)
    assert result.loss_sum != full.loss_sum
    assert result.loss_sum == pytest.approx(full.loss_sum, rel=0.5)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_candidates_and_label_smoothing_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"num_sampled is 5 and training\.label_smoothing"):
        TrainingSettings(label_smoothing=0.1, num_sampled=5)


def test_a_removed_setting_may_have_the_value_without_effect() -> None:
    assert build_settings(RunConfig, {"training": {"r_drop": 0.0}}).training == TrainingSettings()
    with pytest.raises(
        ConfigError, match=r"training\.r_drop is 5\.0, but it is no longer there; set it to 0\.0, or leave it out"
    ):
        build_settings(RunConfig, {"training": {"r_drop": 5.0}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_looked_at_before_a_save(dtype: torch.dtype) -> None:
    """By sums, which may overflow although every number is finite, and in which infinities may meet."""
    inf, most = float("inf"), torch.finfo(dtype).max
    good = {"huge": [most, most, 1.0], "none": [], "both": [most, -most]}
    tensors = {name: torch.tensor(values, dtype=dtype) for name, values in good.items()}
    assert first_bad({"model": {**tensors, "count": torch.ones(2, dtype=torch.int64)}}) is None
    for values in ([1.0, float("nan")], [inf, 1.0], [inf, -inf], [most, most, -inf]):
        assert first_bad({"model": tensors, "ema": {"w": torch.tensor(values, dtype=dtype)}}) == "ema: w"
