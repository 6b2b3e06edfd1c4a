"""Charts: the best binary tree over the words of a sentence, and the sum over all of them.

Papers: Stern, Andreas and Klein 2017, arXiv:1705.03919, sec. 3 (the best tree, by the algorithm of Cocke, Kasami and
Younger); Zhang, Zhou and Li 2020, arXiv:2008.03736, sec. 3 (the sum, batched). The score of a tree is the sum of the
scores of its spans. The score of a span does not depend on how it is split, so one table over spans is enough:

    best(i, j) = score(i, j) + max over k of best(i, k) + best(k + 1, j)

and with log sum exp in place of max, the logarithm of the sum of exp(score) over all trees. A constituent with more
than two parts is a binary tree whose further spans have no label.

Both take n steps. A step computes all spans of one width, in all rows, with vector operations. For n words the time is
O(n^3) and the memory O(n^2).

The model of a chart parser: the Transformer's encoder over words, and a head that scores spans and tags.

Paper: Kitaev and Klein 2018, arXiv:1805.01052. Differs: see `TransformerSpanParserConfig` and `SpanHead`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.extras.classification.encoder_with_head import EncoderEnsemble, EncoderWithHead
from manyheads.models.protocols import Output
from manyheads.models.size_checks import check_vocabularies
from manyheads.models.transformer.model import Encoder
from manyheads.nn.attention.masks import Lengths
from manyheads.nn.kernels import modes
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.kernels.modes import first_derivative_only
from manyheads.nn.layers import Dropout
from manyheads.nn.positions import FeatureEmbedding, LearnedPositions

if TYPE_CHECKING:
    from manyheads.extras.parsing.span_data import SpanBatch
    from manyheads.extras.parsing.span_task.settings import TransformerSpanParserConfig
    from manyheads.nn.shapes import Bool, Float, Int


_IMPOSSIBLE = float("-inf")


def naive_best_tree(scores: list[list[float]], first: int, last: int) -> tuple[float, list[tuple[int, int]]]:
    """Return the score and the spans of the best tree over words first to last; of equal splits the first one.

    Args: scores: a list for each first word, with an entry for each last word.
    """
    inside: tuple[float, list[tuple[int, int]]] = (0.0, [])
    if first < last:
        pairs = [
            (naive_best_tree(scores, first, middle), naive_best_tree(scores, middle + 1, last))
            for middle in range(first, last)
        ]
        inside = max(((one[0] + other[0], one[1] + other[1]) for one, other in pairs), key=lambda option: option[0])
    return scores[first][last] + inside[0], [(first, last), *inside[1]]


def naive_log_partition(scores: list[list[float]], first: int, last: int) -> float:
    """Return log sum exp of the scores of all trees over words first to last."""
    total = 1.0 if first == last else 0.0
    for middle in range(first, last):
        left, right = naive_log_partition(scores, first, middle), naive_log_partition(scores, middle + 1, last)
        total += math.exp(left + right)
    return scores[first][last] + math.log(total)


class _Parts:
    """The values of spans in two layouts, in which both parts of all splits of a span are contiguous, in one order.

    `left[i, w]` and `right[j, n - w]` are those of the spans of w words that begin at i and end at j.
    """

    def __init__(self, scores: Tensor, fill: float) -> None:
        self.num_words = scores.shape[1]
        self.left = scores.new_full((scores.shape[0], self.num_words, self.num_words + 1), fill)
        self.right = self.left.clone()

    def of_splits(self, width: int) -> tuple[Tensor, Tensor]:
        """Views of the first and the second parts of all spans of that width. (batch, spans, width - 1)"""
        count = self.num_words - width + 1
        return self.left[:, :count, 1:width], self.right[:, width - 1 :, count : self.num_words]

    def of_width(self, width: int) -> tuple[Tensor, Tensor]:
        """Views of the values of all spans of that width, in both layouts. (batch, spans)"""
        count = self.num_words - width + 1
        return self.left[:, :count, width], self.right[:, width - 1 :, self.num_words - width]

    def write(self, width: int, values: Tensor) -> None:
        for view in self.of_width(width):
            view.copy_(values)


def _of_width(table: Tensor, width: int) -> Tensor:
    """View of the entries of a table over spans that belong to spans of that width. (batch, spans)"""
    return table.diagonal(width - 1, dim1=1, dim2=2)


def best_splits(scores: Float[Tensor, "batch words words"]) -> Int[Tensor, "batch words words"]:
    """Return the last word of the first part of the best tree over words i to j, both included.

    Rows may be padded on the right: the entries of real words do not depend on the padding. Of equal splits the first
    one is chosen.

    Args: scores: `scores[b, i, j]` of the span from word i to word j; entries with j < i are not read.
    """
    splits = torch.zeros_like(scores, dtype=torch.long)
    parts = _Parts(scores, _IMPOSSIBLE)
    for width in range(1, scores.shape[1] + 1):
        values = _of_width(scores, width)
        if width > 1:
            first, second = parts.of_splits(width)
            largest, place = (first + second).max(dim=2)
            values = values + largest
            _of_width(splits, width).copy_(place + torch.arange(place.shape[1], device=scores.device))
        parts.write(width, values)
    return splits


def tree_spans(
    splits: Int[Tensor, "batch words words"], lengths: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch words words"]:
    """Return which spans are in the tree with these splits over the words of each row; see `best_splits`."""
    inside = torch.zeros_like(splits, dtype=torch.bool)
    inside[torch.arange(len(lengths), device=lengths.device), 0, lengths - 1] = True
    for width in range(splits.shape[1], 1, -1):
        rows, first = _of_width(inside, width).nonzero(as_tuple=True)
        last = first + width - 1
        middle = splits[rows, first, last]
        inside[rows, first, middle] = True
        inside[rows, middle + 1, last] = True
    return inside


def log_partition(
    scores: Float[Tensor, "batch words words"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return log sum exp of the scores of all trees over the words of each row; its gradient are the probabilities of
    spans.

    Args: scores: see `best_splits`; lengths: words of each row, at least 1.
    """
    if not modes.is_fast():
        return _sums(scores, lengths)[0]
    value: Tensor = _LogPartition.apply(scores, lengths)  # type: ignore[no-untyped-call]
    return value


