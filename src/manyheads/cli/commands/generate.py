"""`manyheads generate MODEL [PROMPT]`: a language model continues a text, and the output appears as it is generated.

A model that writes ids, not text, continues them in files of ids, or pictures.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.cli.command_line.parsing import command, program
from manyheads.cli.lines.output import (
    Command,
    LineWriter,
    OutputCheck,
    check_files,
    converse,
    greet,
    is_conversation,
    whole_number,
    write_lines,
)
from manyheads.cli.process import echo, set_up_machine
from manyheads.config.options import CommandPage, Shared, argument, group, option, refuse_given
from manyheads.data.lines import LinesOf, OnBadUtf8, ReadReport, read_blocks
from manyheads.decoding.inputs_and_results import tell_bad_lines
from manyheads.decoding.options import EnsembleOptions, GenerationOptions, SearchDeviceOptions
from manyheads.distributed.process import refuse_ranks
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import ConfigError, DataError
from manyheads.files.commit import write_output
from manyheads.files.safe_open import read_stream
from manyheads.files.verify import json_text
from manyheads.installation import needing_extra

if TYPE_CHECKING:
    from manyheads.decoding.generation import Continuation
    from manyheads.decoding.generator import Generator
    from manyheads.tasks.report import LineWork
    from manyheads.text.vocabulary import IdVocabulary


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `manyheads generate`."""

    model: str = Shared.model()
    prompt: str | None = argument(
        "The text to continue; an empty one begins a new text.", default=None, metavar="PROMPT"
    )
    input: str = option(
        "File of prompts if PROMPT is not given: text, plain or gzip; - is standard input.",
        default="-",
        metavar="FILE",
    )
    output: str = Shared.output("the texts")
    lines: bool = option("Every line of the input is a separate prompt.", default=False)
    echo: bool = option("Print the prompt before its continuation.", default=False)
    json: bool = Shared.json(
        "Write one JSON object per prompt. For each continuation it has the text, tokens, "
        "log-probabilities, and how it ended."
    )
    on_bad_utf8: OnBadUtf8 = Shared.on_bad_utf8("an empty line takes its place")
    verbose: bool = option("Print settings and speed on standard error.", default=False, aliases=("-v",))
    models: EnsembleOptions = group(EnsembleOptions)
    run_on: SearchDeviceOptions = group(SearchDeviceOptions)
    generation: GenerationOptions = group(GenerationOptions)

    def __post_init__(self) -> None:
        if self.prompt is not None and (self.lines or self.input != "-"):
            raise ConfigError("PROMPT is given, and --lines or --input names other prompts; give one of them.")

    def check_for_ids(self) -> None:
        """Raises: ConfigError: an option was given that applies to text only, or no output file was given."""
        if self.prompt:
            raise ConfigError("This model writes ids, not text; give the ids to continue by --input FILE.")
        given = {"--lines": self.lines, "--stop": self.generation.stop}
        refuse_given(given, "{} is for text, but this model writes ids; leave it out.")
        if self.output == "-":
            raise ConfigError("This model writes ids, which cannot be printed; give --output FILE.")


PAGE = CommandPage(
    GenerateOptions,
    """Continue a text. The continuation is printed while it is generated; --echo prints the prompt first. Without
PROMPT, all of standard input is one prompt; in a terminal you are asked for prompts until Ctrl-D.
With --lines every line of the input is a prompt and gives a line, in order, or with --json an object.
--ensemble averages several models for each token; it takes all names that follow, so PROMPT stands before it.
A model of ids or pictures continues the ids in --input FILE, or begins a new document, and writes a file, --output: ids
in the format of its training files, or a PNG picture.""",
    (
        'manyheads generate runs/xl-demo "He opened the door and "',
        'manyheads generate runs/xl-demo "It was " --temperature 0.7 --top-p 0.9 --stop "." --max-new-tokens 400',
        "manyheads generate runs/xl-demo --lines --input prompts.txt --json --output texts.jsonl",
        'manyheads generate runs/xl-demo "It was " --ensemble runs/lm-demo',
        "manyheads generate runs/pictures --output picture.png",
    ),
)


@command(PAGE, "generate")
def run(options: GenerateOptions) -> int:
    """Generate. Returns: the exit code."""
    set_up_machine()
    check_files(options.output, options.input)
    if not options.lines:
        refuse_ranks("generate without --lines")
    options.generation.overrides()  # contradictions show before the model is loaded
    if options.prompt is None and is_conversation(options.input):
        greet(options.model)
    options.run_on.announce()
    from manyheads.decoding.generator import Generator
    from manyheads.text.vocabulary import IdVocabulary

    generator = options.run_on.load(Generator.from_pretrained, options.models.all(options.model))
    if isinstance(generator.vocabulary, IdVocabulary):
        write_ids(generator, generator.vocabulary, options)
        return 0
    lines = ContinuationLines(generator, options)
    if options.lines:
        write_lines(lines.job(), options.output)
        lines.check.report()
    elif options.prompt is None and is_conversation(options.input):
        lines.converse()
    else:
        lines.answer_prompt(options.prompt)
    return 0


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


_MOST_PROMPT_CHARS = 100_000_000


