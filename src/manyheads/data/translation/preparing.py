"""From sentence pairs to a folder of prepared data; see `preparing`. The raw text of valid and test stays, for BLEU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any, Protocol

from manyheads.data.line_source import blocks_of
from manyheads.data.lines import ReadReport, stored_lines
from manyheads.data.preparing import CONTROL, given_splits, prepare
from manyheads.data.progress import Progress
from manyheads.data.store import IntArray, write_pairs
from manyheads.data.translation.preparing_sides import PART_ROWS, REPORT_ROWS, SidesSource
from manyheads.errors import DataError
from manyheads.text.growing import Growth
from manyheads.text.languages import LanguagePair
from manyheads.text.learning import MAX_LEARNED_CHARS, Rereadable
from manyheads.text.settings import TokenizerSettings
from manyheads.text.sides import untagged
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import is_blank

CLEANING = "cleaning.json"
SIDES = ("source", "target")


WithoutHeldBack = Callable[[Iterable[tuple[str, str]], Sequence[tuple[str, str]]], Iterator[tuple[str, str]]]


class Pairs(Protocol):
    """The input of a split: `readers.PairFiles`, `PairList`, or another."""

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class PairList:
    """Pairs in memory, with a name for the manifest."""

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


def prepare_corpus(
    folder: str | Path,
    *,
    train: Pairs,
    valid: Pairs | None = None,
    test: Pairs | None = None,
    tokenizer: TokenizerSettings | Tokenizer | Growth,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
    cleaning: Callable[[], Mapping[str, Any]] | None = None,
    languages: Sequence[LanguagePair] = (),
    without_held_back: WithoutHeldBack | None = None,
) -> dict[str, Any]:
    """Make a folder of prepared data; read it with `prepared.PreparedData.open`.

    Training pairs with an empty side are left out and counted. Validation and test pairs are all kept, in order. No
    pair is left out for its length: `DataSettings` limits lengths when training starts (`TrainingStream.report` counts
    the pairs over the limits), so a limit can change without preparing again.

    Args:
        folder: the folder to make.
        train: the training pairs; each file is read once, so it can be a pipe.
        valid: the validation pairs, if any.
        test: the test pairs, if any.
        tokenizer: settings for a tokenizer to train on both sides of the training pairs, an existing tokenizer, or
            one that learns more pieces from them.
        replace: replace an older folder of that name when this one is complete.
        progress: called with the phase, the amount done, and the total or 0.
        key: stored in the manifest, to recognise the folder.
        cleaning: called after the training pairs were read; its result is written to cleaning.json.
        languages: of source and target, as in BCP 47, which the manifest records; several if the splits are
            `tagged.TaggedPairs`, whose targets then have a tag each.
        without_held_back: called when all splits were read, with the training and the validation pairs; it returns the
            training pairs to use.

    Returns: the manifest.
    Raises:
        DataError: the text cannot be used, no training pair is left, or the folder exists.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    source = PairSource(given_splits(train, valid, test), tokenizer, cleaning, languages, without_held_back)
    return prepare(folder, source, replace=replace, progress=progress, key=key)


