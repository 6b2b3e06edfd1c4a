"""The composite for chart parsing: an encoder of words, and a head that scores spans and tags."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.architectures.encoders import EncoderEnsemble, EncoderWithHead
from manyheads.architectures.protocols import Output
from manyheads.architectures.size_checks import check_vocabularies
from manyheads.errors import ConfigError
from manyheads.extras.parsing.chart import span_probabilities
from manyheads.extras.parsing.span_head import SpanHead, span_places
from manyheads.extras.parsing.span_store import SpanBatch
from manyheads.extras.parsing.transformer_config import TransformerSpanParserConfig
from manyheads.nn.shapes import Float, Int

__all__ = ["Charts", "SpanParser", "SpanParserEnsemble", "SpanProbabilities", "charts_of", "check_labels_and_tags"]


LEAST_PROBABILITY = 0.45
"""Minimum probability of a constituent in a tree.

A lower value gives more constituents, both correct and wrong ones.
"""


class SpanProbabilities(NamedTuple):
    """Probabilities of the constituents and tags of a sentence. Values at padding are undefined.

    constituents: `constituents[b, s, l - 1]`, the probability that span s (see `span_places`) is a constituent with
        label l; labels count from 1, as 0 is `no constituent`.
    tags: of each word.
    """

    constituents: Float[Tensor, "batch spans num_labels"]
    tags: Float[Tensor, "batch words num_tags"]


class Charts(NamedTuple):
    """The input of the search for the best tree.

    scores: `scores[b, i, j]`, the probability of the best label of words i to j, both included, less LEAST_PROBABILITY;
        0 if it is smaller. The best tree has the most constituents that are expected to be right, less those expected
        to be wrong (Goodman 1996, cmp-lg/9605036).
    labels: its id; 0: no constituent. tags: the best tag of each word.
    """

    scores: Float[Tensor, "batch words words"]
    labels: Int[Tensor, "batch words words"]
    tags: Int[Tensor, "batch words"]


class SpanParser(EncoderWithHead):
    """An encoder and its head for spans.

    Args:
        body: a module: (pieces, affixes, lengths) -> states of begin, words and end. It reads no padding.
        head: of spans and tags.
        config: the architecture's, stored for files; it contains labels and tags.
    """

    head: SpanHead

    def forward(
        self, batch: SpanBatch, state: Any = None, *, label_smoothing: float = 0.0, chunk_tokens: int = 2048
    ) -> Output:
        """Return the loss of a batch, summed over its sentences; num_tokens is the number of words.

        The loss is the negative log-likelihood of the trees, and, times `config.tag_weight`, of the tags.

        Args: label_smoothing: of tags; state, chunk_tokens: not used, as there is no memory and no large vocabulary.
        """
        states = self.body(batch.pieces, batch.affixes, batch.lengths)
        right = batch.labels, batch.tags, batch.lengths
        spans, tags = self.head.losses(states, *right, label_smoothing=label_smoothing)
        loss = nll = spans + self.config.tag_weight * tags
        if label_smoothing:
            with torch.no_grad():
                spans, tags = self.head.losses(states, *right)
                nll = spans + self.config.tag_weight * tags
        return Output(loss_sum=loss, nll_sum=nll.detach(), num_tokens=batch.lengths.sum())

    def log_probs(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch spans num_labels"]:
        """Return log-probabilities of the labels of each span, given that it is in the binary tree; the first label is
        `no constituent`. For the order of spans see `span_places`.
        """
        logits = self.head.span_logits(self.body(pieces, affixes, lengths))
        return F.pad(logits, (1, 0)).log_softmax(dim=2, dtype=torch.promote_types(logits.dtype, torch.float32))

    def probabilities(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> SpanProbabilities:
        """Return the probabilities of all constituents and tags, in float32 or float64. See `SpanBatch`."""
        states = self.body(pieces, affixes, lengths)
        logits = self.head.span_logits(states)
        logits = F.pad(logits.to(torch.promote_types(logits.dtype, torch.float32)), (1, 0))
        rows, num_words = pieces.shape[:2]
        first, last = span_places(num_words, pieces.device)
        sums = logits.new_zeros(rows, num_words, num_words)
        sums[:, first, last] = logits.logsumexp(dim=2)
        of_spans = span_probabilities(sums, lengths)[:, first, last]
        of_labels = logits.softmax(dim=2)[:, :, 1:]
        return SpanProbabilities(
            of_labels * of_spans[:, :, None], self.head.tag_logits(states).softmax(-1, logits.dtype)
        )

    def charts(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> Charts:
        """Return the best label of each span and the best tag of each word; padding is undefined. See `SpanBatch`."""
        return charts_of(self.probabilities(pieces, affixes, lengths))

    def tree_log_prob(self, batch: SpanBatch) -> Float[Tensor, ""]:
        """Return the log-probability of a batch's only tree, as one of its binary forms, and of its tags."""
        states = self.body(batch.pieces, batch.affixes, batch.lengths)
        spans, tags = self.head.losses(states, batch.labels, batch.tags, batch.lengths)
        return -spans - tags


class SpanParserEnsemble(EncoderEnsemble):
    """Chart parsers of the same labels and tags.

        model = SpanParserEnsemble([manyheads.load("models/a"), manyheads.load("models/b")])
        charts = model.charts(pieces, affixes, lengths)

    The best tree is that of the averaged probabilities of constituents. The probability of a tree is the average of its
    probabilities.
    """

    names = ("constituents", "tags", "root")

    def probabilities(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> SpanProbabilities:
        """See `SpanParser.probabilities`."""
        each = [model.probabilities(pieces, affixes, lengths) for model in self.models]
        constituents, tags = (torch.stack(values).mean(0) for values in zip(*each, strict=True))
        return SpanProbabilities(constituents, tags)

    def charts(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> Charts:
        """See `SpanParser.charts`."""
        return charts_of(self.probabilities(pieces, affixes, lengths))

    def tree_log_prob(self, batch: SpanBatch) -> Float[Tensor, ""]:
        """See `SpanParser.tree_log_prob`."""
        each = torch.stack([model.tree_log_prob(batch) for model in self.models])
        return each.logsumexp(0) - math.log(len(each))


def charts_of(probabilities: SpanProbabilities) -> Charts:
    """Return the best label of each span and the best tag of each word."""
    of_best, best = probabilities.constituents.max(dim=2)
    num_words = probabilities.tags.shape[1]
    first, last = span_places(num_words, best.device)
    scores = of_best.new_zeros(len(best), num_words, num_words)
    labels = torch.zeros_like(scores, dtype=torch.long)
    scores[:, first, last] = (of_best - LEAST_PROBABILITY).clamp(min=0.0)
    labels[:, first, last] = best + 1
    return Charts(scores, labels * (scores > 0), probabilities.tags.argmax(dim=-1))


def check_labels_and_tags(config: TransformerSpanParserConfig) -> None:
    """Check that a config is complete.

    Raises: ConfigError: the vocabulary size, the labels, the tags or the root are missing.
    """
    check_vocabularies(config, "vocab_size")
    for name in ("constituents", "tags", "root"):
        if not getattr(config, name):
            raise ConfigError(f"model.{name} is empty; training fills it in from the data.")
