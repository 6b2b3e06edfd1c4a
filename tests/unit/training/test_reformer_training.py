"""Training a Reformer: the seed of its hashes goes from step to step, and through checkpoints, with nothing lost."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TINY_REFORMER, changed, outcome

from manyheads.data.settings import DUPLICATION, SegmentSettings
from manyheads.errors import ConfigError, DataError, RequestError
from manyheads.evaluation.reading import Reading
from manyheads.extras.planning.planner import Planner
from manyheads.extras.research.duplication import DuplicationStream, duplicated, held_out
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer_xl.config import PRESETS as XL_MODELS
from manyheads.seeding import derive_seed
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.training.run.components import assemble
from manyheads.training.run.loop import train

CPU = torch.device("cpu")
LAST = "checkpoints/step-00000009/memory.safetensors"


@pytest.fixture
def text(text_run: Callable[..., TextConfig]) -> Callable[..., TextConfig]:
    return partial(text_run, TINY_REFORMER)


def test_a_stopped_run_goes_on_with_its_hash_seeds(text: Callable[..., TextConfig]) -> None:
    """In the middle of an epoch, byte for byte; each micro-batch has a seed of its own, one more at each step."""
    whole, parted = text("whole", schedule={"kind": "constant"}), text("parted")
    train(whole)
    for steps in (2, 5, 9):
        train(changed(parted, training={"max_steps": steps}, schedule={"kind": "constant"}))
    wanted, found = outcome(Path(whole.run_dir)), outcome(Path(parted.run_dir))
    tensors = [name for name in wanted if name.startswith("checkpoints/") and name.endswith(".safetensors")]
    assert LAST in tensors
    assert [name for name in tensors if found[name] != wanted[name]] == []
    memory = load_file(Path(whole.run_dir) / LAST)
    for micro in (0, 1):
        first = derive_seed(whole.seed, "hashes", 1, micro)
        assert int(memory[f"{micro}.0"]) == (first + 9) % 2**63


def test_an_epoch_begins_with_seeds_of_its_own(text: Callable[..., TextConfig], tmp_path: Path) -> None:
    config = text(data={"lanes": 2, "accumulate": 1})
    components = assemble(config, CPU, tmp_path)
    train_step = components.train_step()
    seeds = []
    for step in range(1, 5):
        if step == 3:
            components.memory.forget()  # what the loop does where an epoch begins, or after a step that was not taken
        train_step.run(components.stream.at(0, step - 1), step, 0.0)
        seeds.append(int(components.memory.of(0).hash_seed))
    first, later = (derive_seed(config.seed, "hashes", step, 0) for step in (1, 3))
    assert seeds == [(first + 1) % 2**63, (first + 2) % 2**63, (later + 1) % 2**63, (later + 2) % 2**63]


def test_hashes_differ_from_step_to_step_and_not_in_evaluation(text: Callable[..., TextConfig], tmp_path: Path) -> None:
    config = text(model={"dropout": 0.0, "attention_dropout": 0.0, "num_hashes": 1})
    components = assemble(config, CPU, tmp_path)
    batch, model = components.stream.whole(0, 0), components.model  # type: ignore[attr-defined]
    begin = components.objective.begin
    with torch.no_grad():
        model.train()
        losses = [float(model(batch, begin(model, 4, seed)).loss_sum) for seed in (1, 1, 2, 3, 4, 5)]
        model.eval()
        judged = [float(model(batch, begin(model, 4, seed)).loss_sum) for seed in (1, 2)]
    assert losses[0] == losses[1]
    assert len(set(losses)) > 2
    assert judged[0] == judged[1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"segment_len": 49, "segment_lengths": "fixed"}},
            "segment_len is 49, but the model has 48 positions",
        ),
        ({"data": {"segment_len": 40}}, "up to 55 tokens, above model.max_len 48"),
        ({"reading": {"segment_len": 64}}, "reading.segment_len is 64"),
        ({"reading": {"memory_len": 8}}, "memory_len is 8, but a reformer has no memory"),
        ({"reading": {"same_length": True}}, "same_length is True"),
        ({"model": {"causal": False, "visible": "chunk"}}, "an encoder cannot learn to generate"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(TINY_REFORMER, **sections)


def test_memory_of_zero_may_be_asked_for() -> None:
    assert Reading(memory_len=0, same_length=False).attending(ReformerConfig()) is None
    assert Reading().attending(XL_MODELS["debug"]).memory_len == 8


def test_sequences_are_doubled_and_depend_on_their_number_alone() -> None:
    found = duplicated(1, "train", 5, 40, 16)
    assert found.shape == (40, 16)
    assert (found[:, :8] == found[:, 8:]).all()
    assert not found[:, 0].any()
    assert found[:, 1:8].min() >= 1
    assert found[:, 1:8].max() <= 127
    assert len({row.tobytes() for row in found}) == 40
    assert (duplicated(1, "train", 15, 3, 16) == found[10:13]).all()
    for other in (duplicated(2, "train", 5, 40, 16), duplicated(1, "test", 5, 40, 16)):
        assert not (other[:, 1:8] == found[:, 1:8]).all(1).any()
    counts = torch.bincount(torch.from_numpy(duplicated(1, "train", 0, 2000, 16)[:, 1:8].copy()).flatten())
    assert counts[1:].min() > 0.6 * 14_000 / 127
    assert counts[1:].max() < 1.5 * 14_000 / 127


def test_only_the_second_half_counts() -> None:
    stream = DuplicationStream(SegmentSettings(path=DUPLICATION, lanes=5, segment_len=8, accumulate=2), 1)
    parts = stream.at(1, 3)
    assert [len(part.lengths) for part in parts] == [3, 2]
    assert sum(part.num_target_tokens() for part in parts) == 5 * 4
    for batch in (*parts, *held_out(1, "valid", 8, 30)):
        assert (batch.tokens[:, 0] == 128).all()
        assert (batch.tokens[:, 1:] == batch.targets[:, :-1]).all()
    assert sum(len(batch.lengths) for batch in held_out(1, "test", 8, 100)) == 256
    with pytest.raises(IndexError):
        stream.at(0, stream.rows(0))


def test_the_duplication_task_trains_and_is_judged(tmp_path: Path) -> None:
    data = SegmentSettings(path=DUPLICATION, lanes=4, segment_len=16)
    config = changed(TINY_REFORMER, data=data, training={"max_steps": 3}, validation={"num_samples": 0})
    result = train(replace(config, run_dir=str(tmp_path / "run")))
    assert 0 <= (result.last_validation.accuracy or 0) < 30
    assert "accuracy" in " ".join(result.last_validation.scores())
    assert result.next_command == "evaluate {run} --num-hashes full 8 4 2 1"
    with pytest.raises(ConfigError, match="segment_len is 15; for the duplication task"):
        assemble(replace(config, data=replace(data, segment_len=15)), CPU, tmp_path)


MEASURED = """
import resource, sys
from manyheads.cli.process import set_up_machine
set_up_machine()
import torch
from manyheads.tasks.language_modelling.objective import SyntheticRun
from manyheads.extras.planning.planner import take_steps
from manyheads.training.run.device import resolve_precision
sys.path.insert(0, sys.argv[1])
from tests_footprint_config import CONFIG
torch.set_num_threads(1)
length = int(sys.argv[2])
synthetic_run = SyntheticRun(resolve_precision(CONFIG, torch.device("cpu"))).at(length)
take_steps(synthetic_run, synthetic_run.config, length, 1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
CONFIG = """
from dataclasses import replace
from manyheads.tasks.language_modelling.settings import reformer_demo
demo = reformer_demo()
CONFIG = replace(demo, num_threads=1, model=replace(
    demo.model, num_layers=2, layers=("local", "lsh"), max_len=65536, axial_shape=(256, 256)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB there")
@pytest.mark.parametrize("length", [16_384, 32_768])
def test_memory_is_predicted_within_a_fifth(length: int, tmp_path: Path, figure: Callable[..., None]) -> None:
    (tmp_path / "tests_footprint_config.py").write_text(CONFIG)
    scope: dict[str, Any] = {}
    exec(CONFIG, scope)  # noqa: S102  (the same few lines as the child's)
    code = [sys.executable, "-c", MEASURED, str(tmp_path), str(length)]
    measured = int(subprocess.run(code, capture_output=True, text=True, check=True, timeout=1200).stdout)
    asking = (
        "import sys; sys.path.insert(0, sys.argv[1]); from manyheads.cli.process import set_up_machine;"
        "set_up_machine(); from tests_footprint_config import CONFIG;"
        "from manyheads.extras.planning.planner import Planner;"
        "found = Planner(CONFIG).memory(int(sys.argv[2])); print(found.total_bytes, found.program_bytes)"
    )
    asked = [sys.executable, "-c", asking, str(tmp_path), str(length)]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=1200).stdout
    total, program = map(int, printed.split())
    figure("info", f"memory at {length:,} tokens", predicted=total, program=program, measured=measured)
    assert abs(total / measured - 1) <= 0.2


def test_memory_grows_with_length_as_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line through two short steps meets a longer step that is counted itself, within a twentieth."""
    from manyheads.extras.planning import planner as planning

    # Only what is counted: what the process takes besides differs from run to run, and these steps are small.
    monkeypatch.setattr("manyheads.extras.planning.planner.peak_resident_bytes", lambda: 0)
    model = replace(TINY_REFORMER.model, max_len=4096, vocab_size=257)  # type: ignore[arg-type]
    config = changed(TINY_REFORMER, model=model)
    before = planning.LONGEST_PROBE
    try:
        planning.LONGEST_PROBE = 1024
        found = Planner(config).memory(4096, 1)
        assert found.probes == (512, 1024)
        planning.LONGEST_PROBE = 8192
        counted = Planner(config).memory(4096, 1)
        assert counted.probes == (4096,)
    finally:
        planning.LONGEST_PROBE = before
    assert found.state_bytes == counted.state_bytes > 0
    assert abs(found.step_bytes / counted.step_bytes - 1) < 0.05
    with pytest.raises(ConfigError, match=r"--length 5,000 is above model\.max_len 4,096"):
        Planner(config).memory(5000)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"validation": {"prompt": "He " * 200}}, RequestError),
        ({"generation": {"memory_len": 8}}, RequestError),
        ({"model": {"layers": ("lsh",), "visible": "chunk"}}, RequestError),
        ({"reading": {"max_tokens": 1}}, DataError),
    ],
)
def test_a_validation_that_cannot_be_is_refused_before_the_first_step(text, sections, error):
    config = text(**sections, training={"log_every": 1})
    with pytest.raises(error):
        train(config)
    assert not (Path(config.run_dir) / "metrics.jsonl").exists()
