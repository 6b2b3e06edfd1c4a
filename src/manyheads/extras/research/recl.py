"""`evaluate --recl`: the relative effective context length (RECL) of several models: up to which more context helps.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 4.3 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from manyheads.data.lines import Progress, phase_progress
from manyheads.decoding.generator import Generator
from manyheads.distributed.process import refuse_ranks
from manyheads.errors import ConfigError, DataError, refuse_nan
from manyheads.evaluation.likelihood import evaluation_mode
from manyheads.evaluation.reading import Reading, show_perplexity
from manyheads.tasks.language_modelling.evaluate import HeldText, held_text
from manyheads.tasks.report import TextReport

if TYPE_CHECKING:
    from manyheads.data.store import TokenStore
    from manyheads.extras.research.text_task.options import EvaluateOptions

LEAST_GAIN = 0.01
"""A longer context counts as useful if it lowers the relative perplexity by this share or more (appendix C)."""
_TOKENS_AT_ONCE = 16_384


class _Scores(Protocol):
    """A composite: `models.composites.LanguageModel`."""

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> Any: ...

    def losses_at(
        self, tokens: Tensor, columns: Tensor, targets: Tensor, lengths: Tensor | None = None, state: Any = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Recl:
    """The result for one model and one share of positions.

    length: in tokens. is_longest: context longer than that was not measured, so the length is a lower bound.
    gains: gain of each context over the next shorter one, from the second context on.
    """

    length: int
    is_longest: bool
    gains: tuple[float, ...]


@torch.no_grad()
def losses_by_context(
    model: _Scores,
    store: TokenStore,
    *,
    step: int,
    longest: int,
    attending: Any = None,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
    name: str = "The model",
) -> Tensor:
    """Return the loss in nats of some tokens, predicted from exactly c preceding tokens, for c = step, 2 step, ...

    Every `step`-th token is scored. A window of `longest` tokens begins at every `step`-th token; the model reads each
    without memory, so that a window gives one loss for each context length.

    Args:
        model: a module is put into evaluation mode during the call.
        store: the text.
        step: difference of two context lengths, and of two scored places, in tokens.
        longest: the longest context, in tokens; a multiple of `step`.
        attending: the model's context settings; None: its own.
        device: the model's device.
        on_progress: called after each batch with the number of tokens that were read.
        name: of the model, for messages.

    Returns: (longest / step, places) in float64.
    Raises: DataError: the text is not longer than the longest context. NonFiniteError: a loss is NaN.
    """
    num_lengths, num_targets = longest // step, (len(store) - 1) // step
    if num_targets < num_lengths:
        raise DataError(
            f"The text has {len(store):,} tokens, and a context of {longest:,} leaves none to predict; give a longer"
            " text, or lower --recl-longest."
        )
    ids = torch.from_numpy(store.ids[: len(store)].astype("int64"))
    found = torch.full((num_lengths, num_targets + 1), torch.nan, dtype=torch.float64)
    contexts = torch.arange(1, num_lengths + 1)
    at_once = max(1, _TOKENS_AT_ONCE // longest)
    with evaluation_mode(model):
        for first in range(0, num_targets, at_once):
            windows = torch.arange(first, min(first + at_once, num_targets))
            places = windows[:, None] * step + torch.arange(longest)  # (windows, longest)
            tokens = ids[places.clamp(max=len(ids) - 1)].to(device)
            lengths = (len(ids) - windows * step).clamp(max=longest).to(device)
            predicted = windows[:, None] + contexts  # (windows, contexts), in steps
            targets = ids[(predicted * step).clamp(max=len(ids) - 1)].to(device)
            state = None if attending is None else model.start(len(windows), attending)
            losses = model.losses_at(tokens, (contexts * step - 1).to(device), targets, lengths, state).cpu().double()
            inside = predicted <= num_targets
            refuse_nan(bool(losses[inside].isnan().any()), name)
            rows = (contexts - 1).expand_as(predicted)
            found[rows[inside], predicted[inside]] = losses[inside]
            if on_progress is not None:
                on_progress(min(first + at_once, num_targets) * step)
    return found[:, num_lengths:]


def relative_lengths(losses: Sequence[Tensor], *, step: int, hardest: float) -> list[Recl]:
    """Return the RECL of every model of a group (appendix C).

    With b(c, t) the smallest loss of any model on token t with context c, and T the share `hardest` of the tokens with
    the largest b(c, t): f_i(c, c') is the mean over T of min(b(c, t), l_i(c', t)), and the gain of model i is
    1 - exp(f_i(c, c') - f_i(c, c)). Its RECL is the first c whose gain with c' = c + step is below `LEAST_GAIN`.

    Args:
        losses: of each model, see `losses_by_context`.
        step: difference of two context lengths, in tokens.
        hardest: the share of the tokens that count, above 0 and at most 1.
    """
    num_lengths, num_places = losses[0].shape
    baseline = torch.stack([*losses]).amin(dim=0)
    count = max(1, round(hardest * num_places))
    gains: list[list[float]] = [[] for _ in losses]
    for short in range(num_lengths - 1):
        hard = baseline[short].topk(count)
        for own, of_model in zip(gains, losses, strict=True):
            relative = torch.minimum(hard.values, of_model[short + 1, hard.indices]).mean()
            own.append(float(1 - (relative - hard.values.mean()).exp()))
    found = []
    for own in gains:
        stop = next((place for place, gain in enumerate(own) if gain < LEAST_GAIN), None)
        length = step * (num_lengths if stop is None else stop + 1)
        found.append(Recl(length, stop is None, tuple(own)))
    return found


_LONGEST = 1000


@dataclass(frozen=True)
class ReclReport(TextReport):
    """See `tasks.report.Report`. results: a record for each model. protocol: what the figures depend on."""

    results: list[dict[str, Any]]
    protocol: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"results": self.results, "protocol": self.protocol}

    def to_lines(self) -> list[str]:
        """A row for each model, a column for each share of the positions; then the perplexity by context."""
        shares = self.protocol["hardest"]
        width = max(len("model"), *(len(row["model"]) for row in self.results))
        lines = ["RECL, in tokens", "model".ljust(width) + "".join(f"  {f'r = {share:g}':>9}" for share in shares)]
        for row in self.results:
            cells = (_shown(row["recl"][str(share)]) for share in shares)
            lines.append(row["model"].ljust(width) + "".join(f"  {cell:>9}" for cell in cells))
        contexts = self.protocol["contexts"]
        lines += [
            "",
            "perplexity by context",
            "context".rjust(9) + "".join(f"  {row['model']}" for row in self.results),
        ]
        for place, context in enumerate(contexts):
            cells = (f"  {show_perplexity(row['perplexity'][place], 3):>{len(row['model'])}}" for row in self.results)
            lines.append(f"{context:>9,}" + "".join(cells))
        return [
            *lines,
            "protocol",
            f"  data       {self.protocol['data']}",
            f"  scored     {self.protocol['places']:,} tokens, one in {self.protocol['step']:,}, each with"
            f" {contexts[0]:,} to {contexts[-1]:,} tokens before it and without memory",
            f"  RECL       the context at which {self.protocol['step']:,} more tokens gain less than"
            f" {self.protocol['least_gain']:.0%} over the best model's shorter context",
            "  r          the share of the tokens that count: those that are hardest with the shorter context",
        ]


def _shown(record: dict[str, Any]) -> str:
    return f">= {record['length']:,}" if record["is_longest"] else f"{record['length']:,}"


def evaluate_recl(options: EvaluateOptions, progress: Progress) -> ReclReport:
    """Measure the loss of each model by context length, then compare all of them.

    Raises: ConfigError: the models have unlike vocabularies, or one cannot read so long a context. DataError: there is
        no such text, or it is too short. NonFiniteError: a model gives NaN.
    """
    refuse_ranks("evaluate --recl")
    names = (options.model, *options.beside)
    generators = [options.run_on.load(Generator.from_pretrained, name) for name in names]
    held = held_text(generators[0], options.model, text=options.text, data=options.data, split=options.split)
    for name, generator in zip(names[1:], generators[1:], strict=True):
        if generator.vocabulary.digest != generators[0].vocabulary.digest:
            raise ConfigError(f"{name} has another vocabulary than {names[0]}; RECL compares models of one vocabulary.")
    longest = _longest(options, dict(zip(names, generators, strict=True)), held)
    losses: list[Tensor] = []
    for number, (name, generator) in enumerate(zip(names, generators, strict=True), 1):
        reading = Reading(segment_len=longest, memory_len=0, clamp_len=options.clamp_len, same_length=False)
        with generator.runner.inference():
            found = losses_by_context(
                generator.single_model,
                held.store.first(options.max_tokens) if options.max_tokens else held.store,
                step=options.recl_step,
                longest=longest,
                attending=reading.attending(generator.model.config),
                device=generator.device,
                on_progress=phase_progress(progress, f"reading with model {number}", _num_tokens(options, held), 0),
                name=name,
            )
        losses.append(found)
    records: list[dict[str, Any]] = [
        {"model": name, "perplexity": of_model.mean(dim=1).exp().tolist(), "recl": {}}
        for name, of_model in zip(names, losses, strict=True)
    ]
    for share in options.recl_hardest:
        for record, recl in zip(records, relative_lengths(losses, step=options.recl_step, hardest=share), strict=True):
            record["recl"][str(share)] = {
                "length": recl.length,
                "is_longest": recl.is_longest,
                "gains": list(recl.gains),
            }
    protocol = {
        "data": held.name,
        "places": losses[0].shape[1],
        "step": options.recl_step,
        "contexts": list(range(options.recl_step, longest + 1, options.recl_step)),
        "hardest": list(options.recl_hardest),
        "least_gain": LEAST_GAIN,
        "vocabulary": generators[0].vocabulary.digest,
    }
    return ReclReport(records, protocol)


def _num_tokens(options: EvaluateOptions, held: HeldText) -> int:
    return min(options.max_tokens or len(held.store), len(held.store))


def _longest(options: EvaluateOptions, generators: dict[str, Generator], held: HeldText) -> int:
    """The longest context: a multiple of the step, and at most what every model and the text hold."""
    step, asked = options.recl_step, options.recl_longest
    limits = {f"{name} reads": made.model.max_len for name, made in generators.items() if made.model.max_len}
    limits["the text has"] = _num_tokens(options, held) - 1
    who = min(limits, key=limits.__getitem__)
    longest = min(asked or _LONGEST, limits[who]) // step * step
    if (asked or 0) > limits[who] or longest < 2 * step:
        raise ConfigError(
            f"--recl needs contexts of {step:,} to {asked or max(2 * step, longest):,} tokens, but {who} at most"
            f" {limits[who]:,}; lower --recl-step and --recl-longest."
        )
    return longest
