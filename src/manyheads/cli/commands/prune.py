"""`manyheads prune MODEL`: a smaller model without some of its attention heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.lines.output import check_model_output
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, argument, given_options, group, option
from manyheads.errors import ConfigError
from manyheads.tasks.heads.options import HeadTextOptions, Order

__all__ = ["PAGE", "PruneOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Options of `manyheads prune`."""

    model: str = argument("A model folder or a run folder: a transformer or a transformer-xl.", metavar="MODEL")
    output: str = option("The model folder to be made.", metavar="DIR", aliases=("-o",))
    heads: tuple[str, ...] = option(
        "Heads to remove, counted from 0: encoder.0.self:1,3 are heads 1 and 3 of the encoder's layer 0,"
        " decoder.2.cross all heads of that layer.",
        default=(),
        metavar="HEADS ...",
        default_is="none",
    )
    share: float | None = option(
        "Or remove this share of all heads, from 0 to 1, those that matter least.", default=None, metavar="X"
    )
    by: Order = option(
        "With --share: what says how much a head matters; see `manyheads inspect heads`.", default="importance"
    )
    replace: bool = option("Replace a model folder of that name.", default=False)
    text: HeadTextOptions = group(HeadTextOptions)

    def __post_init__(self) -> None:
        if bool(self.heads) == (self.share is not None):
            raise ConfigError("say which heads go: --heads HEADS ..., or --share X; one of the two.")
        unused = [name for name in given_options(self, self.text) if name == "--by" or name in given_options(self.text)]
        if self.heads and unused:
            raise ConfigError(f"--heads names the heads, so no text is read; leave out {', '.join(unused)}.")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"--share is {self.share:g}; give what is removed, above 0 and up to 1.")


PAGE = CommandPage(
    PruneOptions,
    """Remove attention heads of a model and write a smaller one, which computes what the model computes when
these heads are masked. A layer without heads becomes its residual. `manyheads inspect heads MODEL` shows the heads and
how much each matters, `manyheads inspect pruning MODEL` the score by the share.""",
    (
        "manyheads prune runs/demo --heads encoder.0.self:1,3 decoder.2.cross --output models/pruned",
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
    from manyheads.architectures.head_names import Head
    from manyheads.tasks.heads.removing import prune_folder

    removed = options.heads if options.share is None else _least(options, options.share)
    before, smaller = prune_folder(options.model, removed, output)
    after = sum(parameter.numel() for parameter in smaller.parameters())
    counts: dict[str, int] = {}
    for kind, layers in smaller.config.heads_by_layer().items():
        for layer, count in enumerate(layers):
            counts[Head(kind, layer, 0).layer_name] = count
    say(f"{output}: {sum(counts.values())} heads are left; {after:,} of {before:,} parameters")
    for name, count in counts.items():
        say(f"  {name:<16}  {count}")
    return 0


def _least(options: PruneOptions, share: float) -> list[str]:
    """The heads that matter least.

    Raises: ConfigError: the share is less than one head.
    """
    from manyheads.tasks.heads.judging import num_removed, pruning_order
    from manyheads.tasks.heads.subject import open_subject

    with showing_if_long() as show:
        subject = open_subject(options.model, lambda load, name: load(name, "cpu"))
        order = pruning_order(subject, subject.text(options.text), options.by, show, seed=options.text.seed)
    count = num_removed(share, len(order))
    if not count:
        raise ConfigError(
            f"--share {share:g} of {len(order)} heads rounds to no head; give at least {0.5 / len(order):.2g}."
        )
    return [str(head) for head in order[:count]]
