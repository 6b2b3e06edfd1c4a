"""Log-probabilities of given translations, and reranking: a model translates the hypotheses back into the source.

Paper: Yee et al. 2019, arXiv:1908.05731, sec. 2.2, eq. 3, without a language model. Differs: both log-probabilities are
divided by the length penalty of the search, not by the target's length:

    score(y) = log P(y | x) / penalty(length of y) + weight * log P(x | y) / penalty(length of x)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from manyheads.decoding.hypothesis import Hypothesis, Scored, Stop, check_stop
from manyheads.decoding.search_problem import RULES
from manyheads.decoding.text_ids import (
    OnProgress,
    check_texts,
    cut,
    cut_batches,
    encode_texts,
    fit,
    map_batches,
    padded,
    scored_limit,
    with_end,
)
from manyheads.errors import ConfigError, RequestError, refuse_nan
from manyheads.models.protocols import Scorable, Searchable

if TYPE_CHECKING:
    from manyheads.decoding.model_runner import ModelRunner
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.text.sides import TranslationTokenizer

_MAX_BATCH_VALUES = 2**25
"""Maximum size of a batch's table of log-probabilities: 128 MiB in float32."""


def score_pairs(
    runner: ModelRunner[Searchable],
    tokenizer: TranslationTokenizer,
    sources: Sequence[str],
    references: Sequence[str],
    settings: DecodingSettings,
    *,
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
    first_number: int = 1,
) -> list[Scored]:
    """Do what `Translator.score` does for two lists. settings: `max_tokens` and `too_long` are read.

    Raises: RequestError: see `Translator.score`.
    """
    for texts, what in ((sources, "source"), (references, "reference")):
        check_texts([texts] if isinstance(texts, str) else texts, what)
    _check_scorable(runner.model)
    if isinstance(sources, str) or isinstance(references, str):
        raise RequestError(
            "one of sources and references is a string, the other is not; give two lists or two strings."
        )
    if len(sources) != len(references):
        raise RequestError(f"{len(sources)} sources but {len(references)} references; give two lists of equal length.")
    reader, writer = tokenizer.source, tokenizer.target
    source_ids = [with_end(ids, reader) for ids in encode_texts(sources, reader)]
    labels = [[*ids, writer.eos_id] for ids in encode_texts(references, writer)]
    numbers = range(first_number, first_number + len(labels))
    limit, reason = scored_limit(settings, runner.model.max_len)
    source_ids, labels = (
        fit(rows, numbers, limit, reason, too_long=settings.too_long, what=what)
        for what, rows in (("source", source_ids), ("reference", labels))
    )
    found = score_ids(runner, tokenizer, source_ids, labels, settings.max_tokens, stop=stop, on_progress=on_progress)
    return [Scored(writer.tokens(ids), row) for ids, row in zip(labels, found, strict=True)]


def score_ids(
    runner: ModelRunner[Searchable],
    tokenizer: TranslationTokenizer,
    sources: Sequence[list[int]],
    labels: Sequence[list[int]],
    max_tokens: int,
    *,
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
) -> list[list[float]]:
    """Return the model's log-probability of each label, in nats.

    Args: sources, labels: ids of each pair, EOS last. max_tokens: of a batch, on either side.

    Raises: NonFiniteError: the model gives NaN. RequestError: it cannot score. SearchStopped: `stop` returned true.
    """
    model, writer = _check_scorable(runner.model), tokenizer.target
    with runner.inference():
        return _token_log_probs(
            model,
            sources,
            [[writer.bos_id, *ids] for ids in labels],
            pad_id=writer.pad_id,
            max_tokens=max_tokens,
            vocab_size=writer.vocab_size,
            device=runner.device,
            stop=stop,
            on_progress=on_progress,
        )


def _check_scorable(model: Searchable) -> Scorable:
    """Raises: RequestError: the model cannot score."""
    if not isinstance(model, Scorable):
        raise RequestError(f"a {type(model).__name__} gives no log-probabilities of whole targets.")
    return model


