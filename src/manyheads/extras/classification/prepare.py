"""Prepared labelled texts: making a folder of them, with the labels in the manifest (see `data.preparing`), and opening
it: tokenizer, labels, stores, and the raw validation and test texts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.corpora import DIGESTS, load_tatoeba
from manyheads.data.lines import Progress, blocks_of, phase_progress, stored_lines
from manyheads.data.prepared_folder import (
    PreparedFolder,
    cached_folder,
    open_manifest,
    open_stores,
    prepared_task,
    read_texts,
    refuse_missing,
)
from manyheads.data.preparing import CONTROL, SPLITS, given_splits, prepare
from manyheads.data.translation.preparing import PART_ROWS, REPORT_ROWS, SidesSource
from manyheads.errors import ConfigError, DataError
from manyheads.extras.classification.labelled_files import (
    Labelled,
    LabelledFiles,
    LabelledList,
    LabelledReport,
    LabelledTexts,
)
from manyheads.extras.classification.labelled_store import LabelledStore, write_labelled
from manyheads.extras.classification.settings import TATOEBA_LANGUAGES, LabelledSettings, check_labels
from manyheads.tasks.preparation import (
    check_holdout,
    check_keys,
    chosen_vocabulary,
    count_lines,
    summary_of,
    vocabulary_lines,
)
from manyheads.text.learning import MAX_LEARNED_CHARS, Rereadable
from manyheads.text.settings import Extension, TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.data.store import IntArray
    from manyheads.extras.classification.options import PrepareOptions


LABELLED_TASK = "classification"
MOST_LABELS = 10_000
SIDES = ("label", "text")


def prepare_labelled(
    folder: str | Path,
    *,
    train: LabelledTexts,
    valid: LabelledTexts | None = None,
    test: LabelledTexts | None = None,
    tokenizer: TokenizerSettings | Tokenizer | Extension,
    num_held_back: int = 0,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
) -> dict[str, Any]:
    """Make a folder of prepared data; read it with `prepared_labelled.LabelledData.open`.

    The labels are those of the training texts, sorted. No text is left out for its length; see `LabelledSettings`.

    Args:
        folder: the folder to make.
        train: the training texts.
        valid: the validation texts, if any.
        test: the test texts, if any.
        tokenizer: settings for a tokenizer to train on the training texts, an existing one, or one that
            learns more pieces from them.
        num_held_back: without validation texts: hold back so many training texts, chosen by a hash of the text. So the
            choice does not depend on their order, and equal texts stay together.
        replace, progress, key: see `preparing.prepare`.

    Returns: the manifest.
    Raises:
        DataError: the texts cannot be used: fewer than two labels, or a label that no training text has.
        ConfigError: validation texts are given, and to be held back as well.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    if num_held_back and valid is not None:
        raise ConfigError(f"{num_held_back} texts are to be held back, but there are validation texts already.")
    source = _LabelledSource(given_splits(train, valid, test), tokenizer, num_held_back)
    return prepare(folder, source, replace=replace, progress=progress, key=key)


