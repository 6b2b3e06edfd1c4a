"""`manyheads average RUN`: the mean of a run's checkpoints as a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyheads.cli.command_line.parsing import parse
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import CheckpointError, ConfigError, ModelFileError
from manyheads.tasks.held_out import own_data

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PAGE", "AverageOptions", "check_output", "run"]


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Options of `manyheads average`."""

    run_folder: str = argument("A folder that train wrote.", metavar="RUN")
    output: str = option("The model folder to be made.", metavar="DIR", aliases=("-o",))
    last: int = option("Average the newest K checkpoints.", default=0, metavar="K", default_is="")
    steps: tuple[int, ...] = option("Average the checkpoints of these steps.", default=(), metavar="STEP ...")
    weights: Literal["model", "ema"] = option(
        "The weights as trained, or their running averages if the run kept any.", default="model"
    )
    replace: bool = option("Replace a model folder of that name.", default=False)


PAGE = CommandPage(
    AverageOptions,
    """Average the weights of several checkpoints of a run into a model folder (Vaswani et al. 2017, 6.1).
Its config, tokenizer and decoding options are those of the run's own model.""",
    (
        "manyheads average runs/demo --last 5 --output runs/demo/averaged",
        "manyheads average runs/demo --steps 1000 2000 3000 --output averaged",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Average checkpoints. Returns: the exit code."""
    options = parse(PAGE, arguments, "average")
    folder, output = Path(options.run_folder), Path(options.output)
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder} is not a run folder: there is no folder {folder / 'checkpoints'}.")
    check_output(output, options.replace)
    if not (folder / "model" / "config.json").is_file():
        raise ModelFileError(
            f"{folder / 'model'} holds no model yet, and an average needs its config and tokenizer;"
            " it is written at the run's first validation."
        )
    from manyheads.checkpoint.average import average_tensors, select_checkpoints
    from manyheads.checkpoint.format import step_of

    chosen = select_checkpoints(folder / "checkpoints", last=options.last, steps=options.steps)
    weights = average_tensors(chosen)
    if options.weights == "ema":
        if not (chosen[0] / "ema.safetensors").is_file():
            raise ConfigError(f"{chosen[0]} has no running averages; train with training.ema_decay, or leave out ema.")
        weights |= average_tensors(chosen, stem="ema", verify=False)
    steps = [step_of(path) for path in chosen]
    _save(folder, output, weights, f"the mean of {options.weights} weights at steps {', '.join(map(str, steps))}")
    print(f"averaged {len(steps)} checkpoints (steps {', '.join(map(str, steps))}) of {folder} into {output}")
    with suppress(ConfigError):  # a run without its config.yaml
        data, _ = own_data(str(folder))
        print(f"next: manyheads evaluate {output} --data {data}")
    return 0


def check_output(output: Path, replace: bool) -> None:
    """Refuse to destroy what is there.

    Raises: ConfigError: the folder exists, and is no model folder or was not to be replaced.
    """
    if not output.exists():
        return
    is_model = (output / "config.json").is_file() and (output / "model.safetensors").is_file()
    if not replace or not is_model:
        hint = "or give --replace" if is_model else "it is no model folder, so it is not replaced"
        raise ConfigError(f"{output} exists already; choose another folder, {hint}.")


def _save(folder: Path, output: Path, weights: dict[str, Tensor], what: str) -> None:
    """Write the model folder; config, tokenizer and decoding options come from the run's own model."""
    from manyheads.architectures.pretrained import load_portable_state, read_config, save_pretrained
    from manyheads.architectures.table import build_model
    from manyheads.decoding.generation_config import load_settings
    from manyheads.files.verify import verify_folder
    from manyheads.tasks.table import task_of_folder
    from manyheads.text.sides import has_tokenizer, load_tokenizer

    source = folder / "model"
    verify_folder(source, strict=False)  # what is copied from it gets a new manifest
    config = read_config(source)
    model = build_model(config)
    load_portable_state(model, weights, where=f"the checkpoints of {folder}")
    tokenizer = load_tokenizer(source) if has_tokenizer(source) else None
    card = _card(config, what)
    save_pretrained(
        model,
        output,
        tokenizer=tokenizer,
        generation=load_settings(source),
        card=card,
        task=task_of_folder(str(folder)),
    )


def _card(config: Any, what: str) -> str:
    return f"""---
library_name: manyheads
tags: [translation, {config.architecture}]
---
# A {config.architecture} trained with manyheads

Its weights are {what}.

```python
import manyheads
translator = manyheads.Translator.from_pretrained(".")
print(translator.translate(["..."]))
```
"""
