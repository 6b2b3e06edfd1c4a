"""`manyheads convert SOURCE -o DIR`: other implementations' models to ours, and back."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import command
from manyheads.cli.lines.output import check_model_output
from manyheads.cli.process import echo
from manyheads.config.checks import not_among
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError
from manyheads.extras.peers import FORMATS


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `manyheads convert`."""

    source: str = argument(
        "A folder, or owner/name on the Hugging Face hub (no pickle is ever fetched from there).", metavar="SOURCE"
    )
    output: str = option("The folder to write.", metavar="DIR", aliases=("-o",))
    origin: str | None = option(
        "The implementation that wrote SOURCE.", metavar="PEER", default_is="as its config.json says", name="from"
    )
    to: str | None = option(
        "Convert a model folder of manyheads into this implementation's format.",
        metavar="PEER",
        default_is="a model folder of manyheads",
    )
    from_pickle: bool = option(
        "Read pickle files: pytorch_model.bin or model.pt if there is no model.safetensors, and the vocabulary in "
        "cache.pkl. A separate process reads them and accepts only types on an allow-list.",
        default=False,
    )
    revision: str | None = option("Branch, tag or commit of a model on the hub.", default=None, metavar="NAME")
    replace: bool = option("Replace an existing model folder.", default=False)

    def __post_init__(self) -> None:
        for name, peer in (("--from", self.origin), ("--to", self.to)):
            if peer is not None and peer not in FORMATS:
                raise ConfigError(not_among(f"{name} is", peer, FORMATS))
        if self.to is not None and (self.origin is not None or self.from_pickle):
            raise ConfigError("--to converts a model folder of manyheads; leave out --from and --from-pickle.")


PAGE = CommandPage(
    ConvertOptions,
    f"""Convert a model of another implementation into a model folder, which translate, score, evaluate and
info read; or with --to, a model folder into the other implementation's. PEER is
{"; ".join(f"{peer} ({one.description})" for peer, one in FORMATS.items())}.
SOURCE holds config.json and model.safetensors, or a TensorFlow checkpoint. What cannot be converted is listed on
standard error, or the model is refused.""",
    (
        "manyheads convert opus-mt-en-de --output models/en-de",
        "manyheads convert opus-mt-en-de --from-pickle --output models/en-de",
        "manyheads convert models/en-de --to transformers/Marian --output opus-mt-en-de-again",
    ),
)


@command(PAGE, "convert")
def run(options: ConvertOptions) -> int:
    """Convert a model. Returns: the exit code."""
    output = Path(options.output)
    check_model_output(output, options.replace)
    from manyheads.models.hub import resolve_model_path

    source = resolve_model_path(options.source, revision=options.revision)
    if output.exists() and output.samefile(source):
        raise ConfigError(f"{output} is the folder that is read; give another one for --output.")
    from manyheads.extras.peers.convert import export_folder, import_folder

    if options.to is not None:
        done = export_folder(source, output, options.to, replace=options.replace)
        way = f"to {done.peer}"
    else:
        done = import_folder(
            source, output, peer=options.origin, from_pickle=options.from_pickle, replace=options.replace
        )
        way = f"from {done.peer}"
    for note in done.notes:
        echo(f"manyheads: {note}", file=sys.stderr)
    echo(f"converted {options.source} {way}, {done.num_parameters:,} parameters, into {output}")
    if done.next_command:
        echo(f"next: {done.next_command}")
    return 0
