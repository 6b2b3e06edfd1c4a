"""Folders of models, runs and data with something hostile in them, sealed with manifests that fit."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hostile.base import Base, Call, edit_json, reseal, reseal_data
from hostile.pickles import system

__all__ = ["FOLDERS"]

Make = Callable[[Base, Path, Path], list[Call]]


def _model(change: Callable[[Path], object], *, seal: bool = True, info: bool = False) -> Make:
    """A model's folder with a change, whose manifest agrees with it."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        model = base.copy_model(folder)
        change(model)
        if seal:
            reseal(model)
        return base.uses_of_model(model) + ([["info", str(model)]] if info else [])

    return make


def _text_model(change: Callable[[Path], object]) -> Make:
    """Of use only to who translates text."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        model = base.copy_model(folder)
        change(model)
        uses = base.uses_of_model(reseal(model))
        return [use for use in uses if use[:2] != ["python", "load"]]

    return make


def _config(**changes: Any) -> Make:
    return _model(lambda model: edit_json(model / "config.json", **changes))


def _config_text(text: str) -> Make:
    return _model(lambda model: (model / "config.json").write_text(text, encoding="utf-8"), info=True)


def _generation(**changes: Any) -> Make:
    return _text_model(lambda model: edit_json(model / "generation_config.json", **changes))


def _searched(made: Make) -> Make:
    """Of use only to who asks for translations."""
    return lambda base, folder, canary: [call for call in made(base, folder, canary) if call[0] != "python"]


def _weights(content: bytes, size: int = 0, *, info: bool = True) -> Make:
    """A safetensors file; with `size`, a sparse one."""

    def change(model: Path) -> None:
        path = model / "model.safetensors"
        path.write_bytes(content)
        if size:
            os.truncate(path, size)

    return _model(change, info=info)


def _header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def _honest_header(model: Path) -> tuple[dict[str, Any], bytes]:
    raw = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _retyped(model: Path) -> None:
    """Weights that are whole numbers of the same width."""
    header, data = _honest_header(model)
    for name, entry in header.items():
        if name != "__metadata__":
            entry["dtype"] = "I32"
    (model / "model.safetensors").write_bytes(_header(header, data))


def _renamed(model: Path) -> None:
    """A tensor whose name paints the terminal."""
    header, data = _honest_header(model)
    name = next(name for name in header if name != "__metadata__")
    header["\x1b[2J\x1b]0;owned\x07" + "\n" * 30 + name] = header.pop(name)
    (model / "model.safetensors").write_bytes(_header(header, data))


def _replaced_by(name: str, put: Callable[[Path], object]) -> Make:
    """A file of the folder is something that is no file; the manifest says that it is empty, as its size does."""

    def change(model: Path) -> None:
        (model / name).unlink()
        reseal(model, **{name: {"sha256": hashlib.sha256().hexdigest(), "size": 0}})
        put(model / name)

    return _model(change, seal=False)


def _manifest(change: Callable[[dict[str, Any]], None]) -> Make:
    def edit(model: Path) -> None:
        manifest = json.loads((model / "manifest.json").read_text(encoding="utf-8"))
        change(manifest)
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        (model / "manifest.json").write_text(text, encoding="utf-8")

    return _model(edit, seal=False)


def _named(name: str) -> Make:
    """A manifest that names a file elsewhere."""
    return _manifest(lambda manifest: manifest["files"].update({name: {"sha256": "0" * 64, "size": 1}}))


def _tokenizer(change: Callable[[dict[str, Any]], object]) -> Make:
    def edit(model: Path) -> None:
        path = model / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")

    return _text_model(edit)


def _regex_bomb(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a*)*b"},
        "behavior": "Isolated",
        "invert": False,
    }


def _huge_vocabulary(content: dict[str, Any]) -> None:
    content["model"]["vocab"].update({f"x{index}": index + 100 for index in range(1_100_000)})


def _bigger_vocabulary(content: dict[str, Any]) -> None:
    """Whole, but of other size than the model's embedding."""
    size = len(content["model"]["vocab"])
    content["model"]["vocab"].update({f"x{index}": size + index for index in range(7)})