class ContinuationLines:
    """Converts the output of a language model to lines.

    Attributes:
        check: counts texts that are empty or repeat themselves.
    """

    def __init__(self, generator: Generator, options: GenerateOptions) -> None:
        self._generator = generator
        self._overrides = options.generation.overrides()
        self._settings = generator.options(**self._overrides)
        self.check = OutputCheck(
            "texts",
            learn_more=f"train it longer or on more data; {program()} info {options.model} shows how it was trained.",
            forbid="Draw instead of --greedy, or give --repetition-penalty 1.2 or --no-repeat-ngram-size 4.",
        )
        self._options = options
        if options.verbose:
            models = " + ".join((options.model, *options.models.ensemble))
            about = f"{models} on {generator.device}, {generator.precision}: {self._settings}"
            echo(about, file=sys.stderr)

    def job(self) -> LineWork[str]:
        """The continuation of every line of the input."""
        options = self._options

        def work(first: int, prompts: list[str]) -> Iterator[str]:
            found = self._generator.continuations(prompts, first=first, **self._overrides)
            for number, (prompt, one) in enumerate(zip(prompts, found, strict=True), first):
                yield from self.lines(number, prompt, one)

        identity = {
            "command": "generate",
            "model": model_identity(options.model),
            **options.models.identity(),
            "settings": asdict(self._settings),
            "form": (options.json, options.echo, options.on_bad_utf8),
            "precision": self._generator.precision,
            "compiled": options.run_on.compile,
        }
        from manyheads.tasks.report import LineWork

        return LineWork(LinesOf(options.input, self._settings.max_rows, options.on_bad_utf8), work, identity, {})

    def converse(self) -> None:
        """Continue every text that the user types."""
        with LineWriter(self._options.output) as writer:
            commands = {
                "tokens": Command("N", "write at most N tokens", self._set_tokens),
                "seed": Command("N", "draw other texts", lambda text: self._set("seed", whole_number("seed", text))),
            }
            converse("a beginning", lambda number, prompt: self._write(writer, number, prompt), commands=commands)

    def _set_tokens(self, text: str) -> str:
        return self._set("max_new_tokens", whole_number("tokens", text))

    def _set(self, name: str, value: int) -> str:
        """Change an option for the following prompts. Raises: ConfigError: it is out of range."""
        overrides = {**self._overrides, name: value}
        self._settings = self._generator.options(**overrides)
        self._overrides = overrides
        return f"{name} is {value}"

    def answer_prompt(self, prompt: str | None) -> None:
        """Continue one text. prompt: None: it is the whole input."""
        with LineWriter(self._options.output) as writer:
            if prompt is None:
                report = ReadReport()
                prompt = _whole(self._options.input, self._options.on_bad_utf8, report)
                tell_bad_lines(report)
            self._write(writer, 0, prompt)

    def _write(self, writer: LineWriter, number: int, prompt: str) -> None:
        """Write the continuations of one prompt; a single one appears piece by piece. number: from 0, of the prompt."""
        started, options = time.perf_counter(), self._options
        if options.json or options.generation.num_return_sequences > 1:
            [found] = self._generator.continuations([prompt], first=number, **self._overrides)
            writer.write(self.lines(number, prompt, found))
        else:
            pieces, written = tee(self._generator.stream(prompt, number=number, **self._overrides))
            writer.write_pieces(chain([prompt] if options.echo else [], pieces))
            self._see(number, prompt, "".join(written))
        if options.verbose:
            echo(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
        self.check.report()

    def lines(self, number: int, prompt: str, found: list[Continuation]) -> list[str]:
        """The output lines of one prompt. number: from 0, of the prompt."""
        for one in found:
            self._see(number, prompt, one.text)
        options = self._options
        if options.json:
            continuations = [
                {
                    "text": one.text,
                    "ended_by": one.ended_by,
                    "log_prob": sum(one.log_probs),
                    "tokens": self._generator.vocabulary.tokens(one.ids),
                    "token_log_probs": one.log_probs,
                }
                for one in found
            ]
            record = {"line": number + 1, "prompt": prompt, "continuations": continuations}
            return [json_text(record)]
        texts = [(prompt if options.echo else "") + one.text for one in found]
        if options.lines:
            return [text.replace("\n", " ") for text in texts]
        return ["\n---\n".join(texts)]

    def _see(self, number: int, prompt: str, text: str) -> None:
        self.check.see_text(number + 1, prompt, text, may_be_empty=bool(self._options.generation.stop))


def _whole(name: str, on_bad_utf8: OnBadUtf8, report: ReadReport) -> str:
    """All of a file as one prompt, without the line break at its end. For the other arguments see `read_blocks`."""
    lines: list[str] = []
    size = 0
    for block in read_blocks(name, 1024, on_bad_utf8=on_bad_utf8, report=report):
        lines += block
        size += sum(map(len, block))
        if size > _MOST_PROMPT_CHARS:
            raise DataError(f"{name} is longer than {_MOST_PROMPT_CHARS:,} characters, too long for one prompt.")
    return "\n".join(lines)


def write_ids(generator: Generator, vocabulary: IdVocabulary, options: GenerateOptions) -> None:
    """Write the continuation of ids or pictures to a file, and print a line or a JSON object about each.

    Raises: ConfigError: see `GenerateOptions.check_for_ids` and `check_files`. Others: see `write_continuations`.
    """
    options.check_for_ids()
    output, overrides = Path(options.output), options.generation.overrides()
    for path in output_files(output, options.generation.num_return_sequences):
        check_files(str(path), options.input)
    for record in write_continuations(
        generator, vocabulary, options.input, output, echo=options.echo, overrides=overrides
    ):
        if options.json:
            print(json_text(record))
        else:
            echo(f"{record['file']}  {record['ids']:,} ids", file=sys.stderr)
