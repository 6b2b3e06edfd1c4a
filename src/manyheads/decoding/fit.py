"""What fits into a model: lengths are checked before anything runs, and nothing is cut in silence."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import RequestError

__all__ = ["check_lengths", "check_target_limit", "fit_sources"]

_log = logging.getLogger(__name__)


def fit_sources(
    sources: Sequence[list[int]], numbers: Sequence[int], settings: DecodingSettings, max_len: int | None
) -> list[list[int]]:
    """Sources that model and budget can take, cut if `settings.too_long` says so, with a warning for each.

    A source is too long if the model has no position for its end, or if its beams alone exceed `max_tokens`.

    Args:
        sources: ids of each, EOS last.
        numbers: what each is called in messages: its place in the input, counted from 1.
        max_len: the model's limit, or None.

    Raises: RequestError: a source is too long.
    """
    rows = settings.num_return_sequences if settings.do_sample else settings.num_beams
    limit, reason = max(1, settings.max_tokens // rows), f"max_tokens {settings.max_tokens} / {rows} beams"
    if max_len is not None and max_len < limit:
        limit, reason = max_len, "the model's positions"
    fitting = []
    for ids, number in zip(sources, numbers, strict=True):
        if len(ids) <= limit:
            fitting.append(ids)
        elif settings.too_long == "truncate":
            _log.warning("text %d has %d tokens; only its first %d are translated", number, len(ids), limit - 1)
            fitting.append([*ids[: limit - 1], ids[-1]])
        else:
            raise RequestError(
                f"text {number} has {len(ids)} tokens, EOS included, but at most {limit} fit ({reason});"
                " split the text, raise max_tokens if that is the limit, or set too_long to truncate."
            )
    return fitting


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


def check_lengths(lengths: Sequence[int], max_len: int | None, what: str, first_number: int = 1) -> None:
    """Refuse sequences, named by `what` and a number, that are longer than the model's limit.

    Raises: RequestError: one is too long.
    """
    for number, length in enumerate(lengths, first_number):
        if max_len is not None and length > max_len:
            raise RequestError(
                f"{what} {number} has {length} tokens, EOS included, but the model has positions for {max_len};"
                " shorten or split it."
            )
