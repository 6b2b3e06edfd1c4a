"""Training with lengths that change: what a step sees, and that a stopped run goes on byte for byte."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TINY_REFORMER, TINY_TEXT, changed, outcome

import manyheads.training.run.clock
from manyheads.catalogue import build_model
from manyheads.cli.main import main
from manyheads.data.language.segments import SegmentStream
from manyheads.data.settings import DUPLICATION
from manyheads.errors import ConfigError, RequestError
from manyheads.models.transformer_xl.state import LayerInputs, XLState
from manyheads.seeding import derive_seed
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.training.run.components import assemble
from manyheads.training.run.loop import Trainer, train

CPU = torch.device("cpu")
SCHEDULE = ("4=0.3", "8=0.6", "24=1")
GROWING = changed(
    TINY_REFORMER,
    data={"segment_lengths": "fixed", "length_schedule": SCHEDULE, "lanes": 2},
    schedule={"kind": "constant"},
    training={"max_steps": 10},
)
APART = changed(
    TINY_TEXT,
    model={"memory_len": 0},
    reading={"memory_len": 0},
    data={"segment_lengths": "fixed", "length_schedule": ("2=0.3", "8=1")},
    schedule={"kind": "constant"},
    training={"max_steps": 10},
)
VARIED = changed(TINY_TEXT, data={"memory_len_range": (0, 12)}, schedule={"kind": "constant"})


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every step that a run takes."""
    seen: list[tuple[int, ...]] = []
    read = SegmentStream.whole

    def whole(self: SegmentStream, epoch: int, row: int, progress: float = 1.0) -> Any:
        batch = read(self, epoch, row, progress)
        seen.append(tuple(batch.tokens.shape))
        return batch

    monkeypatch.setattr(SegmentStream, "whole", whole)
    return seen


def differing(first: Path, second: Path) -> list[str]:
    """Names of the tensors of the last checkpoints and of the metrics that differ between two runs."""
    wanted, found = outcome(first), outcome(second)
    names = [name for name in wanted if name.startswith("checkpoints/") and name.endswith(".safetensors")]
    assert len(names) == 4
    return [name for name in names if found[name] != wanted[name]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("base", "stops", "changes_at"),
    [
        (GROWING, (2, 3, 4, 6, 7, 10), [(12, 4)] * 3 + [(6, 8)] * 3 + [(2, 24)] * 4),
        (APART, (3, 5, 10), [(24, 2)] * 3 + [(6, 8)] * 7),
        (VARIED, (2, 3, 5, 9), None),
    ],
    ids=["reformer", "apart", "memory"],
)
def test_a_stopped_run_goes_on(text_run, shapes, monkeypatch, base, stops, changes_at):
    """Before, at and after each change of the length, byte for byte, as if it had not stopped."""
    whole, parted = text_run(base, "whole"), text_run(base, "parted")
    train(whole)
    assert changes_at is None or shapes == changes_at
    straight = shapes.copy()
    shapes.clear()
    reason = Trainer._stop_reason
    for steps in stops:
        # Stopped as by a signal, since the share of the progress depends on max_steps.
        monkeypatch.setattr(
            Trainer,
            "_stop_reason",
            lambda self, last=steps: reason(self) or ("signal" if self._components.counters.step >= last else None),
        )
        train(parted)
    assert shapes == straight
    assert differing(Path(whole.run_dir), Path(parted.run_dir)) == []


def test_hashes_begin_anew_where_the_length_changes(text_run: Callable[..., TextConfig]) -> None:
    config = text_run(GROWING)
    train(config)
    memory = load_file(Path(config.run_dir) / "checkpoints" / "step-00000010" / "memory.safetensors")
    for micro in (0, 1):
        first = derive_seed(config.seed, "hashes", 7, micro)
        assert int(memory[f"{micro}.0"]) == (first + 4) % 2**63


def test_one_stage_is_a_run_without_a_schedule(text_run: Callable[..., TextConfig]) -> None:
    plain, one = text_run(GROWING, "plain", data={"length_schedule": ()}), text_run(GROWING, "one")
    one = changed(one, data={"length_schedule": ("24=1",)})
    train(plain)
    train(one)
    assert differing(Path(plain.run_dir), Path(one.run_dir)) == []


