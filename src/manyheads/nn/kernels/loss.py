"""Label-smoothed cross-entropy of a linear head.

`plain_loss` is the formula. `smoothed_loss` computes loss and gradients together, chunk by chunk. It stores one chunk
of logits instead of all logits, on every device, and on a CPU it processes parts that stay in the cache (decision 002).

Paper: Szegedy et al. 2016, arXiv:1512.00567, sec. 7. Symbols: epsilon = label_smoothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.linear import autocast_dtype, linear, product, product_of_rows
from manyheads.nn.kernels.modes import first_derivative_only
from manyheads.nn.smoothing import SmoothingKind, spread

if TYPE_CHECKING:
    from manyheads.nn.shapes import Bool, Float, Int

HeadLoss = tuple[Tensor, Tensor]
"""(loss_sum, nll_sum): the smoothed and the plain negative log-likelihood, summed over tokens, in nats."""

_LOG2_E = math.log2(math.e)


def plain_loss(
    hidden: Float[Tensor, "tokens d_model"],
    targets: Int[Tensor, " tokens"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None,
    label_smoothing: float = 0.0,
    smoothing_kind: SmoothingKind = "all",
    pad_id: int = 0,
    keep: Bool[Tensor, " tokens"] | None = None,
) -> HeadLoss:
    """Compute `smoothed_loss` by the formula under autograd, which stores all logits: the reference of the tests.

    Args: keep: False for tokens without a loss, for transforms of `torch.func`, which cannot select rows; None: all.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_probs = torch.log_softmax(F.linear(hidden, weight, bias), dim=1, dtype=wide)
    nll = -log_probs.gather(1, targets[:, None])[:, 0]
    parts = spread(smoothing_kind, label_smoothing, len(weight))
    loss = nll
    if label_smoothing:  # otherwise a token that a bias of -inf forbids would give 0 x inf = NaN
        without = excluded_row(parts.count, len(weight), pad_id)  # not subtracted, because it may be -inf
        shared = log_probs[:, : without.start or 0].sum(1) + log_probs[:, without.stop :].sum(1)
        loss = parts.on_target * nll - parts.share * shared
    if keep is not None:
        loss, nll = loss.masked_fill(~keep, 0.0), nll.masked_fill(~keep, 0.0)
    return loss.sum(), nll.sum().detach()


