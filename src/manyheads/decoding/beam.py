"""Beam search over all sentences of a batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.task import Task
from manyheads.decoding.top import top_k
from manyheads.decoding.trail import ROOT, Trail

__all__ = ["beam_search"]


@dataclass
class _Beams:
    """The sentences in the batch. Running hypotheses and kept (ended) ones are sorted, best first; -inf: none.

    Shape: sentence, limits, and done (harvested, and waiting to leave) (sentences,); sums, nodes (sentences, running
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
        """These sentences only."""
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
    """Sentences that are done: the last state of their beams, after `length` tokens; for one that found no way on, its
    best hypothesis a token earlier; and whether it was the rules that said so."""

    beams: _Beams
    length: int
    earlier_sums: Tensor
    earlier_nodes: Tensor
    finished: Tensor


@torch.no_grad()
def beam_search(task: Task) -> list[list[Hypothesis]]:
    """Search every sentence with num_beams running hypotheses.

    A step looks at the 2 x num_beams best continuations of each sentence. EOS among the first num_beams of them ends a
    hypothesis; the best num_beams that are not EOS go on. At its limit a sentence stops, and what still runs counts as
    cut: it is returned, by our rules after all that ended, only if too few ended. `task.rules` scores, and says when a
    sentence is done; it leaves the batch along with others (see `Task.leave_now`).

    Returns: for each sentence 1 to num_return_sequences hypotheses, best first.
    Raises: SearchStopped: the hook said yes. NonFiniteError: the model gives NaN.
    """
    constraints, num_beams = task.constraints(), task.settings.num_beams
    trail, harvests = Trail(), []
    beams = _first_beams(task)
    state = task.model.start(task.source, task.source_lengths)
    tokens, length = task.prompt(), len(task.prefix)
    history = tokens[:, 1:] if constraints.needs_history or task.grammar is not None else None
    shortest = int(task.limits.min())
    while True:
        task.check_stop()
        log_probs, state = task.model.step(tokens, state)
        allowed = task.allowed(history, beams.sentence, beams.limits)
        adjusted = constraints.apply(log_probs, history, length, allowed)
        length += 1
        if length >= shortest:
            task.last_step(log_probs, adjusted, beams.limits <= length)
        found = _candidates(log_probs, adjusted, beams.sums, num_beams)
        earlier_sums, earlier_nodes = beams.sums[:, 0], beams.nodes[:, 0]
        is_eos = found.tokens == task.eos_id
        _keep_ended(task, beams, found, is_eos, length)
        rows, tokens = _go_on(trail, beams, found, is_eos, num_beams)
        best = beams.sums[:, 0]
        finished = task.rules.finished(beams.kept_scores, found.sums[:, 0], best, length, beams.limits)
        live = ~beams.done
        now = live & (finished | (beams.limits <= length) | best.isneginf())
        beams.done = beams.done | now
        is_nan = (live & found.sums[:, 0].isnan()).any()
        num_now, num_done, num_nan = torch.stack([now.sum(), beams.done.sum(), is_nan]).tolist()
        task.check_finite(bool(num_nan), length)
        if num_now:
            out = now.nonzero()[:, 0]
            harvests.append(_Harvest(beams.select(out), length, earlier_sums[out], earlier_nodes[out], finished[out]))
        if task.leave_now(num_done, len(now)):
            on = (~beams.done).nonzero()[:, 0]
            if not on.numel():
                return _hypotheses(task, trail, harvests)
            beams, rows, tokens = beams.select(on), rows[on], tokens[on]
            shortest = int(beams.limits.min())
        tokens = tokens.view(-1, 1)
        if history is not None:
            history = torch.cat([history[rows.flatten()], tokens], 1)
        state = state.reorder(rows)


def _first_beams(task: Task) -> _Beams:
    sentences, device = task.source.size(0), task.source.device
    none_yet = torch.full((sentences, task.settings.num_beams), -torch.inf, device=device)
    return _Beams(
        sentence=torch.arange(sentences, device=device),
        limits=task.limits,
        done=torch.zeros(sentences, dtype=torch.bool, device=device),
        sums=torch.zeros(sentences, 1, device=device),
        nodes=torch.full((sentences, 1), ROOT, device=device),
        kept_scores=none_yet,
        kept_nodes=torch.full_like(none_yet, ROOT, dtype=torch.int64),
        kept_eos=torch.zeros_like(none_yet),
    )


def _candidates(log_probs: Tensor, adjusted: Tensor, sums: Tensor, num_beams: int) -> _Candidates:
    """The 2 x num_beams best continuations of each sentence."""
    (sentences, beams), vocab_size = sums.shape, adjusted.size(-1)
    top, place = top_k(adjusted, min(2 * num_beams, beams * vocab_size), sums)
    parents = torch.div(place, vocab_size, rounding_mode="floor")
    return _Candidates(
        sums=top,
        beams=parents,
        tokens=place - parents * vocab_size,
        log_probs=log_probs.view(sentences, -1).gather(1, place),
    )


def _keep_ended(task: Task, beams: _Beams, found: _Candidates, is_eos: Tensor, length: int) -> None:
    """Put hypotheses that end in this step among the kept ones."""
    num_beams = beams.kept_scores.size(1)
    ended = is_eos[:, :num_beams]
    scores = task.rules.score(found.sums[:, :num_beams], length).masked_fill(~ended, -torch.inf)
    nodes = beams.nodes.gather(1, found.beams[:, :num_beams])
    beams.kept_scores, place = torch.cat([beams.kept_scores, scores], 1).topk(num_beams)
    beams.kept_nodes = torch.cat([beams.kept_nodes, nodes], 1).gather(1, place)
    beams.kept_eos = torch.cat([beams.kept_eos, found.log_probs[:, :num_beams]], 1).gather(1, place)


def _go_on(trail: Trail, beams: _Beams, found: _Candidates, is_eos: Tensor, num_beams: int) -> tuple[Tensor, Tensor]:
    """Make the best continuations that are not EOS the running hypotheses.

    Returns: the old row and the new token of each. (sentences, beams) both
    """
    sentences, old_beams = beams.sums.shape
    running = found.sums.masked_fill(is_eos, -torch.inf)
    beams.sums, place = running.topk(min(num_beams, running.size(1)))
    parents, tokens = found.beams.gather(1, place), found.tokens.gather(1, place)
    beams.nodes = trail.add(beams.nodes.gather(1, parents), tokens, found.log_probs.gather(1, place))
    first_rows = torch.arange(0, sentences * old_beams, old_beams, device=parents.device)
    return parents + first_rows[:, None], tokens


def _hypotheses(task: Task, trail: Trail, harvests: list[_Harvest]) -> list[list[Hypothesis]]:
    """Read the trail: the one place where hypotheses become lists."""
    count = task.settings.num_return_sequences
    results: list[list[Hypothesis]] = [[] for _ in range(task.source.size(0))]
    for harvest in harvests:
        beams, length = harvest.beams, harvest.length
        cut_scores = task.rules.score_cut(beams.sums, length).tolist()
        competes = (~harvest.finished & task.rules.cut_competes).tolist()
        stuck_scores = task.rules.score(harvest.earlier_sums, max(length - 1, 1)).tolist()
        kept = (beams.kept_scores.tolist(), beams.kept_nodes.tolist(), beams.kept_eos.tolist())
        running, earlier = beams.nodes.tolist(), harvest.earlier_nodes.tolist()
        for line, sentence in enumerate(beams.sentence.tolist()):
            found = results[sentence]
            ranked = list(zip(*(column[line] for column in kept), strict=True))
            ranked += [(score, node, None) for score, node in zip(cut_scores[line], running[line], strict=True)]
            if competes[line]:
                ranked.sort(key=lambda one: -one[0])
            for score, node, eos in ranked:
                if score > -torch.inf and len(found) < count:
                    found.append(_hypothesis(task, trail, node, score, eos))
            if not found:
                found.append(_hypothesis(task, trail, earlier[line], stuck_scores[line]))
    return results


def _hypothesis(task: Task, trail: Trail, node: int, score: float, eos: float | None = None) -> Hypothesis:
    ids, log_probs = trail.path(node)
    ending = [] if eos is None else [eos]
    forced = [0.0] * len(task.prefix)
    return Hypothesis([*task.prefix, *ids], score, forced + log_probs + ending, eos is not None)
