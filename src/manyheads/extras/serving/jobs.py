"""Jobs of the engine, and the batches that do them: searches of translators and generators, and single calls."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from manyheads.decoding.generation import READ_AT_ONCE, NewToken, PrefixCache, context_settings
from manyheads.decoding.inputs_and_results import Hypothesis, padded
from manyheads.decoding.search import search_steps
from manyheads.decoding.settings import pattern_grammar
from manyheads.errors import RequestError, refuse_nan
from manyheads.models.protocols import Scorable
from manyheads.nn.attention.observing import attentions_of

if TYPE_CHECKING:
    from manyheads.decoding.generator import Generator
    from manyheads.decoding.inputs_and_results import SearchEngine
    from manyheads.decoding.settings import DecodingSettings, GenerationSettings
    from manyheads.decoding.translator import Translator


@dataclass(frozen=True)
class Row:
    """One unit of a job's work.

    Args:
        content: for the function that begins the batch.
        cost: tokens, prompt and output, times the beams or samples that it occupies; a memory that begins with zeros
            counts as its columns.
        width: beams or samples.
    """

    content: Any
    cost: int
    width: int = 1


@dataclass(frozen=True)
class Event:
    """A partial result of a row."""

    row: int
    content: Any


@dataclass(frozen=True)
class Done:
    """The final result of a row."""

    row: int
    content: Any
    num_tokens: int = 0


@dataclass(frozen=True)
class Failed:
    """The end of a job by an error."""

    error: Exception


class Batch(Protocol):
    """Rows that advance together."""

    def advance(self) -> Iterable[Event | Done]:
        """Take one step. Returns: what is new; `row` counts the rows of the batch."""

    def drop(self, rows: Collection[int]) -> None:
        """Take out rows: they cost nothing from the next step on, and report nothing more."""


class QueueFull(Exception):  # noqa: N818  (an answer, not a fault)
    """Too many tokens wait.

    Args: retry_after: estimated seconds until there is space.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(eq=False)
class Job:
    """The rows of one request.

    Args:
        key: rows of equal keys may share a batch.
        begin: makes a batch of the contents of rows, which may come from several jobs of this key.
        rows: in the order of their results' numbers.
        on_events: called on the engine's thread with the events and results of each step; must not block.
        wants_events: whether `on_events` gets events as well as results.
        wake: called after `on_events`, once per step for all jobs with the same `wake`; must not block.
        client: who sent it; clients are served in turn.

    Attributes:
        turn: its place among the jobs that wait. next_row: first row that has not started.
        has_news: whether any of its rows had an event or a result.
        is_over: all rows are done, or it was cancelled or failed.
    """

    key: Hashable
    begin: Callable[[Sequence[Any]], Batch]
    rows: Sequence[Row]
    on_events: Callable[[list[Event | Done | Failed]], None]
    arrived: float = field(default_factory=time.monotonic)
    wants_events: bool = True
    wake: Callable[[], None] | None = None
    client: Hashable = None
    turn: int = 0
    next_row: int = 0
    num_done: int = 0
    has_news: bool = False
    is_over: bool = False

    @property
    def waiting_cost(self) -> int:
        """Tokens of the rows that have not started."""
        return sum(row.cost for row in self.rows[self.next_row :])


T = TypeVar("T")
_ROWS_OF_RUNTIME = 32
"""Number of sources in a step. Other batches wait for the step, and a dropped row still uses time until its end."""


class _Stepped(Generic[T]):
    """A search as a generator of steps, which takes the rows to be dropped before each step but the first."""

    def __init__(self, steps: abc.Generator[list[T], Collection[int] | None, None]) -> None:
        self._steps = steps
        self._dropped: set[int] = set()
        self._has_begun = False

    def drop(self, rows: Collection[int]) -> None:
        """Take these rows out before the next step; before the first one, after it."""
        self._dropped.update(rows)

    def _step(self) -> list[T]:
        if not self._has_begun:
            self._has_begun = True
            return next(self._steps)
        dropped, self._dropped = self._dropped, set()
        return self._steps.send(dropped)


