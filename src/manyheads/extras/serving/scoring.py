"""Batches that score given tokens, optionally with the most probable alternatives at each place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyheads.decoding.generation import READ_AT_ONCE, context_settings
from manyheads.decoding.generator import Generator
from manyheads.decoding.text_ids import padded
from manyheads.decoding.translator import Translator
from manyheads.errors import RequestError, refuse_nan
from manyheads.extras.serving.jobs import Done, Event, Remaining
from manyheads.models.attentions import attentions_of
from manyheads.models.protocols import Scorable

_MOST_VALUES = 2**24
"""Maximum number of log-probabilities that are computed in one call: 64 MiB in float32."""
MOST_MAPPED = 1_000
"""Maximum number of tokens on either side of a pair for `attention_maps`: each head has the square of it in weights."""


@dataclass
class ScoredIds:
    """Log-probabilities of given tokens, in nats.

    Args: log_probs: of each token. top: for each token the most probable (id, log-probability), best first.
    """

    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class PairBatch(Remaining):
    """Scores targets given their sources, as many pairs in each step as fit. Results: `ScoredIds` of each pair.

    Args: contents: (source ids with EOS, target ids with EOS, number of alternatives) of each pair.
    """

    def __init__(self, translator: Translator, contents: Sequence[tuple[list[int], list[int], int]]) -> None:
        if not isinstance(translator.model, Scorable):
            raise RequestError(f"a {type(translator.model).__name__} gives no log-probabilities of whole targets.")
        self._translator = translator
        self.left = dict(enumerate(contents))

    def advance(self) -> Iterable[Event | Done]:
        """Score the next pairs."""
        model, writer = self._translator.model, self._translator.tokenizer.target
        assert isinstance(model, Scorable)
        rows: list[int] = []
        longest = 0
        for row, (source_ids, target, _) in self.left.items():
            longest = max(longest, len(source_ids), len(target))
            if rows and (len(rows) + 1) * longest * writer.vocab_size > _MOST_VALUES:
                break
            rows.append(row)
        taken = [self.left.pop(row) for row in rows]
        device = self._translator.device
        source, lengths = padded([ids for ids, _, _ in taken], writer.pad_id, device)
        inputs, _ = padded([[writer.bos_id, *target[:-1]] for _, target, _ in taken], writer.pad_id, device)
        with self._translator.runner.inference():
            log_probs = model.log_probs(source, lengths, inputs)
        return [
            Done(row, _chosen(table[: len(target)], target, num_top, writer.vocab_size))
            for row, table, (_, target, num_top) in zip(rows, log_probs, taken, strict=True)
        ]


class TextBatch:
    """Scores texts with a language model, each from its beginning; a step reads up to 512 tokens of every text.

    The first token is predicted from the token that begins a document, or a line. Results: `ScoredIds` of each text.

    Args: contents: (ids, at least one; number of alternatives) of each text.
    """

    def __init__(self, generator: Generator, contents: Sequence[tuple[list[int], int]]) -> None:
        self._generator = generator
        self._ids = [ids for ids, _ in contents]
        self._num_top = [num_top for _, num_top in contents]
        self._found = [ScoredIds() for _ in contents]
        self._dropped: set[int] = set()
        self._begin = 0
        self._inputs, self._lengths = padded([[generator.vocabulary.start_id, *ids[:-1]] for ids in self._ids])
        with generator.runner.inference():
            self._state = generator.model.start(len(contents), context_settings(generator.model, generator.settings))

    def advance(self) -> Iterable[Event | Done]:
        """Read the next part of every text."""
        model, device = self._generator.single_model, self._generator.device
        begin, end = self._begin, min(self._begin + READ_AT_ONCE, self._inputs.shape[1])
        lengths = (self._lengths - begin).clamp(min=0, max=end - begin)
        whole = bool((lengths == end - begin).all())
        with self._generator.runner.inference():
            hidden, self._state = model.body(
                self._inputs[:, begin:end].to(device), None if whole else lengths.to(device), self._state
            )
            for row, ids in enumerate(self._ids):
                if row not in self._dropped and lengths[row]:
                    self._score(row, hidden[row, : int(lengths[row])], ids[begin:end])
        self._begin = end
        done = [row for row, ids in enumerate(self._ids) if begin < len(ids) <= end and row not in self._dropped]
        return [Done(row, self._found[row]) for row in done]

    def drop(self, rows: Collection[int]) -> None:
        """Do not score these texts."""
        self._dropped.update(rows)

    def _score(self, row: int, hidden: Tensor, ids: list[int]) -> None:
        vocab_size = self._generator.model.config.vocab_size
        width = max(1, _MOST_VALUES // vocab_size)
        for begin in range(0, len(ids), width):
            part = slice(begin, begin + width)
            table = self._generator.single_model.head.log_probs(hidden[part][None])[0]
            found = _chosen(table, ids[part], self._num_top[row], self._generator.vocabulary.vocab_size)
            self._found[row].log_probs += found.log_probs
            self._found[row].top += found.top


def _chosen(table: Tensor, ids: list[int], num_top: int, vocab_size: int) -> ScoredIds:
    """Read log-probabilities out of a table. table: (len(ids), rows of the model), at least `vocab_size` of them."""
    log_probs = table.gather(1, torch.tensor(ids, device=table.device)[:, None])[:, 0].float().tolist()
    refuse_nan(any(value != value for value in log_probs))
    if not num_top:
        return ScoredIds(log_probs, [])
    values, places = table[:, :vocab_size].float().topk(min(num_top, vocab_size))
    pairs = [list(zip(*row, strict=True)) for row in zip(places.tolist(), values.tolist(), strict=True)]
    return ScoredIds(log_probs, pairs)


@dataclass(frozen=True)
class AttentionMaps:
    """Attention weights of one pair: for each layer (heads, q_len, k_len); empty if the model has no such stack.

    Layers of a pruned model have different numbers of heads.
    """

    encoder: tuple[Tensor, ...]
    decoder: tuple[Tensor, ...]
    cross: tuple[Tensor, ...]


def mean_map(layers: Sequence[Tensor], head: int | None = None) -> Tensor | None:
    """Return the mean over the heads of these layers. head: take this one of each layer that has it.

    Shape: (heads, q_len, k_len) each; the result (q_len, k_len). Returns: None if there is no such head.
    """
    heads = [one for layer in layers for one in (layer if head is None else layer[head : head + 1])]
    return torch.stack(heads).mean(0) if heads else None


def attention_maps(translator: Translator, source: list[int], target: list[int]) -> AttentionMaps:
    """Compute all attention weights of a pair, of at most MOST_MAPPED tokens a side. Call it on the engine's thread.

    Args: source: ids with EOS. target: ids with EOS; row i of `decoder` and `cross` are the weights with which token i
        of the target is chosen.
    """
    model, device = translator.model, translator.device
    assert isinstance(model, torch.nn.Module)
    inputs = [translator.tokenizer.target.bos_id, *target[:-1]]
    with translator.runner.inference():
        found = attentions_of(
            model,
            torch.tensor([source], device=device),
            torch.tensor([len(source)], device=device),
            torch.tensor([inputs], device=device),
        )

    def first(layers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(layer[0].float().cpu() for layer in layers)

    return AttentionMaps(first(found.encoder), first(found.decoder), first(found.cross))
