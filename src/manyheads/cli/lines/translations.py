"""Output lines of `translate`: text of translators, trees of parsers, and a warning about bad outputs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from manyheads.cli.command_line.pages import program
from manyheads.cli.lines.output_checks import OutputCheck
from manyheads.decoding.translation import Translation, one_line
from manyheads.errors import ConfigError
from manyheads.text.bracketing import repairs_line
from manyheads.text.parsing import ParsingTask, words_of
from manyheads.text.trees import format_tree

__all__ = ["TranslationLines"]


class TranslationLines:
    """Makes lines of what a model wrote, and counts bad outputs.

    Args:
        task: None for a model that translates, whose text stays as it is.
        model: its name on the command line.
        linearised: show the text that the model wrote instead of the tree made from it.
        as_json: a JSON object for each line.
        as_list: number, score and text in columns for each translation.

    Raises: ConfigError: linearised, but the model writes no trees.
    """

    def __init__(self, task: ParsingTask | None, model: str, *, linearised: bool, as_json: bool, as_list: bool) -> None:
        if linearised and task is None:
            raise ConfigError("--linearised is for parsers, but this model translates.")
        self._task = task
        self._linearised = linearised
        self._as_json = as_json
        self._as_list = as_list
        self._repairs: Counter[str] = Counter()
        self._num_trees = self._num_repaired = 0
        self.check = OutputCheck(
            "translations",
            learn_more=f"train it longer or on more data; {program()} info {model} shows how it was trained.",
            forbid="--min-new-tokens 1 forbids empty ones, --no-repeat-ngram-size 3 repetitions.",
        )

    def lines(self, number: int, source: str, translations: list[Translation]) -> list[str]:
        """The output lines of one input line. number: of the line, from 1."""
        if self._task is None and source.strip():  # an empty translation of an empty line is right
            self.check.see(number, source, translations[0].text)
        if self._as_json:
            found = [
                {
                    **self._record(source, one.text),
                    "score": one.score,
                    "log_prob": sum(one.token_log_probs),
                    "tokens": one.tokens,
                    "token_log_probs": one.token_log_probs,
                }
                for one in translations
            ]
            return [json.dumps({"line": number, "source": source, "translations": found}, ensure_ascii=False)]
        if not self._as_list:
            return [self._text(source, translations[0])]
        texts = [self._text(source, one).replace("\t", " ") for one in translations]
        return [f"{number}\t{one.score:.6f}\t{text}" for one, text in zip(translations, texts, strict=True)]

    def tell(self) -> None:
        """Print a line on standard error if outputs were empty, repeated themselves, or were repaired."""
        self.check.tell()
        if self._num_repaired:
            print(
                f"manyheads: {self._num_repaired} of {self._num_trees} trees were not well-formed and were mended:"
                f" {repairs_line(self._repairs)}.",
                file=sys.stderr,
            )

    def _text(self, source: str, one: Translation) -> str:
        is_shown = self._task is None or self._linearised
        return one_line(one.text if is_shown else str(self._record(source, one.text)["text"]))

    def _record(self, source: str, written: str) -> dict[str, Any]:
        """The text of an output; of a tree also what the model wrote, and what was repaired."""
        if self._task is None:
            return {"text": written}
        if not words_of(source):
            return {"text": "", "written": written, "repairs": {}}
        restored = self._task.restore(source, written)
        self._num_trees += 1
        self._num_repaired += bool(restored.repairs)
        self._repairs.update(restored.repairs)
        return {"text": format_tree(restored.tree), "written": written, "repairs": dict(restored.repairs)}