class TranslationBatch(_Stepped[tuple[int, list[Hypothesis]]]):
    """A search for the translations of several sources. Results: the hypotheses of each, best first.

    Args: contents: (ids with EOS, number of the text in its request) of each row.
    """

    def __init__(
        self, translator: Translator, settings: DecodingSettings, contents: Sequence[tuple[list[int], int]]
    ) -> None:
        reader, writer, device = translator.tokenizer.source, translator.tokenizer.target, translator.device
        self._translator = translator
        sources = [torch.tensor(ids, dtype=torch.int64) for ids, _ in contents]
        with translator.runner.inference():
            steps = search_steps(
                translator.model,
                pad_sequence(sources, batch_first=True, padding_value=reader.pad_id).to(device),
                torch.tensor([len(ids) for ids in sources], device=device),
                settings,
                pad_id=writer.pad_id,
                bos_id=writer.bos_id,
                eos_id=writer.eos_id,
                indices=[number for _, number in contents],
                grammar=pattern_grammar(settings, translator.tokenizer) or translator.tokenizer.grammar(settings),
                report_early=True,
            )
        super().__init__(steps)

    def advance(self) -> Iterable[Event | Done]:
        """Take one step."""
        with self._translator.runner.inference():
            finished = self._step()
        return [Done(row, found, sum(len(one.ids) for one in found)) for row, found in finished]


class Remaining:
    """The waiting rows of a batch that processes some of them in each step.

    Attributes: left: number of a row -> the row.
    """

    left: dict[int, Any]

    def drop(self, rows: Collection[int]) -> None:
        """Leave out rows that have not begun."""
        for row in rows:
            self.left.pop(row, None)


class RuntimeBatch(Remaining):
    """Searches by another runtime, some sources in each step. Results: the hypotheses of each, best first.

    The sources of a step are of similar length. The hypotheses have no log-probabilities of tokens.

    Args: contents: as of `TranslationBatch`.
    """

    def __init__(
        self, runtime: SearchEngine, settings: DecodingSettings, contents: Sequence[tuple[list[int], int]]
    ) -> None:
        self._runtime, self._settings = runtime, settings
        order = sorted(range(len(contents)), key=lambda row: len(contents[row][0]))
        self.left = {row: contents[row][0] for row in order}

    def advance(self) -> Iterable[Event | Done]:
        """Search the next sources."""
        rows = list(islice(self.left, _ROWS_OF_RUNTIME))
        found = self._runtime.search([self.left.pop(row) for row in rows], self._settings)
        return [Done(row, one, sum(len(each.ids) for each in one)) for row, one in zip(rows, found, strict=True)]


@dataclass(frozen=True)
class Prompt:
    """A row of a `GenerationBatch`.

    Args: ids: of the prompt. number: of the prompt in its request, for sampling. settings: of its request. num_top:
        alternatives of each token.
    """

    ids: list[int]
    number: int
    settings: GenerationSettings
    num_top: int = 0


@dataclass
class Written:
    """A finished continuation; see `generator.Continuation`. top: alternatives of each token, best first."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended_by: Literal["end", "stop", "length"] = "length"
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class GenerationBatch(_Stepped[NewToken]):
    """The continuations of several prompts. Events: `NewToken`. Results: the `Written` of each prompt's paths.

    Args: contents: of each row. cache: of the beginnings of earlier prompts, used by a batch of one prompt only.
    """

    def __init__(
        self,
        generator: Generator,
        settings: GenerationSettings,
        contents: Sequence[Prompt],
        cache: PrefixCache | None = None,
    ) -> None:
        self._contents = contents
        self._written = [[Written() for _ in range(settings.num_return_sequences)] for _ in contents]
        self._left = [settings.num_return_sequences for _ in contents]
        steps = generator.steps(
            [prompt.ids for prompt in contents],
            settings,
            numbers=[prompt.number for prompt in contents],
            each=[prompt.settings for prompt in contents],
            num_top=max(prompt.num_top for prompt in contents),
            cache=cache,
        )
        super().__init__(steps)

    def advance(self) -> Iterable[Event | Done]:
        """Take one step: read a part of the prompts, or generate a token of each continuation."""
        news: list[Event | Done] = []
        for token in self._step():
            self._take(token)
            news.append(Event(token.prompt, token))
            if token.ended is not None:
                self._left[token.prompt] -= 1
                if not self._left[token.prompt]:
                    paths = self._written[token.prompt]
                    news.append(Done(token.prompt, paths, sum(len(path.ids) for path in paths)))
        return news

    def _take(self, token: NewToken) -> None:
        written, num_top = self._written[token.prompt][token.path], self._contents[token.prompt].num_top
        if num_top:
            written.top.append(token.top[:num_top])
        if token.ended is not None:
            written.text, written.ended_by = token.ended.text, token.ended.ended_by
            written.ids, written.log_probs = token.ended.ids, token.ended.log_probs


class CallBatch(Remaining):
    """Functions that are called one after the other, one in each step. Results: what they return.

    Args: contents: the functions.
    """

    def __init__(self, contents: Sequence[Callable[[], Any]]) -> None:
        self.left = dict(enumerate(contents))

    def advance(self) -> Iterable[Event | Done]:
        """Call the next function."""
        row = min(self.left)
        return [Done(row, self.left.pop(row)())]


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