def _run(change: Callable[[Path], object], *, seal: bool = True) -> Make:
    """A run whose newest checkpoint was changed."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        run = base.copy_run(folder)
        newest = run / "checkpoints" / "step-00000004"
        change(newest)
        if seal:
            reseal(newest)
        return base.uses_of_run(run)

    return make


def _resumed(change: Callable[[Path], object]) -> Make:
    """What only a resumed run reads."""
    made = _run(change)
    return lambda base, folder, canary: made(base, folder, canary)[:1]


def _scalars(text: str) -> Make:
    return _resumed(lambda step: (step / "scalars.json").write_text(text, encoding="utf-8"))


def _counters(**changes: Any) -> Make:
    def change(step: Path) -> None:
        path = step / "scalars.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        record["scalars"]["counters"].update(changes)
        path.write_text(json.dumps(record), encoding="utf-8")

    return _resumed(change)


def _optimiser_of_other_shapes(step: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = step / "optimiser.safetensors"
    save_file({name: torch.zeros(3, 3) for name in load_file(path)}, path)


def _optimiser_of_text(step: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = step / "optimiser.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)


def _sent_run(name: str, put: Callable[[Path, Base], object], *, info: bool = False) -> Make:
    """A run's folder with something else under one of its names; training goes on there, or `info` looks at it."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        run = base.copy_run(folder)
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        put(path, base)
        train = ["train", "--config", str(base.config), "--data.path", str(base.data), "--run-dir", str(run)]
        return [["info", str(run)] if info else [*train, "--training.max-steps", "6"]]

    return make


def _distributed_checkpoint(base: Base, folder: Path, canary: Path) -> list[Call]:
    """torch.distributed.checkpoint's own layout, whose `.metadata` its reader unpickles."""
    run = base.copy_run(folder)
    newest = run / "checkpoints" / "step-00000004"
    shutil.rmtree(newest)
    newest.mkdir()
    (newest / ".metadata").write_bytes(system(canary))
    (newest / "__0_0.distcp").write_bytes(system(canary))
    alone = folder / "alone"
    shutil.copytree(newest, alone)
    shutil.copy(base.model / "config.json", alone)
    return [*base.uses_of_run(run), *base.uses_of_model(alone), ["info", str(newest)]]


def _scripted_repository(base: Base, folder: Path, canary: Path) -> list[Call]:
    """A hub repository that wants its own code run: auto_map, scripts, pickled weights."""
    model = folder / "model"
    model.mkdir()
    config = {"architectures": ["Evil"], "auto_map": {"AutoModel": "modeling_evil.Evil"}, "model_type": "evil"}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = f"open({str(canary)!r}, 'w').write('run')"
    for name in ("modeling_evil.py", "__init__.py", "setup.py", "conftest.py"):
        (model / name).write_text(code, encoding="utf-8")
    (model / "pytorch_model.bin").write_bytes(system(canary))
    return [*base.uses_of_model(model), ["info", str(model)]]


