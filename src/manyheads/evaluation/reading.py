"""Settings of the evaluation of a text that change its score; perplexity, also of a loss so large that it overflows.

Imports no sacreBLEU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from manyheads.config.checks import at_least, check
from manyheads.errors import ConfigError

BleuTokenizer = Literal[
    "auto", "13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab", "spm", "flores101", "flores200"
]
"""sacreBLEU's tokenizers; `auto` is the one of the target language, or else of the script of the references."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings of the evaluation of a text.

    Args:
        segment_len: tokens per lane and segment.
        memory_len: positions per layer in memory from earlier segments; null: the model's.
        ext_len: tokens before each segment that are read again as context; they enter memory one segment later.
        clamp_len: larger distances count as this distance; null: the model's, 0: no limit.
        same_length: every token attends to exactly memory_len positions; null: the model's.
        lanes: number of parts of the text that are read in parallel; all but the first begin without memory.
        documents: `joined`: memory continues across documents; `separate`: each document begins without memory.
        max_tokens: score only this many tokens from the start; 0 scores all.

    Raises: ConfigError: a number is out of range.
    """

    segment_len: int = 128
    memory_len: int | None = None
    ext_len: int = 0
    clamp_len: int | None = None
    same_length: bool | None = None
    lanes: int = 8
    documents: Literal["joined", "separate"] = "joined"
    max_tokens: int = 0

    def __post_init__(self) -> None:
        check(self, "", at_least(1), "segment_len", "lanes")
        check(self, "", at_least(0), "memory_len", "ext_len", "clamp_len", "max_tokens")
        if self.ext_len and self.documents == "separate":
            raise ConfigError(
                f"ext_len is {self.ext_len}, and documents are separate, so a segment has nothing before it to read"
                " again; set ext_len to 0, or documents to 'joined'.",
                fields=("ext_len", "documents"),
            )

    def attending(self, config: Any) -> Any:
        """Return the model's context settings with these values instead of its own; None: it attends to its segment
        only.

        Args: config: the architecture's.

        Raises: ConfigError: memory is set for a model without memory.
        """
        own = getattr(config, "attending", None)
        if own is None:
            names = ("memory_len", "ext_len", "clamp_len", "same_length")
            asked = {name: getattr(self, name) for name in names}
            name = next((name for name, value in asked.items() if value), None)
            if name is not None:
                raise ConfigError(
                    f"{name} is {asked[name]}, but a {config.architecture} has no memory of earlier segments; leave"
                    " it out, and raise segment_len for more context."
                )
            return None
        changes: dict[str, Any] = {"ext_len": self.ext_len}
        if self.memory_len is not None:
            changes["memory_len"] = self.memory_len
        if self.clamp_len is not None:
            changes["clamp_len"] = self.clamp_len or None
        if self.same_length is not None:
            changes["same_length"] = self.same_length
        return type(own)(**{name: changes.get(name, getattr(own, name)) for name in own.__dataclass_fields__})


def perplexity_of(nats_per_token: float) -> float:
    """Return exp of a mean loss; infinite if it overflows."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf


def show_perplexity(value: float, digits: int = 2) -> str:
    """Return a perplexity as text: with decimal places below a million, then as a power of ten, then `inf`."""
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.2e}"
