"""Settings of attention: how a head scores a query and a key, and hashed attention.

A new kind of scores is one file and one line of `catalogue.ATTENTIONS`.

Nothing here imports torch: `--help` reads the settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from manyheads.config.checks import MOST_UNITS, at_least, between, check
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


class AttentionConfig(Protocol):
    """One kind of scores: a frozen dataclass of its settings."""

    @property
    def kind(self) -> str:
        """Its name in ATTENTIONS: a field whose type is `Literal` of it."""

    def score(self, num_heads: int, head_dim: int) -> nn.Module | None:
        """Return the module (query, key) -> scores (batch, heads, q_len, k_len); None: scaled dot products."""


@dataclass(frozen=True, kw_only=True)
class DotProductAttentionConfig:
    """Scaled dot-product scores (Vaswani et al. 2017, eq. 1)."""

    kind: Literal["dot_product"] = "dot_product"

    def score(self, num_heads: int, head_dim: int) -> None:
        """See `AttentionConfig.score`."""


@dataclass(frozen=True, kw_only=True)
class AdditiveAttentionConfig:
    """Additive scores (Bahdanau et al. 2015): w_v . tanh(W_q q + W_k k) in every head.

    Args: hidden_dim: width of the tanh layer; 0: the head's width.

    Raises: ConfigError: hidden_dim is negative or too large.
    """

    kind: Literal["additive"] = "additive"
    hidden_dim: int = 0

    def __post_init__(self) -> None:
        check(self, "model.attention.", between(0, MOST_UNITS), "hidden_dim")

    def score(self, num_heads: int, head_dim: int) -> nn.Module:
        """See `AttentionConfig.score`."""
        from manyheads.nn.attention.scores import AdditiveScore

        return AdditiveScore(num_heads, head_dim, self.hidden_dim)


MOST_UNFACTORED = 64
"""With more buckets than this, their number is split into two factors.

Hashing a vector into n buckets takes n / 2 products per round; with factors n1 x n2 it takes (n1 + n2) / 2. For 256
buckets that is 16 instead of 128.
"""


@dataclass(frozen=True, kw_only=True)
class LSHSettings:
    """Hashed attention with queries that are their own keys.

        >>> LSHSettings(num_hashes=4, chunk_len=64).factors(max_len=4096)  # buckets of about one chunk
        (64,)

    Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2. Differs: `visible`; `correct_duplicates` is off; about l / m
        buckets, where the paper has 2 l / m.
    Args:
        num_hashes: number of hash rounds, n_rounds in the paper; 0: no hashing but exact attention with shared queries
            and keys, "full attention" in the paper's tables.
        num_buckets: n_buckets in the paper: an even number, or a tuple of even factors (as in trax and `transformers`);
            0: the result of `automatic_buckets`.
        chunk_len: number of positions in a chunk of the sorted sequence, m in the paper.
        chunks_before: number of chunks before its own that a query sees, with `visible="chunk"`.
        chunks_after: number of chunks after its own that a query sees, with `visible="chunk"`.
        causal: no position attends to a later one.
        visible: the keys that a query sees in a round. "bucket": the last `chunk_len` positions before it in its
            bucket. They depend on the past only, so training, evaluation and cached generation agree exactly. "chunk":
            all positions in its chunk and the neighbouring chunks, as in trax and `transformers`. The chunk boundaries
            depend on how many later positions are in lower buckets, so a causal model cannot generate with it.
        within_bucket: with "chunk", a query sees only positions of its bucket in the same round.
        correct_duplicates: a pair that meets in several rounds counts once (N_ij of eq. 13), not once per round.
        look_across_rounds: with "chunk", the last chunk of a round is a neighbour of the first chunk of the next round.
        wrap: with "chunk", the first and the last chunk are neighbours.
        exact_len: with "bucket", positions below it attend to all positions before them; with "chunk", sequences up to
            this length use exact attention. 0: none.
        scale: factor of the scores; keys have unit length.
        key_eps: added to the mean square of a key before the root.

    Raises: ConfigError: a number is out of range, or an option does not apply with this `visible`.
    """

    num_hashes: int = 4
    num_buckets: int | tuple[int, ...] = 0
    chunk_len: int = 64
    chunks_before: int = 1
    chunks_after: int = 0
    causal: bool = True
    visible: Literal["bucket", "chunk"] = "bucket"
    within_bucket: bool = False
    correct_duplicates: bool = False
    look_across_rounds: bool = False
    wrap: bool = False
    exact_len: int = 0
    scale: float = 1.0
    key_eps: float = 1e-6

    def __post_init__(self) -> None:
        check(self, "", between(1, MOST_UNITS), "chunk_len")
        check(self, "", between(0, MOST_UNITS), "num_hashes", "chunks_before", "chunks_after")
        check(self, "", at_least(0), "exact_len", hint=" (0: never exact)")
        if self.visible not in ("bucket", "chunk"):
            raise ConfigError(f"visible is {self.visible!r}; it must be 'bucket' or 'chunk'.", fields=["visible"])
        if self.num_buckets != 0:
            factors = self.factors(0)
            if not factors or any(factor < 2 or factor % 2 for factor in factors):
                raise ConfigError(
                    f"num_buckets is {self.num_buckets}; it must be 0 (automatic), an even number, or even factors,"
                    " because a direction and its opposite are two buckets.",
                    fields=["num_buckets"],
                )
        if self.visible == "bucket":
            if not self.causal:
                raise ConfigError(
                    "visible 'bucket' attends to earlier positions only; set causal, or set visible to 'chunk'.",
                    fields=("visible", "causal"),
                )
            if (self.chunks_before, self.chunks_after) != (1, 0):
                raise ConfigError(
                    "chunks_before and chunks_after apply to visible 'chunk' only; leave them at 1 and 0.",
                    fields=("chunks_before", "chunks_after", "visible"),
                )
            for name in ("within_bucket", "look_across_rounds", "wrap"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} applies to visible 'chunk' only, but visible is 'bucket'.", fields=(name, "visible")
                    )

    def factors(self, max_len: int) -> tuple[int, ...]:
        """Return the factors of the number of buckets for sequences of at most `max_len` tokens."""
        if isinstance(self.num_buckets, tuple):
            return self.num_buckets
        return (self.num_buckets,) if self.num_buckets else automatic_buckets(max_len, self.chunk_len)


def automatic_buckets(max_len: int, chunk_len: int) -> tuple[int, ...]:
    """Return factors of the smallest power of two that is at least max_len / chunk_len and at least 2.

    A bucket then has about as many positions as a chunk. Up to `MOST_UNFACTORED` buckets there is one factor, otherwise
    two, 2^floor(n / 2) and 2^ceil(n / 2). The number depends on the maximum length, not on the length of a sequence,
    so that a prefix has the same buckets as the whole sequence.
    """
    exponent = max(1, math.ceil(math.log2(max(max_len, 1) / chunk_len)))
    if 2**exponent <= MOST_UNFACTORED:
        return (2**exponent,)
    return (2 ** (exponent // 2), 2 ** (exponent - exponent // 2))
