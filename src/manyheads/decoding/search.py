"""Search of one batch, or of any number of sentences split into batches; and beam search, over all sentences of a
batch at once.

The tokens of a search are stored as a tree of backpointers that is read when sentences are finished.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from manyheads.decoding.inputs_and_results import (
    Hypothesis,
    OnProgress,
    Stop,
    check_finite,
    check_stop,
    cut_batches,
    map_batches,
    padded,
)
from manyheads.decoding.search_problem import (
    RULES,
    Grammar,
    Rules,
    SearchProblem,
    SearchSteps,
    length_limits,
    run_to_end,
)
from manyheads.errors import RequestError
from manyheads.nn.kernels.topk import top_k

if TYPE_CHECKING:
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.models.protocols import Searchable

ROOT = -1


class Backpointers:
    """A tree with a node for every kept token and a pointer to its parent; a hypothesis is the number of its last node.

    A step writes only its own tokens, whatever the length of the outputs, and sentences can leave the batch without
    renumbering.
    """

    def __init__(self) -> None:
        self._parents: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._size = 0
        self._read: tuple[list[int], list[int], list[float]] = ([], [], [])

    def add(self, parents: Tensor, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Append a node for each entry; parents are node numbers or ROOT. Returns the new numbers in the same shape."""
        first, self._size = self._size, self._size + tokens.numel()
        self._parents.append(parents.flatten())
        self._tokens.append(tokens.flatten())
        self._log_probs.append(log_probs.flatten())
        return torch.arange(first, self._size, device=tokens.device).view(tokens.shape)

    def path(self, node: int) -> tuple[list[int], list[float]]:
        """Return the tokens from the root to this node and their log-probabilities."""
        if self._parents:  # nodes that were added since the last call
            self._read[0].extend(torch.cat(self._parents).tolist())
            self._read[1].extend(torch.cat(self._tokens).tolist())
            self._read[2].extend(torch.cat(self._log_probs).tolist())
            for columns in (self._parents, self._tokens, self._log_probs):
                columns.clear()
        parents, tokens, log_probs = self._read
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = parents[node]
        nodes.reverse()
        return [tokens[n] for n in nodes], [log_probs[n] for n in nodes]


