"""The report of `evaluate` about several models on one test set: a table, the examples that differ most, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from manyheads.data.translation.readers import ReadReport
from manyheads.extras.inspect.drawings.attention import shown_token
from manyheads.extras.inspect.drawings.pages import offline_page, save_page

if TYPE_CHECKING:
    from manyheads.extras.research.paired import Paired

PAGE_EXAMPLES = 1000
"""Maximum number of examples on a page."""
SIGNIFICANT = 0.05
_LONGEST_SHOWN = 4000


@dataclass(frozen=True)
class Example:
    """One sentence or passage.

    Args:
        place: where it is, such as `line 7`.
        source: what the models read; empty for a language model.
        reference: the right translation, or the passage.
        outputs: the translation of each model; empty for language models.
        scores: of each model.
    """

    place: str
    source: str
    reference: str
    outputs: tuple[str, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """See `tasks.report.Report`.

    Args:
        models: their names, the one that the others are compared with first.
        scores: name of a score -> one entry for each model.
        figures: further columns: name -> a text for each model.
        notes: lines below the table.
        examples: those that differ most, the most different first.
        example_score: what the scores of examples are.
        smaller_is_better: of the scores of examples.
        num_shown: how many examples `to_lines` contains.
        protocol: for JSON, with `data`.
        protocol_lines: the same for people.
        page: the file for `to_page`; None: none is written.
    """

    models: list[str]
    scores: dict[str, list[Paired]]
    figures: dict[str, list[str]]
    notes: list[str]
    examples: list[Example]
    example_score: str
    smaller_is_better: bool
    num_shown: int
    protocol: dict[str, Any]
    protocol_lines: list[str]
    page: str | None = None
    read: ReadReport = field(default_factory=ReadReport)
    output: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        scores = {
            name: {"signature": found[0].signature, "models": [_record(one) for one in found]}
            for name, found in self.scores.items()
        }
        return {
            "models": self.models,
            "scores": scores,
            "figures": self.figures,
            "differences": [asdict(one) for one in self.examples[: self.num_shown]],
            "protocol": self.protocol,
            "page": self.page,
        }

    def to_lines(self) -> list[str]:
        names = letters(self.models)
        lines = [f"{letter} = {name}" for letter, name in names.items()]
        head, rows = self.table()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines += [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
        ]
        lines += [f"  {note}" for note in self.notes]
        lines += self._example_lines(list(names))
        pages = [] if self.page is None else [f"page         {self.page}"]
        return [*lines, "protocol", *self.protocol_lines, *pages]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heading and the row of each model."""
        head = [""]
        rows = [[letter] for letter in letters(self.models)]
        for name, found in self.scores.items():
            head += [name, "±", "p"]
            for row, one in zip(rows, found, strict=True):
                is_marked = one.p_value is not None and one.p_value < SIGNIFICANT
                p_value = "-" if one.p_value is None else f"{one.p_value:.3f}{'*' if is_marked else ' '}"
                digits = 2 if one.value >= 10 else 4
                row += [f"{one.value:.{digits}f}", f"{one.interval:.{digits}f}", p_value]
        for name, texts in self.figures.items():
            head.append(name)
            for row, text in zip(rows, texts, strict=True):
                row.append(text)
        return head, rows

    def _example_lines(self, names: Sequence[str]) -> list[str]:
        shown = self.examples[: self.num_shown]
        if not shown:
            return ["all outputs have equal scores"] if not self.examples and self.num_shown else []
        lines = [f"where they differ most ({self.example_score})"]
        for one in shown:
            lines.append(f"  {one.place}  {_short(one.source)}".rstrip())
            lines.append(f"    {'text' if not one.outputs else 'reference':>9}  {_short(one.reference)}")
            for place, (name, score) in enumerate(zip(names, one.scores, strict=True)):
                text = f"  {_short(one.outputs[place])}" if one.outputs else ""
                lines.append(f"  {name} {score:8.2f}{text}".rstrip())
        return lines

    def to_page(self) -> str:
        """Return the comparison as one HTML file that works offline."""
        head, rows = self.table()
        title = f"{len(self.models)} models on {self.protocol['data']}"
        record = {
            "title": shown_token(title),
            "models": [shown_token(name) for name in self.models],
            "letters": list(letters(self.models)),
            "head": head,
            "rows": rows,
            "notes": [shown_token(note) for note in self.notes],
            "score": self.example_score,
            "smaller": self.smaller_is_better,
            "examples": [_shown_example(one) for one in self.examples],
            "protocol": [shown_token(line) for line in self.protocol_lines],
        }
        return offline_page("comparison", record, title=shown_token(title))

    def save(self) -> None:
        """Write the page, if there is to be one. Raises: SaveError: it cannot be written."""
        if self.page is not None:
            save_page(self.to_page(), self.page)


def letters(models: Sequence[str]) -> dict[str, str]:
    """A, B, ... -> the name of a model."""
    return {chr(ord("A") + number): name for number, name in enumerate(models)}


def _record(one: Paired) -> dict[str, Any]:
    return {"score": one.value, "interval": one.interval, "p_value": one.p_value}


def _short(text: str) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= 300 else f"{text[:299]}…"


def _shown_example(one: Example) -> dict[str, Any]:
    def shown(text: str) -> str:
        return shown_token(text[:_LONGEST_SHOWN].replace("\n", "⏎")) if text else ""

    return {
        "place": one.place,
        "source": shown(one.source),
        "reference": shown(one.reference),
        "outputs": [shown(text) for text in one.outputs],
        "scores": [round(score, 2) for score in one.scores],
    }
