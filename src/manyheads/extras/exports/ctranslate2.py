"""Transformers for CTranslate2, which translates without torch, also in int8.

The folder holds model.bin, config.json and the vocabularies of CTranslate2, and our tokenizer's files. Tables of
positions are written out, as CTranslate2's own start at position 1 and have other frequencies. Padding and the start
token get a bias of -10,000 on their logits, since CTranslate2 does not ban them; so its log-probabilities are those of
the other tokens alone. Its length penalty is length ** p without EOS.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch
from torch import Tensor

from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.exports import Check, ExportOptions, check_architecture
from manyheads.extras.exports.compare import (
    LIMIT,
    MOST_TOKENS,
    never_produced,
    reference,
    tokenizer_of,
)
from manyheads.extras.peers.holding import TRANSFORMER, check_held, demand
from manyheads.installation import needing_extra
from manyheads.models.pretrained import load, read_config
from manyheads.nn.attention.settings import DotProductAttentionConfig

if TYPE_CHECKING:
    from manyheads.models.composites import Seq2Seq
    from manyheads.nn.attention.relative_bias import RelativeBias
    from manyheads.text.sides import Side

MIN_POSITIONS = 2048
"""Rows of a table of sinusoidal positions; longer texts fail in CTranslate2."""
_BANNED = -1e4
_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "swish": "SWISH",
    "quick_gelu": "GELUSigmoid",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}
_FORMAT = "the format ctranslate2"
HOLDS = {
    "transformer": {
        **TRANSFORMER,
        "activation": tuple(_ACTIVATIONS),
        "attention": (DotProductAttentionConfig(),),
        "norm": ("layer",),
        "relative_bias": (),
    }
}
"""See `peers.holding`, for each architecture."""


def runtime() -> Any:
    """Return the package ctranslate2. Raises: MissingExtraError: it is not installed."""
    with needing_extra("CTranslate2 is not installed", "ct2"):
        return importlib.import_module("ctranslate2")


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`. Raises: MissingExtraError: CTranslate2 is not installed."""
    runtime()
    config = read_config(model)
    check_architecture("ctranslate2", config.architecture)
    check_held(_FORMAT, config, HOLDS["transformer"], "model.")
    module: Any = load(model)
    if config.num_encoder_layers == 0:
        raise ConfigError(
            "the format ctranslate2 cannot hold a model with model.num_encoder_layers 0; it needs at least 1. Use"
            " --to transformers, or manyheads itself."
        )
    if config.norm_position == "post" and config.has_final_norm:
        demand(_FORMAT, "model.final_norm", True, (False,))
    if config.relative_bias and config.positions != "none":
        raise ConfigError(
            "the format ctranslate2 cannot hold a model with both model.relative_bias and model.positions"
            f" {config.positions!r}: with a relative bias it adds no positions. Train with model.positions none, or use"
            " another format or manyheads itself."
        )
    tokenizer = tokenizer_of(model, "ctranslate2")
    writer = tokenizer.target
    with torch.no_grad():
        spec = _spec(module, banned=never_produced(writer))
    target_pieces = pieces_of(writer, config.target_vocab_size)
    spec.register_source_vocabulary(pieces_of(tokenizer.source, config.source_vocab_size))
    spec.register_target_vocabulary(target_pieces)
    spec.config.unk_token = "<unk>"  # noqa: S105  (a token of text, not a password)
    spec.config.bos_token = spec.config.decoder_start_token = target_pieces[writer.bos_id]
    spec.config.eos_token = target_pieces[writer.eos_id]
    spec.config.add_source_bos, spec.config.add_source_eos = False, True
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.validate()
    spec.optimize(quantization=options.quantization)
    spec.save(str(target))
    for name, content in tokenizer.files().items():
        (target / name).write_bytes(content)
    notes = [f"Sources and translations may have at most {most_positions(config)} tokens."]
    if options.quantization in ("float16", "bfloat16"):
        notes.append(f"CTranslate2 computes in float32 where the processor has no {options.quantization}.")
    return notes


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """See `extras.exports`. The log-probabilities of the model's greedy outputs are compared."""
    package = runtime()
    module: Any = load(model)
    tokenizer = tokenizer_of(model, "ctranslate2")
    writer = tokenizer.target
    ours = reference(module, tokenizer, sentences)
    source_pieces = pieces_of(tokenizer.source, module.config.source_vocab_size)
    target_pieces = pieces_of(writer, module.config.target_vocab_size)
    # CTranslate2 adds EOS to sources and to scored targets.
    sources = [[source_pieces[i] for i in ids[:-1]] for ids in ours.sources]
    bodies = [ids[:-1] if ids[-1] == writer.eos_id else ids for ids in ours.outputs]
    translator = package.Translator(str(target), device="cpu")
    limit = min(MOST_TOKENS, (module.max_len or MOST_TOKENS + 1) - 1)
    found = translator.translate_batch(
        sources, beam_size=1, max_input_length=0, max_decoding_length=limit, min_decoding_length=0
    )
    scored = translator.score_batch(sources, [[target_pieces[i] for i in ids] for ids in bodies], max_input_length=0)
    wanted = ours.of_tokens(banned=never_produced(writer))
    largest = max(
        float((torch.tensor(one.log_probs[: len(row)]) - row).abs().max())
        for one, row in zip(scored, wanted, strict=True)
    )
    return Check(
        what="log-probabilities",
        deviation=largest,
        limit=None if options.quantization else LIMIT,
        num_sentences=len(sentences),
        num_equal=sum(
            one.hypotheses[0] == [target_pieces[i] for i in ids] for one, ids in zip(found, bodies, strict=True)
        ),
    )


