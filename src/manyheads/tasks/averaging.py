"""A model folder of the mean of a run's checkpoints (Vaswani et al. 2017, sec. 6.1: the last 5 or 20)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES, HOOKS, build_model, load
from manyheads.checkpoint.format import SHARDS, list_checkpoints, read_shards, step_of
from manyheads.decoding.settings import DecodingSettings, GenerationSettings, read_settings
from manyheads.errors import CheckpointError, ConfigError, ModelFileError
from manyheads.files.verify import verify_folder
from manyheads.models.pretrained import (
    GENERATION,
    data_notice,
    load_portable_state,
    read_config,
    read_languages,
    save_pretrained,
    usage_example,
)
from manyheads.tasks.held_out import task_of_folder
from manyheads.text.of_folder import tokenizer_of_folder


def select_checkpoints(checkpoints_dir: Path, *, last: int = 0, steps: Sequence[int] = ()) -> list[Path]:
    """Return the newest `last` checkpoints, or those of the given steps, oldest first.

    Raises:
        ConfigError: both or neither is given.
        CheckpointError: there are fewer, or a step is missing; the message lists the existing steps.
    """
    if bool(last) == bool(steps) or last < 0:
        raise ConfigError(
            f"Choose either the last k checkpoints (k >= 1) or some steps; got last {last} and steps {list(steps)}."
        )
    found = list_checkpoints(checkpoints_dir)
    there = ", ".join(str(step_of(path)) for path in found) or "none"
    if last:
        if len(found) < last:
            raise CheckpointError(
                f"{checkpoints_dir} has {len(found)} checkpoints (steps {there}), {last} were asked for."
            )
        return found[-last:]
    by_step = {step_of(path): path for path in found}
    missing = [step for step in steps if step not in by_step]
    if missing:
        raise CheckpointError(f"{checkpoints_dir} has no checkpoint of step {missing[0]}; it has steps {there}.")
    return [by_step[step] for step in sorted(set(steps))]


class _Sharded:
    """The tensors of a checkpoint that several ranks wrote, with the methods of a safetensors file.

    Raises: CheckpointError: they cannot be read.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._tensors = read_shards(folder / SHARDS, stem=stem).get(stem, {})

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _open(folder: Path, stem: str, stack: ExitStack) -> Any:
    if (folder / SHARDS).is_dir():
        return _Sharded(folder, stem)
    return stack.enter_context(safe_open(folder / f"{stem}.safetensors", framework="pt"))


def has_tensors(folder: Path, stem: str) -> bool:
    """Return whether a checkpoint has `stem.safetensors`, or such tensors in shards."""
    return (folder / f"{stem}.safetensors").is_file() or (
        (folder / SHARDS).is_dir() and bool(_Sharded(folder, stem).keys())
    )


def average_tensors(folders: Sequence[Path], *, stem: str = "model", verify: bool = True) -> dict[str, Tensor]:
    """Average `stem.safetensors` over folders, one tensor at a time; shards are read as a whole.

    Args:
        folders: checkpoints or model folders with the same tensors.
        stem: the name of the file, without its ending.
        verify: check each folder against its manifest first.

    Returns: name -> mean, summed in float64, in the first file's dtype; integers and booleans must be equal.
    Raises: CheckpointError: a folder is damaged, or names, shapes, dtypes or integer values differ.
    """
    if not folders:
        raise ConfigError("There are no checkpoints to average.")
    for folder in folders:
        if verify:
            verify_folder(folder)
    with ExitStack() as stack:
        try:
            files = [_open(folder, stem, stack) for folder in folders]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"A file to average cannot be read: {error}.") from error
        names = set(files[0].keys())
        for folder, file in zip(folders, files, strict=True):
            odd = sorted(names ^ set(file.keys()))
            if odd:
                raise CheckpointError(f"{folder} and {folders[0]} differ: only one of them has {odd[0]!r}.")
        return {name: _mean(name, folders, files) for name in sorted(names)}


def _mean(name: str, folders: Sequence[Path], files: Sequence[Any]) -> Tensor:
    first: Tensor = files[0].get_tensor(name)
    exact = not first.is_floating_point()
    total = first if exact else first.to(torch.float64)
    for folder, file in zip(folders[1:], files[1:], strict=True):
        other: Tensor = file.get_tensor(name)
        if other.shape != first.shape or other.dtype != first.dtype:
            raise CheckpointError(
                f"{folder} and {folders[0]} differ in {name!r}: {tuple(other.shape)} {other.dtype}"
                f" and {tuple(first.shape)} {first.dtype}."
            )
        if exact and not torch.equal(other, first):
            raise CheckpointError(
                f"{folder} and {folders[0]} differ in {name!r}, which holds integers and has no mean."
            )
        if not exact:
            total = total + other.to(torch.float64)
    return first if exact else (total / len(folders)).to(first.dtype)


_CARD = """---
library_name: manyheads
tags: [{task}, {architecture}]
---
# A {architecture} trained with manyheads

Its weights are the mean of {kind} weights at steps {steps}.

```python
{example}
```
"""


def average_run(
    folder: Path,
    output: Path,
    *,
    last: int = 0,
    steps: Sequence[int] = (),
    kind: Literal["model", "ema"] = "model",
    replace: bool = True,
) -> list[int]:
    """Write a model folder with averaged weights; config, tokenizer, shortlist and decoding settings are the run's own.

    Paper: Vaswani et al. 2017, sec. 6.1.
    Args:
        folder: of the run.
        output: the model folder.
        last: number of newest checkpoints to average.
        steps: steps of the checkpoints, instead of `last`.
        kind: the trained weights, or their running averages.
        replace: replace an existing output.

    Returns: the steps of the checkpoints.
    Raises: CheckpointError, ModelFileError: the folder is no run, or lacks what is needed. ConfigError: neither or both
        of `last` and `steps` are given, or there are no running averages.
    """
    source = folder / "model"
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder} is not a run folder: there is no folder {folder / 'checkpoints'}.")
    if not (source / "config.json").is_file():
        raise ModelFileError(
            f"{source} holds no model yet, and an average needs its config and tokenizer; it is written at the run's"
            " first validation."
        )
    chosen = select_checkpoints(folder / "checkpoints", last=last, steps=steps)
    weights = average_tensors(chosen)
    if kind == "ema":
        if not has_tensors(chosen[0], "ema"):
            raise ConfigError(f"{chosen[0]} has no running averages; train with training.ema_decay, or leave out ema.")
        weights |= average_tensors(chosen, stem="ema", verify=False)
    averaged = [step for path in chosen if (step := step_of(path)) is not None]
    verify_folder(source, strict=False)  # what is copied from it gets a new manifest
    config = read_config(source)
    model = build_model(config)
    model.data_notice = data_notice(source)
    load_portable_state(model, weights, where=f"the checkpoints of {folder}")
    task, languages = ARCHITECTURES[config.architecture].task, read_languages(source)
    kind_of_settings = DecodingSettings if task == "translation" else GenerationSettings
    save_pretrained(
        model,
        output,
        tokenizer=tokenizer_of_folder(source),
        generation=read_settings(source, kind_of_settings) if (source / GENERATION).is_file() else None,
        card=_CARD.format(
            task=task,
            architecture=config.architecture,
            kind=kind,
            steps=", ".join(map(str, averaged)),
            example=usage_example(task, languages),
        ),
        more=load(HOOKS["shortlist"]).files(source),
        task=task_of_folder(str(folder), strictly=True),
        languages=languages,
        replace=replace,
    )
    return averaged
