"""The options of `prepare --task lm`, the files that they name, and what is said of the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyheads.config.options import given_options, option
from manyheads.data.lines import OnBadUtf8
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.data.layouts import FoundLayout
    from manyheads.text.settings import VocabularySettings
    from manyheads.text.vocabulary import Vocabulary

__all__ = ["TextOptions", "check_splits", "text_summary", "text_work"]


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """With --task lm."""

    corpus: tuple[str, ...] = option(
        "Training text, plain or gzip, in this order; - is standard input. With --layout the corpus's folder or file.",
        default=(),
        metavar="FILE [FILE ...]",
    )
    valid_corpus: tuple[str, ...] = option("Validation text.", default=(), metavar="FILE [FILE ...]")
    test_corpus: tuple[str, ...] = option("Test text.", default=(), metavar="FILE [FILE ...]")
    layout: Literal["wikitext-2", "wikitext-103", "enwik8", "text8", "lm1b", "images"] | None = option(
        "The files, units and splits of a corpus that models are compared on; or images: folders of PNG pictures.",
        default=None,
    )
    format: Literal["bytes", "u16"] | None = option(
        "The files hold no text, but ids: uint8, or uint16 with the low byte first. See --vocab-size.",
        default=None,
        default_is="text",
    )
    document_len: int | None = option("With --format: every N ids are a document.", default=None, metavar="N")
    image_size: int | None = option(
        "With --layout images: pixels a side of the pictures; each is a document of 3 x N x N bytes.",
        default=None,
        metavar="N",
    )
    resize: bool = option(
        "With --layout images: cut and scale pictures of other sizes instead of refusing them.", default=False
    )
    level: Literal["bytes", "bpe", "words"] | None = option(
        "What is learned: bytes as they are, pieces of words, or words and line breaks.",
        default=None,
        default_is="bytes, or the layout's",
    )
    documents: Literal["none", "files", "lines"] | None = option(
        "What a document is; its end is learned too, and a model can forget there.",
        default=None,
        default_is="none, or the layout's",
    )
    valid_bytes: int | None = option(
        "Without --valid-corpus: hold back so many bytes of the training text's end; 0 goes without validation.",
        default=None,
        metavar="N",
    )
    test_bytes: int | None = option(
        "The same for testing; what is held back for testing comes last.", default=None, metavar="N"
    )
    min_count: int | None = option(
        "With words: those that stand in the training text fewer times are <unk>.",
        default=None,
        metavar="N",
        default_is="1, or the layout's",
    )

    def refuse(self) -> None:
        """Raises: ConfigError: one of these is given, where pairs are prepared."""
        for name in given_options(self):
            raise ConfigError(f"{name} needs --task lm.")


def text_work(
    options: TextOptions,
    *,
    on_bad_utf8: OnBadUtf8,
    tokenizer: str | None,
    vocab_size: int | None,
    lowercase: bool,
) -> dict[str, Any]:
    """The arguments of `prepare_text`, without folder and progress.

    Raises:
        ConfigError: options contradict each other, or there is no text.
        DataError: a layout's files are missing, or the vocabulary named cannot be read.
    """
    from manyheads.data.preparing import Holdout
    from manyheads.data.texts import TextFiles

    if options.document_len is not None or options.image_size is not None or options.resize:
        name = next(n for n in ("document_len", "image_size", "resize") if getattr(options, n) not in (None, False))
        wanted = "--format bytes or u16" if name == "document_len" else "--layout images"
        raise ConfigError(f"--{name.replace('_', '-')} has no meaning with a text; give {wanted} with it.")
    found = _layout(options)
    paths: dict[str, list[str]] = {
        "train": list(options.corpus), "valid": list(options.valid_corpus), "test": list(options.test_corpus)
    }  # fmt: skip
    holdout = Holdout(valid=options.valid_bytes or 0, test=options.test_bytes or 0)
    tokens: dict[str, int] = {}
    if found is not None:
        paths = {split: [str(path) for path in known] for split, known in found.paths.items()}
        holdout = found.layout.holdout or holdout
    if not paths["train"]:
        raise ConfigError("There is no training text: give --corpus.")
    if [path for known in paths.values() for path in known].count("-") > 1:
        raise ConfigError("Standard input can be read once, but several texts are -.")
    if found is None:
        check_splits(options)
    vocabulary = _vocabulary(options, found, tokenizer, vocab_size, lowercase)
    level = getattr(vocabulary, "level", None) or getattr(vocabulary, "kind", None)
    if found is not None and level == found.layout.vocabulary["level"]:
        tokens = dict(found.layout.tokens)
    if on_bad_utf8 != "fail" and level == "bytes":
        raise ConfigError(f"--on-bad-utf8 {on_bad_utf8} has no meaning with bytes, which are read as they are.")
    texts = {split: TextFiles(paths=known, on_bad_utf8=on_bad_utf8) for split, known in paths.items() if known}
    return {**texts, "vocabulary": vocabulary, "holdout": holdout, "published_tokens": tokens}


def _layout(options: TextOptions) -> FoundLayout | None:
    if options.layout is None or options.layout == "images":
        return None
    from manyheads.data.layouts import find_layout

    given = ("valid_corpus", "test_corpus", "valid_bytes", "test_bytes")
    named = next((name for name in given if getattr(options, name) not in (None, ())), None)
    if named is not None:
        raise ConfigError(
            f"--layout {options.layout} says which text is for validation and testing; leave out"
            f" --{named.replace('_', '-')}, or name all files yourself, without --layout."
        )
    if len(options.corpus) != 1:
        raise ConfigError(
            f"--layout {options.layout} needs one --corpus, its folder or file; {len(options.corpus)} are given."
        )
    return find_layout(options.layout, options.corpus[0])


def check_splits(options: TextOptions) -> None:
    """Raises: ConfigError: there is no validation part, or a part is given twice."""
    for split in ("valid", "test"):
        if getattr(options, f"{split}_corpus") and getattr(options, f"{split}_bytes") is not None:
            raise ConfigError(
                f"--{split}-bytes takes text from --corpus; leave it out where --{split}-corpus is given."
            )
    if not options.valid_corpus and options.valid_bytes is None:
        raise ConfigError(
            "There is no validation text, which tells when a model is good: give --valid-corpus, or --valid-bytes"
            " 200000 to hold back the last 200,000 bytes of --corpus, or --valid-bytes 0 to go without."
        )


def _vocabulary(
    options: TextOptions, found: FoundLayout | None, tokenizer: str | None, vocab_size: int | None, lowercase: bool
) -> VocabularySettings | Vocabulary:
    from manyheads.config.build import build
    from manyheads.text.settings import VocabularySettings
    from manyheads.text.vocabularies import load_vocabulary

    asked = {
        "level": options.level,
        "documents": options.documents,
        "min_count": options.min_count,
        "vocab_size": vocab_size,
        "lowercase": lowercase or None,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if tokenizer is None:
        defaults = dict(found.layout.vocabulary) if found is not None else {}
        if options.level not in (None, defaults.get("level")):  # what the layout says of words is of no use for others
            defaults = {name: value for name, value in defaults.items() if name == "documents"}
        return build(VocabularySettings, {**defaults, **given}, "the vocabulary's options")
    if given:
        raise ConfigError(
            f"--tokenizer {tokenizer} is used as it is; leave out"
            f" {', '.join('--' + name.replace('_', '-') for name in given)}."
        )
    path = Path(tokenizer)
    inside = (path / "tokenizer.json", path / "model" / "tokenizer.json")
    return load_vocabulary(next((file for file in inside if file.is_file()), path))


def text_summary(output: Path, manifest: dict[str, Any]) -> str:
    """All counts, and the next command to type."""
    from manyheads.data.prepared_text import TextData

    data = TextData.open(output, verify=False)
    vocabulary = data.vocabulary
    lines = [
        f"prepared    {output}",
        f"digest      {data.digest}",
        f"vocabulary  {vocabulary.kind}, {vocabulary.vocab_size:,} ids, {vocabulary.digest[:12]}",
    ]
    for split, counts in manifest["counts"].items():
        lines += ["", f"{split}: {counts['tokens']:,} tokens from {manifest['origin'][split]}"]
        lines += [f"  {counts[name]:>13,} {what}" for name, what in _COUNTED.items() if counts.get(name)]
        published = manifest["published_tokens"].get(split, counts["tokens"])
        if published != counts["tokens"]:
            lines.append(f"  {published:>13,} tokens are published: is this the whole corpus, unchanged?")
    preset = "xl-demo" if vocabulary.is_text else "reformer-demo"
    return "\n".join(
        [*lines, "", f"next: manyheads train --preset {preset} --data.path {output} --run-dir runs/{output.name}"]
    )


_COUNTED = {
    "bytes": "bytes",
    "characters": "characters",
    "words": "words",
    "lines": "lines",
    "documents": "documents",
    "unknown": "of the words are <unk>",
    "empty_dropped": "empty lines left out",
    "bad_utf8_replaced": "lines that were not UTF-8, bad bytes replaced",
    "bad_utf8_skipped": "lines left out, because they are not UTF-8",
    "control_characters": "lines with control characters inside (NUL, carriage return, ...), kept",
    "long_lines": "lines above 10,000 characters, of which pieces are learned in parts",
}
