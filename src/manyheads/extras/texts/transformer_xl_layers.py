"""The layers of the original Transformer-XL code (mem_transformer.py), by its names; see `transformer_xl`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from manyheads.extras.texts.common import (
    TextNotImplementedError,
    TextShapeError,
    check_at_least,
    check_rates,
    check_shape,
    explain,
    shape_of,
)
from manyheads.nn import masked_softmax, relative_shift


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
