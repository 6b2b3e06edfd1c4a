"""From rows of two texts to a folder of prepared data; see `data.preparing`.

`SidesSource` is the common part of sentence pairs, labelled texts and trees. The raw text of valid and test stays, for
BLEU. A corpus without validation pairs gets its last training pairs.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from manyheads.data.lines import Progress, ReadReport, blocks_of, stored_lines
from manyheads.data.preparing import (
    CLEANING,
    CONTROL,
    InOrder,
    Source,
    given_splits,
    in_this_process,
    kept_part,
    prepare,
    text_path,
)
from manyheads.data.store import IntArray, Rows, write_blocks_of_pairs
from manyheads.errors import ConfigError, DataError
from manyheads.files.verify import file_sha256
from manyheads.text.learning import MAX_LEARNED_CHARS, Rereadable, thinned
from manyheads.text.settings import Extension, GrowthSettings, TokenizerSettings
from manyheads.text.sides import LanguagePair, tagged, untagged
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import is_blank

ENCODE_ROWS = 4096  # rows per call of the tokenizer
REPORT_ROWS = 10_000  # rows per call of `progress`
PART_ROWS = 2**16  # rows of a part that is kept until the folder is complete


class SidesSource(Source):
    """Rows of two texts, copied into a file for each; those of valid and test stay.

    Args:
        splits: the input of each split.
        tokenizer: settings of the tokenizer to learn, an existing tokenizer, or one that learns more pieces.

    Attributes:
        sides: names of the two files.
        unit: the entry of the counts that says how many rows there are.
        counts: of each split, which `read` fills in.
        tokenizer: what `learn` returned.
    """

    sides: ClassVar[tuple[str, str]]
    unit: ClassVar[str]
    tokenizer: Tokenizer

    def __init__(self, splits: Mapping[str, Any], tokenizer: TokenizerSettings | Tokenizer | Extension) -> None:
        self.settings: TokenizerSettings | GrowthSettings | None = None
        if isinstance(tokenizer, TokenizerSettings):
            self.settings = tokenizer
        elif isinstance(tokenizer, Extension):
            self.settings = tokenizer.settings
        self.splits, self._given = splits, tokenizer
        self.counts: dict[str, dict[str, int]] = {}

    def paths(self, split: str) -> list[Path]:
        """Return the files of a split."""
        return [text_path(self.folder, split, side) for side in self.sides]

    def learn(self) -> Tokenizer:
        given, made = self._given, list[Tokenizer]()

        def make() -> bytes:
            if isinstance(given, TokenizerSettings):
                made[:] = [self.learned(given)]
            elif isinstance(given, Extension):
                made[:] = [given.learn(self.texts(), self.progress)]
            else:
                made[:] = [given]
            return made[0].to_json().encode()

        if self.settings is None or self.counts["train"][self.unit] < PART_ROWS:
            make()
        else:
            made_of = [repr(self.settings), *self.made_of(), *map(file_sha256, self.paths("train"))]
            made.append(Tokenizer.from_json(self.parts.kept(made_of, make).decode()))
        self.tokenizer = made[-1]
        return self.tokenizer

    def made_of(self) -> Iterable[str]:
        """Return what a learned tokenizer depends on, besides the training texts and its settings."""
        return ()

    def sample(self) -> Rereadable[tuple[str, ...]]:
        """Return the rows from which a tokenizer learns: all of them, or of very many every n-th."""
        paths = self.paths("train")
        rows = Rereadable(lambda: zip(*map(stored_lines, paths), strict=True))
        return thinned(rows, self.counts["train"][self.unit], sum(path.stat().st_size for path in paths))

    def texts(self) -> Iterable[str]:
        """Return the texts of the sample, which can be read again."""
        raise NotImplementedError

    def learned(self, settings: TokenizerSettings) -> Tokenizer:
        """Return a tokenizer that is trained on the sample."""
        return Tokenizer.train(self.texts(), settings, on_progress=self.progress)

    def encoded(
        self,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        on_progress: Callable[[int], None],
        counts: dict[str, int],
        side: str = "",
    ) -> list[IntArray]:
        """Return the ids of each text, and count them, the longest and the unknown. Whole blocks are kept as parts.

        Args:
            texts: PART_ROWS of them, or fewer at the end.
            tokenizer: that of the side.
            on_progress: called with the number of texts that are done.
            counts: `tokens`, `longest` and `unknown`, after the side.
            side: as in the names of the counts.
        """
        folder = self.parts.claimed() if len(texts) == PART_ROWS else None
        [content] = EncodedTexts(tokenizer, folder, on_progress)((side, texts))
        on_progress(len(texts))
        ids, lengths = rows_of(content, len(texts), tokenizer, counts, side)
        return np.split(ids, np.cumsum(lengths)[:-1])

    def finish(self) -> list[str]:
        for path in self.paths("train"):
            path.unlink()
        return [path.name for split in self.counts if split != "train" for path in self.paths(split)]


@dataclass(frozen=True)
class EncodedTexts:
    """Encodes texts, perhaps in a process of its own; see `preparing.InOrder`.

    Args: folder: where whole blocks are kept as parts; None: nowhere. on_progress: called with the number of
        texts that are done; not in another process.
    """

    tokenizer: Tokenizer
    folder: Path | None
    on_progress: Callable[[int], None] = lambda count: None

    def __reduce__(self) -> Any:
        return _encoded_texts, (self.tokenizer.to_json(), self.folder)

    def __call__(self, item: tuple[str, Sequence[str]]) -> Iterator[bytes]:
        """Yield the lengths and the ids of texts. item: `source` or `target`, or empty, and the texts."""
        side, texts = item
        tokenizer: Tokenizer = getattr(self.tokenizer, side) if side else self.tokenizer

        def make() -> bytes:
            lengths, ids = [], []
            for start in range(0, len(texts), ENCODE_ROWS):
                some, numbers = tokenizer.encode_many(texts[start : start + ENCODE_ROWS])
                ids.append(some.astype(_item(tokenizer)).tobytes())
                lengths.append(numbers.astype("<i4").tobytes())
                self.on_progress(start + len(numbers))
            return b"".join(lengths + ids)

        folder = self.folder if len(texts) >= PART_ROWS else None
        yield kept_part(folder, [tokenizer.digest, side, *texts], make)


def _encoded_texts(tokenizer: str, folder: Path | None) -> EncodedTexts:
    return EncodedTexts(Tokenizer.from_json(tokenizer), folder)


def rows_of(content: bytes, num_texts: int, tokenizer: Tokenizer, counts: dict[str, int], side: str) -> Rows:
    """Return the ids that `EncodedTexts` has made and their number for each text, and add to the counts."""
    lengths = np.frombuffer(content, "<i4", num_texts)
    ids = np.frombuffer(content, _item(tokenizer), offset=lengths.nbytes)
    counts[f"{side}tokens"] += len(ids)
    counts[f"{side}longest"] = max(counts[f"{side}longest"], int(lengths.max(initial=0)))
    counts[f"{side}unknown"] += int((ids == tokenizer.unk_id).sum())
    return ids, lengths


def _item(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"


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


class RememberedPairs:
    """Pairs that are read once and kept, because they are needed twice."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._kept: list[tuple[str, str]] | None = None
        self._report = ReadReport()

    def describe(self) -> str:
        return self._pairs.describe()

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        if self._kept is None:
            self._kept = list(self._pairs.read(self._report))
        if report is not None:
            for item in dataclasses.fields(report):
                setattr(report, item.name, getattr(report, item.name) + getattr(self._report, item.name))
        yield from self._kept


