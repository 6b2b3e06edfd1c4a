"""The head of a chart parser: scores of the labels of all spans of words, and of the tag of each word."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.extras.parsing.chart import log_partition
from manyheads.nn.dropout import Dropout
from manyheads.nn.shapes import Float, Int

__all__ = ["SpanHead", "span_places"]


def span_places(num_words: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return first word and last word of all n (n + 1) / 2 spans of n words, in the order of `SpanHead.span_logits`."""
    first, last = torch.triu_indices(num_words, num_words, device=device)
    return first, last


class SpanHead(nn.Module):
    """Scores of spans and tags from an encoder's states.

        >>> head = SpanHead(d_model=16, span_dim=8, num_labels=5, num_tags=3)
        >>> states = torch.randn(2, 6, 16)  # begin, four words, end
        >>> head.span_logits(states).shape, head.tag_logits(states).shape
        (torch.Size([2, 10, 5]), torch.Size([2, 4, 3]))

    Paper: Kitaev and Klein 2018, arXiv:1805.01052, sec. 2. The vector of a fencepost is the first half of the
    state before it and the second half of the state after it; that of a span is the difference of its two fenceposts; a
    layer, norm, ReLU and a second layer compute one score per label. The label `no constituent` has the score 0. The
    loss is that of Zhang, Zhou and Li 2020, arXiv:2008.03736. Differs: the halves are not kept apart in the encoder,
    and the first layer is applied to the fenceposts, which are fewer than the spans.
    Args:
        d_model: width of the states, even.
        span_dim: width of the layer inside.
        num_labels: labels of constituents.
        num_tags: tags of words.
        dropout: before each of the two last layers.

    Cost: memory n^2 x span_dim for n words.
    """

    def __init__(self, d_model: int, span_dim: int, num_labels: int, num_tags: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fence_proj = nn.Linear(d_model, span_dim, bias=False)
        self.span_bias = nn.Parameter(torch.zeros(span_dim))
        self.span_norm = nn.LayerNorm(span_dim)
        self.label_proj = nn.Linear(span_dim, num_labels)
        # Nearly all spans are no constituents; without this the first steps learn nothing else.
        nn.init.constant_(self.label_proj.bias, -4.0)
        self.tag_inner = nn.Linear(d_model, span_dim)
        self.tag_norm = nn.LayerNorm(span_dim)
        self.tag_proj = nn.Linear(span_dim, num_tags)
        self.dropout = Dropout(dropout)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        (rows, inner), columns = self.label_proj.weight.shape, self.fence_proj.in_features
        return "Spans, softmax", "differences of fenceposts", f"{columns:,} → {inner:,} → {rows:,}, ReLU"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        inner = "max(0, LN(W₁ (x_j - x_i) + b₁)) W₂ + b₂"
        return "log-probabilities", f"log softmax([0; {inner}]), x_i the fencepost before word i + 1"

    def span_logits(self, states: Float[Tensor, "batch len d_model"]) -> Float[Tensor, "batch spans num_labels"]:
        """Return the scores of all spans, in the order of `span_places`. states: begin, words, end."""
        before, after = states.chunk(2, dim=-1)
        fences = torch.cat([before[:, :-1], after[:, 1:]], dim=-1)  # (batch, words + 1, d_model)
        projected = self.fence_proj(fences)
        # In float32: the difference of two bfloat16 numbers of nearly equal size has few correct digits.
        projected = projected.to(torch.promote_types(projected.dtype, torch.float32))
        first, last = span_places(states.shape[1] - 2, states.device)
        spans = projected.index_select(1, last + 1) - projected.index_select(1, first) + self.span_bias
        logits: Tensor = self.label_proj(self.dropout(F.relu(self.span_norm(spans))))
        return logits

    def tag_logits(self, states: Float[Tensor, "batch len d_model"]) -> Float[Tensor, "batch words num_tags"]:
        """Return the scores of the tags of all words. states: begin, words, end."""
        hidden = F.relu(self.tag_norm(self.tag_inner(states[:, 1:-1])))
        logits: Tensor = self.tag_proj(self.dropout(hidden))
        return logits

    def losses(
        self,
        states: Float[Tensor, "batch len d_model"],
        labels: Int[Tensor, "batch words words"],
        tags: Int[Tensor, "batch words"],
        lengths: Int[Tensor, " batch"],
        *,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the negative log-likelihood of the trees, and the cross entropy of the tags, summed over the batch.

        A tree is a labelled binary tree, in which a constituent of more than two parts has spans without a label
        inside. The probability of a tree is exp(score) divided by the sum over all trees. All binary forms of a
        constituent have the same probability.

        Args:
            labels: see `SpanBatch`; 0 is `no constituent`.
            tags: ids; -1 does not count.
            lengths: words of each row.
            label_smoothing: of tags.
        """
        num_words = tags.shape[1]
        first, last = span_places(num_words, tags.device)
        padding = torch.arange(num_words, device=tags.device) >= lengths[:, None]
        logits = self.span_logits(states)
        logits = F.pad(logits.to(torch.promote_types(logits.dtype, torch.float32)), (1, 0))
        right = labels[:, first, last]
        of_right = logits.gather(2, right[:, :, None])[:, :, 0].masked_fill(padding[:, last], 0.0)
        # The sum over labels can be computed before the sum over trees.
        rows = torch.arange(len(tags), device=tags.device)[:, None]
        table = logits.new_zeros(len(tags), num_words, num_words)
        table = table.index_put((rows, first[None], last[None]), logits.logsumexp(dim=2))
        of_trees = log_partition(table, lengths).sum() - of_right.sum()
        tag_logits = self.tag_logits(states)
        of_tags = F.cross_entropy(
            tag_logits.to(logits.dtype).flatten(0, 1),
            tags.masked_fill(padding, -1).flatten(),
            ignore_index=-1,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
        return of_trees, of_tags
