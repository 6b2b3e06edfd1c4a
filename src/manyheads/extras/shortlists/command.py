"""`manyheads shortlist MODEL`: learns likely translations of words, for `--shortlist N`."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShortlistOptions:
    """Options of `manyheads shortlist`."""

    model: str = argument("A model folder or a run folder of a translator.", metavar="MODEL")
    data: str | None = option(
        "Training pairs: a folder written by prepare, embedded:tatoeba-en-de, or copy-task.",
        metavar="DATA",
        default_is="the run's",
    )
    source: str | None = option(
        "Instead of --data: source sentences, one per line, plain or gzip.", default=None, metavar="FILE"
    )
    target: str | None = option("Translations of the sources, line by line.", default=None, metavar="FILE")
    max_pairs: int = option(
        "Maximum number of pairs that are read, from the first one on.", default=500_000, metavar="N"
    )

    def __post_init__(self) -> None:
        if (self.source is None) != (self.target is None):
            raise ConfigError("--source and --target belong together, line by line; give both or neither.")
        if self.source is not None and self.data is not None:
            raise ConfigError("--data contains its own sources and targets; leave out --source and --target.")
        check(self, "--", at_least(1), "max_pairs")


PAGE = CommandPage(
    ShortlistOptions,
    """Learn a lexical shortlist from training pairs (IBM model 1), and store it in the model folder.
`translate` and `evaluate` then accept --shortlist N: they search only among the N most frequent words and N
translations of each source word, which is faster on a CPU. See docs/performance.md.""",
    (
        "manyheads shortlist runs/demo",
        "manyheads shortlist runs/demo --source train.en --target train.de",
        "manyheads translate runs/demo input.en --shortlist 100",
    ),
)


@command(PAGE, "shortlist")
def run(options: ShortlistOptions) -> int:
    """Learn and store a shortlist. Returns: the exit code."""
    from manyheads.extras.shortlists.shortlist import learn_shortlist

    with showing_if_long() as progress:
        learned = learn_shortlist(
            options.model,
            data=options.data,
            source=options.source,
            target=options.target,
            max_pairs=options.max_pairs,
            progress=progress,
        )
    echo(learned.describe())
    echo(f"next: manyheads evaluate {options.model} --shortlist 100")
    return 0