Direction = tuple[str, str, int]
"""Source, target, and the number of pairs of a stretch of a split."""


class TaggedPairs:
    """Pairs of several directions, one direction after another; each source begins with the tag of its target language.

    Args: parts: the direction of each part, and its pairs.

    Attributes: directions: of the stretches that were read, in order.
    """

    def __init__(self, parts: Sequence[tuple[LanguagePair, Pairs]]) -> None:
        self._parts = parts
        self.directions: list[Direction] = []

    @property
    def languages(self) -> tuple[LanguagePair, ...]:
        """Each direction once."""
        return tuple(dict.fromkeys(pair for pair, _ in self._parts))

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield the pairs of all parts, with tags."""
        self.directions = []
        for (source, target), pairs in self._parts:
            count = 0
            for text, translation in pairs.read(report):
                count += 1
                yield tagged(text, target), translation
            self.directions.append((source, target, count))

    def describe(self) -> str:
        """Return the directions with their files."""
        return "; ".join(f"{source} > {target}: {pairs.describe()}" for (source, target), pairs in self._parts)


def directions_of(manifest: Mapping[str, Any], split: str, num_pairs: int) -> list[tuple[LanguagePair, slice]]:
    """Return the direction of each stretch of a split, as the manifest of prepared data records them.

    Args: num_pairs: of the split.

    Returns: empty for data of one direction.
    Raises: DataError: the record does not cover the split.
    """
    stretches = manifest.get("directions", {}).get(split, [])
    found, first = [], 0
    for source, target, count in stretches:
        found.append(((source, target), slice(first, first + count)))
        first += count
    if stretches and first != num_pairs:
        raise DataError(
            f"manifest.json is damaged: its directions of {split} have {first} pairs, but the split {num_pairs}."
            " Prepare the data again."
        )
    return found


def prepare_corpus(
    folder: str | Path,
    *,
    train: Pairs,
    valid: Pairs | None = None,
    test: Pairs | None = None,
    tokenizer: TokenizerSettings | Tokenizer | Extension,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
    cleaning: Callable[[], Mapping[str, Any]] | None = None,
    languages: Sequence[LanguagePair] = (),
    without_held_back: WithoutHeldBack | None = None,
    in_order: InOrder = in_this_process,
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
            `TaggedPairs`, whose targets then have a tag each.
        without_held_back: called when all splits were read, with the training and the validation pairs; it returns the
            training pairs to use.
        in_order: see `preparing.prepare`.

    Returns: the manifest.
    Raises:
        DataError: the text cannot be used, no training pair is left, or the folder exists.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    source = PairSource(given_splits(train, valid, test), tokenizer, cleaning, languages, without_held_back)
    return prepare(folder, source, replace=replace, progress=progress, key=key, in_order=in_order)


class PairSource(SidesSource):
    """See `preparing.Source`."""

    sides = SIDES
    unit = "pairs"

    def __init__(
        self,
        splits: dict[str, Pairs],
        tokenizer: TokenizerSettings | Tokenizer | Extension,
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
        return Tokenizer.train(self.texts(), settings, languages=self._targets, on_progress=self.progress)

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
        counts |= {f"{side}_{name}": 0 for side in SIDES for name in ("tokens", "longest", "unknown")}

        sizes: deque[int] = deque()  # of the blocks that are being encoded
        done = 0  # texts of both sides

        def on_progress(count: int) -> None:
            self.progress(f"encode {split}", (done + count) // 2, counts["pairs"])

        def blocks() -> Iterator[tuple[str, tuple[str, ...]]]:
            pairs = self._stored(split)
            if split == "train" and self._without_held_back is not None:
                pairs = self._without_held_back(pairs, list(self._stored("valid")))
            for block in blocks_of(pairs, PART_ROWS):
                for side, texts in zip(SIDES, zip(*block, strict=True), strict=True):
                    sizes.append(len(texts))
                    yield side, texts

        def encoded() -> Iterator[tuple[Rows, Rows]]:
            nonlocal done
            folder = self.parts.claimed() if counts["pairs"] >= PART_ROWS else None
            contents = self.in_order(EncodedTexts(tokenizer, folder, on_progress), blocks())
            for both in zip(contents, contents, strict=True):
                rows: list[Rows] = []
                for side, content in zip(SIDES, both, strict=True):
                    size = sizes.popleft()
                    rows.append(rows_of(content, size, tokenizer, counts, f"{side}_"))
                    done += size
                    on_progress(0)
                yield rows[0], rows[1]
            counts["pairs"] = done // 2

        write_blocks_of_pairs(self.folder / split, encoded(), tokenizer.vocab_size)
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


class Rest:
    """All pairs except the last `count` usable ones. After these have been read, `holdout` contains the others.

    The last pairs, not a random choice, because then neighbouring sentences of a document stay in one split.

    Args:
        pairs: all pairs; read once, as a stream.
        count: number of pairs with text on both sides to hold back.

    Attributes: holdout: the pairs held back; empty until the others have been read completely.

    Raises: ConfigError: count is below 1.
    """

    def __init__(self, pairs: Pairs, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{count} pairs are to be held back for validation; hold back at least 1.")
        self._pairs = pairs
        self._count = count
        self._last: deque[tuple[str, str]] = deque()
        self.holdout = PairList(f"held back: {self.describe()}", self._last)

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield the pairs in order; pairs with an empty side are never held back.

        Raises: DataError: no pair is left to train on; see also the `read` of the pairs.
        """
        self._last.clear()
        num_usable = 0
        for source, target in self._pairs.read(report):
            if is_blank(source) or is_blank(target):
                yield source, target
                continue
            num_usable += 1
            self._last.append((source, target))
            if len(self._last) > self._count:
                yield self._last.popleft()
        if num_usable <= self._count:
            raise DataError(
                f"{self._pairs.describe()} has {num_usable} pairs with text on both sides; with {self._count} held"
                " back for validation, none is left to train on. Hold back fewer."
            )

    def describe(self) -> str:
        """Return the names of the files, and how many pairs are missing."""
        return f"{self._pairs.describe()} without the last {self._count} pairs"
