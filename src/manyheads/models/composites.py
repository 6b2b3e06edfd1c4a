"""The composites: a body of hidden states and a head that predicts tokens, of pairs (`Seq2Seq`) or of the segments of a
text (`LanguageModel`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from manyheads.data.batch import PackedBatch, PairBatch, SegmentBatch
from manyheads.errors import RequestError, ShapeError
from manyheads.models.protocols import LanguageBody, Output
from manyheads.nn.heads.linear import LinearHead, token_scores
from manyheads.nn.kernels import policy

if TYPE_CHECKING:
    from manyheads.nn.heads.adaptive import AdaptiveHead
    from manyheads.nn.shapes import Bool, Float, Int
    from manyheads.nn.smoothing import SmoothingKind


class Seq2Seq(nn.Module):
    """An encoder-decoder with its output head, the object that is trained, saved, loaded and searched.

    Args:
        body: has `encode(source, source_lengths)`, `decode(target, memory, source_lengths)`, `start` and `step`.
        head: has `log_probs(hidden)`, `logits(hidden)` and `loss(hidden, targets, keep)`.
        config: stored for files; the head shares the target table if `config.tie_embeddings` is `all` or `decoder`.

    Attributes: data_notice: what the card of its folder says about data and licence (see `pretrained.load`).
    """

    data_notice = ""

    def __init__(self, body: Any, head: LinearHead, config: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.config = config
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the parameters that the config shares. Needed again after moving a model off the meta device."""
        self.body.tie_weights()
        if self.config.tie_embeddings in ("all", "decoder"):
            self.head.weight = cast(nn.Parameter, self.body.target_embedding.weight)

    def card_text(self) -> str:
        return ""

    def forward(
        self,
        source: PairBatch | PackedBatch | Tensor,
        target: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        smoothing_kind: SmoothingKind = "all",
        chunk_tokens: int = 2048,
        num_sampled: int = 0,
    ) -> Output:
        """Return the loss of a batch with teacher forcing, summed over target tokens (with EOS, without BOS and
        padding).

            out = model(source, target)
            (out.loss_sum / out.num_tokens).backward()

        Args:
            source: a batch, or its source ids: each row ends in EOS, then padding (0), as `PairBatch` says.
            target: its target ids: each row begins with BOS and ends in EOS, then padding; None with a batch.
            label_smoothing, smoothing_kind, chunk_tokens: see the head's `loss`.
            num_sampled: so many candidates replace the vocabulary: see `nn.heads.linear`.

        Raises: ShapeError: see `PairBatch.of`; or there is a source without a target. RequestError: the model cannot
            compute packed batches.
        """
        if isinstance(source, Tensor):
            if target is None:
                raise ShapeError("a source needs a target, from which the loss is computed: model(source, target).")
            source = PairBatch.of(source, target)
        batch = source
        labels = batch.target_labels
        if isinstance(batch, PackedBatch):
            if not hasattr(self.body, "forward_packed"):
                raise RequestError(f"a {type(self.body).__name__} cannot compute packed batches; give padded ones.")
            hidden, keep = self.body.forward_packed(batch), batch.keep
        else:
            hidden = self.body(batch.source, batch.source_lengths, batch.target_input)
            steps = torch.arange(labels.shape[1], device=labels.device)
            keep = steps[None, :] < batch.target_lengths[:, None] - 1
        loss_sum, nll_sum = self.head.loss(
            hidden,
            labels,
            keep,
            label_smoothing=label_smoothing,
            smoothing_kind=smoothing_kind,
            pad_id=batch.pad_id,
            chunk_tokens=chunk_tokens,
            num_sampled=num_sampled,
        )
        return Output(loss_sum=loss_sum, nll_sum=nll_sum, num_tokens=keep.sum(), state=None)

    def log_probs(
        self,
        source: Int[Tensor, "batch source_len"],
        source_lengths: Int[Tensor, " batch"],
        target: Int[Tensor, "batch len"],
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return log-probabilities of the token after each target position, with teacher forcing."""
        log_probs: Tensor = self.head.log_probs(self.body(source, source_lengths, target))
        return log_probs

    @property
    def max_len(self) -> int | None:
        longest: int | None = self.config.longest_input
        return longest

    def start(self, source: Tensor, source_lengths: Tensor) -> Any:
        return self.body.start(source, source_lengths)

    def step(self, tokens: Tensor, state: Any, *, logits: bool = False) -> tuple[Tensor, Any]:
        hidden, state = self.body.step(tokens, state)
        return token_scores(self.head, hidden[:, -1], logits), state

    def restricted(self, ids: Int[Tensor, " count"]) -> RestrictedSeq2Seq:
        return RestrictedSeq2Seq(self, ids)

    @property
    def prepares_steps(self) -> bool:
        """See `protocols.PreparesSteps`: all but the Reformer, whose hashing depends on numbers."""
        return hasattr(self.body, "prepare_step")

    def prepare_step(self, tokens: Tensor, state: Any) -> tuple[Any, Any]:
        return cast(tuple[Any, Any], self.body.prepare_step(tokens, state))

    def compute_step(self, step: Any, logits: bool = False) -> Tensor:
        return token_scores(self.head, self.body.compute_step(step)[:, -1], logits)


class RestrictedSeq2Seq:
    """A composite whose target vocabulary is a part of the real one, for one search; see `protocols.Restrictable`.

    Args:
        model: the whole composite, whose body is used.
        ids: the real ids; target id i is ids[i] here. (count,)
    """

    def __init__(self, model: Seq2Seq, ids: Int[Tensor, " count"]) -> None:
        self._model, self._ids, self._head = model, ids, model.head.restricted(ids)

    @property
    def max_len(self) -> int | None:
        return self._model.max_len

    def start(self, source: Tensor, source_lengths: Tensor) -> Any:
        """See `protocols.Searchable.start`. source: real ids."""
        return self._model.start(source, source_lengths)

    def step(self, tokens: Tensor, state: Any, *, logits: bool = False) -> tuple[Tensor, Any]:
        """See `protocols.Searchable.step`. tokens: as numbered here; so are the columns of the result."""
        hidden, state = self._model.body.step(self._ids[tokens], state)
        return token_scores(self._head, hidden[:, -1], logits), state


class LanguageModel(nn.Module):
    """A body with its output head, the object that is trained, saved, loaded, evaluated and used for generation.

        model = manyheads.load("models/novel")
        state = model.start(lanes)                       # an empty state; keys and values will be stored
        log_probs, state = model.step(prompts, state)    # of the token after each prompt
        log_probs, state = model.step(chosen, state)     # at a constant cost per token

    Args:
        body: a module that is a `protocols.LanguageBody`; it contains the embedding.
        head: has `log_probs(hidden)`, `logits(hidden)`, `loss(hidden, targets, keep)` and `token_losses(hidden,
            targets)`.
        config: the architecture's, stored for files.

    Attributes: data_notice: what the card of its folder says about data and licence (see `pretrained.load`).
    """

    data_notice = ""

    def __init__(self, body: LanguageBody, head: LinearHead | AdaptiveHead, config: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.config = config
        self.tie_weights()

    def tie_weights(self) -> None:
        """Tie the parameters that the config shares. Needed again after moving a model off the meta device."""
        self.body.tie_weights()
        self.body.tie_head(self.head)

    def card_text(self) -> str:
        return ""

    def forward(
        self,
        batch: SegmentBatch | Tensor,
        state: Any = None,
        *,
        label_smoothing: float = 0.0,
        chunk_tokens: int = 2048,
        num_sampled: int = 0,
    ) -> Output:
        """Return the loss of a segment of every lane, summed over scored targets, and the state for the next segment.

            out = model(ids)
            (out.loss_sum / out.num_tokens).backward()

        Args:
            batch: a segment, or ids (lanes, length), of which each is predicted from those before it.
            state: the state after the previous segment, which is consumed; lanes in `batch.resets` are reset. None:
                empty.
            label_smoothing, chunk_tokens, num_sampled: see the head's `loss`.
        """
        if isinstance(batch, Tensor):
            batch = SegmentBatch.of(batch)
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
        """Return each target's loss in nats, in the tokens' order, 0 where it is not scored; and the next state."""
        hidden, state = self._read(batch, state)
        rows = _counted(batch).flatten().nonzero().squeeze(1)
        found = self.head.token_losses(hidden.flatten(0, 1)[rows], batch.targets.flatten()[rows])
        losses = found.new_zeros(batch.targets.numel()).index_copy(0, rows, found)
        return losses.view(batch.targets.shape), state

    def losses_at(
        self,
        tokens: Int[Tensor, "lanes len"],
        columns: Int[Tensor, " places"],
        targets: Int[Tensor, "lanes places"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: Any = None,
    ) -> Float[Tensor, "lanes places"]:
        """Return the losses in nats of the tokens that follow some columns; undefined where a column is padding.

        Args: columns: of the last token read before each target. lengths, state: see `read`.
        """
        hidden, _ = self.body(tokens, lengths, state)
        return self.head.token_losses(hidden[:, columns].flatten(0, 1), targets.flatten()).view(targets.shape)

    def log_probs(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "lanes len vocab_size"]:
        """Return log-probabilities of the token after each, in float32; see `read`."""
        return self.read(tokens, lengths, state, attention_mask=attention_mask)[0]

    def read(
        self,
        tokens: Int[Tensor, "lanes len"],
        lengths: Int[Tensor, " lanes"] | None = None,
        state: Any = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> tuple[Float[Tensor, "lanes len vocab_size"], Any]:
        """Return log-probabilities of the token after each, and the next state.

        Args:
            tokens: ids, padded.
            lengths: real tokens of each row, padding on the right; None: all are real.
            state: the previous state, which is consumed; None: empty.
            attention_mask: instead of lengths, 1 = real, 0 = padding, at any position, also on the left.

        Results at padding are undefined. Raises: ShapeError: lengths and attention_mask are both given.
        """
        order = None
        if attention_mask is not None:
            if lengths is not None or attention_mask.shape != tokens.shape:
                raise ShapeError("give either lengths, or an attention_mask of the shape of tokens.")
            # Move real tokens to the front, in order, because memory and distances do not skip padding.
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
        """Return an empty state for `lanes` sequences; see the body's `start`, which may have further options."""
        return self.body.start(lanes, attending, projected=projected, **options)

    def step(
        self,
        tokens: Int[Tensor, "rows new_len"],
        state: Any,
        lengths: Int[Tensor, " rows"] | None = None,
        *,
        logits: bool = False,
    ) -> tuple[Float[Tensor, "rows vocab_size"], Any]:
        """Append tokens to every row; see `protocols.Searchable.step`.

        Args: lengths: number of real tokens, padding on the right, as for prompts of different lengths; None: all are
            real.

        Returns: log-probabilities of the token after each row's last real one, in float32, and the new state; with
            `logits` the values before the softmax. A row without new tokens keeps its state, and its values are
            undefined.
        """
        hidden, state = self.body(tokens, lengths, state)
        if lengths is None:
            return token_scores(self.head, hidden[:, -1], logits), state
        rows = torch.arange(len(tokens), device=tokens.device)
        return token_scores(self.head, hidden[rows, (lengths - 1).clamp(min=0)], logits), state

    @property
    def prepares_steps(self) -> bool:
        """See `protocols.PreparesSteps`: not the Reformer, whose hashing depends on numbers."""
        return bool(getattr(self.body, "prepares_steps", False))

    def prepare_step(self, tokens: Int[Tensor, "rows new_len"], state: Any) -> tuple[Any, Any]:
        return cast(tuple[Any, Any], self.body.prepare_step(tokens, state))  # type: ignore[attr-defined]

    def compute_step(self, step: Any, logits: bool = False) -> Float[Tensor, "rows vocab_size"]:
        return token_scores(self.head, self.body.compute_step(step)[:, -1], logits)  # type: ignore[attr-defined]

    def _read(self, batch: SegmentBatch, state: Any) -> tuple[Tensor, Any]:
        # Not every body has these, so they are given only where they are set.
        given = {"first_positions": batch.first_positions, "memory_len": batch.memory_len}
        options = {name: value for name, value in given.items() if value is not None}
        if state is not None and _any(batch.resets):
            state = state.reset(batch.resets)
        lengths = batch.lengths if _any(batch.lengths != batch.tokens.shape[1]) else None
        hidden, state = self.body(batch.tokens, lengths, state, **options)
        return hidden, state


def check_lanes(count: int, lanes: int, what: str) -> None:
    """Raises: ShapeError: there are other than `lanes` rows of tokens. Args: what: has the lanes, in the message."""
    if count != lanes:
        raise ShapeError(
            f"{count} rows of tokens do not fit a {what} of {lanes} lanes; start a new one, or reorder it."
        )


def check_marks(marks: Tensor, lanes: int) -> None:
    """Raises: ShapeError: there is not one mark per lane."""
    if marks.shape != (lanes,):
        raise ShapeError(f"{tuple(marks.shape)} marks do not fit {lanes} lanes; give one mark per lane.")


def check_evaluates(body: nn.Module, what: str) -> None:
    """Raises: RequestError: gradients would be needed. Args: what: has none, in the message."""
    if body.training or torch.is_grad_enabled():
        raise RequestError(
            f"{what} has no gradient, so it serves evaluation only; use model.eval() and torch.no_grad(), or"
            " start(..., projected=False)."
        )


def _any(marks: Tensor) -> bool:
    """Return whether one is True; also True without reading them, if reading would make a device or a compiler wait."""
    return not policy.can_look(marks) or bool(marks.any())


def _counted(batch: SegmentBatch) -> Bool[Tensor, "lanes len"]:
    """Return which targets are scored: neither padding nor context."""
    columns = torch.arange(batch.tokens.shape[1], device=batch.lengths.device)
    return (columns < batch.lengths[:, None]) & (columns >= batch.num_context)