def pieces_of(side: Side, size: int) -> list[str]:
    """Return a unique name for each of a table's rows, in the order of ids; rows without a piece are `<extra_ID>`."""
    pieces = list(getattr(side, "pieces", ())) or [side.tokens([index])[0] for index in range(side.vocab_size)]
    pieces = [*pieces[:size], *(f"<extra_{index}>" for index in range(len(pieces), size))]
    seen: set[str] = set()
    for index, piece in enumerate(pieces):
        if piece in seen:
            raise ModelFileError(
                f"the vocabulary has the piece {piece!r} twice (id {index}); CTranslate2 needs each once."
            )
        seen.add(piece)
    return pieces


def most_positions(config: Any) -> int:
    """Return the rows of an export's tables of positions: the maximum length of a source and of a translation."""
    longest: int = config.longest_input or max(MIN_POSITIONS, config.max_len)
    return longest


def _spec(module: Seq2Seq, banned: Sequence[int]) -> Any:
    """Return the filled `TransformerSpec`. banned: target ids that are never produced."""
    specs = importlib.import_module("ctranslate2.specs")
    layers = importlib.import_module("ctranslate2.specs.transformer_spec")
    config, body = module.config, module.body
    stacks = {}
    for stack in ("encoder", "decoder"):
        made = {"encoder": layers.TransformerEncoderSpec, "decoder": layers.TransformerDecoderSpec}[stack](
            getattr(config, f"num_{stack}_layers"),
            config.heads_of(stack),
            pre_norm=config.norm_position == "pre",
            no_final_norm=not config.has_final_norm,
            activation=getattr(specs.Activation, _ACTIVATIONS[config.activation]),
            relative_attention_bias=bool(config.relative_bias),
        )
        made.scale_embeddings = config.scale_embedding
        side: Literal["source", "target"] = "source" if stack == "encoder" else "target"
        if not config.relative_bias:
            rows = getattr(body, f"{side}_positions").rows(0, most_positions(config))
            made.position_encodings.encodings = rows.clone()
        for spec, layer in zip(made.layer, getattr(body, stack).layers, strict=True):
            _fill_layer(spec, layer)
        if config.has_final_norm:
            _fill_norm(made.layer_norm, getattr(body, stack).norm)
        stacks[stack] = made
    stacks["encoder"].embeddings[0].weight = body.source_embedding.weight
    stacks["decoder"].embeddings.weight = body.target_embedding.weight
    projection = stacks["decoder"].projection
    projection.weight = module.head.weight
    bias = torch.zeros(config.target_vocab_size) if module.head.bias is None else module.head.bias.clone()
    bias[list(banned)] = _BANNED
    projection.bias = bias
    return layers.TransformerSpec(stacks["encoder"], stacks["decoder"])


def _fill_layer(spec: Any, layer: Any) -> None:
    own = layer.self_attn
    _fill_linear(spec.self_attention.linear[0], own.q_proj, own.k_proj, own.v_proj)
    _fill_linear(spec.self_attention.linear[1], own.out_proj)
    _fill_norm(spec.self_attention.layer_norm, layer.self_attn_residual.norm)
    if own.relative_bias is not None:
        _fill_relative_bias(spec.self_attention, own.relative_bias)
    if hasattr(layer, "cross_attn"):
        cross = layer.cross_attn
        _fill_linear(spec.attention.linear[0], cross.q_proj)
        _fill_linear(spec.attention.linear[1], cross.k_proj, cross.v_proj)
        _fill_linear(spec.attention.linear[2], cross.out_proj)
        _fill_norm(spec.attention.layer_norm, layer.cross_attn_residual.norm)
    _fill_linear(spec.ffn.linear_0, layer.feed_forward.in_proj)
    _fill_linear(spec.ffn.linear_1, layer.feed_forward.out_proj)
    _fill_norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _fill_relative_bias(spec: Any, bias: RelativeBias) -> None:
    """Fill T5's table (buckets, heads). As many distances have a bucket of their own as in ours, and all farther ones
    get the same number, so that the growing buckets make no difference. In an encoder the second half of the table is
    for keys after the query.
    """
    numbers, own = bias.numbers(), bias.reach + 1
    sides = [numbers[:, :own].flip(1), numbers[:, bias.reach :]] if numbers.shape[1] > own else [numbers.flip(1)]
    farther = [side[:, -1:].expand(-1, own) for side in sides]
    buckets = [part for side, far in zip(sides, farther, strict=True) for part in (side, far)]
    spec.relative_attention_bias = torch.cat(buckets, 1).T.contiguous()
    spec.relative_attention_max_distance = numpy.dtype("int32").type(4 * own)


def _fill_linear(spec: Any, *layers: Any) -> None:
    """Fill one linear layer with several side by side."""
    spec.weight = torch.cat([layer.weight for layer in layers])
    if layers[0].bias is not None:
        spec.bias = torch.cat([layer.bias for layer in layers])


def _fill_norm(spec: Any, norm: Any) -> None:
    gamma: Tensor = norm.weight
    spec.gamma = gamma
    spec.beta = torch.zeros_like(gamma) if norm.bias is None else norm.bias
