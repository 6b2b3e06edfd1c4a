"""The common part of preparing pairs, labelled texts and trees: rows of two texts, one tokenizer; see `preparing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from manyheads.data.preparing import Source
from manyheads.text.growing import Growth
from manyheads.text.learning import Thinned
from manyheads.text.settings import GrowthSettings, TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

__all__ = ["ENCODE_ROWS", "REPORT_ROWS", "SidesSource", "text_path"]

ENCODE_ROWS = 4096  # rows per call of the tokenizer
REPORT_ROWS = 10_000  # rows per call of `progress`
MAX_TOKENIZER_ROWS = 2_000_000  # with more rows, every second row is used for training, then every fourth, ...


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
        counts: of each split, which `read` fills in.
        sample: the training texts from which the tokenizer learns, which `read` fills in.
    """

    sides: ClassVar[tuple[str, str]]

    def __init__(self, splits: Mapping[str, Any], tokenizer: TokenizerSettings | Tokenizer | Growth) -> None:
        if isinstance(tokenizer, Growth):
            self.settings: TokenizerSettings | GrowthSettings | None = tokenizer.settings
        else:
            self.settings = tokenizer if isinstance(tokenizer, TokenizerSettings) else None
        self.splits, self.tokenizer = splits, tokenizer
        self.counts: dict[str, dict[str, int]] = {}
        self.sample: Thinned[Any] = Thinned(MAX_TOKENIZER_ROWS)

    def paths(self, split: str) -> list[Path]:
        """Return the files of a split."""
        return [text_path(self.folder, split, side) for side in self.sides]

    def learn(self) -> Tokenizer:
        """See `Source.learn`."""
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer
        self.progress("train the tokenizer", 0, 1)
        chosen = self.tokenizer
        self.tokenizer = chosen.learn(self.texts()) if isinstance(chosen, Growth) else self.learned(chosen)
        self.progress("train the tokenizer", 1, 1)
        return self.tokenizer

    def texts(self) -> Iterable[str]:
        """Return the texts of the sample."""
        return self.sample.kept

    def learned(self, settings: TokenizerSettings) -> Tokenizer:
        """Return a tokenizer that is trained on the sample."""
        return Tokenizer.train(self.texts(), settings)

    def finish(self) -> list[str]:
        """See `Source.finish`."""
        for path in self.paths("train"):
            path.unlink()
        return [path.name for split in self.counts if split != "train" for path in self.paths(split)]
