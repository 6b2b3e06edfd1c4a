"""The names of the original Transformer-XL code (mem_transformer.py), over this package's functions.

Tensors are length first; in masks 1 means blocked. Parameters have the original's names, so its checkpoints load with
`load_state_dict`. Differs from the original, whose numbers it otherwise has:

- memory holds `mem_len` positions before the `ext_len` last ones, also while it is short;
- attention types 2 and 3 add positions when they read memory, not to the memory itself;
- with `pre_lnorm`, types 2 and 3 normalise queries as well as keys;
- a query sees itself if `same_length` is set and there is no memory; a row without keys gives zeros;
- losses come in the order of the tokens (`crit.keep_order = False` gives the original's order, by cluster);
- distances are float32 in every type; an odd width has one cosine less; sampled softmax works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.extras.texts.common import (
    TextIndexError,
    TextShapeError,
    TextValueError,
    check_at_least,
    check_ids,
    check_rates,
    check_shape,
    explain,
    shape_of,
)
from manyheads.extras.texts.transformer_xl_layers import (
    AdaptiveEmbedding,
    DecoderLayer,
    LogUniformSampler,
    MultiHeadAttn,
    PositionalEmbedding,
    PositionwiseFF,
    ProjectedAdaptiveLogSoftmax,
    RelLearnableDecoderLayer,
    RelLearnableMultiHeadAttn,
    RelMultiHeadAttn,
    RelPartialLearnableDecoderLayer,
    RelPartialLearnableMultiHeadAttn,
    TextLayer,
    rows_of_distances,
    sample_logits,
)
from manyheads.nn import Causal, Window
from manyheads.nn.attention.masks import dense_mask

__all__ = [
    "AdaptiveEmbedding",
    "DecoderLayer",
    "LMOrderedIterator",
    "LogUniformSampler",
    "MemTransformerLM",
    "MultiHeadAttn",
    "PositionalEmbedding",
    "PositionwiseFF",
    "ProjectedAdaptiveLogSoftmax",
    "RelLearnableDecoderLayer",
    "RelLearnableMultiHeadAttn",
    "RelMultiHeadAttn",
    "RelPartialLearnableDecoderLayer",
    "RelPartialLearnableMultiHeadAttn",
    "sample_logits",
]


_LAYERS: tuple[type[TextLayer], ...] = (
    RelPartialLearnableDecoderLayer,
    RelLearnableDecoderLayer,
    DecoderLayer,
    DecoderLayer,
)


class MemTransformerLM(nn.Module):
    """The language model: segments of ids, targets and memories -> [losses, *memories].

        >>> model = MemTransformerLM(100, 2, 2, 16, 8, 32, 0.1, 0.0, tgt_len=4, ext_len=0, mem_len=6)
        >>> data, target = torch.randint(100, (4, 3)), torch.randint(100, (4, 3))
        >>> loss, *mems = model(data, target)
        >>> loss, *mems = model(data, target, *mems)  # the next segment
        >>> loss.shape, len(mems), mems[0].shape
        (torch.Size([4, 3]), 3, torch.Size([6, 3, 16]))

    Paper: Dai et al. 2019, arXiv:1901.02860.
    Args:
        d_embed: width of the embedding; None: d_model.
        tie_projs: for each cluster, whether embedding and softmax share a projection.
        tgt_len, ext_len, mem_len: positions of a segment, of its end that the next one reads again, and of the memory;
            None: 0. Types 1 and 3 train a vector for each of their sum.
        adapt_inp: without effect, as in the original.
        attn_type: 0 relative sinusoidal, 1 relative trained, 2 absolute sinusoidal, 3 absolute trained.
        clamp_len: larger distances count as this one; below 1: no limit.
        sample_softmax: candidates of a sampled softmax in training; below 1: none.
    """

    def __init__(
        self,
        n_token: int,
        n_layer: int,
        n_head: int,
        d_model: int,
        d_head: int,
        d_inner: int,
        dropout: float,
        dropatt: float,
        tie_weight: bool = True,
        d_embed: int | None = None,
        div_val: int = 1,
        tie_projs: Sequence[bool] = (False,),
        pre_lnorm: bool = False,
        tgt_len: int | None = None,
        ext_len: int | None = None,
        mem_len: int | None = None,
        cutoffs: Sequence[int] = (),
        adapt_inp: bool = False,
        same_length: bool = False,
        attn_type: int = 0,
        clamp_len: int = -1,
        sample_softmax: int = -1,
    ) -> None:
        super().__init__()
        check_at_least(1, n_token=n_token, n_layer=n_layer, n_head=n_head, d_model=d_model, d_head=d_head)
        check_rates(dropout=dropout, dropatt=dropatt)
        for name, number in {"clamp_len": clamp_len, "sample_softmax": sample_softmax}.items():
            if not isinstance(number, int):
                raise TextValueError(f"{name} is {number!r}; it must be a whole number; -1: none.", fields=[name])
        if attn_type not in (0, 1, 2, 3):
            raise TextValueError(
                f"attn_type is {attn_type!r}; it must be 0 (relative, sinusoidal), 1 (relative, trained), 2 (absolute,"
                " sinusoidal) or 3 (absolute, trained).",
                fields=["attn_type"],
            )
        if attn_type == 3 and n_head * d_head != d_model:
            raise TextValueError(
                f"attn_type 3 adds positions of n_head x d_head = {n_head} x {d_head} = {n_head * d_head} to vectors of"
                f" d_model {d_model}; make them equal, for example by d_head={d_model // n_head}.",
                fields=["d_head", "d_model"],
            )
        self.n_token, self.n_layer, self.n_head, self.d_model, self.d_head = n_token, n_layer, n_head, d_model, d_head
        self.d_embed = d_embed = d_model if d_embed is None else d_embed
        self.word_emb = AdaptiveEmbedding(n_token, d_embed, d_model, cutoffs, div_val=div_val)
        self.drop = nn.Dropout(dropout)
        self.reset_length(tgt_len or 0, ext_len or 0, mem_len or 0)
        self.max_klen = self.tgt_len + self.ext_len + self.mem_len
        if attn_type in (1, 3) and self.max_klen < 1:
            raise TextValueError(
                f"attn_type {attn_type} trains a vector for each distance, but tgt_len + ext_len + mem_len is 0; give"
                " tgt_len.",
                fields=["tgt_len"],
            )
        self.attn_type, self.same_length, self.clamp_len = attn_type, same_length, clamp_len
        lengths = {"tgt_len": tgt_len, "ext_len": ext_len, "mem_len": mem_len} if attn_type < 2 else {}
        self.layers = nn.ModuleList(
            _LAYERS[attn_type](
                n_head, d_model, d_head, d_inner, dropout, dropatt=dropatt, pre_lnorm=pre_lnorm, **lengths
            )
            for _ in range(n_layer)
        )
        self.sample_softmax, self.tie_weight = sample_softmax, tie_weight
        if sample_softmax > 0:
            self._make_sampled_softmax(cutoffs)
        else:
            self._make_adaptive_softmax(cutoffs, tie_projs)
        self._create_params()

    def _make_sampled_softmax(self, cutoffs: Sequence[int]) -> None:
        if self.tie_weight and (self.d_embed != self.d_model or cutoffs):
            raise TextValueError(
                f"sample_softmax is {self.sample_softmax} with tie_weight, which needs one table of d_model"
                f" {self.d_model}, but d_embed is {self.d_embed} and cutoffs are {list(cutoffs)}; set tie_weight to"
                " False, or sample_softmax to -1.",
                fields=["sample_softmax"],
            )
        self.out_layer = nn.Linear(self.d_model, self.n_token)
        if self.tie_weight:
            self.out_layer.weight = cast(nn.Embedding, self.word_emb.emb_layers[0]).weight
        self.sampler = LogUniformSampler(self.n_token, self.sample_softmax)

    def _make_adaptive_softmax(self, cutoffs: Sequence[int], tie_projs: Sequence[bool]) -> None:
        if not isinstance(tie_projs, list | tuple | None):
            raise TextValueError(
                f"tie_projs is {tie_projs!r}; it must be a list of True and False, one for each cluster.",
                fields=["tie_projs"],
            )
        div_val = self.word_emb.div_val
        self.crit = ProjectedAdaptiveLogSoftmax(
            self.n_token, self.d_embed, self.d_model, cutoffs, div_val=div_val, keep_order=True
        )
        if self.tie_weight:
            for layer, table in zip(self.crit.out_layers, self.word_emb.emb_layers, strict=True):
                layer.weight = cast(nn.Embedding, table).weight
        clusters, projections = len(self.crit.cutoffs), self.word_emb.emb_projs
        for index, is_tied in enumerate(tie_projs or ()):
            if is_tied and index >= clusters and len(projections):
                raise TextIndexError(
                    f"tie_projs {list(tie_projs)} ties cluster {index}, but {clusters - 1} cutoffs make {clusters}"
                    " clusters; give one value for each cluster."
                )
            if is_tied and len(projections):
                self.crit.out_projs[index] = projections[0 if div_val == 1 else index]

    def backward_compatible(self) -> None:
        """Compute without a sampled softmax, as models that were saved before it existed."""
        self.sample_softmax = -1

    def _create_params(self) -> None:
        """Make the parameters of positions; the original leaves them uninitialised, here they are N(0, 0.02)."""
        sizes: dict[str, tuple[int, ...]] = {}
        heads = (self.n_head, self.d_head)
        if self.attn_type in (0, 2):
            self.pos_emb = PositionalEmbedding(self.d_model)
        if self.attn_type == 0:
            sizes = {"r_w_bias": heads, "r_r_bias": heads}
        if self.attn_type in (1, 3):
            sizes = {"r_emb": (self.n_layer, self.max_klen, *heads)}
        if self.attn_type == 1:
            sizes |= {"r_w_bias": (self.n_layer, *heads), "r_bias": (self.n_layer, self.max_klen, self.n_head)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.empty(size).normal_(std=0.02)))

    def reset_length(self, tgt_len: int, ext_len: int, mem_len: int) -> None:
        """Set the lengths of a segment, of what is read again and of the memory; trained positions stay as they are."""
        check_at_least(0, tgt_len=tgt_len, ext_len=ext_len, mem_len=mem_len)
        self.tgt_len, self.ext_len, self.mem_len = tgt_len, ext_len, mem_len

    def init_mems(self) -> list[Tensor] | None:
        """Return empty memories for the inputs of all layers and the last output; None if there is no memory."""
        if not self.mem_len:
            return None
        like = next(self.parameters())
        return [like.new_empty(0) for _ in range(self.n_layer + 1)]

    def _update_mems(
        self, hids: Sequence[Tensor], mems: Sequence[Tensor] | None, qlen: int, mlen: int
    ) -> list[Tensor] | None:
        """Return `mem_len` positions that end before the last `ext_len` ones, without gradient."""
        if mems is None:
            return None
        end = mlen + max(0, qlen - self.ext_len)
        begin = max(0, end - self.mem_len)
        together = (torch.cat([old, new]) if old.numel() else new for old, new in zip(mems, hids, strict=True))
        return [both[begin:end].detach() for both in together]

    def _blocked(self, qlen: int, mlen: int, device: torch.device) -> Tensor:
        """Return the mask of all layers, (qlen, klen, 1), True = blocked."""
        seen = Causal() & Window(left=max(1, self.mem_len) - 1, right=None) if self.same_length else Causal()
        allowed = cast(Tensor, dense_mask(seen, qlen, mlen + qlen, device, mlen))
        return ~allowed[0, 0, :, :, None]

    def _distances(self, klen: int, like: Tensor) -> Tensor:
        """Return the distance of each key, farthest first, at least in float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        distances = torch.arange(klen - 1, -1, -1, device=like.device, dtype=dtype)
        return distances.clamp(max=self.clamp_len) if self.clamp_len > 0 else distances

    def _positions(self, index: int, klen: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return what a layer's attention needs of the distances: of types 2 and 3 the addends, (klen, 1, d_model)."""
        if self.attn_type == 0:
            return cast(Tensor, self.r_w_bias), cast(Tensor, self.r_r_bias)
        if self.attn_type == 1:
            first = max(0, self.max_klen - self.clamp_len) if self.clamp_len > 0 else 0
            r_emb, r_w_bias, r_bias = (cast(Tensor, part)[index] for part in (self.r_emb, self.r_w_bias, self.r_bias))
            return r_emb[first:], r_w_bias, r_bias[first:]
        if self.attn_type == 3:
            r_emb = cast(Tensor, self.r_emb)[index].flatten(1)
            return (r_emb[rows_of_distances(self.max_klen, klen, like.device)][:, None],)
        return ()

    def _forward(self, dec_inp: Tensor, mems: Sequence[Tensor] | None = None) -> tuple[Tensor, list[Tensor] | None]:
        """Return the last hidden states, (qlen, bsz, d_model), and the next memories."""
        word_emb = self.word_emb(dec_inp)
        qlen, mlen = dec_inp.shape[0], 0 if mems is None else mems[0].shape[0]
        klen, blocked = mlen + qlen, self._blocked(qlen, mlen, word_emb.device)
        kept = self.drop(torch.ones_like(word_emb)) if self.attn_type == 2 else None  # one draw for words and positions
        core_out = self.drop(word_emb) if kept is None else word_emb * kept
        encoded = None
        if self.attn_type in (0, 2):
            encoded = self.pos_emb(self._distances(klen, word_emb)).to(word_emb.dtype)
            encoded = self.drop(encoded) if kept is None else encoded
        hids = [core_out]
        for index, layer in enumerate(self.layers):
            memory = None if mems is None or not mlen else mems[index]
            given = self._positions(index, klen, word_emb)
            if self.attn_type == 0:
                given = (cast(Tensor, encoded), *given)
            elif self.attn_type == 2 and index == 0:
                given = (cast(Tensor, encoded),)
            if self.attn_type >= 2 and given:
                memory = None if memory is None else memory + given[0][:mlen]
                core_out, given = core_out + given[0][mlen:] * (1 if kept is None else kept), ()
            core_out = layer(core_out, *given, dec_attn_mask=blocked, mems=memory)
            hids.append(core_out)
        return self.drop(core_out), self._update_mems(hids, mems, qlen, mlen)

    def forward(self, data: Tensor, target: Tensor, *mems: Tensor) -> list[Tensor]:
        """Read a segment.

        Args: data: ids, (len, bsz). target: the next ids of its last positions, (tgt_len, bsz). mems: the memories of
            the last call.

        Returns: losses, (tgt_len, bsz), and the next memories, one more than layers; without memory only the losses.
        Raises: TextShapeError, TextIndexError: see there.
        """
        check_shape("data", data, ["len", "bsz"], "length first; a batch-first one is data.t()")
        check_shape("target", target, ["tgt_len", data.shape[1]], "length first, with the lanes of data")
        if target.shape[0] > data.shape[0]:
            raise TextShapeError(
                f"target has {target.shape[0]} positions, but data only {data.shape[0]}; give at most one target for"
                " each position of data."
            )
        check_ids(target, "target", self.n_token)
        self._check_mems(mems, data)
        hidden, new_mems = self._forward(data, mems or self.init_mems())
        hidden = hidden[hidden.shape[0] - target.shape[0] :]
        return [self._losses(hidden, target), *(new_mems or ())]

    def _check_mems(self, mems: Sequence[Tensor], data: Tensor) -> None:
        if mems and len(mems) != self.n_layer + 1:
            raise TextShapeError(
                f"the number of memories is {len(mems)}, but {self.n_layer} layers have {self.n_layer + 1}; give those"
                " of the last call, model(data, target, *mems)."
            )
        for memory in mems:
            remedy = "give those of the last call, and none to lanes of another number"
            if 0 not in shape_of("a memory", memory, "mlen, bsz, d_model"):
                check_shape("a memory", memory, ["mlen", data.shape[1], self.d_model], remedy)
                check_shape("a memory", memory, [mems[0].shape[0], data.shape[1], self.d_model], remedy)

    def _losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        if hasattr(self, "out_layer"):
            if self.sample_softmax > 0 and self.training:
                weights, bias = self.out_layer.weight, self.out_layer.bias
                logits = sample_logits(partial(F.embedding, weight=weights), bias, target, hidden, self.sampler)
                return -logits.log_softmax(dim=-1)[:, :, 0]
            log_probs = self.out_layer(hidden).log_softmax(dim=-1)
            return -log_probs.gather(-1, target[:, :, None])[:, :, 0]  # type: ignore[no-any-return]
        return cast(Tensor, self.crit(hidden.flatten(0, 1), target.flatten())).view(target.shape)


class LMOrderedIterator:
    """A text in `bsz` lanes, read segment by segment: yields data, target and the length of target, length first.

    The last len(data) % bsz ids are left out, as in the original; `SegmentStream` reads them too.

    Args: data: ids, (tokens,). bptt: positions of a segment. ext_len: positions before a segment that are read again.
    Raises: TextValueError: there are fewer than two ids for each lane.
    """

    def __init__(self, data: Tensor, bsz: int, bptt: int, device: Any = "cpu", ext_len: int | None = None) -> None:
        check_shape("data", data, ["tokens"], "a text is one sequence of ids")
        check_at_least(1, bsz=bsz, bptt=bptt)
        check_at_least(0, ext_len=ext_len or 0)
        self.bsz, self.bptt, self.ext_len, self.device = bsz, bptt, ext_len or 0, device
        self.n_step = len(data) // bsz
        if self.n_step < 2:
            raise TextValueError(
                f"data has {len(data)} ids for {bsz} lanes; a lane needs two, one to read and one to predict: give more"
                " text, or a smaller bsz.",
                fields=["bsz"],
            )
        self.data = data[: self.n_step * bsz].view(bsz, -1).t().contiguous().to(device)
        self.n_batch = -(-self.n_step // bptt)

    def get_batch(self, i: int, bptt: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Return the segment that begins at position i."""
        seq_len = min(self.bptt if bptt is None else bptt, len(self.data) - 1 - i)
        return self.data[max(0, i - self.ext_len) : i + seq_len], self.data[i + 1 : i + 1 + seq_len], seq_len

    def get_fixlen_iter(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield segments of `bptt` positions; the last one may be shorter."""
        for i in range(start, len(self.data) - 1, self.bptt):
            yield self.get_batch(i)

    def get_varlen_iter(
        self, start: int = 0, std: int = 5, min_len: int = 5, max_deviation: int = 3
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield segments of about `bptt` positions, one in twenty of about half as many, by numpy's random numbers."""
        i = start
        while True:
            mean = self.bptt if np.random.random() < 0.95 else self.bptt / 2.0  # noqa: NPY002 (the original's seed)
            drawn = int(np.random.normal(mean, std))  # noqa: NPY002
            segment = self.get_batch(i, min(self.bptt + max_deviation * std, max(min_len, drawn)))
            i += segment[2]
            yield segment
            if segment[2] < 1 or i >= len(self.data) - 2:
                return

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        return self.get_fixlen_iter()


explain(globals())
