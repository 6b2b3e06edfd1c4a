"""Options of text generation, for `generation_config.json` and `generate`; the names follow `transformers`."""

from __future__ import annotations

from dataclasses import dataclass

from manyheads.config.checks import BELOW_ONE, between
from manyheads.decoding.settings import CommonOverrides, check_common
from manyheads.errors import ConfigError

__all__ = ["GenerationOverrides", "GenerationSettings"]

_RANGES = {
    "max_new_tokens": between(1, 10_000_000),
    "min_new_tokens": between(0, 10_000_000),
    "top_k": between(0, 10_000_000),
    "min_p": BELOW_ONE,
    "memory_len": between(1, 10_000_000),
    "max_rows": between(1, 100_000),
}
_MOST_STOPS, _MOST_STOP_BYTES = 1_000, 10_000


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Options of text generation.

    Args:
        max_new_tokens: maximum number of tokens after the prompt.
        min_new_tokens: minimum number of tokens; before it a document does not end, and a stop text that ends among
            these tokens does not count.
        do_sample: sample tokens; false takes the most probable token each time.
        temperature: divides the logits before sampling; > 0.
        top_k: sample only from the k most probable tokens; 0 means all.
        top_p: sample only from the most probable tokens that together have this probability; 1 means all.
        min_p: sample only from tokens with at least this fraction of the highest probability; 0 means all.
        repetition_penalty: > 1 makes tokens in the prompt and the continuation less probable: positive logits are
            divided by it, negative ones multiplied, as in transformers and vLLM; 1 is off.
        no_repeat_ngram_size: no n-gram of this size occurs twice, prompt included, while another token is left; 0 is
            off.
        stop: texts that end a continuation, after min_new_tokens; they are not part of it.
        num_return_sequences: continuations of each prompt; more than one needs do_sample.
        banned_ids: token ids that are never produced.
        memory_len: positions per layer that attention can reach, in tokens; null: the model's, or 512 for a model
            trained without memory. A model with absolute positions processes its last memory_len tokens again for
            each new token; set it to the segment_len of its training.
        max_rows: number of continuations that are generated in parallel.
        seed: seed of sampling; each prompt has its own random stream.

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
        check_common(self, _RANGES)
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


class GenerationOverrides(CommonOverrides, total=False):
    """The options of `GenerationSettings` as named arguments of one call; those left out keep their values."""

    min_p: float
    stop: tuple[str, ...]
    memory_len: int | None
    max_rows: int
