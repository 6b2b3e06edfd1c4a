"""The options of `prepare --task lm` for what is no text: ids in binary files, and pictures."""

from __future__ import annotations

from typing import Any

from manyheads.cli.commands.prepare_text import TextOptions, check_splits
from manyheads.errors import ConfigError

__all__ = ["concerns_ids", "id_work"]

_FROM_FILES = ("level", "min_count")


def concerns_ids(options: TextOptions) -> bool:
    """Whether what is prepared is no text."""
    return options.format is not None or options.layout == "images"


def id_work(options: TextOptions, vocab_size: int | None, *, of_text: bool) -> dict[str, Any]:
    """The arguments of `prepare_ids`, without folder and progress.

    Args: of_text: whether options were given that have a meaning for texts only.

    Raises: ConfigError: options contradict each other, or no file is named.
    """
    from manyheads.config.build import build
    from manyheads.data.preparing import Holdout
    from manyheads.data.raw_files import IdSource, Pictures, RawFiles
    from manyheads.text.settings import IdSettings

    images = options.layout == "images"
    how = "--layout images" if images else f"--format {options.format}"
    if options.layout is not None and not images:
        raise ConfigError(f"{how} names ids that are no text, but --layout {options.layout} a text; give one of them.")
    for name in _FROM_FILES:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is of a text; leave it out with {how}.")
    if of_text:
        raise ConfigError(f"--tokenizer, --lowercase and --on-bad-utf8 are of a text; leave them out with {how}.")
    if options.documents == "lines":
        raise ConfigError(f"--documents lines is of a text; with {how} give files, or --document-len.")
    if images:
        _check_images(options, vocab_size)
    elif options.image_size is not None or options.resize:
        raise ConfigError("--image-size and --resize are of pictures; give --layout images with them.")
    if not options.corpus:
        raise ConfigError("There is nothing to train on: give --corpus.")
    check_splits(options)
    asked = {
        "form": options.format,
        "vocab_size": vocab_size,
        "documents": options.documents if not images else None,
        "document_len": options.document_len,
        "image_size": options.image_size,
    }
    settings = build(IdSettings, {name: value for name, value in asked.items() if value is not None}, "the options")
    named = {"train": options.corpus, "valid": options.valid_corpus, "test": options.test_corpus}
    if [path for paths in named.values() for path in paths].count("-") > 1:
        raise ConfigError("Standard input can be read once, but several files are -.")
    sources: dict[str, IdSource] = {}
    for split, paths in named.items():
        if paths and images:
            sources[split] = Pictures(paths=paths, size=settings.image_size, resize=options.resize)
        elif paths:
            sources[split] = RawFiles(paths=paths, form=settings.form)
    holdout = Holdout(valid=options.valid_bytes or 0, test=options.test_bytes or 0)
    return {**sources, "settings": settings, "holdout": holdout}


def _check_images(options: TextOptions, vocab_size: int | None) -> None:
    if options.image_size is None:
        raise ConfigError("--layout images needs --image-size, the pixels a side of the pictures, such as 64.")
    given = {
        "--format": options.format,
        "--document-len": options.document_len,
        "--vocab-size": vocab_size,
        "--documents": options.documents,
    }
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise ConfigError(f"{name} is decided by --layout images (bytes, 256 of them, a picture a document); drop it.")
