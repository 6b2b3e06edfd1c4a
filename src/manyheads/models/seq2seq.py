"""The composite for translation and similar tasks: a body of hidden states, and a head that predicts tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from manyheads.data.batch import PackedBatch, PairBatch
from manyheads.errors import RequestError, ShapeError
from manyheads.models.protocols import Output
from manyheads.nn.heads.linear import LinearHead, token_scores
from manyheads.nn.shapes import Float, Int
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
