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

__all__ = ["single_search"]


class _Choose(Protocol):
    """Picks each row's next token from (rows, vocab_size) log-probabilities; step counts from 0. Returns (rows,)."""

    def __call__(self, log_probs: Tensor, sentence: Tensor, step: int) -> Tensor: ...


@dataclass
class _Rows:
    """What is known of each path. A path never branches, so what it said is a row of columns, one a step.

    Shape: sentence, limits (sentences,); sums, lengths, over (sentences, paths); tokens, log_probs: (rows, 1) each.
    """

    sentence: Tensor
    limits: Tensor
    sums: Tensor
    lengths: Tensor
    over: Tensor
    tokens: list[Tensor]
    log_probs: list[Tensor]

    def select(self, lines: Tensor, rows: Tensor) -> _Rows:
        """These sentences only; rows: those of their paths."""
        sentence, limits, sums, lengths, over = (
            column.index_select(0, lines) for column in (self.sentence, self.limits, self.sums, self.lengths, self.over)
        )
        tokens, log_probs = ([torch.cat(steps, 1).index_select(0, rows)] for steps in (self.tokens, self.log_probs))
        return _Rows(sentence, limits, sums, lengths, over, tokens, log_probs)


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
    harvest = []
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
        tokens = choose(adjusted, rows.sentence, length - 1 - len(task.prefix))[:, None]
        gained = adjusted.gather(1, tokens)
        _advance(task, rows, tokens, gained, gained if adjusted is log_probs else log_probs.gather(1, tokens))
        if length >= shortest:
            rows.over |= (rows.limits <= length)[:, None]
        done = rows.over.all(1)
        num_done, is_nan = torch.stack([done.sum(), rows.sums.isnan().any()]).tolist()
        task.check_finite(bool(is_nan), length)
        if history is not None:
            history = torch.cat([history, tokens], 1)
        if task.leave_now(num_done, len(done)):
            out, on = (lines.nonzero()[:, 0] for lines in (done, ~done))
            out_rows, on_rows = (lines[:, None] * paths + torch.arange(paths, device=on.device) for lines in (out, on))
            harvest.append(rows.select(out, out_rows.flatten()))
            if not on.numel():
                return _hypotheses(task, harvest)
            rows = rows.select(on, on_rows.flatten())
            shortest = int(rows.limits.min())
            state, tokens = state.reorder(on_rows), tokens[on_rows.flatten()]
            history = None if history is None else history[on_rows.flatten()]


def _first_rows(task: Task, paths: int) -> _Rows:
    sentences, device = task.source.size(0), task.source.device
    sums = torch.zeros(sentences, paths, device=device)
    return _Rows(
        sentence=torch.arange(sentences, device=device),
        limits=task.limits,
        sums=sums,
        lengths=torch.full_like(sums, len(task.prefix), dtype=torch.int64),
        over=sums.bool(),
        tokens=[],
        log_probs=[],
    )


def _advance(task: Task, rows: _Rows, tokens: Tensor, gained: Tensor, log_probs: Tensor) -> None:
    """Append the chosen tokens to the paths that are not over. tokens, gained, log_probs: (rows, 1).

    gained: what the search counts; log_probs: what the model says.
    """
    rows.tokens.append(tokens)
    rows.log_probs.append(log_probs)
    tokens, gained = tokens.view(rows.sums.shape), gained.view(rows.sums.shape)
    none = rows.over | gained.isneginf()  # a path with no token left ends without one
    rows.sums = torch.where(none, rows.sums, rows.sums + gained)
    rows.lengths = rows.lengths + ~none
    rows.over = none | (tokens == task.eos_id)


def _hypotheses(task: Task, harvest: list[_Rows]) -> list[list[Hypothesis]]:
    """Read the columns: the one place where paths become lists."""
    results: list[list[Hypothesis]] = [[] for _ in range(task.source.size(0))]
    prefix = list(task.prefix)
    for rows in harvest:
        said = zip(*(torch.cat(steps, 1).tolist() for steps in (rows.tokens, rows.log_probs)), strict=True)
        for sentence, *lines in zip(rows.sentence.tolist(), rows.sums.tolist(), rows.lengths.tolist(), strict=True):
            for total, length in zip(*lines, strict=True):
                ids, log_probs = (column[: length - len(prefix)] for column in next(said))
                score = float(task.rules.score(torch.tensor(total), max(length, 1)))
                ended = ids[-1:] == [task.eos_id]
                all_log_probs = [0.0] * len(prefix) + log_probs
                results[sentence].append(Hypothesis(prefix + ids[: len(ids) - ended], score, all_log_probs, ended))
            results[sentence].sort(key=lambda hypothesis: -hypothesis.score)
    return results
