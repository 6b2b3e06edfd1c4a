"""Greedy search and sampling: rows do not compete with each other.

Tokens are sampled by `draw`, with its filters; the random numbers depend on the sentence, not on its batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manyheads.decoding.inputs_and_results import Hypothesis, check_finite, check_stop
from manyheads.decoding.settings import DecodingSettings, drawing_options
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.topk import highest
from manyheads.nn.kernels.topk import top_k as largest_first
from manyheads.seeding import derive_seed

if TYPE_CHECKING:
    from manyheads.decoding.search_problem import SearchProblem, SearchSteps
    from manyheads.models.protocols import Searchable

_FIRST_WIDTH = 128
# Below this, log-probability / temperature overflows in float32, so the most probable token is taken.
_LOWEST_TEMPERATURE = 1e-30


class Sampler:
    """Samples the next token of every path by inverting the cumulative distribution.

    Path p of sentence i uses one uniform number per step from a stream that is seeded by (seed, i, p) only. So the
    samples of a sentence do not depend on its batch, the device's generator or other sentences, up to rounding in the
    model.

    Args:
        settings: the options of `draw`, seed, num_return_sequences.
        limits: (sentences,) maximum number of tokens of each sentence.
        indices: i of each sentence: its index in the whole input.
    """

    def __init__(self, settings: DecodingSettings, limits: Tensor, indices: Sequence[int]) -> None:
        self._filters = {name: getattr(settings, name) for name in drawing_options(type(settings))}
        longest, paths = int(limits.max()), settings.num_return_sequences
        numbers = np.empty((len(indices), paths, longest), dtype=np.float32)
        for line, index in enumerate(indices):
            for path in range(paths):
                generator = np.random.default_rng(derive_seed(settings.seed, "sample", index, path))
                numbers[line, path] = generator.random(longest)
        self._numbers = torch.from_numpy(numbers).to(limits.device)

    def choose(self, log_probs: Tensor, sentence: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """See `_Choose`."""
        tokens = self(log_probs, sentence, step)[:, None]
        return log_probs.gather(1, tokens), tokens

    def __call__(self, log_probs: Tensor, sentence: Tensor, step: int) -> Tensor:
        """Sample for (rows, vocab_size) log-probabilities; sentence (sentences,) indexes `indices`. Returns (rows,)."""
        numbers = self._numbers[:, :, step].index_select(0, sentence).flatten()
        return draw(log_probs, numbers, **self._filters)


def draw(log_probs: Tensor, numbers: Tensor, *filters: Any, **named: Any) -> Tensor:
    """Sample one token per row of what `filtered` leaves.

    Args:
        log_probs: (rows, vocab_size), not necessarily normalised; -inf is drawn only if a row contains nothing else.
        numbers: (rows,) uniform in [0, 1].
        filters, named: of `filtered`.
    Returns: (rows,) ids.
    """
    probs, ids = filtered(log_probs, *filters, **named)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    # Stay strictly below the total: otherwise rounding could select a token after the last one with any probability.
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.size(1) - 1)
    return (place if ids is None else ids.gather(1, place))[:, 0]


def filtered(
    log_probs: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    eta_cutoff: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Apply the filters in the order of the arguments, as transformers does, each to what the ones before it left.

    Paper: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2020, arXiv:1904.09751, sec. 3.1 (top-p): the
    smallest set of most probable tokens with a total of at least top_p; it always includes the most probable token.
    Nguyen et al. 2024, arXiv:2407.01082 (min-p): tokens with at least min_p times the highest probability. For
    typical_p and eta_cutoff see `_typical` and `_above_eta`.

    Returns: probabilities, (rows, some), not necessarily normalised, 0 for tokens that are not left; and their ids,
        None: 0, 1, 2 ...
    """
    scores, ids = log_probs / max(temperature, _LOWEST_TEMPERATURE), None
    if 0 < top_k < scores.size(1):
        scores, ids = largest_first(scores, top_k)
    if top_p < 1:
        scores, ids = _nucleus(scores, ids, top_p)
    if min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if typical_p < 1:
        scores = _typical(scores, typical_p)
    if eta_cutoff > 0:
        scores = _above_eta(scores, eta_cutoff)
    return scores.exp() if top_p < 1 else scores.softmax(-1), ids


