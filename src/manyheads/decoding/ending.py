"""Where a continuation ends, and what of it can be shown already: whole characters before a text that stops it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["Ending"]


class Ending:
    """Takes the bytes of a continuation as they come.

    Args: stops: texts that end it; of several that are found the one that begins first counts.

    Attributes:
        stopped: whether one was found.
        text: what came before it, so far; what is no whole character yet is not in it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode("utf-8") for stop in stops]
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, more: bytes) -> str:
        """Take bytes. Returns: what can be shown now: neither half a character nor what may become a stop."""
        if self.stopped:
            return ""
        self._held += more
        places = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.stopped = True
            return self._show(self._held[: min(places)], final=True)
        kept = max((self._begun(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._show(shown)

    def finish(self) -> str:
        """Nothing more comes. Returns: what was held back; what is no whole character is U+FFFD."""
        if self.stopped:
            return ""
        held, self._held = self._held, b""
        return self._show(held, final=True)

    def _begun(self, stop: bytes) -> int:
        """How many of the last bytes are the first of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0

    def _show(self, content: bytes, final: bool = False) -> str:
        text = self._decoder.decode(content, final)
        self._parts.append(text)
        return text
