"""The three forms of label smoothing. Nothing here imports torch: settings read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

SmoothingKind = Literal["all", "without_padding", "others"]


@dataclass(frozen=True)
class Spread:
    """A smoothed target: `on_target` on the correct token, and `mass`, divided evenly, on `count` tokens.

    The correct token is one of the `count` tokens. Padding is one if `count` is the size of the vocabulary.
    """

    on_target: float
    mass: float
    count: int

    @property
    def share(self) -> float:
        """The probability that each of the `count` tokens gets."""
        return self.mass / self.count


def spread(kind: SmoothingKind, smoothing: float, vocab_size: int) -> Spread:
    """Return the smoothed target of one of these kinds (s = smoothing, V = vocab_size):

    - `all`: 1 - s on the correct token, and s / V on every token (Szegedy et al. 2016, arXiv:1512.00567, sec. 7).
    - `without_padding`: the same with s / (V - 1) on every token except padding.
    - `others`: 1 - s on the correct token in all, and s / (V - 2) on every other token except padding, as in the
      Annotated Transformer.

        >>> others = spread("others", 0.3, vocab_size=5)
        >>> round(others.share, 3), round(others.on_target + others.share, 3)
        (0.1, 0.7)

    Raises: ConfigError: no token is left to share the smoothing.
    """
    if not smoothing or kind == "all":
        return Spread(1 - smoothing, smoothing, vocab_size)
    count = vocab_size - (2 if kind == "others" else 1)
    if count < 1:
        raise ConfigError(
            f"label smoothing {smoothing} of the kind {kind!r} needs a vocabulary of at least"
            f" {vocab_size - count + 1} tokens, not {vocab_size}; use a larger vocabulary, the kind 'all', or 0."
        )
    if kind == "without_padding":
        return Spread(1 - smoothing, smoothing, count)
    share = smoothing / count
    return Spread(1 - smoothing - share, smoothing + share, vocab_size - 1)