def test_the_clock_counts_where_minutes_limit_the_run(text_run, shapes, monkeypatch):
    """A resumed run begins with the share that its checkpoint has recorded."""
    config = text_run(GROWING, training={"max_steps": 4, "max_minutes": 1.0})
    now = [0.0]
    monkeypatch.setattr(manyheads.training.run.clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    read = SegmentStream.at

    def at(self: SegmentStream, epoch: int, row: int, progress: float = 1.0) -> Any:
        now[0] += 15.0
        return read(self, epoch, row, progress)

    monkeypatch.setattr(SegmentStream, "at", at)
    train(changed(config, training={"max_steps": 2}))
    assert shapes == [(12, 4), (6, 8)]  # 0 and half of the steps
    now[0] += 1e6
    shapes.clear()
    train(changed(config, training={"max_steps": 100}))
    assert shapes == [(6, 8), (2, 24)]  # 30 and 45 of 60 seconds


def test_short_segments_train_all_positions(text_run: Callable[..., TextConfig], tmp_path: Path) -> None:
    components = assemble(text_run(GROWING, data={"accumulate": 1}, model={"max_len": 24}), CPU, tmp_path)
    model = components.model
    [batch] = components.stream.at(0, 0, 0.0)
    begin = components.objective.begin

    def trained(one: Any) -> int:
        model.zero_grad()
        model(one, begin(model, 12, 1)).loss_sum.backward()
        rows = model.body.positions.weights[0].grad  # type: ignore[union-attr]
        return int((rows.flatten(1) != 0).any(1).sum())

    assert model.body.positions.shape == (4, 6)  # type: ignore[union-attr]
    assert trained(batch) == 4
    assert trained(replace(batch, first_positions=None)) == 1


def test_a_row_has_the_positions_of_its_place(text_run: Callable[..., TextConfig], tmp_path: Path) -> None:
    """Reading from position p is reading the same tokens there within a longer sequence, up to attention."""
    model = assemble(text_run(GROWING), CPU, tmp_path).model.eval()
    tokens = torch.arange(24)[None].repeat(2, 1)
    embedded = model.body.embedding(tokens)  # type: ignore[operator]
    whole = model.body.positions(embedded)  # type: ignore[operator]
    seen = []
    model.body.positions.register_forward_hook(lambda module, given, out: seen.append(out))  # type: ignore[union-attr]
    with torch.no_grad():
        model.body(torch.stack([tokens[0, 8:12], tokens[0, 20:24]]), first_positions=torch.tensor([8, 20]))
    assert torch.equal(seen[0][:, :4], torch.stack([whole[0, 8:12], whole[0, 20:24]]))
    with torch.no_grad(), pytest.raises(RequestError, match="counts its positions itself"):
        model.body(tokens, state=model.start(2), first_positions=torch.tensor([8, 20]))


@pytest.mark.parametrize("options", [{}, {"same_length": True}, {"initial_memory": "zeros"}, {"attention": "absolute"}])
def test_a_step_attends_to_the_drawn_part_of_the_memory(options: dict[str, Any]) -> None:
    """As a model of that memory_len does, while the whole memory is stored."""
    config = replace(TINY_TEXT.model, vocab_size=20, dropout=0.0, attention_dropout=0.0, **options)
    torch.manual_seed(1)
    model = build_model(config)
    shorter = build_model(replace(config, memory_len=5))
    shorter.load_state_dict(model.state_dict())
    segments = torch.randint(20, (4, 3, 6))
    state = model.start(3, projected=False)
    for number, tokens in enumerate(segments):
        wanted, after = model.body(tokens, state=state)
        found, drawn = model.body(tokens, state=state, memory_len=5)
        if number or state.columns:
            assert not torch.equal(wanted, found)
        assert drawn.columns == after.columns == min(12, state.columns + 6)
        assert torch.equal(drawn.lengths, after.lengths)
        assert torch.equal(drawn.memory.layers[0], after.memory.layers[0])  # embeddings, which do not depend on it
        assert torch.equal(found, shorter.body(tokens, state=recent(state, 5))[0])
        state = after


def recent(state: XLState, columns: int) -> XLState:
    """The state that a model with a memory of so many positions would have."""
    assert isinstance(state.memory, LayerInputs)
    layers = tuple(layer[:, max(0, layer.shape[1] - columns) :].clone() for layer in state.memory.layers)
    attending = replace(state.attending, memory_len=columns)
    return XLState(LayerInputs(layers, state.lengths.clamp(max=columns)), attending)


def test_a_memory_of_keys_and_values_is_attended_to_as_a_whole() -> None:
    model = build_model(replace(TINY_TEXT.model, vocab_size=20)).eval()
    with torch.no_grad(), pytest.raises(RequestError, match="memory_len is for training"):
        model.body(torch.zeros(1, 2, dtype=torch.int64), state=model.start(1), memory_len=5)


def test_a_drawn_memory_reaches_the_model(text_run: Callable[..., TextConfig], tmp_path: Path) -> None:
    config = text_run(VARIED, data={"accumulate": 1, "segment_lengths": "fixed"})
    components = assemble(config, CPU, tmp_path)
    train_step, model = components.train_step(), components.model
    asked: list[int | None] = []
    model.body.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda module, given, options: asked.append(options.get("memory_len")), with_kwargs=True
    )
    for row in range(16):
        train_step.run(components.stream.at(0, row), row + 1, 1e-3)
    assert asked == [components.stream.at(0, row)[0].memory_len for row in range(16)]
    assert set(asked) == {0, 4, 8, 12}
    assert components.memory.of(0).columns == 12  # also after a step that attended to none


@pytest.mark.parametrize(
    ("base", "sections", "message"),
    [
        (GROWING, {"data": {"length_schedule": ("6=0.5", "24=1")}}, "contains 6, which is no multiple of 4"),
        (APART, {"model": {"memory_len": 4}}, "continues each lane from its earlier segments"),
        (APART, {"model": {"ext_len": 4}}, "continues each lane from its earlier segments"),
        (GROWING, {"data": {"path": DUPLICATION}}, "is for texts"),
        (VARIED, {"data": {"memory_len_range": (4, 13)}}, "reaches 13, but model.memory_len, .*, is 12"),
        (VARIED, {"model": {"memory_len": 0}, "reading": {"memory_len": 0}}, "this transformer-xl has no memory"),
        (GROWING, {"data": {"length_schedule": (), "memory_len_range": (0, 0)}}, "this reformer has no memory"),
        (VARIED, {"data": {"segment_lengths": "fixed", "path": DUPLICATION}}, "duplication-task has no memory"),
    ],
)
def test_mistakes(base: TextConfig, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(base, **sections)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "reformer-debug", "--data.length_schedule", "96=0.5", "48=1"], "longer than data.segment_len 48"),
        (["--preset", "xl-debug", "--data.memory_len_range", "4", "99"], "reaches 99"),
        (["--preset", "debug", "--data.memory_len_range", "0", "4"], "there is no setting data.memory_len_range"),
    ],
)
def test_the_command_line_refuses_in_one_sentence(options, message, capsys, tmp_path):
    assert main(["train", *options, "--run-dir", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().err
    assert message in shown.replace("\n", " ")
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()
