"""The shapes of a Reformer: of one that reads alone (`ReformerConfig`), and of one that translates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from manyheads.errors import ConfigError
from manyheads.nn.attention.lsh_settings import LSHSettings

__all__ = ["LayerKind", "ReformerConfig", "ReformerSeq2SeqConfig", "automatic_axes"]

LayerKind = Literal["lsh", "local", "full"]
"""What a layer attends by: `lsh` hashing (sec. 2), `local` chunks, `full` exactly, with shared queries and keys."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What both configs share, and its checks.

    Args:
        d_model: width of each of the two streams.
        num_heads: attention heads.
        head_dim: width of a head; 0 takes d_model / num_heads. num_heads x head_dim need not be d_model.
        d_ff: inner width of the feed-forward layers.
        dropout: on embeddings, and on what attention and feed-forward layers add to a stream.
        attention_dropout: on attention weights.
        activation: of the feed-forward layers; `gelu` is exact.
        norm_eps: of the layer norms.
        max_len: longest sequence: the product of axial positions, the table of learned ones; sinusoidal ones have no
            limit. The automatic number of buckets is that of this length.
        chunk_len: tokens of a chunk of sorted ones, and as many are looked back upon (sec. 2, m = 2 l / n_buckets).
        num_hashes: hash rounds (n_rounds); 0 attends exactly.
        num_buckets: of one round: one number, or factors of it, all even; empty: such that a bucket is about a chunk
            long when max_len tokens are read.
        exact_len: the first so many positions of a sequence are attended exactly, without hashing.
        ff_chunk_len: positions that a feed-forward layer works on at once (sec. 3, chunking); 0 is all.
        reversible: keep no activations for the backward pass, and compute them again from each layer's output; false:
            the same model by plain backpropagation.
        keep_attention: with `reversible`, keep what hashed layers' heads put out, d_model numbers a token and layer
            in the type computed in: their attention is then not computed again, and a step is about a sixth faster.
        hash_seed: of the random rotations, in evaluation; in training they change with every call.
    """

    d_model: int = 1024
    num_heads: int = 8
    head_dim: int = 0
    d_ff: int = 4096
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation: Literal["relu", "gelu", "gelu_tanh", "swish"] = "relu"
    norm_eps: float = 1e-6
    max_len: int = 65_536
    chunk_len: int = 64
    num_hashes: int = 4
    num_buckets: tuple[int, ...] = ()
    exact_len: int = 0
    ff_chunk_len: int = 0
    reversible: bool = True
    keep_attention: bool = False
    hash_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("d_model", "num_heads", "d_ff", "max_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("head_dim", "ff_chunk_len", "hash_seed"):
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
        _ = self.lsh  # its own complaints

    @property
    def width_of_heads(self) -> int:
        """head_dim, filled in."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def lsh(self) -> LSHSettings:
        """Of the `lsh` kind."""
        return LSHSettings(
            num_hashes=self.num_hashes,
            num_buckets=self.num_buckets if len(self.num_buckets) > 1 else sum(self.num_buckets),
            chunk_len=self.chunk_len,
            exact_len=self.exact_len,
        )


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(_Sizes):
    """Kitaev et al. 2020, arXiv:2001.04451: a language model, or with `causal: false` an encoder.

    Args:
        architecture: what tells this config from those of other architectures.
        vocab_size: ids of the vocabulary; 0 takes the tokenizer's.
        num_layers: reversible blocks, of one attention and one feed-forward layer each.
        layers: what each block attends by; a pattern shorter than num_layers is repeated.
        positions: `axial` (sum of a row's and a column's trained vector, side by side), `sinusoidal`, `learned`.
        axial_shape: rows, columns and further axes; their product is at least max_len. Empty: two, nearly equal.
        axial_dims: width of each axis's vectors; they sum to d_model. Empty: equal shares.
        causal: no token sees a later one.
        visible: what a query sees of its neighbours in a round's sorted order. `bucket`: the chunk_len earlier tokens
            of its own bucket, which no later token can change; `chunk`: everything in its chunk and the chunks beside
            it, as in the originals: where chunks end depends on what comes later too. Encoders need it.
        chunks_before: with `chunk`, how many chunks before the query's own are seen.
        chunks_after: with `chunk`, how many chunks after it.
        within_bucket: with `chunk`, only the query's own bucket.
        correct_duplicates: a key seen in n rounds counts once, not n times (eq. 4, N_ij).
        look_across_rounds: with `chunk`, a round's first chunk sees the last of the round before.
        wrap: with `chunk`, the very first chunk sees the last one.
        local_chunk_len: tokens of a chunk of the `local` kind.
        local_chunks_before: how many chunks before its own a query sees there.
        local_chunks_after: how many chunks after it.
        local_wrap: the first chunk's neighbour is the last one, there.

    Raises: ConfigError: sizes that are not positive or do not fit one another, a rate outside [0, 1), options that
        contradict each other.
    """

    architecture: Literal["reformer"] = "reformer"
    vocab_size: int = 0
    num_layers: int = 12
    layers: tuple[LayerKind, ...] = ("lsh",)
    positions: Literal["axial", "sinusoidal", "learned"] = "axial"
    axial_shape: tuple[int, ...] = ()
    axial_dims: tuple[int, ...] = ()
    causal: bool = True
    visible: Literal["bucket", "chunk"] = "bucket"
    chunks_before: int = 1
    chunks_after: int = 0
    within_bucket: bool = False
    correct_duplicates: bool = False
    look_across_rounds: bool = False
    wrap: bool = False
    local_chunk_len: int = 64
    local_chunks_before: int = 1
    local_chunks_after: int = 0
    local_wrap: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_layers", "local_chunk_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("vocab_size", "local_chunks_before", "local_chunks_after"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must not be negative.")
        if not self.layers:
            raise ConfigError("model.layers is empty; name a kind for each layer, or a pattern to repeat.")
        if len(self.layers) > self.num_layers:
            raise ConfigError(
                f"model.layers names {len(self.layers)} kinds for model.num_layers {self.num_layers}; name fewer, or"
                " build more layers."
            )
        if self.causal and self.local_chunks_after:
            raise ConfigError(
                f"model.local_chunks_after is {self.local_chunks_after}, but a causal model sees nothing after; set it"
                " to 0, or model.causal to false."
            )
        self._check_axes()

    def _check_axes(self) -> None:
        if self.positions != "axial":
            if self.axial_shape or self.axial_dims:
                raise ConfigError(
                    f"model.axial_shape and model.axial_dims are for axial positions, not {self.positions!r} ones;"
                    " leave them empty."
                )
            return
        shape, dims = self.axes
        if min(shape) < 1 or math.prod(shape) < self.max_len:
            raise ConfigError(
                f"model.axial_shape {list(shape)} has {math.prod(shape):,} places, fewer than model.max_len"
                f" {self.max_len:,}; enlarge it, or lower max_len."
            )
        if len(dims) != len(shape) or min(dims) < 1 or sum(dims) != self.d_model:
            raise ConfigError(
                f"model.axial_dims {list(dims)} must be one width for each of the {len(shape)} axes, summing to"
                f" model.d_model {self.d_model}."
            )

    @property
    def lsh(self) -> LSHSettings:
        """Of the `lsh` kind."""
        return replace(
            super().lsh,
            causal=self.causal,
            visible=self.visible,
            chunks_before=self.chunks_before,
            chunks_after=self.chunks_after,
            within_bucket=self.within_bucket,
            correct_duplicates=self.correct_duplicates,
            look_across_rounds=self.look_across_rounds,
            wrap=self.wrap,
        )

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """axial_shape and axial_dims, filled in."""
        shape = self.axial_shape or automatic_axes(self.max_len)
        share, rest = divmod(self.d_model, len(shape))
        return shape, self.axial_dims or (*[share] * (len(shape) - 1), share + rest)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer attends by: num_layers of them."""
        return tuple(self.layers[index % len(self.layers)] for index in range(self.num_layers))

    def lower_bounds(self) -> tuple[int, int]:
        """What a model of this config has at least: tensors, and numbers in one of them."""
        inner = self.num_heads * self.width_of_heads
        rows = self.max_len if self.positions == "learned" else 0
        return self.num_layers, self.d_model * max(self.d_ff, inner, 2 * self.vocab_size, rows)

    def describe(self) -> str:
        """The sizes in a line."""
        kinds = "".join(f" {name}" for name in dict.fromkeys(self.kinds))
        return (
            f"{self.num_layers} layers ({', '.join(kinds.split())}), d_model {self.d_model}, {self.num_heads} heads of"
            f" {self.width_of_heads}, d_ff {self.d_ff}, {self.num_hashes} hashes, chunks of {self.chunk_len},"
            f" {math.prod(self.lsh.factors(self.max_len))} buckets, up to {self.max_len:,} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class ReformerSeq2SeqConfig(_Sizes):
    """The reversible encoder-decoder of Kitaev et al. 2020, sec. 5 (machine translation).

    Args:
        architecture: what tells this config from those of other architectures.
        source_vocab_size: ids on the source side; 0 takes the tokenizer's.
        target_vocab_size: ids on the target side; 0 takes the tokenizer's.
        num_encoder_layers: blocks that read the source.
        num_decoder_layers: blocks that write the target.
        attention: of encoder and decoder to themselves: `full` is exact with separate queries and keys, as in the
            paper's translators; `lsh` hashes. Attention to the source is exact.
        positions: `sinusoidal` or `learned`.
        tie_embeddings: `all`: source, target and output share one matrix; `decoder`: target and output; `embeddings`:
            source and target; `none`.

    Raises: ConfigError: as `ReformerConfig`, and tied tables of unlike sizes.
    """

    architecture: Literal["reformer-seq2seq"] = "reformer-seq2seq"
    source_vocab_size: int = 0
    target_vocab_size: int = 0
    d_model: int = 512
    d_ff: int = 2048
    max_len: int = 1024
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    attention: Literal["full", "lsh"] = "full"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    tie_embeddings: Literal["all", "decoder", "embeddings", "none"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_decoder_layers < 1:
            raise ConfigError(f"model.num_decoder_layers is {self.num_decoder_layers}; it must be at least 1.")
        for name in ("source_vocab_size", "target_vocab_size", "num_encoder_layers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must not be negative.")
        if self.tie_embeddings in ("all", "embeddings") and self.source_vocab_size != self.target_vocab_size:
            raise ConfigError(
                f"model.tie_embeddings is {self.tie_embeddings!r} but source_vocab_size {self.source_vocab_size}"
                f" differs from target_vocab_size {self.target_vocab_size}; use one joint vocabulary, or"
                " tie_embeddings 'decoder' or 'none'."
            )

    def lower_bounds(self) -> tuple[int, int]:
        """What a model of this config has at least: tensors, and numbers in one of them."""
        widest = max(self.source_vocab_size, self.target_vocab_size, self.d_ff, self.num_heads * self.width_of_heads)
        return self.num_encoder_layers + self.num_decoder_layers, self.d_model * widest

    def describe(self) -> str:
        """The sizes in a line."""
        return (
            f"{self.num_encoder_layers} + {self.num_decoder_layers} reversible layers, d_model {self.d_model},"
            f" {self.num_heads} heads of {self.width_of_heads}, d_ff {self.d_ff}, {self.attention} attention"
        )


def automatic_axes(max_len: int) -> tuple[int, int]:
    """The two most equal numbers, rows first, with a product of at least max_len: rows a power of two."""
    rows = 2 ** (max(0, math.ceil(math.log2(max_len))) // 2)
    return rows, math.ceil(max_len / rows)
