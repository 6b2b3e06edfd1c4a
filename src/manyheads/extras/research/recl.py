"""`evaluate --recl`: the relative effective context length of several models (Dai et al. 2019, appendix C)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyheads.data.progress import Progress, telling
from manyheads.decoding.generator import Generator
from manyheads.distributed.process import refuse_ranks
from manyheads.errors import ConfigError
from manyheads.evaluation.perplexity import show_perplexity
from manyheads.evaluation.reading import Reading
from manyheads.extras.research.effective_context import LEAST_GAIN, losses_by_context, relative_lengths
from manyheads.extras.research.text_task.options import EvaluateOptions
from manyheads.tasks.report import TextReport
from manyheads.tasks.text.held_out import HeldText, held_text

__all__ = ["ReclReport", "evaluate_recl"]

_LONGEST = 1000


@dataclass(frozen=True)
class ReclReport(TextReport):
    """See `tasks.report.Report`. results: a record for each model. protocol: what the figures depend on."""

    results: list[dict[str, Any]]
    protocol: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """See `Report.to_json`."""
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


def evaluate_recl(options: EvaluateOptions, show: Progress) -> ReclReport:
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
                told=telling(show, f"reading with model {number}", _num_tokens(options, held), 0),
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
