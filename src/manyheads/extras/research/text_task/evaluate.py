"""`evaluate` of language models: as the task does it, an experiment of this extra, or several models on one text.

Several models are compared by a paired bootstrap over the parts of the text, and the passages that differ most are
shown; or, with `--recl`, by their relative effective context length: up to which more context helps.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 4.3 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.lines import Progress, phase_progress
from manyheads.data.settings import DUPLICATION
from manyheads.decoding.generator import Generator
from manyheads.distributed.process import refuse_ranks
from manyheads.errors import ConfigError, DataError, refuse_nan
from manyheads.evaluation.likelihood import bits_per, evaluation_mode, token_losses
from manyheads.evaluation.reading import Reading, perplexity_of, show_perplexity
from manyheads.extras.research.comparison import (
    PAGE_EXAMPLES,
    Comparison,
    Example,
    letters,
    most_different,
    paired_losses,
)
from manyheads.extras.research.dynamic import Dynamic
from manyheads.extras.research.hash_rounds import evaluate_hash_rounds
from manyheads.tasks.held_out import own_data, run_file, task_of_folder
from manyheads.tasks.language_modelling.evaluate import HeldText, held_text, readings_of
from manyheads.tasks.language_modelling.evaluate import evaluate as evaluate_text
from manyheads.tasks.report import Report, TextReport, machine_lines, model_record

if TYPE_CHECKING:
    from manyheads.data.store import TokenStore
    from manyheads.extras.research.text_task.options import EvaluateOptions
    from manyheads.text.vocabulary import Vocabulary


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


LEAST_DOCUMENTS = 30
"""With fewer documents, the parts of the paired bootstrap are passages of equal length."""
NUM_PARTS = 200
PASSAGE_TOKENS = 64
"""Length of the passages that are shown."""


@dataclass(frozen=True)
class _Judged:
    """losses: of each token in nats, NaN where it is not scored. (tokens,)"""

    losses: NDArray[np.float64]
    reading: Reading
    record: dict[str, Any]


def compare(options: EvaluateOptions, show: Progress) -> Comparison:
    """Judge several language models on the same text.

    Raises: ConfigError: a model is of another task or vocabulary, or has another text of its own. DataError: there is
        no such text, or a model gives one of its tokens the probability 0.
    """
    refuse_ranks("evaluate of several models")
    names = [options.model, *options.others]
    for name in names:
        if task_of_folder(name) not in (None, "text", "ids"):
            raise ConfigError(f"{name} is no language model, but {names[0]} is; compare models of one task.")
    if options.text is None and options.data is None:
        _check_own_texts(names)
    judged: list[_Judged] = []
    held: HeldText | None = None
    vocabulary: Vocabulary | None = None
    for number, name in enumerate(names, 1):
        show(f"loading model {number}", 0, 0)
        generator = options.run_on.load(Generator.from_pretrained, name)
        if held is None or vocabulary is None:
            held = held_text(generator, name, text=options.text, data=options.data, split=options.split)
            vocabulary = generator.vocabulary
        elif generator.vocabulary.digest != vocabulary.digest:
            raise ConfigError(
                f"{name} has another vocabulary ({generator.vocabulary.kind}) than {names[0]} ({vocabulary.kind}), so"
                " their tokens are not the same; evaluate each by itself on --text and compare bits a byte."
            )
        judged.append(_judge(replace(options, model=name, others=(), page=None, differences=10), generator, held,
                             phase_progress(show, f"scoring tokens, model {number}", len(held.store), 0)))  # fmt: skip
    assert held is not None
    assert vocabulary is not None
    return _report(options, names, judged, held, vocabulary)


def _check_own_texts(names: list[str]) -> None:
    """Raises: ConfigError: a run was trained on other data than the first one."""
    path, _ = own_data(names[0], "--text FILE")
    for name in names[1:]:
        if run_file(name) is not None and own_data(name)[0] != path:
            raise ConfigError(
                f"{name} has another text ({own_data(name)[0]}) than {names[0]} ({path}); name one for all models by"
                " --text or --data."
            )


def _judge(options: EvaluateOptions, generator: Generator, held: HeldText, on_progress: Any) -> _Judged:
    [reading] = readings_of(options)
    with generator.runner.inference():
        losses = token_losses(
            generator.model, held.store, reading, generator.vocabulary, device=generator.device, on_progress=on_progress
        )
    if infinite := int(np.isinf(losses).sum()):
        raise DataError(
            f"{options.model} gives {infinite:,} of the tokens the probability 0, so its mean loss is infinite; leave"
            " it out, or evaluate it by itself."
        )
    return _Judged(losses, reading, model_record(options.model, generator.model, generator.device, generator.precision))


def _report(
    options: EvaluateOptions, names: list[str], judged: list[_Judged], held: HeldText, vocabulary: Vocabulary
) -> Comparison:
    is_scored = np.all([np.isfinite(one.losses) for one in judged], axis=0)
    if not is_scored.any():
        raise DataError(f"No token of {held.name} is scored by all models; give a longer text.")
    bounds, unit = _parts(held, len(is_scored))
    scores = paired_losses(*_sums(judged, is_scored, bounds))
    nats = [one.value for one in scores]
    figures = {"perplexity": [show_perplexity(perplexity_of(one), 3) for one in nats]}
    if vocabulary.is_text and is_scored.sum() >= len(held.store) - 1:
        figures["bits/byte"] = [f"{bits_per(one * int(is_scored.sum()), held.counts['bytes']):.4f}" for one in nats]
    tokens = int(is_scored.sum())
    protocol = {
        "data": held.name,
        "tokens": tokens,
        "unit": vocabulary.kind,
        "vocabulary": vocabulary.digest,
        "parts": {"number": len(bounds) - 1, "unit": unit},
        "models": [{**one.record, "reading": vars(one.reading)} for one in judged],
    }
    lines = [f"  data       {held.name}", f"  scored     {tokens:,} tokens by all models; unit {vocabulary.kind}"]
    for letter, one in zip(letters(names), judged, strict=True):
        memory = "the model's" if one.reading.memory_len is None else f"{one.reading.memory_len:,}"
        lines.append(
            f"  {letter:<9}  {one.record['parameters']:,} parameters, segment {one.reading.segment_len:,}, memory"
            f" {memory}, {one.reading.lanes:,} lanes, documents {one.reading.documents}"
        )
    return Comparison(
        models=names,
        scores={"nats/token": scores},
        figures=figures,
        notes=[
            scores[0].signature,
            f"±: 95% interval; p: paired bootstrap over {len(bounds) - 1:,} {unit} against A, * below 0.05",
        ],
        examples=_passages(options, judged, is_scored, held, vocabulary),
        example_score="nats of the passage",
        smaller_is_better=True,
        num_shown=options.differences,
        protocol=protocol,
        protocol_lines=[*lines, *machine_lines(judged[0].record)],
        page=options.page,
    )


def _parts(held: HeldText, num_tokens: int) -> tuple[NDArray[np.int64], str]:
    """Return the positions where the parts of the text begin, and its end; and the kind of parts: documents, or
    passages of equal length."""
    ends = held.store.first(num_tokens).offsets
    if len(ends) > LEAST_DOCUMENTS:
        return ends, "documents"
    number = max(1, min(NUM_PARTS, num_tokens // PASSAGE_TOKENS))
    return np.linspace(0, num_tokens, number + 1).astype(np.int64), f"passages of {num_tokens // number:,} tokens"


def _sums(
    judged: list[_Judged], is_scored: NDArray[np.bool_], bounds: NDArray[np.int64]
) -> tuple[list[NDArray[np.float64]], NDArray[np.int64]]:
    """Losses of the parts for each model, and the number of tokens; parts without a scored token are left out."""
    counts = np.diff(np.concatenate([[0], np.cumsum(is_scored)])[bounds]).astype(np.int64)
    sums = [np.diff(np.concatenate([[0.0], np.cumsum(np.where(is_scored, one.losses, 0.0))])[bounds]) for one in judged]
    return [one[counts > 0] for one in sums], counts[counts > 0]


def _passages(
    options: EvaluateOptions,
    judged: list[_Judged],
    is_scored: NDArray[np.bool_],
    held: HeldText,
    vocabulary: Vocabulary,
) -> list[Example]:
    """The passages whose losses differ most."""
    bounds = np.append(np.arange(0, len(is_scored), PASSAGE_TOKENS), len(is_scored)).astype(np.int64)
    sums = [np.add.reduceat(np.where(is_scored, one.losses, 0.0), bounds[:-1]) for one in judged]
    found = []
    for place in most_different(sums, max(PAGE_EXAMPLES if options.page else 0, options.differences)):
        ids = held.store.ids[bounds[place] : bounds[place + 1]].tolist()
        text = vocabulary.decode(ids) if vocabulary.is_text else " ".join(map(str, ids))
        found.append(Example(f"token {bounds[place]:,}", "", text, (), tuple(float(one[place]) for one in sums)))
    return found


def evaluate(options: EvaluateOptions, show: Progress) -> Report | None:
    """See `tasks.language_modelling.evaluate.evaluate`."""
    if options.others:
        return compare(options, show)
    if options.data == DUPLICATION:
        raise ConfigError(f"{options.model} is not a run on the {DUPLICATION}, so seed and length are unknown.")
    if options.recl:
        return evaluate_recl(options, show)
    if options.num_hashes:
        return evaluate_hash_rounds(options, show)
    if options.dynamic is None:
        return evaluate_text(options, show)
    # One set of weights can follow only one lane of the text.
    return evaluate_text(replace(options, lanes=1 if options.lanes is None else options.lanes), show, Dynamic)
