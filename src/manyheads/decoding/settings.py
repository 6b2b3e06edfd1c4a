"""Options of search and of generation: for `generation_config.json`, commands, Python, HTTP and validation.

An option is declared once, as a field here; see `setting`. All others are made from the fields: options of commands
(`decoding.options`), bodies of requests, OpenAPI, help, the refusals of other engines and
exports (`unsupported`), and the protocol. Named arguments in Python (`DecodingOverrides`) are written out, because
editors and type checkers read them; a test compares them with the fields. Names follow `transformers`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from manyheads.catalogue import HOOKS, load
from manyheads.config.build import build
from manyheads.config.checks import BELOW_ONE, POSITIVE_FRACTION, Range, at_least, between, check, set_tuples
from manyheads.errors import ConfigError, RequestError
from manyheads.files.verify import read_object

T = TypeVar("T")
_MOST_IDS = 100_000
_MOST_STOPS, _MOST_STOP_BYTES = 1_000, 10_000
_EVERY: Mapping[str, tuple[Any, ...]] = {"ctranslate2": (), "transformers": ()}
_TRANSFORMERS: Mapping[str, tuple[Any, ...]] = {"transformers": ()}


@dataclass(frozen=True, kw_only=True)
class SettingFacts:
    """Facts about an option that its type, default and text do not give.

    Args:
        allowed: the range of a number. A file can contain any number; the limits exclude senseless ones.
        neutral: the value that has no effect; by default the field's default.
        engines: other engines and formats that have the option -> the values that they have; (): all.
        only: when it has an effect: see `_USES`; "": always.
        http: protocols of the server with a field of this name: `native`, `openai`.
        command: whether it is an option of commands, with `text` as its help.
        off: of a flag: name and help of the option that turns it off.
        metavar: what a value looks like on the command line; from the type if empty.
        aliases: further names on the command line.
    """

    allowed: Range | None = None
    neutral: Any = MISSING
    engines: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    only: Literal["", "sampling", "beams", "penalty"] = ""
    http: tuple[str, ...] = ()
    command: bool = True
    off: tuple[str, str] | None = None
    metavar: str = ""
    aliases: tuple[str, ...] = ()


_USES: Mapping[str, Callable[[Any], bool]] = {
    "sampling": lambda settings: settings.do_sample,
    "beams": lambda settings: settings.num_beams > 1,
    "penalty": lambda settings: settings.num_beams > 1 and settings.length_penalty != 0,
}


def setting(default: Any, text: str, **facts: Any) -> Any:
    """A field of settings. Args: text: a sentence for help pages. facts: see `SettingFacts`."""
    facts.setdefault("neutral", default)
    return dataclasses.field(default=default, metadata={"text": text, "facts": SettingFacts(**facts)})


def facts_of(settings: type) -> dict[str, SettingFacts]:
    """The options of a class of settings: name -> facts."""
    return {item.name: item.metadata["facts"] for item in fields(settings)}


def drawing_options(settings: type) -> dict[str, Any]:
    """The options that only sampling uses: name -> the value without effect."""
    return {name: facts.neutral for name, facts in facts_of(settings).items() if facts.only == "sampling"}


@dataclass(frozen=True, kw_only=True)
class _CommonSettings:
    """Options of search and of generation."""

    # fmt: off
    min_new_tokens: int = setting(
        0, "Minimum number of tokens before an output can end; of generate: also before a text of --stop counts.",
        allowed=between(0, 10_000_000), engines=_TRANSFORMERS, http=("native",)
    )
    temperature: float = setting(
        1.0, "Temperature of sampling; below 1 likely tokens become more likely, above 1 unlikely ones do.",
        allowed=Range(0, 1_000_000, "above 0 and at most 1,000,000 (for greedy search turn do_sample off)", excluded=0),
        engines=_TRANSFORMERS, only="sampling", http=("native",)
    )
    top_k: int = setting(
        0, "Sample only from the N most probable tokens; 0: all.", allowed=at_least(0), engines=_TRANSFORMERS,
        only="sampling", http=("native", "openai")
    )
    top_p: float = setting(
        1.0, "Sample only from the most probable tokens that together have this probability.",
        allowed=POSITIVE_FRACTION, engines=_TRANSFORMERS, only="sampling", http=("native",)
    )
    min_p: float = setting(
        0.0, "Sample only from tokens with at least this fraction of the highest probability.", allowed=BELOW_ONE,
        engines=_TRANSFORMERS, only="sampling", http=("native", "openai")
    )
    typical_p: float = setting(
        1.0,
        "Sample only from tokens whose information is nearest to the entropy, and that together have this probability.",
        allowed=POSITIVE_FRACTION, engines=_TRANSFORMERS, only="sampling", http=("native", "openai")
    )
    eta_cutoff: float = setting(
        0.0,
        "Sample only from tokens with at least this probability, or less where many tokens are likely; 0.0003 to 0.002"
        " are usual.",
        allowed=BELOW_ONE, engines=_TRANSFORMERS, only="sampling", http=("native", "openai")
    )
    # As in transformers and vLLM (Keskar et al. 2019); in a beam the same number has less effect.
    repetition_penalty: float = setting(
        1.0,
        "Above 1: tokens that occurred before, in the output or its prompt, become less likely: their positive logits"
        " are divided by it, negative ones multiplied (in a beam: log-probabilities, as in transformers).",
        allowed=Range(0, 10**6, "above 0 and at most 1,000,000 (1 is off)", excluded=0), engines=_TRANSFORMERS,
        http=("native", "openai")
    )
    no_repeat_ngram_size: int = setting(
        0, "No n-gram of this size occurs twice; 0 is off.", allowed=between(0, 100_000), engines=_TRANSFORMERS,
        http=("native",)
    )
    num_return_sequences: int = setting(
        1,
        "Number of outputs for each input, best first; of generate: continuations, of which more than one need"
        " do_sample.",
        allowed=between(1, 10_000), engines=_EVERY, http=("native",),
        command=False,  # it decides the form of the output: each command declares it
    )
    banned_ids: tuple[int, ...] = setting(
        (), "Token ids that are never produced.", engines=_TRANSFORMERS, metavar="ID ..."
    )
    regex: str = setting(
        "", "The output matches this regular expression as a whole (needs the extra constrained).", http=("native",),
        metavar="PATTERN"
    )
    json_schema: str = setting(
        "",
        "The output is JSON that this JSON schema permits; commands also take the name of its file.",
        http=("native",), metavar="FILE"
    )
    seed: int = setting(0, "Seed of sampling; the same seed gives the same output.", engines=_EVERY, http=("native",))
    # fmt: on

    @property
    def is_constrained(self) -> bool:
        """Whether the output must match a pattern."""
        return bool(self.regex or self.json_schema)

    def _check(self) -> None:
        """Raises: ConfigError: an option is out of range, or two contradict each other."""
        set_tuples(self)
        for name, facts in facts_of(type(self)).items():
            if facts.allowed is not None:
                check(self, "", facts.allowed, name)
        for name in ("banned_ids", "forced_prefix_ids"):
            count = len(getattr(self, name, ()))
            if count > _MOST_IDS:
                raise ConfigError(f"{name} has {count:,} ids; at most {_MOST_IDS:,} are allowed.", fields=[name])
        against = ["regex"] if self.json_schema else ["min_new_tokens", "no_repeat_ngram_size"]
        clash = next((name for name in against if getattr(self, name) != getattr(type(self), name)), "")
        if self.is_constrained and clash:
            name = "json_schema" if self.json_schema else "regex"
            raise ConfigError(f"{name} and {clash} cannot be used together; leave one out.", fields=(name, clash))
        most = self.max_new_tokens  # type: ignore[attr-defined]  # a field of both classes, with another default
        if most and self.min_new_tokens > most:
            raise ConfigError(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {most}.",
                fields=("min_new_tokens", "max_new_tokens"),
            )


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(_CommonSettings):
    """Options of the search for a translation; `manyheads translate --help` describes them.

    Raises: ConfigError: an option is out of range, or two contradict each other.
    """

    # fmt: off
    num_beams: int = setting(
        4, "Beam width; 1 is greedy search.", allowed=between(1, 1_000), engines=_EVERY, http=("native",),
        aliases=("--beam",)
    )
    length_penalty: float = setting(
        0.6, "Exponent of the length penalty; 0 turns it off.", neutral=0.0, engines=_EVERY, only="beams",
        http=("native",)
    )
    # gnmt is eq. 14 of Wu et al. 2016, power fairseq's. The length counts the EOS token, not BOS.
    length_penalty_kind: Literal["gnmt", "power", "none"] = setting(
        "gnmt",
        "gnmt: ((5 + length) / 6) ** penalty; power: length ** penalty.",
        neutral="none", engines={"ctranslate2": ("power", "none"), "transformers": ()}, only="penalty",
        http=("native",)
    )
    # False: until, by the rules' estimate, no running hypothesis can beat the worst kept one; `never`: until this is
    # certain (with our own rules it always is).
    early_stopping: bool | Literal["never"] = setting(
        False, "Stop a sentence as soon as num_beams hypotheses have ended.",
        engines={"ctranslate2": (True, False), "transformers": ()}, only="beams", http=("native",),
        off=("no_early_stopping",
             "Continue until no hypothesis can become better, even if the model's settings stop early.")
    )
    max_new_tokens: int = setting(
        0, "Maximum number of tokens of a translation; 0: in proportion to the source.", allowed=between(0, 100_000),
        engines=_EVERY, http=("native",)
    )
    # The Transformer paper uses 1.0 and 50, sec. 6.1.
    max_len_ratio: float = setting(
        1.0, "With max_new_tokens 0, the maximum is this number times the length of the source, plus max_len_offset.",
        allowed=between(0, 1_000), engines=_EVERY, command=False
    )
    max_len_offset: int = setting(50, "See max_len_ratio.", allowed=between(0, 100_000), engines=_EVERY, command=False)
    do_sample: bool = setting(
        False, "Sample tokens at random instead of searching.", engines=_TRANSFORMERS, http=("native",),
        off=("no_do_sample", "Search, even if the model's settings sample.")
    )
    forced_prefix_ids: tuple[int, ...] = setting(
        (), "Token ids at the start of every output, after BOS.", engines=_TRANSFORMERS, command=False
    )
    forced_eos: bool = setting(
        False, "The last token within the limit is EOS with log-probability 0; otherwise a hypothesis is cut there.",
        engines=_TRANSFORMERS, command=False
    )
    well_formed: bool = setting(
        True, "For parsers: produce only tokens that can still lead to a tree over exactly the words of the sentence.",
        engines=_EVERY,
        off=("no_well_formed",
             "For parsers: allow output that is not a tree over the words; it is repaired afterwards.")
    )
    keep_words: bool = setting(
        True,
        "Copy what is no word (addresses, numbers, code, emoji), and search lines in capitals in sentence case, too.",
        engines=_EVERY,
        off=("no_keep_words",
             "Translate everything, also addresses, numbers, code and emoji, which are otherwise copied; and lines in"
             " capitals as they are.")
    )
    renormalize_logits: bool = setting(
        False, "Renormalise the probabilities after bans and penalties.", engines=_EVERY, command=False
    )
    rules: Literal["manyheads", "marian", "marian-5"] = setting(
        "manyheads",
        "Rules for scoring and stopping beams: those of manyheads, or those of Marian models in transformers 4 or 5.",
        engines={"ctranslate2": ("manyheads",), "transformers": ()}, only="beams"
    )
    max_tokens: int = setting(
        8192, "Maximum size of a batch in tokens: rows x beams x longest source.", allowed=between(1, 2**31),
        engines=_EVERY
    )
    too_long: Literal["fail", "truncate"] = setting(
        "fail",
        "If a source does not fit: stop and name its line, or truncate it and report how many were truncated.",
        engines=_EVERY
    )
    # fmt: on

    def __post_init__(self) -> None:
        self._check()
        check(self, "", between(0, 100_000), "min_new_tokens")
        # Our estimate of when to stop requires that the penalty is not negative.
        check(self, "", between(0 if self.rules == "manyheads" else -100, 100), "length_penalty")
        if self.do_sample and self.num_beams > 1:
            raise ConfigError(
                f"do_sample with num_beams {self.num_beams}: sampling needs num_beams 1.",
                fields=("do_sample", "num_beams"),
            )
        if not self.do_sample and self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences} but num_beams is {self.num_beams}; a search"
                " returns at most num_beams hypotheses. Lower num_return_sequences, raise num_beams, or turn do_sample"
                " on.",
                fields=("num_return_sequences", "num_beams", "do_sample"),
            )


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(_CommonSettings):
    """Options of text generation; `manyheads generate --help` describes them. Each prompt has its own random stream.

    Raises: ConfigError: an option is out of range, or two contradict each other.
    """

    # fmt: off
    max_new_tokens: int = setting(
        200, "Maximum number of tokens of a continuation.", allowed=between(1, 10_000_000), http=("native",),
        aliases=("-n",)
    )
    do_sample: bool = setting(
        True, "Sample tokens; false takes the most probable token each time.", http=("native",),
        off=("greedy", "Take the most probable token each time instead of sampling.")
    )
    stop: tuple[str, ...] = setting(
        (), "Texts that end a continuation; \\n is a line break.", http=("native",), metavar="TEXT ..."
    )
    banned_ids: tuple[int, ...] = setting((), "Token ids that are never produced.", command=False)
    # A model with absolute positions processes its last memory_len tokens again for each new token.
    memory_len: int | None = setting(
        None, "Number of earlier positions that each layer keeps in memory.", allowed=between(1, 10_000_000),
        http=("native",)
    )
    max_rows: int = setting(64, "Number of continuations that are generated in parallel.", allowed=between(1, 100_000))
    # fmt: on

    def __post_init__(self) -> None:
        self._check()
        check(self, "", between(0, 10_000_000), "top_k")
        if self.num_return_sequences > 1 and not self.do_sample:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences} but do_sample is false, so all would be the same;"
                " turn do_sample on, or set it to 1.",
                fields=("num_return_sequences", "do_sample"),
            )
        if "" in self.stop:
            raise ConfigError(
                "stop contains an empty text, which would end every continuation at once; leave it out.",
                fields=["stop"],
            )
        for text in self.stop:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ConfigError(f"stop contains {text!a}, which is not UTF-8.", fields=["stop"]) from error
        if len(self.stop) > _MOST_STOPS or any(len(text) > _MOST_STOP_BYTES for text in self.stop):
            raise ConfigError(
                f"stop can have {_MOST_STOPS:,} texts of {_MOST_STOP_BYTES:,} characters; it has {len(self.stop):,},"
                f" the longest of {max(map(len, self.stop)):,}.",
                fields=["stop"],
            )


class CommonOverrides(TypedDict, total=False):
    """The options of one call that `DecodingSettings` and `GenerationSettings` share."""

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    eta_cutoff: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    num_return_sequences: int
    banned_ids: tuple[int, ...]
    regex: str
    json_schema: str | Mapping[str, Any]
    seed: int


class DecodingOverrides(CommonOverrides, total=False):
    """The options of `DecodingSettings` as named arguments of one call; those left out keep their values."""

    num_beams: int
    length_penalty: float
    length_penalty_kind: Literal["gnmt", "power", "none"]
    early_stopping: bool | Literal["never"]
    max_len_ratio: float
    max_len_offset: int
    forced_prefix_ids: tuple[int, ...]
    forced_eos: bool
    well_formed: bool
    keep_words: bool
    renormalize_logits: bool
    rules: Literal["manyheads", "marian", "marian-5"]
    max_tokens: int
    too_long: Literal["fail", "truncate"]


class GenerationOverrides(CommonOverrides, total=False):
    """The options of `GenerationSettings` as named arguments of one call; those left out keep their values."""

    stop: tuple[str, ...]
    memory_len: int | None
    max_rows: int


def overridden(settings: T, given: Mapping[str, Any], name: str = "the decoding options") -> T:
    """Return the settings with the options of a call, of which a JSON schema may also be a dictionary.

    Args: name: of the options, in messages.

    Raises: ConfigError: one is unknown, of the wrong type, out of range; or it is one of sampling, and the settings do
        not sample.
    """
    if isinstance(schema := given.get("json_schema"), Mapping):
        try:
            given = {**given, "json_schema": json.dumps(dict(schema))}
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema is not a JSON schema: {error}.", fields=["json_schema"]) from None
    merged = build(type(settings), {**vars(settings), **given}, name)
    _check_drawing(given, merged)
    return merged


def _check_drawing(given: Mapping[str, Any], settings: Any) -> None:
    """Raises: ConfigError: an option of sampling is given, but the settings do not sample."""
    drawing = drawing_options(type(settings))
    idle = [name for name, neutral in drawing.items() if given.get(name, neutral) != neutral]
    if idle and not settings.do_sample:
        raise ConfigError(
            f"{idle[0]} is {given[idle[0]]}, but do_sample is false, so it has no effect; set do_sample, or leave"
            f" {idle[0]} out.",
            fields=(idle[0], "do_sample"),
        )


def unsupported(settings: DecodingSettings, engine: str) -> str:
    """Return the first option in use that an engine or a format does not have, with its value; "" if it has all."""
    for name, facts in facts_of(type(settings)).items():
        value = getattr(settings, name)
        if value == facts.neutral or (facts.only and not _USES[facts.only](settings)):
            continue
        if engine not in facts.engines:
            return f"{name} {value!r}"
        values = facts.engines[engine]
        if values and value not in values:
            return f"{name} {value!r} (it has {' and '.join(map(repr, values))})"
    return ""


def load_settings(folder: Path) -> DecodingSettings:
    """Return the settings in a translator's folder; see `read_settings`."""
    return read_settings(folder, DecodingSettings)


