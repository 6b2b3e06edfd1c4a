"""Settings of hashed attention: rounds, buckets, and which keys a query sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyheads.config.checks import MOST_UNITS, at_least, between, check
from manyheads.errors import ConfigError

__all__ = ["MOST_UNFACTORED", "LSHSettings", "automatic_buckets"]

# Beyond so many buckets, the number is split into two factors. One bucket is chosen among n by n / 2 products a vector
# and round, one among n1 x n2 by (n1 + n2) / 2: with 256 buckets 128 against 16.
MOST_UNFACTORED = 64


@dataclass(frozen=True, kw_only=True)
class LSHSettings:
    """Hashed attention with queries that are their own keys.

        >>> LSHSettings(num_hashes=4, chunk_len=64).factors(max_len=4096)  # buckets of about a chunk
        (64,)

    Paper: Kitaev et al. 2020, arXiv:2001.04451, sec. 2. Differs: `visible`.
    Args:
        num_hashes: rounds of hashing, n_rounds; 0 hashes nothing and attends exactly: "full attention" of the paper's
            tables, with shared queries and keys.
        num_buckets: n_buckets: an even number, or factors of it, each even (as trax and `transformers` factor it); 0
            chooses it by `automatic_buckets`.
        chunk_len: positions of a chunk of the sorted sequence, m.
        chunks_before: chunks before its own that a query sees (`visible="chunk"`).
        chunks_after: chunks after its own that a query sees (`visible="chunk"`).
        causal: no position attends to a later one.
        visible: whom a query sees in a round. "bucket": the last `chunk_len` positions before it that fell into its
            bucket. It depends on the past alone, so that training, evaluation and cached generation agree exactly.
            "chunk": everybody in its chunk and the neighbours, as the originals do; where the chunks end depends on
            how many later positions fell into lower buckets, so this rule is no business of a causal model's that
            generates.
        within_bucket: with "chunk", only positions of the same bucket in the same round.
        correct_duplicates: a pair that meets in several rounds counts once (eq. 4, appendix A), not once a round.
        look_across_rounds: with "chunk", a round's first chunk has the last of the round before it as neighbour.
        wrap: with "chunk", the very first chunk has the very last as neighbour, and the other way round.
        exact_len: with "bucket", positions below it see everything before them; with "chunk", whole sequences that are
            no longer than it attend exactly. 0: none.
        scale: of the scores, whose keys have unit length.
        key_eps: added to a key's mean square before the root.

    Raises: ConfigError: a number is out of range, or an option has no meaning under `visible`.
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
                    "visible 'bucket' attends to earlier positions only; without causal, visible must be 'chunk'.",
                    fields=("visible", "causal"),
                )
            if (self.chunks_before, self.chunks_after) != (1, 0):
                raise ConfigError(
                    "chunks_before and chunks_after are settings of visible 'chunk'; leave them at 1 and 0.",
                    fields=("chunks_before", "chunks_after", "visible"),
                )
            for name in ("within_bucket", "look_across_rounds", "wrap"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} is a setting of visible 'chunk'; visible is 'bucket'.", fields=(name, "visible")
                    )

    def factors(self, max_len: int) -> tuple[int, ...]:
        """The buckets' factors, of a model whose longest sequence is `max_len`."""
        if isinstance(self.num_buckets, tuple):
            return self.num_buckets
        return (self.num_buckets,) if self.num_buckets else automatic_buckets(max_len, self.chunk_len)


def automatic_buckets(max_len: int, chunk_len: int) -> tuple[int, ...]:
    """Factors of the power of two that makes a bucket about a chunk long: at least max_len / chunk_len, at least 2.

    One factor up to `MOST_UNFACTORED` buckets, else two, 2^floor(n / 2) and 2^ceil(n / 2). It is a function of the
    longest length, not of the length at hand: otherwise a prefix would be hashed otherwise than the whole.
    """
    exponent = max(1, math.ceil(math.log2(max(max_len, 1) / chunk_len)))
    if 2**exponent <= MOST_UNFACTORED:
        return (2**exponent,)
    return (2 ** (exponent // 2), 2 ** (exponent - exponent // 2))
