"""Floating-point operations of the three architectures' matrix products, by formula.

A multiplication and its addition are two. Products alone are counted: no softmax, norm, activation or sum. What is
computed twice to save memory is counted once. Attention is counted as the whole rectangle of queries and keys, masked
pairs included, so that a kernel which leaves some out does not look slower than it is. Padding counts as tokens.

Only configs are read, no model is built and torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.attention.settings import AdditiveAttentionConfig

__all__ = ["Work", "decoding", "reformer", "transformer", "transformer_xl", "transformer_xl_cached"]


@dataclass(frozen=True)
class Work:
    """Of one batch.

    Attributes:
        forward: reading it.
        without_gradient: those of `forward` through which no gradient goes.
    """

    forward: float
    without_gradient: float = 0.0

    @property
    def training(self) -> float:
        """Forward, then a product for the gradient of each of its two factors."""
        return 3 * self.forward - 2 * self.without_gradient


def transformer(config: TransformerConfig, batch: int, source_len: int, target_len: int) -> Work:
    """An encoder-decoder under teacher forcing.

    Args: target_len: tokens that the decoder reads, as many as it predicts.

    Raises: ValueError: additive attention, whose scores are no product.
    """
    width = _width(config)
    encoder = _encoder(config, source_len)
    self_attn = 8 * width**2 + 4 * target_len * width
    cross_attn = 4 * width**2 + 4 * source_len * width  # a target token's queries and outputs
    layer = self_attn + cross_attn + _feed_forward(width, config.d_ff_of("decoder"))
    decoder = config.num_decoder_layers * (target_len * layer + source_len * 4 * width**2)
    head = target_len * 2 * width * config.target_vocab_size
    return Work(float(batch * (encoder + decoder + head)))


def decoding(config: TransformerConfig, batch: int, source_len: int, num_tokens: int, num_beams: int = 1) -> float:
    """Greedy or beam search with cached keys and values: the source once, then num_tokens steps.

    The first step has one row a sentence, all others num_beams; cross-attention's keys are made once a sentence. Each
    row asks its own past alone (ours asks those of its sentence's other rows along with it, which is not counted).
    """
    width = _width(config)
    start = _encoder(config, source_len) + config.num_decoder_layers * source_len * 4 * width**2
    fixed = 12 * width**2 + 4 * source_len * width + _feed_forward(width, config.d_ff_of("decoder"))
    head = 2 * width * config.target_vocab_size
    total = 0
    for step in range(1, num_tokens + 1):
        rows = 1 if step == 1 else num_beams
        total += rows * (config.num_decoder_layers * (fixed + 4 * step * width) + head)
    return float(batch * (start + total))


def transformer_xl(config: TransformerXLConfig, lanes: int, segment_len: int, memory_len: int) -> Work:
    """A segment with a memory of hidden states, as in training: their keys and values are projected anew.

    Raises: ValueError: an adaptive softmax, or a kind of attention other than `relative`.
    """
    k_len = memory_len + segment_len
    width, inner = config.d_model, _inner(config)
    segment = _xl_segment(config, segment_len, k_len)
    memory = 4 * k_len * width * inner
    distances = 2 * k_len * width * inner  # of all lanes together
    forward = lanes * (config.num_layers * (segment + memory) + _xl_head(config, segment_len))
    # Distances are encoded by a formula, and a memory needs no gradient: of the two products that a projection's
    # gradients are, these need the one for the weights alone. (We compute the memory's, too: 2% of a step.)
    halved = config.num_layers * (distances + lanes * 4 * memory_len * width * inner)
    return Work(float(forward + config.num_layers * distances), halved / 2)


def transformer_xl_cached(config: TransformerXLConfig, lanes: int, segment_len: int, memory_len: int) -> float:
    """A segment in evaluation, where keys, values and the distances' projections are kept.

    Raises: ValueError: as `transformer_xl`.
    """
    own = 4 * segment_len * config.d_model * _inner(config)
    segment = _xl_segment(config, segment_len, memory_len + segment_len) + own
    return float(lanes * (config.num_layers * segment + _xl_head(config, segment_len)))


def reformer(config: ReformerConfig, batch: int, length: int) -> Work:
    """A sequence. A hashed query meets its own chunk and those beside it, in every round; hashing has no gradient."""
    width, inner = config.d_model, config.num_heads * config.width_of_heads
    settings = config.lsh
    forward = hashing = 0
    for kind in config.kinds:
        hashed = kind == "lsh" and settings.num_hashes > 0 and length > settings.exact_len
        if hashed:
            keys = settings.num_hashes * settings.chunk_len * (1 + settings.chunks_before + settings.chunks_after)
            hashing += inner * settings.num_hashes * sum(settings.factors(config.max_len))
        elif kind == "local":
            keys = config.local_chunk_len * (1 + config.local_chunks_before + config.local_chunks_after)
        else:
            keys = length
        projections = 6 if kind != "local" else 8  # queries are keys, but for the local kind
        forward += projections * width * inner + 4 * keys * inner + _feed_forward(width, config.d_ff)
    head = 2 * 2 * width * config.vocab_size  # both streams are read
    tokens = batch * length
    return Work(float(tokens * (forward + hashing + head)), float(tokens * hashing))


def _width(config: TransformerConfig) -> int:
    if isinstance(config.attention, AdditiveAttentionConfig):
        raise ValueError("attention is 'additive': its scores are no matrix product; only 'dot_product' is counted.")
    return config.d_model


def _encoder(config: TransformerConfig, source_len: int) -> int:
    """A sentence's source."""
    width = config.d_model
    layer = 8 * width**2 + 4 * source_len * width + _feed_forward(width, config.d_ff_of("encoder"))
    return config.num_encoder_layers * source_len * layer


def _feed_forward(width: int, inner: int) -> int:
    """A token's."""
    return 4 * width * inner


def _inner(config: TransformerXLConfig) -> int:
    if config.cutoffs or config.has_projections or config.attention != "relative":
        raise ValueError(
            f"cutoffs {list(config.cutoffs)}, d_embed {config.embedding_dim}, attention {config.attention!r}: counted"
            " is the 'relative' kind with one softmax over the vocabulary and d_embed equal to d_model."
        )
    return config.num_heads * config.width_of_heads


def _xl_segment(config: TransformerXLConfig, segment_len: int, k_len: int) -> int:
    """A layer's, of a lane, but for keys and values: scores by content and by distance, and the values' sum."""
    inner = _inner(config)
    projections = 4 * config.d_model * inner
    return segment_len * (projections + 6 * k_len * inner + _feed_forward(config.d_model, config.d_ff))


def _xl_head(config: TransformerXLConfig, segment_len: int) -> int:
    return segment_len * 2 * config.d_model * config.vocab_size
