"""Options of decoding, for `generation_config.json`, `translate` and validation; the names follow `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from manyheads.config.checks import POSITIVE_FRACTION, Range, at_least, between, check, set_tuples
from manyheads.errors import ConfigError

__all__ = ["CommonOverrides", "DecodingOverrides", "DecodingSettings", "check_common", "check_drawing"]

# A file can contain any number; these limits exclude senseless ones.
_COMMON_RANGES = {
    "num_return_sequences": between(1, 10_000),
    "temperature": Range(
        0, 1_000_000, "above 0 and at most 1,000,000 (for greedy search turn do_sample off)", excluded=0
    ),
    "top_k": at_least(0),
    "top_p": POSITIVE_FRACTION,
    "repetition_penalty": Range(0, 10**6, "above 0 and at most 1,000,000 (1 is off)", excluded=0),
    "no_repeat_ngram_size": between(0, 100_000),
}
_RANGES = {
    "num_beams": between(1, 1_000),
    "max_new_tokens": between(0, 100_000),
    "max_len_ratio": between(0, 1_000),
    "max_len_offset": between(0, 100_000),
    "min_new_tokens": between(0, 100_000),
    "max_tokens": between(1, 2**31),
}
_MOST_IDS = 100_000
_DRAWING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Options that only sampling uses, with the value that has no effect."""


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """Options of the search for a translation.

    Args:
        num_beams: beam width; 1 is greedy search (or plain sampling with `do_sample`).
        length_penalty: exponent of the length penalty; 0 turns it off.
        length_penalty_kind: `gnmt`: ((5 + length) / 6) ** p (Wu et al. 2016, eq. 14); `power`: length ** p (as in
            fairseq); `none`. The length counts the EOS token, not BOS.
        early_stopping: true: stop a sentence when num_beams hypotheses have ended; false: continue until, by the rules'
            estimate, no running hypothesis can beat the worst kept one; `never`: continue until this is certain (with
            our own rules it always is).
        max_new_tokens: maximum number of target tokens, EOS included; 0 means `max_len_ratio` x source length +
            `max_len_offset`.
        max_len_ratio: see max_new_tokens.
        max_len_offset: see max_new_tokens. (The Transformer paper uses 1.0 and 50, sec. 6.1.)
        min_new_tokens: minimum number of target tokens before EOS.
        do_sample: sample tokens instead of taking the best; needs num_beams = 1.
        temperature: divides the logits before sampling; > 0.
        top_k: sample only from the k most probable tokens; 0 means all.
        top_p: sample only from the most probable tokens that together have this probability; 1 means all.
        repetition_penalty: > 1 makes earlier tokens less probable (Keskar et al. 2019); 1 is off. As in transformers,
            their positive values are divided by it and negative ones multiplied: logits in greedy search and sampling,
            log-probabilities in a beam, where the same number therefore has less effect.
        no_repeat_ngram_size: no n-gram of this size occurs twice in an output; 0 is off.
        num_return_sequences: number of hypotheses returned for each input, best first.
        banned_ids: token ids that are never produced (pad and BOS never are).
        forced_prefix_ids: token ids at the start of every output, after BOS.
        forced_eos: the last token within the limit is EOS with log-probability 0; otherwise a hypothesis is cut there.
        well_formed: for parsers: produce only tokens that can still lead to a tree over exactly the words of the
            sentence (see `grammar.TreeGrammar`).
        keep_words: copy things that are not words (addresses, numbers, code, emoji; docs/kept-words.md), and search
            lines in capitals in sentence case, too.
        renormalize_logits: renormalise the probabilities after bans and penalties.
        rules: scores and stopping of beams: `manyheads` (see `rules.BeamRules`), or for models converted from
            `transformers`: `marian` (4.35; see `rules.MarianRules`) or `marian-5` (5; see `rules.Marian5Rules`).
        max_tokens: maximum size of a batch in tokens (rows x beams x longest source).
        too_long: action for a source that is too long for the model or for max_tokens (one sentence's beams must fit
            into it): `fail`, or `truncate` it (EOS is kept) with a warning.
        seed: seed of sampling.

    Raises: ConfigError: an option is out of range, or two contradict each other.
    """

    num_beams: int = 4
    length_penalty: float = 0.6
    length_penalty_kind: Literal["gnmt", "power", "none"] = "gnmt"
    early_stopping: bool | Literal["never"] = False
    max_new_tokens: int = 0
    max_len_ratio: float = 1.0
    max_len_offset: int = 50
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    num_return_sequences: int = 1
    banned_ids: tuple[int, ...] = ()
    forced_prefix_ids: tuple[int, ...] = ()
    forced_eos: bool = False
    well_formed: bool = True
    keep_words: bool = True
    renormalize_logits: bool = False
    rules: Literal["manyheads", "marian", "marian-5"] = "manyheads"
    max_tokens: int = 8192
    too_long: Literal["fail", "truncate"] = "fail"
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self, _RANGES)
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
                " returns at most num_beams hypotheses. Lower num_return_sequences (--nbest), raise num_beams (--beam),"
                " or turn do_sample on.",
                fields=("num_return_sequences", "num_beams", "do_sample"),
            )


class CommonOverrides(TypedDict, total=False):
    """The options of one call that `DecodingSettings` and `GenerationSettings` share."""

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    num_return_sequences: int
    banned_ids: tuple[int, ...]
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


def check_common(settings: Any, ranges: Mapping[str, Range]) -> None:
    """Check the options that `DecodingSettings` and `GenerationSettings` share, and the ranges of their own options.

    Raises: ConfigError: an option is out of range, or two contradict each other.
    """
    set_tuples(settings)
    for name, allowed in {**_COMMON_RANGES, **ranges}.items():
        check(settings, "", allowed, name)
    for name in ("banned_ids", "forced_prefix_ids"):
        count = len(getattr(settings, name, ()))
        if count > _MOST_IDS:
            raise ConfigError(f"{name} has {count:,} ids; at most {_MOST_IDS:,} are allowed.", fields=[name])
    if settings.max_new_tokens and settings.min_new_tokens > settings.max_new_tokens:
        raise ConfigError(
            f"min_new_tokens {settings.min_new_tokens} is above max_new_tokens {settings.max_new_tokens}.",
            fields=("min_new_tokens", "max_new_tokens"),
        )


def check_drawing(given: Mapping[str, Any], settings: Any) -> None:
    """Check that options of sampling can have an effect.

    Args: given: the options of a call, which were merged into the settings.

    Raises: ConfigError: one is given, but the settings do not sample.
    """
    idle = [name for name, neutral in _DRAWING.items() if given.get(name, neutral) != neutral]
    if idle and not settings.do_sample:
        raise ConfigError(
            f"{idle[0]} is {given[idle[0]]}, but do_sample is false, so it has no effect; set do_sample, or leave"
            f" {idle[0]} out.",
            fields=(idle[0], "do_sample"),
        )
