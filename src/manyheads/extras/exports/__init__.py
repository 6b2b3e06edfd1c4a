"""Models in the formats of other runtimes: the table `EXPORTS`; `engine.export_model` writes one.

Importing this package does not import torch. The module of a format has two functions:

    write(model: Path, target: Path, options: ExportOptions) -> list[str]
        Writes all files into the empty folder `target`. Returns notes for the user, one sentence each.
        Raises ConfigError, ModelFileError: the format cannot hold the model; the message names the setting and an
        alternative. MissingExtraError: a package that writing needs is not installed.
    deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check
        Loads the export in its runtime and compares it with the model, on ids of sources without special ids.
        Raises MissingExtraError: the runtime is not installed. NotComparedError: the format has no runtime here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyheads.catalogue import Table
from manyheads.config.checks import not_among
from manyheads.errors import ConfigError, ManyHeadsError

__all__ = ["EXPORTS", "Check", "ExportOptions", "Format", "NotComparedError", "check_architecture"]


@dataclass(frozen=True)
class Format:
    """An entry of `EXPORTS`.

    architectures: of the models that it holds. summary: for the help. extra: of the package, needed to write or to
    check; "" if none. module: its code. quantizations: the values of --quantization that it supports.
    """

    name: str
    architectures: tuple[str, ...]
    summary: str
    extra: str = ""
    module: str = "manyheads.extras.exports.transformers"
    quantizations: tuple[str, ...] = ()


_XL = ("transformer-xl",)
EXPORTS: Table[Format] = Table(
    "format",
    {
        one.name: one
        for one in (
            Format(
                "ctranslate2",
                ("transformer",),
                "Transformer for CTranslate2",
                "ct2",
                "manyheads.extras.exports.ctranslate2",
                ("int8", "int16", "float16", "bfloat16"),
            ),
            Format(
                "transformers",
                ("transformer", "reformer", "decoder"),
                "Transformer as MarianMTModel or PegasusForConditionalGeneration, Reformer as ReformerModelWithLMHead,"
                " decoder as GPT2LMHeadModel",
                "hf",
            ),
            Format(
                "onnx",
                ("transformer", "transformer-xl", "reformer"),
                "for onnxruntime, Optimum and transformers.js; Reformer with exact attention",
                "onnx",
                "manyheads.extras.exports.onnx",
                ("int8",),
            ),
            Format(
                "web",
                ("transformer",),
                "a page that translates in the browser; --runtime",
                "onnx",
                "manyheads.extras.exports.web",
                ("int8",),
            ),
            Format(
                "annotated-transformer",
                ("transformer",),
                "Transformer for the Annotated Transformer's code; weights only",
            ),
            Format("torch/Transformer", ("transformer",), "encoder and decoder for torch.nn.Transformer; weights only"),
            Format("transformers/TransfoXL", _XL, "Transformer-XL for transformers up to 4.35; weights only"),
            Format("kimiyoung/TransformerXL", _XL, "Transformer-XL for the original PyTorch code; weights only"),
        )
    },
)


def check_architecture(to: str, architecture: str) -> None:
    """Raises: ConfigError: the format holds no models of this architecture."""
    if architecture not in EXPORTS[to].architectures:
        others = [name for name, one in EXPORTS.items() if architecture in one.architectures]
        remedy = f"use {' or '.join(others)}" if others else f"none of the formats does ({', '.join(EXPORTS)})"
        raise ConfigError(
            f"the format {to} cannot hold a {architecture} (model.architecture); it holds"
            f" {', '.join(EXPORTS[to].architectures)}; {remedy}. Use the folder with manyheads itself."
        )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of an export.

    Args:
        to: a name in `EXPORTS`.
        quantization: number type of the weights; None: float32, as in the model.
        runtime: for `web`, the folder into which npm installed the runtime.

    Raises: ConfigError: the format is unknown, or does not have this quantization.
    """

    to: str
    quantization: str | None = None
    runtime: str | None = None

    def __post_init__(self) -> None:
        if self.to not in EXPORTS:
            raise ConfigError(not_among("--to is", self.to, EXPORTS))
        kinds = EXPORTS[self.to].quantizations
        if self.quantization is not None and self.quantization not in kinds:
            known = f"it must be one of {', '.join(kinds)}" if kinds else "this format has none; leave it out"
            raise ConfigError(f"--quantization is {self.quantization!r} for the format {self.to}; {known}.")
        if self.runtime is not None and self.to != "web":
            raise ConfigError(f"--runtime is for the format web, not {self.to}; leave it out.")


@dataclass(frozen=True, kw_only=True)
class Check:
    """The comparison of an export with its model.

    what: the numbers that were compared, such as "logits". deviation: the largest difference. limit: the difference up
    to which the export is right; None for a quantized export. num_equal: how many of the num_sentences greedy outputs
    have the same ids; both 0 if the export generates nothing.
    """

    what: str
    deviation: float
    limit: float | None
    num_sentences: int
    num_equal: int

    def describe(self) -> str:
        """Return the result in one line."""
        equal = f"; {self.num_equal} of {self.num_sentences} greedy outputs are equal" if self.num_sentences else ""
        return f"largest deviation of the {self.what} {self.deviation:.1e}{equal}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dict(vars(self))


class NotComparedError(ManyHeadsError):
    """The export cannot be compared with its model here; the message gives the reason."""
