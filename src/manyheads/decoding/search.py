"""Search of one batch, or of any number of sentences split into batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from manyheads.decoding.beam import beam_search_steps
from manyheads.decoding.greedy_and_sampling import greedy_and_sampling_steps
from manyheads.decoding.hypothesis import Hypothesis, Stop
from manyheads.decoding.search_problem import (
    RULES,
    Grammar,
    Rules,
    SearchProblem,
    SearchSteps,
    length_limits,
    run_to_end,
)
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.shortlist import Candidates, Shortlist
from manyheads.decoding.text_ids import OnProgress, cut_batches, map_batches, padded
from manyheads.errors import RequestError
from manyheads.models.protocols import Searchable

__all__ = ["run_to_end", "search_all", "search_steps"]


def search_steps(
    model: Searchable,
    source: Tensor,
    source_lengths: Tensor,
    settings: DecodingSettings,
    *,
    pad_id: int,
    bos_id: int,
    eos_id: int,
    indices: Sequence[int] | None = None,
    rules: Rules | None = None,
    grammar: Grammar | None = None,
    stop: Stop | None = None,
    report_early: bool = False,
    shortlist: Shortlist | None = None,
) -> SearchSteps:
    """Return the search of one batch as a generator of steps: greedy (num_beams 1), with a beam, or by sampling.

    `run_to_end` takes all steps and returns the hypotheses.

    Args:
        model: a model with `start` and `step`; it should be in evaluation mode.
        source: (sentences, source_len) ids padded on the right, each row tokens + EOS, on the model's device.
        source_lengths: (sentences,), EOS included.
        settings: options of the search.
        pad_id: never produced.
        bos_id: the decoder's first input; never produced.
        eos_id: ends a hypothesis.
        indices: a number for each sentence, for sampling; default 0, 1, 2 ...
        rules: scores and stopping of beams; default those of the settings.
        grammar: the permitted outputs; default all.
        stop: called before each step.
        report_early: yield each sentence in the step that finishes it, not when it leaves the batch.
        shortlist: restricts the vocabulary to candidates for the batch; default all of it.

    Yields: see `SearchSteps`; for each sentence 1 to num_return_sequences hypotheses, best first.
    Raises: SearchStopped: `stop` returned true. NonFiniteError: the model gives NaN. RequestError: a shortlist together
        with a grammar, or for a model that cannot use one.
    """
    limits = length_limits(source_lengths, settings, model.max_len)
    candidates: Candidates | None = None
    if shortlist is not None:
        if grammar is not None:
            raise RequestError("a grammar needs the whole vocabulary; leave the shortlist out.")
        candidates = shortlist.of_batch(source, [pad_id, bos_id, eos_id, *settings.forced_prefix_ids])
        model, settings = candidates.restrict(model), candidates.settings(settings)
        pad_id, bos_id, eos_id = map(candidates.place, (pad_id, bos_id, eos_id))
    problem = SearchProblem(
        model=model,
        source=source,
        source_lengths=source_lengths,
        limits=limits,
        indices=range(source.size(0)) if indices is None else indices,
        settings=settings,
        pad_id=pad_id,
        bos_id=bos_id,
        eos_id=eos_id,
        rules=RULES[settings.rules](settings) if rules is None else rules,
        grammar=None if grammar is None else grammar.of(source, source_lengths),
        stop=stop,
        report_early=report_early,
    )
    steps = beam_search_steps(problem) if settings.num_beams > 1 else greedy_and_sampling_steps(problem)
    return steps if candidates is None else _with_real_ids(steps, candidates)


def _with_real_ids(steps: SearchSteps, candidates: Candidates) -> SearchSteps:
    """The same steps; their hypotheses have the ids that the candidates stand for."""
    dropped: Collection[int] | None = None
    while True:
        try:
            finished = steps.send(dropped)
        except StopIteration:
            return
        dropped = yield [(sentence, candidates.real(hypotheses)) for sentence, hypotheses in finished]


def search_all(
    model: Searchable,
    sources: Sequence[Sequence[int]],
    settings: DecodingSettings,
    *,
    pad_id: int,
    bos_id: int,
    eos_id: int,
    device: torch.device | str = "cpu",
    indices: Sequence[int] | None = None,
    grammar: Grammar | None = None,
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
    shortlist: Shortlist | None = None,
) -> list[list[Hypothesis]]:
    """Search any number of sentences: sort by length, split into batches of `settings.max_tokens`, restore the order.

    Args:
        sources: ids of each sentence, EOS included.
        indices: a number for each sentence, for sampling; default 0, 1, 2 ...
        on_progress: called after each batch with the number of finished sentences.
        device: the model's device. All other arguments as for `search_steps`.

    Returns: the hypotheses of each sentence, in the order of `sources`.
    Raises: as `search_steps`.
    """
    rows = settings.num_return_sequences if settings.do_sample else settings.num_beams

    def search(batch: list[int]) -> list[list[Hypothesis]]:
        steps = search_steps(
            model,
            *padded([sources[place] for place in batch], pad_id, device),
            settings,
            pad_id=pad_id,
            bos_id=bos_id,
            eos_id=eos_id,
            indices=batch if indices is None else [indices[place] for place in batch],
            grammar=grammar,
            stop=stop,
            shortlist=shortlist,
        )
        return run_to_end(steps)

    return map_batches(search, cut_batches([len(ids) for ids in sources], settings.max_tokens, rows), on_progress)
