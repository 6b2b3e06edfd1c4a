"""The composite for translation and its like: a body that reads and writes hidden states, a head that names words."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.architectures.protocols import Output
from manyheads.architectures.reformer.config import ReformerSeq2SeqConfig
from manyheads.architectures.reformer.translator import ReformerTranslator
from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer.model import Transformer
from manyheads.data.batch import PairBatch
from manyheads.nn.heads.linear import LinearHead

__all__ = ["Seq2Seq"]


class Seq2Seq(nn.Module):
    """An encoder-decoder with its output head: what is trained, saved, loaded and searched.

    Args:
        body: has `encode(source, source_lengths)`, `decode(target, memory, source_lengths)`, `start` and `step`.
        head: has `log_probs(hidden)` and `loss(hidden, targets, keep)`.
        config: kept for files; the head shares the target table if `config.tie_embeddings` is `all` or `decoder`.
    """

    def __init__(
        self,
        body: Transformer | ReformerTranslator,
        head: LinearHead,
        config: TransformerConfig | ReformerSeq2SeqConfig,
    ) -> None:
        super().__init__()
        self.body: Any = body
        self.head = head
        self.config: Any = config
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make what the config shares one parameter (again: moving a model off the meta device takes ties apart)."""
        self.body.tie_weights()
        if self.config.tie_embeddings in ("all", "decoder"):
            self.head.weight = cast(nn.Parameter, self.body.target_embedding.weight)

    def forward(
        self,
        batch: PairBatch,
        state: Any = None,
        *,
        label_smoothing: float = 0.0,
        chunk_tokens: int = 2048,
        r_drop: float = 0.0,
        num_sampled: int = 0,
    ) -> Output:
        """Loss of a batch under teacher forcing, summed over target tokens (EOS counted, BOS and padding not).

        With `r_drop` every pair is read twice, under different dropout, and disagreement costs: see
        `nn.heads.consistency`. With `num_sampled` candidates stand for the vocabulary: see `nn.heads.sampled`.
        """
        again = None
        if r_drop:
            both = batch.twice()
            hidden, again = self.body(both.source, both.source_lengths, both.target_input).chunk(2)
        else:
            hidden = self.body(batch.source, batch.source_lengths, batch.target_input)
        labels = batch.target_labels
        steps = torch.arange(labels.shape[1], device=labels.device)
        keep = steps[None, :] < batch.target_lengths[:, None] - 1
        loss_sum, nll_sum = self.head.loss(
            hidden,
            labels,
            keep,
            label_smoothing=label_smoothing,
            chunk_tokens=chunk_tokens,
            again=again,
            r_drop=r_drop,
            num_sampled=num_sampled,
        )
        return Output(loss_sum=loss_sum, nll_sum=nll_sum, num_tokens=keep.sum(), state=None)

    def log_probs(
        self,
        source: Int[Tensor, "batch source_len"],
        source_lengths: Int[Tensor, " batch"],
        target: Int[Tensor, "batch len"],
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Log-probabilities of the token after each target position, under teacher forcing."""
        log_probs: Tensor = self.head.log_probs(self.body(source, source_lengths, target))
        return log_probs

    @property
    def max_len(self) -> int | None:
        """See `protocols.Searchable.max_len`: the size of the table of learned positions."""
        return self.config.max_len if self.config.positions == "learned" else None

    def start(self, source: Tensor, source_lengths: Tensor) -> Any:
        """See `protocols.Searchable.start`."""
        return self.body.start(source, source_lengths)

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """See `protocols.Searchable.step`."""
        hidden, state = self.body.step(tokens, state)
        return self.head.log_probs(hidden[:, -1]), state

    @property
    def can_place(self) -> bool:
        """See `protocols.Placing`: not a Reformer's, whose hashing looks at numbers all the while."""
        return hasattr(self.body, "place_step")

    def place_step(self, tokens: Tensor, state: Any) -> tuple[Any, Any] | None:
        """See `protocols.Placing`."""
        placed: tuple[Any, Any] | None = self.body.place_step(tokens, state)
        return placed

    def take_step(self, placed: Any) -> Tensor:
        """See `protocols.Placing`."""
        return self.head.log_probs(self.body.take_step(placed)[:, -1])
