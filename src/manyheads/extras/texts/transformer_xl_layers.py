"""Parts of the original Transformer-XL code, by its names: layers, adaptive embedding, adaptive and sampled softmax.

Its files are mem_transformer.py, proj_adaptive_softmax.py and log_uniform_sampler.py; see `transformer_xl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.extras.peers.transfo_xl import by_cluster
from manyheads.extras.texts.common import (
    TextNotImplementedError,
    TextShapeError,
    TextValueError,
    check_at_least,
    check_ids,
    check_rates,
    check_shape,
    explain,
    shape_of,
)
from manyheads.nn import masked_softmax, relative_shift
from manyheads.nn.heads.adaptive import Clusters
from manyheads.nn.heads.linear import LogUniformCandidates
from manyheads.nn.kernels import modes


class PositionalEmbedding(nn.Module):
    """Sines, then cosines, of distances: (len,) -> (len, 1, demb), or (len, bsz, demb)."""

    inv_freq: Tensor

    def __init__(self, demb: int) -> None:
        super().__init__()
        check_at_least(1, demb=demb)
        self.demb = demb
        self.register_buffer("inv_freq", self._frequencies())

    def _frequencies(self) -> Tensor:
        return 1 / (10000 ** (torch.arange(0.0, self.demb, 2.0) / self.demb))

    def forward(self, pos_seq: Tensor, bsz: int | None = None) -> Tensor:
        """Encode distances. Returns: at least float32, because neighbouring distances are equal in bfloat16."""
        check_shape("pos_seq", pos_seq, ["len"])
        frequencies = self.inv_freq
        if frequencies.dtype in (torch.float16, torch.bfloat16):
            frequencies = self._frequencies().to(frequencies.device)
        angles = pos_seq.to(frequencies.dtype)[:, None] * frequencies
        encoded = torch.cat([angles.sin(), angles.cos()], dim=-1)[:, None, : self.demb]
        return encoded if bsz is None else encoded.expand(-1, bsz, -1)


class PositionwiseFF(nn.Module):
    """Feed-forward sublayer with its residual connection and norm: (len, bsz, d_model) -> the same."""

    def __init__(self, d_model: int, d_inner: int, dropout: float, pre_lnorm: bool = False) -> None:
        super().__init__()
        check_at_least(1, d_model=d_model, d_inner=d_inner)
        check_rates(dropout=dropout)
        self.d_model, self.d_inner, self.dropout, self.pre_lnorm = d_model, d_inner, dropout, pre_lnorm
        inner, outer = nn.Linear(d_model, d_inner), nn.Linear(d_inner, d_model)
        drops = nn.Dropout(dropout), nn.Dropout(dropout)
        self.CoreNet = nn.Sequential(inner, nn.ReLU(inplace=True), drops[0], outer, drops[1])
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, inp: Tensor) -> Tensor:
        check_shape("inp", inp, ["...", self.d_model])
        if self.pre_lnorm:
            return inp + cast(Tensor, self.CoreNet(self.layer_norm(inp)))
        return cast(Tensor, self.layer_norm(inp + self.CoreNet(inp)))


class _Attention(nn.Module):
    """What all kinds of attention share: sizes, weights, output projection, residual connection and norm."""

    q_net: nn.Linear
    kv_net: nn.Linear
    qkv_net: nn.Linear

    def __init__(
        self, n_head: int, d_model: int, d_head: int, dropout: float, dropatt: float, pre_lnorm: bool, *nets: str
    ) -> None:
        super().__init__()
        check_at_least(1, n_head=n_head, d_model=d_model, d_head=d_head)
        check_rates(dropout=dropout, dropatt=dropatt)
        self.n_head, self.d_model, self.d_head, self.dropout = n_head, d_model, d_head, dropout
        for net in nets:  # q_net, kv_net or qkv_net: as many projections as its name has letters
            setattr(self, net, nn.Linear(d_model, len(net.removesuffix("_net")) * n_head * d_head, bias=False))
        self.drop = nn.Dropout(dropout)
        self.dropatt = nn.Dropout(dropatt)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.scale = 1 / (d_head**0.5)
        self.pre_lnorm = pre_lnorm

    def _context(self, inputs: Tensor, mems: Tensor | None) -> Tensor:
        """Return memory and inputs, (klen, bsz, d_model), as keys and values read them."""
        check_shape("the input", inputs, ["qlen", "bsz", self.d_model])
        if mems is not None and 0 not in shape_of("mems", mems, "mlen, bsz, d_model"):
            check_shape("mems", mems, ["mlen", inputs.shape[1], self.d_model], "start a batch of other size without it")
            inputs = torch.cat([mems, inputs])
        return cast(Tensor, self.layer_norm(inputs)) if self.pre_lnorm else inputs

    def _in_heads(self, projected: Tensor) -> Tensor:
        """(len, bsz, n_head x d_head) -> (bsz, n_head, len, d_head)."""
        return projected.view(*projected.shape[:2], self.n_head, self.d_head).permute(1, 2, 0, 3)

    def _attended(self, inputs: Tensor, scores: Tensor, values: Tensor, attn_mask: Tensor | None) -> Tensor:
        """Return the sublayer's output. scores, values: (bsz, n_head, qlen, klen) and (bsz, n_head, klen, d_head)."""
        weights = masked_softmax(scores * self.scale, _allowed(attn_mask, scores))
        weights = self.dropatt(weights.permute(2, 3, 0, 1))  # (qlen, klen, bsz, n_head), as the original's
        summed = torch.matmul(weights.permute(2, 3, 0, 1), values).permute(2, 0, 1, 3).flatten(2)
        out = inputs + cast(Tensor, self.drop(self.o_net(summed)))
        return out if self.pre_lnorm else cast(Tensor, self.layer_norm(out))


