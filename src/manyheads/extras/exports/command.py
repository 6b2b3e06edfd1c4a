"""`manyheads export MODEL --to FORMAT -o DIR`: a model in the format of another runtime."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo
from manyheads.config.options import CommandPage, Shared, option
from manyheads.extras.exports import EXPORTS, ExportOptions
from manyheads.files.verify import json_text

# The values of --quantization of all formats.
_QUANTIZATIONS = tuple(dict.fromkeys(kind for one in EXPORTS.values() for kind in one.quantizations))


@dataclass(frozen=True, kw_only=True)
class ExportCommandOptions:
    """Options of `manyheads export`."""

    model: str = Shared.model()
    to: str = option("The format; see above.", metavar="FORMAT")
    output: str = option("The folder to write; it must not exist.", metavar="DIR", aliases=("-o",))
    quantization: str | None = option(
        f"Quantised weights: {', '.join(_QUANTIZATIONS)}; see above which format has which.",
        metavar="KIND",
        default_is="float32",
    )
    runtime: str | None = option(
        "For web: the folder with transformers.js and onnxruntime-web from npm.", default=None, metavar="DIR"
    )
    no_check: bool = option(
        "Skip the check that compares the export in its runtime with the model on 20 random sentences.", default=False
    )
    json: bool = Shared.json("Print the result as one JSON object.")

    def __post_init__(self) -> None:
        ExportOptions(to=self.to, quantization=self.quantization, runtime=self.runtime)


def _about(name: str) -> str:
    one = EXPORTS[name]
    needs = f"; needs the extra {one.extra}" if one.extra else ""
    kinds = f"; --quantization {', '.join(one.quantizations)}" if one.quantizations else ""
    return f"{name} ({one.summary}{needs}{kinds})"


PAGE = CommandPage(
    ExportCommandOptions,
    f"""Write a model in the format of another runtime. FORMAT is {"; ".join(map(_about, EXPORTS))}.
A model that a format cannot represent is refused. docs/exporting.md shows how to run each export.""",
    (
        "manyheads export runs/demo --to ctranslate2 --quantization int8 --output demo-ct2",
        "manyheads export runs/demo --to transformers --output demo-transformers",
    ),
)


@command(PAGE, "export")
def run(options: ExportCommandOptions) -> int:
    """Export a model. Returns: the exit code."""
    from manyheads.extras.exports.engine import export_model
    from manyheads.models.hub import resolve_model_path

    asked = ExportOptions(to=options.to, quantization=options.quantization, runtime=options.runtime)
    done = export_model(resolve_model_path(options.model), Path(options.output), asked, check=not options.no_check)
    if options.json:
        check = done.check and done.check.to_json()
        print(json_text({"format": options.to, "output": options.output, **vars(done), "check": check}))
        return 0
    for note in done.notes:
        echo(f"manyheads: {note}", file=sys.stderr)
    echo(f"wrote {options.output}, {done.num_bytes / 1e6:,.1f} MB, in the format {options.to}")
    echo(done.check.describe() if done.check else f"not checked: {done.not_checked}")
    return 0
