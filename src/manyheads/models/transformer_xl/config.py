"""Config and presets of the Transformer-XL.

Presets of the paper follow Dai et al. 2019, sec. 4.1, with widths, memories, cutoffs and tying of the official scripts.
Cutoffs are for the vocabulary sizes of the corpora (WikiText-103: 267,735 words; One Billion Word: 793,471).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from manyheads.config.checks import BELOW_ONE, MOST_LAYERS, MOST_UNITS, at_least, between, check, set_tuples
from manyheads.errors import ConfigError
from manyheads.models.size_checks import HeadKind, check_heads_divide

AttentionKind = Literal["relative", "relative_learned", "absolute", "absolute_learned"]
"""Attention types 0 to 3 of the official code, in this order."""


@dataclass(frozen=True, kw_only=True)
class Attending:
    """The context of attention. No parameter depends on it, so it may differ between training and evaluation.

    Paper: Dai et al. 2019, sec. 3.2 (memory), 4.1 (longer memory in evaluation).
    Args:
        memory_len: cached positions per layer, in tokens; 0 turns recurrence off.
        clamp_len: larger distances count as this distance; null: no limit.
        same_length: every query attends to exactly the last memory_len positions, including itself, at every position
            in the segment; at least to itself.
        same_length_extra_key: with same_length, to one position more, as in the TensorFlow original.
        initial_memory: `empty`: before the first segment there is nothing to attend to. `zeros`: memory_len vectors of
            zeros, to which queries attend, as in the TensorFlow original and in TransfoXL.
        ext_len: tokens at the end of a segment that the next one reads again as context; they enter memory then.

    Raises: ConfigError: a negative length.
    """

    memory_len: int = 0
    clamp_len: int | None = None
    same_length: bool = False
    same_length_extra_key: bool = False
    initial_memory: Literal["empty", "zeros"] = "empty"
    ext_len: int = 0

    def __post_init__(self) -> None:
        check(self, "", at_least(0), "memory_len", "ext_len")
        check(self, "", at_least(0), "clamp_len", hint="; null has no limit")

    @property
    def window(self) -> int | None:
        """The number of visible keys before a query, without itself; None: all."""
        if not self.same_length:
            return None
        return self.memory_len if self.same_length_extra_key else max(1, self.memory_len) - 1


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig:
    """Dai et al. 2019, arXiv:1901.02860; the defaults are its base model for WikiText-103 without adaptive widths.

    Args:
        architecture: identifies the architecture.
        vocab_size: number of ids; 0: the tokenizer's.
        d_model: width of every layer.
        num_heads: attention heads.
        head_dim: width of a head; 0: d_model / num_heads. num_heads x head_dim need not be d_model.
        layer_heads: heads of each layer, if some were pruned, for example [8, 1, 5]; their width stays that of
            num_heads. Empty: num_heads in each.
        d_ff: inner width of the feed-forward layers.
        num_layers: layers.
        d_embed: width of the frequent tokens' vectors; 0: d_model.
        cutoffs: adaptive softmax: ids at which the clusters end, increasing, for ids ordered by decreasing frequency.
            Empty: one softmax over all ids.
        div_value: vectors of cluster i have width d_embed / div_value^i.
        dropout: on embeddings, positions, sublayers' outputs, inner activations of feed-forward layers, and the last
            hidden states.
        attention_dropout: on attention weights.
        attention: `relative` (sinusoidal distances, sec. 3.3), `relative_learned` (a trained vector and score for each
            distance, layer and head), `absolute` (sinusoidal positions at the input), `absolute_learned` (trained
            positions at each layer's input). Absolute positions are counted backwards from a segment's last token.
        relative_bias: `relative` attention adds a trained number for each head and distance to the scores, up to this
            distance, which clamp_len does not change; farther positions have the number of this one. Each layer has its
            own numbers. 0: none, as in the paper. (Raffel et al. 2020, sec. 2.1.)
        norm_position: `post`: LN(x + f(x)) as in the paper; `pre`: x + f(LN(x)), memory normalised too.
        norm_eps: of the layer norms.
        share_biases: one u and one v for all layers (`relative`).
        max_len: number of distances in learned kinds; all distances from max_len - 1 on are one.
        memory_len: positions per layer in memory during training; for this and the next five see `Attending`.
        clamp_len: larger distances count as this distance; null: no limit.
        same_length: every query attends to exactly the last memory_len positions, including itself.
        same_length_extra_key: with same_length, to one position more.
        initial_memory: `empty`, or `zeros`, which queries attend to.
        ext_len: tokens at the end of a segment that the next one reads again.
        tie_embeddings: the output tables are the embedding's.
        tie_projections: for every cluster, whether the output's projection is the embedding's; empty: none is.

    Raises: ConfigError: sizes are not positive, cutoffs do not increase, a rate is outside [0, 1), or tied tables do
        not exist.
    """

    task: ClassVar[Literal["language-modelling"]] = "language-modelling"
    memory_degree: ClassVar[int] = 2
    draws_hashes: ClassVar[bool] = False
    positions_from_start: ClassVar[bool] = False
    segment_multiple: ClassVar[int] = 1
    reads_forwards: ClassVar[bool] = True
    longest_input: ClassVar[None] = None
    hash_rounds: ClassVar[None] = None

    architecture: Literal["transformer-xl"] = "transformer-xl"
    vocab_size: int = 0
    d_model: int = 410
    num_heads: int = 10
    head_dim: int = 0
    layer_heads: tuple[int, ...] = ()
    d_ff: int = 2100
    num_layers: int = 16
    d_embed: int = 0
    cutoffs: tuple[int, ...] = ()
    div_value: int = 1
    dropout: float = 0.1
    attention_dropout: float = 0.0
    attention: AttentionKind = "relative"
    relative_bias: int = 0
    norm_position: Literal["post", "pre"] = "post"
    norm_eps: float = 1e-5
    share_biases: bool = True
    max_len: int = 1024
    memory_len: int = 150
    clamp_len: int | None = None
    same_length: bool = False
    same_length_extra_key: bool = False
    initial_memory: Literal["empty", "zeros"] = "empty"
    ext_len: int = 0
    tie_embeddings: bool = True
    tie_projections: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        set_tuples(self)
        check(self, "model.", between(1, MOST_UNITS), "d_model", "num_heads", "d_ff", "div_value", "max_len")
        check(self, "model.", between(1, MOST_LAYERS), "num_layers")
        check(self, "model.", between(0, MOST_UNITS), "vocab_size", "head_dim", "d_embed", "relative_bias")
        check(self, "model.", BELOW_ONE, "dropout", "attention_dropout", "norm_eps")
        check_heads_divide(self)
        if self.initial_memory == "zeros" and (self.norm_position, self.attention) != ("post", "relative"):
            raise ConfigError(
                f"model.initial_memory zeros needs norm_position post and attention relative, not {self.norm_position}"
                f" and {self.attention}; set initial_memory to empty.",
                fields=("initial_memory", "norm_position", "attention"),
            )
        if self.relative_bias and self.attention != "relative":
            raise ConfigError(
                f"model.relative_bias is {self.relative_bias}, but model.attention is {self.attention}; only relative"
                " attention has it. Set relative_bias to 0, or attention to relative.",
                fields=("relative_bias", "attention"),
            )
        self._check_layer_heads()
        self._check_clusters()
        _ = self.attending  # its own checks

    def _check_layer_heads(self) -> None:
        counts = self.layer_heads
        if counts and (len(counts) != self.num_layers or not all(1 <= count <= self.num_heads for count in counts)):
            raise ConfigError(
                f"model.layer_heads is {list(counts)}; give {self.num_layers} numbers, one for each layer, from 1 to"
                f" {self.num_heads}, the number of heads.",
                fields=("layer_heads", "num_layers"),
            )
        if self.uneven_heads and self.share_biases and self.attention == "relative":
            raise ConfigError(
                f"model.layer_heads is {list(counts)}, and layers with different heads cannot share u and v; set"
                " model.share_biases to false.",
                fields=("layer_heads", "share_biases"),
            )

    @property
    def uneven_heads(self) -> str:
        """layer_heads with its value, if a layer has other than num_heads heads; otherwise empty."""
        return f"layer_heads {list(self.layer_heads)}" if {*self.layer_heads} - {self.num_heads} else ""

    def heads_by_layer(self) -> dict[HeadKind, tuple[int, ...]]:
        return {"decoder": self.layer_heads or (self.num_heads,) * self.num_layers}

    def with_heads(self, counts: Mapping[HeadKind, tuple[int, ...]]) -> TransformerXLConfig:
        return replace(self, layer_heads=tuple(counts["decoder"]), share_biases=False)

    def _check_clusters(self) -> None:
        below = (*self.cutoffs, self.vocab_size) if self.vocab_size else self.cutoffs
        if any(low >= high for low, high in zip((0, *below), below, strict=False)):
            raise ConfigError(
                f"model.cutoffs is {list(self.cutoffs)}; cutoffs must increase, from above 0 to below vocab_size"
                f" {self.vocab_size or '(not set yet)'}.",
                fields=("cutoffs", "vocab_size"),
            )
        clusters = len(self.cutoffs) + 1
        if self.embedding_dim // self.div_value ** (clusters - 1) < 1:
            raise ConfigError(
                f"model.div_value {self.div_value} leaves no width for the last of {clusters} clusters of d_embed"
                f" {self.embedding_dim}.",
                fields=("div_value", "d_embed", "cutoffs"),
            )
        if self.tie_projections and len(self.tie_projections) != clusters:
            raise ConfigError(
                f"model.tie_projections has {len(self.tie_projections)} entries for {clusters} clusters; give one"
                " per cluster (one more than cutoffs), or none.",
                fields=("tie_projections", "cutoffs"),
            )
        if any(self.tie_projections) and not self.has_projections:
            raise ConfigError(
                "model.tie_projections ties projections, but with div_value 1 and d_embed equal to d_model there are"
                " none; leave it empty.",
                fields=("tie_projections", "div_value", "d_embed", "d_model"),
            )

    @property
    def width_of_heads(self) -> int:
        """head_dim with its default filled in."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def embedding_dim(self) -> int:
        """d_embed with its default filled in."""
        return self.d_embed or self.d_model

    @property
    def has_projections(self) -> bool:
        """Whether the model projects between embedding width and d_model."""
        return self.div_value > 1 or self.embedding_dim != self.d_model

    @property
    def has_adaptive_softmax(self) -> bool:
        return bool(self.cutoffs) or self.has_projections

    @property
    def has_narrow_embeddings(self) -> bool:
        return self.div_value > 1 and bool(self.cutoffs)

    @property
    def context_settings(self) -> dict[str, int]:
        return {"memory_len": self.memory_len}

    @property
    def reads_segments_apart(self) -> bool:
        return not self.memory_len and not self.ext_len

    @property
    def attending(self) -> Attending:
        """The context of attention in training."""
        return Attending(
            memory_len=self.memory_len,
            clamp_len=self.clamp_len,
            same_length=self.same_length,
            same_length_extra_key=self.same_length_extra_key,
            initial_memory=self.initial_memory,
            ext_len=self.ext_len,
        )

    def lower_bounds(self) -> tuple[int, int]:
        shortlist = self.cutoffs[0] if self.div_value > 1 and self.cutoffs else self.vocab_size
        learned = self.attention.endswith("learned")
        heads = max(self.heads_by_layer()["decoder"])
        inner = self.d_model if self.attention == "absolute_learned" else heads * self.width_of_heads
        widest = max(
            self.d_model * max(self.d_ff, heads * self.width_of_heads),
            self.embedding_dim * shortlist,
            self.max_len * inner if learned else 0,
        )
        return self.num_layers, widest

    def describe(self) -> str:
        """Return the sizes in one line."""
        left = f" ({sum(self.layer_heads)} left in the layers)" if self.layer_heads else ""
        return (
            f"{self.num_layers} layers, d_model {self.d_model}, {self.num_heads} heads of {self.width_of_heads}{left},"
            f" d_ff {self.d_ff}, {self.attention} attention, memory {self.memory_len}"
        )


PRESETS: dict[str, TransformerXLConfig] = {
    # A model that learns one batch in a second or two, with every component.
    "debug": TransformerXLConfig(d_model=32, num_heads=2, head_dim=12, d_ff=64, num_layers=2, memory_len=8),
    # For one novel, on two cores, in minutes.
    "demo": TransformerXLConfig(
        d_model=192,
        num_heads=4,
        head_dim=48,
        d_ff=768,
        num_layers=4,
        dropout=0.0,
        relative_bias=16,
        memory_len=128,
    ),
    # For a few megabytes of text on a CPU; used for speed comparisons.
    "small": TransformerXLConfig(d_model=256, num_heads=4, head_dim=64, d_ff=1024, num_layers=6, memory_len=128),
    # `small` without recurrence and with absolute positions: attention within segments only.
    # The kind of Al-Rfou et al. 2019, arXiv:1808.04444, the baseline of the paper's table of evaluation speed (sec.
    # 4.5).
    "vanilla-lm": TransformerXLConfig(
        d_model=256, num_heads=4, head_dim=64, d_ff=1024, num_layers=6, memory_len=0, attention="absolute"
    ),
    # Al-Rfou et al. 2019, sec. 3: 64 layers, contexts of 512 characters, positions trained in each layer: 219M
    # parameters, as the paper says of its evaluation. Without its auxiliary losses.
    "vanilla-lm-64": TransformerXLConfig(
        d_model=512,
        num_heads=2,
        head_dim=256,
        d_ff=2048,
        num_layers=64,
        dropout=0.55,
        memory_len=0,
        attention="absolute_learned",
        max_len=512,
    ),
    # enwik8 and text8, 12 layers: 41M parameters, 1.06 bits per character (table 2).
    "enwik8-base": TransformerXLConfig(d_model=512, num_heads=8, head_dim=64, d_ff=2048, num_layers=12, memory_len=512),
    # enwik8 and text8, 24 layers: 277M parameters, 0.99 bits per character (table 2).
    "enwik8-large": TransformerXLConfig(
        d_model=1024,
        num_heads=8,
        head_dim=128,
        d_ff=3072,
        num_layers=24,
        dropout=0.15,
        attention_dropout=0.15,
        share_biases=False,
        memory_len=768,
    ),
    # WikiText-103, 16 layers: 151M parameters, perplexity 24.0 (table 1).
    "wikitext103-base": TransformerXLConfig(head_dim=41, cutoffs=(20_000, 40_000, 200_000)),
    # WikiText-103, 18 layers: perplexity 18.3 (table 1). 285M parameters in total; the paper says 257M.
    "wikitext103-large": TransformerXLConfig(
        d_model=1024,
        num_heads=16,
        head_dim=64,
        d_ff=4096,
        num_layers=18,
        dropout=0.2,
        attention_dropout=0.2,
        share_biases=False,
        memory_len=384,
        cutoffs=(20_000, 40_000, 200_000),
        div_value=4,
        tie_projections=(False, True, True, True),
    ),
    # One Billion Word, 18 layers: perplexity 23.5 (table 4).
    # 358M parameters; the paper says 460M, which is the number with untied input and output tables.
    "lm1b-base": TransformerXLConfig(
        d_model=1024,
        num_heads=8,
        head_dim=128,
        d_ff=4096,
        num_layers=18,
        dropout=0.0,
        share_biases=False,
        memory_len=32,
        cutoffs=(60_000, 100_000, 640_000),
        div_value=4,
    ),
    # One Billion Word, 24 layers: perplexity 21.8 (table 4); sizes as in the official script. 841M parameters.
    "lm1b-large": TransformerXLConfig(
        d_model=1280,
        num_heads=16,
        head_dim=80,
        d_ff=8192,
        num_layers=24,
        dropout=0.05,
        attention_dropout=0.05,
        share_biases=False,
        memory_len=32,
        cutoffs=(60_000, 100_000, 640_000),
        div_value=4,
    ),
}