def _allowed(attn_mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """Convert a mask, 1 = blocked: (qlen, klen, bsz or 1), (klen, bsz) or (qlen, klen)."""
    if attn_mask is None:
        return None
    bsz, _, qlen, klen = scores.shape
    shape = shape_of("attn_mask", attn_mask, "qlen, klen, bsz or 1")
    by_key, by_query = shape in ((klen, bsz), (klen, 1)), shape == (qlen, klen)
    if len(shape) == 2 and by_key != by_query:
        attn_mask = attn_mask[None] if by_key else attn_mask[:, :, None]
    elif len(shape) != 3 or any(size not in (1, full) for size, full in zip(shape, (qlen, klen, bsz), strict=True)):
        both = " can be read in two ways" if by_key else " does not fit"
        raise TextShapeError(
            f"attn_mask has the shape {shape}, which{both}: give (qlen, klen, bsz or 1), here ({qlen}, {klen}, {bsz} or"
            " 1), with 1 = blocked; mask[:, :, None] makes it of a (qlen, klen) mask."
        )
    return (attn_mask == 0).permute(2, 0, 1)[:, None]


class MultiHeadAttn(_Attention):
    """Attention without positions over memory and input, with residual connection and norm."""

    def __init__(
        self, n_head: int, d_model: int, d_head: int, dropout: float, dropatt: float = 0, pre_lnorm: bool = False
    ) -> None:
        super().__init__(n_head, d_model, d_head, dropout, dropatt, pre_lnorm, "q_net", "kv_net")

    def forward(self, h: Tensor, attn_mask: Tensor | None = None, mems: Tensor | None = None) -> Tensor:
        """Attend. h: (qlen, bsz, d_model). attn_mask: see `MemTransformerLM`. mems: (mlen, bsz, d_model)."""
        context = self._context(h, mems)
        query = self._in_heads(self.q_net(context[-h.shape[0] :]))
        key, value = (self._in_heads(part) for part in self.kv_net(context).chunk(2, dim=-1))
        return self._attended(h, torch.matmul(query, key.transpose(-1, -2)), value, attn_mask)


class RelMultiHeadAttn(_Attention):
    """The base of both kinds of relative attention."""

    def __init__(
        self,
        n_head: int,
        d_model: int,
        d_head: int,
        dropout: float,
        dropatt: float = 0,
        tgt_len: int | None = None,
        ext_len: int | None = None,
        mem_len: int | None = None,
        pre_lnorm: bool = False,
    ) -> None:
        super().__init__(n_head, d_model, d_head, dropout, dropatt, pre_lnorm, "qkv_net")

    def _parallelogram_mask(self, h: int, w: int, left: bool = False) -> Tensor:
        """Return (h, w) of True inside the parallelogram that a shift leaves."""
        rows, columns, size = torch.arange(h)[:, None], torch.arange(w), min(h, w)
        above = (columns >= rows) | (rows >= size)
        below = (columns - (w - size) <= rows - (h - size)) | (rows < h - size)
        mask = above & below
        return mask if left else mask.flip(0)

    def _shift(self, x: Tensor, qlen: int, klen: int, mask: Tensor, left: bool = False) -> Tensor:
        """Shift by a mask of (qlen, klen + qlen - 1): (1 or qlen, klen, ...) -> (qlen, klen, ...)."""
        zeros = x.new_zeros(x.shape[0], qlen - 1, *x.shape[2:])
        padded = torch.cat([zeros, x] if left else [x, zeros], dim=1).expand(qlen, *[-1] * (x.dim() - 1))
        columns = (mask.flip(1) if left else mask).nonzero()[:, 1].view(qlen, klen)
        return padded[torch.arange(qlen)[:, None], columns]

    def _rel_shift(self, x: Tensor, zero_triu: bool = False) -> Tensor:
        """Move scores from distances to keys, (qlen, klen, ...). zero_triu: with zeros at keys after the query."""
        if len(shape_of("x", x, "qlen, klen, ...")) < 2:
            raise TextShapeError(f"x has the shape {tuple(x.shape)}; it must be (qlen, klen, ...).")
        qlen, klen = x.shape[:2]
        shifted = relative_shift(x.movedim((0, 1), (-2, -1)))
        if zero_triu:
            shifted = shifted.tril(klen - qlen)
        return shifted.movedim((-2, -1), (0, 1))

    def _projected(self, w: Tensor, mems: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v in heads; q of the last positions only."""
        q, k, v = self.qkv_net(self._context(w, mems)).chunk(3, dim=-1)
        return self._in_heads(q[-w.shape[0] :]), self._in_heads(k), self._in_heads(v)

    def _scores(self, q: Tensor, k: Tensor, u: Tensor, by_distance: Tensor) -> Tensor:
        content = torch.matmul(q + u[:, None], k.transpose(-1, -2))
        return content + relative_shift(by_distance)

    def _check_bias(self, name: str, bias: Tensor) -> None:
        check_shape(name, bias, [self.n_head, self.d_head])

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise TextNotImplementedError(
            "RelMultiHeadAttn has no formula of its own; use RelPartialLearnableMultiHeadAttn (sinusoidal distances) or"
            " RelLearnableMultiHeadAttn (trained ones)."
        )


class RelPartialLearnableMultiHeadAttn(RelMultiHeadAttn):
    """Attention by content and distance, type 0. Paper: Dai et al. 2019, sec. 3.3; u = r_w_bias, v = r_r_bias."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.r_net = nn.Linear(self.d_model, self.n_head * self.d_head, bias=False)

    def forward(
        self,
        w: Tensor,
        r: Tensor,
        r_w_bias: Tensor,
        r_r_bias: Tensor,
        attn_mask: Tensor | None = None,
        mems: Tensor | None = None,
    ) -> Tensor:
        """Attend. w: (qlen, bsz, d_model). r: encoded distances, (klen, 1, d_model), farthest first. Biases: (n_head,
        d_head). attn_mask: see `MemTransformerLM`; without one, scores of keys after the query mean nothing.
        """
        self._check_bias("r_w_bias", r_w_bias)
        self._check_bias("r_r_bias", r_r_bias)
        q, k, v = self._projected(w, mems)
        if len(shape_of("r", r, f"klen, 1, {self.d_model}")) != 3 or r.shape[1] != 1:
            r = r.reshape(r.shape[0], 1, -1) if r.dim() == 2 else r
            check_shape("r", r, ["klen", 1, self.d_model])
        check_shape("r", r, [k.shape[2], 1, self.d_model], "one distance for each key of memory and input")
        distances = self._in_heads(self.r_net(r))
        by_distance = torch.matmul(q + r_r_bias[:, None], distances.transpose(-1, -2))
        return self._attended(w, self._scores(q, k, r_w_bias, by_distance), v, attn_mask)


class RelLearnableMultiHeadAttn(RelMultiHeadAttn):
    """Attention by content and a trained vector and score for each distance, type 1."""

    def forward(
        self,
        w: Tensor,
        r_emb: Tensor,
        r_w_bias: Tensor,
        r_bias: Tensor,
        attn_mask: Tensor | None = None,
        mems: Tensor | None = None,
    ) -> Tensor:
        """Attend. r_emb: (distances, n_head, d_head), farthest first; r_bias: (distances, n_head). Farther keys have
        the first row.
        """
        self._check_bias("r_w_bias", r_w_bias)
        check_shape("r_emb", r_emb, ["distances", self.n_head, self.d_head])
        check_shape("r_bias", r_bias, [r_emb.shape[0], self.n_head], "one score for each row of r_emb")
        q, k, v = self._projected(w, mems)
        rows = rows_of_distances(r_emb.shape[0], k.shape[2], r_emb.device)
        by_distance = torch.matmul(q, r_emb[rows].permute(1, 2, 0)) + r_bias[rows].t()[:, None]
        return self._attended(w, self._scores(q, k, r_w_bias, by_distance), v, attn_mask)


def rows_of_distances(rows: int, klen: int, device: torch.device) -> Tensor:
    """Return the row of each key's distance in a table whose last row is distance 0."""
    return torch.arange(rows - klen, rows, device=device).clamp(min=0)


class TextLayer(nn.Module):
    """Attention, then feed-forward, which is left out if d_inner is 0."""

    attention: type[_Attention]

    def __init__(self, n_head: int, d_model: int, d_head: int, d_inner: int, dropout: float, **kwargs: Any) -> None:
        super().__init__()
        check_at_least(0, d_inner=d_inner)
        self.dec_attn = self.attention(n_head, d_model, d_head, dropout, **kwargs)
        if d_inner > 0:
            self.pos_ff = PositionwiseFF(d_model, d_inner, dropout, pre_lnorm=kwargs.get("pre_lnorm", False))

    def forward(
        self, dec_inp: Tensor, *distances: Tensor, dec_attn_mask: Tensor | None = None, mems: Tensor | None = None
    ) -> Tensor:
        out = self.dec_attn(dec_inp, *distances, attn_mask=dec_attn_mask, mems=mems)
        return cast(Tensor, self.pos_ff(out) if hasattr(self, "pos_ff") else out)


class DecoderLayer(TextLayer):
    """A layer of attention types 2 and 3."""

    attention = MultiHeadAttn

    def forward(  # type: ignore[override]
        self, dec_inp: Tensor, dec_attn_mask: Tensor | None = None, mems: Tensor | None = None
    ) -> Tensor:
        return super().forward(dec_inp, dec_attn_mask=dec_attn_mask, mems=mems)


class RelLearnableDecoderLayer(TextLayer):
    """A layer of attention type 1."""

    attention = RelLearnableMultiHeadAttn

    def forward(  # type: ignore[override]
        self,
        dec_inp: Tensor,
        r_emb: Tensor,
        r_w_bias: Tensor,
        r_bias: Tensor,
        dec_attn_mask: Tensor | None = None,
        mems: Tensor | None = None,
    ) -> Tensor:
        return super().forward(dec_inp, r_emb, r_w_bias, r_bias, dec_attn_mask=dec_attn_mask, mems=mems)


class RelPartialLearnableDecoderLayer(TextLayer):
    """A layer of attention type 0."""

    attention = RelPartialLearnableMultiHeadAttn

    def forward(  # type: ignore[override]
        self,
        dec_inp: Tensor,
        r: Tensor,
        r_w_bias: Tensor,
        r_r_bias: Tensor,
        dec_attn_mask: Tensor | None = None,
        mems: Tensor | None = None,
    ) -> Tensor:
        return super().forward(dec_inp, r, r_w_bias, r_r_bias, dec_attn_mask=dec_attn_mask, mems=mems)


explain(globals())


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
