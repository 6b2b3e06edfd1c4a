"""Configs and presets of the Reformer: a language model or encoder (`ReformerConfig`), and an encoder-decoder.

Presets of the paper follow Kitaev et al. 2020, sec. 5; values that it omits come from the configs of its code (trax,
`configs/reformer_*.gin`). Attention uses our `visible: bucket`, not the original chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

from manyheads.config.checks import BELOW_ONE, MOST_LAYERS, MOST_UNITS, between, check, set_tuples
from manyheads.errors import ConfigError, RequestError
from manyheads.models.size_checks import check_heads_divide, check_tied_sizes
from manyheads.nn.attention.settings import LSHSettings

HashRounds = int | Literal["full"]
"""A number of hash rounds, or `full`: exact attention."""

LayerKind = Literal["lsh", "local", "full"]
"""The attention of a layer: `lsh` hashing (sec. 2), `local` chunks, `full` exactly, with shared queries and keys."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Common fields of both configs, and their checks.

    Args:
        d_model: width of each of the two streams.
        num_heads: attention heads.
        head_dim: width of a head; 0: d_model / num_heads. num_heads x head_dim need not be d_model.
        d_ff: inner width of the feed-forward layers.
        dropout: on embeddings, and on the outputs of attention and feed-forward layers.
        attention_dropout: on attention weights.
        activation: of the feed-forward layers; `gelu` is exact.
        norm_eps: of the layer norms.
        max_len: maximum sequence length: the product of axial positions, the size of the table of learned ones;
            sinusoidal ones have no limit. The automatic number of buckets is computed for this length.
        chunk_len: tokens per chunk of the sorted sequence; a chunk also attends to the chunk before (sec. 2, m = 2 l /
            n_buckets).
        num_hashes: hash rounds (n_rounds); 0: exact attention.
        num_buckets: buckets per round: one number, or its factors, all even; empty: such that a bucket is about as long
            as a chunk for a sequence of max_len tokens.
        exact_len: this many positions at the start of a sequence use exact attention, without hashing.
        ff_chunk_len: positions that a feed-forward layer computes at once (sec. 3, chunking); 0: all.
        reversible: keep no activations for the backward pass, and compute them again from each layer's output; false:
            the same model with ordinary backpropagation.
        keep_attention: with `reversible`, keep the outputs of the hashed layers' heads, d_model numbers per token and
            layer in the compute type: their attention is then not computed again, and a step is about a sixth faster.
        hash_seed: seed of the random rotations in evaluation; in training they change with every call.
    """

    memory_degree: ClassVar[int] = 1

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
        set_tuples(self)
        check(self, "model.", between(1, MOST_UNITS), "d_model", "num_heads", "d_ff", "max_len")
        check(self, "model.", between(0, MOST_UNITS), "head_dim", "ff_chunk_len")
        check(self, "model.", between(0, 2**63 - 1), "hash_seed")
        check(self, "model.", BELOW_ONE, "dropout", "attention_dropout", "norm_eps")
        check_heads_divide(self)
        _ = self.lsh  # its own checks

    @property
    def width_of_heads(self) -> int:
        """head_dim with its default filled in."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def lsh(self) -> LSHSettings:
        """Settings of the layer kind `lsh`: its fields of the same names, and the number of buckets."""
        same = {item.name for item in fields(LSHSettings)} & {item.name for item in fields(self)}
        values = {name: getattr(self, name) for name in same}
        values["num_buckets"] = self.num_buckets if len(self.num_buckets) > 1 else sum(self.num_buckets)
        return LSHSettings(**values)


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(_Sizes):
    """Kitaev et al. 2020, arXiv:2001.04451: a language model, or with `causal: false` an encoder.

    Args:
        architecture: identifies the architecture.
        vocab_size: number of ids; 0: the tokenizer's.
        num_layers: reversible blocks, each with one attention and one feed-forward layer.
        layers: the attention kind of each block; a pattern shorter than num_layers is repeated.
        positions: `axial` (a row's and a column's trained vectors, concatenated), `sinusoidal`, `learned`; or `none`:
            order is known only from causality and from local layers with `local_slopes`.
        axial_shape: sizes of the grid: rows, columns and further axes; their product is at least max_len. Empty: two
            nearly equal axes.
        axial_dims: width of each axis's vectors; they sum to d_model. Empty: equal widths.
        causal: no token attends to a later one.
        visible: the keys of a query in a round's sorted order. `bucket`: the chunk_len earlier tokens of its own
            bucket, which do not depend on later tokens; `chunk`: everything in its chunk and the neighbouring chunks,
            as in the original code, where chunk boundaries also depend on later tokens. Encoders need `chunk`.
        chunks_before: with `chunk`, number of visible chunks before the query's own.
        chunks_after: with `chunk`, number of visible chunks after it.
        within_bucket: with `chunk`, attend only within the query's own bucket.
        correct_duplicates: a key that a query reaches in n rounds counts once (N_ij of eq. 13); otherwise n times, as
            in `transformers` and reformer-pytorch.
        look_across_rounds: with `chunk`, a round's first chunk attends to the last chunk of the round before.
        wrap: with `chunk`, the very first chunk attends to the last one.
        local_chunk_len: tokens per chunk of the layer kind `local`.
        local_chunks_before: there, number of visible chunks before the query's own.
        local_chunks_after: there, number of visible chunks after it.
        local_wrap: there, the first chunk's neighbour is the last one.
        local_slopes: there, subtract slope x distance from the scores; slopes of the heads from 1/2 to 1/128 (see
            `nn.attention.relative_bias.local_slopes`). Not in the paper.
        train_slopes: with `local_slopes`, what is subtracted at each distance is trained for each head, and begins as
            slope x distance.
        shared_rotations: all layers hash with the same rotations, those that torch.manual_seed(hash_seed) gives on a
            CPU, as transformers with `hash_seed`; otherwise each layer has rotations of its own.
        pad_to_chunks: sequences that are longer than a chunk are padded to whole chunks of all kinds of layers before
            the first layer, as transformers does; the padding takes part in sorting. Otherwise each layer completes
            its last chunk itself.

    Raises: ConfigError: sizes are not positive or do not match, a rate is outside [0, 1), or options contradict each
        other.
    """

    task: ClassVar[Literal["language-modelling"]] = "language-modelling"
    draws_hashes: ClassVar[bool] = True
    reads_segments_apart: ClassVar[bool] = True
    positions_from_start: ClassVar[bool] = True
    has_adaptive_softmax: ClassVar[bool] = False
    has_narrow_embeddings: ClassVar[bool] = False

    architecture: Literal["reformer"] = "reformer"
    vocab_size: int = 0
    num_layers: int = 12
    layers: tuple[LayerKind, ...] = ("lsh",)
    positions: Literal["axial", "sinusoidal", "learned", "none"] = "axial"
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
    local_slopes: bool = False
    train_slopes: bool = False
    shared_rotations: bool = False
    pad_to_chunks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "model.", between(1, MOST_LAYERS), "num_layers")
        check(self, "model.", between(1, MOST_UNITS), "local_chunk_len")
        check(self, "model.", between(0, MOST_UNITS), "vocab_size", "local_chunks_before", "local_chunks_after")
        if not self.layers:
            raise ConfigError(
                "model.layers is empty; name a kind for each layer, or a pattern to repeat.", fields=["layers"]
            )
        if len(self.layers) > self.num_layers:
            raise ConfigError(
                f"model.layers names {len(self.layers)} kinds for model.num_layers {self.num_layers}; name fewer, or"
                " build more layers.",
                fields=("layers", "num_layers"),
            )
        if self.causal and self.local_chunks_after:
            raise ConfigError(
                f"model.local_chunks_after is {self.local_chunks_after}, but a causal model does not attend to"
                " later tokens; set it to 0, or model.causal to false.",
                fields=("local_chunks_after", "causal"),
            )
        if self.local_wrap and self.local_slopes:
            raise ConfigError(
                "model.local_wrap makes the first and the last chunk neighbours, so model.local_slopes has no distances"
                " there; set one of them to false.",
                fields=("local_wrap", "local_slopes"),
            )
        if self.train_slopes and not self.local_slopes:
            raise ConfigError(
                "model.train_slopes is true, but model.local_slopes is false, so there is nothing to train; set"
                " model.local_slopes to true.",
                fields=("train_slopes", "local_slopes"),
            )
        self._check_axes()

    def _check_axes(self) -> None:
        if self.positions != "axial":
            if self.axial_shape or self.axial_dims:
                raise ConfigError(
                    f"model.axial_shape and model.axial_dims are for axial positions, not {self.positions!r} ones;"
                    " leave them empty.",
                    fields=("axial_shape", "axial_dims"),
                )
            return
        shape, dims = self.axes
        if min(shape) < 1 or math.prod(shape) < self.max_len:
            raise ConfigError(
                f"model.axial_shape {list(shape)} has {math.prod(shape):,} positions, fewer than model.max_len"
                f" {self.max_len:,}; enlarge it, or lower max_len.",
                fields=("axial_shape", "max_len"),
            )
        if len(dims) != len(shape) or min(dims) < 1 or sum(dims) != self.d_model:
            raise ConfigError(
                f"model.axial_dims {list(dims)} must be one width for each of the {len(shape)} axes, summing to"
                f" model.d_model {self.d_model}.",
                fields=("axial_dims", "axial_shape", "d_model"),
            )

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """axial_shape and axial_dims with their defaults filled in."""
        shape = self.axial_shape or automatic_axes(self.max_len)
        share, rest = divmod(self.d_model, len(shape))
        return shape, self.axial_dims or (*[share] * (len(shape) - 1), share + rest)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The attention kind of each layer, num_layers of them."""
        return tuple(self.layers[index % len(self.layers)] for index in range(self.num_layers))

    @property
    def longest_input(self) -> int | None:
        if self.positions in ("sinusoidal", "none"):
            return None
        if not self.padding(self.max_len):
            return self.max_len
        return self.max_len // self._chunks * self._chunks or min(self._chunk_lens)

    def padding(self, length: int) -> int:
        """Return the number of positions that `pad_to_chunks` adds to a sequence: none if one chunk holds it."""
        if not self.pad_to_chunks or not self._chunk_lens or length <= min(self._chunk_lens):
            return 0
        return -length % self._chunks

    @property
    def _chunk_lens(self) -> list[int]:
        lens = {"lsh": self.chunk_len, "local": self.local_chunk_len}
        return [length for kind, length in lens.items() if kind in self.kinds]

    @property
    def _chunks(self) -> int:
        """The shortest length of whole chunks of all kinds of layers."""
        return math.lcm(*self._chunk_lens)

    @property
    def segment_multiple(self) -> int:
        """See `protocols.LanguageModelConfig`: whole chunks of all kinds of layers."""
        return self._chunks

    @property
    def reads_forwards(self) -> bool:
        return self.causal

    @property
    def context_settings(self) -> dict[str, int]:
        return {}

    @property
    def hash_rounds(self) -> HashRounds:
        return self.num_hashes if "lsh" in self.kinds else "full"

    def with_hash_rounds(self, rounds: HashRounds) -> Self:
        """Return the config with another number of hash rounds; no parameter depends on it.

        Paper: Kitaev et al. 2020, sec. 2.1, table 2.
        Args: rounds: of every hashed layer; if no layer hashes, of every exact layer. `full`: hashed layers become
            exact, with shared queries and keys.

        Raises: RequestError: all layers are local.
        """
        hashes = "lsh" in self.kinds
        if not hashes and "full" not in self.kinds:
            raise RequestError("all layers of this Reformer are local, so it has no hash rounds.")
        if rounds == "full":
            return replace(self, layers=tuple("full" if kind == "lsh" else kind for kind in self.layers))
        layers = self.layers if hashes else tuple("lsh" if kind == "full" else kind for kind in self.layers)
        # exact_len 0: otherwise short sequences would use exact attention, whatever the number of rounds.
        return replace(self, layers=layers, num_hashes=rounds, exact_len=0)

    def lower_bounds(self) -> tuple[int, int]:
        inner = self.num_heads * self.width_of_heads
        rows = self.max_len if self.positions == "learned" else 0
        return self.num_layers, self.d_model * max(self.d_ff, inner, 2 * self.vocab_size, rows)

    def describe(self) -> str:
        """Return the sizes in one line."""
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
        architecture: identifies the architecture.
        source_vocab_size: number of source ids; 0: the tokenizer's.
        target_vocab_size: number of target ids; 0: the tokenizer's.
        num_encoder_layers: blocks of the encoder.
        num_decoder_layers: blocks of the decoder.
        attention: self-attention of encoder and decoder: `full` is exact with separate queries and keys, as in the
            paper's translation models; `lsh` hashes. Cross-attention is always exact.
        positions: `sinusoidal` or `learned`.
        tie_embeddings: `all`: source, target and output share one matrix; `decoder`: target and output; `embeddings`:
            source and target; `none`.

    Raises: ConfigError: as `ReformerConfig`, and tied embeddings of different sizes.
    """

    task: ClassVar[Literal["translation"]] = "translation"

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
        check(self, "model.", between(1, MOST_LAYERS), "num_decoder_layers")
        check(self, "model.", between(0, MOST_LAYERS), "num_encoder_layers")
        check(self, "model.", between(0, MOST_UNITS), "source_vocab_size", "target_vocab_size")
        check_tied_sizes(self)

    @property
    def longest_input(self) -> int | None:
        """See `protocols.ModelConfig`: the size of the table of learned positions."""
        return self.max_len if self.positions == "learned" else None

    def lower_bounds(self) -> tuple[int, int]:
        widest = max(self.source_vocab_size, self.target_vocab_size, self.d_ff, self.num_heads * self.width_of_heads)
        return self.num_encoder_layers + self.num_decoder_layers, self.d_model * widest

    def describe(self) -> str:
        """Return the sizes in one line."""
        return (
            f"{self.num_encoder_layers} + {self.num_decoder_layers} reversible layers, d_model {self.d_model},"
            f" {self.num_heads} heads of {self.width_of_heads}, d_ff {self.d_ff}, {self.attention} attention"
        )


