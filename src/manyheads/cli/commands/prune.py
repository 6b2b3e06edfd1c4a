"""`manyheads prune MODEL`: a smaller translator without some of its attention heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.lines.output import check_model_output
from manyheads.cli.machine import set_up_machine
from manyheads.cli.printing import say
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.options import CommandPage, argument, given_options, group, option
from manyheads.errors import ConfigError
from manyheads.tasks.translation.head_options import PairsOptions

__all__ = ["PAGE", "PruneOptions", "run"]


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Options of `manyheads prune`."""

    model: str = argument("A model folder or a run folder of a translator (architecture transformer).", metavar="MODEL")
    output: str = option("The model folder to be made.", metavar="DIR", aliases=("-o",))
    heads: tuple[str, ...] = option(
        "Heads to remove: encoder.1.3 is head 3 of the encoder's layer 1, cross.2 all heads of that layer.",
        default=(),
        metavar="HEAD ...",
        default_is="none",
    )
    keep: float | None = option(
        "Or keep this share of all heads, the most important ones (Michel et al. 2019); 0.7 removes 30%.",
        default=None,
        metavar="SHARE",
    )
    replace: bool = option("Replace a model folder of that name.", default=False)
    text: PairsOptions = group(PairsOptions)

    def __post_init__(self) -> None:
        if bool(self.heads) == (self.keep is not None):
            raise ConfigError("say which heads go: --heads HEAD ..., or --keep SHARE; one of the two.")
        if self.heads and (unused := given_options(self.text)):
            raise ConfigError(f"--heads names the heads, so no text is read; leave out {', '.join(unused)}.")
        if self.keep is not None and not 0 <= self.keep < 1:
            raise ConfigError(f"--keep is {self.keep:g}; it must be from 0 to below 1, the share of heads that stay.")


PAGE = CommandPage(
    PruneOptions,
    """Remove attention heads of a translator and write a smaller model, which computes what the model
computes when these heads are masked. A layer without heads becomes its residual.
`manyheads inspect heads MODEL` shows names and importance; `manyheads inspect pruning MODEL` BLEU by the share.""",
    (
        "manyheads prune runs/demo --keep 0.7 --output models/pruned",
        "manyheads prune runs/demo --heads encoder.1.3 cross.2 --output models/pruned",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Prune. Returns: the exit code."""
    set_up_machine()
    options = parse(PAGE, arguments, "prune")
    check_model_output(Path(options.output), options.replace)
    from manyheads.decoding.translator import Translator
    from manyheads.tasks.translation.heads import least_important_heads, pairs_of, prune_folder, translator_of

    pairs = [] if options.keep is None else pairs_of(options.text, options.model)
    with showing_if_long() as show:
        translator = translator_of(options.model, lambda load, name: load(name, "cpu"))
        assert isinstance(translator, Translator)
        if options.keep is None:
            removed: Sequence[object] = options.heads
        else:
            show("importance", 0, 0)
            removed = least_important_heads(translator, pairs, options.keep)
        before = sum(parameter.numel() for parameter in translator.model.parameters())  # type: ignore[attr-defined]
        smaller = prune_folder(translator, options.model, [str(head) for head in removed], Path(options.output))
    after = sum(parameter.numel() for parameter in smaller.parameters())
    counts = [getattr(smaller.config, f"{kind}_heads") for kind in ("encoder", "decoder", "cross")]
    say(
        f"{options.output}: {sum(map(sum, counts))} heads are left, by layer: encoder {_shown(counts[0])}, decoder"
        f" {_shown(counts[1])}, cross {_shown(counts[2])}; {after:,} of {before:,} parameters"
    )
    return 0


def _shown(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))
