"""The composite for classification: an encoder, one vector for a whole text, and a head that chooses its label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.architectures.encoders import EncoderEnsemble, EncoderWithHead
from manyheads.architectures.ensemble import mean_log_probs
from manyheads.architectures.protocols import Output
from manyheads.architectures.size_checks import check_vocabularies
from manyheads.errors import ConfigError
from manyheads.extras.classification.labelled_store import LabelledBatch
from manyheads.extras.classification.pooling import TextPooling
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.shapes import Float, Int

__all__ = ["ClassifierEnsemble", "SequenceClassifier", "build_classifier_of"]


class SequenceClassifier(EncoderWithHead):
    """An encoder with pooling and its class head.

        model = manyheads.load("models/genres")
        log_probs = model.log_probs(tokens, lengths)     # (batch, labels), in the order of model.config.labels

    Args:
        body: a module: (tokens, lengths) -> hidden states. It reads no padding.
        pooling: makes one vector of the states of a text.
        head: with a row of weights for each label.
        config: the architecture's, stored for files; it contains the labels.
    """

    head: LinearHead

    def __init__(self, body: nn.Module, pooling: TextPooling, head: LinearHead, config: Any) -> None:
        super().__init__(body, head, config)
        self.pooling = pooling

    def card_text(self) -> str:
        """See `Composite.card_text`."""
        return f"Its labels: {', '.join(self.config.labels)}.\n\n"

    def forward(
        self, batch: LabelledBatch, state: Any = None, *, label_smoothing: float = 0.0, chunk_tokens: int = 2048
    ) -> Output:
        """Return the loss of a batch, summed over its texts; num_tokens is the number of texts.

        Args: state, chunk_tokens: not used, as there is no memory, and a text has one row of logits.
        """
        keep = torch.ones_like(batch.labels, dtype=torch.bool)
        vectors = self._vectors(batch.tokens, batch.lengths)
        loss_sum, nll_sum = self.head.loss(vectors, batch.labels, keep, label_smoothing=label_smoothing)
        return Output(loss_sum=loss_sum, nll_sum=nll_sum, num_tokens=keep.sum())

    def log_probs(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch num_labels"]:
        """Return log-probabilities of the labels in float32.

        Args:
            tokens: ids, EOS last, padded on the right.
            lengths: number of real ids of each row, at least 1; None: all are real.
        """
        if lengths is None:
            lengths = torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
        return self.head.log_probs(self._vectors(tokens, lengths))

    def _vectors(self, tokens: Tensor, lengths: Tensor) -> Float[Tensor, "batch width"]:
        vectors: Tensor = self.pooling(self.body(tokens, lengths), lengths)
        return vectors


class ClassifierEnsemble(EncoderEnsemble):
    """Classifiers of the same labels.

        model = ClassifierEnsemble([manyheads.load("models/a"), manyheads.load("models/b")])
        log_probs = model.log_probs(tokens, lengths)

    P(label | text) = 1/n sum over models of P_i(label | text)
    """

    names = ("labels",)

    def log_probs(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch num_labels"]:
        """See `SequenceClassifier.log_probs`."""
        return mean_log_probs([model.log_probs(tokens, lengths) for model in self.models])


def build_classifier_of(encoder: Callable[[Any], nn.Module], config: Any, width: int) -> SequenceClassifier:
    """Return body and head, with random weights. encoder: makes the body of a config. width: of its states.

    Raises: ConfigError: the vocabulary size or the labels are missing.
    """
    check_vocabularies(config, "vocab_size")
    if len(config.labels) < 2:
        raise ConfigError(f"model.labels has {len(config.labels)} labels; a classifier chooses among at least 2.")
    head = LinearHead(width, len(config.labels), bias=True)
    return SequenceClassifier(encoder(config), TextPooling(config.pooling, config.dropout), head, config)
