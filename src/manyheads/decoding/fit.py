"""Checks of input lengths before a search runs; every truncation is reported."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import RequestError

__all__ = ["check_target_limit", "cut", "fit", "fit_sources", "scored_limit", "source_limit"]

_log = logging.getLogger(__name__)


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


def fit_sources(
    sources: Sequence[list[int]], numbers: Sequence[int], settings: DecodingSettings, max_len: int | None
) -> list[list[int]]:
    """Check the sources against the limits of model and budget; truncate them with a warning if `settings.too_long`
    says so.

    Args:
        sources: ids of each, EOS last.
        numbers: the number of each source in messages: its position in the input, counted from 1.
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
    """Truncate rows of more than `limit` tokens with a warning, or refuse them. See `fit_sources`."""
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
