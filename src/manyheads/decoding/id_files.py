"""Continuations of a model that writes ids, not text: files of ids, or pictures."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyheads.decoding.generator import Generator
from manyheads.errors import ConfigError, DataError, needing_extra
from manyheads.files.commit import write_output
from manyheads.files.safe_open import read_stream
from manyheads.text.vocabulary import IdVocabulary

_MOST_BYTES = 100_000_000
_PNG = b"\x89PNG\r\n\x1a\n"


def output_files(output: Path, count: int) -> list[Path]:
    """Return the files of several continuations, `name-1.png`, `name-2.png`; of a single one, the output itself."""
    if count == 1:
        return [output]
    return [output.with_stem(f"{output.stem}-{number}") for number in range(1, count + 1)]


def write_continuations(
    generator: Generator, vocabulary: IdVocabulary, source: str, output: Path, *, echo: bool, overrides: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Write a continuation of the ids in a file: as a PNG picture if the name of the output ends in .png, otherwise as
    ids.

    Several continuations go to several files; see `output_files`.

    Args:
        source: a file in the format of the training files; `-`: begin a new document.
        echo: write the ids of `source` before their continuation. A picture always has them.
        overrides: fields of `GenerationSettings`.

    Returns: a record of each file after it was written.
    Raises: ConfigError: a picture, of a model that was not trained on pictures. DataError: the source is no file of
        ids. MissingExtraError: a picture without Pillow. SaveError: a file cannot be written.
    """
    if output.suffix.lower() == ".png" and not vocabulary.image_size:
        raise ConfigError(
            f"--output {output} names a picture, but this model was not trained on pictures; give another name."
        )
    prompt = [] if source == "-" else vocabulary.read_ids(_content(source), source)
    if vocabulary.document_len:  # stop at the end of the document
        overrides = {"max_new_tokens": vocabulary.document_len, **overrides}
    [found] = generator.continue_ids([prompt], **overrides)
    for path, one in zip(output_files(output, len(found)), found, strict=True):
        ids = [*(prompt if echo or vocabulary.image_size else []), *one.ids]
        write_output(path, _png(vocabulary, ids) if path.suffix.lower() == ".png" else vocabulary.decode_bytes(ids))
        yield {"file": str(path), "ids": len(one.ids), "ended_by": one.ended_by, "log_prob": sum(one.log_probs)}


def _content(name: str) -> bytes:
    try:
        content = read_stream(Path(name), _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {name}: {getattr(error, 'strerror', None) or error}.") from None
    if len(content) > _MOST_BYTES:
        raise DataError(f"{name} is longer than {_MOST_BYTES:,} bytes, too long to continue.")
    if content.startswith(_PNG):
        raise DataError(
            f"{name} is a PNG file; give the bytes of its pixels, three for each, as far as they are to be kept."
        )
    return content


def _png(vocabulary: IdVocabulary, ids: list[int]) -> bytes:
    with needing_extra(
        "Pictures need Pillow (without it, name a file that does not end in .png to get the bytes)", "images"
    ):
        from PIL import Image
    buffer = io.BytesIO()
    Image.fromarray(vocabulary.picture(ids)).save(buffer, "PNG")
    return buffer.getvalue()
