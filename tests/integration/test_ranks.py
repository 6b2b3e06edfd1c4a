"""Two ranks compute what one computes; checkpoints of any number of ranks serve any other."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import Ranks
from safetensors.torch import load_file
from slices import sliced

from manyheads.checkpoint.format import SHARDS, checkpoint_name, load_checkpoint, read_shards
from manyheads.errors import CheckpointError
from manyheads.tasks.averaging import average_run

KINDS = ("transformer", "xl", "reformer")
EXEMPT_DROPOUT = {"reformer": "its hashed attention drops weights by tile, and tiles span the rows that a rank has"}

LOOSE_FLOAT32 = {"reformer": "buckets are decisions: an error of rounding moves a token to another one (float64: none)"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_exchanges(ranks: Ranks) -> None:
    """A rank without rows, more words than the store keeps, and the same answers everywhere."""
    answers = ranks.run(3, "same")
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == {
        "sum": [3.0, 3.0],
        "highest": [2.0, 7.0],
        "joined": [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]],
        "exchange": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "word": "of 0",
    }


def losses(answers: list[Any]) -> torch.Tensor:
    """(steps, 2): losses and norms, which every rank must know alike."""
    for answer in answers[1:]:
        assert answer["losses"] == answers[0]["losses"]
    return torch.tensor(answers[0]["losses"], dtype=torch.float64)


def compare(ranks: Ranks, place: Path, kind: str, worlds: dict[int, str], *, tolerance: float, **options: Any) -> None:
    alone = ranks.run(1, "steps", kind=kind, run_dir=place, **options)
    for world, parallel in worlds.items():
        several = ranks.run(world, "steps", kind=kind, run_dir=place, parallel=parallel, **options)
        torch.testing.assert_close(losses(several), losses(alone), rtol=tolerance, atol=tolerance)
        assert several[0]["weights"] == pytest.approx(alone[0]["weights"], rel=min(1e3 * tolerance, 1e-2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_one(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Dropout where its masks derive from the row."""
    compare(ranks, tmp_path, kind, {2: "ddp"}, tolerance=1e-9, steps=6, dropout=kind not in EXEMPT_DROPOUT)


def test_packed_batches_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Dropout by the number of the sentence and the position, wherever it lies in the row of a rank."""
    sections = {"data": {"batching": "packed", "max_tokens": 128}, "model": {"attention_dropout": 0.0}}
    compare(ranks, tmp_path, "transformer", {2: "ddp"}, tolerance=1e-9, steps=6, sections=sections)


@pytest.mark.parametrize("kind", sliced(KINDS, 3, "models in parts"))
def test_parts_are_the_whole(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """FSDP2, with more ranks than some micro-batches have rows or lanes."""
    compare(ranks, tmp_path, kind, {3: "fsdp"}, tolerance=1e-9, steps=6, dropout=kind not in EXEMPT_DROPOUT)


def test_muon_in_parts(ranks: Ranks, tmp_path: Path) -> None:
    """Also of parameters that layers share."""
    model = {"relative_bias": 3, "positions": "none", "num_encoder_layers": 2, "num_decoder_layers": 2}
    sections = {"optimiser": {"name": "muon"}, "model": model}
    compare(ranks, tmp_path, "transformer", {2: "fsdp"}, tolerance=1e-9, steps=6, sections=sections, dropout=False)


def test_the_main_rank_decides_the_precision_of_all(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's own measurement would say something else."""
    sections = {"precision": "auto"}
    answers = ranks.run(2, "precision", kind="transformer", run_dir=tmp_path, sections=sections)
    assert answers == ["bf16", "bf16"]


def test_ranks_agree_on_the_best_checkpoint_and_on_patience(ranks: Ranks, tmp_path: Path) -> None:
    """The second validation is better than the first on one rank, and equal on the other."""
    sections = {"validation": {"every_steps": 3, "patience": 2}, "training": {"max_steps": 12, "save_every": 0}}
    answers = ranks.run(2, "judged apart", kind="transformer", run_dir=tmp_path, sections=sections, timeout=5)
    assert answers == [{"step": 9, "stopped_by": "patience", "best_step": 3}] * 2


def test_metrics_that_cannot_be_written_do_not_part_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    sections = {"training": {"on_save_error": "continue"}}
    answers = ranks.run(2, "full disk", kind="transformer", run_dir=tmp_path, sections=sections, timeout=5)
    assert answers == [{"step": 9, "stopped_by": "steps"}] * 2


@pytest.mark.parametrize("raises", [False, True], ids=["stops", "raises"])
def test_callbacks_of_the_main_rank_alone(ranks: Ranks, tmp_path: Path, raises: bool) -> None:
    """Where one stops the run all ranks end after the same step; where it raises they all go on."""
    sections = {"training": {"max_steps": 6, "save_every": 3}, "validation": {"every_steps": 0}}
    options = {"run_dir": tmp_path / "run", "sections": sections, "raises": raises, "timeout": 20}
    main, other = ranks.run(2, "called", kind="transformer", **options)
    ended = {"step": 6, "stopped_by": "steps"} if raises else {"step": 4, "stopped_by": "callback"}
    begun = ["start 0", "step 1", "step 2", "step 3", "checkpoint 3", "step 4"]
    assert main == {**ended, "got": begun if raises else [*begun, "checkpoint 4", "end 4"]}
    assert other == {**ended, "got": []}
    log = (tmp_path / "run" / "train.log").read_text("utf-8")
    assert log.count("ValueError: no such luck") == 2 * raises  # the sentence and the traceback


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_hundred_steps(ranks: Ranks, tmp_path: Path, kind: str, parallel: str, figure: Callable[..., None]) -> None:
    compare(ranks, tmp_path, kind, {2: parallel}, tolerance=1e-9, steps=200, dropout=False)
    if kind not in EXEMPT_DROPOUT:
        compare(ranks, tmp_path, kind, {2: parallel}, tolerance=1e-9, steps=200)
    within = 5e-3 if kind in LOOSE_FLOAT32 else 1e-5
    compare(ranks, tmp_path, kind, {2: parallel}, tolerance=within, steps=20, dropout=False, float64=False)
    figure("R10", f"2 ranks against 1, {kind}, {parallel}", steps=200, float64_within=1e-9, float32_within=within)