def span_probabilities(
    scores: Float[Tensor, "batch words words"], lengths: Int[Tensor, " batch"]
) -> Float[Tensor, "batch words words"]:
    """Return the probability that a span is in the tree: the gradient of `log_partition`, without autograd."""
    _, totals, parts = _sums(scores, lengths)
    return _shares(scores.new_ones(len(lengths)), totals, parts, lengths)


def _sums(scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, _Parts]:
    """Return `log_partition`, log sum exp over the splits of each span, and the values of all spans."""
    parts = _Parts(scores, _IMPOSSIBLE)
    totals = torch.zeros_like(scores)
    for width in range(1, scores.shape[1] + 1):
        values = _of_width(scores, width)
        if width > 1:
            first, second = parts.of_splits(width)
            total = torch.logsumexp(first + second, dim=2)
            _of_width(totals, width).copy_(total)
            values = values + total
        parts.write(width, values)
    rows = torch.arange(len(lengths), device=lengths.device)
    return parts.left[rows, 0, lengths], totals, parts


def _shares(grad: Tensor, totals: Tensor, parts: _Parts, lengths: Tensor) -> Tensor:
    """Return the gradient of all scores: the steps of `_sums` in reverse order. grad: of each row's value."""
    grads = _Parts(totals, 0.0)
    rows = torch.arange(len(lengths), device=lengths.device)
    grads.left[rows, 0, lengths] = grad
    found = torch.zeros_like(totals)
    for width in range(totals.shape[1], 0, -1):
        one, other = grads.of_width(width)
        of_spans = one + other
        _of_width(found, width).copy_(of_spans)
        if width > 1:
            first, second = parts.of_splits(width)
            # Spans that reach into the padding have no gradient, whatever their scores are.
            shares = torch.exp(first + second - _of_width(totals, width)[:, :, None]) * of_spans[:, :, None]
            shares = shares.masked_fill((of_spans == 0)[:, :, None], 0.0)
            for view in grads.of_splits(width):
                view.add_(shares)
    return found


