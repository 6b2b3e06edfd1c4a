"""Sentence pairs to a folder of prepared data; see `preparing`. The raw text of valid and test stays, for BLEU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from manyheads.data.lines import ReadReport, stored_lines
from manyheads.data.preparing import CONTROL, SPLITS, prepare
from manyheads.data.progress import Progress
from manyheads.data.store import PairStore, write_pairs
from manyheads.errors import DataError
from manyheads.text.learning import MAX_LEARNED_CHARS, Thinned
from manyheads.text.parsing import ParsingTask
from manyheads.text.parsing_tokenizer import ParsingTokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = ["PairList", "Pairs", "prepare_corpus", "text_path"]

ENCODE_PAIRS = 4096  # pairs given to the tokenizer at once
REPORT_PAIRS = 10_000
MAX_TOKENIZER_PAIRS = 2_000_000  # above it, every second pair teaches the tokenizer, then every fourth, ...


class Pairs(Protocol):
    """Where a split comes from: `readers.PairFiles`, `trees.TreeFile`, or `PairList`."""

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class PairList:
    """Pairs at hand, with a name for the manifest."""

    name: str
    pairs: Iterable[tuple[str, str]]

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        for source, target in self.pairs:
            if report is not None:
                report.lines += 1
                report.line_breaks_replaced += "\n" in source or "\n" in target
            yield source.replace("\n", " "), target.replace("\n", " ")

    def describe(self) -> str:
        return self.name


def text_path(folder: Path, split: str, side: str) -> Path:
    """Where the raw text of a split lies, one sentence a line."""
    return folder / f"{split}.{side}.txt"


def prepare_corpus(
    folder: str | Path,
    *,
    train: Pairs,
    valid: Pairs | None = None,
    test: Pairs | None = None,
    tokenizer: TokenizerSettings | Tokenizer,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
    task: ParsingTask | None = None,
) -> dict[str, Any]:
    """Build a folder of prepared data; read it with `prepared.PreparedData.open`.

    Training pairs with an empty side are dropped and counted; validation and test pairs are all kept, in order. No pair
    is dropped for its length here: `DataSettings` limits lengths when training begins (`TrainingStream.report` counts
    what that does), so a limit can change without preparing again.

    Args:
        folder: to be made.
        train: training pairs; each file is read once, so a pipe will do.
        valid: validation pairs, if any.
        test: test pairs, if any.
        tokenizer: how to train one on both sides of the training pairs, or one that exists.
        replace: put an older folder of that name away once this one is whole.
        progress: called now and then with what is being done, how far it is, and the total or 0.
        key: kept in the manifest, for whoever wants to know the folder again.
        task: what targets are, if not text: of a parser, trees. They are kept as text all the same, and learned as ids.

    Returns: the manifest.
    Raises:
        DataError: the text cannot be used, or no training pair is left, or the folder exists.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    splits = {name: pairs for name, pairs in zip(SPLITS, (train, valid, test), strict=True) if pairs is not None}
    return prepare(folder, _PairSource(splits, tokenizer, task), replace=replace, progress=progress, key=key)


