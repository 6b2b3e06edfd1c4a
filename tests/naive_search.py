"""Reference implementation of beam search: one sentence, plain lists, no caching.

It shares no code with `decoding.search`, and without early stopping it always continues to the length limit.
`naive_marian_search` is the reference for `decoding.search_problem.MarianRules`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.decoding.settings import DecodingSettings


class _Path(NamedTuple):
    ids: list[int]
    log_probs: list[float]
    total: float


def naive_beam_search(
    next_log_probs: Callable[[list[int]], list[float]],
    settings: DecodingSettings,
    *,
    limit: int,
    pad_id: int,
    bos_id: int,
    eos_id: int,
) -> list[Hypothesis]:
    """Run beam search for one sentence by the rules of `DecodingSettings`.

    Args:
        next_log_probs: function from target tokens (BOS first) to the log-probabilities of the next token, without
            state.
        limit: maximum number of target tokens, EOS included.

    Returns: 1 to num_return_sequences hypotheses, best first.
    Cost: num_beams x limit calls, each on a whole prefix.
    """
    prefix = list(settings.forced_prefix_ids)
    running = [_Path(prefix, [0.0] * len(prefix), 0.0)]
    ended: list[Hypothesis] = []
    for length in range(len(prefix) + 1, limit + 1):
        candidates: list[tuple[float, _Path, int, float]] = []
        for path in running:
            log_probs = next_log_probs([bos_id, *path.ids])
            allowed = _constrain(log_probs, path.ids, settings, pad_id, bos_id, eos_id)
            if settings.forced_eos and length == limit:
                log_probs = allowed = _only(eos_id, len(log_probs))
            for token, gain in enumerate(allowed):
                if gain > -math.inf:
                    candidates.append((path.total + gain, path, token, log_probs[token]))
        candidates.sort(key=lambda candidate: -candidate[0])
        earlier, running = running, []
        for rank, (total, path, token, log_prob) in enumerate(candidates[: 2 * settings.num_beams]):
            grown = _Path([*path.ids, token], [*path.log_probs, log_prob], total)
            if token != eos_id and len(running) < settings.num_beams:
                running.append(grown)
            if token == eos_id and rank < settings.num_beams:
                ended.append(Hypothesis(path.ids, total / _penalty(length, settings), grown.log_probs, True))
        if not candidates and not ended:
            path = earlier[0]
            return [Hypothesis(path.ids, path.total / _penalty(max(length - 1, 1), settings), path.log_probs, False)]
        if not running or (settings.early_stopping is True and len(ended) >= settings.num_beams):
            break
    ended = sorted(ended, key=lambda hypothesis: -hypothesis.score)[: settings.num_beams]
    cut = [Hypothesis(p.ids, p.total / _penalty(len(p.ids), settings), p.log_probs, False) for p in running]
    return (ended + cut)[: settings.num_return_sequences]


def naive_marian_search(
    next_log_probs: Callable[[list[int]], list[float]],
    settings: DecodingSettings,
    *,
    limit: int,
    pad_id: int,
    bos_id: int,
    eos_id: int,
) -> list[Hypothesis]:
    """Do the same as `naive_beam_search` by the rules of Marian models in `transformers`."""
    width, start = settings.num_beams, 0 if settings.rules == "marian-5" else 1
    prefix = list(settings.forced_prefix_ids)
    running = [_Path(prefix, [0.0] * len(prefix), 0.0)]
    kept: list[Hypothesis] = []
    is_done = False
    for length in range(len(prefix) + 1, limit + 1):
        candidates: list[tuple[_Path, int]] = []
        for path in running:
            log_probs = next_log_probs([bos_id, *path.ids])
            allowed = _constrain(log_probs, path.ids, settings, pad_id, bos_id, eos_id)
            if settings.forced_eos and length == limit:
                log_probs = allowed = _only(eos_id, len(log_probs))
            for token, gain in enumerate(allowed):
                grown = _Path([*path.ids, token], [*path.log_probs, log_probs[token]], path.total + gain)
                candidates += [(grown, token)] if gain > -math.inf else []
        if not candidates:
            break
        candidates = sorted(candidates, key=lambda candidate: -candidate[0].total)[: 2 * width]
        running = [path for path, token in candidates if token != eos_id][:width]
        for path, token in candidates[:width]:
            if token == eos_id:
                score = path.total / _penalty(len(path.ids), settings)
                kept.append(Hypothesis(path.ids[:-1], score, path.log_probs, True))
        kept = sorted(kept, key=lambda hypothesis: -hypothesis.score)[:width]
        if len(kept) == width:
            supposed = limit if settings.early_stopping == "never" and settings.length_penalty > 0 else length
            best = candidates[0][0] if start else (running or [candidates[0][0]])[0]
            hope = best.total / _penalty(start + supposed, settings)
            is_done = settings.early_stopping is True or kept[-1].score >= hope
        if is_done or not running:
            break
    if not is_done:
        kept += [
            Hypothesis(p.ids, p.total / _penalty(start + len(p.ids), settings), p.log_probs, False) for p in running
        ]
    return sorted(kept, key=lambda hypothesis: -hypothesis.score)[: settings.num_return_sequences]


def _only(eos_id: int, size: int) -> list[float]:
    """Return the log-probabilities of a forced EOS."""
    return [0.0 if token == eos_id else -math.inf for token in range(size)]


def _penalty(length: int, settings: DecodingSettings) -> float:
    if settings.length_penalty_kind == "gnmt":
        return math.pow((5 + length) / (5 + 1), settings.length_penalty)
    if settings.length_penalty_kind == "power":
        return math.pow(length, settings.length_penalty)
    return 1.0


def _constrain(
    log_probs: list[float], ids: list[int], settings: DecodingSettings, pad_id: int, bos_id: int, eos_id: int
) -> list[float]:
    """Return the log-probabilities after all options; -inf is forbidden."""
    size = settings.no_repeat_ngram_size
    grams = {tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)} if size else set()
    result = []
    for token, value in enumerate(log_probs):
        repeats = size > 0 and len(ids) + 1 >= size and (*ids[len(ids) - size + 1 :], token) in grams
        too_early = token == eos_id and len(ids) < settings.min_new_tokens
        if repeats or too_early or token in (pad_id, bos_id) or token in settings.banned_ids:
            result.append(-math.inf)
        else:
            result.append(value * settings.repetition_penalty if token in ids else value)
    if settings.renormalize_logits:
        total = sum(math.exp(value) for value in result)
        result = [value - math.log(total) if total else value for value in result]
    return result
