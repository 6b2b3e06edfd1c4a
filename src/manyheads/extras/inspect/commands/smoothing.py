"""`manyheads inspect smoothing`: the targets of label smoothing, and the loss of a confident model."""

from __future__ import annotations

from manyheads.cli.command_line.parsing import command
from manyheads.errors import ConfigError
from manyheads.extras.inspect.options import SMOOTHING_PAGE as PAGE
from manyheads.extras.inspect.options import SmoothingOptions, check_kinds, write_figure
from manyheads.nn.smoothing import spread

__all__ = ["PAGE", "run"]


_MOST_TOKENS = 1000


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
    from manyheads.extras.inspect.drawings.formulas import smoothing_figure

    figure = smoothing_figure(
        options.smoothing, options.targets, vocab_size=options.vocab_size, kind=options.kind, pad_id=options.pad_id
    )
    write_figure(figure, options.output)
    return 0
