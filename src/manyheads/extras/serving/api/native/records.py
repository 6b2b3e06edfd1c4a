"""Parts of answers: tokens with their log-probabilities and alternatives, attention weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from manyheads.extras.serving.api.fields import finite

__all__ = ["of_alternatives", "of_tokens", "rounded"]


def of_tokens(
    ids: list[int], log_probs: list[float], top: list[list[tuple[int, float]]], show: Callable[[list[int]], list[str]]
) -> dict[str, Any]:
    """Return the entries about tokens. top: alternatives of each, if they are asked for."""
    shown = {"tokens": show(ids), "token_ids": ids, "token_log_probs": [finite(value) for value in log_probs]}
    return {**shown, "top_log_probs": of_alternatives(top, show)} if top else shown


def of_alternatives(
    top: list[list[tuple[int, float]]], show: Callable[[list[int]], list[str]]
) -> list[list[dict[str, Any]]]:
    """Return the alternatives of each token, as records. show: readable tokens of ids."""
    return [
        [{"token": show([index])[0], "token_id": index, "log_prob": finite(value)} for index, value in one]
        for one in top
    ]


def rounded(weights: Tensor) -> list[list[float]]:
    """Return attention weights with four digits."""
    return [[round(value, 4) for value in row] for row in weights.tolist()]
