"""Options of `manyheads prepare` for language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyheads.config.options import CommandPage, given_options, group, option, refuse_given
from manyheads.errors import ConfigError
from manyheads.tasks import preparation


@dataclass(frozen=True, kw_only=True)
class TextVocabularyOptions(preparation.VocabularyOptions):
    """Vocabulary and documents."""

    level: Literal["bytes", "bpe", "words"] | None = option(
        "Units of the vocabulary: bytes, subwords (bpe), or words and line breaks.",
        default_is="bytes, or the layout's",
    )
    min_count: int | None = option(
        "With words: those that occur fewer times in the training text are <unk>.",
        metavar="N",
        default_is="1, or the layout's",
    )
    documents: Literal["none", "files", "lines"] | None = option(
        "What counts as a document. Its end is a token of its own, and a model can clear its memory there.",
        default_is="none, or the layout's",
    )


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(preparation.PrepareOptions):
    """Options of `manyheads prepare --task lm`."""

    corpus: tuple[str, ...] = option(
        "Training text, plain or gzip, in this order; - is standard input. With --layout the corpus's folder or file.",
        metavar="FILE [FILE ...]",
    )
    valid_corpus: tuple[str, ...] = option("Validation text.", default=(), metavar="FILE [FILE ...]")
    test_corpus: tuple[str, ...] = option("Test text.", default=(), metavar="FILE [FILE ...]")
    valid_bytes: int | None = option(
        "Without --valid-corpus: hold back the last N bytes of the training text for validation; 0: no validation.",
        default=None,
        metavar="N",
    )
    test_bytes: int | None = option("The same for testing; the test text is the very end.", default=None, metavar="N")
    layout: Literal["wikitext-2", "wikitext-103", "ptb", "enwik8", "text8", "lm1b", "images"] | None = option(
        "Name of a published corpus, with its files, units and splits; or images: folders of PNG pictures.",
        default=None,
    )
    format: Literal["bytes", "u16"] | None = option(
        "The files hold ids instead of text: uint8, or uint16 in little-endian order. See --vocab-size.",
        default_is="text",
    )
    document_len: int | None = option("With --format: each document has N ids.", default=None, metavar="N")
    image_size: int | None = option(
        "With --layout images: side of the pictures in pixels; each is a document of 3 x N x N bytes.",
        default=None,
        metavar="N",
    )
    resize: bool = option(
        "With --layout images: cut and scale pictures of other sizes instead of refusing them.", default=False
    )
    vocabulary: TextVocabularyOptions = group(TextVocabularyOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        layout, given = self.layout, given_options(self, self.vocabulary)

        def refuse(names: str, reason: str) -> None:
            refuse_given({name: name in given for name in names.split()}, f"{{}} cannot be used {reason}.")

        if layout == "images":
            refuse("--format --document-len --vocab-size --documents",
                   "with --layout images: pictures are bytes, and each picture is a document")  # fmt: skip
            if self.image_size is None:
                raise ConfigError("--layout images needs --image-size, the side of the pictures in pixels, such as 64.")
        else:
            refuse("--image-size --resize", "without --layout images")
        if self.format is None:
            refuse("--document-len", "without --format")
        else:
            refuse("--layout", f"with --format {self.format}: the files hold ids, not text")
        if self.is_of_ids:
            how = f"--format {self.format}" if self.format else "--layout images"
            refuse("--level --min-count --tokenizer --new-pieces --lowercase --on-bad-utf8",
                   f"with {how}: the files hold ids, not text")  # fmt: skip
        elif layout is not None:
            refuse("--valid-corpus --test-corpus --valid-bytes --test-bytes",
                   f"with --layout {layout}, which says which text is for validation and testing")  # fmt: skip
            if len(self.corpus) != 1:
                raise ConfigError(
                    f"--layout {layout} needs one --corpus, its folder or file; {len(self.corpus)} are given."
                )

    @property
    def is_of_ids(self) -> bool:
        """Whether the files hold ids or pictures, not text."""
        return self.format is not None or self.layout == "images"


PREPARE = CommandPage(
    PrepareOptions,
    """Convert text to a folder of tokens for training a language model: bytes, subwords, or words. The input can also
be ids in binary files (--format) or pictures (--layout images).""",
    (
        "manyheads prepare --task lm --corpus novel.txt --valid-bytes 50000 --output data/novel",
        "manyheads prepare --task lm --layout wikitext-2 --corpus wikitext-2 --output data/wikitext-2",
        "manyheads prepare --task lm --format u16 --corpus events.bin --valid-bytes 20000 --output data/events",
        "manyheads prepare --task lm --layout images --image-size 64 --corpus pngs --valid-bytes 1228800 -o data/png",
    ),
)
