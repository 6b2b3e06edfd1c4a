"""Perplexity of a loss, also of one so large that it overflows."""

from __future__ import annotations

import math


def perplexity_of(nats_per_token: float) -> float:
    """Return exp of a mean loss; infinite if it overflows."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf


def show_perplexity(value: float, digits: int = 2) -> str:
    """Return a perplexity as text: with decimal places below a million, then as a power of ten, then `inf`."""
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.2e}"
