"""Texts that are too long: refused or truncated before a search runs, reported with file and line, and counted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from manyheads.data.lines import ReadReport, describe
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import RequestError

_log = logging.getLogger(__name__)
_SHOWN = 5


def source_limit(settings: DecodingSettings, max_len: int | None) -> tuple[int, str]:
    """Return the maximum length of a source including EOS, and the reason: positions of the model, or the token budget.

    All beams of one sentence must fit into `max_tokens`.
    """
    rows = settings.num_return_sequences if settings.do_sample else settings.num_beams
    return _limit(max(1, settings.max_tokens // rows), f"max_tokens {settings.max_tokens} / {rows} beams", max_len)


def scored_limit(settings: DecodingSettings, max_len: int | None) -> tuple[int, str]:
    """Return the same as `source_limit` for either side of a scored pair, where there are no beams."""
    return _limit(settings.max_tokens, f"max_tokens {settings.max_tokens}", max_len)


def _limit(budget: int, reason: str, max_len: int | None) -> tuple[int, str]:
    return (max_len, "the model's positions") if max_len is not None and max_len < budget else (budget, reason)


def fit(
    rows: Sequence[list[int]],
    numbers: Sequence[int],
    limit: int,
    reason: str,
    *,
    too_long: Literal["fail", "truncate"],
    what: str = "text",
) -> list[list[int]]:
    """Truncate rows of more than `limit` tokens with a warning, or refuse them, as `too_long` says.

    Args:
        rows: ids of each, EOS last.
        numbers: the number of each row in messages: its position in the input, counted from 1.
        limit, reason: see `source_limit`.
        what: a row is called so in messages.

    Raises: RequestError: a row is too long.
    """
    named: set[int] = set()  # a text can have several rows
    for ids, number in zip(rows, numbers, strict=True):
        if len(ids) > limit and too_long == "fail":
            raise RequestError(
                f"{what} {number} has {len(ids)} tokens, EOS included, but at most {limit} fit ({reason});"
                " split the text, raise max_tokens if that is the limit, or set too_long to truncate."
            )
        if len(ids) > limit and number not in named:
            named.add(number)
            _log.warning("%s %d has %d tokens; only its first %d are used", what, number, len(ids), limit - 1)
    return cut(rows, limit)


def cut(rows: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Return each row truncated to `limit` ids: its first limit - 1 ids and its last one, which is EOS."""
    return [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in rows]


def check_target_limit(settings: DecodingSettings, max_len: int | None) -> None:
    """Check that the model has enough positions for the requested number of target tokens.

    Raises: RequestError: max_new_tokens, min_new_tokens or the forced prefix needs more positions.
    """
    longest = max(settings.max_new_tokens, settings.min_new_tokens, len(settings.forced_prefix_ids) + 1)
    if max_len is not None and longest > max_len:
        raise RequestError(
            f"{longest} target tokens are requested, but the model has positions for {max_len};"
            " lower max_new_tokens or min_new_tokens, or shorten the forced prefix."
        )


class TruncationCounter(logging.Handler):
    """Shows the first few warnings about truncated texts on standard error, and counts all of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        self.count += 1
        if self.count <= _SHOWN:
            _tell(record.getMessage().replace("text ", "line ", 1))


@contextmanager
def naming_lines(unit: str = "line", /, **paths: str) -> Iterator[None]:
    """In errors about a numbered text, replace the number by the file and the line.

    Args:
        unit: what the number counts in the file.
        paths: the name of such a text in errors (`text`, `source`, `reference`) -> the file of which it is a line.

    Raises: RequestError: with the changed message.
    """
    try:
        yield
    except RequestError as error:
        kind, _, rest = str(error).partition(" ")
        if kind not in paths or not rest[:1].isdigit():
            raise
        told = f"{describe(paths[kind])}: {unit} {rest}".replace("set too_long to", "use --too-long")
        raise RequestError(told.replace("max_tokens if", "--max-tokens if")) from error


def tell_bad_lines(report: ReadReport) -> None:
    """Print how many lines were not UTF-8, if there were any, and how they were treated."""
    for count, what in ((report.bad_utf8_replaced, "bad bytes replaced"), (report.bad_utf8_skipped, "skipped")):
        if count:
            _tell(f"lines that are not UTF-8, {what}: {count}")


@contextmanager
def counted_truncations() -> Iterator[TruncationCounter]:
    """Count the texts that are truncated in the block. If there were any, print their number at its end."""
    counter = TruncationCounter()
    propagated, _log.propagate = _log.propagate, False
    _log.addHandler(counter)
    try:
        yield counter
    finally:
        _log.removeHandler(counter)
        _log.propagate = propagated
        if counter.count:
            _tell(f"lines cut because they were too long: {counter.count}")


def _tell(text: str) -> None:
    """Print a line in one call, so that another thread's line of progress cannot begin before its end."""
    sys.stderr.write(f"manyheads: {text}\n")
    sys.stderr.flush()
