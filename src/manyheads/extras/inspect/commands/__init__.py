"""`manyheads inspect WHAT ...`: pictures and tables of a model, and of formulas."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyheads.cli.command_line.parsing import help_page
from manyheads.cli.process import echo
from manyheads.config.checks import did_you_mean

if TYPE_CHECKING:
    from manyheads.extras.inspect.options import InspectCommand

__all__ = ["KINDS", "kind_of", "run"]

KINDS = {
    "attention": "the attention weights of each head: an interactive page, or pictures",
    "architecture": "the blocks of a model, and the operations of its attention (figures 1 and 2 of the papers)",
    "embeddings": "nearest neighbours of words, and a map of tokens",
    "shapes": "every tensor from input to output, with its shape and equation",
    "buckets": "the bucket of each token in a Reformer's hashed attention",
    "heads": "how much each head matters, and to which positions it attends",
    "pruning": "BLEU or perplexity by the share of heads that are pruned",
    "masks": "which keys each query may attend to: padding, causal, window, memory, blocks",
    "segments": "what a language model reads, without and with memory, in training and in evaluation",
    "positions": "position encodings: the table, and some features as curves",
    "schedule": "learning rates over a run",
    "smoothing": "label smoothing: target distributions, and the loss of a confident model",
}
"""The name of each kind, with a sentence about what it shows."""

_FILES = {
    "formulas": ("masks", "segments", "positions", "schedule", "smoothing"),
    "heads": ("heads", "pruning"),
    "model": ("attention", "buckets", "architecture", "embeddings", "shapes"),
}
"""File of this folder -> the kinds in it; each is an `InspectCommand` of its name."""

_EXAMPLES = (
    'manyheads inspect attention runs/demo --text "I am hungry."',
    'manyheads inspect shapes runs/demo --text "I am hungry."',
    "manyheads inspect positions --d-model 64 --length 100",
)


def kind_of(name: str) -> InspectCommand:
    """Return a kind, whose file is imported."""
    file = next(file for file, names in _FILES.items() if name in names)
    found: InspectCommand = getattr(importlib.import_module(f"manyheads.extras.inspect.commands.{file}"), name)
    return found


def run(arguments: Sequence[str]) -> int:
    """Run one kind. Returns: its exit code; 2 for a kind that there is not."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, KINDS))
        lines = [f"  {name:<{width}}  {what}" for name, what in KINDS.items()]
        usage = "manyheads inspect WHAT [OPTIONS]     manyheads inspect WHAT --help"
        print(help_page(usage, "Tables and pictures of a model.", _EXAMPLES, [("what", lines)]))
        return 0
    name = arguments[0]
    if name not in KINDS:
        echo(f"manyheads: there is nothing to inspect called {name!r}.{did_you_mean(name, KINDS)}", file=sys.stderr)
        echo(f"There are: {', '.join(KINDS)}.", file=sys.stderr)
        return 2
    return kind_of(name).run(arguments[1:])
