"""Rows of the engine for the texts of a request, in which some words are copied; see `decoding.kept_texts`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request

from manyheads.decoding.forced import MOST_BEAMS, translate_forced
from manyheads.decoding.hypothesis import Hypothesis, SearchStopped
from manyheads.decoding.kept_texts import Candidate, KeptTexts
from manyheads.decoding.settings import DecodingSettings
from manyheads.extras.serving.batches import CallBatch
from manyheads.extras.serving.jobs import Row
from manyheads.extras.serving.served import ServedTranslator
from manyheads.extras.serving.service import Service

__all__ = ["KeptRows"]

MOST_CHARACTERS = 1 << 15
"""In a longer sentence nothing is looked for, because a search in it keeps the interpreter's lock."""


class KeptRows:
    """The rows of some texts, and their translations.

    Args: service, request, model, settings: of the request.

    Attributes:
        rows: of all texts. spans: the places of each text's rows.
    """

    def __init__(self, service: Service, request: Request, model: ServedTranslator, settings: DecodingSettings) -> None:
        self._service, self._request, self._model, self._settings = service, request, model, settings
        self._kept: list[KeptTexts] = []
        self.rows: list[Row | None] = []
        self.spans: list[range] = []

    async def read(self, texts: Sequence[str], field: str = "text", owners: Sequence[int] | None = None) -> None:
        """Read the texts. Args: see `Service.rows`. Raises: as it."""
        whole = replace(self._settings, keep_words=False)

        def kept(some: list[str]) -> list[KeptTexts]:
            self._service.check_deadline(self._request)
            settings = (self._settings if len(text) <= MOST_CHARACTERS else whole for text in some)
            return [KeptTexts(self._model.reader, [text], one) for text, one in zip(some, settings, strict=True)]

        self._kept = await self._service.each(self._request, kept, texts, len)
        flat = [row for one in self._kept for row in one.rows]
        of_rows = [
            number if owners is None else owners[number] for number, one in enumerate(self._kept) for _ in one.rows
        ]
        self.rows = await self._service.rows(self._request, self._model, flat, self._settings, field, of_rows)
        start = 0
        for one in self._kept:
            self.spans.append(range(start, start + len(one.rows)))
            start += len(one.rows)

    async def candidates(self, place: int, found: Sequence[list[Hypothesis] | None]) -> list[Candidate]:
        """Return the translations of a text, best first; none for an empty text.

        Args: place: of the text. found: the results of its rows.
        """
        kept, hypotheses = self._kept[place], [one or [] for one in found]
        lacking = kept.lacking(hypotheses)
        end = self._service.end(self._request)
        calls: list[Row | None] = []
        for number, names in lacking.items():
            row = self.rows[self.spans[place][number]]
            cost = MOST_BEAMS * (2 * len(row.content[0]) + 2) if row is not None else 1
            calls.append(Row(partial(self._forced, kept.rows[number], names, end), cost))
        forced = await self._service.run(self._request, (object(), CallBatch), calls) if calls else []
        return kept.candidates(hypotheses, dict(zip(lacking, filter(None, forced), strict=False)))[0]

    def _forced(self, text: str, names: Sequence[str], end: float) -> Hypothesis | None:
        """Search on the engine's thread, up to the deadline, for which `Service.stream` answers 504."""
        try:
            [found] = translate_forced(
                self._model.reader, [text], [names], self._settings, stop=lambda: time.monotonic() > end
            )
        except SearchStopped:
            return None
        return found.hypothesis
