"""Pickled torch files give their tensors and nothing else."""

import argparse
import io
import pickle
import struct
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile.pickles import PICKLES, as_legacy, as_zip
from slices import sliced
from torch import Tensor, nn

from manyheads.errors import ModelFileError
from manyheads.extras.peers import legacy_pickle_child
from manyheads.extras.peers.legacy_pickle import read_saved
from manyheads.extras.peers.legacy_pickle_machine import RefusedError, checked_key

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(saved: Any, zipped: bool = True) -> Path:
        path = tmp_path / "saved.pt"
        torch.save(saved, path, _use_new_zipfile_serialization=zipped)
        return path

    return write


def read_tensors(path: Path) -> dict[str, Tensor]:
    return read_saved(path).tensors


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
        assert got[name].is_contiguous()


@FORMATS
def test_every_dtype_and_layout(save: Save, zipped: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    saved = OrderedDict(
        transposed=base.t(),
        window=base[1:3, 2:5],
        repeated=torch.ones(1, 3).expand(4, 3),
        empty=torch.zeros(0, 3),
        scalar=torch.tensor(2.5),
        parameter=nn.Parameter(torch.randn(2)),
        boolean=torch.tensor([True, False, True]),
    )
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8):
        saved[str(dtype)] = torch.arange(5).to(dtype)[::2]
    saved["bytes"] = torch.arange(7, dtype=torch.uint8)
    saved["tied"] = saved["parameter"]
    if zipped:
        saved["wide"] = torch.arange(3, dtype=torch.int64).to(torch.uint16)
    got = read_tensors(save(saved, zipped))
    assert_same(got, saved)
    assert got["tied"].data_ptr() != got["parameter"].data_ptr()


@FORMATS
def test_whole_modules(save: Save, zipped: bool) -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module.register_buffer("kept", torch.arange(3))
    module.register_buffer("left_out", torch.arange(3), persistent=False)
    assert_same(read_tensors(save(module, zipped)), module.state_dict())
    assert_same(
        read_tensors(save({"model": nn.Sequential(module), "step": 3}, zipped)), nn.Sequential(module).state_dict()
    )