def read_settings(folder: Path, kind: type[T]) -> T:
    """Return the settings in `folder/generation_config.json`, or the defaults if there is no such file.

    Args: kind: the dataclass of the settings, for a search or a generator.

    Raises: ModelFileError: the file cannot be read or is not one JSON object. ConfigError: an unknown or bad option.
    """
    file = folder / "generation_config.json"
    try:
        values = read_object(file)
    except FileNotFoundError:
        return kind()
    return build(kind, values, str(file), "decoding" if kind is DecodingSettings else "generation")


def pattern_grammar(settings: DecodingSettings | GenerationSettings, reader: Any, *, check: bool = False) -> Any | None:
    """Return the grammar of the pattern in the settings; None: the settings have no pattern.

    Args: reader: a language model's vocabulary, or a translator's tokenizer. check: whether the limit leaves room.

    Raises: ConfigError: this model cannot write a text that matches. MissingExtraError: a package is missing.
    """
    return load(HOOKS["constrained"])(settings, reader, check=check) if settings.is_constrained else None


def check_ids(settings: DecodingSettings, *, vocab_size: int, pad_id: int, eos_id: int) -> None:
    """Refuse ids that are invalid for this vocabulary.

    Raises: RequestError: a banned or forced id is outside the vocabulary; padding or EOS is forced; a forced id is
        banned; the prefix is not shorter than `max_new_tokens`.
    """
    for name in ("banned_ids", "forced_prefix_ids"):
        for token in getattr(settings, name):
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} holds {token}; ids of this vocabulary are 0 to {vocab_size - 1}.")
    prefix = settings.forced_prefix_ids
    for token in prefix:
        if token in (pad_id, eos_id) or token in settings.banned_ids:
            raise RequestError(f"forced_prefix_ids holds {token}, which is padding, EOS or banned; leave it out.")
    if settings.max_new_tokens and len(prefix) >= settings.max_new_tokens:
        raise RequestError(
            f"forced_prefix_ids has {len(prefix)} tokens but max_new_tokens is {settings.max_new_tokens};"
            " raise max_new_tokens above the prefix."
        )
