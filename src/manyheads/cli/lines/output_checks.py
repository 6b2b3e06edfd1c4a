"""Counts outputs that are empty or repeat the same words. A command reports them once, on standard error."""

from __future__ import annotations

import sys

from manyheads.cli.printing import say
from manyheads.decoding.degenerate import repeats_itself

# If more outputs than this are bad, the cause is the model, not a few unusual inputs.
_MANY = 0.2
_MOST_NAMED = 5
_SHORTEST_TEXT = 10


class OutputCheck:
    """Counts what a command writes.

    Args:
        name: what the outputs are called: `translations`, `texts`.
        learn_more: advice if many are bad.
        forbid: advice if few are bad: options that prevent such outputs.
    """

    def __init__(self, name: str, *, learn_more: str, forbid: str) -> None:
        self._name = name
        self._learn_more = learn_more
        self._forbid = forbid
        self._total = self._num_empty = self._num_repeating = 0
        self._named: list[int] = []  # of the first bad lines: a stream has no end
        self._told = False

    def see(self, number: int, source: str, output: str) -> None:
        """Note one output. If the source repeats itself, so may the output.

        Args: number: of the line, from 1.
        """
        self._total += 1
        if not output.strip():
            self._num_empty += 1
        elif repeats_itself(output) and not repeats_itself(source):
            self._num_repeating += 1
        else:
            return
        if len(self._named) < _MOST_NAMED:
            self._named.append(number)

    def see_text(self, number: int, prompt: str, text: str, *, may_be_empty: bool) -> None:
        """Note a text that goes on from a prompt. A few characters may well be blank.

        Args: may_be_empty: if a stop text comes at once there is no text, and this is not an error of the model.
        """
        if len(text) >= _SHORTEST_TEXT or not (text or may_be_empty):
            self.see(number, prompt, text)

    def tell(self) -> None:
        """Print one warning if any output was empty or repeated itself; never a second one."""
        if self._named and not self._told:
            self._told = True
            say(f"manyheads: warning: {self.describe()}", file=sys.stderr)

    def describe(self) -> str:
        """The counts, the lines they are of, and what to do."""
        num_bad = self._num_empty + self._num_repeating
        empty = "is empty" if num_bad == 1 else "are empty"
        repeating = f"repeat{'s' if num_bad == 1 else ''} the same words again and again"
        if self._num_empty and self._num_repeating:
            what = f"are empty ({self._num_empty:,}) or {repeating} ({self._num_repeating:,})"
        else:
            what = empty if self._num_empty else repeating
        named = ", ".join(map(str, self._named)) + (", ..." if num_bad > _MOST_NAMED else "")
        told = f"{num_bad:,} of {self._total:,} {self._name} {what} (line{'s' if num_bad > 1 else ''} {named})."
        is_model = num_bad >= _MANY * self._total
        return f"{told} {f'The model has hardly learned: {self._learn_more}' if is_model else self._forbid}"