@FORMATS
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_modules_of_the_official_transformer_xl(save: Save, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved whole, by the names of classes that nobody has installed."""
    module = types.ModuleType("mem_transformer")

    class MemTransformerLM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 2), nn.LayerNorm(2)])
            self.r_w_bias = nn.Parameter(torch.randn(2, 2))
            self.settings = argparse.Namespace(n_layer=2)

    MemTransformerLM.__module__, MemTransformerLM.__qualname__ = "mem_transformer", "MemTransformerLM"
    module.MemTransformerLM = MemTransformerLM
    monkeypatch.setitem(sys.modules, "mem_transformer", module)
    saved = MemTransformerLM()
    assert_same(read_tensors(save(saved, zipped)), saved.state_dict())


@FORMATS
def test_training_checkpoints(save: Save, zipped: bool) -> None:
    weights = {"a.weight": torch.randn(2, 2), "b": torch.randn(3)}
    saved = {
        "epoch": 3,
        "best": np.float64(1.5),
        "args": argparse.Namespace(lr=0.1),
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "state_dict": OrderedDict(weights),
    }
    assert_same(read_tensors(save(saved, zipped)), weights)


def test_nested_contents_get_dotted_names(save: Save) -> None:
    saved = {"encoder": {"layers": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]}, 7: torch.ones(1), "note": "text"}
    assert list(read_tensors(save(saved))) == ["encoder.layers.0.w", "encoder.layers.1.w", "7"]
    with pytest.raises(ModelFileError, match=r"two tensors named 'a\.b'"):
        read_tensors(save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}))


@pytest.mark.parametrize(
    ("name", "pack"),
    [(name, bytes) for name in PICKLES] + [("global-os-system", as_zip), ("dotted-name", as_zip), ("eval", as_legacy)],
)
def test_hostile_pickles_are_refused(name: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "model.bin"
    path.write_bytes(pack(PICKLES[name](canary)))
    with pytest.raises(ModelFileError, match=r"(asks for the global|uses the opcode|refers to|calls|state of)"):
        read_tensors(path)
    assert not canary.exists()


def test_the_canary_sings_under_pythons_own_unpickler(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in ("global-os-system", "opcode-INST", "opcode-EXT1", "dotted-name", "opcode-NEWOBJ-map", "getattr-chain"):
        program = PICKLES[name](canary)
        pickle.loads(program)  # noqa: S301 - that is the point
        assert canary.read_text().count("run") == 1, name
        canary.unlink()


def tensor_pickle(offset: int, size: tuple[int, ...], stride: tuple[int, ...], numel: int) -> bytes:
    """A zip whose pickle describes one tensor freely, over a storage of 4 floats."""
    honest = io.BytesIO()
    torch.save({"weight": torch.arange(4.0)}, honest)

    class Free:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, OrderedDict())

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(value, Storage) else None

    program = io.BytesIO()
    Pickler(program, 2).dump({"weight": Free()})
    result = io.BytesIO()
    with zipfile.ZipFile(honest) as source, zipfile.ZipFile(result, "w") as target:
        for name in source.namelist():
            target.writestr(name, program.getvalue() if name.endswith("data.pkl") else source.read(name))
    return result.getvalue()


@pytest.mark.parametrize(
    ("offset", "size", "stride", "numel", "message"),
    [
        (0, (5,), (1,), 4, "reaches item 4"),
        (3, (2,), (1,), 4, "reaches item 4"),
        (0, (2,), (1 << 61,), 4, "reaches item"),
        (-1, (2,), (1,), 4, "invalid offset, size or stride"),
        (0, (2,), (-1,), 4, "whole numbers"),
        (0, (2, 2), (1,), 4, "invalid offset, size or stride"),
        (0, (4,), (1,), 1 << 40, "missing, or not 4,398"),
        (0, (1 << 40,), (0,), 4, "stand for tensors"),
    ],
)
def test_tensors_stay_within_their_storage(tmp_path, offset, size, stride, numel, message):
    path = tmp_path / "model.pt"
    path.write_bytes(tensor_pickle(offset, size, stride, numel))
    with pytest.raises(ModelFileError, match=message):
        read_tensors(path)


def test_damage_and_other_files(tmp_path: Path, save: Save) -> None:
    path = save({"weight": torch.arange(1000.0)})
    whole = path.read_bytes()
    for zipped in (True, False):
        whole = save({"weight": torch.arange(1000.0)}, zipped).read_bytes()
        for cut in (1, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(ModelFileError):
                read_tensors(path)
    squeezed = tmp_path / "squeezed.pt"
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", bytes(50_000_000))
    with pytest.raises(ModelFileError, match="compressed"):
        read_tensors(squeezed)
    for content, message in (
        (b"", "1 to"),
        (b"hello", "torch.save did not write it"),
        (pickle.dumps({"a": 1}, 2), "not one that"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            read_tensors(path)
    for missing in (tmp_path, tmp_path / "absent.pt"):
        with pytest.raises(ModelFileError):
            read_tensors(missing)
    with pytest.raises(ModelFileError, match="holds no tensor"):
        read_tensors(save({"a": 1}))


def test_bombs_end_within_their_limits(tmp_path: Path) -> None:
    """Doublings by reference, deep nests, endless keys: each is refused, none takes long or much memory."""
    doubling = b"\x80\x02]" + b"q\x00" + b"".join(b"](h\x00h\x00eq\x00" for _ in range(60)) + b"."
    deep = b"\x80\x02]" + b"\x85" * 200_000 + b"."
    deep_key = b"\x80\x02}" + b"N" + b"\x85" * 200_000 + b"Ns."
    digits = b"\x80\x02I" + b"9" * 100_000 + b"\n."
    huge_text = b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"."
    path = tmp_path / "model.pt"
    for program in (doubling, deep, deep_key, digits, huge_text):
        path.write_bytes(as_zip(program))
        with pytest.raises(ModelFileError, match="refused"):
            read_tensors(path)


def test_keys_are_flat() -> None:
    """A tuple that holds another twice, and so on, would take for ever to hash."""
    assert checked_key(("a", 1)) == ("a", 1)
    for key in ((("a",),), [1], {}):
        with pytest.raises(RefusedError, match="a dict has a key"):
            checked_key(key)


ATTEMPTS = {
    "run a program": "import subprocess\nforbid(folder)\nsubprocess.run(['true'])",
    "run a shell": "forbid(folder)\nos.system('true')",
    "replace itself": "forbid(folder)\nos.execv('/bin/true', ['true'])",
    "fork": "forbid(folder)\nos.fork()",
    "connect": "import socket\nforbid(folder)\nsocket.socket()",
    "import": "forbid(folder)\nimport wave",
    "write elsewhere": "forbid(folder)\nopen(folder + '/other', 'wb')",
    "read anything": "forbid(folder)\nopen('/etc/hostname')",
    "remove": "forbid(folder)\nos.remove(folder + '/kept')",
    "compile": "forbid(folder)\neval('1 + 1')",
    "unpickle": "import pickle\nforbid(folder)\npickle.loads(b'cposix\\nsystem\\n.')",
    "call C": "import ctypes\nforbid(folder)\nctypes.CDLL(None)",
}


@pytest.mark.parametrize("what", sliced(list(ATTEMPTS), 3, "attempts of the reader of pickles"))
def test_the_child_cannot(what: str, tmp_path: Path) -> None:
    """Should the allow-list fail, the process still ends at once."""
    (tmp_path / "kept").touch()
    code = (
        f"import os, sys\nfrom manyheads.extras.peers.legacy_pickle_child import forbid\nfolder = {str(tmp_path)!r}\n"
    )
    sources = str(Path(legacy_pickle_child.__file__).parents[3])
    result = subprocess.run(
        [sys.executable, "-S", "-c", code + ATTEMPTS[what] + "\nsys.exit(0)"],
        env={"PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == legacy_pickle_child.VIOLATION, result.stderr
    assert "made its reader try" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