class _PairSource:
    """See `preparing.Source`."""

    def __init__(
        self, splits: dict[str, Pairs], tokenizer: TokenizerSettings | Tokenizer, task: ParsingTask | None
    ) -> None:
        self.settings = tokenizer if isinstance(tokenizer, TokenizerSettings) else None
        self._splits, self._tokenizer, self._task = splits, tokenizer, task
        self._sample: Thinned[tuple[str, str]] = Thinned(MAX_TOKENIZER_PAIRS)
        self._counts: dict[str, dict[str, int]] = {}

    def read(self, folder: Path, progress: Progress) -> dict[str, str]:
        """See `Source.read`."""
        self._folder = folder
        for name, pairs in self._splits.items():
            self._counts[name] = _read_split(folder, name, pairs, self._sample, progress)
        train = self._counts["train"]
        if not train["pairs"]:
            raise DataError(
                f"No training pairs are left in {self._splits['train'].describe()}: {train['lines']} were read and"
                f" {train['empty_dropped']} of them have an empty side."
            )
        for name, pairs in self._splits.items():
            if not self._counts[name]["pairs"]:
                raise DataError(f"There are no {name} pairs in {pairs.describe()}; give others, or leave them out.")
        return {name: pairs.describe() for name, pairs in self._splits.items()}

    def learn(self, progress: Progress) -> Tokenizer:
        """See `Source.learn`."""
        if isinstance(self._tokenizer, TokenizerSettings):
            progress("train the tokenizer", 0, 1)
            if self._task is None:
                texts = (text for pair in self._sample.kept for text in pair)
                self._tokenizer = Tokenizer.train(texts, self._tokenizer)
            else:
                self._tokenizer = self._task.learn_tokenizer(self._sample.kept, self._tokenizer)
            progress("train the tokenizer", 1, 1)
        if self._task is not None:
            self._task.check_tokenizer(self._tokenizer)
        return self._tokenizer

    def encode(self, split: str, progress: Progress) -> dict[str, int]:
        """See `Source.encode`."""
        assert isinstance(self._tokenizer, Tokenizer)  # since `learn`
        _encode_split(self._folder, split, self._tokenizer, self._counts[split], progress, self._task)
        return self._counts[split]

    def finish(self) -> Iterator[str]:
        """See `Source.finish`."""
        for name in self._splits:
            for side in ("source", "target"):
                path = text_path(self._folder, name, side)
                if name == "train":
                    path.unlink()
                else:
                    yield path.name

    def record(self) -> dict[str, Any]:
        """See `Source.record`."""
        return {"task": {"name": "translation"} if self._task is None else self._task.to_json()}


def _read_split(
    folder: Path, name: str, pairs: Pairs, sample: Thinned[tuple[str, str]], progress: Progress
) -> dict[str, int]:
    """Copy a split's text into the folder and count what was met."""
    report = ReadReport()
    kept = empty = control = long = 0
    paths = [text_path(folder, name, side) for side in ("source", "target")]
    with (
        paths[0].open("w", encoding="utf-8", newline="\n") as source_file,
        paths[1].open("w", encoding="utf-8", newline="\n") as target_file,
    ):
        for source, target in pairs.read(report):
            if not source.strip() or not target.strip():
                empty += 1
                if name == "train":
                    continue
            kept += 1
            control += bool(CONTROL.search(source) or CONTROL.search(target))
            long += max(len(source), len(target)) > MAX_LEARNED_CHARS
            source_file.write(source + "\n")
            target_file.write(target + "\n")
            if name == "train":
                sample.add((source, target))
            if kept % REPORT_PAIRS == 0:
                progress(f"read {name}", kept, 0)
    progress(f"read {name}", kept, kept)
    dropped = "empty_dropped" if name == "train" else "empty_kept"
    met = {dropped: empty, "control_characters": control, "long_lines": long, "pairs": kept}
    return {**dataclasses.asdict(report), **met}


def _encode_split(
    folder: Path,
    name: str,
    tokenizer: Tokenizer,
    counts: dict[str, int],
    progress: Progress,
    task: ParsingTask | None,
) -> None:
    """Encode a split's text into its store, and add what can be counted only now."""
    total = counts["pairs"]
    both = tokenizer if task is None else ParsingTokenizer(tokenizer, task)

    def encoded() -> Iterator[tuple[list[int], list[int]]]:
        sides = (stored_lines(text_path(folder, name, side)) for side in ("source", "target"))
        pairs = zip(*sides, strict=True)
        done = 0
        while block := list(islice(pairs, ENCODE_PAIRS)):
            sources = both.source.encode_batch([source for source, _ in block])
            yield from zip(sources, both.target.encode_batch([target for _, target in block]), strict=True)
            done += len(block)
            progress(f"encode {name}", done, total)

    write_pairs(folder / name, encoded(), tokenizer.vocab_size)
    store = PairStore.open(folder / name, verify=False)
    for side in ("source", "target"):
        ids, lengths = getattr(store, side).ids, getattr(store, f"{side}_lengths")
        counts[f"{side}_tokens"] = len(ids)
        counts[f"{side}_longest"] = int(lengths.max(initial=0))
        counts[f"{side}_unknown"] = int((ids == tokenizer.unk_id).sum())
