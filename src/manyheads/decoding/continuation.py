"""The results of text generation: continuations, and their tokens during generation."""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt.

    text: without the stop text and without the prompt. ids: all generated tokens, including the end of a document or
    of a stop text. log_probs: the model's log-probability of each token in nats, before temperature and penalties.
    ended_by: `end` of a document, `stop` text, or `length` limit.
    """

    text: str
    ids: list[int]
    log_probs: list[float]
    ended_by: Literal["end", "stop", "length"]


@dataclass(frozen=True)
class NewToken:
    """A token that was just generated.

    prompt, path: the row of the batch that it belongs to. text: the characters that can be shown now. id, log_prob: see
    `Continuation`. top: the most probable (id, log-probability) at this position, best first, if asked for. ended: the
    whole continuation, if this is its last token.
    """

    prompt: int
    path: int
    text: str
    id: int
    log_prob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    ended: Continuation | None = None


TextSteps = Generator[list[NewToken], Collection[int] | None, None]
"""A generation, a step at a time: it yields the new tokens of each step, none while prompts are read.

`send` takes prompts that are no longer needed: their rows are removed from the batch before the next step.
"""
