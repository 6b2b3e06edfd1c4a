"""Beam search whose outputs must contain given phrases: terminology, and words that are copied.

Paper: Post and Vilar 2018, arXiv:1804.06609, sec. 3 (dynamic beam allocation): a hypothesis belongs to the bank of the
number of forced tokens that it has produced, and the beam is divided among the banks. Differs: the beam is at least as
large as the number of forced tokens plus 3 (at most 24), so no bank stays empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.decoding.inputs_and_results import (
    Hypothesis,
    check_finite,
    check_stop,
    cut,
    cut_batches,
    encode_texts,
    fit,
    map_batches,
    padded,
    source_limit,
    with_end,
)
from manyheads.decoding.search_problem import RULES, SearchProblem, length_limits
from manyheads.text.sides import Side, TranslationTokenizer, can_force

if TYPE_CHECKING:
    from manyheads.decoding.model_runner import ModelRunner
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.models.protocols import Searchable

MOST_BEAMS = 24
Phrase = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forced:
    """A translation with forced phrases.

    Args:
        text: detokenised. hypothesis: of the search.
        missing: the phrases that are not in it: their tokens are outside the vocabulary, or the limit is too short.
    """

    text: str
    hypothesis: Hypothesis
    missing: tuple[str, ...] = ()


def translate_forced(
    runner: ModelRunner[Searchable],
    tokenizer: TranslationTokenizer,
    texts: Sequence[str],
    phrases: Sequence[Sequence[str]],
    settings: DecodingSettings,
    *,
    stop: Callable[[], bool] | None = None,
) -> list[Forced]:
    """Translate texts so that each translation contains its phrases, each once, where they fit best.

    Args:
        texts: not empty.
        phrases: of each text, in any order.
        settings: of the search, without sampling.
        stop: see `Translator.translate`.

    Raises: as `Translator.translate`.
    """
    settings = replace(settings, do_sample=False, num_return_sequences=1)
    reader, writer = tokenizer.source, tokenizer.target
    sources = [with_end(ids, reader) for ids in encode_texts(texts, reader)]
    limit, reason = source_limit(settings, runner.model.max_len)
    if settings.too_long == "truncate":  # the search before this one has said so
        sources = cut(sources, limit)
    sources = fit(sources, range(1, len(texts) + 1), limit, reason, too_long=settings.too_long)
    wanted = [[phrase for phrase in each if can_force(writer, phrase)] for each in phrases]
    ids = [[tuple(writer.encode(phrase)) for phrase in each] for each in wanted]
    most = max((sum(map(len, each)) for each in ids), default=0)
    settings = replace(settings, num_beams=max(settings.num_beams, min(most + 3, MOST_BEAMS)))

    def search(batch: list[int]) -> list[Forced]:
        problem = _problem(runner, writer, [sources[number] for number in batch], settings, batch, stop)
        results = forced_search(problem, [ids[number] for number in batch])
        return [
            _forced(
                writer.decode(hypothesis.ids), hypothesis, phrases[number], [wanted[number][index] for index in met]
            )
            for number, (hypothesis, met) in zip(batch, results, strict=True)
        ]

    batches = cut_batches([len(source) for source in sources], settings.max_tokens, settings.num_beams)
    with runner.inference():
        return map_batches(search, batches, None)


def _forced(text: str, hypothesis: Hypothesis, phrases: Sequence[str], met: Sequence[str]) -> Forced:
    """Return a translation, and the phrases that it lacks. A phrase can be required twice."""
    missing = list(phrases)
    for phrase in met:
        missing.remove(phrase)
    return Forced(text, hypothesis, tuple(missing))


def _problem(
    runner: ModelRunner[Searchable],
    writer: Side,
    sources: Sequence[Sequence[int]],
    settings: DecodingSettings,
    indices: Sequence[int],
    stop: Callable[[], bool] | None,
) -> SearchProblem:
    source, lengths = padded(sources, writer.pad_id, runner.device)
    return SearchProblem(
        model=runner.model,
        source=source,
        source_lengths=lengths,
        limits=length_limits(lengths, settings, runner.model.max_len),
        indices=indices,
        settings=settings,
        pad_id=writer.pad_id,
        bos_id=writer.bos_id,
        eos_id=writer.eos_id,
        rules=RULES[settings.rules](settings),
        stop=stop,
    )


@dataclass(frozen=True, slots=True)
class _Path:
    """A running hypothesis.

    met: indices of the phrases that it contains. current, progress: the phrase that has begun, and the number of its
    tokens so far; progress 0: no phrase has begun.
    """

    sum: float
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    met: frozenset[int] = frozenset()
    current: int = 0
    progress: int = 0

    def num_met(self, phrases: Sequence[Phrase]) -> int:
        return sum(len(phrases[index]) for index in self.met) + self.progress

    def forced_tokens(self, phrases: Sequence[Phrase]) -> list[int]:
        """The tokens that continue the current phrase, or another one that begins with the same tokens; if no phrase
        has begun, those that begin a missing phrase."""
        run = self._run(phrases)
        missing = (phrase for index, phrase in enumerate(phrases) if index not in self.met)
        return [phrase[len(run)] for phrase in missing if len(phrase) > len(run) and phrase[: len(run)] == run]

    def met_at_end(self, phrases: Sequence[Phrase]) -> frozenset[int]:
        """The phrases that it contains if no token follows: the current one can begin with another one."""
        run, met = self._run(phrases), self.met
        while run:
            run, met = _without_first(run, met, phrases)
        return met

    def _run(self, phrases: Sequence[Phrase]) -> Phrase:
        return phrases[self.current][: self.progress] if self.progress else ()

    def with_token(self, token: int, total: float, log_prob: float, phrases: Sequence[Phrase]) -> _Path:
        run = (*self._run(phrases), token)
        met, current, progress = _matched(run, self.met, phrases)
        return _Path(total, (*self.ids, token), (*self.log_probs, log_prob), met, current, progress)


def _matched(run: Phrase, met: frozenset[int], phrases: Sequence[Phrase]) -> tuple[frozenset[int], int, int]:
    """Return the phrases that are met after the tokens since the last one, the phrase that they are in the middle of,
    and the number of its tokens.

    The end of a phrase that is not completed can begin another one, or itself: `a a b` in `a a a b`. Of several phrases
    with the same beginning the longest counts as begun, so that `a b a` contains both `a` and `a b`.
    """
    while run:
        missing = [(len(phrase), -index) for index, phrase in enumerate(phrases) if index not in met]
        begun = [one for one in missing if phrases[-one[1]][: len(run)] == run]
        if begun:
            length, place = max(begun)
            return (met | {-place}, 0, 0) if length == len(run) else (met, -place, len(run))
        run, met = _without_first(run, met, phrases)
    return met, 0, 0


def _without_first(run: Phrase, met: frozenset[int], phrases: Sequence[Phrase]) -> tuple[Phrase, frozenset[int]]:
    """Take the longest missing phrase from the beginning of a run, or one token; return the rest, and what is met."""
    found = [
        (len(phrase), -index)
        for index, phrase in enumerate(phrases)
        if index not in met and run[: len(phrase)] == phrase
    ]
    if not found:
        return run[1:], met
    length, place = max(found)
    return run[length:], met | {-place}


@torch.no_grad()
def forced_search(
    problem: SearchProblem, phrases: Sequence[Sequence[Phrase]]
) -> list[tuple[Hypothesis, frozenset[int]]]:
    """Return the best hypothesis of each sentence with all of its phrases, and the indices of the phrases in it.

    If the limit is too short for all phrases, the hypothesis with the most forced tokens is returned.

    Raises: SearchStopped: the hook returned true. NonFiniteError: the model gives NaN.
    """
    constraints, num_beams = problem.constraints(), problem.settings.num_beams
    limits = problem.limits.tolist()
    prefix = problem.prefix
    running = {sentence: [_Path(0.0, prefix, (0.0,) * len(prefix))] for sentence in range(problem.source.size(0))}
    ended: dict[int, list[tuple[float, _Path, float]]] = {sentence: [] for sentence in running}
    results: dict[int, tuple[Hypothesis, frozenset[int]]] = {}
    state = problem.model.start(problem.source, problem.source_lengths)
    tokens = problem.prompt()
    length = len(prefix)
    while running:
        check_stop(problem.stop)
        log_probs, state = problem.model.step(tokens, state)
        check_finite(bool(log_probs.isnan().any()), length + 1)
        paths = [path for each in running.values() for path in each]
        history = tokens.new_tensor([path.ids for path in paths]) if constraints.needs_history else None
        adjusted = constraints.apply(log_probs, history, length, None)
        length += 1
        width = len(paths) // len(running)
        rows: list[int] = []
        new_tokens: list[int] = []
        still: dict[int, list[_Path]] = {}
        for number, (sentence, each) in enumerate(running.items()):
            block = slice(number * width, (number + 1) * width)
            found = _continue(each, adjusted[block], log_probs[block], phrases[sentence], num_beams, problem.eos_id)
            for path, total, eos in found.ended:
                score = float(problem.rules.score(torch.tensor(total), length))
                ended[sentence].append((score, path, eos))
            if len(ended[sentence]) >= num_beams or length >= limits[sentence] or not found.running:
                finished, cut = ended[sentence], [path for path, _ in found.running] or each
                results[sentence] = _result(problem, finished, cut, phrases[sentence], length)
                continue
            still[sentence] = [path for path, _ in found.running]
            rows += [number * width + row for _, row in found.running]
            new_tokens += [path.ids[-1] for path, _ in found.running]
        running = still
        if running:
            state = state.reorder(torch.tensor(rows, device=problem.source.device).view(len(running), -1))
            tokens = problem.source.new_tensor(new_tokens)[:, None]
    return [results[sentence] for sentence in range(len(results))]


@dataclass(frozen=True, slots=True)
class _Step:
    """running: each new path and the row that it continues. ended: each path, its sum and log-probability with EOS."""

    running: list[tuple[_Path, int]]
    ended: list[tuple[_Path, float, float]]


def _continue(
    paths: Sequence[_Path],
    adjusted: Tensor,
    log_probs: Tensor,
    phrases: Sequence[Phrase],
    num_beams: int,
    eos_id: int,
) -> _Step:
    """Return the paths of one sentence after one more token. adjusted, log_probs: (paths, vocab_size)."""
    vocab_size = adjusted.size(1)
    sums = adjusted + adjusted.new_tensor([path.sum for path in paths])[:, None]
    places = sums.flatten().topk(min(2 * num_beams, sums.numel())).indices.tolist()
    places += [row * vocab_size + token for row, token in enumerate(sums.argmax(1).tolist())]
    places += [row * vocab_size + token for row, path in enumerate(paths) for token in path.forced_tokens(phrases)]
    places = sorted(set(places))
    totals = sums.flatten()[places].tolist()
    raw = log_probs.flatten()[places].tolist()
    banks: dict[int, list[tuple[_Path, int]]] = {}
    ended = []
    for place, total, log_prob in sorted(zip(places, totals, raw, strict=True), key=lambda one: -one[1]):
        row, token = divmod(place, vocab_size)
        path = paths[row]
        if total == -torch.inf:
            continue
        if token == eos_id:
            if len(path.met) == len(phrases) and path.sum > -torch.inf:
                ended.append((path, total, log_prob))
            continue
        new = path.with_token(token, total, log_prob, phrases)
        banks.setdefault(new.num_met(phrases), []).append((new, row))
    chosen: list[tuple[_Path, int]] = []
    while len(chosen) < num_beams and any(banks.values()):
        for bank in sorted(banks, reverse=True):
            if banks[bank] and len(chosen) < num_beams:
                chosen.append(banks[bank].pop(0))
    # All sentences of a batch have the same number of rows.
    while chosen and len(chosen) < num_beams:
        chosen.append((replace(chosen[-1][0], sum=-torch.inf), chosen[-1][1]))
    return _Step(chosen, ended)


def _result(
    problem: SearchProblem,
    ended: Sequence[tuple[float, _Path, float]],
    cut: Sequence[_Path],
    phrases: Sequence[Phrase],
    length: int,
) -> tuple[Hypothesis, frozenset[int]]:
    if ended:
        score, path, eos = max(ended, key=lambda one: one[0])
        return Hypothesis(list(path.ids), score, [*path.log_probs, eos], True), path.met
    path = max(cut, key=lambda one: (one.num_met(phrases), one.sum))
    score = float(problem.rules.score_cut(torch.tensor(path.sum), length))
    return Hypothesis(list(path.ids), score, list(path.log_probs), False), path.met_at_end(phrases)
