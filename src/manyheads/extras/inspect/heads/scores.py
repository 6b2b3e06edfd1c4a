"""Factors of attention heads, figures of their attention, and how much each head matters.

Papers: Michel et al. 2019, arXiv:1905.10650, sec. 2.3 and 4.1 (importance, ablation); Voita et al. 2019,
arXiv:1905.09418, sec. 4 and 5 (confidence, positional heads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from manyheads.data.batch import PairBatch, SegmentBatch
from manyheads.errors import DataError, RequestError, ShapeError, refuse_nan
from manyheads.evaluation.likelihood import evaluation_mode
from manyheads.extras.inspect.heads.names import Head, all_heads, prunable
from manyheads.models.composites import LanguageModel, Seq2Seq
from manyheads.nn.attention.observing import observe
from manyheads.nn.kernels.modes import fast

if TYPE_CHECKING:
    from manyheads.models.size_checks import HeadKind

Model = Seq2Seq | LanguageModel
Batches = Sequence[PairBatch] | Sequence[SegmentBatch]
"""Pairs for a `Seq2Seq`, or the consecutive segments of a text for a `LanguageModel`, which remembers the last one."""


@contextmanager
def masked_heads(model: nn.Module, factors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, multiply each head's output by its factor: 1 keeps a head, 0 removes it.

        >>> from manyheads.nn import MultiHeadAttention
        >>> attention = MultiHeadAttention(16, 4)
        >>> with masked_heads(attention, {"": torch.tensor([1.0, 0.0, 0.5, 1.0])}):
        ...     out, _ = attention(torch.randn(2, 5, 16))

    Factors may have gradients. Reversible layers give them none; they compute again in the backward pass, which
    therefore belongs in the block.

    Paper: Michel et al. 2019, eq. 1. Symbols: xi = factors.
    Args: factors: by the name of an attention module in the model (as in `named_modules`, `observe`): (heads,), or
        (batch, heads) with factors of their own for each row.

    Raises: RequestError: there is no attention of that name. ShapeError: it has another number of heads; in the block:
        the batch has another number of rows.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name, masks in factors.items():
            attention = modules.get(name)
            projection, heads = (getattr(attention, part, None) for part in ("out_proj", "num_heads"))
            if not isinstance(projection, nn.Module) or heads is None:
                raise RequestError(f"there is no attention {name!r} in this model; `named_modules` lists the names.")
            if masks.dim() not in (1, 2) or masks.shape[-1] != heads:
                raise ShapeError(
                    f"factors of shape {tuple(masks.shape)} do not fit the {heads} heads of {name!r}; give ({heads},)"
                    f" or (batch, {heads})."
                )
            handle = projection.register_forward_pre_hook(partial(_masked, masks))
            stack.callback(handle.remove)
        yield


def _masked(factors: Tensor, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Return the merged heads, (batch, q_len, heads x head_dim), times their factors."""
    [merged] = inputs
    if factors.dim() == 2 and len(factors) != len(merged):
        raise ShapeError(f"factors of {len(factors)} rows do not fit a batch of {len(merged)} rows.")
    heads = merged.reshape(*merged.shape[:-1], factors.shape[-1], -1)
    return (heads * factors.to(merged.dtype)[..., None, :, None]).flatten(-2)


def attention_layers(model: Seq2Seq | LanguageModel) -> dict[HeadKind, list[str]]:
    """Return the names of the attention modules of all layers, by kind, in the order of `config.heads_by_layer`.

    Raises: RequestError: heads of this architecture cannot be masked.
    """
    prunable(model.config)
    names = {id(module): name for name, module in model.named_modules()}
    layers: dict[HeadKind, list[nn.Module]] = cast(Any, model.body).attention_layers()
    return {kind: [names[id(module)] for module in modules] for kind, modules in layers.items()}


