"""Models as ONNX files, with the names of files, inputs and outputs that Optimum and transformers.js expect.

    Transformer      onnx/encoder_model.onnx   onnx/decoder_model_merged.onnx
    Transformer-XL   onnx/model.onnx: input_ids, mems.{i} -> logits, present_mems.{i}
    Reformer         onnx/model.onnx: input_ids, attention_mask -> logits; its encoder-decoder is refused

Beside them: config.json, generation_config.json, tokenizer.json, tokenizer_config.json as in transformers. With int8
the names end in `_quantized`.
"""

from __future__ import annotations

from pathlib import Path

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import load
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.errors import ConfigError
from manyheads.extras.exports import Check, ExportOptions
from manyheads.extras.exports import onnx_files as files
from manyheads.extras.exports.onnx_check import compare_language_model, compare_translation
from manyheads.extras.exports.onnx_language import write_language_model
from manyheads.extras.exports.onnx_translation import write_translation

__all__ = ["deviation", "suffix_of", "write"]


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`."""
    files.package("onnx")
    if options.quantization:
        files.package("onnxruntime.quantization")
    module = load(model).eval()
    files.check_size(module)
    if isinstance(module, Seq2Seq):
        return write_translation(module, model, target, suffix_of(options))
    if not isinstance(module, LanguageModel):
        raise ConfigError(
            f"the format onnx cannot hold a {module.config.architecture} (model.architecture); it holds transformer,"
            " transformer-xl and reformer. Use the folder with manyheads itself."
        )
    return write_language_model(module, model, target, suffix_of(options))


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """See `extras.exports`. The runtime is onnxruntime, on the CPU."""
    files.package("onnxruntime")
    module = load(model).eval()
    if isinstance(module, Seq2Seq):
        return compare_translation(module, model, target, sentences, options)
    assert isinstance(module, LanguageModel)  # no other is written
    return compare_language_model(module, model, target, sentences, options)


def suffix_of(options: ExportOptions) -> str:
    """Return the suffix of the files' names."""
    return "_quantized" if options.quantization else ""
