"""The shape of a Transformer-XL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

__all__ = ["Attending", "AttentionKind", "TransformerXLConfig"]

AttentionKind = Literal["relative", "relative_learned", "absolute", "absolute_learned"]
"""Attention types 0 to 3 of the official code, in this order."""


@dataclass(frozen=True, kw_only=True)
class Attending:
    """How far back a model looks. No parameter depends on it, so it may differ between training and evaluation.

    Paper: Dai et al. 2019, sec. 3.2 (memory), 4.1 (longer memory in evaluation).
    Args:
        memory_len: cached positions a layer, in tokens; 0 turns recurrence off.
        clamp_len: whatever is farther away counts as so far; null has no limit.
        same_length: every query sees the memory_len positions up to and with itself, no more, whatever its place in
            the segment; never less than itself.
        ext_len: tokens at the end of a segment that the next one reads again, as context; they enter memory then.

    Raises: ConfigError: a negative length.
    """

    memory_len: int = 0
    clamp_len: int | None = None
    same_length: bool = False
    ext_len: int = 0

    def __post_init__(self) -> None:
        for name in ("memory_len", "clamp_len", "ext_len"):
            value = getattr(self, name)
            if value is not None and value < 0:
                hint = "; null has no limit" if name == "clamp_len" else ""
                raise ConfigError(f"{name} is {value}; it must not be negative{hint}.")

    @property
    def window(self) -> int | None:
        """Keys before a query that it may see, itself not counted; None is all."""
        return max(1, self.memory_len) - 1 if self.same_length else None


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig:
    """Dai et al. 2019, arXiv:1901.02860; the defaults are its base model for WikiText-103 without adaptive widths.

    Args:
        architecture: what tells this config from those of other architectures.
        vocab_size: ids of the vocabulary; 0 takes the tokenizer's.
        d_model: width of every layer.
        num_heads: attention heads.
        head_dim: width of a head; 0 takes d_model / num_heads. num_heads x head_dim need not be d_model.
        d_ff: inner width of the feed-forward layers.
        num_layers: layers.
        d_embed: width of the frequent tokens' vectors; 0 takes d_model.
        cutoffs: ids at which a cluster ends, rising, the vocabulary being ordered by falling frequency: an adaptive
            softmax. Empty: one softmax over all.
        div_value: vectors of cluster i have width d_embed / div_value^i.
        dropout: on embeddings, positions, sublayers' outputs, the inner width of feed-forward layers, and the last
            hidden states.
        attention_dropout: on attention weights.
        attention: `relative` (sinusoidal distances, sec. 3.3), `relative_learned` (a trained vector and score for each
            distance, layer and head), `absolute` (sinusoidal positions at the input), `absolute_learned` (trained
            positions at each layer's input). Absolute positions count back from a segment's last token.
        norm_position: `post`: LN(x + f(x)) as in the paper; `pre`: x + f(LN(x)), memory normalised too.
        norm_eps: of the layer norms.
        share_biases: one u and one v for all layers (`relative`).
        max_len: distances that learned kinds tell apart; from max_len - 1 on all are one.
        memory_len: positions a layer that are remembered in training; for this and the next three see `Attending`.
        clamp_len: whatever is farther away counts as so far; null has no limit.
        same_length: every query sees the memory_len positions up to and with itself, no more.
        ext_len: tokens at the end of a segment that the next one reads again.
        tie_embeddings: output tables are the embedding's.
        tie_projections: for every cluster, whether the output's projection is the embedding's; empty: none is.

    Raises: ConfigError: sizes that are not positive, cutoffs that do not rise, a rate outside [0, 1), ties of what is
        not there.
    """

    architecture: Literal["transformer-xl"] = "transformer-xl"
    vocab_size: int = 0
    d_model: int = 410
    num_heads: int = 10
    head_dim: int = 0
    d_ff: int = 2100
    num_layers: int = 16
    d_embed: int = 0
    cutoffs: tuple[int, ...] = ()
    div_value: int = 1
    dropout: float = 0.1
    attention_dropout: float = 0.0
    attention: AttentionKind = "relative"
    norm_position: Literal["post", "pre"] = "post"
    norm_eps: float = 1e-5
    share_biases: bool = True
    max_len: int = 1024
    memory_len: int = 150
    clamp_len: int | None = None
    same_length: bool = False
    ext_len: int = 0
    tie_embeddings: bool = True
    tie_projections: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for name in ("d_model", "num_heads", "d_ff", "num_layers", "div_value", "max_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("vocab_size", "head_dim", "d_embed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must not be negative.")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; a rate must be in [0, 1).")
        if not 0 <= self.norm_eps < 1:
            raise ConfigError(f"model.norm_eps is {self.norm_eps}; it must be in [0, 1).")
        if not self.head_dim and self.d_model % self.num_heads:
            raise ConfigError(
                f"model.d_model {self.d_model} is not divisible by model.num_heads {self.num_heads}; change one of"
                " them, or give head_dim."
            )
        self._check_clusters()
        _ = self.attending  # its own complaints

    def _check_clusters(self) -> None:
        below = (*self.cutoffs, self.vocab_size) if self.vocab_size else self.cutoffs
        if any(low >= high for low, high in zip((0, *below), below, strict=False)):
            raise ConfigError(
                f"model.cutoffs is {list(self.cutoffs)}; cutoffs must rise, from above 0 to below vocab_size"
                f" {self.vocab_size or '(not set yet)'}."
            )
        clusters = len(self.cutoffs) + 1
        if self.embedding_dim // self.div_value ** (clusters - 1) < 1:
            raise ConfigError(
                f"model.div_value {self.div_value} leaves no width for the last of {clusters} clusters of d_embed"
                f" {self.embedding_dim}."
            )
        if self.tie_projections and len(self.tie_projections) != clusters:
            raise ConfigError(
                f"model.tie_projections has {len(self.tie_projections)} entries for {clusters} clusters; give one a"
                " cluster (one more than cutoffs), or none."
            )
        if any(self.tie_projections) and not self.has_projections:
            raise ConfigError(
                "model.tie_projections ties projections, but with div_value 1 and d_embed equal to d_model there are"
                " none; leave it empty."
            )

    @property
    def width_of_heads(self) -> int:
        """head_dim, filled in."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def embedding_dim(self) -> int:
        """d_embed, filled in."""
        return self.d_embed or self.d_model

    @property
    def has_projections(self) -> bool:
        """Whether something stands between the vectors of tokens and hidden states."""
        return self.div_value > 1 or self.embedding_dim != self.d_model

    @property
    def attending(self) -> Attending:
        """How the model looks back in training."""
        return Attending(
            memory_len=self.memory_len,
            clamp_len=self.clamp_len,
            same_length=self.same_length,
            ext_len=self.ext_len,
        )

    def lower_bounds(self) -> tuple[int, int]:
        """What a model of this config has at least: tensors, and numbers in one of them."""
        shortlist = self.cutoffs[0] if self.div_value > 1 and self.cutoffs else self.vocab_size
        learned = self.attention.endswith("learned")
        inner = self.d_model if self.attention == "absolute_learned" else self.num_heads * self.width_of_heads
        widest = max(
            self.d_model * max(self.d_ff, self.num_heads * self.width_of_heads),
            self.embedding_dim * shortlist,
            self.max_len * inner if learned else 0,
        )
        return self.num_layers, widest

    def describe(self) -> str:
        """The sizes in a line."""
        return (
            f"{self.num_layers} layers, d_model {self.d_model}, {self.num_heads} heads of {self.width_of_heads},"
            f" d_ff {self.d_ff}, {self.attention} attention, memory {self.memory_len}"
        )
