"""`manyheads generate` of a model that writes no text: a binary file of ids, or a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import ConfigError, DataError, MissingExtraError
from manyheads.files.commit import write_file

if TYPE_CHECKING:
    from manyheads.cli.command_line.generate_options import GenerateOptions
    from manyheads.decoding.generator import Generator
    from manyheads.text.id_vocabulary import IdVocabulary

__all__ = ["generate_ids"]

_MOST_BYTES = 100_000_000


def generate_ids(
    generator: Generator, vocabulary: IdVocabulary, overrides: dict[str, Any], options: GenerateOptions
) -> int:
    """Write what goes on from the ids of --input to --output: a PNG picture by its name, else bytes.

    Several continuations go to several files, `name-1.png`, `name-2.png`.

    Returns: the exit code.
    Raises: ConfigError: options that have a meaning for text only, or no output file. DataError: the input is no file
        of ids. MissingExtraError: a picture without Pillow. SaveError: a file cannot be written.
    """
    _check(vocabulary, options)
    prompt: list[int] = []
    if options.input != "-":
        prompt = vocabulary.read_ids(_content(options.input), options.input)
    if vocabulary.document_len:  # a document ends where it ends
        overrides = {"max_new_tokens": vocabulary.document_len, **overrides}
    [found] = generator.continue_ids([prompt], **overrides)
    output = Path(options.output)
    for number, one in enumerate(found):
        ids = [*(prompt if options.echo or vocabulary.image_size else []), *one.ids]
        path = output if len(found) == 1 else output.with_stem(f"{output.stem}-{number + 1}")
        write_file(path, _png(vocabulary, ids) if path.suffix == ".png" else vocabulary.decode_bytes(ids))
        record = {"file": str(path), "ids": len(one.ids), "ended_by": one.ended_by, "log_prob": sum(one.log_probs)}
        if options.json:
            print(json.dumps(record))
        else:
            print(f"{path}  {len(one.ids):,} ids", file=sys.stderr)
    return 0


def _check(vocabulary: IdVocabulary, options: GenerateOptions) -> None:
    if options.prompt:
        raise ConfigError("This model writes ids, not text; give the ids to continue by --input FILE.")
    for name, value in {"--lines": options.lines, "--stop": options.generation.stop}.items():
        if value:
            raise ConfigError(f"{name} is for text, but this model writes ids; leave it out.")
    if options.output == "-":
        raise ConfigError("This model writes ids, which cannot be printed; give --output FILE.")
    if options.output.endswith(".png") and not vocabulary.image_size:
        raise ConfigError(
            f"--output {options.output} names a picture, but this model was not trained on pictures; give another name."
        )


def _content(name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:  # a pipe is fine here: the user named it
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {name}: {getattr(error, 'strerror', None) or error}.") from None
    if len(content) > _MOST_BYTES:
        raise DataError(f"{name} is longer than {_MOST_BYTES:,} bytes, too long to go on from.")
    return content


def _png(vocabulary: IdVocabulary, ids: list[int]) -> bytes:
    import io

    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            "Writing pictures needs Pillow: pip install 'manyheads[images]'; or give --output another name than .png,"
            " which takes the bytes."
        ) from error
    buffer = io.BytesIO()
    Image.fromarray(vocabulary.picture(ids)).save(buffer, "PNG")
    return buffer.getvalue()