def _nucleus(scores: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities, largest first and -inf outside the top_p set, and their ids; both (rows, some).

    The 128 most probable tokens are usually enough; all tokens are sorted only if not, or where a look would wait.
    """
    normaliser = scores.logsumexp(-1, keepdim=True)
    first = _FIRST_WIDTH if policy.can_look(scores) else scores.size(1)
    for width in (min(first, scores.size(1)), scores.size(1)):
        largest, places = largest_first(scores, width) if width < scores.size(1) else scores.sort(-1, descending=True)
        log_probs = largest - normaliser
        probs = log_probs.exp()
        before = probs.cumsum(-1) - probs
        if width == scores.size(1) or bool((before[:, -1] >= top_p).all()):
            break
    return log_probs.masked_fill(before >= top_p, -torch.inf), places if ids is None else ids.gather(1, places)


def _typical(scores: Tensor, mass: float) -> Tensor:
    """Keep the smallest set of tokens whose -log p is nearest to the entropy and whose total is at least the mass.

    Tokens of equal distance stay together. Paper: Meister et al. 2023, arXiv:2202.00666, eq. 11.
    """
    log_probs = scores.log_softmax(-1)
    distance = (-log_probs - _entropy(log_probs)).abs()
    nearest, places = distance.sort(-1)
    totals = scores.gather(-1, places).softmax(-1).cumsum(-1)
    last = (totals < mass).sum(-1, keepdim=True).clamp(max=scores.size(-1) - 1)
    return scores.masked_fill(distance > nearest.gather(-1, last), -torch.inf)


def _above_eta(scores: Tensor, epsilon: float) -> Tensor:
    """Keep tokens with a probability of at least min(epsilon, sqrt(epsilon) exp(-entropy)), and the most probable.

    Paper: Hewitt et al. 2022, arXiv:2210.15191, sec. 4, with alpha = sqrt(epsilon).
    """
    log_probs = scores.log_softmax(-1)
    eta = (math.sqrt(epsilon) * (-_entropy(log_probs)).exp()).clamp(max=epsilon)
    is_unlikely = (log_probs.exp() < eta) & (scores < scores.amax(-1, keepdim=True))
    return scores.masked_fill(is_unlikely, -torch.inf)


def _entropy(log_probs: Tensor) -> Tensor:
    """The entropy of each row in nats, (rows, 1); -inf counts as 0."""
    return -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)


_Choose = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(rows, vocab_size) log-probabilities, the sentences in the batch, the number of the step -> each row's number and
token, (rows, 1)."""


@dataclass
class _Rows:
    """The state of all paths. A path never branches, so its tokens are a list of columns, one per step.

    Shape: sentence, limits, told (reported, or of no interest any more) (sentences,); sums, missing (tokens by which
        a path is shorter than the longest), over (sentences, paths); tokens, log_probs: (rows, 1) each.
    """

    sentence: Tensor
    limits: Tensor
    told: Tensor
    sums: Tensor
    missing: Tensor
    over: Tensor
    tokens: list[Tensor]
    log_probs: list[Tensor]

    def select(self, lines: Tensor, rows: Tensor) -> _Rows:
        """Return these sentences only. rows: the rows of their paths."""
        columns = (self.sentence, self.limits, self.told, self.sums, self.missing, self.over)
        sentence, limits, told, sums, missing, over = (column.index_select(0, lines) for column in columns)
        tokens, log_probs = ([torch.cat(steps, 1).index_select(0, rows)] for steps in (self.tokens, self.log_probs))
        return _Rows(sentence, limits, told, sums, missing, over, tokens, log_probs)


@torch.no_grad()
def greedy_and_sampling_steps(problem: SearchProblem) -> SearchSteps:
    """Follow the most probable token, or with `do_sample` sample num_return_sequences paths for each sentence.

    A path ends at EOS, at its limit, or if all tokens are forbidden. A sentence is finished when all its paths have
    ended;
    finished sentences leave the batch together (see `SearchProblem.leave_now`).

    Yields: see `SearchSteps`.
    Raises: SearchStopped: the hook returned true. NonFiniteError: the model gives NaN.
    """
    constraints, settings = problem.constraints(), problem.settings
    paths = settings.num_return_sequences
    choose: _Choose = lambda log_probs, sentence, step: highest(log_probs)  # noqa: E731
    if settings.do_sample:
        choose = Sampler(settings, problem.limits, problem.indices).choose
    rows = _first_rows(problem, paths)
    state = problem.model.start(problem.source, problem.source_lengths)
    tokens, length = problem.prompt(), len(problem.prefix)
    history: Tensor | None = None
    shortest, longest = problem.range_of(problem.limits)
    if paths > 1:
        state = state.reorder(rows.sentence[:, None].expand(-1, paths))
        tokens = tokens.repeat_interleave(paths, 0)
    if constraints.needs_history or problem.grammar is not None:
        history = tokens[:, 1:]
    while True:
        check_stop(problem.stop)
        log_probs, normaliser, state = _step(problem.model, tokens, state, constraints.wants_logits)
        allowed = problem.allowed(history, rows.sentence, rows.limits)
        adjusted = constraints.apply(log_probs, history, length, allowed, normaliser)
        length += 1
        if length >= shortest:
            problem.last_step(log_probs, adjusted, rows.limits <= length)
        gained, tokens = choose(adjusted, rows.sentence, length - 1 - len(problem.prefix))
        _advance(problem, rows, tokens, gained, gained if adjusted is log_probs else log_probs.gather(1, tokens))
        if length >= shortest:
            rows.over |= (rows.limits <= length)[:, None]
        num_done, done = 0, rows.over
        if problem.reads_now(length, longest):
            done = rows.over.all(1)
            num_done, is_nan = torch.stack([done.sum(), rows.sums.isnan().any()]).tolist()
            check_finite(bool(is_nan), length)
        if history is not None:
            history = torch.cat([history, tokens], 1)
        leaving = problem.leave_now(num_done, len(done))
        ended: list[tuple[int, list[Hypothesis]]] = []
        if leaving or (problem.report_early and num_done):
            out = (done & ~rows.told).nonzero()[:, 0]
            rows.told = rows.told | done
            if out.numel():
                ended = _hypotheses(problem, rows.select(out, _rows_of(out, paths)), length)
        dropped = yield ended
        if dropped:
            rows.told = rows.told | problem.marks(rows.sentence, dropped)
            rows.over |= rows.told[:, None]
        if dropped or leaving:
            on = (~rows.told).nonzero()[:, 0]
            if not on.numel():
                return
            on_rows = _rows_of(on, paths).view(-1, paths)
            rows = rows.select(on, on_rows.flatten())
            shortest, longest = problem.range_of(rows.limits)
            state, tokens = state.reorder(on_rows), tokens[on_rows.flatten()]
            history = None if history is None else history[on_rows.flatten()]


def _step(model: Searchable, tokens: Tensor, state: Any, wants_logits: bool) -> tuple[Tensor, Tensor | float, Any]:
    """Take a step. Returns: the log-probabilities; with `wants_logits` what the logits are above them; the state."""
    if not wants_logits:
        log_probs, state = model.step(tokens, state)
        return log_probs, 0.0, state
    logits, state = model.step(tokens, state, logits=True)
    normaliser = logits.logsumexp(-1, keepdim=True)
    return logits - normaliser, normaliser, state


def _first_rows(problem: SearchProblem, paths: int) -> _Rows:
    sentences, device = problem.source.size(0), problem.source.device
    sums = torch.zeros(sentences, paths, device=device)
    return _Rows(
        sentence=torch.arange(sentences, device=device),
        limits=problem.limits,
        told=torch.zeros(sentences, dtype=torch.bool, device=device),
        sums=sums,
        missing=torch.zeros_like(sums, dtype=torch.int64),
        over=sums.bool(),
        tokens=[],
        log_probs=[],
    )


def _advance(problem: SearchProblem, rows: _Rows, tokens: Tensor, gained: Tensor, log_probs: Tensor) -> None:
    """Append the chosen tokens to the paths that have not ended. tokens, gained, log_probs: (rows, 1).

    gained: log-probabilities for the search score; log_probs: the model's log-probabilities.
    """
    rows.tokens.append(tokens)
    rows.log_probs.append(log_probs)
    tokens, gained = tokens.view(rows.sums.shape), gained.view(rows.sums.shape)
    none = rows.over | gained.isneginf()  # a path without an allowed token ends
    rows.sums = torch.where(none, rows.sums, rows.sums + gained)
    rows.missing = rows.missing + none
    rows.over = none | (tokens == problem.eos_id)


def _rows_of(lines: Tensor, paths: int) -> Tensor:
    """Return the rows of the paths of these sentences."""
    return (lines[:, None] * paths + torch.arange(paths, device=lines.device)).flatten()


def _hypotheses(problem: SearchProblem, rows: _Rows, longest: int) -> list[tuple[int, list[Hypothesis]]]:
    """Read the columns and build the lists of hypotheses. Returns: (sentence, hypotheses) of each."""
    results = []
    prefix = list(problem.prefix)
    said = zip(*(torch.cat(steps, 1).tolist() for steps in (rows.tokens, rows.log_probs)), strict=True)
    for sentence, *lines in zip(rows.sentence.tolist(), rows.sums.tolist(), rows.missing.tolist(), strict=True):
        found = []
        for total, missing in zip(*lines, strict=True):
            length = longest - missing
            ids, log_probs = (column[: length - len(prefix)] for column in next(said))
            score = float(problem.rules.score(torch.tensor(total), max(length, 1)))
            ended = ids[-1:] == [problem.eos_id]
            all_log_probs = [0.0] * len(prefix) + log_probs
            found.append(Hypothesis(prefix + ids[: len(ids) - ended], score, all_log_probs, ended))
        found.sort(key=lambda hypothesis: -hypothesis.score)
        results.append((sentence, found))
    return results


class Repetition:
    """Makes earlier tokens less probable, and forbids n-grams that already occurred.

    Args:
        histories: tokens of each row so far.
        vocab_size: number of ids.
        penalty: see `penalised`; 1 is off.
        ngram_size: 0 is off.
        device: device of the scores.

    Cost: per step, rows x vocab_size for the penalty, rows for n-grams.
    """

    def __init__(
        self,
        histories: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        penalty: float,
        ngram_size: int,
        device: torch.device,
    ) -> None:
        self._penalty, self._size = penalty, ngram_size
        self._seen = torch.zeros(len(histories), vocab_size, dtype=torch.bool, device=device) if penalty != 1 else None
        self._followers: list[dict[tuple[int, ...], set[int]]] = [defaultdict(set) for _ in histories]
        self._last: list[tuple[int, ...]] = [() for _ in histories]
        for row, history in enumerate(histories):
            if self._seen is not None and history:
                self._seen[row, torch.tensor(sorted(set(history)), device=device)] = True
            if ngram_size:
                for token in history:
                    self._follow(row, token)

    def apply(self, scores: Tensor) -> Tensor:
        """Apply the penalty to (rows, vocab_size), and set tokens that would repeat an n-gram to -inf.

        A row that would have no token left may repeat one: it must go on with some token of the vocabulary.
        """
        if self._seen is not None:
            from manyheads.decoding.search_problem import penalised

            scores = torch.where(self._seen, penalised(scores, self._penalty), scores)
        if self._size:
            banned = [
                (row, token)
                for row, last in enumerate(self._last)
                if len(last) == self._size - 1
                for token in self._followers[row].get(last, ())
            ]
            if banned:
                rows, tokens = policy.sent(torch.tensor(banned), scores.device).t()
                restrained = scores.index_put((rows, tokens), scores.new_full((), -torch.inf))
                is_stuck = restrained.amax(-1, keepdim=True).isneginf()
                scores = torch.where(is_stuck, scores, restrained)
        return scores

    def add(self, tokens: Tensor, ids: Sequence[int]) -> None:
        """Add the token that each row produced. tokens: (rows,); ids: the same numbers, on the host."""
        if self._seen is not None:
            self._seen = self._seen.scatter(1, tokens[:, None], True)  # `select` may have made it in inference mode
        if self._size:
            for row, token in enumerate(ids):
                self._follow(row, token)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows, in this order."""
        if self._seen is not None:
            self._seen = self._seen[torch.tensor(rows, device=self._seen.device, dtype=torch.int64)]
        self._followers = [self._followers[row] for row in rows]
        self._last = [self._last[row] for row in rows]

    def _follow(self, row: int, token: int) -> None:
        last = self._last[row]
        if len(last) == self._size - 1:
            self._followers[row][last].add(token)
        self._last[row] = (*last, token)[-(self._size - 1) :] if self._size > 1 else ()
