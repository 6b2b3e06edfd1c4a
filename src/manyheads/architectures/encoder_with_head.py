"""The common part of the composites that read a whole text at once and predict something about it."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["EncoderWithHead"]


class EncoderWithHead(nn.Module):
    """An encoder and its head, the object that is trained, saved, loaded and evaluated."""

    def __init__(self, body: nn.Module, head: nn.Module, config: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.config = config

    def tie_weights(self) -> None:
        """Do nothing: no parameters are shared."""

    @property
    def max_len(self) -> int | None:
        """Maximum length of a text; see the config's `longest_input`."""
        longest: int | None = self.config.longest_input
        return longest
