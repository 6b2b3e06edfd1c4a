"""Every tensor of one forward pass, from input to output, with its equation."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyheads.nn.attention.observing import observe

LAYER = re.compile(r"^(.*?layers)\.(\d+)(.*)$")


@dataclass(frozen=True)
class TracedTensor:
    """One line: the module, the tensor's name, its shape, and its equation."""

    module: str
    name: str
    shape: tuple[int, ...]
    equation: str


def trace(model: nn.Module, inputs: dict[str, Any], **options: Any) -> list[TracedTensor]:
    """Run one forward pass and record every tensor.

    Args:
        model: a composite: `log_probs(*inputs)` and a `head`.
        inputs: name -> tensor (or None, or a state), in the order of the arguments of `log_probs`.
        options: further arguments of `log_probs`.

    Returns: in the order of computation; inputs first, log-probabilities last. The model is not changed.
    """
    lines = [
        TracedTensor("", name, tuple(value.shape), "input")
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    ]
    with torch.no_grad(), _watching(model, lines):
        log_probs = model.log_probs(*inputs.values(), **options)  # type: ignore[operator]
    name, equation = model.head.equation()  # type: ignore[union-attr,operator]
    lines.append(TracedTensor("head", name, tuple(log_probs.shape), equation))
    return _chunks_joined(lines)


def trace_call(module: nn.Module, *inputs: Any, **named: Any) -> list[TracedTensor]:
    """Call any module and record every tensor, step by step.

    Modules of ours name their tensors. Of other modules, each operation on numbers has a line: the submodule that
    computes it, the operation, the shape of the result, and its inputs.

        >>> for line in trace_call(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), torch.zeros(2, 4)):
        ...     print(line.module, line.name, line.shape, line.equation)
         input 1 (2, 4) input
        0 linear (2, 6) x Wᵀ + b
        1 relu (2, 6) relu(2 x 6)

    Returns: in the order of computation, inputs first. The module is not changed.
    """
    given = {**{f"input {place}": x for place, x in enumerate(inputs, 1)}, **named}
    lines = [TracedTensor("", name, tuple(x.shape), "input") for name, x in given.items() if isinstance(x, Tensor)]
    with torch.no_grad(), _watching(module, lines), _Operations(module, lines):
        module(*inputs, **named)
    return lines


class _Operations(TorchFunctionMode):
    """Writes a line for every operation of modules that do not name their tensors themselves."""

    def __init__(self, module: nn.Module, lines: list[TracedTensor]) -> None:
        super().__init__()
        self.module, self.lines = module, lines
        self.running: list[tuple[str, nn.Module]] = []
        self.hooks = contextlib.ExitStack()

    def __enter__(self) -> Any:
        for name, module in self.module.named_modules():
            enter = partial(lambda name, module, _: self.running.append((name, module)), name)
            self.hooks.callback(module.register_forward_pre_hook(enter).remove)
            leave = module.register_forward_hook(lambda *_: (self.running.pop(), None)[1], always_call=True)
            self.hooks.callback(leave.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.hooks.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) and result else result
        is_number = isinstance(first, Tensor) and first.is_floating_point()
        if is_number and self.running and not any(_names_itself(module) for _, module in self.running):
            name, (where, module) = str(getattr(func, "__name__", "")).strip("_"), self.running[-1]
            inputs = [x for x in args if isinstance(x, Tensor)]
            if inputs and name not in ("get", "detach") and (name != "dropout" or module.training):
                self.lines.append(TracedTensor(where, name, tuple(first.shape), _equation(name, args, inputs)))
        return result


def _names_itself(module: nn.Module) -> bool:
    return hasattr(module, "tensors") or hasattr(module, "equation")


def _equation(name: str, args: Sequence[Any], inputs: Sequence[Tensor]) -> str:
    if name == "linear":
        return "x Wᵀ + b" if len(inputs) > 2 else "x Wᵀ"
    formula = f"{args[0]}: " if isinstance(args[0], str) else ""  # of einsum
    return f"{name}({formula}{', '.join(' x '.join(map(str, x.shape)) or 'number' for x in inputs)})"


