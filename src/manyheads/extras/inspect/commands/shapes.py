"""`manyheads inspect shapes MODEL --text TEXT`: every tensor from input to output, of a model or of one module."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import say_or_json, set_up_machine
from manyheads.config.options import CommandPage, Shared, argument, group, option
from manyheads.decoding.options import DeviceOptions
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.inspect.options import ModelOptions

if TYPE_CHECKING:
    from manyheads.extras.inspect.tracing import TracedTensor


@dataclass(frozen=True, kw_only=True)
class ShapesOptions:
    """Options of `manyheads inspect shapes`."""

    model: str = argument(
        "A model folder, a run folder, or owner/name on the Hugging Face hub; or a module of the package with its"
        ' arguments, such as "nn.MultiHeadAttention(512, 8)".',
        metavar="MODEL",
    )
    text: str | None = option("What the model reads.", metavar="TEXT", default_is="needed for a model")
    target: str | None = option(
        "The translation; without it, the model's own.", default=None, metavar="TEXT", default_is="the model's own"
    )
    inputs: tuple[str, ...] = option(
        "What a module is called with: the shape of random numbers (2x4x100), or numbers in brackets ([3, 2]); with"
        " NAME= before it by name.",
        default=(),
        metavar="INPUT ...",
    )
    every_layer: bool = option("Print all layers, also those that repeat an earlier layer.", default=False)
    json: bool = Shared.json("Print a JSON array of objects with module, name, shape and equation.")
    run_on: DeviceOptions = group(DeviceOptions)

    @property
    def is_module(self) -> bool:
        """Whether MODEL is a call, not a model."""
        return self.model.endswith(")") and not Path(self.model).exists()

    def __post_init__(self) -> None:
        if self.is_module and (self.text is not None or self.target is not None or not self.inputs):
            raise ConfigError(f"{self.model} is one module: give --inputs, and neither --text nor --target.")
        if not self.is_module and (self.text is None or self.inputs):
            raise ConfigError(f"{self.model} is a model: give --text, and no --inputs, which are for one module.")


PAGE = CommandPage(
    ShapesOptions,
    """Print every tensor that a model computes for a text, from input to output: the module, the name, the shape and
the equation. A layer that repeats an earlier one of its stack is summarised in one line. With a module and --inputs,
print what one call of this module computes, step by step.""",
    (
        'manyheads inspect shapes runs/demo --text "I am hungry."',
        'manyheads inspect shapes runs/xl-demo --text "He opened the door." --every-layer',
        'manyheads inspect shapes "nn.MultiHeadAttention(512, 8)" --inputs 2x10x512 2x7x512',
    ),
)


@command(PAGE, "inspect shapes")
def run(options: ShapesOptions) -> int:
    """Print the table. Returns: the exit code."""
    set_up_machine()
    from manyheads.extras.inspect.tracing import folded, table

    lines = _of_module(options) if options.is_module else _of_model(options)
    if not options.every_layer:
        lines = folded(lines)
    say_or_json([asdict(line) for line in lines], "\n".join(table(lines)), as_json=options.json)
    return 0


def _of_model(options: ShapesOptions) -> list[TracedTensor]:
    from manyheads.extras.inspect.attending import shapes_of

    assert options.text is not None
    one = ModelOptions(model=options.model, text=options.text, run_on=options.run_on)
    return shapes_of(one.open(), options.text, options.target)


def _of_module(options: ShapesOptions) -> list[TracedTensor]:
    from manyheads.extras.inspect.tracing import trace_call

    module = module_of(options.model)
    given = [_tensor(*_parted(one)) for one in options.inputs]
    try:
        return trace_call(
            module.eval(), *(x for name, x in given if not name), **{name: x for name, x in given if name}
        )
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"{options.model} cannot be called with --inputs {' '.join(options.inputs)}: {error}"
        ) from error


def module_of(call: str) -> Any:
    """Return a new module for a call with plain numbers, such as "nn.MultiHeadAttention(512, 8, dropout=0.1)".

    Only names below the package `manyheads` are looked up, and nothing but the class is called.

    Raises: ConfigError: it is no such call, there is no such module, or it refuses the arguments.
    """
    from torch import nn

    found = re.fullmatch(r"((?:[a-z]\w*\.)*[a-z]\w*)\.([A-Z]\w*)\(.*\)", call, re.DOTALL)
    try:
        parsed = ast.parse(call, mode="eval").body
        assert isinstance(parsed, ast.Call)
        given = [ast.literal_eval(value) for value in parsed.args]
        named = {str(one.arg): ast.literal_eval(one.value) for one in parsed.keywords}
        assert found is not None
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{call} is no module with plain arguments, such as nn.MultiHeadAttention(512, 8, dropout=0.1)."
        ) from error
    try:
        kind = getattr(importlib.import_module(f"manyheads.{found[1]}"), found[2], None)
    except ModuleNotFoundError:
        kind = None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"manyheads.{found[1]}.{found[2]} is no module of the package; see docs/attention.md.")
    try:
        return kind(*given, **named)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{call} cannot be made: {error}") from error


def _parted(text: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    return (name, rest) if equals else ("", text)


def _tensor(name: str, text: str) -> tuple[str, Any]:
    """Return an input and its name; random numbers are the same in every call of the command."""
    import torch

    if re.fullmatch(r"\d+(x\d+)*", text):
        return name, torch.randn([int(size) for size in text.split("x")], generator=torch.Generator().manual_seed(0))
    try:
        values = ast.literal_eval(text)
        assert isinstance(values, list)
        return name, torch.tensor(values)
    except (SyntaxError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"--inputs {text}: give a shape such as 2x4x100, or numbers such as [3, 2].") from error
