"""Greedy search and sampling: one path at a time, no competition between rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.sampling import Sampler
from manyheads.decoding.task import Task
from manyheads.decoding.top import likeliest
from manyheads.decoding.trail import ROOT, Trail

__all__ = ["single_search"]


class _Choose(Protocol):
    """Picks each row's next token from (rows, vocab_size) log-probabilities; step counts from 0. Returns (rows,)."""

    def __call__(self, log_probs: Tensor, sentence: Tensor, step: int) -> Tensor: ...


@dataclass
class _Rows:
    """What is known of each path. Shape: sentence, limits (sentences,); all others (sentences, paths)."""

    sentence: Tensor
    limits: Tensor
    sums: Tensor
    nodes: Tensor
    eos: Tensor
    lengths: Tensor
    ended: Tensor
    over: Tensor

    def select(self, lines: Tensor) -> _Rows:
        """These sentences only."""
        return _Rows(**{name: getattr(self, name).index_select(0, lines) for name in self.__dataclass_fields__})


def _likeliest(log_probs: Tensor, sentence: Tensor, step: int) -> Tensor:
    return likeliest(log_probs)


@torch.no_grad()
def single_search(task: Task) -> list[list[Hypothesis]]:
    """Follow the likeliest token, or with `do_sample` draw num_return_sequences paths for each sentence.

    A path is over when it says EOS, reaches its limit, or has no token left that is not forbidden; a sentence is done
    when all its paths are over, and leaves the batch along with others (see `Task.leave_now`).

    Returns: for each sentence its hypotheses, best first.
    Raises: SearchStopped: the hook said yes. NonFiniteError: the model gives NaN.
    """
    constraints, settings = task.constraints(), task.settings
    paths = settings.num_return_sequences
    choose: _Choose = Sampler(settings, task.limits, task.indices) if settings.do_sample else _likeliest
    trail, harvest = Trail(), []
    rows = _first_rows(task, paths)
    state = task.model.start(task.source, task.source_lengths)
    tokens, length = task.prompt(), len(task.prefix)
    history: Tensor | None = None
    shortest = int(task.limits.min())
    if paths > 1:
        state = state.reorder(rows.sentence[:, None].expand(-1, paths))
        tokens = tokens.repeat_interleave(paths, 0)
    if constraints.needs_history or task.grammar is not None:
        history = tokens[:, 1:]
    while True:
        task.check_stop()
        log_probs, state = task.model.step(tokens, state)
        allowed = task.allowed(history, rows.sentence, rows.limits)
        adjusted = constraints.apply(log_probs, history, length, allowed)
        length += 1
        if length >= shortest:
            task.last_step(log_probs, adjusted, rows.limits <= length)
        chosen = choose(adjusted, rows.sentence, length - 1 - len(task.prefix))[:, None]
        gained = adjusted.gather(1, chosen)
        is_nan = (gained.isnan().view(rows.over.shape) & ~rows.over).any()
        _advance(task, trail, rows, chosen, gained, log_probs.gather(1, chosen), length)
        done = rows.over.all(1)
        num_done, num_nan = torch.stack([done.sum(), is_nan]).tolist()
        task.check_finite(bool(num_nan), length)
        if history is not None:
            history = torch.cat([history, chosen], 1)
        if task.leave_now(num_done, len(done)):
            out, on = done.nonzero()[:, 0], (~done).nonzero()[:, 0]
            harvest.append(rows.select(out))
            if not on.numel():
                return _hypotheses(task, trail, harvest)
            rows = rows.select(on)
            shortest = int(rows.limits.min())
            old_rows = on[:, None] * paths + torch.arange(paths, device=on.device)
            state, chosen = state.reorder(old_rows), chosen[old_rows.flatten()]
            history = None if history is None else history[old_rows.flatten()]
        tokens = chosen


def _first_rows(task: Task, paths: int) -> _Rows:
    sentences, device = task.source.size(0), task.source.device
    zeros = torch.zeros(sentences, paths, device=device)
    return _Rows(
        sentence=torch.arange(sentences, device=device),
        limits=task.limits,
        sums=zeros,
        nodes=torch.full_like(zeros, ROOT, dtype=torch.int64),
        eos=zeros,
        lengths=torch.full_like(zeros, len(task.prefix), dtype=torch.int64),
        ended=zeros.bool(),
        over=zeros.bool(),
    )


def _advance(
    task: Task, trail: Trail, rows: _Rows, chosen: Tensor, gained: Tensor, log_probs: Tensor, length: int
) -> None:
    """Append the chosen tokens to the paths that are not over. chosen, gained, log_probs are (rows, 1)."""
    chosen, gained, log_probs = (column.view(rows.sums.shape) for column in (chosen, gained, log_probs))
    stuck = gained.isneginf()
    ends = ~rows.over & ~stuck & (chosen == task.eos_id)
    grows = ~rows.over & ~stuck & ~ends
    nodes = trail.add(rows.nodes, chosen, log_probs)
    rows.nodes = torch.where(grows, nodes, rows.nodes)
    rows.eos = torch.where(ends, log_probs, rows.eos)
    rows.sums = torch.where(ends | grows, rows.sums + gained, rows.sums)
    rows.lengths = rows.lengths.masked_fill(ends | grows, length)
    rows.ended = rows.ended | ends
    rows.over = rows.over | stuck | ends | (rows.limits <= length)[:, None]


def _hypotheses(task: Task, trail: Trail, harvest: list[_Rows]) -> list[list[Hypothesis]]:
    """Read the trail: the one place where paths become lists."""
    results: list[list[Hypothesis]] = [[] for _ in range(task.source.size(0))]
    prefix = list(task.prefix)
    for rows in harvest:
        columns = (rows.nodes, rows.sums, rows.lengths, rows.eos, rows.ended)
        for sentence, *lines in zip(rows.sentence.tolist(), *(c.tolist() for c in columns), strict=True):
            for node, total, length, eos, ended in zip(*lines, strict=True):
                ids, log_probs = trail.path(node)
                score = float(task.rules.score(torch.tensor(total), max(length, 1)))
                ending = [eos] if ended else []
                all_log_probs = [0.0] * len(prefix) + log_probs + ending
                results[sentence].append(Hypothesis(prefix + ids, score, all_log_probs, ended))
            results[sentence].sort(key=lambda hypothesis: -hypothesis.score)
    return results
