"""Config and presets of the encoder-decoder Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from manyheads.catalogue import ATTENTIONS
from manyheads.config.checks import BELOW_ONE, MOST_LAYERS, MOST_UNITS, between, check, set_tuples
from manyheads.errors import ConfigError
from manyheads.models.size_checks import (
    HEAD_KINDS,
    Activation,
    HeadKind,
    check_attention_options,
    check_tied_sizes,
)
from manyheads.nn.attention.settings import DotProductAttentionConfig

if TYPE_CHECKING:
    from manyheads.nn.attention.settings import AttentionConfig
else:
    AttentionConfig = Union[tuple(ATTENTIONS.values())]  # noqa: UP007  (the classes are in the table)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Vaswani et al. 2017, arXiv:1706.03762, sec. 3; the defaults are its base model (table 3).

    Args:
        architecture: identifies the architecture.
        source_vocab_size: number of source ids; 0: the tokenizer's.
        target_vocab_size: number of target ids; 0: the tokenizer's.
        d_model: width of every layer.
        num_heads: attention heads; d_model is divided among them unless head_dim and value_dim are given.
        head_dim: d_k, width of queries and keys in a head; null: d_model / num_heads.
        value_dim: d_v, width of values in a head; null: d_model / num_heads.
        num_kv_heads: heads of keys and values, each for a group of queries' heads; it divides num_heads and
            num_decoder_heads. 0: as many as of queries, as in the paper. (Ainslie et al. 2023, arXiv:2305.13245.)
        d_ff: inner width of the feed-forward layers.
        num_decoder_heads: heads of the decoder; 0: num_heads.
        encoder_heads: heads of each encoder layer, if some were pruned, for example [8, 1, 5]; their width stays that
            of num_heads. Empty: num_heads in each.
        decoder_heads: the same for the decoder's self-attention.
        cross_heads: the same for the decoder's attention to the source.
        decoder_d_ff: d_ff of the decoder; 0: d_ff.
        num_encoder_layers: layers of the encoder.
        num_decoder_layers: layers of the decoder.
        dropout: on the sum of embeddings and positions, and on every sublayer's output before it is added (sec. 5.4).
        attention_dropout: on attention weights.
        feed_forward_dropout: between the two linear layers of the feed-forward layer.
        ffn: the feed-forward layers. `mlp`: W_2 activation(W_1 x), as in the paper; `swiglu`: W_2 (swish(W x) * W_1 x),
            with one more matrix (Shazeer 2020, arXiv:2002.05202).
        activation: of the feed-forward layers; `gelu` is exact, `gelu_tanh` and `quick_gelu` approximate it.
        norm_position: `post`: LN(x + f(x)) as in the paper; `pre`: x + f(LN(x)).
        norm: `layer`; `unbiased` (std with n - 1, eps outside the root, as in the Annotated Transformer); or `rms`,
            without mean and bias (Zhang and Sennrich 2019, arXiv:1910.07467).
        norm_eps: see norm.
        final_norm: one more norm after the last layer of each stack; null: only with `pre`.
        bias: biases in attention, feed-forward and norms.
        positions: `sinusoidal` (sec. 3.5; sine and cosine interleaved), `sinusoidal_halves` (all sines first),
            `learned`; `rotary`: queries and keys of self-attention are rotated by their positions (Su et al. 2021,
            arXiv:2104.09864); or `none`, which needs relative_bias.
        rotary_base: the slowest rotation's wavelength is about 2 pi x rotary_base positions.
        rotary_scaling: for longer texts than those of training: `linear` divides positions by rotary_factor, `ntk`
            multiplies rotary_base by rotary_factor^(d_k / (d_k - 2)); `none`.
        rotary_factor: see rotary_scaling.
        max_len: table size of learned positions, in tokens; sinusoidal ones have no limit.
        relative_bias: self-attention adds a trained number for each head and distance to the scores, up to this
            distance; farther tokens have the number of this one. The layers of a stack share the numbers, unless heads
            are pruned. 0: none, as in the paper. (Raffel et al. 2020, sec. 2.1.)
        scale_embedding: multiply embeddings by sqrt(d_model) (sec. 3.4).
        tie_embeddings: `all`: source, target and output share one matrix (sec. 3.4); `decoder`: target and output;
            `embeddings`: source and target; `none`.
        head_bias: a bias on the output logits.
        attention: the score function.
        initialisation: of the weights before training. `default`: Glorot-uniform in attention and feed-forward layers,
            N(0, 1 / d_model) in the tables of embeddings and the output; `glorot`: Glorot-uniform in all matrices, as
            in the Annotated Transformer.

    Raises: ConfigError: sizes are not positive or not divisible, a rate is outside [0, 1), or tied embeddings have
        different sizes.
    """

    task: ClassVar[Literal["translation"]] = "translation"
    memory_degree: ClassVar[int] = 2

    architecture: Literal["transformer"] = "transformer"
    source_vocab_size: int = 0
    target_vocab_size: int = 0
    d_model: int = 512
    num_heads: int = 8
    head_dim: int | None = None
    value_dim: int | None = None
    num_kv_heads: int = 0
    d_ff: int = 2048
    num_decoder_heads: int = 0
    encoder_heads: tuple[int, ...] = ()
    decoder_heads: tuple[int, ...] = ()
    cross_heads: tuple[int, ...] = ()
    decoder_d_ff: int = 0
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    dropout: float = 0.1
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    ffn: Literal["mlp", "swiglu"] = "mlp"
    activation: Activation = "relu"
    norm_position: Literal["post", "pre"] = "post"
    norm: Literal["layer", "unbiased", "rms"] = "layer"
    norm_eps: float = 1e-5
    final_norm: bool | None = None
    bias: bool = True
    positions: Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "none"] = "sinusoidal"
    rotary_base: float = 10_000.0
    rotary_scaling: Literal["none", "linear", "ntk"] = "none"
    rotary_factor: float = 1.0
    max_len: int = 1024
    relative_bias: int = 0
    scale_embedding: bool = True
    tie_embeddings: Literal["all", "decoder", "embeddings", "none"] = "all"
    head_bias: bool = False
    attention: AttentionConfig = field(default_factory=DotProductAttentionConfig)
    initialisation: Literal["default", "glorot"] = "default"

    def __post_init__(self) -> None:
        set_tuples(self)
        check(self, "model.", between(1, MOST_UNITS), "d_model", "num_heads", "d_ff", "max_len")
        check(self, "model.", between(1, MOST_UNITS), "head_dim", "value_dim")
        check(self, "model.", between(1, MOST_LAYERS), "num_decoder_layers")
        check(self, "model.", between(0, MOST_LAYERS), "num_encoder_layers")
        check(self, "model.", between(0, MOST_UNITS), "source_vocab_size", "target_vocab_size", "relative_bias")
        check(self, "model.", between(0, MOST_UNITS), "num_decoder_heads", "decoder_d_ff")
        check(self, "model.", BELOW_ONE, "dropout", "attention_dropout", "feed_forward_dropout", "norm_eps")
        for name in ("num_heads", "num_decoder_heads"):
            heads = getattr(self, name)
            if heads and self.d_model % heads and None in (self.head_dim, self.value_dim):
                divisors = [h for h in range(1, min(self.d_model, 64) + 1) if self.d_model % h == 0]
                raise ConfigError(
                    f"model.d_model {self.d_model} is not divisible by model.{name} {heads};"
                    f" use one of {divisors} heads, or a d_model that is a multiple of {heads}, or give both"
                    " model.head_dim and model.value_dim.",
                    fields=("d_model", name),
                )
        if self.positions == "none" and not self.relative_bias:
            raise ConfigError(
                "model.positions none needs a relative bias. model.relative_bias is 0, and the encoder does not know"
                " the order of the tokens; set it to a distance, for example 16, or choose other positions.",
                fields=("positions", "relative_bias"),
            )
        self._check_layer_heads()
        self._check_attention_options()
        check_tied_sizes(self)

    @classmethod
    def of_encoder(cls, config: Any) -> TransformerConfig:
        """Return a config whose encoder has the sizes of a config without a decoder: the fields of the same names."""
        same = {item.name for item in fields(cls)} & {item.name for item in fields(config)} - {"architecture"}
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), config.vocab_size)
        values = {name: getattr(config, name) for name in same}
        return cls(**sizes, **values, num_encoder_layers=config.num_layers)

    def heads_of(self, stack: Literal["encoder", "decoder"]) -> int:
        """Return the number of attention heads in that stack."""
        return (stack == "decoder" and self.num_decoder_heads) or self.num_heads

    def heads_in_layer(self, kind: HeadKind, layer: int) -> int:
        """Return the number of heads of one attention layer. kind: encoder and decoder: self-attention. layer: from
        0.
        """
        counts: tuple[int, ...] = getattr(self, f"{kind}_heads")
        return counts[layer] if counts else self.heads_of("encoder" if kind == "encoder" else "decoder")

    def has_pruned(self, kind: HeadKind) -> bool:
        """Whether the layers of that kind have numbers of heads of their own."""
        return bool(getattr(self, f"{kind}_heads"))

    def heads_by_layer(self) -> dict[HeadKind, tuple[int, ...]]:
        layers = (self.num_encoder_layers, self.num_decoder_layers, self.num_decoder_layers)
        return {
            kind: tuple(self.heads_in_layer(kind, layer) for layer in range(count))
            for kind, count in zip(HEAD_KINDS, layers, strict=True)
        }

    def with_heads(self, counts: Mapping[HeadKind, tuple[int, ...]]) -> TransformerConfig:
        return replace(self, **{f"{kind}_heads": tuple(of_layers) for kind, of_layers in counts.items()})  # type: ignore[arg-type]

    def _check_layer_heads(self) -> None:
        """Raises: ConfigError: another number of layers, or more heads in one than there are."""
        for kind in HEAD_KINDS:
            stack: Literal["encoder", "decoder"] = "encoder" if kind == "encoder" else "decoder"
            counts, layers = getattr(self, f"{kind}_heads"), getattr(self, f"num_{stack}_layers")
            most = self.heads_of(stack)
            if counts and (len(counts) != layers or not all(1 <= count <= most for count in counts)):
                raise ConfigError(
                    f"model.{kind}_heads is {list(counts)}; give {layers} numbers, one for each layer of the {stack},"
                    f" from 1 to {most}, its number of heads.",
                    fields=(f"{kind}_heads", f"num_{stack}_layers"),
                )

    def _check_attention_options(self) -> None:
        """See `check_attention_options`. Raises: ConfigError: also if heads of grouped queries are pruned, or rotary
        positions have another score.
        """
        heads = {name: getattr(self, name) for name in ("num_heads", "num_decoder_heads") if getattr(self, name)}
        odd = next((width for width in (self.head_dim_of("encoder"), self.head_dim_of("decoder")) if width % 2), 2)
        check_attention_options(self, heads, {"head_dim" if self.head_dim else "d_model": odd})
        pruned = next((f"{kind}_heads" for kind in HEAD_KINDS if self.has_pruned(kind)), None)
        if self.num_kv_heads and pruned:
            raise ConfigError(
                f"model.{pruned} is {list(getattr(self, pruned))}, but with model.num_kv_heads {self.num_kv_heads}"
                " several heads share their keys, so none can be pruned; set num_kv_heads to 0, or keep all heads.",
                fields=("num_kv_heads", pruned),
            )
        if self.positions == "rotary" and not isinstance(self.attention, DotProductAttentionConfig):
            raise ConfigError(
                f"model.positions rotary needs dot products, but model.attention is {self.attention.kind}; set it to"
                " dot_product, or choose other positions.",
                fields=("positions", "attention"),
            )

    def packing_lack(self, longest: int) -> str | None:
        """Return why sentences of up to `longest` tokens cannot be packed, as a sentence; None: they can."""
        if self.attention_dropout:
            rate = f"attention_dropout is {self.attention_dropout:g}"
            found = f"{rate}, but attention over packed sentences has no dropout of weights; set it to 0"
        elif not isinstance(self.attention, DotProductAttentionConfig):
            kind = f"attention is {self.attention.kind}"
            found = f"{kind}, but attention over packed sentences is by dot products; set it to dot_product"
        elif self.longest_input is not None and longest > self.longest_input:
            longer = f"but data.max_source_len or max_target_len is {longest}"
            found = f"max_len is {self.longest_input}, {longer}; raise max_len, or lower these"
        else:
            return None
        return f"data.batching is packed and model.{found}, or set data.batching to padded."

    def head_dim_of(self, stack: Literal["encoder", "decoder"]) -> int:
        """Return d_k in that stack."""
        return self.head_dim or self.d_model // self.heads_of(stack)

    def value_dim_of(self, stack: Literal["encoder", "decoder"]) -> int:
        """Return d_v in that stack."""
        return self.value_dim or self.d_model // self.heads_of(stack)

    @property
    def undivided(self) -> str:
        """The first of head_dim and value_dim that is not d_model / num_heads in both stacks, or the heads of layers if
        some are pruned, with its value; "" if all are. Most other programs divide d_model among the heads.
        """
        for name in ("head_dim", "value_dim"):
            width = getattr(self, name)
            if width and any(width * self.heads_of(stack) != self.d_model for stack in ("encoder", "decoder")):
                return f"{name} {width}"
        for kind in HEAD_KINDS:
            counts = getattr(self, f"{kind}_heads")
            if any(count != self.heads_of("encoder" if kind == "encoder" else "decoder") for count in counts):
                return f"{kind}_heads {list(counts)}"
        return ""

    def d_ff_of(self, stack: Literal["encoder", "decoder"]) -> int:
        """Return the inner width of the feed-forward layers in that stack."""
        return (stack == "decoder" and self.decoder_d_ff) or self.d_ff

    @property
    def has_final_norm(self) -> bool:
        """Whether each stack ends with a norm."""
        return self.norm_position == "pre" if self.final_norm is None else self.final_norm

    @property
    def longest_input(self) -> int | None:
        """See `protocols.ModelConfig`: the size of the table of learned positions."""
        return self.max_len if self.positions == "learned" else None

    def lower_bounds(self) -> tuple[int, int]:
        heads = max((self.heads_in_layer("encoder", layer) for layer in range(self.num_encoder_layers)), default=0)
        inner = (heads * self.head_dim_of("encoder"), heads * self.value_dim_of("encoder"))
        sizes = (self.source_vocab_size, self.target_vocab_size, self.d_ff, self.decoder_d_ff, self.d_model, *inner)
        return self.num_encoder_layers + self.num_decoder_layers, self.d_model * max(sizes)

    def describe(self) -> str:
        """Return the sizes in one line."""
        heads = f"{self.num_heads} heads"
        counts = [count for kind in HEAD_KINDS for count in getattr(self, f"{kind}_heads")]
        if counts:
            heads += f" ({sum(counts)} left in the layers)"
        elif self.undivided:
            heads += f" of {self.head_dim_of('encoder')} (values {self.value_dim_of('encoder')})"
        return (
            f"{self.num_encoder_layers} + {self.num_decoder_layers} layers, d_model {self.d_model},"
            f" {heads}, d_ff {self.d_ff}"
        )


PRESETS: dict[str, TransformerConfig] = {
    # A model that learns one batch in a second or two, with every component.
    "debug": TransformerConfig(
        d_model=32, num_heads=4, d_ff=64, num_encoder_layers=2, num_decoder_layers=2, dropout=0.1
    ),
    # Multi30k's Transformer-Tiny: Wu et al. 2021 (ACL), sec. 4.1.
    "tiny": TransformerConfig(
        d_model=128, num_heads=4, d_ff=256, num_encoder_layers=4, num_decoder_layers=4, dropout=0.3
    ),
    # Vaswani et al. 2017, table 3, row "base": 65M parameters with a vocabulary of 37,000.
    "base": TransformerConfig(),
    # Vaswani et al. 2017, table 3, row "big": 213M parameters.
    "big": TransformerConfig(d_model=1024, num_heads=16, d_ff=4096, dropout=0.3),
}
