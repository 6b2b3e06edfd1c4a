"""Settings of training data: the source of pairs or texts, how they are divided into batches, and lengths that change.

Lengths of segments change by the progress of the run, lengths of the memory by the step. Both are functions of
settings, seed and position, so nothing about them is stored and a run can resume at any step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal

from manyheads.config.checks import BELOW_ONE, MOST_LANES, MOST_UNITS, at_least, between, check, set_tuples
from manyheads.errors import ConfigError
from manyheads.seeding import derive_seed

NUM_MEMORY_LENS = 4
"""Different memory lengths of a run. A compiler makes a program for each, so there are few.

The rest of the memory is cut off, not masked: a step of `xl-demo` in fp32 on one core takes 0.42 s with 32 of its 128
positions, 0.53 s if the others are masked, and 0.51 s with all of them.
"""


@dataclass(frozen=True)
class Stage:
    """Segments of `length` tokens until the run has made the share `until` of its progress."""

    length: int
    until: float


def stages_of(schedule: Sequence[str], segment_len: int) -> tuple[Stage, ...]:
    """Return the stages of `data.length_schedule`.

        >>> stages_of(["1024=0.3", "16384=1"], 16384)
        (Stage(length=1024, until=0.3), Stage(length=16384, until=1.0))

    Args:
        schedule: `LENGTH=SHARE`.
        segment_len: the length of the last stage.

    Raises: ConfigError: an entry has another form, a length does not divide segment_len, shares do not increase, or the
        last stage is not segment_len until 1.
    """
    stages = tuple(map(_stage, schedule))
    for stage in stages:
        if stage.length > segment_len:
            raise _mistake(
                f"contains {stage.length:,}, longer than data.segment_len {segment_len:,}; lower it, or raise"
                " segment_len to the longest length.",
            )
        if segment_len % stage.length:
            raise _mistake(
                f"contains {stage.length:,}, which does not divide data.segment_len {segment_len:,}, so a step would"
                " not have the same number of tokens; take a divisor.",
            )
    for before, stage in pairwise(stages):
        if stage.until <= before.until:
            raise _mistake(
                f"has the share {stage.until:g} after {before.until:g}; shares are the progress at which a length ends,"
                " so they must increase."
            )
    if stages and stages[-1] != Stage(segment_len, 1.0):
        last = stages[-1]
        raise _mistake(
            f"ends with {last.length:,} until {last.until:g}; the last entry must be data.segment_len until 1:"
            f" {segment_len}=1."
        )
    return stages


def _stage(entry: str) -> Stage:
    length, _, share = entry.partition("=")
    try:
        stage = Stage(int(length), float(share))
    except ValueError:
        stage = Stage(0, 0.0)
    if stage.length < 1 or not 0 < stage.until <= 1:
        raise _mistake(
            f"contains {entry!r}; write LENGTH=SHARE, tokens of a segment and the progress at which they end, in"
            " (0, 1], such as 1024=0.3."
        )
    return stage


def _mistake(text: str) -> ConfigError:
    return ConfigError(f"data.length_schedule {text}", fields=["length_schedule"])


def length_at(stages: Sequence[Stage], progress: float) -> int:
    """Return the length of the segments of a step.

    Args:
        stages: at least one.
        progress: of the run before the step, in [0, 1].
    """
    return next((stage.length for stage in stages if progress < stage.until), stages[-1].length)


def memory_lens(shortest: int, longest: int) -> tuple[int, ...]:
    """Return the memory lengths that a run uses: up to four, evenly spaced.

    >>> memory_lens(64, 256)
    (64, 128, 192, 256)
    """
    most = NUM_MEMORY_LENS - 1
    return tuple(sorted({shortest + (longest - shortest) * number // most for number in range(most + 1)}))


def memory_len_at(bounds: Sequence[int], seed: int, epoch: int, row: int) -> int:
    """Return the memory length of a step, each of `memory_lens` equally often.

    Args:
        bounds: the shortest and the longest.
        seed: the run's seed.
        epoch, row: the position of the step.
    """
    lens = memory_lens(*bounds)
    return lens[derive_seed(seed, "memory length", epoch, row) % len(lens)]


DUPLICATION = "duplication-task"


@dataclass(frozen=True, kw_only=True)
class CopyTaskSettings:
    """The sequences of the copy task (`data.path copy-task`).

    Args:
        num_symbols: number of different words: `w1`, `w2` and so on.
        shortest: words of the shortest sequence.
        longest: words of the longest sequence.

    Raises: ConfigError: a number is out of range, or longest is below shortest.
    """

    num_symbols: int = 16
    shortest: int = 4
    longest: int = 10

    def __post_init__(self) -> None:
        check(self, "data.copy_task.", between(1, 2**16), "num_symbols")
        check(self, "data.copy_task.", between(1, 512), "shortest", "longest")
        if self.longest < self.shortest:
            raise ConfigError(
                f"data.copy_task.longest is {self.longest}, below shortest {self.shortest}; raise longest, or lower"
                " shortest.",
                fields=("shortest", "longest"),
            )

    @property
    def num_texts(self) -> int:
        """Number of different sequences."""
        return sum(self.num_symbols**length for length in range(self.shortest, self.longest + 1))


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Training data and batches.

    Args:
        path: a folder written by `manyheads prepare`, or `embedded:tatoeba-en-de`, or `copy-task`.
        max_tokens: size of one optimiser step: max(rows x longest source, rows x longest target), with padding, BOS and
            EOS, over all micro-batches and ranks.
        accumulate: number of micro-batches per optimiser step.
        max_source_len: maximum length of a source in tokens, including EOS.
        max_target_len: maximum length of a target in tokens, including BOS and EOS.
        too_long: for training pairs over a limit: `drop` them, `truncate` them (EOS is kept), or `fail`. They are
            always counted.
        pad_to_multiple: pad batches to a multiple of this number of tokens, but not beyond the limits above. Kernels
            are compiled for each shape, so fewer shapes can be worth the padding; 1 pads to the longest sentence only.
        batching: `padded`: a batch has sentences of similar lengths, each in a row. `packed`: sentences in random
            order, one after the other in one row of max_tokens / accumulate slots, so that all batches have one shape
            and little padding; for the Transformer on a GPU in bf16. A resumed run keeps it.
        num_train_pairs: number of training pairs to use, from the beginning, or to generate for the copy task; 0: all.
            The number in a preset applies only to the preset's own data.path.
        mix: several prepared folders with their shares of the training pairs, such as `data/old=0.2 data/new=0.8`.
            `path` is one of them: it validates the run, and an epoch contains about each of its pairs once. Without
            `path`, it is the one with the largest share.
        bpe_dropout: probability that a merge of BPE is left out when a training sentence is segmented, differently in
            each epoch (Provilkov et al. 2020, who use 0.1 for both sides); 0: the usual segmentation. Sentences get
            longer, with 0.1 by a quarter.
        copy_task: words and lengths of the copy task; other data does not use it.

    Raises: ConfigError: a number is out of range.
    """

    path: str = "embedded:tatoeba-en-de"
    max_tokens: int = 4096
    accumulate: int = 1
    max_source_len: int = 256
    max_target_len: int = 256
    too_long: Literal["drop", "truncate", "fail"] = "drop"
    pad_to_multiple: int = 1
    batching: Literal["padded", "packed"] = "padded"
    num_train_pairs: int = 0
    mix: tuple[str, ...] = ()
    bpe_dropout: float = 0.0
    copy_task: CopyTaskSettings = field(default_factory=CopyTaskSettings)

    def __post_init__(self) -> None:
        set_tuples(self)
        check(self, "data.", between(8, MOST_UNITS), "max_tokens")
        check(self, "data.", between(2, MOST_UNITS), "max_source_len")
        check(self, "data.", between(3, MOST_UNITS), "max_target_len")
        check(self, "data.", between(1, MOST_UNITS), "accumulate", "pad_to_multiple")
        _check_mix(self.mix, self.path)
        if self.mix and self.num_train_pairs:
            raise ConfigError(
                f"data.num_train_pairs is {self.num_train_pairs}, but data.mix sets the shares of whole data sets; set"
                " num_train_pairs to 0.",
                fields=("num_train_pairs", "mix"),
            )
        check(self, "data.", at_least(0), "num_train_pairs")
        check(self, "data.", BELOW_ONE, "bpe_dropout")
        is_packed, longest = self.batching == "packed", self.longest
        if self.max_tokens // self.accumulate < longest + 2 * is_packed:
            raise ConfigError(
                f"data.max_tokens {self.max_tokens} / data.accumulate {self.accumulate} leaves fewer than {longest}"
                f" tokens per micro-batch, the maximum length of a sentence{', and two of filler' * is_packed}; raise"
                " max_tokens, or lower accumulate, max_source_len or max_target_len.",
                fields=("max_tokens", "accumulate", "max_source_len", "max_target_len"),
            )
        if is_packed and self.pad_to_multiple > 1:
            raise ConfigError(
                f"data.pad_to_multiple is {self.pad_to_multiple}, but packed batches have one shape; set it to 1, or"
                " data.batching to padded.",
                fields=("pad_to_multiple", "batching"),
            )

    @property
    def longest(self) -> int:
        """The larger maximum length of a sentence."""
        return max(self.max_source_len, self.max_target_len)


