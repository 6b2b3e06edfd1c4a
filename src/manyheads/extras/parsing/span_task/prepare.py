"""From files of trees to a folder of prepared data for a chart parser. The manifest records labels and tags."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.data.lines import Progress, ReadReport, stored_lines
from manyheads.data.preparing import CONTROL, given_splits, prepare
from manyheads.data.translation.preparing import REPORT_ROWS, SidesSource
from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.span_data import (
    SIDES,
    SPANS_TASK,
    SpanData,
    SpanRow,
    SpanTree,
    affix_hashes,
    spans_of,
    word_pieces,
    write_spans,
)
from manyheads.extras.parsing.tokenizer import ParsingTask, TreeFile
from manyheads.extras.parsing.trees import ParsingSettings, parse_tree
from manyheads.tasks.preparation import chosen_vocabulary, count_lines, summary_of, vocabulary_lines
from manyheads.text.learning import MAX_LEARNED_CHARS, Rereadable
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manyheads.extras.parsing.span_task.options import PrepareOptions
    from manyheads.text.settings import Extension


def prepare_spans(
    folder: str | Path,
    *,
    train: TreeFile,
    valid: TreeFile | None = None,
    test: TreeFile | None = None,
    tokenizer: TokenizerSettings | Tokenizer | Extension,
    replace: bool = False,
    progress: Progress | None = None,
    key: str = "",
) -> dict[str, Any]:
    """Make a folder of prepared data; read it with `SpanData.open`.

    Labels and tags are those of the training trees, sorted. Labels and tags that occur only in validation or test trees
    are counted. A model cannot predict them, so they are errors in its score.

    Args:
        folder: the folder to make.
        train: the training trees; their task says what is kept of all trees, and has a root.
        valid: the validation trees, if any.
        test: the test trees, if any.
        tokenizer: settings for a tokenizer to train on the training sentences, an existing one, or one that
            learns more pieces from them.
        replace, progress, key: see `preparing.prepare`.

    Returns: the manifest.
    Raises:
        DataError: a file is not of trees, or has none, or no training tree has a constituent below the root.
        ConfigError: the task has no root.
        SaveError: the disk is full or refuses; nothing is left behind.
    """
    if train.task.settings.root is None:
        raise ConfigError("A chart parser puts every tree under a root; name its label.")
    source = _SpanSource(given_splits(train, valid, test), tokenizer, train.task.settings)
    return prepare(folder, source, replace=replace, progress=progress, key=key)


class _SpanSource(SidesSource):
    """See `preparing.Source`."""

    sides = SIDES
    unit = "sentences"

    def __init__(
        self, splits: dict[str, TreeFile], tokenizer: TokenizerSettings | Tokenizer | Extension, parts: ParsingSettings
    ) -> None:
        super().__init__(splits, tokenizer)
        self._kept = parts
        self._labels: tuple[str, ...] = ()
        self._tags: tuple[str, ...] = ()

    def read(self) -> dict[str, str]:
        labels: Counter[str] = Counter()
        tags: Counter[str] = Counter()
        for split, trees in self.splits.items():
            self.counts[split] = self._read_split(split, trees, labels, tags)
            if not self.counts[split]["sentences"]:
                raise DataError(f"There are no {split} trees in {trees.describe()}; give others, or leave them out.")
        if not labels:
            raise DataError(
                f"No tree of {self.splits['train'].describe()} has a constituent below its root, so there is nothing"
                " to learn; are these the right trees?"
            )
        self._labels, self._tags = tuple(sorted(labels)), tuple(sorted(tags))
        return {split: trees.describe() for split, trees in self.splits.items()}

    def _read_split(self, split: str, trees: TreeFile, labels: Counter[str], tags: Counter[str]) -> dict[str, int]:
        """Copy the text of a split into the folder, and count its oddities; of training trees also labels and tags."""
        report = ReadReport()
        kept = control = long = 0
        files = [path.open("w", encoding="utf-8", newline="\n") for path in self.paths(split)]
        with files[0], files[1]:
            for sentence, tree in trees.read(report):
                kept += 1
                control += bool(CONTROL.search(sentence))
                long += len(sentence) > MAX_LEARNED_CHARS
                files[0].write(sentence + "\n")
                files[1].write(tree + "\n")
                if split == "train":
                    known = self._spans(tree)
                    labels.update(label for *_, label in known.spans)
                    tags.update(known.tags)
                if kept % REPORT_ROWS == 0:
                    self.progress(f"read {split}", kept, 0)
        self.progress(f"read {split}", kept, kept)
        counts = {"control_characters": control, "long_lines": long, "sentences": kept}
        return {**dataclasses.asdict(report), **counts}

    def _spans(self, tree: str) -> SpanTree:
        return spans_of(parse_tree(tree), self._kept)

    def texts(self) -> Iterable[str]:
        rows = self.sample()
        return Rereadable(lambda: (sentence for sentence, _ in rows), length_hint(rows))

    def encode(self, split: str) -> dict[str, int]:
        tokenizer, counts = self.tokenizer, self.counts[split]
        labels = {label: number for number, label in enumerate(self._labels, 1)}
        tags = {tag: number for number, tag in enumerate(self._tags, 1)}
        counts |= {"words": 0, "longest": 0, "constituents": 0, "unknown_labels": 0, "unknown_tags": 0}

        def encoded() -> Iterator[SpanRow]:
            for done, line in enumerate(stored_lines(self.paths(split)[1]), 1):
                tree = self._spans(line)
                known = [(start, end, labels[label]) for start, end, label in tree.spans if label in labels]
                numbers = [tags.get(tag, 0) for tag in tree.tags]
                counts["words"] += len(tree.words)
                counts["longest"] = max(counts["longest"], len(tree.words))
                counts["constituents"] += len(tree.spans)
                counts["unknown_labels"] += len(tree.spans) - len(known)
                counts["unknown_tags"] += numbers.count(0)
                yield SpanRow(word_pieces(tree.words, tokenizer), [*map(affix_hashes, tree.words)], numbers, known)
                if done % REPORT_ROWS == 0:
                    self.progress(f"encode {split}", done, counts["sentences"])

        write_spans(self.folder / split, encoded())
        return counts

    def record(self) -> dict[str, Any]:
        parts = {"functions": self._kept.functions, "root": self._kept.root}
        names = {"constituents": list(self._labels), "tags": list(self._tags)}
        return {"task": {"name": SPANS_TASK, **parts, **names}}


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.report.Task`.

    Raises: ConfigError: the validation trees are missing, or `options.tree_root` is not a label.
    """
    if options.valid_trees is None:
        raise ConfigError(
            "There are no validation trees, which are needed to select the best model. Give --valid-trees FILE."
        )
    task = ParsingTask(ParsingSettings(tags="keep", functions=options.tree_functions, root=options.tree_root))
    files = {"train": options.trees, "valid": options.valid_trees, "test": options.test_trees}
    splits: dict[str, Any] = {
        split: TreeFile(path=path, task=task, on_bad_utf8=options.on_bad_utf8)
        for split, path in files.items()
        if path is not None
    }
    tokenizer = chosen_vocabulary(options.vocabulary, TokenizerSettings, Tokenizer.load)
    return partial(prepare_spans, **splits, tokenizer=tokenizer)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.report.Task`."""
    data = SpanData.open(folder, verify=False)
    lines = [
        *vocabulary_lines(manifest),
        f"labels      {len(data.constituents)}, and {len(data.tags)} tags, under {data.root}",
    ]
    for split, counts in manifest["counts"].items():
        lines += ["", f"{split}: {counts['sentences']:,} trees"]
        lines += count_lines({**counts, "lines": 0, "words": 0})
        mean = counts["words"] / max(counts["sentences"], 1)
        lines.append(f"  {counts['words']:>13,} words: {mean:.1f} a sentence, {counts['longest']:,} the longest")
        lines.append(f"  {counts['constituents']:>13,} spans with a label")
        for kind in ("labels", "tags"):
            if count := counts[f"unknown_{kind}"]:
                lines.append(f"  {count:>13,} {kind} that no training tree has, which a model cannot predict")
    return summary_of(data, lines, "chart-parser")