def automatic_axes(max_len: int) -> tuple[int, int]:
    """Return the two most equal numbers, rows first, with a product of at least max_len; rows are a power of two."""
    rows = 2 ** (max(0, math.ceil(math.log2(max_len))) // 2)
    return rows, math.ceil(max_len / rows)


PRESETS: dict[str, ReformerConfig] = {
    # A model that learns one batch in a second or two, with every component.
    "debug": ReformerConfig(
        d_model=32,
        num_heads=2,
        head_dim=12,
        d_ff=64,
        num_layers=2,
        layers=("local", "lsh"),
        max_len=64,
        chunk_len=4,
        local_chunk_len=4,
        num_hashes=2,
        ff_chunk_len=8,
    ),
    # 16,384 bytes of context on a CPU; used for speed comparisons.
    "small": ReformerConfig(d_model=256, num_heads=4, d_ff=1024, num_layers=4, max_len=16_384, dropout=0.0),
    # enwik8 at 65,536 bytes: 12 layers, 1.19 bits per byte after 20K steps, 1.05 tuned (sec. 5, the last paragraph).
    # Kinds of layers, chunks, hashes and axes follow trax, with the widths that it gives for more memory.
    "enwik8": ReformerConfig(
        d_model=1024,
        num_heads=8,
        head_dim=128,
        d_ff=4096,
        num_layers=12,
        layers=("local", "local", "lsh", "local"),
        axial_shape=(128, 512),
        axial_dims=(256, 768),
        max_len=65_536,
        num_hashes=2,
        num_buckets=(16, 32),
        chunk_len=256,
        local_chunk_len=128,
        dropout=0.2,
        attention_dropout=0.2,
        ff_chunk_len=8192,
    ),
    # 64 x 64 RGB images as 12,288 bytes in raster order; rows, columns and colours are the three axes (trax).
    "imagenet64": ReformerConfig(
        d_model=1024,
        num_heads=8,
        head_dim=64,
        d_ff=4096,
        num_layers=6,
        axial_shape=(64, 64, 3),
        axial_dims=(384, 384, 256),
        max_len=12_288,
        num_hashes=2,
        num_buckets=(12, 16),
        chunk_len=128,
        dropout=0.0,
        attention_dropout=0.2,
        activation="gelu_tanh",
        ff_chunk_len=4096,
    ),
    # Sequences of 1,048,576 bytes, on two cores with 18 GiB of memory (`benchmarks/reformer_length.py`).
    "million": ReformerConfig(
        d_model=256,
        num_heads=4,
        d_ff=1024,
        num_layers=4,
        axial_shape=(1024, 1024),
        axial_dims=(128, 128),
        max_len=1 << 20,
        num_hashes=2,
        dropout=0.0,
        ff_chunk_len=4096,
    ),
}
SEQ2SEQ_PRESETS: dict[str, ReformerSeq2SeqConfig] = {
    # A model for tests, with hashing.
    "debug": ReformerSeq2SeqConfig(
        d_model=32,
        num_heads=4,
        d_ff=64,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_len=64,
        attention="lsh",
        chunk_len=4,
        num_hashes=2,
    ),
    # WMT14 English-German, 6 + 6 layers: 27.6 BLEU after 100K steps, 28.0 after 500K with nothing tied (table 4).
    "wmt-base": ReformerSeq2SeqConfig(),
    # WMT14 English-German: 29.1 BLEU after 300K steps with nothing tied (table 4); dropout is the Transformer's.
    "wmt-big": ReformerSeq2SeqConfig(d_model=1024, num_heads=16, d_ff=4096, dropout=0.3, tie_embeddings="none"),
}