class PairSource(SidesSource):
    """See `preparing.Source`."""

    sides = SIDES
    unit = "pairs"

    def __init__(
        self,
        splits: dict[str, Pairs],
        tokenizer: TokenizerSettings | Tokenizer | Growth,
        cleaning: Callable[[], Mapping[str, Any]] | None = None,
        languages: Sequence[LanguagePair] = (),
        without_held_back: WithoutHeldBack | None = None,
    ) -> None:
        super().__init__(splits, tokenizer)
        self._without_held_back = without_held_back
        self._cleaning, self._languages = cleaning, languages
        self._targets = list(dict.fromkeys(target for _, target in languages)) if len(languages) > 1 else []

    def read(self) -> dict[str, str]:
        self.counts = {split: self._read_split(split, pairs) for split, pairs in self.splits.items()}
        origin = {split: pairs.describe() for split, pairs in self.splits.items()}
        train = self.counts["train"]
        if not train["pairs"]:
            raise DataError(
                f"No training pairs are left in {origin['train']}: {train['lines']} were read and"
                f" {train['empty_dropped']} of them have an empty side."
            )
        for split, where in origin.items():
            if not self.counts[split]["pairs"]:
                raise DataError(f"There are no {split} pairs in {where}; give others, or leave them out.")
        return origin

    def _read_split(self, split: str, pairs: Pairs) -> dict[str, int]:
        """Copy the text of a split into the folder and count its oddities."""
        report = ReadReport()
        kept = empty = control = long = 0
        source_file, target_file = (path.open("w", encoding="utf-8", newline="\n") for path in self.paths(split))
        with source_file, target_file:
            for source, target in pairs.read(report):
                if is_blank(source) or is_blank(target):
                    empty += 1
                    if split == "train":
                        continue
                kept += 1
                control += bool(CONTROL.search(source) or CONTROL.search(target))
                long += max(len(source), len(target)) > MAX_LEARNED_CHARS
                source_file.write(source + "\n")
                target_file.write(target + "\n")
                if kept % REPORT_ROWS == 0:
                    self.progress(f"read {split}", kept, 0)
        self.progress(f"read {split}", kept, kept)
        dropped = "empty_dropped" if split == "train" else "empty_kept"
        counts = {dropped: empty, "control_characters": control, "long_lines": long, "pairs": kept}
        return {**dataclasses.asdict(report), **counts}

    def learned(self, settings: TokenizerSettings) -> Tokenizer:
        """Return a tokenizer that is trained on both sides of the sample."""
        return Tokenizer.train(self.texts(), settings, languages=self._targets, told=self.progress)

    def made_of(self) -> Iterable[str]:
        return self._targets

    def texts(self) -> Iterable[str]:
        """Return the sources without tags, and the targets."""
        rows, is_tagged = self.sample(), bool(self._targets)

        def flat() -> Iterator[str]:
            for source, target in rows:
                yield untagged(source)[0] if is_tagged else source
                yield target

        return Rereadable(flat, 2 * length_hint(rows))

    def learn(self) -> Tokenizer:
        tokenizer = super().learn()
        if missing := [target for target in self._targets if target not in tokenizer.target_languages]:
            raise DataError(
                f"The tokenizer has no tag for {', '.join(missing)}; its tags are"
                f" {', '.join(tokenizer.target_languages) or 'none'}. Leave out --tokenizer, and a new one is"
                " trained."
            )
        if tokenizer.target_languages and not self._targets:
            raise DataError(
                "The tokenizer is that of a model of several languages, so each pair of files needs its languages;"
                " give them by --pair SOURCE-LANG TARGET-LANG SOURCE TARGET."
            )
        return tokenizer

    def encode(self, split: str) -> dict[str, int]:
        tokenizer, counts = self.tokenizer, self.counts[split]
        assert isinstance(tokenizer, Tokenizer)  # since `learn`

        counts |= {f"{side}_{name}": 0 for side in SIDES for name in ("tokens", "longest", "unknown")}

        def told(first: int, count: int) -> None:
            self.progress(f"encode {split}", (first + count) // 2, counts["pairs"])

        def encoded() -> Iterator[tuple[IntArray, IntArray]]:
            pairs, done = self._stored(split), 0
            if split == "train" and self._without_held_back is not None:
                pairs = self._without_held_back(pairs, list(self._stored("valid")))
            for block in blocks_of(pairs, PART_ROWS):
                rows = []
                for number, (side, texts) in enumerate(zip(SIDES, zip(*block, strict=True), strict=True)):
                    so_far = partial(told, 2 * done + number * len(block))
                    rows.append(self.encoded(texts, getattr(tokenizer, side), so_far, counts, f"{side}_"))
                yield from zip(*rows, strict=True)
                done += len(block)
            counts["pairs"] = done

        write_pairs(self.folder / split, encoded(), tokenizer.vocab_size)
        return counts

    def _stored(self, split: str) -> Iterator[tuple[str, str]]:
        return zip(*map(stored_lines, self.paths(split)), strict=True)

    def finish(self) -> list[str]:
        if self._cleaning is None:
            return super().finish()
        content = json.dumps(self._cleaning(), ensure_ascii=False, indent=1)
        (self.folder / CLEANING).write_text(content + "\n", encoding="utf-8")
        return [CLEANING, *super().finish()]

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"task": {"name": "translation"}}
        if self._languages:
            record["languages"] = [list(pair) for pair in self._languages]
        directions = {split: getattr(pairs, "directions", None) for split, pairs in self.splits.items()}
        held_out = {split: found for split, found in directions.items() if found and split != "train"}
        return {**record, "directions": held_out} if held_out else record
