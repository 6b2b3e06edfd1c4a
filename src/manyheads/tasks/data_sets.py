"""The data sets of a run: one, or several that are mixed, all with the same ids.

The first embeddings of a model, learned from counts: `initial.embeddings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from manyheads.data.settings import DataSettings, RowSettings, SegmentSettings, shares_of
from manyheads.data.store import mixed_digest
from manyheads.errors import ConfigError
from manyheads.files.verify import MANIFEST
from manyheads.tasks.held_out import json_or_empty

if TYPE_CHECKING:
    from manyheads.distributed.group import Group

Settings = TypeVar("Settings", DataSettings, SegmentSettings)
Data = TypeVar("Data", bound="_HasDigest")


class _HasDigest(Protocol):
    @property
    def digest(self) -> str: ...


def open_sets(settings: Settings, open_one: Callable[[Settings], Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Open `data.path`, or all folders of `data.mix`.

    Args:
        settings: of the data.
        open_one: opens the data set that `path` names.

    Returns: the data sets by their paths, and the shares of a mix; empty without one.
    Raises: DataError: a data set cannot be opened. ConfigError: data sets of a mix have different ids.
    """
    shares = shares_of(settings.mix)
    paths = list(shares) or [settings.path]
    found = {path: open_one(replace(settings, path=path, mix=())) for path in paths}
    main = found[settings.path]
    for path, data in found.items():
        if data.tokenizer.digest != main.tokenizer.digest:
            raise ConfigError(
                f"data.mix: {path} was prepared with another tokenizer ({data.tokenizer.digest[:12]}) than"
                f" {settings.path} ({main.tokenizer.digest[:12]}), so their ids differ; prepare it again with"
                f" `prepare --tokenizer {settings.path}`."
            )
        if getattr(data, "task", None) != getattr(main, "task", None):
            raise ConfigError(f"data.mix: {path} and {settings.path} are prepared for different tasks; mix only one.")
    return found, shares


def digest_of_sets(sets: Iterable[_HasDigest]) -> str:
    """Return the digest of the data sets of a mix, in their order; of one data set, its own."""
    first, *more = (one.digest for one in sets)
    if not more:
        return first
    return mixed_digest([first, *more])


def known_sets(old: str, sets: Mapping[str, Data], open_folder: Callable[[str], Data]) -> dict[str, Data]:
    """Return the data sets of a run. If the run begins from a model, the model's data set comes first.

    The same data under several names, such as a folder and its copy, is one data set, with its first name in the run.

    Args:
        old: `initial.data`.
        sets: of the run.
        open_folder: opens prepared data.
    """
    names: dict[str, str] = {}
    for name, data in sets.items():
        names.setdefault(data.digest, name)
    found = {name: sets[name] for name in names.values()}
    if not old or any(Path(old).resolve() == Path(name).resolve() for name in sets):
        return found
    opened = open_folder(old)
    return found if opened.digest in names else {old: opened, **found}


def vocabulary_size(given: int, path: str, usual: int, why: str = "as tokenizer.vocab_size") -> tuple[int, str]:
    """Return the number of ids of a run whose data is not opened, and a line about it.

    Args:
        given: in the settings of the model, or 0.
        path: the data; where it is prepared, its manifest gives the number.
        usual: the number where it is not. why: where that is from.
    """
    if given:
        return given, ""
    made = json_or_empty(Path(path) / MANIFEST).get("tokenizer")
    size = made.get("vocab_size") if isinstance(made, dict) else None
    if type(size) is int and size > 0:
        return size, f"vocabulary: the {size:,} ids of {path}"
    return usual, f"vocabulary: {usual:,} ids are assumed, {why}, because {path} is no folder of prepared data"


def fewer_tokens(data: DataSettings | RowSettings) -> str:
    """Return advice on the settings that reduce memory, of steps with a number of tokens; see `Objective.lighter`."""
    return (
        f"(data.max_tokens {data.max_tokens}, data.accumulate {data.accumulate}): lower max_tokens, or raise"
        f" accumulate to {2 * data.accumulate}, which splits each step into smaller parts; either makes it a new run."
    )


@torch.no_grad()
def begin_embeddings(
    tables: Iterable[Tensor], rows: int, learn: Callable[[int], Tensor], seed: int, group: Group
) -> None:
    """Give tables the vectors that `learn` finds, turned randomly.

    They have length 1, as random vectors of N(0, 1 / width) have on average. The rotation prevents that a direction of
    the vectors belongs to certain positions or heads. Ids without information keep their random vectors.

    Args:
        tables: of embeddings and outputs, (ids, width), on a CPU; all have one width. One that occurs twice is written
            once.
        rows: the number of ids.
        learn: see `extras.cooccurrence`; given the width, it returns (rows, width).
        seed: of the turn.
        group: the ranks, all of which get the vectors that the main one computes.
    """
    distinct = list({id(one): one for one in tables}.values())
    table = None
    if group.is_main:
        width = distinct[0].shape[1]
        normal = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
        table = learn(width) @ torch.linalg.qr(normal)[0]
    table = group.joined(table, rows=rows)
    for weight in distinct:
        new = table[: len(weight)].to(weight)
        old = weight[: len(new)]
        old.copy_(torch.where(new.any(1, keepdim=True), new, old))
