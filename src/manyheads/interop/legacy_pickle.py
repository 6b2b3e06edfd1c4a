"""Tensors out of pickled torch files, `.pt`, `.bin`, `.ckpt`, without running anything that is in them.

A child process without site-packages interprets the pickle by an allow-list (`legacy_pickle_child`), under an audit
hook and limits of memory and time. It hands back bytes and an index of tensors, which are checked again here. Python's
own pickle takes no part.
"""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.errors import ModelFileError
from manyheads.interop import legacy_pickle_child as child

__all__ = ["Saved", "read_saved", "read_tensors"]

_SOURCES = Path(__file__).resolve().parents[2]
_CHILD = """
import sys
sys.path.append(sys.argv[1])
from manyheads.interop.legacy_pickle_child import main
main(sys.argv[2])
"""
_MOST_BYTES = 64 << 30
_MOST_INDEX_BYTES = 256 << 20
_DTYPES = {
    **{"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16},
    **{"int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8},
    **{"uint64": torch.uint64, "uint32": torch.uint32, "uint16": torch.uint16, "bool": torch.bool},
}


@dataclass(frozen=True)
class Saved:
    """What a file of torch.save holds, as far as it concerns us.

    tensors: by name. settings: of a module that was saved whole, and of the modules in it: numbers, truth values and
        flat lists, by dotted name (`layers.0.dec_attn.n_head`); empty otherwise.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, Any]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors alone; see `read_saved`."""
    return read_saved(path).tensors


def read_saved(path: Path) -> Saved:
    """The tensors of a file that torch.save wrote, by name, in CPU memory, contiguous and each with memory of its own.

    What was saved may be a state dict, one under the key `state_dict`, `model_state_dict` or `model` (then only that
    is read), a whole module of a known class (its parameters and saved buffers), or nested dicts and lists, whose keys
    are joined by dots. The formats of torch since 0.1.10 are read, both the zip and the older one.

    Args: path: the file.

    Raises: ModelFileError: it is missing, damaged, absurdly large, holds no tensor, or asks for anything that a file of
        tensors does not need; nothing was run.
    """
    try:
        size = _regular_size(path)
        timeout_seconds = 90 + size // (10 << 20)
        with path.open("rb") as file, tempfile.TemporaryDirectory(prefix="manyheads-") as folder:
            command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _CHILD, str(_SOURCES), folder]
            result = subprocess.run(
                command, stdin=file, capture_output=True, cwd=folder, env=_environment(), timeout=timeout_seconds
            )
            if result.returncode != 0:
                raise _refusal(path, result)
            return _assemble(Path(folder), size)
    except subprocess.TimeoutExpired as error:
        raise ModelFileError(f"{path} is refused: reading it took more than {error.timeout:.0f} seconds.") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}.") from error


def _regular_size(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= _MOST_BYTES:
        raise ModelFileError(
            f"{path} is refused: it must be a file of 1 to {_MOST_BYTES:,} bytes, and has {status.st_size:,}."
        )
    return status.st_size


def _environment() -> dict[str, str]:
    """Nothing of ours, but what Windows needs to start a process."""
    return {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}


def _refusal(path: Path, result: subprocess.CompletedProcess[bytes]) -> ModelFileError:
    reason = " ".join(result.stderr.decode("ascii", "replace").split())[:500]
    if result.returncode not in (child.REFUSED, child.VIOLATION):
        reason = f"its reader ended with code {result.returncode}, within its limits of memory and time; {reason}"
    return ModelFileError(f"{path} is refused: {reason}. Nothing of it was run.")


def _assemble(folder: Path, size: int) -> Saved:
    """Build the tensors of an index over a file of bytes, both written by the child, and both believed only so far."""
    index_file = folder / child.INDEX
    if index_file.stat().st_size > _MOST_INDEX_BYTES:
        raise ValueError(f"its index has more than {_MOST_INDEX_BYTES:,} bytes")
    index: dict[str, Any] = json.loads(index_file.read_bytes())
    views, settings = index["tensors"], index["settings"]
    total = sum(math.prod(shape) * _DTYPES[dtype].itemsize for _, _, dtype, _, shape, _ in views)
    if total > 16 * size + (64 << 20):
        raise ValueError(f"its {size:,} bytes stand for tensors of {total:,} bytes")
    tensors: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    with safe_open(folder / child.BYTES, framework="pt") as reader:
        for name, key, dtype, offset, shape, stride in views:
            if key not in rows:
                rows[key] = reader.get_tensor(key).clone()  # a copy is aligned for every dtype
            tensors[name] = _look(rows[key], _DTYPES[dtype], offset, shape, stride)
    return Saved(tensors, dict(settings))


def _look(row: Tensor, dtype: torch.dtype, offset: int, shape: list[int], stride: list[int]) -> Tensor:
    row = row[: row.numel() // dtype.itemsize * dtype.itemsize]
    items = row != 0 if dtype is torch.bool else row.view(dtype)  # a bool's byte may be anything; it is not believed
    if math.prod(shape) == 0:
        return items.new_empty(shape)
    return items.as_strided(shape, stride, offset).clone(memory_format=torch.contiguous_format)
