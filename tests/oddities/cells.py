"""What a command is expected to make of an odd text: said to people in the page, and checked in the tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "Outcome", "prepared", "refused", "rows", "sentences", "trained", "translated"]

MOST_LINES_OF_A_MESSAGE = 10


@dataclass(frozen=True)
class Outcome:
    """What a command did. made: what it wrote besides, as the runner reads it: pairs, lines, rows."""

    code: int
    out: str
    err: str
    made: Any = None


@dataclass(frozen=True)
class Cell:
    """One command's expected behaviour.

    Args:
        summary: for people.
        code: the exit code.
        says: what is to be found in its messages or its result.
        count: pairs kept, lines out, rows or sentences; None where it is refused.
        read: pairs read, of `prepare` and `train`.
    """

    summary: str
    code: int
    says: tuple[str, ...] = ()
    count: int | None = None
    read: int | None = None

    def told(self) -> str:
        """The cell of the page, in Markdown."""
        quoted = "; ".join(f"“{' '.join(text.split())}”" for text in self.says if text)
        return ": ".join(part for part in (self.summary, quoted) if part).replace("|", "\\|").replace("<", "&lt;")

    def check(self, outcome: Outcome) -> None:
        """Raises: AssertionError: it behaves otherwise."""
        assert outcome.code == self.code, f"exit code {outcome.code}: {outcome.err}"
        assert "Traceback" not in outcome.err
        message = outcome.err[outcome.err.find("manyheads: ") :] if "manyheads: " in outcome.err else ""
        assert len(message.rstrip("\n").split("\n")) <= MOST_LINES_OF_A_MESSAGE, message
        for text in self.says:
            assert text in outcome.err + outcome.out, f"{text!r} is not said: {outcome.err}{outcome.out}"
        if self.code:
            assert message, "no message"
            assert outcome.out == ""
            assert not outcome.made


def refused(*message: str) -> Cell:
    """Exit code 2 and a message."""
    return Cell("refused", 2, message)


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def prepared(pairs: int, read: int, notes: Sequence[str] = ()) -> Cell:
    """`prepare`: pairs kept of those read, and what else it counts."""
    return Cell(_number(pairs, "pair") + (f" of {read:,}" if read != pairs else ""), 0, tuple(notes), pairs, read)


def trained(pairs: int, read: int, too_long: int = 0) -> Cell:
    """`train`: pairs trained on, of those prepared."""
    note = (f"{too_long} too long and dropped",) if too_long else ()
    return Cell(f"{_number(pairs, 'pair')} trained on", 0, note, pairs, read)


def translated(lines: Sequence[str], notes: Sequence[str] = ()) -> Cell:
    """`translate`: as many lines as were read, and those that stay empty."""
    blank = [str(number) for number, line in enumerate(lines, 1) if not line.strip()]
    empty = ""
    if blank:
        empty = (
            ", all empty" if len(blank) == len(lines) else f", line{'s' * (len(blank) > 1)} {', '.join(blank)} empty"
        )
    return Cell(_number(len(lines), "line") + empty, 0, tuple(notes), len(lines))


def rows(count: int, notes: Sequence[str] = ()) -> Cell:
    """`score`: a row for a pair."""
    return Cell(_number(count, "row"), 0, tuple(notes), count)


def sentences(count: int, notes: Sequence[str] = ()) -> Cell:
    """`evaluate`: all pairs are judged."""
    return Cell(_number(count, "sentence"), 0, tuple(notes), count)
