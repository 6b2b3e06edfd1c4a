"""Adaptive embedding, adaptive softmax and sampled softmax of the original Transformer-XL code, by its names.

Its files are mem_transformer.py, proj_adaptive_softmax.py and log_uniform_sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.extras.peers.xl_weights import by_cluster
from manyheads.extras.texts.common import TextValueError, check_at_least, check_ids, check_shape, explain
from manyheads.nn.heads.adaptive import Clusters
from manyheads.nn.heads.linear import LogUniformCandidates
from manyheads.nn.kernels import modes


class _Clustered(nn.Module):
    """The sizes that adaptive embedding and adaptive softmax share."""

    def __init__(self, n_token: int, d_embed: int, d_proj: int, cutoffs: Sequence[int], div_val: int) -> None:
        super().__init__()
        check_at_least(1, n_token=n_token, d_embed=d_embed, d_proj=d_proj, div_val=div_val)
        if not isinstance(cutoffs, list | tuple) or not all(isinstance(cutoff, int) for cutoff in cutoffs):
            raise TextValueError(
                f"cutoffs is {cutoffs!r}; it must be a list of whole numbers, the first ids of the rarer clusters.",
                fields=["cutoffs"],
            )
        ends = [0, *cutoffs, n_token]
        if any(low >= high for low, high in pairwise(ends)):
            raise TextValueError(
                f"cutoffs {list(cutoffs)} must increase, and be between 0 and n_token {n_token}.", fields=["cutoffs"]
            )
        if d_embed // div_val ** (len(ends) - 2) < 1:
            raise TextValueError(
                f"div_val {div_val} leaves no width for cluster {len(ends) - 2} of d_embed {d_embed}; use a smaller"
                " div_val or fewer cutoffs.",
                fields=["div_val"],
            )
        self.n_token, self.d_embed, self.d_proj, self.div_val = n_token, d_embed, d_proj, div_val
        self.cutoffs, self.cutoff_ends = ends[1:], ends
        self._clusters = Clusters(n_token, tuple(cutoffs), d_embed, div_val)

    def _within(self, index: int, ids: Tensor) -> tuple[Tensor | slice, Tensor]:
        """Return the places of a cluster's ids and their numbers within it.

        Transforms of `torch.func` cannot select rows: there all places, with any number for ids of other clusters.
        """
        low, high = self._clusters.ranges[index]
        if modes.is_transformed():
            return slice(None), (ids - low).clamp(0, high - low - 1)
        places = self._clusters.places_in(index, ids)
        return places, ids[places] - low

    def _projection(self, width: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.d_proj, width).normal_(std=0.01))


def _put(out: Tensor, places: Tensor | slice, values: Tensor, inside: Tensor) -> Tensor:
    """Return out with the values at the places of a cluster; inside: where its ids are."""
    if isinstance(places, slice):
        return torch.where(inside[:, None] if values.dim() == 2 else inside, values, out)
    return out.index_copy(0, places, values)


class AdaptiveEmbedding(_Clustered):
    """Vectors that are narrower for rarer tokens, projected to d_proj, times sqrt(d_proj)."""

    def __init__(
        self,
        n_token: int,
        d_embed: int,
        d_proj: int,
        cutoffs: Sequence[int],
        div_val: int = 1,
        sample_softmax: int | bool = False,
    ) -> None:
        super().__init__(n_token, d_embed, d_proj, cutoffs, div_val)
        self.emb_scale = d_proj**0.5
        self.emb_layers, self.emb_projs = nn.ModuleList(), nn.ParameterList()
        if div_val == 1:
            self.emb_layers.append(nn.Embedding(n_token, d_embed, sparse=sample_softmax > 0))
            if d_proj != d_embed:
                self.emb_projs.append(self._projection(d_embed))
            return
        for size, width in zip(self._clusters.sizes, self._clusters.widths, strict=True):
            self.emb_layers.append(nn.Embedding(size, width))
            self.emb_projs.append(self._projection(width))

    def forward(self, inp: Tensor) -> Tensor:
        """Return the vectors of token ids of any shape: (..., d_proj)."""
        check_ids(inp, "inp", self.n_token)
        if self.div_val == 1:
            vectors = self.emb_layers[0](inp)
            if self.d_proj != self.d_embed:
                vectors = F.linear(vectors, self.emb_projs[0])
            return vectors * self.emb_scale  # type: ignore[no-any-return]
        ids = inp.flatten()
        out = self.emb_projs[0].new_zeros(len(ids), self.d_proj)
        for index, (low, high) in enumerate(self._clusters.ranges):
            places, within = self._within(index, ids)
            vectors = F.linear(self.emb_layers[index](within), self.emb_projs[index])
            out = _put(out, places, vectors, (ids >= low) & (ids < high))
        return out.view(*inp.shape, self.d_proj) * self.emb_scale  # type: ignore[no-any-return]


class ProjectedAdaptiveLogSoftmax(_Clustered):
    """Losses by a softmax over the frequent tokens and the clusters, and a second one within a cluster.

    Cluster i has the i-th entry from the end of cluster_weight, as in the original.
    """

    def __init__(
        self,
        n_token: int,
        d_embed: int,
        d_proj: int,
        cutoffs: Sequence[int],
        div_val: int = 1,
        keep_order: bool = False,
    ) -> None:
        super().__init__(n_token, d_embed, d_proj, cutoffs, div_val)
        self.shortlist_size, self.n_clusters = self.cutoffs[0], len(self.cutoffs) - 1
        self.head_size = self.shortlist_size + self.n_clusters
        if self.n_clusters > 0:
            self.cluster_weight = nn.Parameter(torch.zeros(self.n_clusters, d_embed))
            self.cluster_bias = nn.Parameter(torch.zeros(self.n_clusters))
        self.out_layers, self.out_projs = nn.ModuleList(), nn.ParameterList()
        for size, width in zip(self._clusters.sizes, self._clusters.widths, strict=True):
            has_projection = div_val > 1 or d_proj != d_embed
            self.out_projs.append(self._projection(width) if has_projection else None)
            if div_val > 1:
                self.out_layers.append(nn.Linear(width, size))
        if div_val == 1:
            self.out_layers.append(nn.Linear(d_embed, n_token))
        self.keep_order = keep_order

    def _compute_logit(self, hidden: Tensor, weight: Tensor, bias: Tensor, proj: Tensor | None) -> Tensor:
        return F.linear(hidden if proj is None else F.linear(hidden, proj.t()), weight, bias)

    def _rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the weight and the bias of a cluster; cluster 0's include those of the other clusters."""
        layer = cast(nn.Linear, self.out_layers[0 if self.div_val == 1 else index])
        weight: Tensor = layer.weight
        bias: Tensor = layer.bias
        if self.div_val == 1:
            low, high = self._clusters.ranges[index]
            weight, bias = weight[low:high], bias[low:high]
        if index == 0 and self.n_clusters > 0:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        return weight, bias

    def _log_probs(self, index: int, hidden: Tensor) -> Tensor:
        return self._compute_logit(hidden, *self._rows(index), self.out_projs[index]).log_softmax(dim=-1)

    def forward(self, hidden: Tensor, target: Tensor, keep_order: bool = False) -> Tensor:
        """Return the loss of each token: (tokens, d_proj) and (tokens,) -> (tokens,).

        Args: keep_order: in the order of the tokens; otherwise, and unless the attribute of this name is set, first
            those of the shortlist, then cluster by cluster.
        """
        check_shape("hidden", hidden, ["tokens", self.d_proj])
        check_shape("target", target, [hidden.shape[0]], "one target for each row of hidden")
        check_ids(target, "target", self.n_token)
        first = self._log_probs(0, hidden)
        losses = torch.zeros_like(target, dtype=first.dtype)
        for index, (low, high) in enumerate(self._clusters.ranges):
            places, within = self._within(index, target)
            within, chosen = within[:, None], first[places]
            if index == 0:
                log_probs = chosen.gather(1, within)[:, 0]
            else:
                log_probs = chosen[:, -index] + self._log_probs(index, hidden[places]).gather(1, within)[:, 0]
            losses = _put(losses, places, -log_probs, (target >= low) & (target < high))
        if keep_order or self.keep_order:
            return losses
        return by_cluster(losses, target, self.cutoffs[:-1])


