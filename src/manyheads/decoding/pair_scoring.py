"""Log-probabilities of given translations of texts, per token."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.architectures.protocols import Scorable, Searchable
from manyheads.decoding.batching import Told
from manyheads.decoding.hypothesis import Stop
from manyheads.decoding.model_runner import ModelRunner
from manyheads.decoding.scoring import token_log_probs
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.text_search import encode_texts
from manyheads.decoding.translation import Scored
from manyheads.decoding.truncation import fit, scored_limit
from manyheads.errors import RequestError
from manyheads.text.sides import TranslationTokenizer

__all__ = ["score_pairs"]


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
    if not isinstance(runner.model, Scorable):
        raise RequestError(f"a {type(runner.model).__name__} gives no log-probabilities of whole targets.")
    if isinstance(sources, str) or isinstance(references, str) or len(sources) != len(references):
        raise RequestError(
            f"{len(sources)} sources but {len(references)} references; give two lists of equal length, or two strings."
        )
    reader, writer = tokenizer.source, tokenizer.target
    source_ids = [[*ids, reader.eos_id] for ids in encode_texts(sources, reader)]
    labels = [[*ids, writer.eos_id] for ids in encode_texts(references, writer)]
    numbers = range(first_number, first_number + len(labels))
    limit, reason = scored_limit(settings, runner.model.max_len)
    source_ids, labels = (
        fit(rows, numbers, limit, reason, too_long=settings.too_long, what=what)
        for what, rows in (("source", source_ids), ("reference", labels))
    )
    with runner.inference():
        found = token_log_probs(
            runner.model,
            source_ids,
            [[writer.bos_id, *ids] for ids in labels],
            pad_id=writer.pad_id,
            max_tokens=settings.max_tokens,
            vocab_size=writer.vocab_size,
            device=runner.device,
            stop=stop,
            told=told,
        )
    return [Scored(writer.tokens(ids), row) for ids, row in zip(labels, found, strict=True)]
