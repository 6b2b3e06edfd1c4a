"""Likelihood of held-out pairs, and of a text under a language model, with every token scored once: nats per token and
perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.batch import PairBatch, share
from manyheads.data.language.segments import SegmentBatch, eval_segments
from manyheads.data.store import TokenSide, TokenStore
from manyheads.errors import DataError, refuse_nan
from manyheads.evaluation.reading import Reading, perplexity_of

if TYPE_CHECKING:
    from manyheads.models.protocols import Output
    from manyheads.text.vocabulary import Vocabulary

B = TypeVar("B", PairBatch, SegmentBatch)


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Sums over a corpus.

    Args:
        nll_sum: negative log-likelihood, in nats.
        num_tokens: number of target tokens, with EOS, without BOS and padding.
    """

    nll_sum: float
    num_tokens: int

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood."""
        return self.nll_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of nats_per_token; infinite if that overflows."""
        return perplexity_of(self.nats_per_token)


@torch.no_grad()
def evaluate_likelihood(
    model: Callable[[PairBatch], Output],
    batches: Iterable[PairBatch],
    *,
    device: torch.device | str = "cpu",
    stop: Callable[[], bool] | None = None,
) -> Likelihood:
    """Return the likelihood (without label smoothing) over batches, summed in double precision.

    Args:
        model: returns an `Output` for a batch; a module is put into evaluation mode during the call.
        batches: any split of the corpus into batches gives the same result, up to rounding.
        device: the model's device.
        stop: called before each batch; if it returns true, the sums so far are returned.

    Raises: DataError: there is no token to score.
    """
    sums: list[Tensor] = []
    num_tokens = 0
    with evaluation_mode(model):
        for batch in batches:
            if stop is not None and stop():
                break
            sums.append(model(batch.to(device)).nll_sum)  # read at the end, because each read waits for the GPU
            num_tokens += batch.num_target_tokens()
    if not num_tokens:
        raise DataError("there is no target token to score; give at least one sentence pair.")
    return Likelihood(math.fsum(float(value) for value in sums), num_tokens)


