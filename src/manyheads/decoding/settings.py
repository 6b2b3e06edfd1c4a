"""Options of decoding, for `generation_config.json`, `translate` and validation; named as in `transformers`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyheads.errors import ConfigError

__all__ = ["DecodingSettings"]

MOST: dict[str, float] = {
    "num_beams": 1_000,
    "num_return_sequences": 10_000,
    "length_penalty": 100,
    "max_new_tokens": 100_000,
    "max_len_ratio": 1_000,
    "max_len_offset": 100_000,
    "min_new_tokens": 100_000,
    "no_repeat_ngram_size": 100_000,
    "temperature": 1e6,
    "repetition_penalty": 1e6,
    "max_tokens": 2**31,
}
MOST_IDS = 100_000


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How a translation is searched for.

    Args:
        num_beams: beam width; 1 is greedy search (or plain sampling with `do_sample`).
        length_penalty: exponent of the length penalty; 0 turns it off.
        length_penalty_kind: `gnmt`: ((5 + length) / 6) ** p (Wu et al. 2016, eq. 14); `power`: length ** p (fairseq's);
            `none`. The length counts the EOS token, not BOS.
        early_stopping: true: stop a sentence as soon as num_beams hypotheses have ended; false: go on until no
            running hypothesis can still beat the worst kept one, as far as the rules can tell; `never`: until none
            can for certain (our own rules are certain anyway).
        max_new_tokens: most target tokens, EOS included; 0 means `max_len_ratio` x source length + `max_len_offset`.
        max_len_ratio: see max_new_tokens.
        max_len_offset: see max_new_tokens.  (1.0 and 50 are the Transformer paper's, sec. 6.1.)
        min_new_tokens: EOS is banned before so many target tokens.
        do_sample: draw tokens instead of taking the best; needs num_beams = 1.
        temperature: divides the logits before sampling; > 0.
        top_k: sample among the k likeliest tokens only; 0 is all.
        top_p: sample among the likeliest tokens that hold this much probability; 1 is all.
        repetition_penalty: > 1 makes tokens that were produced before less likely (Keskar et al. 2019); 1 is off.
        no_repeat_ngram_size: no n-gram of this size occurs twice in an output; 0 is off.
        num_return_sequences: hypotheses returned for each input, best first.
        banned_ids: token ids never produced (pad and BOS never are).
        forced_prefix_ids: token ids that every output begins with, after BOS.
        forced_eos: the last token that the limit allows is EOS, at no cost; otherwise a hypothesis counts as cut there.
        well_formed: of parsers: never a token after which the output can no longer be a tree over exactly the words of
            the sentence (see `grammar.TreeGrammar`).
        renormalize_logits: what remains after bans and penalties is made probabilities again.
        rules: how beams are scored and stopped: `manyheads` (see `rules.BeamRules`), or as in `transformers`, for
            models from there: `marian` (4.35; see `marian.MarianRules`) or `marian-5` (5; see `marian.Marian5Rules`).
        max_tokens: a batch's budget in tokens (rows x beams x longest source).
        too_long: what happens to a source that is longer than the model or the budget allows (one sentence's
            beams must fit into max_tokens): fail, or truncate it (EOS is kept) with a warning.
        seed: of sampling.

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
    renormalize_logits: bool = False
    rules: Literal["manyheads", "marian", "marian-5"] = "manyheads"
    max_tokens: int = 8192
    too_long: Literal["fail", "truncate"] = "fail"
    seed: int = 0

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "num_beams": 1,
            "length_penalty": 0 if self.rules == "manyheads" else -math.inf,  # our own bound holds for p >= 0 only
            "max_new_tokens": 0,
            "max_len_ratio": 0,
            "max_len_offset": 0,
            "min_new_tokens": 0,
            "top_k": 0,
            "no_repeat_ngram_size": 0,
            "num_return_sequences": 1,
            "max_tokens": 1,
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {bound}.")
        for name, bound in MOST.items():  # a file may ask for anything; this is what could not be meant
            if not getattr(self, name) <= bound:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at most {bound:,}.")
        for name in ("banned_ids", "forced_prefix_ids"):
            if len(getattr(self, name)) > MOST_IDS:
                raise ConfigError(f"{name} has {len(getattr(self, name)):,} ids; there may be {MOST_IDS:,}.")
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be above 0 (for greedy search leave do_sample off)."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be in (0, 1].")
        if not self.repetition_penalty > 0:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is off).")
        if self.do_sample and self.num_beams > 1:
            raise ConfigError(f"do_sample with num_beams {self.num_beams}: sampling needs num_beams 1.")
        if not self.do_sample and self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences} but num_beams is {self.num_beams};"
                " a search returns at most num_beams hypotheses (or turn do_sample on)."
            )
        if self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}.")
