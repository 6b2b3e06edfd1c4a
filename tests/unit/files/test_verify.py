"""Damage of every kind is refused, or healed by the previous checkpoint; none is silent."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from manyheads.checkpoint.format import find_latest, load_checkpoint, save_checkpoint
from manyheads.errors import CheckpointError
from manyheads.files import verify
from manyheads.files.verify import MANIFEST, verify_folder

FILES = ("model.safetensors", "optimiser.safetensors", "scalars.json", MANIFEST)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        tensors = {stem: {"w": torch.randn(700, generator=generator)} for stem in ("model", "optimiser")}
        save_checkpoint(tmp_path, step, tensors, {"loss": 0.1 * step})
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_zeroed_pages_and_cuts_are_refused(saved: Path, name: str) -> None:
    path = saved / "step-00000002" / name
    whole = path.read_bytes()
    rng = random.Random(name)
    for trial in range(250):
        data = bytearray(whole)
        if trial % 5 < 3:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif trial % 5 == 3:
            start = rng.randrange(len(data))
            data[start : start + 512] = bytes(len(data[start : start + 512]))
        else:
            del data[rng.randrange(len(data)) :]
        if data == whole:
            continue
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            load_checkpoint(path.parent)
    latest, warnings = find_latest(saved)
    assert latest == saved / "step-00000001"
    assert "step-00000002" in warnings[0]
    path.write_bytes(whole)
    verify_folder(path.parent)


def test_a_wrong_size_is_told_before_anything_is_summed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved / "step-00000002" / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    monkeypatch.setattr(verify, "file_sha256", lambda path: pytest.fail("the whole file was read"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes, its manifest says"):
        verify_folder(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(saved: Path, name: str) -> None:
    (saved / "step-00000002" / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        verify_folder(saved / "step-00000002")


def test_swapped_foreign_doubled_and_linked_files_are_refused(saved: Path) -> None:
    folder = saved / "step-00000002"
    model, optimiser = folder / "model.safetensors", folder / "optimiser.safetensors"
    spare = saved / "spare"
    model.rename(spare)
    optimiser.rename(model)
    spare.rename(optimiser)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        verify_folder(folder)
    shutil.copy(saved / "step-00000001" / "model.safetensors", model)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        verify_folder(folder)
    doubled = saved / "step-00000001" / "model2.safetensors"
    shutil.copy(saved / "step-00000001" / "model.safetensors", doubled)
    with pytest.raises(CheckpointError, match="model2"):
        verify_folder(doubled.parent)
    with pytest.raises(CheckpointError, match="model2"):
        verify_folder(doubled.parent, strict=False)
    doubled.rename(doubled.with_name("notes.txt"))
    verify_folder(doubled.parent, strict=False)
    (doubled.parent / "notes.txt").rename(doubled.parent / ".notes.safetensors")
    verify_folder(doubled.parent)
    assert set(load_checkpoint(doubled.parent).tensors) == {"model", "optimiser"}
    for name in ("scalars.json", "manifest.json"):
        linked = doubled.parent / name
        linked.rename(saved / name)
        linked.symlink_to(saved / name)
        with pytest.raises(CheckpointError, match=f"{name} is a symbolic link"):
            verify_folder(doubled.parent)
        verify_folder(doubled.parent, strict=False)
        linked.unlink()
        (saved / name).rename(linked)


def test_a_copy_under_another_steps_name_is_refused(saved: Path) -> None:
    shutil.copytree(saved / "step-00000001", saved / "step-00000003")
    with pytest.raises(CheckpointError, match="holds step 1"):
        load_checkpoint(saved / "step-00000003")
    shutil.copytree(saved / "step-00000001", saved / "mine")
    assert load_checkpoint(saved / "mine").step == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "format_version"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"format_version": 99, "files": {}}', "format version 99"),
        ('{"format_version": 1, "files": []}', "plain name"),
        ('{"format_version": 1, "files": {"../x": {"sha256": "", "size": 1}}}', "plain name"),
        ('{"format_version": 1, "files": {"/etc/passwd": {"sha256": "", "size": 1}}}', "plain name"),
        ('{"format_version": 1, "files": {"a": {"size": 1}}}', "plain name"),
    ],
)
def test_hostile_manifests_are_refused(saved: Path, text: str, message: str) -> None:
    (saved / "step-00000002" / MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        verify_folder(saved / "step-00000002")


def test_an_unnamed_file_does_not_escape_through_a_smaller_manifest(saved: Path) -> None:
    path = saved / "step-00000002" / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["files"]["optimiser.safetensors"]
    text = json.dumps(manifest, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"optimiser\.safetensors is not in its manifest"):
        verify_folder(path.parent)
    path.write_text(text + "\n\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="changed after it was written"):
        verify_folder(path.parent)


def test_no_folder_and_no_permission(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        verify_folder(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="incomplete"):
        verify_folder(tmp_path)


def test_verification_can_be_left_out_and_errors_stay_ours(saved: Path) -> None:
    folder = saved / "step-00000002"
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load_checkpoint(folder, verify=False).step == 2
    path.write_bytes(data[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder, verify=False)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError):
        load_checkpoint(folder, verify=False)
