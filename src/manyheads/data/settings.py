"""Settings of training data: the source of pairs or texts, and how they are divided into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.checks import at_least, check
from manyheads.errors import ConfigError

__all__ = ["DUPLICATION", "DataSettings", "SegmentSettings"]

DUPLICATION = "duplication-task"


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Training data and batches.

    Args:
        path: a folder written by `manyheads prepare`, or `embedded:tatoeba-en-de`, or `copy-task`.
        max_tokens: size of one optimiser step: max(rows x longest source, rows x longest target), with padding, BOS and
            EOS, over all micro-batches and ranks.
        accumulate: micro-batches that one optimiser step is split into.
        max_source_len: longest source in tokens, EOS included.
        max_target_len: longest target in tokens, BOS and EOS included.
        too_long: what happens to a training pair over a limit: drop it, truncate it (EOS is kept), or fail; it is
            always counted.
        pad_to_multiple: batches are padded up to a multiple of so many tokens (never beyond the limits above). Kernels
            are made a shape, so fewer shapes can be worth the padding; 1 pads to the longest sentence alone.
        num_train_pairs: use only the first so many training pairs, or of the copy task generate so many; 0 means all.
            A preset's number holds for the preset's own data.path only.

    Raises: ConfigError: a number is out of range.
    """

    path: str = "embedded:tatoeba-en-de"
    max_tokens: int = 4096
    accumulate: int = 1
    max_source_len: int = 256
    max_target_len: int = 256
    too_long: Literal["drop", "truncate", "fail"] = "drop"
    pad_to_multiple: int = 1
    num_train_pairs: int = 0

    def __post_init__(self) -> None:
        check(self, "data.", at_least(8), "max_tokens")
        check(self, "data.", at_least(2), "max_source_len")
        check(self, "data.", at_least(3), "max_target_len")
        check(self, "data.", at_least(1), "accumulate", "pad_to_multiple")
        check(self, "data.", at_least(0), "num_train_pairs")
        longest = max(self.max_source_len, self.max_target_len)
        if self.max_tokens // self.accumulate < longest:
            raise ConfigError(
                f"data.max_tokens {self.max_tokens} / data.accumulate {self.accumulate} leaves fewer than {longest}"
                " tokens a micro-batch, the longest sentence allowed; raise max_tokens, or lower accumulate,"
                " max_source_len or max_target_len.",
                fields=("max_tokens", "accumulate", "max_source_len", "max_target_len"),
            )


@dataclass(frozen=True, kw_only=True)
class SegmentSettings:
    """Text for a language model, and how it is read: in lanes side by side, a segment of each at a time.

    Args:
        path: a folder written by `manyheads prepare --task lm`, or `embedded:crime-and-punishment`, or
            `duplication-task` (Kitaev et al. 2020, sec. 5.1), whose sequences have segment_len tokens.
        lanes: how many places of the text are read at once: the rows of a batch, over all micro-batches and ranks.
        segment_len: tokens that each lane is read on by in one optimiser step.
        segment_lengths: `fixed`; or `varied`, as the official Transformer-XL can: nineteen times of twenty around
            segment_len, else around half of it, with a standard deviation of 5 tokens.
        order: of the documents: as in the `text`, or `shuffled` anew for each epoch.
        documents: `joined` into one text that lanes cut anywhere and read across; or `separate`: a lane reads whole
            documents, forgets at the beginning of each, and no segment holds parts of two.
        accumulate: micro-batches, groups of lanes, that one optimiser step is split into.

    Raises: ConfigError: a number is out of range, or options contradict each other.
    """

    path: str = "embedded:crime-and-punishment"
    lanes: int = 16
    segment_len: int = 128
    segment_lengths: Literal["fixed", "varied"] = "fixed"
    order: Literal["text", "shuffled"] = "text"
    documents: Literal["joined", "separate"] = "joined"
    accumulate: int = 1

    def __post_init__(self) -> None:
        check(self, "data.", at_least(1), "lanes", "segment_len", "accumulate")
        if self.accumulate > self.lanes:
            raise ConfigError(
                f"data.accumulate is {self.accumulate}, but there are {self.lanes} lanes to split; choose at most as"
                " many, or raise data.lanes.",
                fields=("accumulate", "lanes"),
            )
        if self.segment_lengths == "varied" and self.documents == "separate":
            raise ConfigError(
                "data.segment_lengths is 'varied' and data.documents 'separate', but documents vary in length by"
                " themselves; use 'fixed', or 'joined'.",
                fields=("segment_lengths", "documents"),
            )
