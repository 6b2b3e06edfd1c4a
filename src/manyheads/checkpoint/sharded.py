"""Tensors that are sharded over ranks, in files: each rank writes its parts, and any number of ranks can read them.

This uses torch's distributed checkpointing in the safetensors format (`HuggingFaceStorageWriter`), which needs no
pickle: the header of each file says where its parts belong. The default format stores this in a pickle, which is never
written or read here.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

SHARDS = "shards"
"""The folder within a checkpoint."""

_MOST_ENTRIES = 1_000_000


def flat(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return `stem/name` -> tensor."""
    return {f"{stem}/{name}": tensor for stem, group in tensors.items() for name, tensor in group.items()}


def write_shards(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write this rank's parts, one file per rank. A collective operation; replicated tensors are written once.

    Args:
        folder: exists, and is the same on every rank (with several machines: on a shared file system).
        tensors: stem -> name -> tensor, DTensors or whole ones.

    Raises: OSError: a rank could not write; on all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    try:
        with _quietly():
            save({name: _plain(tensor) for name, tensor in flat(tensors).items()}, storage_writer=writer)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"{cause.strerror or cause} (rank {rank})") from error
        raise


def _plain(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.detach()
    return found if hasattr(found, "full_tensor") else found.contiguous()


Allocate = Callable[[str, str, "torch.Size", "torch.dtype"], "Tensor | None"]
"""stem, name, shape, dtype -> where to read it: a DTensor receives this rank's part; None: a new whole tensor."""


def read_shards(
    folder: Path, allocate: Allocate | None = None, *, stem: str | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of such a folder, by stem and name; any number of ranks may have written it. Not collective.

    Args: allocate: see `Allocate`; None: whole tensors. stem: read its tensors only; None: all.

    Raises: CheckpointError: the parts do not cover their tensors, or cannot be read.
    """
    import torch
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    _check_headers(folder)
    reader = HuggingFaceStorageReader(str(folder))
    found: dict[str, dict[str, Tensor]] = {}
    state: dict[str, Any] = {}
    try:
        for key, about in reader.read_metadata().state_dict_metadata.items():
            kind, _, name = key.partition("/")
            if stem not in (None, kind):
                continue
            shape, dtype = about.size, about.properties.dtype  # type: ignore[union-attr]
            target = None if allocate is None else allocate(kind, name, shape, dtype)
            target = torch.empty(shape, dtype=dtype) if target is None else target
            state[key] = found.setdefault(kind, {})[name] = target
        with _quietly():
            load(state, storage_reader=reader, no_dist=True)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        raise CheckpointError(f"{folder} cannot be read: {str(error).split(chr(10))[0][:300]}.") from error
    return found


def _check_headers(folder: Path) -> None:
    """Check that the parts of every tensor cover it without gaps and overlaps; torch does not check this."""
    from safetensors import SafetensorError, safe_open

    covered: dict[str, int] = {}
    ends: dict[str, list[int]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as reader:
                about = json.loads((reader.metadata() or {}).get("DCP_SHARDING_INFO", "null"))
                for key in reader.keys():  # noqa: SIM118  (not a mapping)
                    shape = reader.get_slice(key).get_shape()
                    offset = about[key]["saved_offsets"]
                    size = math.prod(shape)
                    if size and (key, tuple(offset)) in seen:
                        raise CheckpointError(f"{folder} is damaged: two parts of {key!r} begin at {offset}.")
                    seen.add((key, tuple(offset)))
                    covered[key] = covered.get(key, 0) + size
                    last = [start + length for start, length in zip(offset, shape, strict=True)]
                    ends[key] = [max(pair) for pair in zip(ends.get(key, last), last, strict=True)]
                    if len(seen) > _MOST_ENTRIES:
                        raise CheckpointError(f"{folder} is refused: it has over {_MOST_ENTRIES:,} parts.")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    for key, shape in ends.items():
        if covered[key] != math.prod(shape):
            raise CheckpointError(
                f"{folder} is damaged: the parts of {key!r} hold {covered[key]:,} of {math.prod(shape):,} numbers."
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the log messages and warnings of torch's checkpointing."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