def smoothed_loss(
    hidden: Float[Tensor, "tokens d_model"],
    targets: Int[Tensor, " tokens"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None,
    label_smoothing: float = 0.0,
    chunk_tokens: int = 2048,
    smoothing_kind: SmoothingKind = "all",
    pad_id: int = 0,
    keep: Bool[Tensor, " tokens"] | None = None,
) -> HeadLoss:
    """Cross-entropy against 1 - s on the target plus s / vocab_size on every token (s = label_smoothing), summed.

    Paper: Szegedy et al. 2016, sec. 7. Differs: the same loss and gradients are computed chunk by chunk.
    Args:
        chunk_tokens: rows of logits that exist at the same time.
        smoothing_kind: which tokens share s; see `nn.smoothing.spread`.
        pad_id: the token that has no share, unless smoothing_kind is `all`; it is no target.
        keep: False for tokens without a loss, where `policy.saves_launches`; None: all.

    Returns: (loss_sum, nll_sum), at least in float32; only loss_sum has a gradient, and within `fast()` that one has
        none itself.
    Cost: memory for chunk_tokens x vocab_size logits and for the gradients of hidden, weight and bias.
    """
    smoothing = (label_smoothing, smoothing_kind, pad_id)
    if modes.is_transformed():
        return plain_loss(hidden, targets, weight, bias, *smoothing)
    compute = autocast_dtype(hidden)
    by_triton = policy.uses_triton("the loss", hidden, compute)
    if not (by_triton or modes.is_fast()):
        return _chunked_formula(hidden, targets, weight, bias, smoothing, chunk_tokens)
    if by_triton or policy.saves_launches(hidden.device):
        return apply_loss(_LossOfRows, hidden, targets, weight, bias, smoothing, keep, compute, by_triton)
    return apply_loss(_SmoothedLoss, hidden, targets, weight, bias, smoothing, chunk_tokens, compute)


def _chunked_formula(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    smoothing: tuple[float, SmoothingKind, int],
    chunk_tokens: int,
) -> HeadLoss:
    """Compute `plain_loss` for some tokens at a time; their logits are computed again in the backward pass."""
    # The formula stores logits, log-probabilities and their gradients, the fast implementation logits only.
    rows = max(1, policy.logit_rows_at_once(chunk_tokens, len(weight), hidden.device) // 4)
    if len(targets) <= rows:
        return plain_loss(hidden, targets, weight, bias, *smoothing)
    from manyheads.nn.kernels.reversible import checkpointed

    def both(some: Tensor, wanted: Tensor) -> Tensor:
        return torch.stack(plain_loss(some, wanted, weight, bias, *smoothing))

    parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    loss_sum, nll_sum = torch.stack([checkpointed(both, *part) for part in parts]).sum(0).unbind()
    return loss_sum, nll_sum.detach()


def smoothed_targets(
    targets: Int[Tensor, " tokens"], vocab_size: int, label_smoothing: float, kind: SmoothingKind, pad_id: int
) -> Float[Tensor, "tokens vocab_size"]:
    """Return the distributions of `smoothed_loss`; zeros where the target is padding, which has no loss.

    >>> smoothed_targets(torch.tensor([2, 0]), 5, 0.3, "others", pad_id=0)
    tensor([[0.0000, 0.1000, 0.7000, 0.1000, 0.1000],
            [0.0000, 0.0000, 0.0000, 0.0000, 0.0000]])
    """
    parts = spread(kind, label_smoothing, vocab_size)
    found = torch.full((len(targets), vocab_size), parts.share, device=targets.device)
    found[:, excluded_row(parts.count, vocab_size, pad_id)] = 0
    found.scatter_add_(1, targets[:, None], torch.full_like(found[:, :1], parts.on_target))
    return found.masked_fill(targets[:, None] == pad_id, 0)


def apply_loss(function: type[torch.autograd.Function], *arguments: Any) -> HeadLoss:
    """Return function.apply(*arguments). Under `no_grad`, detach first: the function itself does not see `no_grad`."""
    if not torch.is_grad_enabled():  # otherwise validation would also compute gradients
        arguments = tuple(one.detach() if isinstance(one, Tensor) else one for one in arguments)
    result: HeadLoss = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


if TorchVersion(torch.__version__) < "2.13":
    # Dynamo of torch 2.11 traces `_SmoothedLoss` and silently returns zeros as the gradient of `hidden`: it must not
    # trace it. (2.12 was not tried.)
    apply_loss = torch.compiler.disable(apply_loss)  # type: ignore[no-untyped-call]


def excluded_row(count: int, vocab_size: int, pad_id: int) -> slice:
    """Return the tokens that have no share of the smoothing: none, or padding. count: of tokens that share it."""
    return slice(0) if count == vocab_size else slice(pad_id, pad_id + 1)


def add_tiles(total: Tensor, part: Tensor) -> None:
    """Add part to total in place, on a CPU some rows at a time.

    torch first converts a part of a narrower dtype; the converted copy of a few rows stays in the cache.
    """
    rows = policy.logit_rows_in_a_tile(len(total), total[0].numel(), total.device)
    for total_rows, part_rows in zip(torch.split(total, rows), torch.split(part, rows), strict=True):
        total_rows += part_rows


def pad_rows(x: Tensor, most: int) -> Tensor:
    """Append rows of zeros to x up to a multiple that `policy` selects, and to at most `most` rows.

    oneDNN then compiles kernels for fewer shapes: 7,900 instead of 7,000 tokens per second on a CPU (decision 006).
    """
    missing = min(policy.pads_rows_to(x.shape[0], x.device), most) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _exponentiate(logits: Tensor, highest: Tensor, totals: Tensor, needs_error: bool, grad_bias: Tensor | None) -> None:
    """Compute E = exp(logits - row's highest) for some rows; softmax is E / total.

    Shape: logits (rows, vocab_size), highest and totals (rows, 1), grad_bias (vocab_size,).
    Writes `highest` and `totals`, the sums of the rows of E; adds the column sums of E / total to `grad_bias`; replaces
    the logits by E if `needs_error`. The caller divides the smaller factor of each product by `totals` instead of E.
    """
    z = logits.to(highest.dtype)
    torch.amax(z, dim=1, keepdim=True, out=highest)
    # exp2 is torch's own code. exp calls MKL, which takes four times as long on processors of other makers than Intel
    # (decision 015).
    z = z.sub_(highest) if z is not logits or needs_error else z - highest
    z.mul_(_LOG2_E).exp2_()
    torch.sum(z, dim=1, keepdim=True, out=totals)
    if grad_bias is not None:
        # Here E is in full precision and in the cache: the whole loss takes 71 instead of 81 ms (decision 002).
        grad_bias.addmv_(z.t(), totals.reciprocal()[:, 0])
    if needs_error and z is not logits:
        logits.copy_(z)


@first_derivative_only
class _SmoothedLoss(torch.autograd.Function):
    """d loss / d logits = p - t, with p = softmax(logits) and t the smoothed target: known together with the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        smoothing: tuple[float, SmoothingKind, int],
        chunk_tokens: int,
        compute: torch.dtype | None,
    ) -> HeadLoss:
        statistics = torch.promote_types(hidden.dtype, torch.float32)
        compute = compute or hidden.dtype
        vocab_size = weight.shape[0]
        amount, kind, pad_id = smoothing
        parts = spread(kind, amount, vocab_size)
        share, without = parts.share, excluded_row(parts.count, vocab_size, pad_id)
        sums = hidden.new_zeros(2, dtype=statistics)
        needs = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        chunk_tokens = policy.logit_rows_at_once(chunk_tokens, vocab_size, hidden.device)
        tile_rows = policy.logit_rows_in_a_tile(chunk_tokens, vocab_size, hidden.device)
        with policy.without_autocast(hidden.device):
            low_weight = weight.to(compute)
            low_bias = None if bias is None else bias.to(compute)
            summed_weight = weight.sum(dim=0, dtype=statistics) - weight[without].sum(dim=0, dtype=statistics)
            summed_hidden = hidden.to(compute).sum(dim=0, dtype=statistics)
            # These parts do not depend on the logits: the smoothing's part of all gradients, and the targets' part of
            # the gradient of the bias.
            grad_weight = (-share * summed_hidden).expand(vocab_size, -1).contiguous() if needs[2] else None
            grad_bias = None
            if bias is not None and needs[3]:
                grad_bias = torch.full_like(bias, -share * hidden.shape[0], dtype=statistics)
            for grad in (grad_weight, grad_bias):
                if grad is not None:
                    grad[without] = 0
            if grad_bias is not None:
                grad_bias.index_add_(0, targets, grad_bias.new_full(targets.shape, -parts.on_target))
            for start in range(0, hidden.shape[0], chunk_tokens):
                wanted = targets[start : start + chunk_tokens, None]
                count = wanted.shape[0]
                low_hidden = pad_rows(hidden[start : start + chunk_tokens].to(compute), chunk_tokens)
                padded = linear(low_hidden, low_weight, low_bias)
                padded[count:].zero_()  # rows of padding have no error, so no gradient, whatever the bias
                logits = padded[:count]
                target_logits = logits.gather(1, wanted).to(statistics)
                totals = torch.ones_like(padded[:, :1], dtype=statistics)
                highest = torch.empty_like(target_logits)
                tiles = (torch.split(x, tile_rows) for x in (logits, highest, totals[:count]))
                for tile, tile_highest, tile_totals in zip(*tiles, strict=True):
                    _exponentiate(tile, tile_highest, tile_totals, any(needs), grad_bias)
                normalisers = highest + totals[:count].log()
                sums += torch.stack([(normalisers - target_logits).sum(), normalisers.sum()])
                if any(needs):
                    # E - on_target x total at the target, in full precision, because a confident row's is a small
                    # difference of nearly equal numbers.
                    error = target_logits.sub_(highest).mul_(_LOG2_E).exp2_()
                    logits.scatter_(1, wanted, error.sub_(totals[:count], alpha=parts.on_target).to(compute))
                # From here on `padded` contains error x totals, without the smoothing's part.
                if grad_hidden is not None:
                    error = product(padded, low_weight)[:count].to(statistics) / totals[:count] - share * summed_weight
                    grad_hidden[start : start + chunk_tokens] = error
                if grad_weight is not None:
                    add_tiles(grad_weight, product_of_rows(padded, (low_hidden / totals).to(compute)))
            summed_bias: Tensor | float = 0.0
            if low_bias is not None:
                sharing = low_bias.clone()
                sharing[without] = 0  # a difference of sums would be NaN if padding has a bias of -inf
                summed_bias = sharing.sum(dtype=statistics)
            mean_logits = (summed_hidden @ summed_weight + hidden.shape[0] * summed_bias) / parts.count
        nll_sum, normaliser_sum = sums.unbind()
        nll_sum = nll_sum.clone()
        loss_sum = nll_sum.clone()
        if amount:  # otherwise a token that a bias of -inf forbids would give 0 x inf = NaN
            loss_sum = parts.on_target * nll_sum + parts.mass * (normaliser_sum - mean_logits)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors

        def scaled(grad: Tensor | None) -> Tensor | None:
            return None if grad is None else (grad * grad_loss).to(ctx.weight_dtype)

        hidden = None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype)
        return hidden, None, scaled(grad_weight), scaled(grad_bias), None, None, None


@first_derivative_only
class _LossOfRows(torch.autograd.Function):
    """`_SmoothedLoss` in 20 operations instead of 110, of all rows that fit into memory, kept or not.

    To select the kept rows, the host would have to wait for the device. by_triton: one kernel replaces the operations
    between the product of the logits and those of the gradients (decision 071).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        smoothing: tuple[float, SmoothingKind, int],
        keep: Tensor | None,
        compute: torch.dtype | None,
        by_triton: bool,
    ) -> HeadLoss:
        statistics = torch.promote_types(hidden.dtype, torch.float32)
        compute = compute or hidden.dtype
        amount, kind, pad_id = smoothing
        parts = spread(kind, amount, len(weight))
        without = excluded_row(parts.count, len(weight), pad_id)
        low_hidden, low_weight = hidden.to(compute), weight.to(compute)
        low_bias = None if bias is None else bias.to(compute)
        counted = None if keep is None else keep.to(statistics)[:, None]
        needs = ctx.needs_input_grad
        grad_hidden: list[Tensor] = []
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        sums: Tensor | None = None
        rows = policy.logit_rows_of_a_gpu(len(weight), statistics)
        for start in range(0, len(hidden), rows):
            some = slice(start, start + rows)
            wanted = targets[some, None]
            logits = F.linear(low_hidden[some], low_weight, low_bias)
            if by_triton:
                from manyheads.nn.kernels.triton.loss import loss_of_rows

                kept = None if keep is None else keep[some]
                parts_sum = loss_of_rows(logits, targets[some], kept, parts, without.start, any(needs))
                error = low_error = logits
            else:
                log_probs = torch.log_softmax(logits, 1, dtype=statistics)
                found = [log_probs.gather(1, wanted)]
                if amount:
                    shared = log_probs.sum(1, keepdim=True)
                    found.append(shared - log_probs[:, without] if without.stop else shared)
                numbers = torch.cat(found, 1)  # (rows, 1 or 2)
                parts_sum = numbers.sum(0) if counted is None else (numbers.t() @ counted[some])[:, 0]
            sums = parts_sum if sums is None else sums + parts_sum
            if not any(needs):
                continue
            if not by_triton:
                error = log_probs.exp_()  # p - t, (rows, vocab_size)
                if amount:
                    error.sub_(parts.share)
                    if without.stop:
                        error[:, without] += parts.share
                error.scatter_(1, wanted, -parts.on_target, reduce="add")
                low_error = (error if counted is None else error.mul_(counted[some])).to(compute)
            if needs[0]:
                grad_hidden.append(low_error @ low_weight)
            if needs[2]:
                grad = (low_error.t() @ low_hidden[some]).to(weight.dtype)
                grad_weight = grad if grad_weight is None else grad_weight.add_(grad)
            if bias is not None and needs[3]:
                grad = error.sum(0, dtype=statistics).to(bias.dtype)
                grad_bias = grad if grad_bias is None else grad_bias.add_(grad)
        if sums is None:
            sums = hidden.new_zeros(2, dtype=statistics)
        nll_sum = -sums[0]
        loss_sum = parts.on_target * nll_sum - parts.share * sums[1] if amount else nll_sum.clone()
        whole = grad_hidden[0] if len(grad_hidden) == 1 else torch.cat(grad_hidden) if grad_hidden else None
        ctx.save_for_backward(whole, grad_weight, grad_bias)
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = (None if grad is None else grad * grad_loss for grad in ctx.saved_tensors)
        return hidden, None, weight, bias, None, None, None, None