class _LabelledSource(SidesSource):
    """See `preparing.Source`."""

    sides = SIDES
    unit = "texts"

    def __init__(
        self, splits: dict[str, LabelledTexts], tokenizer: TokenizerSettings | Tokenizer | Extension, num_held_back: int
    ) -> None:
        super().__init__(splits, tokenizer)
        self._num_held_back = num_held_back
        self._by_label: dict[str, Counter[str]] = {}
        self._labels: tuple[str, ...] = ()
        self._seen: set[bytes] = set()

    def read(self) -> dict[str, str]:
        origin = {split: texts.describe() for split, texts in self.splits.items()}
        reports, rows = {}, {}
        for split, texts in self.splits.items():
            reports[split] = LabelledReport()
            rows[split] = self._collected(split, texts, reports[split])
        if self._num_held_back:
            rows["train"], rows["valid"] = _held_back(rows["train"], self._num_held_back, origin["train"])
            reports["valid"] = LabelledReport()
            origin["valid"] = f"held back: {self._num_held_back} texts of {origin['train']}, by a hash of the text"
            rows = given_splits(rows["train"], rows["valid"], rows.get("test"))
            origin = {split: origin[split] for split in rows}
        for split, where in origin.items():
            if not rows[split]:
                raise DataError(f"There are no {split} texts in {where}; give others, or leave them out.")
        self._check_labels(rows, origin)
        for _, text, _ in rows["train"]:
            self._seen.add(_digest(text))
        for split, some in rows.items():
            self._write(split, some, reports[split])
        return origin

    def _collected(self, split: str, texts: LabelledTexts, report: LabelledReport) -> list[Labelled]:
        rows: list[Labelled] = []
        for row in texts.read(report):
            rows.append(row)
            if len(rows) % REPORT_ROWS == 0:
                self.progress(f"read {split}", len(rows), 0)
        self.progress(f"read {split}", len(rows), len(rows))
        return rows

    def _check_labels(self, rows: dict[str, list[Labelled]], origin: dict[str, str]) -> None:
        self._by_label = {split: Counter(row.label for row in some) for split, some in rows.items()}
        self._labels = tuple(sorted(self._by_label["train"]))
        if not 2 <= len(self._labels) <= MOST_LABELS:
            raise DataError(
                f"{origin['train']} has {len(self._labels):,} labels ({', '.join(self._labels[:3])}), but a classifier"
                f" has 2 to {MOST_LABELS:,}; is the label the first column?"
            )
        check_labels(self._labels)
        for split, some in rows.items():
            for row in some:
                if row.label not in self._by_label["train"]:
                    place = f"{origin[split]}: line {row.line}" if row.line else origin[split]
                    raise DataError(
                        f"{place} has the label {row.label!r}, which no training text has; the training labels are"
                        f" {_listed(self._labels)}. Correct it, leave the line out, or add training texts with it."
                    )

    def _write(self, split: str, rows: list[Labelled], report: LabelledReport) -> None:
        """Copy a split into the folder and count its oddities."""
        control = long = known = 0
        files = [path.open("w", encoding="utf-8", newline="\n") for path in self.paths(split)]
        with files[0], files[1]:
            for label, text, _ in rows:
                control += bool(CONTROL.search(text))
                long += len(text) > MAX_LEARNED_CHARS
                known += split != "train" and _digest(text) in self._seen
                files[0].write(label + "\n")
                files[1].write(text + "\n")
        counts = {"control_characters": control, "long_lines": long, "texts": len(rows), "known_texts": known}
        self.counts[split] = {**dataclasses.asdict(report), **counts}

    def texts(self) -> Iterable[str]:
        rows = self.sample()
        return Rereadable(lambda: (text for _, text in rows), length_hint(rows))

    def encode(self, split: str) -> dict[str, int]:
        tokenizer, counts = self.tokenizer, self.counts[split]
        numbers = {label: number for number, label in enumerate(self._labels)}
        counts |= {"tokens": 0, "longest": 0, "unknown": 0}

        def encoded() -> Iterator[tuple[IntArray, int]]:
            done = 0
            for block in blocks_of(zip(*map(stored_lines, self.paths(split)), strict=True), PART_ROWS):
                labels, texts = zip(*block, strict=True)
                on_progress = phase_progress(self.progress, f"encode {split}", counts["texts"], done)
                rows = self.encoded(texts, tokenizer, on_progress, counts)
                yield from zip(rows, (numbers[label] for label in labels), strict=True)
                done += len(block)

        write_labelled(self.folder / split, encoded(), max(tokenizer.vocab_size, len(self._labels)))
        return counts

    def record(self) -> dict[str, Any]:
        counts = {split: {label: some[label] for label in self._labels} for split, some in self._by_label.items()}
        return {"task": {"name": LABELLED_TASK, "labels": list(self._labels)}, "label_counts": counts}


def _held_back(rows: list[Labelled], count: int, where: str) -> tuple[list[Labelled], list[Labelled]]:
    """Return the other rows and those held back: the texts with the lowest hashes, with all rows of an equal text.

    Raises: DataError: none would be left to train on.
    """
    chosen: set[bytes] = set()
    found = 0
    repeats = Counter(_digest(row.text) for row in rows)
    for digest in sorted(repeats):
        if found >= count:
            break
        chosen.add(digest)
        found += repeats[digest]
    kept = [row for row in rows if _digest(row.text) not in chosen]
    if not kept:
        raise DataError(
            f"{where} has {len(rows)} texts; with {count} held back for validation, none is left to train on. Hold back"
            " fewer."
        )
    return kept, [row for row in rows if _digest(row.text) in chosen]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode()).digest()[:16]


