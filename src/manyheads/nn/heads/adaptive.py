"""Adaptive input and output: frequent tokens have wide vectors, rare tokens narrow ones and a second softmax.

Ids must be ordered by decreasing frequency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.nn.kernels import modes
from manyheads.nn.kernels.linear import linear
from manyheads.nn.kernels.loss import HeadLoss, smoothed_loss
from manyheads.nn.shapes import Bool, Float, Int, check_targets, explained


class Clusters:
    """The clusters of a vocabulary.

    Args:
        vocab_size: number of tokens.
        cutoffs: ends of clusters, increasing, below vocab_size; the first is the shortlist's size. None: one cluster.
        d_embed: width of the shortlist's vectors.
        div_value: cluster i's vectors have width d_embed // div_value ** i.

    Raises: ConfigError: cutoffs do not increase or are not below vocab_size, or div_value or a width is below 1.
    """

    def __init__(self, vocab_size: int, cutoffs: Sequence[int], d_embed: int, div_value: int) -> None:
        edges = [0, *cutoffs, vocab_size]
        if any(low >= high for low, high in pairwise(edges)):
            raise ConfigError(f"cutoffs {list(cutoffs)} must increase, and be between 0 and vocab_size {vocab_size}.")
        if div_value < 1:
            raise ConfigError(f"div_value is {div_value}; it must be at least 1, which gives all clusters one width.")
        self.ranges = list(pairwise(edges))
        self.widths = [d_embed // div_value**i for i in range(len(self.ranges))]
        if self.widths[-1] < 1:
            raise ConfigError(f"div_value {div_value} leaves no width for cluster {len(self.ranges) - 1} of {d_embed}.")
        self.sizes = [high - low for low, high in self.ranges]

    def places_in(self, index: int, ids: Int[Tensor, " count"]) -> Int[Tensor, " members"]:
        """Return the places of the ids of a cluster.

        An id outside the vocabulary counts to the first or the last cluster, whose table then refuses it.
        """
        low, high = self.ranges[index]
        inside = torch.ones_like(ids, dtype=torch.bool) if index == 0 else ids >= low
        if index + 1 < len(self.ranges):
            inside = inside & (ids < high)
        return inside.nonzero().squeeze(1)


def _projections(d_model: int, widths: Sequence[int], always: bool) -> nn.ParameterList | None:
    """Return (d_model, width) for each cluster; None if every width is d_model."""
    if not always and all(width == d_model for width in widths):
        return None
    return nn.ParameterList([nn.Parameter(torch.empty(d_model, width)) for width in widths])


class AdaptiveEmbedding(nn.Module):
    """Vectors whose width decreases with frequency, projected to d_model and scaled by sqrt(d_model).

        >>> embedding = AdaptiveEmbedding(1000, 16, cutoffs=(100, 400), d_embed=16, div_value=2)
        >>> embedding(torch.tensor([[3, 250, 999]])).shape, [tuple(table.shape) for table in embedding.tables]
        (torch.Size([1, 3, 16]), [(100, 16), (300, 8), (600, 4)])

    Paper: Baevski and Auli 2019, arXiv:1809.10853, sec. 3; Dai et al. 2019, sec. 4.
    Args:
        vocab_size, cutoffs, d_embed, div_value: see `Clusters`.
        d_model: width of the output.

    Shape: tables[i] (cluster's size, its width), projections[i] (d_model, width); with div_value 1 there is one table
        of the whole vocabulary, and one projection, or none if d_embed is d_model.
    """

    without_decay: tuple[str, ...] = ("tables",)

    def __init__(self, vocab_size: int, d_model: int, *, cutoffs: Sequence[int], d_embed: int, div_value: int) -> None:
        super().__init__()
        self.clusters = Clusters(vocab_size, cutoffs if div_value > 1 else (), d_embed, div_value)
        self.projections = _projections(d_model, self.clusters.widths, always=div_value > 1)
        shapes = zip(self.clusters.sizes, self.clusters.widths, strict=True)
        self.tables = nn.ParameterList([nn.Parameter(torch.empty(size, width)) for size, width in shapes])
        self.scale = math.sqrt(d_model)
        self.reset_parameters()

    @property
    def token_table(self) -> Tensor:
        """The table of the first cluster, which may be the whole vocabulary; see `TokenEmbedding.token_table`."""
        first: Tensor = self.tables[0]
        return first

    def reset_parameters(self) -> None:
        """Initialise tables with N(0, 0.02), projections with N(0, 0.01), as in the official Transformer-XL."""
        for table in self.tables:
            nn.init.normal_(table, std=0.02)
        for projection in self.projections or ():
            nn.init.normal_(projection, std=0.01)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        width = self.tables[0].shape[1] if self.projections is None else self.projections[0].shape[0]
        projected = "" if self.projections is None else f" → {width:,}"
        tables = [f"{table.shape[0]:,} tokens x {table.shape[1]:,}{projected}" for table in self.tables]
        if len(tables) == 1:
            return "Embedding", f"{tables[0]}, times √{width:,}"
        return "Adaptive embedding", *tables, f"times √{width:,}"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        one = "√d_model · E[ids]"
        return "embedded", one if self.projections is None else "√d_model · E_c[ids] P_cᵀ, c the cluster of an id"

    @explained
    def forward(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d_model"]:
        if len(self.tables) == 1:
            return self._project(0, F.embedding(ids, self.tables[0])) * self.scale
        flat = ids.flatten()
        out: Tensor | None = None
        for index, (low, high) in enumerate(self.clusters.ranges):
            if modes.is_transformed():  # a transform of `torch.func` cannot select rows
                inside = (flat >= low) & (flat < high)
                vectors = self._project(index, F.embedding((flat - low).clamp(0, high - low - 1), self.tables[index]))
                out = vectors if out is None else torch.where(inside[:, None], vectors, out)
                continue
            rows = self.clusters.places_in(index, flat)
            vectors = self._project(index, F.embedding(flat.index_select(0, rows) - low, self.tables[index]))
            if out is None:
                out = vectors.new_zeros(len(flat), vectors.shape[-1])
            out = out.index_copy(0, rows, vectors)
        assert out is not None
        return out.view(*ids.shape, out.shape[-1]) * self.scale

    def _project(self, index: int, vectors: Tensor) -> Tensor:
        return vectors if self.projections is None else linear(vectors, self.projections[index])


class AdaptiveHead(nn.Module):
    """Softmax over a shortlist and the other clusters, and a second softmax within a cluster.

        >>> head = AdaptiveHead(1000, 16, cutoffs=(100, 400), d_embed=16, div_value=2)
        >>> hidden, targets = torch.randn(5, 16), torch.tensor([3, 250, 999, 0, 1])
        >>> head.log_probs(hidden).shape, head.token_losses(hidden, targets).shape
        (torch.Size([5, 1000]), torch.Size([5]))
        >>> loss_sum, nll_sum = head.loss(hidden, targets, torch.ones(5, dtype=torch.bool))
        >>> loss_sum.shape
        torch.Size([])

    Paper: Grave et al. 2017, arXiv:1609.04309, sec. 4. P(token in cluster i) = P(cluster i) P(token | cluster i).
    Args:
        vocab_size, cutoffs, d_embed, div_value: see `Clusters`.
        d_model: width of the hidden states.

    Shape: tables[i] (cluster's size, its width), biases[i] (size,); with div_value 1 all clusters are rows of one table
        and one bias. projections[i] (d_model, width), or None if every width is d_model. cluster_weight (clusters - 1,
        d_embed): row i - 1 is cluster i's.
    """

    def __init__(self, vocab_size: int, d_model: int, *, cutoffs: Sequence[int], d_embed: int, div_value: int) -> None:
        super().__init__()
        self.clusters = Clusters(vocab_size, cutoffs, d_embed, div_value)
        tables = Clusters(vocab_size, cutoffs if div_value > 1 else (), d_embed, div_value)
        shapes = zip(tables.sizes, tables.widths, strict=True)
        self.tables = nn.ParameterList([nn.Parameter(torch.empty(size, width)) for size, width in shapes])
        self.biases = nn.ParameterList([nn.Parameter(torch.empty(size)) for size in tables.sizes])
        self.projections = _projections(d_model, self.clusters.widths, always=div_value > 1)
        num_tails = len(self.clusters.ranges) - 1
        self.cluster_weight = nn.Parameter(torch.empty(num_tails, d_embed)) if num_tails else None
        self.cluster_bias = nn.Parameter(torch.empty(num_tails)) if num_tails else None
        self.reset_parameters()

    def tie_tables(self, tables: nn.ParameterList) -> None:
        """Share the tables of an embedding with the same clusters."""
        for index, table in enumerate(tables):
            self.tables[index] = table

    @property
    def token_table(self) -> Tensor:
        """The table of the first cluster, which may be the whole vocabulary; see `TokenEmbedding.token_table`."""
        first: Tensor = self.tables[0]
        return first

    def reset_parameters(self) -> None:
        """Initialise tables with N(0, 0.02), projections with N(0, 0.01), biases with zero."""
        for table in (*self.tables, *([] if self.cluster_weight is None else [self.cluster_weight])):
            nn.init.normal_(table, std=0.02)
        for projection in self.projections or ():
            nn.init.normal_(projection, std=0.01)
        for bias in (*self.biases, *([] if self.cluster_bias is None else [self.cluster_bias])):
            nn.init.zeros_(bias)

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        sizes = [f"{high - low:,}" for low, high in self.clusters.ranges]
        return "Adaptive softmax", *([f"clusters of {', '.join(sizes)}"] if len(sizes) > 1 else [])

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "log-probabilities", "log P(cluster of w | x) + log P(w | cluster, x)"

    @torch.no_grad()
    def begin_at(self, counts: Float[Tensor, " vocab_size"]) -> None:
        """See `LinearHead.begin_at`; a cluster has the sum of its tokens' counts."""
        logarithms = counts.clamp(min=0.5).log()
        logarithms = logarithms - logarithms.mean()
        parts = torch.split(logarithms, [len(one) for one in self.biases])
        for bias, part in zip(self.biases, parts, strict=True):
            bias.copy_(part)
        for index, (low, high) in enumerate(self.clusters.ranges[1:]):
            assert self.cluster_bias is not None
            self.cluster_bias[index] = logarithms[low:high].logsumexp(0)

    @explained
    def log_probs(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab_size"]:
        """Return log-probabilities of all tokens in the vocabulary's order, in float32 or float64."""
        return self._with_clusters(_log_softmax(linear(self._project(0, hidden), *self._first())), hidden)

    @explained
    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab_size"]:
        """Return scores whose softmax gives the probabilities: only the first of the two softmaxes is left out."""
        return self._with_clusters(linear(self._project(0, hidden), *self._first()), hidden)

    def _with_clusters(self, first: Tensor, hidden: Tensor) -> Tensor:
        """Return the scores of all tokens. first: those of the shortlist and of each cluster."""
        shortlist = self.clusters.sizes[0]
        parts = [first[..., :shortlist]]
        for index in range(1, len(self.clusters.ranges)):
            within = _log_softmax(linear(self._project(index, hidden), *self._rows(index)))
            parts.append(first[..., shortlist + index - 1, None] + within)
        return torch.cat(parts, dim=-1)

    @explained
    def loss(
        self,
        hidden: Float[Tensor, "*rows d_model"],
        targets: Int[Tensor, "*rows"],
        keep: Bool[Tensor, "*rows"],
        *,
        label_smoothing: float = 0.0,
        chunk_tokens: int = 2048,
        num_sampled: int = 0,
    ) -> HeadLoss:
        """Return the summed loss over the positions to keep; see `LinearHead.loss`.

        Raises: ConfigError: label_smoothing is not 0, because it is not defined for two softmaxes; or num_sampled is
            not 0, because sampling needs a plain softmax.
        Cost: a token of the shortlist needs no other cluster; memory chunk_tokens x the largest cluster.
        """
        if label_smoothing:
            raise ConfigError(f"label_smoothing is {label_smoothing}; an adaptive softmax has none. Set it to 0.")
        if num_sampled:
            raise ConfigError(
                f"num_sampled is {num_sampled}, and this softmax is adaptive; take one of the two: set num_sampled to"
                " 0, or leave cutoffs empty."
            )
        check_targets(hidden, targets, keep)
        if modes.is_transformed():
            losses = -self.log_probs(hidden).gather(-1, targets[..., None])[..., 0]
            loss = losses.masked_fill(~keep, 0.0).sum()
            return loss, loss.detach()
        kept = hidden[keep]
        wanted = targets[keep]
        cluster = torch.bucketize(
            wanted, wanted.new_tensor([high for _, high in self.clusters.ranges[:-1]]), right=True
        )
        names = torch.where(cluster == 0, wanted, self.clusters.sizes[0] + cluster - 1)
        loss, nll = smoothed_loss(self._project(0, kept), names, *self._first(), 0.0, chunk_tokens)
        for index in range(1, len(self.clusters.ranges)):
            rows = (cluster == index).nonzero().squeeze(1)
            within = wanted.index_select(0, rows) - self.clusters.ranges[index][0]
            vectors = self._project(index, kept.index_select(0, rows))
            more, more_nll = smoothed_loss(vectors, within, *self._rows(index), 0.0, chunk_tokens)
            loss, nll = loss + more, nll + more_nll
        return loss, nll

    @explained
    def token_losses(
        self, hidden: Float[Tensor, "tokens d_model"], targets: Int[Tensor, " tokens"]
    ) -> Float[Tensor, " tokens"]:
        """Return each token's loss, in the tokens' order."""
        first = _log_softmax(linear(self._project(0, hidden), *self._first()))
        shortlist = self.clusters.sizes[0]
        losses = torch.empty(len(targets), dtype=first.dtype, device=first.device)
        for index, (low, _) in enumerate(self.clusters.ranges):
            rows = self.clusters.places_in(index, targets)
            within = targets.index_select(0, rows) - low
            chosen = first.index_select(0, rows)
            if index == 0:
                found = chosen.gather(1, within[:, None])[:, 0]
            else:
                vectors = self._project(index, hidden.index_select(0, rows))
                tail = _log_softmax(linear(vectors, *self._rows(index)))
                found = chosen[:, shortlist + index - 1] + tail.gather(1, within[:, None])[:, 0]
            losses = losses.index_copy(0, rows, -found)
        return losses

    def _project(self, index: int, hidden: Tensor) -> Tensor:
        return hidden if self.projections is None else linear(hidden, self.projections[index].t())

    def _rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return table and bias of a cluster."""
        if len(self.tables) > 1:
            return self.tables[index], self.biases[index]
        low, high = self.clusters.ranges[index]
        return self.tables[0][low:high], self.biases[0][low:high]

    def _first(self) -> tuple[Tensor, Tensor]:
        """Return table and bias of the shortlist and the other clusters."""
        table, bias = self._rows(0)
        if self.cluster_weight is None or self.cluster_bias is None:
            return table, bias
        return torch.cat([table, self.cluster_weight]), torch.cat([bias, self.cluster_bias])


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