def contents(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem: load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))}


@pytest.mark.parametrize("kind", ["xl", pytest.param("transformer", marks=pytest.mark.slow)])
def test_resharding_keeps_every_bit(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """1 -> 2 in parts -> 4 in parts -> 3 copies -> 1: weights, moments, averages and memories."""
    run, found = tmp_path / "run", {}
    ways = [(1, "ddp", 3), (2, "fsdp", 0), (4, "fsdp", 0), (3, "ddp", 0), (1, "ddp", 0)]
    for number, (world, parallel, steps) in enumerate(ways):
        aside = tmp_path / f"whole-{number}"
        answers = ranks.run(world, "resharded", kind=kind, run_dir=run, parallel=parallel, steps=steps, whole=aside)
        assert answers[0]["step"] == 3 + number
        assert (Path(answers[0]["checkpoint"]) / "shards").is_dir() == (parallel == "fsdp")
        found[number] = contents(next(aside.iterdir()))
        assert found[number].keys() == {"model", "optimiser", "ema", *(["memory"] if kind == "xl" else [])}
        for stem, tensors in found[0].items():
            assert tensors.keys() == found[number][stem].keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, found[number][stem][name]), (ways[number], stem, name)


@pytest.fixture(scope="module")
def run_in_parts(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("parts") / "run"
    sections = {"training": {"keep": 5}, "schedule": {"kind": "constant"}}
    ranks.run(2, "run", kind="transformer", run_dir=run, parallel="fsdp", sections=sections)
    return run


@pytest.mark.parametrize("kind", ["model", "ema"])
def test_checkpoints_in_parts_can_be_averaged(run_in_parts, tmp_path, kind):
    steps = average_run(run_in_parts, tmp_path / "averaged", last=2, kind=kind)
    each = [load_checkpoint(run_in_parts / "checkpoints" / checkpoint_name(step)).tensors for step in steps]
    found = load_file(tmp_path / "averaged" / "model.safetensors")
    for name, tensor in found.items():
        wanted = sum(one[kind].get(name, one["model"][name]).double() for one in each) / 2
        torch.testing.assert_close(tensor, wanted.float(), rtol=0, atol=1e-7)
    assert len(each) == 2
    assert not all(torch.equal(each[0][kind][name], each[1][kind][name]) for name in each[0][kind])


def test_a_run_may_change_its_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Memories go on with their lanes: six steps at once, or in parts on 2, 3 and 1 ranks."""
    whole = ranks.run(1, "resharded", kind="xl", run_dir=tmp_path / "a", steps=9, whole=tmp_path / "wa")
    found: list[Any] = []
    for world, parallel in ((2, "ddp"), (3, "fsdp"), (1, "ddp")):
        answers = ranks.run(
            world, "resharded", kind="xl", run_dir=tmp_path / "b", steps=3, whole=tmp_path / "wb", parallel=parallel
        )
        found += answers[0]["losses"]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), losses(whole), rtol=1e-5, atol=1e-5)


class Bad:
    """Unpickled, it leaves a file."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.trap,)


@pytest.fixture(scope="module")
def in_parts(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks have written."""
    place = tmp_path_factory.mktemp("written")
    options = {"run_dir": place / "run", "steps": 2, "parallel": "fsdp", "whole": place / "whole"}
    return Path(ranks.run(2, "resharded", kind="xl", **options)[0]["checkpoint"])


def test_the_layout_of_parts(in_parts: Path) -> None:
    """torch's writer is young: what it makes of a checkpoint is held here."""
    names = {path.relative_to(in_parts).as_posix() for path in in_parts.rglob("*") if path.is_file()}
    parts = {f"{SHARDS}/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert names == parts | {"manifest.json", "memory.safetensors", "scalars.json"}
    loaded = load_checkpoint(in_parts)
    assert loaded.tensors.keys() == {"model", "optimiser", "ema", "memory"}


def test_a_missing_part_leaves_no_hole(in_parts: Path, tmp_path: Path) -> None:
    for path in (in_parts / SHARDS).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = read_shards(tmp_path)
    assert torch.isfinite(whole["model"]["embedding.tables.0"]).all()
    first, second = sorted(tmp_path.iterdir())
    (tmp_path / "shard-00003-model-00001-of-00001.safetensors").write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match="two parts of"):
        read_shards(tmp_path)
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_shards(tmp_path)
    first.unlink()
    (tmp_path / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"hold .* of .* numbers"):
        read_shards(tmp_path)


def test_a_pickle_beside_them_is_not_opened(in_parts: Path, tmp_path: Path) -> None:
    for path in (in_parts / SHARDS).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    trap = tmp_path.with_name("was-here")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bad(trap)))
    assert read_shards(tmp_path)
    assert not trap.exists()