@torch.no_grad()
def _token_log_probs(
    model: Scorable,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    pad_id: int,
    max_tokens: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
) -> list[list[float]]:
    """Return the model's log-probability of each target token except the first, in nats.

    Args:
        model: computes log-probabilities; it should be in evaluation mode.
        sources: ids of each source, EOS included.
        targets: ids of each target from BOS to EOS.
        max_tokens: maximum number of tokens of a batch on either side; batches are smaller for a large vocabulary.
        stop: called before each batch.
        on_progress: called after each batch with the number of finished pairs.

    Returns: for each pair one number per token after BOS.
    Raises: SearchStopped: `stop` returned true.
    """
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    budget = max(1, min(max_tokens, _MAX_BATCH_VALUES // vocab_size))

    def score(batch: list[int]) -> list[list[float]]:
        check_stop(stop)
        source, source_lengths = padded([sources[place] for place in batch], pad_id, device)
        target, target_lengths = padded([targets[place] for place in batch], pad_id, device)
        log_probs = model.log_probs(source, source_lengths, target[:, :-1])
        found = log_probs.gather(2, target[:, 1:, None])[:, :, 0].float().tolist()
        rows = [row[: length - 1] for row, length in zip(found, target_lengths.tolist(), strict=True)]
        refuse_nan(any(value != value for row in rows for value in row))
        return rows

    return map_batches(score, cut_batches(lengths, budget), on_progress)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reranker:
    """Ranks hypotheses with the help of a reverse model.

    Args:
        runner: runs the reverse model, which is `Scorable`.
        tokenizer: the reverse model's.
        settings: the reverse model's, of which `max_tokens` is read.
        weight: of the reverse model's score; 0 keeps the order of the search.
    """

    runner: ModelRunner[Searchable]
    tokenizer: TranslationTokenizer
    settings: DecodingSettings
    weight: float = 1.0

    def rerank(
        self,
        sources: Sequence[str],
        found: Sequence[list[Hypothesis]],
        outputs: Sequence[list[str]],
        settings: DecodingSettings,
        *,
        numbers: Sequence[int],
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each source with their new scores, best first; equal ones in the given order.

        Outputs that are too long for the reverse model are cut.

        Args:
            found: of each source.
            outputs: their texts.
            settings: of the search.
            numbers: of the sources in messages.
            on_progress: called after each batch with the number of outputs scored so far.

        Raises: RequestError: a source is too long for the reverse model. SearchStopped: the hook returned true.
        """
        reader, writer = self.tokenizer.source, self.tokenizer.target
        limit, reason = scored_limit(self.settings, self.runner.model.max_len)
        labels = [[*ids, writer.eos_id] for ids in encode_texts(sources, writer)]
        if settings.too_long == "fail":
            fit(labels, numbers, limit, f"{reason}, in the reverse model", too_long="fail")
        labels = cut(labels, limit)
        texts = [text for each in outputs for text in each]
        inputs = cut([with_end(ids, reader) for ids in encode_texts(texts, reader)], limit)
        targets = [ids for ids, each in zip(labels, outputs, strict=True) for _ in each]
        scored = score_ids(
            self.runner, self.tokenizer, inputs, targets, self.settings.max_tokens, stop=stop, on_progress=on_progress
        )
        rules, sums = RULES[settings.rules](settings), iter(sum(row) for row in scored)
        results = []
        for hypotheses, ids in zip(found, labels, strict=True):
            totals = torch.tensor(list(islice(sums, len(hypotheses))), dtype=torch.float64)
            reverse = rules.score(totals, len(ids)).tolist()
            both = zip(hypotheses, reverse, strict=True)
            ranked = [replace(one, score=one.score + self.weight * other) for one, other in both]
            results.append(sorted(ranked, key=lambda one: -one.score))
        return results


def check_reranking(settings: DecodingSettings) -> None:
    """Raises: ConfigError: the search keeps no hypotheses to choose from."""
    if settings.do_sample or settings.num_beams == 1:
        how = "do_sample is set" if settings.do_sample else "num_beams is 1"
        raise ConfigError(
            f"a reverse model ranks the hypotheses of a beam, but {how}; search with num_beams of 2 or more."
        )


def check_reverse(languages: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> None:
    """Compare the directions of a model with those of its reverse model. If they cannot be compared, a warning says so.

    Args: languages, others: (source, target) of each direction; empty if they are unknown.

    Raises: ConfigError: both are known, and the reverse model does not translate back.
    """
    if not (languages and others):
        _log.warning(
            "%s, so it is not known whether the reverse model translates back. `prepare` records languages that are"
            " named by --source-lang and --target-lang",
            "Neither model records its languages"
            if not languages and not others
            else f"The {'reverse' if languages else 'first'} model does not record its languages",
        )
    known = {(source.lower(), target.lower()) for source, target in others}
    missing = [(target, source) for source, target in languages if (target.lower(), source.lower()) not in known]
    if known and missing:
        shown = [", ".join(f"{source} to {target}" for source, target in pairs) for pairs in (others, missing)]
        raise ConfigError(f"the reverse model translates {shown[0]}; reranking needs one that translates {shown[1]}.")
