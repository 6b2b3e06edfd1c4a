"""`manyheads convert SOURCE -o DIR`: other implementations' models to ours, and back."""

from __future__ import annotations

import sys
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.convert_options import PAGE, ConvertOptions
from manyheads.cli.lines.output import check_model_output
from manyheads.cli.printing import say
from manyheads.errors import ConfigError

__all__ = ["PAGE", "run"]


@command(PAGE, "convert")
def run(options: ConvertOptions) -> int:
    """Convert a model. Returns: the exit code."""
    output = Path(options.output)
    check_model_output(output, options.replace)
    from manyheads.architectures.hub import resolve_model_path

    source = resolve_model_path(options.source, revision=options.revision)
    if output.exists() and output.samefile(source):
        raise ConfigError(f"{output} is the folder that is read; give another one for --output.")
    from manyheads.interop.convert import export_folder, import_folder

    if options.to is not None:
        done = export_folder(source, output, options.to)
        way = f"to {done.peer}"
    else:
        done = import_folder(source, output, peer=options.origin, from_pickle=options.from_pickle)
        way = f"from {done.peer}"
    for note in done.notes:
        say(f"manyheads: {note}", file=sys.stderr)
    say(f"converted {options.source} {way}, {done.num_parameters:,} parameters, into {output}")
    if done.next_command:
        say(f"next: {done.next_command}")
    return 0