@first_derivative_only
class _LogPartition(torch.autograd.Function):
    """With a gradient of our own: autograd would keep copies of every step."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, lengths: Tensor) -> Tensor:
        value, totals, parts = _sums(scores, lengths)
        ctx.save_for_backward(totals, parts.left, parts.right, lengths)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        totals, left, right, lengths = ctx.saved_tensors
        parts = _Parts(totals, 0.0)
        parts.left, parts.right = left, right
        return _shares(grad, totals, parts, lengths), None


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
        (rows, inner), columns = self.label_proj.weight.shape, self.fence_proj.in_features
        return "Spans, softmax", "differences of fenceposts", f"{columns:,} → {inner:,} → {rows:,}, ReLU"

    def equation(self) -> tuple[str, str]:
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
        each = [model.probabilities(pieces, affixes, lengths) for model in self.models]
        constituents, tags = (torch.stack(values).mean(0) for values in zip(*each, strict=True))
        return SpanProbabilities(constituents, tags)

    def charts(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> Charts:
        return charts_of(self.probabilities(pieces, affixes, lengths))

    def tree_log_prob(self, batch: SpanBatch) -> Float[Tensor, ""]:
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


_WORD, _BEGIN, _END = range(3)


class WordEncoder(nn.Module):
    """Features of words to states of begin, words and end.

    The vector of a word is the sum of the vectors of its features: subwords and hashes. In training each feature is
    left out with the probability `feature_dropout`, so that the model learns to read words it does not know.

    Args: config: sizes and choices; the vocabulary size must be set.
    """

    traced_parts: ClassVar = {
        "word_norm": ("normalised words", "LN(x)"),
        "window_proj": ("windows", "[.., x_(i-1), x_i, x_(i+1), ..] W + b; max(0, windows) is added to x"),
    }

    def __init__(self, config: TransformerSpanParserConfig) -> None:
        super().__init__()
        self.config = config
        rate = config.feature_dropout
        self.piece_embedding = FeatureEmbedding(config.vocab_size + 1, config.d_model, dropout=rate)
        self.affix_embedding = FeatureEmbedding(config.num_affixes + 1, config.d_model, dropout=rate)
        self.boundary_embedding = FeatureEmbedding(3, config.d_model, none=None)
        self.word_norm = nn.LayerNorm(config.d_model)
        wide = config.window * config.d_model
        self.window_proj = nn.Linear(wide, config.d_model) if config.window > 1 else None
        self.positions = LearnedPositions(config.d_model, max_len=config.max_len + 2)
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config.stack)

    def forward(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch words+2 d_model"]:
        """Return the states; see `SpanBatch`. Those of padding are undefined."""
        # A hash of 0 is no feature; the others share the rows of the table.
        affixes = torch.where(affixes > 0, affixes % self.config.num_affixes + 1, 0)
        words = self.piece_embedding(pieces) + self.affix_embedding(affixes)
        places = torch.arange(pieces.shape[1] + 2, device=pieces.device)
        kinds = torch.where(places == lengths[:, None] + 1, _END, _WORD)
        kinds[:, 0] = _BEGIN
        words = F.pad(words, (0, 0, 1, 1)).masked_fill((places > lengths[:, None])[:, :, None], 0.0)
        x = self.word_norm(words + self.boundary_embedding(kinds[:, :, None]))
        if self.window_proj is not None:
            x = x + self._of_neighbours(x, places < lengths[:, None] + 2, self.window_proj)
        x = self.dropout(low_precision(self.positions(x)))
        return self.encoder(x, Lengths(lengths + 2))  # type: ignore[no-any-return]

    def _of_neighbours(self, x: Tensor, real: Tensor, proj: nn.Linear) -> Tensor:
        """A layer over a window of words around each; with few trees, attention learns late to use the neighbours of a
        word."""
        num_places, side = x.shape[1], self.config.window // 2
        padded = F.pad(self.dropout(x).masked_fill(~real[:, :, None], 0.0), (0, 0, side, side))
        windows = torch.cat([padded[:, first : first + num_places] for first in range(2 * side + 1)], dim=-1)
        return F.relu(proj(windows))


def build_span_parser(config: TransformerSpanParserConfig) -> SpanParser:
    """Return body and head, with random weights. Raises: ConfigError: see `check_labels_and_tags`."""
    check_labels_and_tags(config)
    head = SpanHead(
        config.d_model, config.span_dim, len(config.constituents), len(config.tags), dropout=config.span_dropout
    )
    return SpanParser(WordEncoder(config), head, config)
