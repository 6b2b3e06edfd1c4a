"""The options of `manyheads generate`."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.config.options import CommandPage, Shared, argument, group, option, refuse_given
from manyheads.data.lines import OnBadUtf8
from manyheads.decoding.options import EnsembleOptions, GenerationOptions, SearchDeviceOptions
from manyheads.errors import ConfigError


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
