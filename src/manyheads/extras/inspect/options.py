"""Options and pictures that the commands `inspect KIND` and `prune` share, and the text on which heads are judged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo
from manyheads.config.checks import at_least, check
from manyheads.config.options import CommandPage, Shared, argument, given_options, group, option
from manyheads.decoding.options import DeviceOptions
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import BleuTokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.decoding.generator import Generator
    from manyheads.decoding.translator import Translator


T = TypeVar("T")
PICTURES = ("png", "svg", "pdf")


@dataclass(frozen=True)
class InspectCommand:
    """A kind of `manyheads inspect`. PAGE: its options and help. run: takes the arguments, returns the exit code."""

    PAGE: CommandPage[Any]
    run: Callable[[Sequence[str]], int]


def inspect_command(page: CommandPage[T], name: str) -> Callable[[Callable[[T], int]], InspectCommand]:
    """Turn a function of options into the command `inspect NAME`."""
    return lambda run: InspectCommand(page, command(page, f"inspect {name}")(run))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, and the text that it reads."""

    model: str = Shared.model()
    text: str = option("What the model reads.", metavar="TEXT")
    run_on: DeviceOptions = group(DeviceOptions)

    def open(self) -> Translator | Generator:
        """Load the model. Raises: see `extras.inspect.attending.open_model`."""
        from manyheads.extras.inspect.attending import open_model

        return open_model(self.model, self.run_on.device, self.run_on.fixed_precision())


def picture_option(default: str, kinds: Sequence[str] = PICTURES) -> Any:
    """The option `--output` of a command that writes pictures."""
    text = f"Files to write; the ends of their names select the format: .{', .'.join(kinds)}."
    return option(text, default=(default,), metavar="FILE ...", default_is=default, aliases=("-o",))


def check_kinds(names: Sequence[str], kinds: Sequence[str] = PICTURES, *, given_by: str = "--output") -> None:
    """Check the names of the files that an option gives.

    Raises: ConfigError: there is no file for `--output`, or one of another kind. MissingExtraError: matplotlib is not
        installed.
    """
    if not names and given_by == "--output":
        raise ConfigError(f"--output names no file; give one that ends in .{', .'.join(kinds)}.")
    for name in names:
        if Path(name).suffix[1:].lower() not in kinds:
            raise ConfigError(f"{given_by} {name}: it must end in .{', .'.join(kinds)}.")
    if any(Path(name).suffix[1:].lower() in PICTURES for name in names):
        from manyheads.extras.inspect.drawings.figure import check_plots

        check_plots()


def write_figure(figure: Figure, names: Sequence[str], *, as_json: bool = False) -> None:
    """Write a figure to each of these files, and print their paths.

    Args: as_json: standard output is JSON, so the paths go to standard error.

    Raises: SaveError: one cannot be written.
    """
    from manyheads.extras.inspect.drawings.figure import save_by_name

    for name in names:
        echo(save_by_name(figure, name), file=sys.stderr if as_json else None)


Order = Literal["importance", "ablation", "confidence", "random"]
"""`importance`: by gradient, divided by the norm of the layer (Michel et al. 2019). `ablation`: by the nats that are
lost without the head. `confidence`: by its largest weights (Voita et al. 2019). `random`: for comparison."""

ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, kw_only=True)
class HeadTextOptions:
    """Text on which heads are measured; by default the validation data of the run."""

    source: str | None = option(
        "Translators: source sentences, one per line, plain or gzip.", default=None, metavar="FILE"
    )
    reference: str | None = option("Their translations, line by line.", default=None, metavar="FILE")
    text: str | None = option("Language models: a text file, plain or gzip.", default=None, metavar="FILE")
    data: str | None = option("A folder written by prepare, or embedded data.", metavar="DATA", default_is="the run's")
    split: Literal["test", "valid"] | None = option(
        "Which part of the data.", default_is="valid if there is one, for BLEU test"
    )
    pairs: int = option("Translators: maximum number of pairs to use, from the first one on.", default=200, metavar="N")
    max_tokens: int = option(
        "Language models: maximum number of tokens to use, from the first one on.", default=16_384, metavar="N"
    )
    seed: int = option("With --by random: seed of the order.", default=1, metavar="N")

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "pairs", "max_tokens")
        check(self, "--", at_least(0), "seed")
        if (self.source is None) != (self.reference is None):
            raise ConfigError("--source and --reference belong together, line by line; give both or neither.")
        files = [name for name in ("source", "text") if getattr(self, name) is not None]
        if len(files) > 1:
            raise ConfigError("--source is for translators and --text for language models; leave one out.")
        if files and (others := [name for name in given_options(self) if name in ("--data", "--split")]):
            raise ConfigError(f"--{files[0]} is the text; leave out {' and '.join(others)}.")


