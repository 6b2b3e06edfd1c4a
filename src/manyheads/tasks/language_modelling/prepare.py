"""Preparation for language models: of text, of ids in binary files, or of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.config.build import build
from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_ids, prepare_text
from manyheads.data.language.texts import IdSource, Pictures, RawFiles, TextFiles, find_layout
from manyheads.data.preparing import Holdout
from manyheads.errors import ConfigError
from manyheads.tasks.preparation import check_holdout, chosen_vocabulary, count_lines, summary_of, vocabulary_lines
from manyheads.text.of_folder import load_vocabulary
from manyheads.text.settings import IdSettings, VocabularySettings
from manyheads.text.word_vocabulary import SymbolVocabulary

if TYPE_CHECKING:
    from manyheads.tasks.language_modelling.options import PrepareOptions


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `catalogue.Task`.

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
    """See `catalogue.Task`."""
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
