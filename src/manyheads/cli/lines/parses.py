"""Output lines of `translate`: text from translators, trees from parsers, and a warning about bad outputs."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from manyheads.cli.command_line.pages import program
from manyheads.cli.lines.output_checks import OutputCheck
from manyheads.errors import ConfigError
from manyheads.text.bracketing import repairs_line
from manyheads.text.parsing import ParsingTask, words_of
from manyheads.text.trees import format_tree

__all__ = ["Shown"]


class Shown:
    """Makes what a model wrote presentable, and counts.

    Args:
        task: None for a model that translates, whose text stays as it is.
        model: its name on the command line.
        linearised: show what the model wrote.

    Raises: ConfigError: linearised, but the model writes no trees.
    """

    def __init__(self, task: ParsingTask | None, model: str, *, linearised: bool = False) -> None:
        if linearised and task is None:
            raise ConfigError("--linearised is of parsers, but this model translates.")
        self._task = task
        self._linearised = linearised
        self._repairs: Counter[str] = Counter()
        self._num_trees = self._num_mended = 0
        self._check = OutputCheck(
            "translations",
            learn_more=f"train it longer or on more data; {program()} info {model} shows how it was trained.",
            forbid="--min-new-tokens 1 forbids empty ones, --no-repeat-ngram-size 3 repetitions.",
        )

    def note(self, number: int, source: str, written: str) -> None:
        """Count a translation that is empty or repeats itself. An empty line is rightly answered by one."""
        if self._task is None and source.strip():
            self._check.see(number, source, written)

    def tell_translations(self) -> None:
        """One line on standard error, however often it is asked for, if a translation was empty or repeated itself."""
        self._check.tell()

    def text(self, source: str, written: str) -> str:
        """The text to show for an output."""
        if self._task is None or self._linearised:
            return written
        return str(self.record(source, written)["text"])

    def record(self, source: str, written: str) -> dict[str, Any]:
        """The text of an output; of a tree also what the model wrote, and what was mended."""
        if self._task is None:
            return {"text": written}
        if not words_of(source):
            return {"text": "", "written": written, "repairs": {}}
        restored = self._task.restore(source, written)
        self._num_trees += 1
        self._num_mended += bool(restored.repairs)
        self._repairs.update(restored.repairs)
        return {"text": format_tree(restored.tree), "written": written, "repairs": dict(restored.repairs)}

    def tell(self) -> None:
        """A line on standard error if anything was mended, empty or repeated."""
        self.tell_translations()
        if self._num_mended:
            print(
                f"manyheads: {self._num_mended} of {self._num_trees} trees were not well-formed and were mended:"
                f" {repairs_line(self._repairs)}.",
                file=sys.stderr,
            )
