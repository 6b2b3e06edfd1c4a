"""The contents of a model, a run or prepared data, as plain records that `info` prints or writes as JSON."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import CheckpointError, DataError, ModelFileError
from manyheads.files.safe_open import check_regular
from manyheads.files.verify import MANIFEST, read_manifest, read_object

if TYPE_CHECKING:
    from manyheads.text.sides import TranslationTokenizer
    from manyheads.text.vocabulary import Vocabulary

_LAYER = re.compile(r"\.layers\.\d+")


def describe_folder(path: Path, *, verify: bool = False, is_brief: bool = False) -> dict[str, Any]:
    """The record of a run's folder, a model's, or prepared data.

    Args:
        verify: compare every file with its SHA-256; `damaged` then lists what is wrong.
        is_brief: leave out the model's tokenizer, which takes most of the time.

    Raises: ModelFileError: the folder is none of these, or cannot be read.
    """
    if (path / "config.yaml").is_file():
        return _run(path, verify, is_brief)
    if (path / "config.json").is_file():
        return _model(path, verify, is_brief)
    if (path / "manifest.json").is_file() and (path / "train").is_dir():
        return _data(path, verify)
    if not path.exists():
        from manyheads.catalogue import PRESETS

        shown = f"; to see a preset's settings: manyheads train --preset {path} --print-config" * (str(path) in PRESETS)
        raise ModelFileError(f"there is no folder {path}{shown}.")
    raise ModelFileError(
        f"{path} is not a run folder (it has no config.yaml), a model folder (no config.json) or prepared data."
    )


def _model(path: Path, verify: bool, is_brief: bool) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    from manyheads.text.of_folder import tokenizer_of_folder

    config = read_object(path / "config.json")
    files = read_manifest(path) if (path / MANIFEST).is_file() else {}
    parts: Counter[str] = Counter()
    try:
        check_regular(path / "model.safetensors")
        with safe_open(path / "model.safetensors", framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118  (it is no mapping)
                parts[_part(name)] += math.prod(weights.get_slice(name).get_shape())
    except (OSError, SafetensorError, MemoryError) as error:  # MemoryError: the file is too large to be mapped
        raise ModelFileError(f"{path / 'model.safetensors'} cannot be read: {error}.") from error
    record: dict[str, Any] = {
        "kind": "model",
        "path": str(path),
        "architecture": config.pop("architecture", None),
        "languages": _directions(config.pop("languages", None)),
        "parameters": parts.total(),
        "parameters_by_part": dict(sorted(parts.items())),
        "weights_bytes": (path / "model.safetensors").stat().st_size,
        "weights_sha256": files.get("model.safetensors", {}).get("sha256"),
        "config": config,
    }
    if not is_brief and (tokenizer := tokenizer_of_folder(path)) is not None:
        record["tokenizer"] = _known(tokenizer)
    if (path / "generation_config.json").is_file():
        record["decoding"] = read_object(path / "generation_config.json")
    if verify:
        record["damaged"] = _damages([path])
    return record


def _part(name: str) -> str:
    """`encoder.layers.0.self_attn.q_proj.weight` -> `encoder.self_attn`: layers of a stack are taken together."""
    names = _LAYER.sub("", name).split(".")
    return f"{names[0]}.norms" if "norm" in names else ".".join(names[:-1][:2]) or name


def _run(path: Path, verify: bool, is_brief: bool) -> dict[str, Any]:
    from manyheads.checkpoint.format import SCALARS, read_pointer, step_of
    from manyheads.config.files import load_yaml
    from manyheads.training.record.log import each_metrics

    checkpoints, newest = _checkpoints(path / "checkpoints")
    last_step, best, last_validation = 0, None, None
    for line, _ in each_metrics(path / "metrics.jsonl") if os.path.lexists(path / "metrics.jsonl") else ():
        last_step = max(last_step, line["step"]) if type(line.get("step")) is int else last_step
        if "valid_nll" in line:
            last_validation = line
            best = line if line.get("best") else best
    pointers = {name: read_pointer(path / "checkpoints", name) for name in ("latest", "best")}
    counters: dict[str, Any] = {}
    if checkpoints:
        scalars = newest.get("scalars")
        counters = (scalars.get("counters") if isinstance(scalars, dict) else None) or {}
        if not isinstance(counters, dict) or not isinstance(counters.get("elapsed_seconds", 0), int | float):
            raise ModelFileError(f"{checkpoints[-1] / SCALARS} does not hold the counters of a run; it is damaged.")
    record: dict[str, Any] = {
        "kind": "run",
        "path": str(path),
        "step": counters.get("step", last_step),
        "epoch": counters.get("epoch"),
        "target_tokens": counters.get("tokens"),
        "minutes": round(counters["elapsed_seconds"] / 60, 2) if "elapsed_seconds" in counters else None,
        "best": best,
        "last_validation": last_validation,
        "checkpoints": [step_of(checkpoint) for checkpoint in checkpoints],
        **{f"{name}_checkpoint": target.name if target else None for name, target in pointers.items()},
        "pictures": sorted(str(picture) for picture in (path / "plots").glob("*.png")),
        "config": load_yaml(path / "config.yaml").values,
    }
    if (path / "environment.json").is_file():
        record["environment"] = read_object(path / "environment.json")
    if (path / "model" / "config.json").is_file():
        record["model"] = _model(path / "model", verify, is_brief)
    if verify:
        record["damaged"] = _damages(checkpoints) + record.get("model", {}).pop("damaged", [])
    return record


def _checkpoints(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """The checkpoints, oldest first, and the scalars of the newest, which a run that goes on may delete meanwhile."""
    from manyheads.checkpoint.format import SCALARS, list_checkpoints

    while checkpoints := list_checkpoints(folder):
        try:
            return checkpoints, read_object(checkpoints[-1] / SCALARS)
        except FileNotFoundError:
            if checkpoints[-1].is_dir():
                raise
    return [], {}


def _data(path: Path, verify: bool) -> dict[str, Any]:
    from manyheads.catalogue import TASKS, load
    from manyheads.data.language.prepared import TextData
    from manyheads.data.prepared_folder import prepared_task
    from manyheads.text.of_folder import tokenizer_of_folder

    recorded = prepared_task(path)
    known = (task.data for task in TASKS.values() if task.recorded_as == recorded)
    kind: Any = load(next(known, TASKS["translation"].data))
    damaged: list[str] = []
    try:
        data = kind.open(path, verify=verify)
    except DataError as error:
        if not verify:
            raise
        damaged = [str(error)]
        data = kind.open(path, verify=False)
    tokenizer = data.vocabulary if isinstance(data, TextData) else tokenizer_of_folder(path)
    record: dict[str, Any] = {
        "kind": "prepared data",
        "path": str(path),
        "digest": data.digest,
        "languages": _directions(data.manifest.get("languages")),
        "tokenizer": None if tokenizer is None else _known(tokenizer),
        "counts": data.manifest.get("counts", {}),
    }
    if "label_counts" in data.manifest:
        record["labels"] = {split: _counted(counts) for split, counts in data.manifest["label_counts"].items()}
    record |= {key: data.manifest[key] for key in ("sources", "settings") if key in data.manifest}
    return record | ({"damaged": damaged} if verify else {})


def _counted(counts: dict[str, int]) -> list[str]:
    """`en 1,000`, for each label."""
    return [f"{label} {count:,}" for label, count in counts.items()]


def _directions(languages: Any) -> list[str] | None:
    """`en > de` for each pair; None, which is not shown, without any."""
    return [" > ".join(map(str, pair)) for pair in languages if isinstance(pair, list)] if languages else None


def _known(tokenizer: TranslationTokenizer | Vocabulary) -> dict[str, Any]:
    return {"kind": tokenizer.kind, **tokenizer.describe(), "sha256": tokenizer.digest}


def _damages(folders: list[Path]) -> list[str]:
    from manyheads.files.verify import verify_folder

    found = []
    for folder in folders:
        try:
            verify_folder(folder, strict=False)
        except CheckpointError as error:
            if folder.is_dir():  # else a run that goes on has deleted it
                found.append(str(error))
    return found
