"""The composite for language models: a body that reads segments, a head that names the token after each."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.architectures.protocols import LanguageBody, Output
from manyheads.data.segments import SegmentBatch
from manyheads.errors import ShapeError
from manyheads.nn.heads.adaptive import AdaptiveHead
from manyheads.nn.heads.linear import LinearHead

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A body with its output head: what is trained, saved, loaded, evaluated and generates.

        model = manyheads.load("models/novel")
        state = model.start(lanes)                       # nothing read yet; keys and values are kept
        log_probs, state = model.step(prompts, state)    # of the token after each prompt
        log_probs, state = model.step(chosen, state)     # at a cost that does not grow with what was read

    Args:
        body: a module that is a `protocols.LanguageBody`; it holds the embedding.
        head: has `log_probs(hidden)`, `loss(hidden, targets, keep)` and `token_losses(hidden, targets)`.
        config: the architecture's, kept for files.
    """

    def __init__(self, body: LanguageBody, head: LinearHead | AdaptiveHead, config: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.config = config
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make what the config shares one parameter (again: moving a model off the meta device takes ties apart)."""
        self.body.tie_weights()
        self.body.tie_head(self.head)

    def forward(
        self,
        batch: SegmentBatch,
        state: Any = None,
        *,
        label_smoothing: float = 0.0,
        chunk_tokens: int = 2048,
        num_sampled: int = 0,
    ) -> Output:
        """Loss of a segment of every lane, summed over targets that count, and the state for the next segment.

        Args:
            state: what came before, which is used up; lanes that `batch.resets` names forget it. None: nothing.
            label_smoothing, chunk_tokens, num_sampled: see the head's `loss`.
        """
        hidden, state = self._read(batch, state)
        loss_sum, nll_sum = self.head.loss(
            hidden,
            batch.targets,
            _counted(batch),
            label_smoothing=label_smoothing,
            chunk_tokens=chunk_tokens,
            num_sampled=num_sampled,
        )
        return Output(loss_sum=loss_sum, nll_sum=nll_sum, num_tokens=_counted(batch).sum(), state=state)

    def token_losses(self, batch: SegmentBatch, state: Any = None) -> tuple[Float[Tensor, "lanes len"], Any]:
        """Each target's own loss in nats, in the tokens' order, 0 where it does not count; and the next state."""
        hidden, state = self._read(batch, state)
        rows = _counted(batch).flatten().nonzero().squeeze(1)
        found = self.head.token_losses(hidden.flatten(0, 1)[rows], batch.targets.flatten()[rows])
        losses = found.new_zeros(batch.targets.numel()).index_copy(0, rows, found)
        return losses.view(batch.targets.shape), state

    def log_probs(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "lanes len vocab_size"]:
        """Log-probabilities of the token after each, in float32; see `read`."""
        return self.read(tokens, lengths, state, attention_mask=attention_mask)[0]

    def read(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> tuple[Float[Tensor, "lanes len vocab_size"], Any]:
        """Log-probabilities of the token after each, and the state for what comes next.

        Args:
            tokens: ids, padded.
            lengths: real tokens of each row, padding on the right; None: all are.
            state: what came before, which is used up; None: nothing.
            attention_mask: in place of lengths, 1 = real, 0 = padding, which may stand anywhere: on the left, too.

        What stands at padding has no place and no meaning. Raises: ShapeError: lengths and attention_mask together.
        """
        order = None
        if attention_mask is not None:
            if lengths is not None or attention_mask.shape != tokens.shape:
                raise ShapeError("give either lengths, or an attention_mask of the shape of tokens.")
            # What is real moves to the front, in order: neither memory nor distances know of padding.
            order = attention_mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
            tokens, lengths = tokens.gather(1, order), attention_mask.to(torch.bool).sum(dim=1)
        hidden, state = self.body(tokens, lengths, state)
        if order is not None:
            back = order.argsort(dim=1)
            hidden = hidden.gather(1, back[:, :, None].expand_as(hidden))
        return self.head.log_probs(hidden), state

    @property
    def max_len(self) -> int | None:
        """Longest sequence; None: there is no limit."""
        return self.body.max_len

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True, **options: Any) -> Any:
        """An empty state for `lanes` sequences; see the body's `start`, which may have further options."""
        return self.body.start(lanes, attending, projected=projected, **options)

    def step(
        self, tokens: Int[Tensor, "rows new_len"], state: Any, lengths: Int[Tensor, " rows"] | None = None
    ) -> tuple[Float[Tensor, "rows vocab_size"], Any]:
        """Append tokens to every row; see `protocols.Searchable.step`.

        Args: lengths: how many are real, padding on the right, as with prompts of different lengths; None: all are.

        Returns: log-probabilities of the token after each row's last real one, in float32, and the new state. A row
            with nothing new keeps its state, and what is said of it means nothing.
        """
        hidden, state = self.body(tokens, lengths, state)
        if lengths is None:
            return self.head.log_probs(hidden[:, -1]), state
        rows = torch.arange(len(tokens), device=tokens.device)
        return self.head.log_probs(hidden[rows, (lengths - 1).clamp(min=0)]), state

    @property
    def can_place(self) -> bool:
        """See `protocols.Placing`: not a Reformer's, whose hashing looks at numbers all the while."""
        return bool(getattr(self.body, "can_place", False))

    def place_step(self, tokens: Int[Tensor, "rows new_len"], state: Any) -> tuple[Any, Any] | None:
        """See `protocols.Placing`."""
        placed: tuple[Any, Any] | None = self.body.place_step(tokens, state)  # type: ignore[attr-defined]
        return placed

    def take_step(self, placed: Any) -> Float[Tensor, "rows vocab_size"]:
        """See `protocols.Placing`."""
        return self.head.log_probs(self.body.take_step(placed)[:, -1])  # type: ignore[attr-defined]

    def _read(self, batch: SegmentBatch, state: Any) -> tuple[Tensor, Any]:
        if state is not None and _any(batch.resets):
            state = state.reset(batch.resets)
        lengths = batch.lengths if _any(batch.lengths != batch.tokens.shape[1]) else None
        hidden, state = self.body(batch.tokens, lengths, state)
        return hidden, state


def _any(marks: Tensor) -> bool:
    """Whether one is True; yes, unseen, where the look would make a device or a compiler wait."""
    return marks.device.type != "cpu" or torch.compiler.is_compiling() or bool(marks.any())


def _counted(batch: SegmentBatch) -> Bool[Tensor, "lanes len"]:
    """Targets that count: neither padding nor context."""
    columns = torch.arange(batch.tokens.shape[1], device=batch.lengths.device)
    return (columns < batch.lengths[:, None]) & (columns >= batch.num_context)