def _check_seed(orders: Sequence[Order], text: HeadTextOptions) -> None:
    if "random" not in orders and "--seed" in given_options(text):
        raise ConfigError(f"--seed is for --by random, but heads are ordered by {', '.join(orders)}; leave it out.")


@dataclass(frozen=True, kw_only=True)
class CurveOptions:
    """Options of `manyheads inspect pruning`, without those of the picture."""

    model: str = argument("A model folder or a run folder: a transformer or a transformer-xl.", metavar="MODEL")
    share: tuple[float, ...] = option(
        "Shares of the heads that are pruned, from 0 to 1.",
        default=tuple(tenths / 10 for tenths in range(11)),
        metavar="X ...",
        default_is="0 0.1 ... 1",
    )
    by: tuple[Order, ...] = option(
        f"Orders of pruning, a curve each: {', '.join(ORDERS)}.", default=("importance",), metavar="ORDER ..."
    )
    judge_pairs: int = option("Translators: pairs on which BLEU is measured.", default=1000, metavar="N")
    judge_tokens: int = option("Language models: tokens on which perplexity is measured.", default=65_536, metavar="N")
    num_beams: int | None = option(
        "Beam width of the search; 1 is greedy search, which is faster.", metavar="N", default_is="the model's"
    )
    tokenize: BleuTokenizer = option(
        "BLEU's tokenizer; none if the text is already tokenized; auto: the target language's.", default="auto"
    )
    record: str | None = option(
        "JSON Lines file with the points; points that it contains are not computed again.",
        metavar="FILE",
        default_is="the picture's name with .jsonl",
    )
    text: HeadTextOptions = group(HeadTextOptions)

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "judge_pairs", "judge_tokens", "num_beams")
        if not self.by:
            raise ConfigError(f"--by {' '.join(self.by)}: give one or more of {', '.join(ORDERS)}.")
        _check_seed(self.by, self.text)
        if not self.share or not all(0 <= share <= 1 for share in self.share):
            raise ConfigError(f"--share {' '.join(f'{one:g}' for one in self.share)}: give shares from 0 to 1.")


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Options of `manyheads prune`."""

    model: str = argument("A model folder or a run folder: a transformer or a transformer-xl.", metavar="MODEL")
    output: str = option("The model folder to write.", metavar="DIR", aliases=("-o",))
    heads: tuple[str, ...] = option(
        "Heads to remove, counted from 0: encoder.0.self:1,3 are heads 1 and 3 of the encoder's layer 0. Each layer"
        " keeps at least one.",
        default=(),
        metavar="HEADS ...",
        default_is="none",
    )
    share: float | None = option(
        "Or remove this share of all heads, from 0 to 1; the least important ones are removed.",
        default=None,
        metavar="X",
    )
    by: Order = option(
        "With --share: the measure of a head's importance; see `manyheads inspect heads`.", default="importance"
    )
    replace: bool = option("Replace an existing model folder.", default=False)
    text: HeadTextOptions = group(HeadTextOptions)

    def __post_init__(self) -> None:
        if bool(self.heads) == (self.share is not None):
            raise ConfigError("say which heads to remove: --heads HEADS ..., or --share X; one of the two.")
        unused = [name for name in given_options(self, self.text) if name == "--by" or name in given_options(self.text)]
        if self.heads and unused:
            raise ConfigError(f"--heads names the heads, so no text is read; leave out {', '.join(unused)}.")
        if not self.heads:
            _check_seed((self.by,), self.text)
        unread = [name for name in given_options(self.text) if name != "--seed"]
        if self.by == "random" and unread:
            raise ConfigError(f"--by random reads no text; leave out {', '.join(unread)}.")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"--share is {self.share:g}; give the share to remove, above 0 and up to 1.")
