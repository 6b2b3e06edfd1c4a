"""Models as ONNX files, with the names of files, inputs and outputs that Optimum and transformers.js expect.

    Transformer      onnx/encoder_model.onnx   onnx/decoder_model_merged.onnx
    Transformer-XL   onnx/model.onnx: input_ids, mems.{i} -> logits, present_mems.{i}
    Reformer         onnx/model.onnx: input_ids, attention_mask -> logits; its encoder-decoder is refused

Beside them: config.json, generation_config.json, tokenizer.json, tokenizer_config.json as in transformers. With int8
the names end in `_quantized`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyheads.architectures.pretrained import load, read_config
from manyheads.extras.exports import Check, ExportOptions, check_architecture
from manyheads.extras.exports import onnx_files as files
from manyheads.extras.exports.onnx_check import compare_language_model, compare_translation
from manyheads.extras.exports.onnx_language import write_language_model
from manyheads.extras.exports.onnx_translation import write_translation
from manyheads.extras.peers.holding import REFORMER, TRANSFORMER, TRANSFORMER_XL, any_of, check_held
from manyheads.nn.attention.kinds import AdditiveAttentionConfig, DotProductAttentionConfig

__all__ = ["HOLDS", "deviation", "suffix_of", "write"]

HOLDS = {
    "transformer": {
        **TRANSFORMER,
        **any_of("activation norm relative_bias"),
        "attention": (DotProductAttentionConfig, AdditiveAttentionConfig),
    },
    "transformer-xl": {**TRANSFORMER_XL, "ext_len": (0,), "relative_bias": ()},
    "reformer": REFORMER,
}
"""See `peers.holding`, for each architecture."""


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`."""
    files.package("onnx")
    if options.quantization:
        files.package("onnxruntime.quantization")
    config = read_config(model)
    check_architecture("onnx", config.architecture)
    check_held("the format onnx", config, HOLDS[config.architecture], "model.")
    module: Any = load(model).eval()
    files.check_size(module)
    if config.architecture == "transformer":
        return write_translation(module, model, target, suffix_of(options))
    return write_language_model(module, model, target, suffix_of(options))


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """See `extras.exports`. The runtime is onnxruntime, on the CPU."""
    files.package("onnxruntime")
    module: Any = load(model).eval()
    compare = compare_translation if module.config.architecture == "transformer" else compare_language_model
    return compare(module, model, target, sentences, options)


def suffix_of(options: ExportOptions) -> str:
    """Return the suffix of the files' names."""
    return "_quantized" if options.quantization else ""
