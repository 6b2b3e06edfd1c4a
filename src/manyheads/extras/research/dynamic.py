"""Dynamic evaluation: the weights of a language model are adapted to a text while it is scored.

Each segment is scored by the weights as they are, then a gradient step on its loss changes them. So every token is
scored before it is learned, but later tokens are scored by weights that saw the text. The results are not comparable
with those of fixed weights.

Paper: Krause et al. 2018, arXiv:1709.07432, sec. 4: the step is
    theta <- theta - eta g / (RMS + eps) + lambda (theta_0 - theta) * min(RMS / mean RMS, 1 / lambda)
with RMS the root of the mean of g^2 over the training data, and the mean one over parameters. Krause et al. 2019,
arXiv:1904.08378, use it for the Transformer-XL. `sgd` has neither RMS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from manyheads.data.lines import Progress, phase_progress
from manyheads.errors import ConfigError, NonFiniteError, refuse_nan
from manyheads.evaluation.likelihood import Likelihood, evaluation_mode, segments_of
from manyheads.extras.research.text_task.options import EvaluateOptions
from manyheads.nn.kernels.modes import fast
from manyheads.tasks.held_out import run_file
from manyheads.tasks.language_modelling.evaluate import HeldText, Scoring, held_text

if TYPE_CHECKING:
    from manyheads.data.store import TokenStore
    from manyheads.decoding.generator import Generator
    from manyheads.distributed.group import Group
    from manyheads.evaluation.reading import Reading
    from manyheads.tasks.language_modelling import options as task
    from manyheads.text.vocabulary import Vocabulary

STATISTICS_LANES = 100
"""Rows of a batch for statistics, as in the authors' code; gradients of larger batches are smaller."""

RATE_PER_TOKEN = 5e-5 / 5
DECAY_PER_TOKEN = 0.002 / 5
"""The defaults of the authors' code for segments of 5 tokens, which it scales with their length."""


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How weights are adapted.

    Args:
        kind: `rms` divides gradients by their usual size in training; `sgd` does not.
        learning_rate: eta, for the mean loss of a segment.
        decay: lambda, with which weights return to the trained ones.
        epsilon: added to the usual size of a gradient.
    """

    kind: Literal["rms", "sgd"]
    learning_rate: float
    decay: float
    epsilon: float = 2e-5

    @staticmethod
    def default_rate(segment_len: int) -> float:
        """Return the learning rate of `rms` for segments of this length."""
        return RATE_PER_TOKEN * segment_len

    @staticmethod
    def default_decay(segment_len: int) -> float:
        """Return the decay for segments of this length, at most 1."""
        return min(1.0, DECAY_PER_TOKEN * segment_len)


def gradient_rms(
    model: Any,
    store: TokenStore,
    reading: Reading,
    vocabulary: Vocabulary,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Return the root of the mean square of the gradient of each weight over the batches of a text, by name.

    Args: see `evaluate_dynamically`; the text is that of training.

    Raises: DataError: there is nothing to read.
    """
    parameters = dict(model.named_parameters())
    where = {name: "cpu" if one.device.type == "mps" else one.device for name, one in parameters.items()}  # no float64
    squares = {
        name: torch.zeros(one.shape, dtype=torch.float64, device=where[name]) for name, one in parameters.items()
    }
    batches = 0
    for _ in _segments(model, store, reading, vocabulary, device, on_progress):
        for name, gradient in _gradients(parameters):
            squares[name] += gradient.to(where[name]).double() ** 2
        batches += 1
    return {name: (one / batches).sqrt().to(parameters[name]) for name, one in squares.items()}


