"""`manyheads inspect smoothing`: what label smoothing asks for, and what being sure costs."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.inspect_options import check_kinds, picture_option, write_figure
from manyheads.config.options import CommandPage, option
from manyheads.errors import ConfigError
from manyheads.nn.smoothing import SmoothingKind, spread

__all__ = ["PAGE", "SmoothingOptions", "run"]


_MOST_TOKENS = 1000


@dataclass(frozen=True, kw_only=True)
class SmoothingOptions:
    """Options of `manyheads inspect smoothing`."""

    smoothing: tuple[float, ...] = option(
        "Probabilities that tokens share; the last is drawn as a distribution. [0 0.1 0.4]",
        default=(0.0, 0.1, 0.4),
        metavar="X ...",
        default_is="",
    )
    kind: SmoothingKind = option(
        "Who shares it: all tokens; those without padding; or the others, without the right one and padding.",
        default="all",
    )
    vocab_size: int = option("Tokens.", default=5, metavar="N")
    pad_id: int = option("The token of padding, which is never asked for.", default=0, metavar="N", default_is="0")
    targets: tuple[int, ...] = option(
        "Right tokens of some places; padding has an empty row. [2 1 0 3]",
        default=(2, 1, 0, 3),
        metavar="N ...",
        default_is="",
    )
    output: tuple[str, ...] = picture_option("smoothing.png")


PAGE = CommandPage(
    SmoothingOptions,
    """Draw label smoothing ("Attention Is All You Need", sec. 5.4), as the Annotated Transformer plots it:
the distribution that is asked for at some places, and the loss as the right token's probability grows.""",
    (
        "manyheads inspect smoothing --smoothing 0 0.1 0.4",
        "manyheads inspect smoothing --kind others --vocab-size 5 --targets 2 1 0 3 3 --output smoothing.svg",
    ),
)


@command(PAGE, "inspect smoothing")
def run(options: SmoothingOptions) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    check_kinds(options.output)
    if not options.smoothing or not all(0 <= share < 1 for share in options.smoothing):
        raise ConfigError(f"--smoothing {options.smoothing}: give shares from 0 to below 1.")
    if not 2 <= options.vocab_size <= _MOST_TOKENS:
        raise ConfigError(
            f"--vocab-size is {options.vocab_size}; it must be from 2 to {_MOST_TOKENS:,}, because each token is drawn."
        )
    if not options.targets or not all(0 <= target < options.vocab_size for target in options.targets):
        raise ConfigError(f"--targets {options.targets}: give ids from 0 to below --vocab-size {options.vocab_size}.")
    if not 0 <= options.pad_id < options.vocab_size:
        raise ConfigError(
            f"--pad-id is {options.pad_id}; it must be from 0 to below --vocab-size {options.vocab_size}."
        )
    for share in options.smoothing:
        spread(options.kind, share, options.vocab_size)  # raises its own error
    from manyheads.visualise.smoothing import smoothing_figure

    figure = smoothing_figure(
        options.smoothing, options.targets, vocab_size=options.vocab_size, kind=options.kind, pad_id=options.pad_id
    )
    write_figure(figure, options.output)
    return 0