@contextmanager
def evaluation_mode(model: object) -> Iterator[None]:
    """Put a module into evaluation mode during the block; do nothing for other objects."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def counted(batches: Iterable[B], on_progress: Callable[[int], None] | None) -> Iterator[B]:
    """Yield the batches; after each, `told` is called with the number of rows so far."""
    num_done = 0
    for batch in batches:
        yield batch
        num_done += len(batch.sample_ids)
        if on_progress is not None:
            on_progress(num_done)


@dataclass(frozen=True, kw_only=True)
class EnsembleReading(Reading):
    """The reading of an ensemble: common segments, and each model's own memory. The other fields are the first model's.

    Args: others: of the other models, in their order; only memory_len, clamp_len and same_length are read.
    """

    others: tuple[Reading, ...]

    def attending(self, config: Any) -> tuple[Any, ...]:
        """Return the context settings of each model; `NO_MEMORY` for one that attends to its segment only.

        Args: config: an ensemble's.

        Raises: ConfigError: memory is set for a model without memory.
        """
        from manyheads.models.ensemble import NO_MEMORY

        each = [super().attending(config.each[0])]
        for reading, one in zip(self.others, config.each[1:], strict=True):
            each.append(replace(reading, ext_len=self.ext_len, documents=self.documents).attending(one))
        return tuple(NO_MEMORY if one is None else one for one in each)


class _Scores(Protocol):
    """A composite: `LanguageModel` or `LanguageEnsemble` in `models`."""

    config: Any

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> Any: ...

    def __call__(self, batch: Any, state: Any = None) -> Any: ...

    def token_losses(self, batch: Any, state: Any = None) -> tuple[Tensor, Any]: ...


@torch.no_grad()
def evaluate_text(
    model: _Scores,
    store: TokenStore,
    reading: Reading,
    vocabulary: Vocabulary,
    *,
    device: torch.device | str = "cpu",
    stop: Callable[[], bool] | None = None,
    on_progress: Callable[[int], None] | None = None,
    part: tuple[int, int] = (0, 1),
) -> Likelihood | None:
    """Score a text, with sums in double precision.

    Paper: Dai et al. 2019, sec. 4.1: memory and segment may have other lengths than in training.
    Args:
        model: a module is put into evaluation mode during the call.
        store: the text.
        reading: segments, memory and lanes.
        vocabulary: of the text; without documents in it, the first token is not scored.
        device: the model's device.
        stop: called before each segment.
        on_progress: called after each segment with the number of scored tokens.
        part: (index, number of parts) of the lanes to score; lanes are independent, so the sums of all parts add up to
            those of the whole.

    Returns: sums over all tokens; None if `stop` returned true.
    Raises: DataError: there is nothing to score.
    """
    segments = segments_of(store, reading, vocabulary.end_id, vocabulary.begin_id)
    attending = reading.attending(model.config)
    sums, num_tokens = [], 0
    state: Any = None
    with evaluation_mode(model):
        for batch in segments:
            if stop is not None and stop():
                return None
            batch = batch.rows(share(len(batch.lengths), *part))
            if not len(batch.lengths):
                break  # fewer lanes than parts
            if state is None and attending is not None:
                state = model.start(len(batch.lengths), attending)
            output = model(batch.to(device), state)
            state = output.state if attending is not None else None  # without memory, segments are independent
            sums.append(output.nll_sum)  # read at the end, because each read waits for the GPU
            num_tokens += batch.num_target_tokens()
            if on_progress is not None:
                on_progress(num_tokens)
    return Likelihood(math.fsum(float(value) for value in sums), num_tokens)


@torch.no_grad()
def token_losses(
    model: _Scores,
    store: TokenStore,
    reading: Reading,
    vocabulary: Vocabulary,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> NDArray[np.float64]:
    """Return the loss in nats of each token of a text, in the text's order; NaN for a token that is not scored.

    The sum is that of `evaluate_text`, up to rounding.

    Args: see `evaluate_text`.

    Raises: DataError: there is nothing to score. NonFiniteError: a loss is NaN.
    """
    text = store.first(reading.max_tokens) if reading.max_tokens else store
    # The same segments of a text whose ids are its own positions say which token each loss is about.
    numbered = replace(text, documents=TokenSide(np.arange(len(text)), text.offsets))
    begin_id = vocabulary.begin_id if vocabulary.end_id is None else vocabulary.end_id
    places = segments_of(numbered, reading, None, begin_id)
    found = np.full(len(text), np.nan)
    attending = reading.attending(model.config)
    state: Any = None
    num_tokens = 0
    with evaluation_mode(model):
        for batch, place in zip(
            segments_of(text, reading, vocabulary.end_id, vocabulary.begin_id), places, strict=True
        ):
            if state is None and attending is not None:
                state = model.start(len(batch.lengths), attending)
            losses, state = model.token_losses(batch.to(device), state)
            state = state if attending is not None else None  # without memory, segments are independent
            columns = torch.arange(batch.targets.shape[1])
            scored = (columns >= batch.num_context) & (columns < batch.lengths[:, None])
            values = losses.cpu().double()[scored]  # MPS has no float64
            refuse_nan(bool(values.isnan().any()))
            found[place.targets[scored].numpy()] = values.numpy()
            num_tokens += batch.num_target_tokens()
            if on_progress is not None:
                on_progress(num_tokens)
    return found


def segments_of(
    store: TokenStore, reading: Reading, end_id: int | None, begin_id: int | None
) -> Iterator[SegmentBatch]:
    """Yield the segments of a text, read in this way. end_id, begin_id: the vocabulary's."""
    return eval_segments(
        store.first(reading.max_tokens) if reading.max_tokens else store,
        lanes=reading.lanes,
        segment_len=reading.segment_len,
        documents=reading.documents,
        ext_len=reading.ext_len,
        end_id=end_id,
        begin_id=begin_id,
    )


def bits_per(nll_sum: float, count: int) -> float:
    """Convert nats over a text to bits per byte, character or word, given their number."""
    return nll_sum / math.log(2) / max(count, 1)