def masks_without(
    model: Seq2Seq | LanguageModel, removed: Collection[Head] = (), *, rows: int | None = None
) -> dict[str, Tensor]:
    """Return factors for `masked_heads`: 0 for these heads, 1 for all others, in the order of `all_heads`.

    Args: rows: of a batch in which each row has factors of its own; None: one factor for all.

    Raises: RequestError: heads of this architecture cannot be masked, or one does not exist.
    """
    config, device = prunable(model.config), next(model.parameters()).device
    check_heads(removed, set(all_heads(config)))
    factors: dict[str, Tensor] = {}
    for kind, names in attention_layers(model).items():
        for layer, (name, count) in enumerate(zip(names, config.heads_by_layer()[kind], strict=True)):
            kept = [float(Head(kind, layer, number) not in removed) for number in range(count)]
            mask = torch.tensor(kept, device=device)
            factors[name] = mask if rows is None else mask.expand(rows, -1).clone()
    return factors


def check_heads(removed: Collection[Head], known: Collection[Head]) -> None:
    """Raises: RequestError: a head is not known."""
    for head in removed:
        if head not in known:
            raise RequestError(f"there is no head {head}; `all_heads(model.config)` lists those that the model has.")


@dataclass(frozen=True)
class HeadLook:
    """Averages of one head's attention over all queries.

    entropy: of its weights, in bits. confidence: its largest weight. offset: the distance key - query that the largest
    weight has most often, and offset_share how often; None for attention to another sequence.
    """

    entropy: float
    confidence: float
    offset: int | None = None
    offset_share: float | None = None


def head_importance(model: Model, batches: Batches, *, device: torch.device | str = "cpu") -> dict[Head, float]:
    """Return how much the loss changes with each head's factor, to first order.

    Paper: Michel et al. 2019, eq. 2: I_h = E_x |dL(x) / dxi_h|, where xi_h is the factor of head h, at 1. The loss
        L(x) of a sentence, or of a segment of a lane, is summed over its tokens here, and I_h is per token.
    Raises: DataError: there is no token. NonFiniteError: the model gives NaN.
    """
    heads, num_tokens = all_heads(model.config), 0
    sums = dict.fromkeys(heads, 0.0)
    state: Any = None
    with evaluation_mode(model), torch.enable_grad(), fast():
        for batch in batches:
            masks = masks_without(model, rows=len(batch.sample_ids))
            # Each row has factors of its own, so one backward pass gives the gradients of all rows.
            leaves = [leaf.requires_grad_() for leaf in masks.values()]
            with masked_heads(model, masks):
                output = model(batch.to(device), state)
                found = torch.autograd.grad(output.loss_sum, leaves)
            state = output.state
            changes = [change for gradient in found for change in gradient.abs().sum(0).tolist()]
            for head, change in zip(heads, changes, strict=True):
                sums[head] += change
            num_tokens += batch.num_target_tokens()
    _check_tokens(num_tokens)
    refuse_nan(any(map(math.isnan, sums.values())))
    return {head: total / num_tokens for head, total in sums.items()}


def _check_tokens(num_tokens: int) -> None:
    if not num_tokens:
        raise DataError("there is no target token, so heads cannot be measured; give at least one sentence.")


def normalised_importance(importance: dict[Head, float]) -> dict[Head, float]:
    """Return the importance of each head divided by the l2 norm of its layer, as before pruning (sec. 4.1)."""
    norms: dict[str, float] = {}
    for head, value in importance.items():
        norms[head.layer_name] = math.hypot(norms.get(head.layer_name, 0.0), value)
    return {head: value / (norms[head.layer_name] or 1.0) for head, value in importance.items()}


@torch.no_grad()
def nats_per_token(
    model: Model, batches: Batches, removed: Sequence[Head] = (), *, device: torch.device | str = "cpu"
) -> float:
    """Return the mean negative log-likelihood, with some heads masked.

    Raises: DataError: there is no token. NonFiniteError: the model gives NaN.
    """
    masks = masks_without(model, removed) if removed else {}
    sums: list[Tensor] = []
    num_tokens = 0
    state: Any = None
    with evaluation_mode(model), masked_heads(model, masks), fast():
        for batch in batches:
            output = model(batch.to(device), state)
            state = output.state
            sums.append(output.nll_sum)  # read at the end, because each read waits for the GPU
            num_tokens += batch.num_target_tokens()
    _check_tokens(num_tokens)
    nll_sum = math.fsum(float(value) for value in sums)
    refuse_nan(math.isnan(nll_sum))
    return nll_sum / num_tokens


