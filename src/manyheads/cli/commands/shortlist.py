"""`manyheads shortlist MODEL`: learn which words translate which, for `--shortlist N`."""

from __future__ import annotations

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.shortlist_options import PAGE, ShortlistOptions
from manyheads.cli.printing import say
from manyheads.cli.watching.phases import showing_if_long

__all__ = ["PAGE", "run"]


@command(PAGE, "shortlist")
def run(options: ShortlistOptions) -> int:
    """Learn and store a shortlist. Returns: the exit code."""
    from manyheads.tasks.translation.shortlist import learn_shortlist

    with showing_if_long() as show:
        learned = learn_shortlist(
            options.model,
            data=options.data,
            source=options.source,
            target=options.target,
            max_pairs=options.max_pairs,
            show=show,
        )
    say(learned.describe())
    say(f"next: manyheads evaluate {options.model} --shortlist 100")
    return 0
