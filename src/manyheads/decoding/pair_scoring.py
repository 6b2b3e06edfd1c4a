"""Log-probabilities of given translations of texts, per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyheads.architectures.protocols import Scorable, Searchable
from manyheads.decoding.batching import Told, cut_batches, map_batches, padded
from manyheads.decoding.hypothesis import Stop, check_stop
from manyheads.decoding.model_runner import ModelRunner
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.text_ids import check_texts, encode_texts, with_end
from manyheads.decoding.translation import Scored
from manyheads.decoding.truncation import fit, scored_limit
from manyheads.errors import RequestError, refuse_nan
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
    told: Told | None = None,
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
    found = score_ids(runner, tokenizer, source_ids, labels, settings.max_tokens, stop=stop, told=told)
    return [Scored(writer.tokens(ids), row) for ids, row in zip(labels, found, strict=True)]


def score_ids(
    runner: ModelRunner[Searchable],
    tokenizer: TranslationTokenizer,
    sources: Sequence[list[int]],
    labels: Sequence[list[int]],
    max_tokens: int,
    *,
    stop: Stop | None = None,
    told: Told | None = None,
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
            told=told,
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
    told: Told | None = None,
) -> list[list[float]]:
    """Return the model's log-probability of each target token except the first, in nats.

    Args:
        model: computes log-probabilities; it should be in evaluation mode.
        sources: ids of each source, EOS included.
        targets: ids of each target from BOS to EOS.
        max_tokens: maximum number of tokens of a batch on either side; batches are smaller for a large vocabulary.
        stop: called before each batch.
        told: called after each batch with the number of finished pairs.

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

    return map_batches(score, cut_batches(lengths, budget), told)
