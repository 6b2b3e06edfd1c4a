"""Detection of stop texts in a continuation, and output of complete characters only."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Ending:
    """Receives the bytes of a continuation and stops it at a stop text.

    Args: stops: texts that end the continuation; if several occur, the first in the text counts.

    Attributes:
        stopped: whether a stop text was found.
        text: the text before it so far, without an incomplete character at the end.
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

    def add(self, more: bytes, *, may_stop: bool = True) -> str:
        """Add bytes.

        Args: may_stop: whether a stop text that ends in these bytes counts; it may have begun before them.

        Returns: the text to show now, without incomplete characters and without a possible start of a stop text.
        """
        if self.stopped:
            return ""
        before = len(self._held)
        self._held += more
        begins = (self._held.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
        if may_stop and (places := [place for place in begins if place >= 0]):
            self.stopped = True
            return self._show(self._held[: min(places)], final=True)
        kept = max((self._begun(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._show(shown)

    def finish(self) -> str:
        """End the continuation. Returns: the remaining text; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        held, self._held = self._held, b""
        return self._show(held, final=True)

    def _begun(self, stop: bytes) -> int:
        """Return how many of the last bytes are a prefix of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0

    def _show(self, content: bytes, final: bool = False) -> str:
        text = self._decoder.decode(content, final)
        self._parts.append(text)
        return text
