"""How a text is read while it is scored: the part of an evaluation's protocol that changes its figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from manyheads.errors import ConfigError

__all__ = ["Reading"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a text is read while it is scored.

    Args:
        segment_len: tokens of a lane at a time.
        memory_len: positions a layer that are remembered from earlier segments; null takes the model's.
        clamp_len: whatever is farther away counts as so far; null takes the model's, 0 has no limit.
        same_length: every token sees memory_len positions and no more; null takes the model's.
        lanes: places of the text that are read at once; each but the first begins without memory.
        documents: `joined`: memory goes on from document to document; `separate`: each begins anew.
        max_tokens: score the first so many tokens only; 0 scores all.

    Raises: ConfigError: a number is out of range.
    """

    segment_len: int = 128
    memory_len: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None
    lanes: int = 8
    documents: Literal["joined", "separate"] = "joined"
    max_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("segment_len", 1), ("memory_len", 0), ("clamp_len", 0), ("lanes", 1), ("max_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}.")

    def attending(self, config: Any) -> Any:
        """The model's way of looking back, with what is set here in place of its own; None: it sees its segment alone.

        Args: config: the architecture's.

        Raises: ConfigError: memory is asked of a model that has none.
        """
        own = getattr(config, "attending", None)
        if own is None:
            asked = {"memory_len": self.memory_len, "clamp_len": self.clamp_len, "same_length": self.same_length}
            name = next((name for name, value in asked.items() if value), None)
            if name is not None:
                raise ConfigError(
                    f"{name} is {asked[name]}, but a {config.architecture} remembers nothing of earlier segments; leave"
                    " it out, and raise segment_len to let it see more."
                )
            return None
        changes: dict[str, Any] = {"ext_len": 0}
        if self.memory_len is not None:
            changes["memory_len"] = self.memory_len
        if self.clamp_len is not None:
            changes["clamp_len"] = self.clamp_len or None
        if self.same_length is not None:
            changes["same_length"] = self.same_length
        return type(own)(**{name: changes.get(name, getattr(own, name)) for name in own.__dataclass_fields__})
