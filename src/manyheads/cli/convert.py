"""`manyheads convert SOURCE -o DIR`: other implementations' models to ours, and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from manyheads.cli.average import check_output
from manyheads.cli.parsing import parse
from manyheads.errors import ConfigError

__all__ = ["ConvertOptions", "run"]

_DESCRIPTION = """Convert a model of another implementation into a model folder, which translate, score, evaluate and
info read; or with --to, a model folder into the other's. PEER is transformers/Marian (OPUS-MT, with its tokenizer and
generation options; needs manyheads[spm]), annotated-transformer, torch/Transformer (--to only: its two stacks),
transformers/TransfoXL, or kimiyoung/TransformerXL (the original code; its model.pt needs --from-pickle).
SOURCE holds config.json and model.safetensors. What cannot be kept is said on standard error, or refused."""

_EXAMPLES = (
    "manyheads convert opus-mt-en-de --output models/en-de",
    "manyheads convert opus-mt-en-de --from-pickle --output models/en-de",
    "manyheads convert models/en-de --to transformers/Marian --output opus-mt-en-de-again",
)

Peer = Literal[
    "transformers/Marian",
    "annotated-transformer",
    "torch/Transformer",
    "transformers/TransfoXL",
    "kimiyoung/TransformerXL",
]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `manyheads convert`."""

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """A folder, or owner/name on the Hugging Face hub (no pickle is ever fetched from there)."""
    output: Annotated[str, arg(aliases=["-o"], metavar="DIR")]
    """The folder to be made."""
    origin: Annotated[
        Peer | None, arg(name="from", metavar="PEER", help_behavior_hint="(default: as its config.json says)")
    ] = None
    """Who made SOURCE."""
    to: Annotated[Peer | None, arg(metavar="PEER", help_behavior_hint="(default: a model folder of ours)")] = None
    """Convert a model folder of ours into this implementation's."""
    from_pickle: Annotated[bool, arg(help_behavior_hint="")] = False
    """Without a model.safetensors, read pytorch_model.bin or model.pt: by an allow-list, in a process of its own."""
    revision: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Branch, tag or commit of a model on the hub."""
    replace: Annotated[bool, arg(help_behavior_hint="")] = False
    """Replace a model folder of that name."""

    def __post_init__(self) -> None:
        if self.to is not None and (self.origin is not None or self.from_pickle):
            raise ConfigError("--to begins with a model folder of ours; leave out --from and --from-pickle.")


def run(arguments: Sequence[str]) -> int:
    """Convert a model. Returns: the exit code."""
    options = parse(ConvertOptions, arguments, command="convert", description=_DESCRIPTION, examples=_EXAMPLES)
    output = Path(options.output)
    check_output(output, options.replace)
    from manyheads.architectures.hub import resolve_model_path

    source = resolve_model_path(options.source, revision=options.revision)
    if output.exists() and output.samefile(source):
        raise ConfigError(f"{output} is the folder that is read; choose another for --output.")
    from manyheads.interop.convert import export_folder, import_folder

    if options.to is not None:
        done = export_folder(source, output, options.to)
        way = f"to {done.peer}"
    else:
        done = import_folder(source, output, peer=options.origin, from_pickle=options.from_pickle)
        way = f"from {done.peer}"
    for note in done.notes:
        print(f"manyheads: {note}", file=sys.stderr)
    print(f"converted {options.source} {way}, {done.num_parameters:,} parameters, into {output}")
    if options.to is None and done.has_tokenizer:
        print(f"next: manyheads translate {output}")
    return 0
