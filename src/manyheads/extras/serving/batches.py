"""Batches of the engine: searches of translators and generators, and single calls."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from manyheads.decoding.engines import SearchEngine
from manyheads.decoding.generation import NewToken
from manyheads.decoding.generation_settings import GenerationSettings
from manyheads.decoding.generator import Generator
from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.prefix_cache import PrefixCache
from manyheads.decoding.search import search_steps
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.extras.serving.jobs import Done, Event

__all__ = ["CallBatch", "GenerationBatch", "Prompt", "Remaining", "RuntimeBatch", "TranslationBatch", "Written"]

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
                grammar=translator.search.grammar(settings),
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
