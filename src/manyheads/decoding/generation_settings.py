"""Options of generating text, for `generation_config.json` and `generate`; named as in `transformers`."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.errors import ConfigError

__all__ = ["GenerationSettings"]

_MOST: dict[str, float] = {
    "max_new_tokens": 10_000_000,
    "min_new_tokens": 10_000_000,
    "top_k": 10_000_000,
    "temperature": 1e6,
    "repetition_penalty": 1e6,
    "no_repeat_ngram_size": 100_000,
    "num_return_sequences": 10_000,
    "memory_len": 10_000_000,
    "max_rows": 100_000,
}
_MOST_STOPS, _MOST_STOP_BYTES, _MOST_IDS = 1_000, 10_000, 100_000


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How a text is continued.

    Args:
        max_new_tokens: most tokens after the prompt.
        min_new_tokens: the end of a document is banned before so many.
        do_sample: draw tokens; false takes the likeliest each time.
        temperature: divides the logits before sampling; > 0.
        top_k: sample among the k likeliest tokens only; 0 is all.
        top_p: sample among the likeliest tokens that hold this much probability; 1 is all.
        min_p: sample among tokens that are at least this share as likely as the likeliest; 0 is all.
        repetition_penalty: > 1 makes tokens that stand in the prompt or the continuation less likely; 1 is off.
        no_repeat_ngram_size: no n-gram of this size occurs twice, prompt included; 0 is off.
        stop: texts that end a continuation; they are not part of it.
        num_return_sequences: continuations of each prompt; more than one needs do_sample.
        banned_ids: token ids never produced.
        memory_len: positions a layer that stay in view, tokens; null takes the model's, or 512 for a model that was
            trained without memory. Of these, one with absolute positions reads its last memory_len tokens again for
            each new one; give it the segment_len of its training.
        max_rows: continuations that are written side by side.
        seed: of sampling; each prompt draws from a stream of its own.

    Raises: ConfigError: an option is out of range, or two contradict each other.
    """

    max_new_tokens: int = 200
    min_new_tokens: int = 0
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: tuple[str, ...] = ()
    num_return_sequences: int = 1
    banned_ids: tuple[int, ...] = ()
    memory_len: int | None = None
    max_rows: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 1, "num_return_sequences": 1, "max_rows": 1, "memory_len": 1}
        for name, most in _MOST.items():
            value, bound = getattr(self, name), least.get(name, 0)
            if value is not None and not bound <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from {bound} to {most:,.0f}.")
        for name in ("temperature", "repetition_penalty"):
            if not getattr(self, name) > 0:
                hint = " (for the likeliest tokens turn do_sample off)" if name == "temperature" else " (1 is off)"
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0{hint}.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be in (0, 1].")
        if not 0 <= self.min_p < 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be in [0, 1).")
        if self.num_return_sequences > 1 and not self.do_sample:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences} but do_sample is false, so all would be the same;"
                " turn do_sample on, or ask for one."
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}.")
        if "" in self.stop:
            raise ConfigError("stop holds an empty text, which would end every continuation at once; leave it out.")
        if len(self.stop) > _MOST_STOPS or any(len(text) > _MOST_STOP_BYTES for text in self.stop):
            raise ConfigError(
                f"stop may hold {_MOST_STOPS:,} texts of {_MOST_STOP_BYTES:,} characters; it has {len(self.stop):,},"
                f" the longest of {max(map(len, self.stop)):,}."
            )
        if len(self.banned_ids) > _MOST_IDS:
            raise ConfigError(f"banned_ids has {len(self.banned_ids):,} ids; there may be {_MOST_IDS:,}.")
