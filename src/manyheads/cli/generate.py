"""`manyheads generate MODEL [PROMPT]`: a language model goes on from a text, as it is written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from manyheads.cli.decoding_options import SearchDeviceOptions
from manyheads.cli.machine import set_up_machine
from manyheads.cli.output import LineWriter, refuse_same_file
from manyheads.cli.output_checks import OutputCheck, kept
from manyheads.cli.pages import program
from manyheads.cli.parsing import parse
from manyheads.cli.sharding import blocks_of, is_sharded, local_device, model_identity, refuse_ranks, run_sharded
from manyheads.cli.truncation import tell_bad_lines
from manyheads.data.lines import OnBadUtf8, ReadReport, read_blocks, read_lines
from manyheads.errors import ConfigError, DataError, ManyHeadsError

if TYPE_CHECKING:
    from manyheads.decoding.generator import Continuation, Generator

__all__ = ["GenerateOptions", "run"]

_DESCRIPTION = """Go on from a text. The continuation is printed as it is written; --echo prints the prompt first.
Without PROMPT, all of standard input is one; in a terminal you are asked for one after the other, and Ctrl-D ends.
With --lines every line of the input is a prompt and gives a line, in order, or with --json an object.
A model of what is no text goes on from the ids in --input FILE, or from nothing, and writes a file, --output: the ids
as they stood in the files it learned from, or a PNG picture."""

_EXAMPLES = (
    'manyheads generate runs/xl-demo "He opened the door and "',
    'manyheads generate runs/xl-demo "It was " --temperature 0.7 --top-p 0.9 --stop "." --max-new-tokens 400',
    "manyheads generate runs/xl-demo --lines --input prompts.txt --json --output texts.jsonl",
    "manyheads generate runs/pictures --output picture.png",
)
_MODELS = "(default: the model's)"
_NUMBER = arg(metavar="N", help_behavior_hint=_MODELS)
_REAL = arg(metavar="X", help_behavior_hint=_MODELS)
_FLAG = arg(help_behavior_hint="")
_SAME_NAME = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "num_return_sequences",
    "memory_len",
    "max_rows",
    "seed",
)
_MOST_PROMPT_CHARS = 100_000_000


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `manyheads generate`."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model folder, a run folder, or owner/name on the Hugging Face hub."""
    prompt: Annotated[Positional[str | None], arg(metavar="[PROMPT]", help_behavior_hint="")] = None
    """What to go on from; an empty text begins one."""
    input: Annotated[str, arg(metavar="FILE")] = "-"
    """Where prompts come from if none is given: a text file, plain or gzip; - is standard input."""
    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")] = "-"
    """Where texts go; - is standard output."""
    lines: Annotated[bool, _FLAG] = False
    """Every line of the input is a prompt of its own."""
    echo: Annotated[bool, _FLAG] = False
    """Print the prompt before its continuation."""
    json: Annotated[bool, _FLAG] = False
    """One JSON object a prompt, with text, tokens, log-probabilities and how it ended, of each continuation."""
    greedy: Annotated[bool, _FLAG] = False
    """Take the likeliest token each time instead of drawing."""
    max_new_tokens: Annotated[int | None, arg(aliases=["-n"], metavar="N", help_behavior_hint=_MODELS)] = None
    """Most tokens of a continuation."""
    min_new_tokens: Annotated[int | None, _NUMBER] = None
    """A document does not end before so many."""
    temperature: Annotated[float | None, _REAL] = None
    """Below 1 keeps to likely tokens, above 1 gives unlikely ones a chance."""
    top_k: Annotated[int | None, _NUMBER] = None
    """Draw among the N likeliest tokens; 0: all."""
    top_p: Annotated[float | None, _REAL] = None
    """Draw among the likeliest tokens that hold this much probability."""
    min_p: Annotated[float | None, _REAL] = None
    """Draw among tokens that are at least this share as likely as the likeliest."""
    repetition_penalty: Annotated[float | None, _REAL] = None
    """Above 1: tokens of the prompt and the continuation become less likely."""
    no_repeat_ngram_size: Annotated[int | None, _NUMBER] = None
    """No n-gram of this size occurs twice; 0 is off."""
    stop: Annotated[tuple[str, ...], arg(metavar="TEXT ...", help_behavior_hint="")] = ()
    r"""Texts that end a continuation; \n is a line break."""
    num_return_sequences: Annotated[
        int | None, arg(aliases=["--count"], metavar="N", help_behavior_hint="(default: 1)")
    ] = None
    """Continuations of each prompt; a line of three dashes stands between them."""
    memory_len: Annotated[int | None, _NUMBER] = None
    """Positions a layer that stay in view."""
    max_rows: Annotated[int | None, _NUMBER] = None
    """Continuations that are written side by side."""
    seed: Annotated[int | None, _NUMBER] = None
    """The same seed gives the same texts."""
    on_bad_utf8: OnBadUtf8 = "fail"
    """With --lines, a line that is not UTF-8: fail, replace its bad bytes, or skip (an empty line comes out)."""
    verbose: Annotated[bool, arg(aliases=["-v"], help_behavior_hint="")] = False
    """Print the settings and the speed on standard error."""
    run_on: Annotated[SearchDeviceOptions, arg(name="")] = field(default_factory=SearchDeviceOptions)

    def overrides(self) -> dict[str, Any]:
        """The fields of `GenerationSettings` that were given.

        Raises: ConfigError: options contradict each other.
        """
        values = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        if self.greedy:
            given = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in values]
            if given:
                raise ConfigError(f"--greedy draws nothing, so --{given[0].replace('_', '-')} means nothing; drop one.")
            values["do_sample"] = False
        if self.stop:
            values["stop"] = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop)
        values.setdefault("num_return_sequences", 1)  # never what the model's settings suggest
        return values