def _chunks_joined(lines: list[TracedTensor]) -> list[TracedTensor]:
    """Merge tensors that were computed in several calls, some positions at a time, into one line."""
    found: dict[tuple[str, str], list[TracedTensor]] = {}
    for line in lines:
        found.setdefault((line.module, line.name), []).append(line)
    joined = []
    for first, *others in found.values():
        if others:
            batch, some, *rest = first.shape
            length = some + sum(other.shape[1] for other in others)
            told = f"{first.equation}; {some} positions at a time"
            first = replace(first, shape=(batch, length, *rest), equation=told)
        joined.append(first)
    return joined


def folded(lines: list[TracedTensor]) -> list[TracedTensor]:
    """Replace layers that repeat an earlier one of their stack by one line after it."""
    kept: list[TracedTensor] = []
    layers: dict[tuple[str, str], list[tuple[str, TracedTensor]]] = {}
    order: list[tuple[str, str] | TracedTensor] = []
    for line in lines:
        found = LAYER.match(line.module)
        if found is None:
            order.append(line)
            continue
        key = (found[1], found[2])
        if key not in layers:
            layers[key] = []
            order.append(key)
        layers[key].append((found[3], replace(line, module="")))
    alike: dict[str, list[int]] = {}
    for place, entry in enumerate(order):
        if isinstance(entry, TracedTensor):
            kept.append(entry)
            continue
        stack, index = entry
        model = next(key for key in layers if key[0] == stack and layers[key] == layers[entry])
        if entry != model:
            alike.setdefault(model[1], []).append(int(index))
        else:
            kept += [replace(line, module=f"{stack}.{index}{rest}") for rest, line in layers[entry]]
        after = order[place + 1] if place + 1 < len(order) else None
        if isinstance(after, TracedTensor | None) or after[0] != stack:
            for first, indices in alike.items():
                kept.append(TracedTensor(f"{stack}.{runs(indices)}", f"as in {stack}.{first}", (), ""))
            alike = {}
    return kept


def runs(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text: [1, 2, 3, 5, 7, 8] as `1 to 3, 5, 7 to 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


@contextlib.contextmanager
def _watching(model: nn.Module, lines: list[TracedTensor]) -> Iterator[None]:
    """Write a line for every tensor that a module with equations computes inside the block."""
    with contextlib.ExitStack() as stack:

        def on_output(name: str, write: Callable[[Tensor], None]) -> None:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                write(output[0] if isinstance(output, tuple) else output)

            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)

        def write(module: str, name: str, equation: str, output: Tensor) -> None:
            lines.append(TracedTensor(module.removeprefix("body."), name, tuple(output.shape), equation))

        def write_attention(name: str, layer: Any, seen: list[Tensor], output: Tensor) -> None:
            shown = name.removeprefix("body.")
            found = layer.tensors(output, seen.pop() if seen else None, is_cross="cross" in name)
            lines.extend(TracedTensor(shown, *tensor) for tensor in found)

        for name, module in model.named_modules():
            if hasattr(module, "tensors"):
                record = stack.enter_context(observe(module, "weights" if module.sees_whole else "buckets"))
                # The output projection, because some models call other methods of the layer than `forward`.
                on_output(
                    f"{name}.out_proj".lstrip("."), partial(write_attention, name, module, record.setdefault("", []))
                )
            for inner, label, equation in _told_of(name, module):
                on_output(inner, partial(write, inner, label, equation))
        yield


def _told_of(name: str, module: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the modules whose outputs get a line because of this module: full name, tensor name, equation."""
    if hasattr(module, "equation") and name != "head":
        yield name, *module.equation()  # type: ignore[operator]
    for part, (label, text) in getattr(module, "traced_parts", {}).items():
        if getattr(module, part) is not None:
            yield f"{name}.{part}".lstrip("."), label, text


def table(lines: list[TracedTensor]) -> list[str]:
    """Return the tensors in columns; a module's name once for all of its tensors that follow each other."""
    rows, before = [("module", "tensor", "shape", "equation")], ""
    for line in lines:
        shape = " x ".join(map(str, line.shape))
        rows.append((line.module if line.module != before else "", line.name, shape, line.equation))
        before = line.module
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(3)), row[3]]).rstrip() for row in rows]
