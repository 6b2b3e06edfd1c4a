"""The common part of preparing pairs, labelled texts and trees: rows of two texts, one tokenizer; see `preparing`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from manyheads.data.lines import stored_lines
from manyheads.data.preparing import Source
from manyheads.data.store import IntArray
from manyheads.files.verify import file_sha256
from manyheads.text.growing import Growth
from manyheads.text.learning import Rereadable, thinned
from manyheads.text.settings import GrowthSettings, TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

ENCODE_ROWS = 4096  # rows per call of the tokenizer
REPORT_ROWS = 10_000  # rows per call of `progress`
PART_ROWS = 2**16  # rows of a part that is kept until the folder is complete


def text_path(folder: Path, split: str, side: str) -> Path:
    """Return the file with the raw text of a split, one sentence per line."""
    return folder / f"{split}.{side}.txt"


class SidesSource(Source):
    """Rows of two texts, copied into a file for each; those of valid and test stay.

    Args:
        splits: the input of each split.
        tokenizer: settings of the tokenizer to learn, an existing tokenizer, or one that learns more pieces.

    Attributes:
        sides: names of the two files.
        unit: the entry of the counts that says how many rows there are.
        counts: of each split, which `read` fills in.
    """

    sides: ClassVar[tuple[str, str]]
    unit: ClassVar[str]

    def __init__(self, splits: Mapping[str, Any], tokenizer: TokenizerSettings | Tokenizer | Growth) -> None:
        if isinstance(tokenizer, Growth):
            self.settings: TokenizerSettings | GrowthSettings | None = tokenizer.settings
        else:
            self.settings = tokenizer if isinstance(tokenizer, TokenizerSettings) else None
        self.splits, self.tokenizer = splits, tokenizer
        self.counts: dict[str, dict[str, int]] = {}

    def paths(self, split: str) -> list[Path]:
        """Return the files of a split."""
        return [text_path(self.folder, split, side) for side in self.sides]

    def learn(self) -> Tokenizer:
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer
        chosen = self.tokenizer
        made: list[Tokenizer] = []

        def make() -> bytes:
            made[:] = [
                chosen.learn(self.texts(), self.progress) if isinstance(chosen, Growth) else self.learned(chosen)
            ]
            return made[0].to_json().encode()

        if self.counts["train"][self.unit] < PART_ROWS:
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
        return Tokenizer.train(self.texts(), settings, told=self.progress)

    def encoded(
        self,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        told: Callable[[int], None],
        counts: dict[str, int],
        side: str = "",
    ) -> list[IntArray]:
        """Return the ids of each text, and count them, the longest and the unknown. Whole blocks are kept as parts.

        Args:
            texts: PART_ROWS of them, or fewer at the end.
            tokenizer: that of the side.
            told: called with the number of texts that are done.
            counts: `tokens`, `longest` and `unknown`, after the side.
            side: as in the names of the counts.
        """
        item = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"

        def make() -> bytes:
            ids, lengths = array("q"), []
            for start in range(0, len(texts), ENCODE_ROWS):
                for one in tokenizer.encode_batch(texts[start : start + ENCODE_ROWS]):
                    ids.extend(one)
                    lengths.append(len(one))
                told(len(lengths))
            return np.array(lengths, "<i4").tobytes() + np.frombuffer(ids, np.int64).astype(item).tobytes()

        is_whole = len(texts) == PART_ROWS
        content = self.parts.kept([tokenizer.digest, side, *texts], make) if is_whole else make()
        lengths = np.frombuffer(content, "<i4", len(texts))
        ids = np.frombuffer(content, item, offset=lengths.nbytes)
        told(len(texts))
        counts[f"{side}tokens"] += len(ids)
        counts[f"{side}longest"] = max(counts[f"{side}longest"], int(lengths.max(initial=0)))
        counts[f"{side}unknown"] += int((ids == tokenizer.unk_id).sum())
        return np.split(ids, np.cumsum(lengths)[:-1])

    def finish(self) -> list[str]:
        for path in self.paths("train"):
            path.unlink()
        return [path.name for split in self.counts if split != "train" for path in self.paths(split)]