def run(arguments: Sequence[str]) -> int:
    """Generate. Returns: the exit code."""
    set_up_machine()
    options = parse(GenerateOptions, arguments, command="generate", description=_DESCRIPTION, examples=_EXAMPLES)
    overrides = options.overrides()
    if options.prompt is not None and (options.lines or options.input != "-"):
        raise ConfigError("A prompt is given, and --lines or --input besides, which name others; give one of them.")
    refuse_same_file(options.output, options.input)
    if not options.lines:
        refuse_ranks("generate without --lines")
    from manyheads.decoding.generator import Generator
    from manyheads.text.id_vocabulary import IdVocabulary

    options.run_on.announce()
    generator = Generator.from_pretrained(
        options.model,
        local_device(options.run_on.device),
        options.run_on.fixed_precision(),
        compile_steps=options.run_on.compile,
    )
    settings = generator.options(**overrides)
    if isinstance(generator.vocabulary, IdVocabulary):
        from manyheads.cli.generate_ids import generate_ids

        return generate_ids(generator, generator.vocabulary, overrides, options)
    if options.verbose:
        print(f"{options.model} on {generator.device}, {generator.precision}: {settings}", file=sys.stderr)
    check = OutputCheck(
        "texts",
        learn_more=f"train it longer or on more data; {program()} info {options.model} shows how it was trained.",
        forbid="Draw instead of --greedy, or give --repetition-penalty 1.2 or --no-repeat-ngram-size 4.",
    )
    if options.lines:
        return _each_line(generator, overrides, options, check)
    if options.prompt is None and options.input == "-" and sys.stdin is not None and sys.stdin.isatty():
        return _converse(generator, overrides, options, check)
    prompt = options.prompt if options.prompt is not None else _whole(options.input)
    with LineWriter(options.output) as writer:
        _write_one(generator, prompt, 0, overrides, options, writer, check)
    check.tell()
    return 0


def _whole(name: str) -> str:
    """All of a file as one prompt, without the line break at its end."""
    lines: list[str] = []
    size = 0
    for block in read_blocks(name, 1024):
        lines += block
        size += sum(map(len, block))
        if size > _MOST_PROMPT_CHARS:
            raise DataError(f"{name} is longer than {_MOST_PROMPT_CHARS:,} characters, too long for one prompt.")
    return "\n".join(lines)


