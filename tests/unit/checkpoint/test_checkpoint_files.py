"""What goes in comes out; pointers, retention, the newest intact one, averages."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.checkpoint.format import (
    apply_retention,
    checkpoint_name,
    find_latest,
    list_checkpoints,
    load_checkpoint,
    needed_bytes,
    read_pointer,
    save_checkpoint,
    set_aside_newer,
    step_of,
    write_pointer,
)
from manyheads.errors import CheckpointError, ConfigError
from manyheads.tasks.averaging import average_tensors, select_checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(folder: Path, step: int, value: float = 0.0) -> Path:
    return save_checkpoint(folder, step, {"model": {"w": torch.tensor([value])}}, {})


@settings(deadline=None, max_examples=30)
@given(floats=st.lists(st.floats(allow_nan=False, allow_infinity=False)), seed=st.integers(0, 2**32))
def test_tensors_and_floats_come_back_bit_for_bit(tmp_path_factory, floats, seed):
    folder = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model": {
            "w": torch.randn(3, 4, generator=generator).t(),
            "half": torch.randn(2, generator=generator).bfloat16(),
        },
        "optimiser": {"step": torch.tensor(seed), "empty": torch.zeros(0, 3)},
    }
    path = save_checkpoint(folder, 7, tensors, {"floats": floats, "text": "é\u2028", "none": None})
    loaded = load_checkpoint(path)
    assert loaded.step == 7
    assert loaded.scalars == {"floats": floats, "text": "é\u2028", "none": None}
    assert [value.hex() for value in loaded.scalars["floats"]] == [value.hex() for value in floats]
    for stem, group in tensors.items():
        assert loaded.tensors[stem].keys() == group.keys()
        for name, tensor in group.items():
            assert loaded.tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[stem][name], tensor)


def test_names_of_steps() -> None:
    assert checkpoint_name(1000) == "step-00001000"
    assert step_of(Path("x/step-00001000")) == 1000
    assert step_of(Path("step-123456789")) == 123456789
    for name in ("step-1000", "step-00001000.tmp-12", "step-00001000.aside", "latest", "step-"):
        assert step_of(Path(name)) is None
    assert needed_bytes({"model": {"w": torch.zeros(10)}}) >= 40


def test_equal_contents_give_equal_bytes(tmp_path: Path) -> None:
    names = [f"layer.{number}.weight" for number in range(50)]
    first = save_checkpoint(tmp_path / "a", 1, {"model": {name: torch.ones(3) for name in names}}, {})
    second = save_checkpoint(tmp_path / "b", 1, {"model": {name: torch.ones(3) for name in reversed(names)}}, {})
    for name in [path.name for path in first.iterdir()]:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    write_pointer(tmp_path, "best", tmp_path / checkpoint_name(2))
    removed = apply_retention(tmp_path, 3)
    assert [step_of(path) for path in removed] == [1, 3]
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 4, 5, 6]
    apply_retention(tmp_path, 0)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 5, 6]
    assert names(tmp_path) == ["best", *(checkpoint_name(step) for step in (2, 5, 6))]


def test_pointers(tmp_path: Path) -> None:
    assert read_pointer(tmp_path, "latest") is None
    path = save(tmp_path, 3)
    write_pointer(tmp_path, "latest", path)
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "step-00000003\n"
    assert read_pointer(tmp_path, "latest") == path
    for text in ("step-00000009\n", "../../etc\n", "", "step-00000003/../..\n"):
        (tmp_path / "latest").write_text(text, encoding="utf-8")
        assert read_pointer(tmp_path, "latest") is None
    (tmp_path / "latest").write_bytes(b"\xff")
    assert read_pointer(tmp_path, "latest") is None


def test_the_newest_intact_one_is_found_whatever_the_pointer_says(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nothing") == (None, [])
    for step in (1, 2, 3):
        save(tmp_path, step)
    write_pointer(tmp_path, "latest", tmp_path / checkpoint_name(1))
    assert find_latest(tmp_path) == (tmp_path / checkpoint_name(3), [])
    for step in (2, 3):
        (tmp_path / checkpoint_name(step) / "scalars.json").unlink()
    latest, warnings = find_latest(tmp_path)
    assert latest == tmp_path / checkpoint_name(1)
    assert [text[:32] for text in warnings] == [f"Skipped checkpoint {checkpoint_name(step)}" for step in (3, 2)]


def test_a_copy_under_a_newer_name_and_a_lost_newest_are_noticed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    shutil.copytree(tmp_path / checkpoint_name(2), tmp_path / checkpoint_name(4))
    latest, warnings = find_latest(tmp_path)
    assert latest == tmp_path / checkpoint_name(3)
    assert "holds step 2" in warnings[0]
    shutil.rmtree(tmp_path / checkpoint_name(4))
    write_pointer(tmp_path, "latest", tmp_path / checkpoint_name(3))
    shutil.rmtree(tmp_path / checkpoint_name(3))
    latest, warnings = find_latest(tmp_path)
    assert latest == tmp_path / checkpoint_name(2)
    assert warnings == ["Skipped checkpoint step-00000003: the pointer latest names it, but it is gone."]
    (tmp_path / checkpoint_name(3)).touch()
    assert "step-00000003" in find_latest(tmp_path)[1][0]


def test_nothing_is_deleted_while_the_best_is_unknown(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "best").write_bytes(b"step-0000000\xb1\n")
    assert apply_retention(tmp_path, 2) == []
    write_pointer(tmp_path, "best", tmp_path / checkpoint_name(9))  # names one that is gone
    assert len(apply_retention(tmp_path, 2)) == 3


def test_newer_ones_are_set_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    set_aside_newer(tmp_path, 1)
    save(tmp_path, 3)
    set_aside_newer(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001", "step-00000002.aside", "step-00000003.aside"]


def test_the_average_is_the_mean_in_float64(tmp_path: Path) -> None:
    values = [1e8, 1.0, -1e8, 3.0]
    folders = [save(tmp_path, step, value) for step, value in enumerate(values, start=1)]
    assert average_tensors(folders)["w"].item() == 1.0  # float32 sums would lose the 1.0
    assert average_tensors(folders)["w"].dtype == torch.float32
    assert select_checkpoints(tmp_path, last=2) == folders[2:]
    assert select_checkpoints(tmp_path, steps=[4, 1, 4]) == [folders[0], folders[3]]
    with pytest.raises(CheckpointError, match="has 4 checkpoints"):
        select_checkpoints(tmp_path, last=5)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9; it has steps 1, 2, 3, 4"):
        select_checkpoints(tmp_path, steps=[1, 9])
    for wrong in ({"last": 0}, {"last": 1, "steps": [1]}, {"last": -1}):
        with pytest.raises(ConfigError):
            select_checkpoints(tmp_path, **wrong)


def test_unlike_checkpoints_have_no_average(tmp_path: Path) -> None:
    def folder(name: str, **tensors: torch.Tensor) -> Path:
        return save_checkpoint(tmp_path / name, 1, {"model": tensors}, {})

    first = folder("a", w=torch.zeros(2), n=torch.tensor(5))
    assert average_tensors([first, folder("b", w=torch.ones(2), n=torch.tensor(5))])["n"] == 5
    with pytest.raises(CheckpointError, match="integers"):
        average_tensors([first, folder("c", w=torch.zeros(2), n=torch.tensor(6))])
    with pytest.raises(CheckpointError, match=r"only one of them has 'n'"):
        average_tensors([first, folder("d", w=torch.zeros(2))])
    with pytest.raises(CheckpointError, match=r"\(3,\)"):
        average_tensors([first, folder("e", w=torch.zeros(3), n=torch.tensor(5))])
    with pytest.raises(CheckpointError, match="bfloat16"):
        average_tensors([first, folder("f", w=torch.zeros(2).bfloat16(), n=torch.tensor(5))])
    with pytest.raises(CheckpointError):
        average_tensors([first], stem="ema")
    with pytest.raises(ConfigError):
        average_tensors([])
