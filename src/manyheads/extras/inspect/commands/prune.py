"""`manyheads prune MODEL`: a smaller model without some of its attention heads."""

from __future__ import annotations

from pathlib import Path

from manyheads.cli.command_line.parsing import command
from manyheads.cli.lines.output import check_model_output
from manyheads.cli.process import echo, set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage
from manyheads.extras.inspect.heads.options import PruneOptions

PAGE = CommandPage(
    PruneOptions,
    """Remove attention heads of a model and write a smaller one, which computes what the model computes when
these heads are masked. Each layer keeps at least one head. `manyheads inspect heads MODEL` shows how much each
head matters; `manyheads inspect pruning MODEL` shows the score by the share of removed heads.""",
    (
        "manyheads prune runs/demo --heads encoder.0.self:1,3 decoder.1.cross:0 --output models/pruned",
        "manyheads prune runs/demo --share 0.3 --output models/pruned",
        "manyheads prune runs/xl-demo --share 0.5 --by ablation --output models/pruned-xl",
    ),
)


@command(PAGE, "prune")
def run(options: PruneOptions) -> int:
    """Prune. Returns: the exit code."""
    set_up_machine()
    output = Path(options.output)
    check_model_output(output, options.replace)
    from manyheads.extras.inspect.heads.pruning import least_important, prune_folder

    removed = options.heads
    if options.share is not None:
        with showing_if_long() as progress:
            removed = tuple(least_important(options.model, options.share, options.by, options.text, progress))
    echo(prune_folder(options.model, removed, output, replace=options.replace).describe())
    return 0
