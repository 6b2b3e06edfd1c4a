"""Sentences to ids and to batches: types are checked, texts that are too long are refused or truncated, reported with
file and line and counted, and rows of different lengths are grouped and padded to one tensor.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

from manyheads.data.lines import ReadReport, describe
from manyheads.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from manyheads.decoding.settings import DecodingSettings
    from manyheads.text.sides import Side

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


_LINE_BREAKS = re.compile(r"[\r\n]+")


def encode_texts(texts: Sequence[str], side: Side) -> list[list[int]]:
    """Return the ids of each text, which is one sentence.

    A line break inside it becomes a space; line breaks at its ends are removed, because models of sentences were not
    trained on line breaks.

    Raises: RequestError: a text is not a string.
    """
    check_texts(texts)
    return side.encode_batch([" ".join(filter(None, _LINE_BREAKS.split(text))) for text in texts])


def with_end(ids: Sequence[int], side: Side) -> list[int]:
    """Return the ids of a source with its EOS, unless the side's sources have none."""
    return [*ids, side.eos_id] if getattr(side, "ends_sources", True) else list(ids)


def prefix_ids(text: str, side: Side) -> tuple[int, ...]:
    """Return the ids of the beginning of a translation. White space at its end only ends a word: it is no piece."""
    return tuple(side.encode(text.rstrip()))


def check_texts(texts: Sequence[str], what: str = "text") -> None:
    """Raises: RequestError: it is no list, or a text is not a string. what: messages call a text so."""
    # Any kind of sequence will do; a generator would be empty after this check, and a set has no order.
    is_list = hasattr(texts, "__len__") and hasattr(texts, "__getitem__") and not isinstance(texts, bytes | Mapping)
    if not is_list:
        raise RequestError(f"a {type(texts).__name__} was given; give one {what}, a string, or a list of {what}s.")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise RequestError(f"{what} {number} is a {type(text).__name__}; {what}s are strings.")


T = TypeVar("T")
PADDED_TOKENS = 16_384
"""Tokens of a batch of texts for a language model, padding included."""
OnProgress = Callable[[int], None]
"""Called after each batch with the number of items that are done."""


def cut_batches(
    lengths: Sequence[int], max_tokens: int = PADDED_TOKENS, rows_each: int = 1, max_rows: int | None = None
) -> list[list[int]]:
    """Group indices of sentences by similar length, longest first.

    In a batch rows_each x sentences x longest <= max_tokens, and rows_each x sentences <= max_rows, if that is given. A
    sentence that exceeds a limit is a batch by itself.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batches: list[list[int]] = []
    for place in order:
        rows = rows_each * (len(batches[-1]) + 1) if batches else 0
        if rows and rows * lengths[batches[-1][0]] <= max_tokens and (max_rows is None or rows <= max_rows):
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def map_batches(
    work: Callable[[list[int]], Sequence[T]], batches: Sequence[list[int]], on_progress: OnProgress | None
) -> list[T]:
    """Return the result for each item, in the order of their numbers. work: batch -> the results of its items."""
    results: dict[int, T] = {}
    for batch in batches:
        results.update(zip(batch, work(batch), strict=True))
        if on_progress is not None:
            on_progress(len(results))
    return [results[number] for number in range(len(results))]


def padded(rows: Sequence[Sequence[int]], pad_id: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return rows of ids padded on the right, (rows, longest), and their lengths, (rows,)."""
    import torch  # imported here, because help does not need it
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(row, device="cpu") for row in rows], batch_first=True, padding_value=pad_id)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)
