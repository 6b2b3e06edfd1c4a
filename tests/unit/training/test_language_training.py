"""Training a language model: memory goes from step to step, into checkpoints and out of them, and no further."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TINY_TEXT, changed, outcome

import manyheads.training.optim.optimiser
from manyheads.data.corpora import load_novel
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.preparing import Holdout
from manyheads.errors import CheckpointError, ConfigError, NonFiniteError
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.text.settings import VocabularySettings
from manyheads.training.run.components import assemble
from manyheads.training.run.loop import train
from manyheads.training.run.state import Memory
from manyheads.training.run.step import TrainStep

CPU = torch.device("cpu")


@pytest.fixture
def text(text_run: Callable[..., TextConfig]) -> Callable[..., TextConfig]:
    return partial(text_run, TINY_TEXT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stopped_run_goes_on_with_its_memories(text: Callable[..., TextConfig], precision: str) -> None:
    """In the middle of an epoch, byte for byte: weights, moments, averages, memories, metrics and samples."""
    parted = text("parted", precision=precision)
    for steps in (2, 5, 9):
        train(changed(parted, training={"max_steps": steps}, schedule={"kind": "constant"}))
    straight = text("straight", precision=precision, schedule={"kind": "constant"})
    train(straight)
    wanted, found = outcome(Path(straight.run_dir)), outcome(Path(parted.run_dir))
    assert "checkpoints/step-00000009/memory.safetensors" in wanted
    differing = [
        name
        for name in wanted
        if not name.endswith("config.yaml")
        and found[name].replace(parted.run_dir.encode(), straight.run_dir.encode()) != wanted[name]
    ]
    # The first parts ended with a validation of their own, which the whole run did not have.
    assert {name for name in differing if name.endswith(".safetensors")} <= {"model/model.safetensors"}
    assert (
        found["checkpoints/step-00000009/memory.safetensors"] == wanted["checkpoints/step-00000009/memory.safetensors"]
    )
    memory = load_file(Path(straight.run_dir) / "checkpoints" / "step-00000009" / "memory.safetensors")
    assert {name.partition(".")[0] for name in memory} == {"0", "1"}  # of both micro-batches
    assert {tensor.dtype for tensor in memory.values()} >= {torch.bfloat16 if precision == "bf16" else torch.float32}


def test_a_resumed_run_may_read_and_write_its_held_out_text_in_another_way(text: Callable[..., TextConfig]) -> None:
    """As the search of a translator may change. Losses of other readings are not compared."""
    first = train(text(training={"max_steps": 3}))
    assert first.best_step == 3
    changes = {"reading": {"max_tokens": 100}, "generation": {"temperature": 0.5}}
    again = train(text(training={"max_steps": 3}, **changes))
    assert (again.step, again.best_score) == (3, None)
    longer = train(text(training={"max_steps": 6}, **changes))
    assert longer.best_step == 6


def test_a_run_of_a_version_whose_muon_trained_embeddings_goes_on(text, monkeypatch):
    def all_matrices(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        found = list(model.parameters())
        return [one for one in found if one.ndim >= 2], [one for one in found if one.ndim < 2]

    config = text(optimiser={"name": "muon"})
    monkeypatch.setattr(manyheads.training.optim.optimiser, "split_by_decay", all_matrices)
    train(changed(config, training={"max_steps": 3}))
    monkeypatch.undo()
    assert train(changed(config, training={"max_steps": 6})).step == 6
    log = (Path(config.run_dir) / "train.log").read_text(encoding="utf-8")
    assert "older version, in which Muon trained embedding.tables.0, layers.0.attention.content_bias" in log
    saved = load_file(Path(config.run_dir) / "checkpoints" / "step-00000006" / "optimiser.safetensors")
    assert saved["step.embedding.tables.0"].item() == 3
    assert "momentum_buffer.embedding.tables.0" not in saved


def test_memory_is_what_the_step_before_read(text: Callable[..., TextConfig], tmp_path: Path) -> None:
    """Two steps see as much as one model call after another; without memory the second would differ."""
    config = text(model={"dropout": 0.0, "attention_dropout": 0.0}, data={"accumulate": 1, "segment_lengths": "fixed"})
    components = assemble(config, CPU, tmp_path)
    [first], [second] = components.stream.at(0, 0), components.stream.at(0, 1)
    with torch.no_grad():
        alone = components.model(second).nll_sum
        _, state = components.model.token_losses(first)
        expected = components.model(second, state).nll_sum
    train_step = TrainStep(components.model, components.optimiser, components.config, CPU, components.memory)
    train_step.run([first], 1, 0.0)
    found = train_step.run([second], 2, 0.0).nll_sum
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert found != pytest.approx(float(alone), rel=1e-6)
    components.memory.forget()
    assert train_step.run([second], 3, 0.0).nll_sum == pytest.approx(float(alone), rel=1e-5)


def test_gradients_end_at_the_memory(text: Callable[..., TextConfig], tmp_path: Path) -> None:
    components = assemble(text(data={"accumulate": 1}), CPU, tmp_path)
    output = components.model(components.stream.at(0, 0)[0])
    assert not any(tensor.requires_grad for tensor in torch.utils._pytree.tree_leaves(output.state))


def test_micro_batches_are_groups_of_lanes(text: Callable[..., TextConfig], tmp_path: Path) -> None:
    """Split or whole, the same step: every group has the memory of its own lanes."""
    results = []
    for accumulate in (1, 3):
        changes = {"accumulate": accumulate, "segment_lengths": "fixed"}
        config = text(model={"dropout": 0.0, "attention_dropout": 0.0}, data=changes)
        components = assemble(config, CPU, tmp_path)
        train_step = TrainStep(components.model, components.optimiser, components.config, CPU, components.memory)
        results.append([train_step.run(components.stream.at(0, row), row + 1, 1e-2).nll_sum for row in range(4)])
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_an_epoch_begins_without_memory(text, tmp_path, monkeypatch):
    seen: list[tuple[int, bool]] = []
    inner = TrainStep.run

    def watched(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        seen.append((step, self._memory.of(0) is None))
        return inner(self, batches, step, rate)

    monkeypatch.setattr(TrainStep, "run", watched)
    path = tmp_path / "short"
    novel = TextBlock("novel", load_novel()["train"][:2400])
    prepare_text(path, train=novel, vocabulary=VocabularySettings(level="bytes"), holdout=Holdout(valid=400))
    config = text(data={"path": str(path), "lanes": 40, "segment_len": 10, "segment_lengths": "fixed", "accumulate": 1})
    config = changed(config, training={"max_steps": 11, "save_every": 0}, validation={"every_steps": 0})
    train(config)
    rows = assemble(config, CPU, Path(config.run_dir)).stream.rows(0)
    assert 1 < rows < 11
    assert [step for step, empty in seen if empty] == list(range(1, 12, rows))


def test_a_step_that_is_not_taken_leaves_no_memory(text: Callable[..., TextConfig], tmp_path: Path) -> None:
    components = assemble(text(data={"accumulate": 1}), CPU, tmp_path)
    train_step = TrainStep(components.model, components.optimiser, components.config, CPU, components.memory)
    train_step.run(components.stream.at(0, 0), 1, 1e-3)
    assert components.memory.of(0) is not None
    with torch.no_grad():
        next(components.model.parameters())[:] = float("nan")
    result = train_step.run(components.stream.at(0, 1), 2, 1e-3)
    assert result.fault is not None
    assert components.memory.of(0) is None


def test_nan_stops_the_run_and_names_the_places(text: Callable[..., TextConfig]) -> None:
    config = text(optimiser={"learning_rate": 1e30, "clip_norm": 0.0})
    with pytest.raises(NonFiniteError, match=r"sample ids of micro-batch|NaN or infinity"):
        train(config)


def test_what_a_validation_says(text: Callable[..., TextConfig]) -> None:
    config = text(reading={"max_tokens": 0, "lanes": 64, "segment_len": 64}, training={"max_steps": 3})
    train(config)
    run = Path(config.run_dir)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    [judged] = [record for record in records if "valid_nll" in record]
    assert 0 < judged["bits_per_byte"] < 9
    assert judged["bits_per_byte"] == pytest.approx(judged["valid_nll"] / 0.693147, rel=1e-3)  # a token is a byte
    part = text("part", training={"max_steps": 3})  # of bytes, a part can be told by its tokens too
    train(part)
    assert '"bits_per_byte"' in (Path(part.run_dir) / "metrics.jsonl").read_text(encoding="utf-8")
    sample = (run / "samples" / "step-3.txt").read_text(encoding="utf-8")
    assert sample.startswith("text:")


@pytest.mark.slow
def test_candidates_stand_for_the_vocabulary_in_training_alone(text: Callable[..., TextConfig]) -> None:
    for name, training in (("whole", {}), ("some", {"num_sampled": 40})):
        settings = {"max_steps": 120, "save_every": 0, **training}
        train(text(name, training=settings, optimiser={"learning_rate": 5e-3}, validation={"every_steps": 120}))
    records = {
        name: [json.loads(line) for line in (Path(text(name).run_dir) / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "some")
    }
    losses = {name: [one["valid_nll"] for one in found if "valid_nll" in one][-1] for name, found in records.items()}
    assert losses["some"] < 4.2  # ln 256 is 5.5
    assert losses["some"] == pytest.approx(losses["whole"], rel=0.15)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"smoothing_kind": "others"}}, "training.smoothing_kind"),
        ({"training": {"num_sampled": 9}, "model": {"cutoffs": (20,)}}, "the model's softmax is adaptive"),
        ({"validation": {"best_by": "bleu"}}, "validation.best_by"),
        ({"model": {"vocab_size": 100}}, "model.vocab_size is 100"),
        ({"data": {"path": "embedded:nothing"}}, "There is no embedded text"),
    ],
)
def test_mistakes(text: Callable[..., TextConfig], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(text(**sections))


def test_a_memory_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 1 parts"):
        Memory().load({"0.0": torch.zeros(2)}, (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(CheckpointError, match="not part of a memory"):
        Memory().load({"weights": torch.zeros(2)}, None)
    memory = Memory()
    memory.load({}, None)
    assert memory.tensors() == {}
