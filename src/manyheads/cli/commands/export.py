"""`manyheads export MODEL --to FORMAT -o DIR`: a model in the format of another runtime."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.export_options import PAGE, ExportCommandOptions
from manyheads.cli.printing import say
from manyheads.interop.exports import ExportOptions

__all__ = ["PAGE", "run"]


@command(PAGE, "export")
def run(options: ExportCommandOptions) -> int:
    """Export a model. Returns: the exit code."""
    from manyheads.architectures.hub import resolve_model_path
    from manyheads.interop.exports.engine import export_model

    asked = ExportOptions(to=options.to, quantization=options.quantization, runtime=options.runtime)
    done = export_model(resolve_model_path(options.model), Path(options.output), asked, check=not options.no_check)
    if options.json:
        check = done.check and done.check.to_json()
        print(json.dumps({"format": options.to, "output": options.output, **vars(done), "check": check}))
        return 0
    for note in done.notes:
        say(f"manyheads: {note}", file=sys.stderr)
    say(f"wrote {options.output}, {done.num_bytes / 1e6:,.1f} MB, in the format {options.to}")
    say(done.check.describe() if done.check else f"not checked: {done.not_checked}")
    return 0
