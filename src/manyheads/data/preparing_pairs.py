"""From sentence pairs to a folder of prepared data; see `preparing`. The raw text of valid and test stays, for BLEU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from manyheads.data.line_source import blocks_of
from manyheads.data.lines import ReadReport, stored_lines
from manyheads.data.preparing import CONTROL, Source, given_splits, prepare
from manyheads.data.progress import Progress
from manyheads.data.store import PairStore, write_pairs
from manyheads.errors import DataError
from manyheads.text.languages import LanguagePair
from manyheads.text.learning import MAX_LEARNED_CHARS, Thinned
from manyheads.text.parsing import ParsingTask
from manyheads.text.parsing_tokenizer import ParsingTokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tags import untagged
from manyheads.text.tokenizer import Tokenizer

__all__ = ["CLEANING", "PairList", "Pairs", "prepare_corpus", "text_path"]

CLEANING = "cleaning.json"
ENCODE_PAIRS = 4096  # pairs per call of the tokenizer
REPORT_PAIRS = 10_000  # pairs per call of `progress`
MAX_TOKENIZER_PAIRS = 2_000_000  # with more pairs, every second pair is used for training, then every fourth, ...


class Pairs(Protocol):
    """The input of a split: `readers.PairFiles`, `trees.TreeFile`, or `PairList`."""

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


def text_path(folder: Path, split: str, side: str) -> Path:
    """Return the file with the raw text of a split, one sentence per line."""
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
    cleaning: Callable[[], Mapping[str, Any]] | None = None,
    languages: Sequence[LanguagePair] = (),
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
        tokenizer: settings for a tokenizer to train on both sides of the training pairs, or an existing tokenizer.
        replace: replace an older folder of that name when this one is complete.
        progress: called with the phase, the amount done, and the total or 0.
        key: stored in the manifest, to recognise the folder.
        task: the conversion of targets that are trees. They are stored as text, and encoded as the task defines.
        cleaning: called after the training pairs were read; its result is written to cleaning.json.
        languages: of source and target, as in BCP 47, which the manifest records; several if the splits are
            `tagged.TaggedPairs`, whose targets then have a tag each.

    Returns: the manifest.
    Raises:
        DataError: the text cannot be used, no training pair is left, or the folder exists.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    source = _PairSource(given_splits(train, valid, test), tokenizer, task, cleaning, languages)
    return prepare(folder, source, replace=replace, progress=progress, key=key)


class _PairSource(Source):
    """See `preparing.Source`."""

    def __init__(
        self,
        splits: dict[str, Pairs],
        tokenizer: TokenizerSettings | Tokenizer,
        task: ParsingTask | None,
        cleaning: Callable[[], Mapping[str, Any]] | None,
        languages: Sequence[LanguagePair],
    ) -> None:
        self._cleaning, self._languages = cleaning, languages
        self._targets = list(dict.fromkeys(target for _, target in languages)) if len(languages) > 1 else []
        self.settings = tokenizer if isinstance(tokenizer, TokenizerSettings) else None
        self._splits, self._tokenizer, self._task = splits, tokenizer, task
        self._sample: Thinned[tuple[str, str]] = Thinned(MAX_TOKENIZER_PAIRS)

    def read(self) -> dict[str, str]:
        """See `Source.read`."""
        self._counts = {split: self._read_split(split, pairs) for split, pairs in self._splits.items()}
        origin = {split: pairs.describe() for split, pairs in self._splits.items()}
        train = self._counts["train"]
        if not train["pairs"]:
            raise DataError(
                f"No training pairs are left in {origin['train']}: {train['lines']} were read and"
                f" {train['empty_dropped']} of them have an empty side."
            )
        for split, where in origin.items():
            if not self._counts[split]["pairs"]:
                raise DataError(f"There are no {split} pairs in {where}; give others, or leave them out.")
        return origin

    def _read_split(self, split: str, pairs: Pairs) -> dict[str, int]:
        """Copy the text of a split into the folder and count its oddities."""
        report = ReadReport()
        kept = empty = control = long = 0
        source_file, target_file = (path.open("w", encoding="utf-8", newline="\n") for path in self._paths(split))
        with source_file, target_file:
            for source, target in pairs.read(report):
                if not source.strip() or not target.strip():
                    empty += 1
                    if split == "train":
                        continue
                kept += 1
                control += bool(CONTROL.search(source) or CONTROL.search(target))
                long += max(len(source), len(target)) > MAX_LEARNED_CHARS
                source_file.write(source + "\n")
                target_file.write(target + "\n")
                if split == "train":
                    self._sample.add((source, target))
                if kept % REPORT_PAIRS == 0:
                    self.progress(f"read {split}", kept, 0)
        self.progress(f"read {split}", kept, kept)
        dropped = "empty_dropped" if split == "train" else "empty_kept"
        counts = {dropped: empty, "control_characters": control, "long_lines": long, "pairs": kept}
        return {**dataclasses.asdict(report), **counts}

    def _paths(self, split: str) -> list[Path]:
        return [text_path(self.folder, split, side) for side in ("source", "target")]

    def learn(self) -> Tokenizer:
        """See `Source.learn`."""
        if isinstance(self._tokenizer, TokenizerSettings):
            self.progress("train the tokenizer", 0, 1)
            if self._task is None:
                is_tagged = bool(self._targets)
                pairs = ((untagged(source)[0] if is_tagged else source, target) for source, target in self._sample.kept)
                texts = (text for pair in pairs for text in pair)
                self._tokenizer = Tokenizer.train(texts, self._tokenizer, languages=self._targets)
            else:
                self._tokenizer = self._task.learn_tokenizer(self._sample.kept, self._tokenizer)
            self.progress("train the tokenizer", 1, 1)
        if missing := [target for target in self._targets if target not in self._tokenizer.target_languages]:
            raise DataError(
                f"The tokenizer has no tag for {', '.join(missing)}; its tags are"
                f" {', '.join(self._tokenizer.target_languages) or 'none'}. Leave out --tokenizer, and a new one is"
                " trained."
            )
        if self._tokenizer.target_languages and not self._targets:
            raise DataError(
                "The tokenizer is that of a model of several languages, so each pair of files needs its languages;"
                " give them by --pair SOURCE-LANG TARGET-LANG SOURCE TARGET."
            )
        if self._task is not None:
            self._tokenizer = ParsingTokenizer(self._tokenizer, self._task)
        return self._tokenizer

    def encode(self, split: str) -> dict[str, int]:
        """See `Source.encode`."""
        tokenizer, counts = self._tokenizer, self._counts[split]
        assert isinstance(tokenizer, Tokenizer)  # since `learn`

        def encoded() -> Iterator[tuple[list[int], list[int]]]:
            pairs = zip(*map(stored_lines, self._paths(split)), strict=True)
            done = 0
            for block in blocks_of(pairs, ENCODE_PAIRS):
                sources, targets = zip(*block, strict=True)
                encoded_sources = tokenizer.source.encode_batch(sources)
                yield from zip(encoded_sources, tokenizer.target.encode_batch(targets), strict=True)
                done += len(block)
                self.progress(f"encode {split}", done, counts["pairs"])

        write_pairs(self.folder / split, encoded(), tokenizer.vocab_size)
        store = PairStore.open(self.folder / split, verify=False)
        for side in ("source", "target"):
            ids, lengths = getattr(store, side).ids, getattr(store, f"{side}_lengths")
            counts[f"{side}_tokens"] = len(ids)
            counts[f"{side}_longest"] = int(lengths.max(initial=0))
            counts[f"{side}_unknown"] = int((ids == tokenizer.unk_id).sum())
        return counts

    def finish(self) -> list[str]:
        """See `Source.finish`."""
        for path in self._paths("train"):
            path.unlink()
        if self._cleaning is not None:
            content = json.dumps(self._cleaning(), ensure_ascii=False, indent=1)
            (self.folder / CLEANING).write_text(content + "\n", encoding="utf-8")
        more = [] if self._cleaning is None else [CLEANING]
        return more + [path.name for split in self._splits if split != "train" for path in self._paths(split)]

    def record(self) -> dict[str, Any]:
        """See `Source.record`."""
        record: dict[str, Any] = {"task": {"name": "translation"} if self._task is None else self._task.to_json()}
        if self._languages:
            record["languages"] = [list(pair) for pair in self._languages]
        directions = {split: getattr(pairs, "directions", None) for split, pairs in self._splits.items()}
        held_out = {split: found for split, found in directions.items() if found and split != "train"}
        return {**record, "directions": held_out} if held_out else record