def _write_one(
    generator: Generator,
    prompt: str,
    number: int,
    overrides: dict[str, Any],
    options: GenerateOptions,
    writer: LineWriter,
    check: OutputCheck,
) -> None:
    """The continuations of one prompt, the first as it is written where it is the only one."""
    started = time.perf_counter()
    if options.json or overrides["num_return_sequences"] > 1:
        [found] = generator.continuations([prompt], first=number, **overrides)
        writer.write(_shown(number + 1, prompt, found, generator, options, check))
    else:
        written: list[str] = []
        pieces = kept(generator.stream(prompt, number=number, **overrides), written)
        writer.write_pieces(chain([prompt] if options.echo else [], pieces))
        check.see_text(number + 1, prompt, "".join(written), may_be_empty=bool(options.stop))
    if options.verbose:
        print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)


def _each_line(generator: Generator, overrides: dict[str, Any], options: GenerateOptions, check: OutputCheck) -> int:
    if is_sharded(options.output):
        return _each_line_sharded(generator, overrides, options, check)
    report = ReadReport()
    first = 0
    rows = generator.options(**overrides).max_rows
    with LineWriter(options.output) as writer:
        for prompts in read_blocks(options.input, rows, on_bad_utf8=options.on_bad_utf8, report=report):
            found = generator.continuations(prompts, first=first, **overrides)
            for place, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
                writer.write(_shown(first + place + 1, prompt, one, generator, options, check, in_line=True))
            first += len(prompts)
    tell_bad_lines(report)
    check.tell()
    return 0


def _each_line_sharded(
    generator: Generator, overrides: dict[str, Any], options: GenerateOptions, check: OutputCheck
) -> int:
    """The same of a file, on several ranks."""
    report = ReadReport()
    settings = generator.options(**overrides)

    def blocks() -> Iterator[list[str]]:
        nonlocal report
        report = ReadReport()  # a file is read more than once, and counted once
        return blocks_of(read_lines(options.input, on_bad_utf8=options.on_bad_utf8, report=report), settings.max_rows)

    def work(first: int, prompts: list[str]) -> Iterator[str]:
        found = generator.continuations(prompts, first=first, **overrides)
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True), first + 1):
            yield from _shown(number, prompt, one, generator, options, check, in_line=True)

    identity = {
        "command": "generate",
        "model": model_identity(options.model),
        "settings": asdict(settings),
        "form": (options.json, options.echo, options.on_bad_utf8),
        "precision": generator.precision,
        "compiled": options.run_on.compile,
    }
    if run_sharded(options.output, [options.input], identity, blocks, work) is not None:
        tell_bad_lines(report)
    check.tell()
    return 0


def _shown(
    number: int,
    prompt: str,
    found: list[Continuation],
    generator: Generator,
    options: GenerateOptions,
    check: OutputCheck,
    in_line: bool = False,
) -> list[str]:
    """The output lines of one prompt."""
    for one in found:
        check.see_text(number, prompt, one.text, may_be_empty=bool(options.stop))
    if options.json:
        continuations = [
            {
                "text": one.text,
                "ended_by": one.ended_by,
                "log_prob": sum(one.log_probs),
                "tokens": generator.vocabulary.tokens(one.ids),
                "token_log_probs": one.log_probs,
            }
            for one in found
        ]
        return [json.dumps({"line": number, "prompt": prompt, "continuations": continuations}, ensure_ascii=False)]
    texts = [(prompt if options.echo else "") + one.text for one in found]
    if in_line:
        return [text.replace("\n", " ") for text in texts]
    lines: list[str] = []
    for place, text in enumerate(texts):
        lines += ["---", text] if place else [text]
    return lines


def _converse(generator: Generator, overrides: dict[str, Any], options: GenerateOptions, check: OutputCheck) -> int:
    """A prompt after the other until the end of the input. What cannot be done is reported, and no end."""
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if in_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys of input())
    print("Type a beginning and Enter; Ctrl-D ends.", file=sys.stderr)
    with LineWriter(options.output) as writer:
        for number in count():
            try:
                if not in_terminal:
                    print("> ", end="", file=sys.stderr, flush=True)
                prompt = input("> " if in_terminal else "")
            except EOFError:
                print(file=sys.stderr)
                break
            except UnicodeDecodeError as error:
                print(f"manyheads: what was typed is not in the terminal's encoding: {error.reason}.", file=sys.stderr)
                continue
            try:
                _write_one(generator, prompt, number, overrides, options, writer, check)
                check.tell()
            except ManyHeadsError as error:
                print(f"manyheads: {error}", file=sys.stderr)
    return 0