class LogUniformSampler:
    """Draws frequent ids more often. `log_q` is the original's, of 2 n_sample draws with log1p(p)."""

    def __init__(self, range_max: int, n_sample: int) -> None:
        check_at_least(2, range_max=range_max)
        check_at_least(1, n_sample=n_sample)
        self.range_max, self.n_sample = range_max, n_sample
        self._candidates = LogUniformCandidates(range_max, 2 * n_sample)
        self.dist = self._candidates.probabilities.float()
        self.log_q = torch.log(-torch.expm1(-2 * n_sample * torch.log1p(self.dist.double()))).float()

    def sample(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logarithms of the labels' and the candidates' chances, and the candidates."""
        drawn, log_q = self._candidates.draw().to(labels.device), self.log_q.to(labels.device)
        return log_q[labels], log_q[drawn], drawn


def sample_logits(
    embedding: Callable[[Tensor], Tensor], bias: Tensor, labels: Tensor, inputs: Tensor, sampler: LogUniformSampler
) -> Tensor:
    """Return the logits of the label and of candidates: labels (a, b), inputs (a, b, d) -> (a, b, 1 + candidates)."""
    check_ids(labels, "labels", sampler.range_max)
    check_shape("inputs", inputs, [*labels.shape, "d"])
    true_log_q, drawn_log_q, drawn = sampler.sample(labels)
    true = (embedding(labels) * inputs).sum(-1) + bias[labels] - true_log_q.to(inputs.dtype)
    others = inputs @ embedding(drawn).t() + bias[drawn] - drawn_log_q.to(inputs.dtype)
    others = others.masked_fill(labels[..., None] == drawn, -1e30)
    return torch.cat([true[..., None], others], dim=-1)


explain(globals())
