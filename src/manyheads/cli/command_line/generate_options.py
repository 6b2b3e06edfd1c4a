"""The options of `manyheads generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyheads.config.options import argument, group, option
from manyheads.data.lines import OnBadUtf8
from manyheads.decoding.options import SearchDeviceOptions
from manyheads.errors import ConfigError

__all__ = ["GenerateOptions"]

_MODELS = "(default: the model's)"
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


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `manyheads generate`."""

    model: str = argument("A model folder, a run folder, or owner/name on the Hugging Face hub.", metavar="MODEL")
    prompt: str | None = argument("What to go on from; an empty text begins one.", default=None, metavar="PROMPT")
    input: str = option(
        "Where prompts come from if none is given: a text file, plain or gzip; - is standard input.",
        default="-",
        metavar="FILE",
    )
    output: str = option("Where texts go; - is standard output.", default="-", metavar="FILE", aliases=("-o",))
    lines: bool = option("Every line of the input is a prompt of its own.", default=False)
    echo: bool = option("Print the prompt before its continuation.", default=False)
    json: bool = option(
        "One JSON object a prompt, with text, tokens, log-probabilities and how it ended, of each continuation.",
        default=False,
    )
    greedy: bool = option("Take the likeliest token each time instead of drawing.", default=False)
    max_new_tokens: int | None = option(
        "Most tokens of a continuation.", default=None, metavar="N", default_is="the model's", aliases=("-n",)
    )
    min_new_tokens: int | None = option(
        "A document does not end before so many.", default=None, metavar="N", default_is="the model's"
    )
    temperature: float | None = option(
        "Below 1 keeps to likely tokens, above 1 gives unlikely ones a chance.",
        default=None,
        metavar="X",
        default_is="the model's",
    )
    top_k: int | None = option(
        "Draw among the N likeliest tokens; 0: all.", default=None, metavar="N", default_is="the model's"
    )
    top_p: float | None = option(
        "Draw among the likeliest tokens that hold this much probability.",
        default=None,
        metavar="X",
        default_is="the model's",
    )
    min_p: float | None = option(
        "Draw among tokens that are at least this share as likely as the likeliest.",
        default=None,
        metavar="X",
        default_is="the model's",
    )
    repetition_penalty: float | None = option(
        "Above 1: tokens of the prompt and the continuation become less likely.",
        default=None,
        metavar="X",
        default_is="the model's",
    )
    no_repeat_ngram_size: int | None = option(
        "No n-gram of this size occurs twice; 0 is off.", default=None, metavar="N", default_is="the model's"
    )
    stop: tuple[str, ...] = option(
        "Texts that end a continuation; \\n is a line break.", default=(), metavar="TEXT ..."
    )
    num_return_sequences: int | None = option(
        "Continuations of each prompt; a line of three dashes stands between them.",
        default=None,
        metavar="N",
        default_is="1",
        aliases=("--count",),
    )
    memory_len: int | None = option(
        "Positions a layer that stay in view.", default=None, metavar="N", default_is="the model's"
    )
    max_rows: int | None = option(
        "Continuations that are written side by side.", default=None, metavar="N", default_is="the model's"
    )
    seed: int | None = option(
        "The same seed gives the same texts.", default=None, metavar="N", default_is="the model's"
    )
    on_bad_utf8: OnBadUtf8 = option(
        "With --lines, a line that is not UTF-8: fail, replace its bad bytes, or skip (an empty line comes out).",
        default="fail",
    )
    verbose: bool = option("Print the settings and the speed on standard error.", default=False, aliases=("-v",))
    run_on: SearchDeviceOptions = group(SearchDeviceOptions)

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
