"""A model folder of the mean of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.checkpoint.average import average_tensors, has_tensors, select_checkpoints
from manyheads.checkpoint.format import step_of
from manyheads.decoding.settings import DecodingSettings, GenerationSettings, read_settings
from manyheads.decoding.shortlist import shortlist_files
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
from manyheads.tasks.table import task_of_folder
from manyheads.text.of_folder import tokenizer_of_folder

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
        more=shortlist_files(source),
        task=task_of_folder(str(folder)),
        languages=languages,
        replace=replace,
    )
    return averaged
