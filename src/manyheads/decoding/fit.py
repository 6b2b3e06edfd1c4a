"""What fits into a model: lengths are checked before anything runs, and nothing is cut in silence."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import RequestError

__all__ = ["check_target_limit", "cut", "fit", "fit_sources", "scored_limit", "source_limit"]

_log = logging.getLogger(__name__)


def source_limit(settings: DecodingSettings, max_len: int | None) -> tuple[int, str]:
    """Most tokens of a source, EOS included, and why: the model has no positions for more, or the budget no room.

    One sentence's beams must fit into `max_tokens`.
    """
    rows = settings.num_return_sequences if settings.do_sample else settings.num_beams
    return _limit(max(1, settings.max_tokens // rows), f"max_tokens {settings.max_tokens} / {rows} beams", max_len)


def scored_limit(settings: DecodingSettings, max_len: int | None) -> tuple[int, str]:
    """As `source_limit`, of either side of a pair that is scored: there are no beams."""
    return _limit(settings.max_tokens, f"max_tokens {settings.max_tokens}", max_len)


def _limit(budget: int, reason: str, max_len: int | None) -> tuple[int, str]:
    return (max_len, "the model's positions") if max_len is not None and max_len < budget else (budget, reason)


def fit_sources(
    sources: Sequence[list[int]], numbers: Sequence[int], settings: DecodingSettings, max_len: int | None
) -> list[list[int]]:
    """Sources that model and budget can take, cut if `settings.too_long` says so, with a warning for each.

    Args:
        sources: ids of each, EOS last.
        numbers: what each is called in messages: its place in the input, counted from 1.
        max_len: the model's limit, or None.

    Raises: RequestError: a source is too long.
    """
    return fit(sources, numbers, *source_limit(settings, max_len), too_long=settings.too_long)


def fit(
    rows: Sequence[list[int]],
    numbers: Sequence[int],
    limit: int,
    reason: str,
    *,
    too_long: Literal["fail", "truncate"],
    what: str = "text",
) -> list[list[int]]:
    """Rows of at most `limit` tokens: what is longer is cut, with a warning, or refused. See `fit_sources`."""
    for ids, number in zip(rows, numbers, strict=True):
        if len(ids) > limit and too_long == "fail":
            raise RequestError(
                f"{what} {number} has {len(ids)} tokens, EOS included, but at most {limit} fit ({reason});"
                " split the text, raise max_tokens if that is the limit, or set too_long to truncate."
            )
        if len(ids) > limit:
            _log.warning("%s %d has %d tokens; only its first %d are used", what, number, len(ids), limit - 1)
    return cut(rows, limit)


def cut(rows: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Each row's first limit - 1 ids and its last, which is EOS; as it is where it is no longer than that."""
    return [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in rows]


def check_target_limit(settings: DecodingSettings, max_len: int | None) -> None:
    """Refuse to promise more target tokens than the model has positions for.

    Raises: RequestError: max_new_tokens, min_new_tokens or the forced prefix needs more.
    """
    longest = max(settings.max_new_tokens, settings.min_new_tokens, len(settings.forced_prefix_ids) + 1)
    if max_len is not None and longest > max_len:
        raise RequestError(
            f"{longest} target tokens are asked for, but the model has positions for {max_len};"
            " lower max_new_tokens or min_new_tokens, or shorten the forced prefix."
        )