@dataclass
class _Beams:
    """The sentences in the batch. Running and kept (ended) hypotheses are sorted, best first; a sum of -inf means none.

    Shape: sentence, limits, and done (collected, but still in the batch) (sentences,); sums, nodes (sentences, running
        beams); kept_* (sentences, num_beams).
    """

    sentence: Tensor
    limits: Tensor
    done: Tensor
    sums: Tensor
    nodes: Tensor
    kept_scores: Tensor
    kept_nodes: Tensor
    kept_eos: Tensor

    def select(self, lines: Tensor) -> _Beams:
        """Return these sentences only."""
        return _Beams(**{name: getattr(self, name).index_select(0, lines) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class _Candidates:
    """The best continuations of every sentence, best first. Shape: each (sentences, up to 2 x num_beams)."""

    sums: Tensor
    beams: Tensor
    tokens: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class _Harvest:
    """Finished sentences: their final beams after `length` tokens (for a sentence without any continuation, its best
    hypothesis one token earlier), and whether the rules ended them.
    """

    beams: _Beams
    length: int
    earlier_sums: Tensor
    earlier_nodes: Tensor
    finished: Tensor

    def select(self, lines: Tensor) -> _Harvest:
        """Return these sentences only."""
        sums, nodes, finished = (x[lines] for x in (self.earlier_sums, self.earlier_nodes, self.finished))
        return _Harvest(self.beams.select(lines), self.length, sums, nodes, finished)


@dataclass(frozen=True)
class _Step:
    """A step whose results have not been read: the sentences that it finished, whether one is NaN, all beams then."""

    now: Tensor
    is_nan: Tensor
    harvest: _Harvest


@torch.no_grad()
def beam_search_steps(problem: SearchProblem) -> SearchSteps:
    """Search every sentence with num_beams running hypotheses.

    A step considers the 2 x num_beams best continuations of each sentence. EOS among the first num_beams of them ends a
    hypothesis; the best num_beams continuations that are not EOS stay running. At its limit a sentence stops, and its
    running hypotheses count as cut. With our rules, cut hypotheses are ranked after all ended ones, so they are
    returned only if too few ended. `problem.rules` computes scores and decides when a sentence is finished. Finished
    sentences leave the batch together (see `SearchProblem.leave_now`).

    Yields: see `SearchSteps`; for each sentence 1 to num_return_sequences hypotheses.
    Raises: SearchStopped: the hook returned true. NonFiniteError: the model gives NaN.
    """
    constraints, num_beams = problem.constraints(), problem.settings.num_beams
    backpointers = Backpointers()
    beams = _first_beams(problem)
    state = problem.model.start(problem.source, problem.source_lengths)
    tokens, length = problem.prompt(), len(problem.prefix)
    history = tokens[:, 1:] if constraints.needs_history or problem.grammar is not None else None
    shortest, longest = problem.range_of(problem.limits)
    unread: list[_Step] = []
    while True:
        check_stop(problem.stop)
        log_probs, state = problem.model.step(tokens, state)
        allowed = problem.allowed(history, beams.sentence, beams.limits)
        adjusted = constraints.apply(log_probs, history, length, allowed)
        length += 1
        if length >= shortest:
            problem.last_step(log_probs, adjusted, beams.limits <= length)
        found = _candidates(log_probs, adjusted, beams.sums, num_beams)
        earlier_sums, earlier_nodes = beams.sums[:, 0], beams.nodes[:, 0]
        is_eos = found.tokens == problem.eos_id
        _keep_ended(problem, beams, found, is_eos, length)
        rows, tokens = _go_on(backpointers, beams, found, is_eos, num_beams)
        best = beams.sums[:, 0]
        finished = problem.rules.finished(beams.kept_scores, found.sums[:, 0], best, length, beams.limits)
        live = ~beams.done
        now = live & (finished | (beams.limits <= length) | best.isneginf())
        beams.done = beams.done | now
        is_nan = (live & found.sums[:, 0].isnan()).any()
        unread.append(_Step(now, is_nan, _Harvest(replace(beams), length, earlier_sums, earlier_nodes, finished)))
        num_done = 0
        ended: list[tuple[int, list[Hypothesis]]] = []
        if problem.reads_now(length, longest):
            *numbers, num_done = torch.stack(
                [x for step in unread for x in (step.now.sum(), step.is_nan)] + [beams.done.sum()]
            ).tolist()
            for step, num_now, num_nan in zip(unread, numbers[::2], numbers[1::2], strict=True):
                check_finite(bool(num_nan), step.harvest.length)
                if num_now:
                    ended += _hypotheses(problem, backpointers, step.harvest.select(step.now.nonzero()[:, 0]))
            unread.clear()
        dropped = yield ended
        if dropped:
            beams.done = beams.done | problem.marks(beams.sentence, dropped)
        if dropped or problem.leave_now(num_done, len(now)):
            on = (~beams.done).nonzero()[:, 0]
            if not on.numel():
                return
            beams, rows, tokens = beams.select(on), rows[on], tokens[on]
            shortest, longest = problem.range_of(beams.limits)
        tokens = tokens.view(-1, 1)
        if history is not None:
            history = torch.cat([history[rows.flatten()], tokens], 1)
        state = state.reorder(rows)


def _first_beams(problem: SearchProblem) -> _Beams:
    sentences, device = problem.source.size(0), problem.source.device
    none_yet = torch.full((sentences, problem.settings.num_beams), -torch.inf, device=device)
    return _Beams(
        sentence=torch.arange(sentences, device=device),
        limits=problem.limits,
        done=torch.zeros(sentences, dtype=torch.bool, device=device),
        sums=torch.zeros(sentences, 1, device=device),
        nodes=torch.full((sentences, 1), ROOT, device=device),
        kept_scores=none_yet,
        kept_nodes=torch.full_like(none_yet, ROOT, dtype=torch.int64),
        kept_eos=torch.zeros_like(none_yet),
    )


def _candidates(log_probs: Tensor, adjusted: Tensor, sums: Tensor, num_beams: int) -> _Candidates:
    """Return the 2 x num_beams best continuations of each sentence."""
    (sentences, beams), vocab_size = sums.shape, adjusted.size(-1)
    top, place = top_k(adjusted, min(2 * num_beams, beams * vocab_size), sums)
    parents = torch.div(place, vocab_size, rounding_mode="floor")
    return _Candidates(
        sums=top,
        beams=parents,
        tokens=place - parents * vocab_size,
        log_probs=log_probs.view(sentences, -1).gather(1, place),
    )


def _keep_ended(problem: SearchProblem, beams: _Beams, found: _Candidates, is_eos: Tensor, length: int) -> None:
    """Add the hypotheses that end in this step to the kept ones."""
    num_beams = beams.kept_scores.size(1)
    ended = is_eos[:, :num_beams]
    scores = problem.rules.score(found.sums[:, :num_beams], length).masked_fill(~ended, -torch.inf)
    nodes = beams.nodes.gather(1, found.beams[:, :num_beams])
    beams.kept_scores, place = torch.cat([beams.kept_scores, scores], 1).topk(num_beams)
    beams.kept_nodes = torch.cat([beams.kept_nodes, nodes], 1).gather(1, place)
    beams.kept_eos = torch.cat([beams.kept_eos, found.log_probs[:, :num_beams]], 1).gather(1, place)


def _go_on(
    backpointers: Backpointers, beams: _Beams, found: _Candidates, is_eos: Tensor, num_beams: int
) -> tuple[Tensor, Tensor]:
    """Make the best continuations that are not EOS the running hypotheses.

    Returns: the old row and the new token of each, both (sentences, beams).
    """
    sentences, old_beams = beams.sums.shape
    running = found.sums.masked_fill(is_eos, -torch.inf)
    beams.sums, place = running.topk(min(num_beams, running.size(1)))
    parents, tokens = found.beams.gather(1, place), found.tokens.gather(1, place)
    beams.nodes = backpointers.add(beams.nodes.gather(1, parents), tokens, found.log_probs.gather(1, place))
    first_rows = torch.arange(0, sentences * old_beams, old_beams, device=parents.device)
    return parents + first_rows[:, None], tokens


def _hypotheses(
    problem: SearchProblem, backpointers: Backpointers, harvest: _Harvest
) -> list[tuple[int, list[Hypothesis]]]:
    """Read the backpointers and build the lists of hypotheses. Returns: (sentence, hypotheses) of each."""
    count = problem.settings.num_return_sequences
    results = []
    beams, length = harvest.beams, harvest.length
    cut_scores = problem.rules.score_cut(beams.sums, length).tolist()
    competes = (~harvest.finished & problem.rules.cut_competes).tolist()
    stuck_scores = problem.rules.score(harvest.earlier_sums, max(length - 1, 1)).tolist()
    kept = (beams.kept_scores.tolist(), beams.kept_nodes.tolist(), beams.kept_eos.tolist())
    running, earlier = beams.nodes.tolist(), harvest.earlier_nodes.tolist()
    for line, sentence in enumerate(beams.sentence.tolist()):
        found: list[Hypothesis] = []
        ranked = list(zip(*(column[line] for column in kept), strict=True))
        ranked += [(score, node, None) for score, node in zip(cut_scores[line], running[line], strict=True)]
        if competes[line]:
            ranked.sort(key=lambda one: -one[0])
        for score, node, eos in ranked:
            if score > -torch.inf and len(found) < count:
                found.append(_hypothesis(problem, backpointers, node, score, eos))
        if not found:
            found.append(_hypothesis(problem, backpointers, earlier[line], stuck_scores[line]))
        results.append((sentence, found))
    return results


def _hypothesis(
    problem: SearchProblem, backpointers: Backpointers, node: int, score: float, eos: float | None = None
) -> Hypothesis:
    ids, log_probs = backpointers.path(node)
    ending = [] if eos is None else [eos]
    forced = [0.0] * len(problem.prefix)
    return Hypothesis([*problem.prefix, *ids], score, forced + log_probs + ending, eos is not None)


class Candidates(Protocol):
    """The vocabulary of one search: some of the ids, of which each has a number."""

    def restrict(self, model: Searchable) -> Searchable:
        """The model with the candidates as its target vocabulary. Raises: RequestError: it cannot be restricted."""

    def place(self, token: int) -> int:
        """The candidate's number of a real id that is among them."""

    def settings(self, settings: DecodingSettings) -> DecodingSettings:
        """The settings with the candidates' numbers in place of real ids."""

    def real(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses with real ids."""


class Shortlist(Protocol):
    """Restricts a search to the words that can translate a batch. vocabulary: digest of the tokenizer of its ids."""

    @property
    def vocabulary(self) -> str: ...

    def of_batch(self, source: Tensor, always: Sequence[int]) -> Candidates:
        """The candidates of a batch. always: target ids that are among them, such as EOS."""


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
    if settings.num_beams > 1:
        steps = beam_search_steps(problem)
    else:
        from manyheads.decoding.greedy_and_sampling import greedy_and_sampling_steps

        steps = greedy_and_sampling_steps(problem)
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