def evaluate_dynamically(
    model: Any,
    store: TokenStore,
    reading: Reading,
    vocabulary: Vocabulary,
    adaptation: Adaptation,
    rms: Mapping[str, Tensor] | None = None,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> Likelihood:
    """Score a text with weights that are adapted to it. Afterwards the model has its trained weights again.

    Args:
        model: a language model in float32.
        store: the text.
        reading: segments, memory and lanes; the papers read in one lane.
        vocabulary: of the text.
        adaptation: the rule.
        rms: `gradient_rms` of the training text; for `rms` only.
        device: the model's device.
        on_progress: called after each segment with the number of scored tokens.

    Raises: DataError: there is nothing to score. NonFiniteError: the loss is not finite; the learning rate is too high.
    """
    parameters = dict(model.named_parameters())
    trained = {name: one.detach().clone() for name, one in parameters.items()}
    divisors: dict[str, Tensor | float] = dict.fromkeys(parameters, 1.0)
    decays: dict[str, Tensor | float] = dict.fromkeys(parameters, adaptation.decay)
    if adaptation.kind == "rms":
        assert rms is not None, "the rule divides by it"
        divisors = {name: one + adaptation.epsilon for name, one in rms.items()}
        typical = math.fsum(float(one.mean()) for one in rms.values()) / len(rms)
        decays = {name: (adaptation.decay * one / max(typical, 1e-30)).clamp(max=1) for name, one in rms.items()}
    sums: list[float] = []
    num_tokens = 0
    try:
        for nll_sum, count in _segments(model, store, reading, vocabulary, device, on_progress):
            refuse_nan(math.isnan(nll_sum) and not sums)  # with the weights as they were trained
            if not math.isfinite(nll_sum):
                raise NonFiniteError(
                    f"After {num_tokens:,} tokens of dynamic evaluation the loss is {nll_sum}; lower the learning rate"
                    f" (--dynamic-rate), which is {adaptation.learning_rate:g}."
                )
            sums.append(nll_sum)
            num_tokens += count
            with torch.no_grad():
                for name, one in parameters.items():
                    change = decays[name] * (trained[name] - one)
                    if one.grad is not None:
                        change -= adaptation.learning_rate * one.grad / divisors[name]
                    one += change
    finally:
        with torch.no_grad():
            for name, one in parameters.items():
                one.copy_(trained[name])
    return Likelihood(math.fsum(sums), num_tokens)


def _gradients(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Return the gradients that exist: a part of a model can be unused in a batch."""
    return ((name, one.grad) for name, one in parameters.items() if one.grad is not None)


@torch.enable_grad()
def _backward(model: Any, batch: Any, state: Any) -> tuple[float, int, Any]:
    """Compute the gradients of the mean loss of a segment. Returns: the sum of losses, the tokens, and the state."""
    model.zero_grad(set_to_none=True)
    with fast():
        output = model(batch, state)
    count = batch.num_target_tokens()
    if count:
        (output.loss_sum / count).backward()
    return float(output.nll_sum.detach()), count, output.state


def _segments(
    model: Any,
    store: TokenStore,
    reading: Reading,
    vocabulary: Vocabulary,
    device: torch.device | str,
    on_progress: Callable[[int], None] | None,
) -> Iterator[tuple[float, int]]:
    """Yield the loss and the tokens of each segment, when the parameters have the gradients of its mean loss.

    Memory keeps hidden states, not keys and values, which would be those of older weights.
    """
    attending = reading.attending(model.config)
    state: Any = None
    num_tokens = 0
    with evaluation_mode(model), _trainable(model):
        for batch in segments_of(store, reading, vocabulary.end_id, vocabulary.begin_id):
            if state is None and attending is not None:
                state = model.start(len(batch.lengths), attending, projected=False)
            nll_sum, count, state = _backward(model, batch.to(device), state)
            state = state if attending is not None else None  # without memory, segments are independent
            yield nll_sum, count
            num_tokens += count
            if on_progress is not None:
                on_progress(num_tokens)


@contextmanager
def _trainable(model: nn.Module) -> Iterator[None]:
    """Let every parameter have a gradient within the block."""
    before = [(one, one.requires_grad) for one in model.parameters()]
    model.requires_grad_(True)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for one, was in before:
            one.requires_grad_(was)


NOTE = "weights are adapted to the test text as it is read; not comparable with static figures"


class Dynamic(Scoring):
    """Dynamic evaluation as the options say.

    Args:
        options: with `dynamic`.
        generator: the model, which keeps its weights.
        group: of one process.

    Raises: ConfigError: a precision that cannot be trained, or several processes.
    """

    note = " (dynamic evaluation)"

    def __init__(self, options: task.EvaluateOptions, generator: Generator, group: Group) -> None:
        if generator.precision != "fp32":
            raise ConfigError(
                f"--dynamic changes weights, which needs fp32, but the precision is {generator.precision}; give"
                " --precision fp32."
            )
        if group.world > 1:
            raise ConfigError(
                f"--dynamic adapts one set of weights to a text in its order, but {group.world} processes were started;"
                " run it in one."
            )
        assert isinstance(options, EvaluateOptions)
        assert options.dynamic is not None
        self._options, self._generator, self._kind = options, generator, options.dynamic
        self._source: HeldText | None = None

    def _statistics(self, reading: Reading, progress: Progress) -> tuple[dict[str, Tensor], Reading]:
        options, generator = self._options, self._generator
        if self._source is None:
            text = options.dynamic_statistics
            if text is None and options.data is None and run_file(options.model) is None:
                raise ConfigError(
                    f"{options.model} is no run folder, so its training text is unknown; give --dynamic-statistics"
                    " FILE."
                )
            data, split = (None, None) if text else (options.data, "train")
            self._source = held_text(generator, options.model, text=text, data=data, split=split)
        wanted = replace(reading, lanes=STATISTICS_LANES, max_tokens=options.dynamic_tokens or 0)
        rms = gradient_rms(
            generator.single_model,
            self._source.store,
            wanted,
            generator.vocabulary,
            device=generator.device,
            on_progress=phase_progress(progress, "gradients of the training text", self._source.num_read(wanted)),
        )
        return rms, wanted

    def score(
        self, held: HeldText, reading: Reading, progress: Progress, phase: str
    ) -> tuple[Likelihood, dict[str, Any]]:
        """Score a text, and describe how.

        Raises: DataError: there is no training text. NonFiniteError: the learning rate is too high.
        """
        options, generator, length = self._options, self._generator, reading.segment_len
        rate, decay = options.dynamic_rate, options.dynamic_decay
        adaptation = Adaptation(
            kind=self._kind,
            learning_rate=Adaptation.default_rate(length) if rate is None else rate,
            decay=Adaptation.default_decay(length) if decay is None else decay,
            epsilon=options.dynamic_epsilon,
        )
        record: dict[str, Any] = {
            "note": NOTE,
            "kind": self._kind,
            "learning_rate": adaptation.learning_rate,
            "decay": adaptation.decay,
        }
        rms = None
        if self._kind == "rms":
            rms, wanted = self._statistics(reading, progress)
            assert self._source is not None
            record |= {
                "epsilon": adaptation.epsilon,
                "statistics": self._source.name,
                "statistics_tokens": self._source.num_read(wanted),
                "statistics_lanes": wanted.lanes,
            }
        found = evaluate_dynamically(
            generator.single_model,
            held.store,
            reading,
            generator.vocabulary,
            adaptation,
            rms,
            device=generator.device,
            on_progress=phase_progress(progress, phase, held.num_read(reading)),
        )
        self.lines = self.lines or _lines(record)  # of the first memory
        return found, {"dynamic": record}


def _lines(record: dict[str, Any]) -> tuple[str, str]:
    """The lines of the protocol about dynamic evaluation."""
    line = f"  dynamic    {record['kind']}, learning rate {record['learning_rate']:g}, decay {record['decay']:g}"
    if record["kind"] == "rms":
        line += (
            f", epsilon {record['epsilon']:g}, gradients of {record['statistics_tokens']:,} tokens of"
            f" {record['statistics']} in {record['statistics_lanes']} lanes"
        )
    return line, f"             {record['note']}"