def _index_outside(base: Base, folder: Path, canary: Path) -> list[Call]:
    model = base.copy_model(folder)
    for name in ("model.safetensors", "manifest.json"):
        (model / name).unlink()
    index = {"weight_map": {"head.weight": "../../../../etc/passwd", "b": "/etc/shadow"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return [*base.uses_of_model(model), ["info", str(model)]]


def _data(change: Callable[[Path], object], *, seal: bool = True) -> Make:
    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        data = base.copy_data(folder)
        change(data)
        if seal:
            reseal_data(data)
        return base.uses_of_data(data)

    return make


def _object_array(data: Path) -> None:
    """numpy's pickled arrays, where raw numbers are expected."""
    for path in data.glob("*/source.ids.bin"):
        with path.open("wb") as file:
            np.save(file, np.array([{"a": 1}, print], dtype=object), allow_pickle=True)


def _offsets(make: Callable[[np.ndarray], np.ndarray], **manifest: Any) -> Make:
    def change(data: Path) -> None:
        path = data / "valid" / "source.offsets.bin"
        path.write_bytes(make(np.fromfile(path, "<i8")).astype("<i8").tobytes())
        if manifest:
            edit_json(data / "valid" / "manifest.json", **manifest)

    return _data(change)


def _wrapping(data: Path) -> None:
    """An offset of 2^62: times 4 bytes it wraps around to the size that the file has."""
    for side in ("source", "target"):
        ids = data / "valid" / f"{side}.ids.bin"
        ids.write_bytes(np.fromfile(ids, "<u2").astype("<u4").tobytes())
    path = data / "valid" / "source.offsets.bin"
    offsets = np.fromfile(path, "<i8")
    offsets[-1] += 1 << 62
    path.write_bytes(offsets.tobytes())
    edit_json(data / "valid" / "manifest.json", dtype="uint32")


def _ids_beyond(data: Path) -> None:
    path = data / "valid" / "source.ids.bin"
    ids = np.fromfile(path, "<u2")
    ids[:] = 60_000
    path.write_bytes(ids.tobytes())


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


_DOUBLED = b'{"a":%b,"a":%b}' % ((json.dumps(_entry(0, 4)).encode(),) * 2)
FOLDERS: list[tuple[str, str, Make]] = [
    ("checkpoint", "torch.distributed .metadata", _distributed_checkpoint),
    ("repository", "auto_map, scripts and a pickle", _scripted_repository),
    ("repository", "an index that leads outside", _index_outside),
    ("config.json", "10^12 layers", _config(num_encoder_layers=10**12)),
    ("config.json", "d_model 10^9", _config(d_model=10**9)),
    ("config.json", "d_ff 10^12", _config(d_ff=10**12)),
    ("config.json", "10^15 learned positions", _config(positions="learned", max_len=10**15)),
    ("config.json", "additive attention of 10^11", _config(attention={"kind": "additive", "hidden_dim": 10**11})),
    ("config.json", "negative width", _config(d_model=-16)),
    ("config.json", "NaN", _config(dropout=float("nan"))),
    ("config.json", "NaN eps", _config(norm_eps=float("nan"))),
    ("config.json", "a number of 5000 digits", _config_text('{"format_version": 1, "d_model": ' + "9" * 5000 + "}")),
    ("config.json", "nested 10,000 deep", _config_text(_nested(10_000))),
    ("config.json", "nested 1,000,000 deep", _config_text(_nested(1_000_000))),
    ("config.json", "a class path", _config(architecture="os.system")),
    ("config.json", "a class path as attention", _config(attention={"kind": "subprocess.Popen", "args": ["true"]})),
    ("config.json", "an unknown key in red", _config(**{"\x1b[31m\x07" + "k" * 5000: 1})),
    ("config.json", "5000 unknown keys", _config(**{f"k{index}": index for index in range(5000)})),
    ("config.json", "a FIFO", _replaced_by("config.json", os.mkfifo)),
    ("config.json", "a link to /dev/zero", _replaced_by("config.json", lambda path: path.symlink_to("/dev/zero"))),
    ("model.safetensors", "a FIFO", _replaced_by("model.safetensors", os.mkfifo)),
    (
        "model.safetensors",
        "a link to itself",
        _replaced_by("model.safetensors", lambda path: path.symlink_to(path.name)),
    ),
    ("model.safetensors", "a folder", _replaced_by("model.safetensors", Path.mkdir)),
    ("model.safetensors", "header of 2^60", _weights(struct.pack("<Q", 1 << 60) + b"{}")),
    ("model.safetensors", "header of 2^64 - 1", _weights(struct.pack("<Q", (1 << 64) - 1) + b"{}")),
    ("model.safetensors", "header of 101 MB", _weights(struct.pack("<Q", 101 << 20), 102 << 20)),
    ("model.safetensors", "overlap", _weights(_header({"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12)))),
    ("model.safetensors", "a hole", _weights(_header({"a": _entry(0, 4), "b": _entry(8, 12)}, bytes(12)))),
    ("model.safetensors", "beyond the end", _weights(_header({"a": _entry(0, 1 << 40)}, bytes(12)))),
    ("model.safetensors", "negative offsets", _weights(_header({"a": _entry(-8, 4)}, bytes(12)))),
    ("model.safetensors", "unknown dtype", _weights(_header({"a": _entry(0, 12, "OBJECT")}, bytes(12)))),
    ("model.safetensors", "shape of 2^64", _weights(_header({"a": _entry(0, 4, shape=[1 << 32, 1 << 32])}, bytes(4)))),
    ("model.safetensors", "a name twice", _weights(_header(_DOUBLED, bytes(4)), info=False)),
    ("model.safetensors", "nested header", _weights(_header(_nested(100_000).encode()))),
    ("model.safetensors", "whole numbers", _model(_retyped)),
    ("model.safetensors", "a name that paints the terminal", _model(_renamed)),
    ("manifest", "../ names", _named("../../../etc/passwd")),
    ("manifest", "absolute names", _named("/etc/passwd")),
    ("manifest", "a NUL in a name", _named("config.json\0.txt")),
    (
        "manifest",
        "entries that are no objects",
        _manifest(lambda manifest: manifest["files"].update({"config.json": 1})),
    ),
    ("manifest", "of 20 MB", _manifest(lambda manifest: manifest["files"].update({"x" * (20 << 20): {}}))),
    ("tokenizer.json", "a regex bomb", _tokenizer(_regex_bomb)),
    ("tokenizer.json", "1,100,000 pieces", _tokenizer(_huge_vocabulary)),
    ("tokenizer.json", "of another size than the model", _tokenizer(_bigger_vocabulary)),
    ("tokenizer.json", "a pickle", _text_model(lambda model: (model / "tokenizer.json").write_bytes(b"\x80\x04N."))),
    ("tokenizer.json", "70 MB of zeros", _text_model(lambda model: os.truncate(model / "tokenizer.json", 70 << 20))),
    (
        "tokenizer.json",
        "a link to /dev/zero",
        _replaced_by("tokenizer.json", lambda path: path.symlink_to("/dev/zero")),
    ),
    ("generation_config.json", "10^9 beams", _generation(num_beams=10**9, max_tokens=10**18)),
    ("generation_config.json", "10^12 new tokens at least", _generation(min_new_tokens=10**12)),
    ("generation_config.json", "NaN temperature", _generation(temperature=float("nan"))),
    ("generation_config.json", "infinite length", _generation(max_len_ratio=float("inf"))),
    ("generation_config.json", "banned ids out of range", _searched(_generation(banned_ids=[10**15]))),
    ("generation_config.json", "a prefix of 10^6 ids", _generation(forced_prefix_ids=[5] * 10**6)),
    (
        "generation_config.json",
        "nested",
        _text_model(lambda m: (m / "generation_config.json").write_text(_nested(10**5))),
    ),
    ("checkpoint", "scalars of NaN", _scalars('{"format_version": 1, "step": NaN, "scalars": {}}')),
    ("checkpoint", "scalars nested", _scalars(_nested(100_000))),
    ("checkpoint", "step 10^30", _counters(step=10**30)),
    ("checkpoint", "a negative epoch", _counters(epoch=-5)),
    ("checkpoint", "NaN elapsed", _counters(elapsed_seconds=float("nan"))),
    ("checkpoint", "a row beyond the plan", _counters(row=10**15)),
    ("checkpoint", "a fraction as epoch", _counters(epoch=0.5)),
    ("checkpoint", "a link", _run(lambda step: _link_weights(step))),
    ("checkpoint", "moments of other shapes", _resumed(_optimiser_of_other_shapes)),
    ("checkpoint", "moments of whole numbers", _resumed(_optimiser_of_text)),
    ("run", "a lock that is a link", _sent_run(".lock", lambda path, base: path.symlink_to(base.source))),
    ("run", "a lock that is a FIFO", _sent_run(".lock", lambda path, base: os.mkfifo(path))),
    ("run", "a log that is a link", _sent_run("train.log", lambda path, base: path.symlink_to(base.source))),
    ("run", "metrics that are a link", _sent_run("metrics.jsonl", lambda path, base: path.symlink_to(base.source))),
    ("run", "metrics that are a FIFO", _sent_run("metrics.jsonl", lambda path, base: os.mkfifo(path), info=True)),
    (
        "run",
        "metrics without end",
        _sent_run("metrics.jsonl", lambda path, base: path.symlink_to("/dev/zero"), info=True),
    ),
    ("run", "checkpoints that are a link", _sent_run("checkpoints", lambda path, base: path.symlink_to(base.data))),
    (
        "run",
        "a newest checkpoint whose scalars are a FIFO",
        _sent_run("checkpoints/step-00000004/scalars.json", lambda path, base: os.mkfifo(path), info=True),
    ),
    ("data", ".npy object arrays", _data(_object_array)),
    ("data", "offsets beyond the file", _offsets(lambda offsets: offsets + np.arange(len(offsets)) * 1000)),
    ("data", "offsets that fall", _offsets(lambda offsets: np.concatenate([[0, 1 << 62], offsets[2:]]))),
    ("data", "offsets that wrap around", _data(_wrapping)),
    ("data", "10^15 pairs", _offsets(lambda offsets: offsets, num_pairs=10**15)),
    ("data", "ids outside the vocabulary", _data(_ids_beyond)),
    ("data", "dtype object", _offsets(lambda offsets: offsets, dtype="O")),
    (
        "data",
        "files elsewhere",
        _data(lambda data: edit_json(data / "manifest.json", files={"../../x": {}}), seal=False),
    ),
]


def _link_weights(step: Path) -> None:
    path = step / "model.safetensors"
    outside = step.parent.parent / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
