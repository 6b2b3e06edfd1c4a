"""The options of `manyheads export`."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.config.options import CommandPage, argument, option
from manyheads.interop.exports import EXPORTS, QUANTIZATIONS, ExportOptions

__all__ = ["PAGE", "ExportCommandOptions"]


@dataclass(frozen=True, kw_only=True)
class ExportCommandOptions:
    """Options of `manyheads export`."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    to: str = option("The format; see above.", metavar="FORMAT")
    output: str = option("The folder to write; it must not exist.", metavar="DIR", aliases=("-o",))
    quantization: str | None = option(
        f"Smaller weights: {', '.join(QUANTIZATIONS)}; see above which format has which.",
        metavar="KIND",
        default_is="float32",
    )
    runtime: str | None = option(
        "For web: the folder with transformers.js and onnxruntime-web from npm.", default=None, metavar="DIR"
    )
    no_check: bool = option(
        "Do not load the export in its runtime to compare it with the model on 20 random sentences.", default=False
    )
    json: bool = option("Print the result as one JSON object.", default=False)

    def __post_init__(self) -> None:
        ExportOptions(to=self.to, quantization=self.quantization, runtime=self.runtime)


def _about(name: str) -> str:
    one = EXPORTS[name]
    needs = f"; needs manyheads[{one.extra}]" if one.extra else ""
    kinds = f"; --quantization {', '.join(one.quantizations)}" if one.quantizations else ""
    return f"{name} ({one.summary}{needs}{kinds})"


PAGE = CommandPage(
    ExportCommandOptions,
    f"""Write a model in the format of another runtime. FORMAT is {"; ".join(map(_about, EXPORTS))}.
What a format cannot hold is refused. docs/exporting.md shows how to run each export.""",
    (
        "manyheads export runs/demo --to ctranslate2 --quantization int8 --output demo-ct2",
        "manyheads export runs/demo --to transformers --output demo-transformers",
    ),
)
