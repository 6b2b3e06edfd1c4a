"""Reading of tensors from pickled torch files, `.pt`, `.bin`, `.ckpt`, and of the vocabulary in a `cache.pkl` of
Transformer-XL, without executing their contents.

A child process without site-packages interprets the pickle with an allow-list (`legacy_pickle_child`), under an audit
hook and limits of memory and time. It returns bytes and an index of tensors, which are checked again here. Python's
pickle module is not used.
"""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.errors import ModelFileError
from manyheads.extras.peers import legacy_pickle_child as child
from manyheads.files.safe_open import open_regular

T = TypeVar("T")
_SOURCES = Path(__file__).resolve().parents[3]
_CHILD = """
import sys
sys.path.append(sys.argv[1])
from manyheads.extras.peers.legacy_pickle_child import main
main(*sys.argv[2:])
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
    """The relevant contents of a file of torch.save.

    tensors: by name. settings: for a module that was saved whole, the numbers, booleans and flat lists among the
        attributes of it and its submodules, by dotted name (`layers.0.dec_attn.n_head`); empty otherwise.
    options: what a training script saved under `args`, `cfg` or `opt`, by dotted name (`args.encoder_layers`).
    """

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Corpus:
    """The relevant contents of a `cache.pkl`.

    dataset: its name. symbols: words by id. lower_case: whether text was folded. unk_idx: id of unknown words; None:
        there are none. valid, test: ids of the splits; None: missing.
    """

    dataset: str
    symbols: list[str]
    lower_case: bool
    unk_idx: int | None
    valid: list[int] | None
    test: list[int] | None


def read_saved(path: Path) -> Saved:
    """Return the tensors of a file that torch.save wrote, by name, contiguous in CPU memory, without shared memory.

    The file may contain a state dict, a state dict under the key `state_dict`, `model_state_dict`, `model_state` or
    `model` (then only that is read, and `generator` beside it), a whole module of a known class (its parameters and
    saved buffers), or nested dicts and lists, whose keys are joined by dots. The zip format and the older format of
    torch since 0.1.10 are supported.

    Args: path: the file.

    Raises: ModelFileError: it is missing, damaged, too large, contains no tensor, or contains anything that a file of
        tensors does not need; nothing was executed.
    """
    return _in_child(path, "tensors", _assemble)


def read_corpus(path: Path) -> Corpus:
    """Return the vocabulary and the held-out text of a `cache.pkl` that the original code of Transformer-XL wrote.

    Raises: ModelFileError: it is missing, damaged, too large, or contains anything else; nothing was executed.
    """
    return _in_child(path, "corpus", lambda folder, _: Corpus(**_read_index(folder)))


def _in_child(path: Path, kind: str, assemble: Callable[[Path, int], T]) -> T:
    """Run the child process, and return the result of `assemble` for its output folder and the file's size."""
    try:
        size = _regular_size(path)
        timeout_seconds = (90 if kind == "tensors" else 900) + size // (10 << 20)
        with open_regular(path) as file, tempfile.TemporaryDirectory(prefix="manyheads-") as folder:
            needed = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}  # by Windows
            command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _CHILD, str(_SOURCES), folder, kind]
            result = subprocess.run(
                command, stdin=file, capture_output=True, cwd=folder, env=needed, timeout=timeout_seconds
            )
            if result.returncode != 0:
                raise _refusal(path, result)
            return assemble(Path(folder), size)
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


def _refusal(path: Path, result: subprocess.CompletedProcess[bytes]) -> ModelFileError:
    reason = " ".join(result.stderr.decode("ascii", "replace").split())[:500]
    if result.returncode not in (child.REFUSED, child.VIOLATION):
        reason = f"its reader ended with code {result.returncode}, within its limits of memory and time; {reason}"
    return ModelFileError(f"{path} is refused: {reason}. Nothing of it was run.")


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / child.INDEX
    if file.stat().st_size > _MOST_INDEX_BYTES:
        raise ValueError(f"its index has more than {_MOST_INDEX_BYTES:,} bytes")
    index: dict[str, Any] = json.loads(file.read_bytes())
    return index


def _assemble(folder: Path, size: int) -> Saved:
    """Build the tensors from the child's index and bytes, without trusting either."""
    index = _read_index(folder)
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
    return Saved(tensors, dict(settings), dict(index["options"]))


def _look(row: Tensor, dtype: torch.dtype, offset: int, shape: list[int], stride: list[int]) -> Tensor:
    row = row[: row.numel() // dtype.itemsize * dtype.itemsize]
    # A bool's byte may have any value, so it is normalised.
    items = row != 0 if dtype is torch.bool else row.view(dtype)
    if math.prod(shape) == 0:
        return items.new_empty(shape)
    return items.as_strided(shape, stride, offset).clone(memory_format=torch.contiguous_format)
