"""`manyheads prepare` for language models: of text, of ids in binary files, or of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from manyheads.config.build import build
from manyheads.config.options import CommandPage, given_options, group, option, refuse_given
from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_ids, prepare_text
from manyheads.data.language.texts import IdSource, Pictures, RawFiles, TextFiles, find_layout
from manyheads.data.preparing import Holdout
from manyheads.errors import ConfigError
from manyheads.tasks import preparation as common
from manyheads.tasks.preparation import check_holdout, chosen_vocabulary, count_lines, summary_of, vocabulary_lines
from manyheads.text.settings import IdSettings, VocabularySettings
from manyheads.text.vocabularies import load_vocabulary
from manyheads.text.word_vocabulary import SymbolVocabulary


@dataclass(frozen=True, kw_only=True)
class TextVocabularyOptions(common.VocabularyOptions):
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
class PrepareOptions(common.PrepareOptions):
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


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.report.Task`.

    Raises:
        ConfigError: validation data is missing, or the vocabulary's settings are wrong.
        DataError: a layout's files are missing, or the vocabulary that is named cannot be read.
    """
    if options.layout in (None, "images"):
        check_holdout(options, ["--valid-corpus"], "--valid-bytes", "200000")
        check_holdout(options, ["--test-corpus"], "--test-bytes")
    files = {"train": options.corpus, "valid": options.valid_corpus, "test": options.test_corpus}
    named = {split: paths for split, paths in files.items() if paths}
    holdout = Holdout(valid=options.valid_bytes or 0, test=options.test_bytes or 0)
    return (_of_ids if options.is_of_ids else _of_text)(options, named, holdout)


def _of_text(
    options: PrepareOptions, files: Mapping[str, Sequence[str | Path]], holdout: Holdout
) -> Callable[..., dict[str, Any]]:
    tokens, defaults, asked = {}, {}, options.vocabulary
    if options.layout is not None:
        found = find_layout(options.layout, options.corpus[0])
        files, holdout, defaults = found.paths, found.layout.holdout or holdout, dict(found.layout.vocabulary)
        if asked.level in (None, defaults["level"]) and asked.tokenizer is None:
            tokens = dict(found.layout.tokens)
        if asked.level not in (None, defaults["level"]):  # the other defaults are for the layout's own level
            defaults = {name: value for name, value in defaults.items() if name == "documents"}
    vocabulary = chosen_vocabulary(asked, VocabularySettings, load_vocabulary, defaults)
    if isinstance(vocabulary, SymbolVocabulary) and vocabulary.lines == "dropped":
        raise ConfigError(
            "the vocabulary of --tokenizer has no line breaks, so no lines can be prepared with it; give the text to"
            " evaluate by --text."
        )
    level = vocabulary.level if isinstance(vocabulary, VocabularySettings) else vocabulary.kind
    if options.on_bad_utf8 != "fail" and level == "bytes":
        raise ConfigError(f"--on-bad-utf8 {options.on_bad_utf8} has no meaning with bytes, which are read as they are.")
    arguments: dict[str, Any] = {
        split: TextFiles(paths=paths, on_bad_utf8=options.on_bad_utf8) for split, paths in files.items()
    }
    return partial(prepare_text, **arguments, vocabulary=vocabulary, holdout=holdout, published_tokens=tokens)


def _of_ids(
    options: PrepareOptions, files: Mapping[str, Sequence[str | Path]], holdout: Holdout
) -> Callable[..., dict[str, Any]]:
    asked = {
        "form": options.format,
        "vocab_size": options.vocabulary.vocab_size,
        "documents": options.vocabulary.documents,
        "document_len": options.document_len,
        "image_size": options.image_size,
    }
    settings = build(IdSettings, {name: value for name, value in asked.items() if value is not None}, "the options")

    def source(paths: Sequence[str | Path]) -> IdSource:
        if options.layout == "images":
            return Pictures(paths=paths, size=settings.image_size, resize=options.resize)
        return RawFiles(paths=paths, form=settings.form)

    arguments: dict[str, Any] = {split: source(paths) for split, paths in files.items()}
    return partial(prepare_ids, **arguments, settings=settings, holdout=holdout)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.report.Task`."""
    data = TextData.open(folder, verify=False)
    vocabulary = data.vocabulary
    lines = vocabulary_lines(manifest) if vocabulary.kind == "bpe" else []
    for split, counts in manifest["counts"].items():
        lines += ["", f"{split}: {counts['tokens']:,} tokens from {manifest['origin'][split]}", *count_lines(counts)]
        published = manifest["published_tokens"].get(split, counts["tokens"])
        if published != counts["tokens"]:
            lines.append(f"  {published:>13,} tokens are published: is this the whole corpus, unchanged?")
    about = f"{vocabulary.kind}, {vocabulary.vocab_size:,} ids, {vocabulary.digest[:12]}"
    return summary_of(data, lines, "" if vocabulary.is_text else "reformer-demo", about)
