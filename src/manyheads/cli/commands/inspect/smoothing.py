"""`manyheads inspect smoothing`: what label smoothing asks for, and what being sure costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.cli.command_line.parsing import parse
from manyheads.cli.commands.inspect.picture_files import check_kinds, picture_option, write_figure
from manyheads.config.options import CommandPage, option
from manyheads.errors import ConfigError

__all__ = ["PAGE", "SmoothingOptions", "run"]


_MOST_TOKENS = 1000


@dataclass(frozen=True, kw_only=True)
class SmoothingOptions:
    """Options of `manyheads inspect smoothing`."""

    smoothing: tuple[float, ...] = option(
        "Shares that go to all tokens alike; the last is drawn as a distribution. [0 0.1 0.4]",
        default=(0.0, 0.1, 0.4),
        metavar="X ...",
        default_is="",
    )
    vocab_size: int = option("Tokens.", default=5, metavar="N")
    targets: tuple[int, ...] = option(
        "Right tokens of some places. [2 1 0 3]", default=(2, 1, 0, 3), metavar="N ...", default_is=""
    )
    output: tuple[str, ...] = picture_option("smoothing.png")


PAGE = CommandPage(
    SmoothingOptions,
    """Draw label smoothing ("Attention Is All You Need", sec. 5.4), as the Annotated Transformer plots it:
the distribution that is asked for at some places, and the loss as the right token's probability grows.""",
    (
        "manyheads inspect smoothing --smoothing 0 0.1 0.4",
        "manyheads inspect smoothing --vocab-size 5 --targets 2 1 0 --output smoothing.svg",
    ),
)


def run(arguments: Sequence[str]) -> int:
    """Draw. Returns: the exit code. The paths of what was written go to standard output."""
    options = parse(PAGE, arguments, "inspect smoothing")
    check_kinds(options.output)
    if not options.smoothing or not all(0 <= share < 1 for share in options.smoothing):
        raise ConfigError(f"--smoothing {options.smoothing}: give shares from 0 to below 1.")
    if not 2 <= options.vocab_size <= _MOST_TOKENS:
        raise ConfigError(
            f"--vocab-size is {options.vocab_size}; it must be from 2 to {_MOST_TOKENS:,}, because each token is drawn."
        )
    if not options.targets or not all(0 <= target < options.vocab_size for target in options.targets):
        raise ConfigError(f"--targets {options.targets}: give ids from 0 to below --vocab-size {options.vocab_size}.")
    import torch

    from manyheads.nn.kernels.loss import smoothed_loss
    from manyheads.visualise.schedules import label_smoothing_figure

    size = options.vocab_size
    # The head's own loss of log-probabilities: an identity in place of its matrix leaves them as they are.
    eye, right = torch.eye(size), torch.zeros(1, dtype=torch.int64)
    sure = torch.linspace(1 / size, 0.999, 200)
    losses = {}
    for share in options.smoothing:
        values = []
        for probability in sure:
            others = ((1 - probability) / (size - 1)).expand(size - 1)
            log_probs = torch.cat([probability[None], others]).log()[None]
            values.append(float(smoothed_loss(log_probs, right, eye, None, share, 1)[0]))
        losses[f"smoothing {share:g}"] = values
    last = options.smoothing[-1]
    asked = torch.full((len(options.targets), size), last / size)
    asked[torch.arange(len(options.targets)), torch.tensor(options.targets)] += 1 - last
    title = f"What smoothing {last:g} asks for"
    write_figure(label_smoothing_figure(asked, sure, losses, title=title), options.output)
    return 0
