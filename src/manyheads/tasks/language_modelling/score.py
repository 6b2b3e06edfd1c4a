"""Log-probabilities of given texts under a language model, per token; each line by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from manyheads.data.language.segments import SegmentBatch
from manyheads.data.lines import LinesOf, Progress, phase_progress
from manyheads.decoding.generation import READ_AT_ONCE, context_settings
from manyheads.decoding.generator import Generator
from manyheads.decoding.inputs_and_results import OnProgress, Scored, cut_batches, map_batches, padded
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import RequestError, refuse_nan
from manyheads.tasks.report import LineWork, score_line

if TYPE_CHECKING:
    from manyheads.tasks.language_modelling.options import ScoreOptions


def score_texts(
    generator: Generator,
    texts: Sequence[str],
    *,
    max_rows: int = 64,
    on_progress: OnProgress | None = None,
    first_number: int = 1,
) -> list[Scored]:
    """Return the log-probabilities of every token of each text, each text separately from its beginning.

    The first token is predicted from the end of a document, or of a line if there are no documents. If lines are
    documents, the end of each line is scored too. Texts of any length are read in segments, with the memory length of
    generation.

    Args:
        generator: model, vocabulary and memory.
        texts: without line breaks if lines are documents.
        max_rows: number of texts that are read in parallel.
        on_progress: called from time to time with the number of finished texts.
        first_number: number of the first text in messages.

    Returns: in the order of the texts; an empty text has no tokens, unless its end is scored.
    Raises: RequestError: a text is longer than the model's positions. NonFiniteError: the model gives NaN.
    """
    vocabulary = generator.vocabulary
    encoded = vocabulary.encode_batch(list(texts))
    if vocabulary.documents == "lines":
        encoded = [[*ids, vocabulary.line_id] for ids in encoded]
    longest = generator.model.max_len
    for number, ids in enumerate(encoded, first_number):
        if longest is not None and len(ids) > longest:
            raise RequestError(
                f"text {number} has {len(ids):,} tokens, but the model has {longest:,} positions; split it."
            )
    full = [ids for ids in encoded if ids]
    batches = cut_batches([len(ids) for ids in full], max_rows=max_rows)
    losses = iter(map_batches(lambda batch: _losses(generator, [full[place] for place in batch]), batches, on_progress))
    return [Scored(vocabulary.tokens(ids), next(losses) if ids else []) for ids in encoded]


@torch.no_grad()
def _losses(generator: Generator, rows: list[list[int]]) -> list[list[float]]:
    """Return the log-probabilities of each row's tokens; no row may be empty."""
    model, start = generator.model, generator.vocabulary.start_id
    ids, lengths = padded([[start, *row] for row in rows])
    lengths, parts = lengths - 1, []
    with generator.runner.inference():
        state = model.start(len(rows), context_settings(model, generator.settings))
        for begin in range(0, ids.shape[1] - 1, READ_AT_ONCE):
            end = min(begin + READ_AT_ONCE, ids.shape[1] - 1)
            batch = SegmentBatch(
                tokens=ids[:, begin:end],
                targets=ids[:, begin + 1 : end + 1],
                lengths=(lengths - begin).clamp(min=0, max=end - begin),
                resets=torch.zeros(len(rows), dtype=torch.bool),
                sample_ids=torch.arange(len(rows)),
            )
            losses, state = model.token_losses(batch.to(generator.device), state)
            parts.append(losses.float().cpu())
    log_probs = -torch.cat(parts, dim=1)
    found = [row[:count] for row, count in zip(log_probs, lengths.tolist(), strict=True)]
    refuse_nan(any(bool(row.isnan().any()) for row in found))
    return [row.tolist() for row in found]


def score(options: ScoreOptions, progress: Progress) -> LineWork[str]:
    """Load the model."""
    generator = options.run_on.load(Generator.from_pretrained, options.models.all(options.model), progress)

    def work(first: int, lines: list[str]) -> Iterator[str]:
        on_progress = phase_progress(progress, "scoring lines", 0, first)
        found = score_texts(
            generator, lines, max_rows=options.max_rows, on_progress=on_progress, first_number=first + 1
        )
        return (score_line(first + place, one, tokens=options.tokens) for place, one in enumerate(found, 1))

    identity = {
        "command": "score",
        "model": model_identity(options.model),
        **options.models.identity(),
        "form": (options.tokens, options.on_bad_utf8, options.max_rows),
        "precision": generator.precision,
    }
    return LineWork(
        LinesOf(options.text, 16 * options.max_rows, options.on_bad_utf8), work, identity, {"text": options.text}
    )
