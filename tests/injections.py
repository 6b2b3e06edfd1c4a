"""NaN and infinity put into a step of training, wherever it can meet them; `integration/test_nonfinite.py` uses it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.training.optim.optimiser import MovingAverage
from manyheads.training.run.step import StepResult, TrainStep

__all__ = ["KINDS", "STEPS", "Injection", "Injector", "injections"]

STEPS = 6
KINDS = ("weight", "overflow", "gradient", "activation", "unused row", "used row", "buffer", "moment", "loss")


@dataclass(frozen=True)
class Injection:
    """What is made bad, when, and in which kind of run."""

    kind: str
    step: int
    micro: int
    value: float
    seed: int
    optimiser: str
    precision: str
    skip: bool


def injections(count: int) -> list[Injection]:
    """Every kind with every optimiser and precision in turn, the rest at random but always the same."""
    draw = random.Random(12)
    found = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        found.append(
            Injection(
                kind=kind,
                step=draw.randint(3, STEPS),
                micro=draw.randint(0, 1),
                value=draw.choice([float("nan"), float("inf"), -float("inf")]),
                seed=draw.randrange(10**6),
                optimiser=("adam", "muon", "adamw")[number % 3],
                precision=("fp32", "bf16")[number // len(KINDS) % 2],
                skip=kind in ("activation", "gradient", "loss") and draw.random() < 0.5,
            )
        )
    return found


class Injector:
    """Stands in for `TrainStep.run` and makes one step bad; keeps what was there before and after it.

    Attributes:
        target: the name of what was made bad.
        changed: names of tensors that the bad step changed all the same.
        result: what the step said.
    """

    def __init__(self, case: Injection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case = case
        self.target = ""
        self.changed: list[str] | None = None
        self.result: StepResult | None = None
        self._draw = random.Random(case.seed)
        self._micro = -1
        self._step = 0
        self._averages: list[MovingAverage] = []
        take, forward, average = TrainStep.run, TrainStep.forward, MovingAverage.__init__

        def note(average_self: MovingAverage, *arguments: Any) -> None:
            average(average_self, *arguments)
            self._averages.append(average_self)

        def run_forward(train_step: TrainStep, batch: Any, step: int, micro: int, model: Any = None) -> Any:
            self._micro, self._step = micro, step
            output = forward(train_step, batch, step, micro, model)
            bad = case.kind == "loss" and self._now()
            return output._replace(loss_sum=output.loss_sum * case.value) if bad else output

        def run(train_step: TrainStep, batches: Any, step: int, rate: float) -> StepResult:
            if step != case.step:
                return take(train_step, batches, step, rate)
            remove = self._inject(train_step, batches)
            before = self._state(train_step)
            self.result = take(train_step, batches, step, rate)
            after = self._state(train_step)
            self.changed = [name for name in before if before[name] != after.get(name)]
            remove()
            return self.result

        monkeypatch.setattr(MovingAverage, "__init__", note)
        monkeypatch.setattr(TrainStep, "forward", run_forward)
        monkeypatch.setattr(TrainStep, "run", run)

    def _now(self) -> bool:
        return self._step == self.case.step and self._micro == self.case.micro

    def _state(self, train_step: TrainStep) -> dict[str, bytes]:
        """Weights, buffers, moments and averages, as bytes."""
        tensors: dict[str, Tensor] = dict(train_step._model.named_parameters()) | dict(
            train_step._model.named_buffers()
        )
        for name, parameter in train_step._model.named_parameters():
            for key, value in train_step._optimiser.state.get(parameter, {}).items():
                tensors[f"{key} of {name}"] = value
        for average in self._averages:
            tensors |= {f"average of {name}": tensor for name, tensor in average.tensors.items()}
        return {
            name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.ndim
            else str(tensor.item()).encode()
            for name, tensor in tensors.items()
        }

    def _inject(self, train_step: TrainStep, batches: Any) -> Callable[[], None]:
        model = train_step._model
        return getattr(self, "_" + self.case.kind.replace(" ", "_"))(model, train_step._optimiser, batches)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _weight(self, model: nn.Module, *_: Any) -> Callable[[], None]:
        self.target, parameter = self._draw.choice(sorted(model.named_parameters()))
        parameter.view(-1)[self._draw.randrange(parameter.numel())] = self.case.value
        return lambda: None

    @torch.no_grad()
    def _overflow(self, model: nn.Module, *_: Any) -> Callable[[], None]:
        """Weights that are finite, but whose products are not."""
        names = [name for name, parameter in model.named_parameters() if "proj.weight" in name and parameter.ndim == 2]
        self.target = self._draw.choice([name for name in names if "out_proj" in name])
        dict(model.named_parameters())[self.target].fill_(3e38)
        return lambda: None

    def _gradient(self, model: nn.Module, *_: Any) -> Callable[[], None]:
        self.target, parameter = self._draw.choice(sorted(model.named_parameters()))

        def poison(gradient: Tensor) -> Tensor | None:
            return gradient * self.case.value if self._now() else None

        return parameter.register_hook(poison).remove

    def _activation(self, model: nn.Module, *_: Any) -> Callable[[], None]:
        run = [
            (name, module)
            for name, module in model.named_modules()
            if type(module).__name__ in ("LayerNorm", "FeedForward", "Embedding")
        ]
        self.target, module = self._draw.choice(run)

        def poison(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
            return output * self.case.value if self._now() else None

        return module.register_forward_hook(poison).remove

    @torch.no_grad()
    def _unused_row(self, model: nn.Module, _optimiser: Any, batches: Any) -> Callable[[], None]:
        """A source word that no sentence of this step has: neither loss nor gradients show it."""
        used = {int(number) for batch in batches for number in batch.source.unique()}
        return self._spoil_row(model, next(number for number in range(1, 20) if number not in used))

    @torch.no_grad()
    def _used_row(self, model: nn.Module, _optimiser: Any, batches: Any) -> Callable[[], None]:
        return self._spoil_row(model, int(batches[min(self.case.micro, len(batches) - 1)].source[0, 0]))

    def _spoil_row(self, model: nn.Module, row: int) -> Callable[[], None]:
        self.target = "body.source_embedding.weight"
        dict(model.named_parameters())[self.target][row] = self.case.value
        return lambda: None

    @torch.no_grad()
    def _buffer(self, model: nn.Module, *_: Any) -> Callable[[], None]:
        self.target, table = self._draw.choice(
            [(name, value) for name, value in model.named_buffers() if value.is_floating_point()]
        )
        table[0] = self.case.value
        return lambda: None

    @torch.no_grad()
    def _moment(self, model: nn.Module, optimiser: torch.optim.Optimizer, *_: Any) -> Callable[[], None]:
        name, parameter = self._draw.choice(sorted(model.named_parameters()))
        key = self._draw.choice([key for key in sorted(optimiser.state[parameter]) if key != "step"])
        self.target = f"{name} ({key})"
        optimiser.state[parameter][key].view(-1)[0] = self.case.value
        return lambda: None

    def _loss(self, *_: Any) -> Callable[[], None]:
        return lambda: None