def head_ablations(
    model: Model,
    batches: Batches,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> tuple[float, dict[Head, float]]:
    """Return nats per token of the whole model, and how many more there are without each head alone.

    Paper: Michel et al. 2019, sec. 3.2, with the likelihood in place of BLEU.
    Args: on_progress: told after each head how many are done.
    """
    whole, found = nats_per_token(model, batches, device=device), dict[Head, float]()
    for head in all_heads(model.config):
        found[head] = nats_per_token(model, batches, [head], device=device) - whole
        if on_progress is not None:
            on_progress(len(found))
    return whole, found


@torch.no_grad()
def head_looks(model: Model, batches: Batches, *, device: torch.device | str = "cpu") -> dict[Head, HeadLook]:
    """Return the averages of each head's attention weights, without padding.

    Paper: Voita et al. 2019: confidence is the average of a head's largest weight (sec. 4; theirs leaves out the end
        of the sentence), and a head is positional if its largest weight is at one distance at least 90% of the time
        (sec. 5.1).
    Raises: DataError: there is no token.
    """
    layers = {
        (kind, number): name for kind, names in attention_layers(model).items() for number, name in enumerate(names)
    }
    tallies = {key: _Tally(is_self=key[0] != "cross") for key in layers}
    state: Any = None
    num_tokens = 0
    with evaluation_mode(model), fast():
        for batch in batches:
            here = batch.to(device)
            with observe(model) as record:
                state = model(here, state).state
            num_tokens += batch.num_target_tokens()
            for (kind, number), tally in tallies.items():
                weights = record[layers[kind, number]][-1]
                real = torch.arange(weights.shape[2], device=weights.device) < _num_queries(here, kind)[:, None]
                tally.add(weights, real)
    _check_tokens(num_tokens)
    return {head: tallies[head.kind, head.layer].look(head.number) for head in all_heads(model.config)}


def _num_queries(batch: PairBatch | SegmentBatch, kind: str) -> Tensor:
    """Return the number of real queries of every row."""
    if isinstance(batch, SegmentBatch):
        return batch.lengths
    return batch.source_lengths if kind == "encoder" else batch.target_lengths - 1


class _Tally:
    """Sums of one layer. is_self: queries and keys are one sequence, and the queries are the last of the keys."""

    def __init__(self, *, is_self: bool) -> None:
        self._is_self = is_self
        self._count = 0
        self._entropy: list[Tensor] = []
        self._largest: list[Tensor] = []
        self._offsets: list[dict[int, int]] = []

    def add(self, weights: Tensor, real: Tensor) -> None:
        """Add weights (batch, heads, q_len, k_len) at the real queries (batch, q_len)."""
        rows = weights.float().transpose(0, 1)[:, real]  # (heads, queries, k_len)
        self._count += rows.shape[1]
        self._entropy.append(torch.special.entr(rows).sum((1, 2)).cpu().double() / math.log(2))
        largest, places = rows.max(dim=2)
        self._largest.append(largest.sum(1).cpu().double())
        if self._is_self:
            self._offsets = self._offsets or [{} for _ in range(rows.shape[0])]
            first = weights.shape[3] - weights.shape[2]  # after memory
            queries = torch.arange(first, weights.shape[3], device=weights.device).expand(real.shape)[real]
            for tally, offsets in zip(self._offsets, places - queries, strict=True):
                for offset, times in zip(*(x.tolist() for x in offsets.unique(return_counts=True)), strict=True):
                    tally[offset] = tally.get(offset, 0) + times

    def look(self, number: int) -> HeadLook:
        """Return the means of one head."""
        entropy, largest = (float(torch.stack(sums)[:, number].sum()) for sums in (self._entropy, self._largest))
        if not self._is_self:
            return HeadLook(entropy / self._count, largest / self._count)
        offset, times = max(self._offsets[number].items(), key=lambda item: (item[1], -abs(item[0])))
        return HeadLook(entropy / self._count, largest / self._count, offset, times / self._count)
