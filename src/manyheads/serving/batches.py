"""Batches of the engine: searches of translators and generators, and single calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from manyheads.decoding.device import inference
from manyheads.decoding.generation_settings import GenerationSettings
from manyheads.decoding.generator import Generator
from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.serving.engine import Done, Event

__all__ = ["CallBatch", "GenerationBatch", "TranslationBatch"]


class TranslationBatch:
    """A search for the translations of several sources. Results: the hypotheses of each, best first.

    Args: contents: (ids with EOS, number of the text in its request) of each row.
    """

    def __init__(
        self, translator: Translator, settings: DecodingSettings, contents: Sequence[tuple[list[int], int]]
    ) -> None:
        self._translator, self._settings, self._contents = translator, settings, contents

    def advance(self) -> Iterable[Event | Done]:
        """Search to the end."""
        writer = self._translator.tokenizer.target
        with inference(self._translator.device, self._translator.precision):
            found = search_all(
                self._translator.model,
                [ids for ids, _ in self._contents],
                self._settings,
                pad_id=writer.pad_id,
                bos_id=writer.bos_id,
                eos_id=writer.eos_id,
                device=self._translator.device,
                indices=[number for _, number in self._contents],
            )
        return [Done(row, best, sum(len(one.ids) for one in best)) for row, best in enumerate(found)]

    def drop(self, rows: Collection[int]) -> None:
        """Has no effect: there is only one step."""


class GenerationBatch:
    """The continuations of several prompts. Results: the continuations of each.

    Args: contents: (ids, number of the prompt in its request) of each row.
    """

    def __init__(
        self, generator: Generator, settings: GenerationSettings, contents: Sequence[tuple[list[int], int]]
    ) -> None:
        self._generator, self._settings, self._contents = generator, settings, contents

    def advance(self) -> Iterable[Event | Done]:
        """Generate to the end."""
        raise NotImplementedError

    def drop(self, rows: Collection[int]) -> None:
        """Has no effect: there is only one step."""


class CallBatch:
    """Functions that are called one after the other, one in each step. Results: what they return.

    Args: contents: the functions.
    """

    def __init__(self, contents: Sequence[Callable[[], Any]]) -> None:
        self._calls: dict[int, Callable[[], Any]] = dict(enumerate(contents))

    def advance(self) -> Iterable[Event | Done]:
        """Call the next function."""
        row = min(self._calls)
        return [Done(row, self._calls.pop(row)())]

    def drop(self, rows: Collection[int]) -> None:
        """Do not call the functions of these rows."""
        for row in rows:
            self._calls.pop(row, None)
