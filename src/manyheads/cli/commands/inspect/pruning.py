"""`manyheads inspect pruning MODEL`: BLEU or perplexity by the share of heads that are pruned."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.inspect_options import check_kinds, picture_option, write_figure
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, argument, group, option
from manyheads.decoding.options import InspectionDeviceOptions
from manyheads.errors import ConfigError
from manyheads.tasks.heads.options import ORDERS, HeadTextOptions

__all__ = ["PAGE", "PruningOptions", "run"]

_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, kw_only=True)
class PruningOptions:
    """Options of `manyheads inspect pruning`."""

    model: str = argument("A model folder or a run folder: a transformer or a transformer-xl.", metavar="MODEL")
    share: tuple[float, ...] = option(
        "Shares of the heads that are pruned, from 0 to 1.", default=_SHARES, metavar="X ...", default_is="0 0.1 ... 1"
    )
    by: tuple[str, ...] = option(
        f"Orders of pruning, a curve each: {', '.join(ORDERS)}.", default=("importance",), metavar="ORDER ..."
    )
    judge_pairs: int = option("Translators: pairs on which BLEU is measured.", default=1000, metavar="N")
    judge_tokens: int = option("Language models: tokens on which perplexity is measured.", default=65_536, metavar="N")
    num_beams: int | None = option(
        "Beams of the search; 1 is greedy, and faster.", default=None, metavar="N", default_is="the model's"
    )
    tokenize: str = option(
        "BLEU's tokenizer; none for text that is tokenized already.", default="13a", metavar="{13a,none,intl,char,zh}"
    )
    record: str | None = option(
        "JSON Lines with the points; those that it has are not computed again.",
        default=None,
        metavar="FILE",
        default_is="the picture's name with .jsonl",
    )
    json: bool = option("Print a JSON array of the points.", default=False)
    output: tuple[str, ...] = picture_option("pruning.png")
    text: HeadTextOptions = group(HeadTextOptions)
    run_on: InspectionDeviceOptions = group(InspectionDeviceOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "judge_pairs", "judge_tokens", "num_beams")
        wrong = [name for name in self.by if name not in ORDERS]
        if wrong or not self.by:
            raise ConfigError(f"--by {' '.join(self.by)}: give one or more of {', '.join(ORDERS)}.")
        if not self.share or not all(0 <= share <= 1 for share in self.share):
            raise ConfigError(f"--share {' '.join(f'{one:g}' for one in self.share)}: give shares from 0 to 1.")


PAGE = CommandPage(
    PruningOptions,
    """Prune more and more heads of a model, those that matter least first, and draw BLEU (perplexity of a
language model) against the share of pruned heads (Michel et al. 2019, figure 3). Heads are judged on the validation
data, the score is measured on the test data; with a text of your own both on it. Each point is stored at once: the same
command goes on where it was stopped.""",
    (
        "manyheads inspect pruning runs/demo",
        "manyheads inspect pruning runs/demo --by importance random --num-beams 1 --output pruning.svg",
        "manyheads inspect pruning runs/xl-demo --share 0 0.25 0.5 0.75 1",
    ),
)


@command(PAGE, "inspect pruning")
def run(options: PruningOptions) -> int:
    """Prune, measure and draw. Returns: the exit code. Points and the paths of pictures go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.tasks.heads.curve import CurveSettings, pruning_curve
    from manyheads.tasks.heads.subject import open_subject
    from manyheads.visualise.heads import pruning_figure

    settings = CurveSettings(
        shares=options.share,
        by=tuple(dict.fromkeys(options.by)),  # type: ignore[arg-type]
        seed=options.text.seed,
        tokenize=options.tokenize,
        num_beams=options.num_beams,
    )
    record = Path(options.record or Path(options.output[0]).with_suffix(".jsonl"))
    with showing_if_long() as show:
        subject = open_subject(options.model, options.run_on.load)
        longer = replace(options.text, pairs=options.judge_pairs, max_tokens=options.judge_tokens)
        held, judged = subject.text(options.text), subject.text(longer, "test")
        points = pruning_curve(subject, held, judged, settings, record, show)
    figure = pruning_figure(points, note=f"{options.model}, on {judged.name}")
    say(json.dumps(points, indent=2) if options.json else "\n".join(_table(points)))
    write_figure(figure, options.output)
    return 0


def _table(points: list[dict[str, Any]]) -> list[str]:
    measure = "bleu" if "bleu" in points[0] else "perplexity"
    lines = [f"by          pruned  share  parameters  {'BLEU' if measure == 'bleu' else measure:>10}"]
    lines += [
        f"{point['by']:<10}  {point['pruned']:>6}  {100 * point['share']:>4.0f}%  {point['parameters']:>10,}"
        f"  {point[measure]:>10.2f}"
        for point in points
    ]
    return lines