def _listed(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:10]) + (f" and {len(labels) - 10} more" if len(labels) > 10 else "")


_COMMAND = "manyheads prepare --task classification"


@dataclass(frozen=True, kw_only=True)
class LabelledData(PreparedFolder):
    """A folder written by `prepare_labelled`.

    Attributes:
        tokenizer: of the texts.
        labels: in the order of their ids.
        train: training texts as ids.
        valid: validation texts as ids, or None.
        test: test texts as ids, or None.
        texts: split -> its raw rows, in order, of valid and test.
    """

    tokenizer: Tokenizer
    labels: tuple[str, ...]
    train: LabelledStore
    valid: LabelledStore | None = None
    test: LabelledStore | None = None
    texts: Mapping[str, list[Labelled]]

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> LabelledData:
        """Open a folder written by `manyheads prepare --task classification`.

        Args: verify: compare every SHA-256 sum; otherwise compare sizes only.

        Raises: DataError: the folder is missing or damaged, of another task, or its parts do not belong together.
        """
        path = Path(path)
        manifest = open_manifest(path, _COMMAND, verify)
        if (name := prepared_task(path)) != LABELLED_TASK:
            raise DataError(f"{path} is prepared for {name}; labelled texts are needed here: `{_COMMAND}`.")
        labels = manifest["task"].get("labels")
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels) or len(labels) < 2:
            raise DataError(f"{path}/manifest.json is damaged: it lists no labels. Prepare the data again.")
        tokenizer = Tokenizer.load(path / "tokenizer.json")
        stores = open_stores(LabelledStore, path, manifest, verify)
        for split, store in stores.items():
            if store.vocab_size != max(tokenizer.vocab_size, len(labels)) or store.label.max(initial=0) >= len(labels):
                raise DataError(f"{path / split} does not fit the tokenizer and labels. Prepare the data again.")
        try:
            check_labels(labels)
        except ConfigError as error:
            raise DataError(f"{path}/manifest.json is damaged: {error} Prepare the data again.") from None
        rows = read_texts(path, SIDES, manifest, stores, verify)
        texts = {split: [Labelled(*row) for row in some] for split, some in rows.items()}
        return cls(path=path, manifest=manifest, tokenizer=tokenizer, labels=tuple(labels), texts=texts, **stores)

    def describe(self) -> str:
        """Return a few lines for users: sizes, what was left out, the tokenizer, and the balance of the labels."""
        splits = self.describe_splits(
            f", {len(self.labels)} labels",
            lambda _, store: (f"{len(store):,} texts", f"{len(store.text.ids):,} tokens"),
        )
        return f"{splits}\n{self.balance()}"

    def balance(self) -> str:
        """Return a line on the training labels: the count of each, and the accuracy of always predicting the most
        frequent one."""
        counts = self.manifest.get("label_counts", {}).get("train", {})
        return describe_balance({label: int(counts.get(label, 0)) for label in self.labels})


def describe_balance(counts: Mapping[str, int]) -> str:
    """Return a line on the labels of a data set. counts: label -> texts."""
    ordered = sorted(counts, key=lambda label: (-counts[label], label))
    total, first, last = max(1, sum(counts.values())), ordered[0], ordered[-1]
    shown = ", ".join(f"{label} {counts[label]:,}" for label in ordered[:12])
    shown += f", ... {last} {counts[last]:,}" if len(ordered) > 12 else ""
    line = f"labels {shown}; always answering {first} would be right in {100 * counts[first] / total:.1f}%"
    if counts[last] and counts[first] >= 3 * counts[last]:
        ratio = counts[first] / counts[last]
        line += f". The classes are imbalanced, {ratio:.1f} to 1: macro F1 tells more than accuracy"
    return line


