"""Options of search and of generation: named as in transformers, with the names that NMT toolkits use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from manyheads.config.options import option
from manyheads.decoding.generation_settings import GenerationSettings
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.text.sides import TranslationTokenizer

__all__ = ["DecodingOptions", "GenerationOptions", "SamplingOptions"]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of search and of generation."""

    min_new_tokens: int | None = option(
        "Minimum number of tokens before an output can end; of generate: also before a text of --stop counts.",
        metavar="N",
        default_is="the model's",
    )
    temperature: float | None = option(
        "Temperature of sampling; below 1 likely tokens become more likely, above 1 unlikely ones do.",
        metavar="X",
        default_is="the model's",
    )
    top_k: int | None = option(
        "Sample only from the N most probable tokens; 0: all.", metavar="N", default_is="the model's"
    )
    top_p: float | None = option(
        "Sample only from the most probable tokens that together have this probability.",
        metavar="X",
        default_is="the model's",
    )
    repetition_penalty: float | None = option(
        "Above 1: tokens that occurred before, in the output or its prompt, become less likely: their positive logits"
        " are divided by it, negative ones multiplied (in a beam: log-probabilities, as in transformers).",
        metavar="X",
        default_is="the model's",
    )
    no_repeat_ngram_size: int | None = option(
        "No n-gram of this size occurs twice; 0 is off.", metavar="N", default_is="the model's"
    )
    seed: int | None = option(
        "Seed of sampling; the same seed gives the same output.", metavar="N", default_is="the model's"
    )

    def given(self, settings: type) -> dict[str, Any]:
        """The options that were given and are fields of these settings."""
        names = {item.name for item in fields(settings)}
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name in names}
        return {name: value for name, value in values.items() if value not in (None, ()) and value is not False}


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingOptions):
    """Generation; the defaults come from the model's generation_config.json."""

    max_new_tokens: int | None = option(
        "Maximum number of tokens of a continuation.", metavar="N", default_is="the model's", aliases=("-n",)
    )
    greedy: bool = option("Take the most probable token each time instead of sampling.", default=False)
    min_p: float | None = option(
        "Sample only from tokens with at least this fraction of the highest probability.",
        metavar="X",
        default_is="the model's",
    )
    stop: tuple[str, ...] = option(
        "Texts that end a continuation; \\n is a line break.", default=(), metavar="TEXT ..."
    )
    num_return_sequences: int = option(
        "Number of continuations of each prompt; a line of three dashes separates them.",
        default=1,
        metavar="N",
        aliases=("--count",),
    )
    memory_len: int | None = option(
        "Number of earlier positions that each layer keeps in memory.", metavar="N", default_is="the model's"
    )
    max_rows: int | None = option(
        "Number of continuations that are generated in parallel.", metavar="N", default_is="the model's"
    )

    def overrides(self) -> dict[str, Any]:
        """The fields of `GenerationSettings` that were given, for `Generator`.

        Raises: ConfigError: options contradict each other.
        """
        values = self.given(GenerationSettings)
        drawing = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in values]
        if drawing and not self.greedy:
            values["do_sample"] = True  # also where the model's settings take the likeliest token
        if self.greedy:
            if idle := [*drawing, *(["seed"] if "seed" in values else [])]:
                name = idle[0].replace("_", "-")
                raise ConfigError(
                    f"--greedy takes the most probable token, so --{name} has no effect; leave out one of them."
                )
            values["do_sample"] = False
        if self.stop:
            values["stop"] = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop)
        return values


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(SamplingOptions):
    """Search; the defaults come from the model's generation_config.json."""

    num_beams: int | None = option(
        "Beam width; 1 is greedy search.", metavar="N", default_is="the model's", aliases=("--beam",)
    )
    length_penalty: float | None = option(
        "Exponent of the length penalty; 0 turns it off.", metavar="X", default_is="the model's"
    )
    length_penalty_kind: Literal["gnmt", "power", "none"] | None = option(
        "gnmt: ((5 + length) / 6) ** penalty; power: length ** penalty.", default_is="the model's"
    )
    lenpen: float | None = option(
        "fairseq's: --length-penalty X with --length-penalty-kind power.", default=None, metavar="X"
    )
    early_stopping: bool = option("Stop a sentence as soon as num_beams hypotheses have ended.", default=False)
    no_early_stopping: bool = option(
        "Continue until no hypothesis can become better, even if the model's settings stop early.", default=False
    )
    max_new_tokens: int | None = option(
        "Maximum number of tokens of a translation; 0: in proportion to the source.",
        metavar="N",
        default_is="the model's",
    )
    do_sample: bool = option("Sample tokens at random instead of searching.", default=False)
    no_do_sample: bool = option("Search, even if the model's settings sample.", default=False)
    forced_prefix: str | None = option("Every translation begins with this text.", default=None, metavar="TEXT")
    banned_ids: tuple[int, ...] = option("Token ids that are never produced.", default=(), metavar="ID ...")
    rules: Literal["manyheads", "marian", "marian-5"] | None = option(
        "Rules for scoring and stopping beams: those of manyheads, or those of Marian models in transformers 4 or 5.",
        default_is="the model's",
    )
    no_well_formed: bool = option(
        "For parsers: allow output that is not a tree over the words; it is repaired afterwards.", default=False
    )
    no_keep_words: bool = option(
        "Translate everything, also addresses, numbers, code and emoji, which are otherwise copied; and lines in"
        " capitals as they are.",
        default=False,
    )
    max_tokens: int | None = option(
        "Maximum size of a batch in tokens: rows x beams x longest source.", metavar="N", default_is="the model's"
    )
    too_long: Literal["fail", "truncate"] | None = option(
        "If a source does not fit: stop and name its line, or truncate it and report how many were truncated.",
        default_is="the model's",
    )

    def overrides(self, tokenizer: TranslationTokenizer | None) -> dict[str, Any]:
        """The fields of `DecodingSettings` that were given, for `Translator`.

        Args: tokenizer: of the forced prefix, which must be None without it.

        Raises: ConfigError: two options contradict each other.
        """
        values = self.given(DecodingSettings)
        if self.lenpen is not None:
            if "length_penalty" in values or "length_penalty_kind" in values:
                raise ConfigError(
                    f"--lenpen {self.lenpen} means --length-penalty {self.lenpen} --length-penalty-kind power;"
                    " give one or the other."
                )
            values |= {"length_penalty": self.lenpen, "length_penalty_kind": "power"}
        for name in ("early_stopping", "do_sample"):
            yes, no = getattr(self, name), getattr(self, f"no_{name}")
            if yes and no:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} and --no-{option} contradict each other; give one of them.")
            if no:
                values[name] = False
        if self.no_well_formed:
            values["well_formed"] = False
        if self.no_keep_words:
            values["keep_words"] = False
        if self.forced_prefix is not None and tokenizer is not None:
            from manyheads.decoding.text_ids import prefix_ids

            values["forced_prefix_ids"] = prefix_ids(self.forced_prefix, tokenizer.target)
        return values