@dataclass(frozen=True, kw_only=True)
class SegmentSettings:
    """Text for a language model, which is read in parallel lanes, one segment of each at a time.

    Args:
        path: a folder written by `manyheads prepare --task lm`, or `embedded:crime-and-punishment`, or
            `duplication-task` (Kitaev et al. 2020, sec. 2.1), whose sequences have segment_len tokens.
        lanes: number of positions in the text that are read at once: the rows of a batch, over all micro-batches and
            ranks.
        segment_len: number of tokens of each lane per optimiser step.
        segment_lengths: `fixed`; or `varied`, an option of the official Transformer-XL: with probability 0.95 around
            segment_len, otherwise around half of it, with a standard deviation of 5 tokens.
        length_schedule: shorter segments at the beginning of the run, as LENGTH=SHARE: `1024=0.3 4096=0.6 16384=1`
            trains on segments of 1,024 tokens until 0.3 of the run's steps or minutes, then of 4,096 until 0.6, then of
            16,384, which is segment_len. A step always has the same number of tokens, so it has as many more segments,
            from different places of the text. Only for models without memory. Empty: always segment_len.
        memory_len_range: shortest and longest memory in training, such as `64 256`: every step attends to one of four
            lengths, evenly spaced from the first to the second, so that the model also works with other lengths. At
            most model.memory_len, which is what is stored. Empty: always model.memory_len.
        loss_on: tokens of a segment that are learned: `all`, or only the recent `half`, whose context is longer ("half
            losses", Dai et al. 2019, sec. 4.2).
        order: order of the documents: that of the `text`, or `shuffled` differently in each epoch.
        documents: `joined` into one text, in which lanes and segments can begin anywhere; or `separate`: a lane reads
            whole documents, its memory is cleared at the beginning of each, and no segment contains parts of two.
        accumulate: number of micro-batches (groups of lanes) per optimiser step.
        mix: several prepared folders with their shares of the lanes, such as `data/old=0.25 data/new=0.75`. `path` is
            one of them: it validates the run, and an epoch reads its text once. Without `path`, it is the one with the
            largest share. Each folder gets at least one lane, in which its text is read again and again.

    Raises: ConfigError: a number is out of range, or options contradict each other.
    """

    path: str = "embedded:crime-and-punishment"
    lanes: int = 16
    segment_len: int = 128
    segment_lengths: Literal["fixed", "varied"] = "fixed"
    length_schedule: tuple[str, ...] = ()
    memory_len_range: tuple[int, ...] = ()
    loss_on: Literal["all", "half"] = "all"
    order: Literal["text", "shuffled"] = "text"
    documents: Literal["joined", "separate"] = "joined"
    accumulate: int = 1
    mix: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        set_tuples(self)
        check(self, "data.", between(1, MOST_LANES), "lanes")
        check(self, "data.", between(1, MOST_UNITS), "segment_len", "accumulate")
        _check_mix(self.mix, self.path)
        if len(self.mix) > self.lanes:
            raise ConfigError(
                f"data.mix names {len(self.mix)} folders, but data.lanes is {self.lanes}; each folder needs a lane of"
                " its own.",
                fields=("mix", "lanes"),
            )
        if self.mix and self.loss_on == "half":
            raise ConfigError(
                "data.mix learns all tokens of its segments; set data.loss_on to 'all'.", fields=("mix", "loss_on")
            )
        if self.mix and (self.segment_lengths == "varied" or (self.documents, self.order) == ("separate", "shuffled")):
            raise ConfigError(
                "data.mix needs epochs of equal length; set data.segment_lengths to 'fixed', and data.order to 'text'"
                " or data.documents to 'joined'.",
                fields=("mix", "segment_lengths", "documents", "order"),
            )
        if self.accumulate > self.lanes:
            raise ConfigError(
                f"data.accumulate is {self.accumulate}, but data.lanes is {self.lanes}; accumulate must be at most"
                " lanes.",
                fields=("accumulate", "lanes"),
            )
        if self.loss_on == "half" and self.documents == "separate":
            raise ConfigError(
                "data.loss_on is 'half' and data.documents 'separate', so documents shorter than half a segment would"
                " not be learned; set loss_on to 'all', or documents to 'joined'.",
                fields=("loss_on", "documents"),
            )
        if self.segment_lengths == "varied" and self.documents == "separate":
            raise ConfigError(
                "data.segment_lengths is 'varied' and data.documents 'separate', but separate documents already differ"
                " in length; set segment_lengths to 'fixed', or documents to 'joined'.",
                fields=("segment_lengths", "documents"),
            )
        self._check_length_schedule()
        self._check_memory_len_range()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of length_schedule; empty without a schedule."""
        return stages_of(self.length_schedule, self.segment_len)

    def _check_length_schedule(self) -> None:
        if not self.stages:
            return
        for name, wanted in (("segment_lengths", "fixed"), ("documents", "joined")):
            if getattr(self, name) != wanted:
                raise ConfigError(
                    f"data.length_schedule divides segments of one length, but data.{name} is"
                    f" {getattr(self, name)!r}; set {name} to {wanted!r}, or leave the schedule out.",
                    fields=("length_schedule", name),
                )

    def _check_memory_len_range(self) -> None:
        bounds = self.memory_len_range
        if bounds and (len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]):
            raise ConfigError(
                f"data.memory_len_range is {list(bounds)}; give two numbers, the shortest memory (at least 0) and the"
                " longest.",
                fields=["memory_len_range"],
            )


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """The common part of the settings of rows that have one length each, such as texts with a label, and their batches.

    row, unit, remedy: for messages: a row, the unit of its length, and the values of `too_long` besides `fail`.
    most_len: upper bound of max_len.

    Raises: ConfigError: a number is out of range, or a micro-batch is smaller than the longest row.
    """

    row: ClassVar[str]
    unit: ClassVar[str]
    remedy: ClassVar[str]
    most_len: ClassVar[int] = MOST_UNITS

    path: str = ""
    max_tokens: int = 4096
    accumulate: int = 1
    max_len: int = 256
    too_long: Literal["truncate", "drop", "fail"] = "drop"
    pad_to_multiple: int = 1

    def __post_init__(self) -> None:
        check(self, "data.", between(8, MOST_UNITS), "max_tokens")
        check(self, "data.", between(2, self.most_len), "max_len")
        check(self, "data.", between(1, MOST_UNITS), "accumulate", "pad_to_multiple")
        if self.max_tokens // self.accumulate < self.max_len:
            raise ConfigError(
                f"data.max_tokens {self.max_tokens} / data.accumulate {self.accumulate} leaves fewer than"
                f" {self.max_len} {self.unit} per micro-batch, the maximum length of a {self.row}; raise max_tokens, or"
                " lower accumulate or max_len.",
                fields=("max_tokens", "accumulate", "max_len"),
            )


def shares_of(mix: Sequence[str]) -> dict[str, float]:
    """Return each folder of `data.mix` and its share; the shares add up to 1.

    Args: mix: `FOLDER=SHARE`, where a share is a positive number; 0.2 and 0.8 are the same as 1 and 4.

    Raises: ConfigError: an entry has another form, a share is not a positive number, or a folder occurs twice.
    """
    shares: dict[str, float] = {}
    for entry in mix:
        folder, _, text = entry.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not folder or not (math.isfinite(share) and share > 0):
            raise ConfigError(
                f"data.mix contains {entry!r}; write FOLDER=SHARE with a positive share, such as data/new=0.8.",
                fields=["mix"],
            )
        if folder in shares:
            raise ConfigError(f"data.mix names {folder} twice; give it one share.", fields=["mix"])
        shares[folder] = share
    total = math.fsum(shares.values())
    return {folder: share / total for folder, share in shares.items()}


def _check_mix(mix: Sequence[str], path: str) -> None:
    shares = shares_of(mix)
    if len(shares) == 1:
        raise ConfigError(
            f"data.mix names one folder, {next(iter(shares))}; name at least two, or give that one as data.path.",
            fields=["mix"],
        )
    if shares and path not in shares:
        raise ConfigError(
            f"data.path is {path!r}, which is not in data.mix ({', '.join(shares)}); give one of these as data.path, by"
            " which the run is validated.",
            fields=("path", "mix"),
        )