def open_labelled(
    settings: LabelledSettings,
    tokenizer: TokenizerSettings,
    cache_dir: str | Path,
    *,
    progress: Progress | None = None,
) -> LabelledData:
    """Return the data that `settings.path` names: a prepared folder, or the embedded sentences with their languages.

    Args:
        tokenizer: for the embedded corpus; a prepared folder contains its own tokenizer.
        cache_dir: the embedded corpus is prepared once, in a folder below this one.

    Raises: ConfigError: there is no embedded corpus of that name. DataError: the folder is missing or damaged.
    """
    name = settings.path
    if name == TATOEBA_LANGUAGES:
        recipe = {"corpus": name, "digests": DIGESTS, "tokenizer": asdict(tokenizer)}

        def make(folder: Path, key: str) -> None:
            train, valid, test = (LabelledList(f"{name} {split}", languages_of(split)) for split in SPLITS)
            more: dict[str, Any] = {"tokenizer": tokenizer, "replace": True, "progress": progress, "key": key}
            prepare_labelled(folder, train=train, valid=valid, test=test, **more)

        return cached_folder(recipe, Path(cache_dir), make, LabelledData.open)
    if name.startswith("embedded:"):
        raise ConfigError(f"There is no labelled corpus {name!r}; the embedded one is {TATOEBA_LANGUAGES}.")
    refuse_missing(name, [TATOEBA_LANGUAGES], _COMMAND)
    return LabelledData.open(name)


def languages_of(split: str) -> list[Labelled]:
    """Return the sentences of a split of the embedded pairs, each once, labelled with their language."""
    pairs = load_tatoeba(split)
    rows = dict.fromkeys((label, text) for pair in pairs for label, text in zip(("en", "de"), pair, strict=True))
    return [Labelled(label, text) for label, text in rows]


_FORMS = ("tsv", "jsonl", "texts", "labels")


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.report.Task`.

    Raises: ConfigError: training or validation texts are missing, or are given in two forms.
    """
    splits: dict[str, LabelledFiles] = {}
    for split in SPLITS:
        prefix = "" if split == "train" else f"{split}_"
        given = {form: getattr(options, prefix + form) for form in _FORMS}
        if any(path is not None for path in given.values()):
            splits[split] = _files(options, split, given)
    if "train" not in splits:
        raise ConfigError("There are no training texts: give --tsv, --jsonl, or --texts and --labels.")
    check_keys(options, ("text_key", "label_key"), any(files.has_keys for files in splits.values()))
    check_holdout(options, [f"--valid-{form}" for form in _FORMS], "--valid-count", "500")
    tokenizer = chosen_vocabulary(options.vocabulary, TokenizerSettings, Tokenizer.load)
    return partial(
        prepare_labelled,
        train=splits["train"],
        valid=splits.get("valid"),
        test=splits.get("test"),
        tokenizer=tokenizer,
        num_held_back=options.valid_count or 0,
    )


def _files(options: PrepareOptions, split: str, given: dict[str, Any]) -> LabelledFiles:
    """Raises: ConfigError: the texts are given in two forms, or incompletely."""
    names = ("text_key", "label_key", "on_bad_utf8", "on_empty")
    try:
        return LabelledFiles(**given, **{name: getattr(options, name) for name in names})
    except ConfigError as error:
        raise ConfigError(f"The {split} texts: {error}") from None


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.report.Task`."""
    data = LabelledData.open(folder, verify=False)
    lines = vocabulary_lines(manifest)
    for split, counts in manifest["counts"].items():
        lines += ["", f"{split}: {counts['texts']:,} texts"]
        lines += count_lines({**counts, "lines": 0})
        mean, unknown = counts["tokens"] / max(counts["texts"], 1), counts["unknown"]
        noted = f", {unknown:,} unknown" if unknown else ""
        lines.append(f"  {counts['tokens']:>13,} tokens: {mean:.1f} a text, {counts['longest']:,} the longest{noted}")
        if counts["known_texts"]:
            lines.append(f"  {counts['known_texts']:>13,} texts that are also training texts, so their scores flatter")
        lines.append(f"  {describe_balance(manifest['label_counts'][split])}")
    return summary_of(data, lines, "classifier-demo")
