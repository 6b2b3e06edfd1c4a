"""`manyheads average RUN`: the mean of a run's checkpoints as a model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from manyheads.cli.command_line.parsing import command, program
from manyheads.cli.lines.output import check_model_output
from manyheads.cli.process import echo
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import Reading
from manyheads.tasks.held_out import own_data, run_section


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Options of `manyheads average`."""

    run_folder: str = argument("A run folder, written by `manyheads train`.", metavar="RUN")
    output: str = option("The model folder to write.", metavar="DIR", aliases=("-o",))
    last: int = option("Average the newest K checkpoints.", default=0, metavar="K", default_is="")
    steps: tuple[int, ...] = option("Average the checkpoints of these steps.", default=(), metavar="STEP ...")
    weights: Literal["model", "ema"] = option(
        "Average the trained weights, or the running averages if the run has them.", default="model"
    )
    replace: bool = option("Replace an existing model folder.", default=False)


PAGE = CommandPage(
    AverageOptions,
    """Average the weights of several checkpoints of a run into a model folder (Vaswani et al. 2017, 6.1).
Config, tokenizer and decoding options are copied from the run's model.""",
    (
        "manyheads average runs/demo --last 5 --output runs/demo/averaged",
        "manyheads average runs/demo --steps 1000 2000 3000 --output averaged",
    ),
)


@command(PAGE, "average")
def run(options: AverageOptions) -> int:
    """Average checkpoints. Returns: the exit code."""
    folder, output = Path(options.run_folder), Path(options.output)
    check_model_output(output, options.replace)
    from manyheads.tasks.averaging import average_run

    steps = average_run(
        folder, output, last=options.last, steps=options.steps, kind=options.weights, replace=options.replace
    )
    which = f"{len(steps)} checkpoints (steps" if len(steps) > 1 else "1 checkpoint (step"
    echo(f"averaged {which} {', '.join(map(str, steps))}) of {folder} into {output}")
    with suppress(ConfigError):  # a run without its config.yaml
        data, _ = own_data(str(folder))
        echo(f"next: {program()} evaluate {output} --data {data}{_as_read_by(folder)}")
    return 0


def _as_read_by(run: Path) -> str:
    """Return the options with which a model folder reads a text as the run's validation does."""
    given = run_section(str(run), "reading")
    usual = asdict(Reading()) | {"max_tokens": given.get("max_tokens")}  # all of the text, as for the run itself
    changed = {name: value for name, value in given.items() if value != usual.get(name)}
    shown = {name: ("no", "yes")[value] if isinstance(value, bool) else value for name, value in changed.items()}
    return "".join(f" --{name.replace('_', '-')} {value}" for name, value in shown.items())
