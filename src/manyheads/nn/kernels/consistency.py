"""R-Drop's loss: cross-entropy of two passes under different dropout, and the divergence between the two.

`plain_consistent_loss` is the formula. `consistent_loss` computes it chunk by chunk, with the gains of `kernels.loss`.

Paper: Liang et al. 2021, arXiv:2106.14448, eq. 2 to 4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.nn.kernels import policy
from manyheads.nn.kernels.derivatives import first_derivative_only
from manyheads.nn.kernels.linear import linear, product, product_of_rows
from manyheads.nn.kernels.loss import add_tiles, apply_loss, autocast_dtype, excluded_row, pad_rows, plain_loss
from manyheads.nn.shapes import Float, Int
from manyheads.nn.smoothing import SmoothingKind, Spread, spread

__all__ = ["consistent_loss", "plain_consistent_loss"]


def plain_consistent_loss(
    first: Tensor,
    second: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: float,
    label_smoothing: float = 0.0,
    smoothing_kind: SmoothingKind = "all",
    pad_id: int = 0,
) -> Tensor:
    """Compute the loss_sum of `consistent_loss` under autograd, which stores all logits; the reference in tests.

    Paper: Liang et al. 2021, eq. 2 to 4. Shape: see `consistent_loss`.
    """
    smoothing = (label_smoothing, smoothing_kind, pad_id)
    losses = [plain_loss(x, targets, weight, bias, *smoothing)[0] for x in (first, second)]
    log_p, log_q = (torch.log_softmax(F.linear(x, weight, bias), dim=1) for x in (first, second))
    divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()  # KL(p || q) + KL(q || p)
    return (losses[0] + losses[1]) / 2 + alpha / 4 * divergence


def consistent_loss(
    first: Float[Tensor, "tokens d_model"],
    second: Float[Tensor, "tokens d_model"],
    targets: Int[Tensor, " tokens"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None,
    alpha: float,
    label_smoothing: float = 0.0,
    chunk_tokens: int = 2048,
    smoothing_kind: SmoothingKind = "all",
    pad_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the mean smoothed cross-entropy of two passes + alpha / 4 (KL(p || q) + KL(q || p)), summed over tokens.

    Paper: Liang et al. 2021, arXiv:2106.14448, eq. 2 to 4. Differs: divided by two, so that alpha 0 is the loss of one
    pass. Symbols: p, q = the distributions of the passes; alpha = alpha (5 for translation in the paper).
    Returns: (loss_sum, nll_sum); nll_sum is the mean of both passes and has no gradient. Both passes have gradients,
        which are computed together with the loss, as in `smoothed_loss`.
    """
    smoothing = (label_smoothing, smoothing_kind, pad_id)
    arguments = (first, second, targets, weight, bias, alpha, smoothing, chunk_tokens, autocast_dtype(first))
    return apply_loss(_ConsistentLoss, *arguments)


def _errors(
    one: Tensor, other: Tensor, wanted: Tensor, parts: Spread, without: slice, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums of some rows, and d loss / d logits of both passes.

    Shape: one, other (rows, vocab_size); wanted (rows, 1), the targets. without: tokens without a share of `parts`.
    With d = log p - log q: KL(p || q) = sum(p d). Its gradient is p (d - KL(p || q)) for the logits of p, and q - p for
    the logits of q.
    Returns: loss and negative log-likelihood, stacked; the gradient of `one`; the gradient of `other`.
    """
    quarter = alpha / 4
    sums = []
    logs = [torch.log_softmax(z, dim=1, dtype=torch.promote_types(z.dtype, torch.float32)) for z in (one, other)]
    for log_probs in logs:
        likelihood = -log_probs.gather(1, wanted).sum()
        smoothed = parts.on_target * likelihood
        if parts.mass:
            smoothed = smoothed - parts.share * (log_probs.sum() - log_probs[:, without].sum())
        sums.append(torch.stack([smoothed, likelihood]))
    p, q = (log_probs.exp() for log_probs in logs)
    difference = logs[0].sub_(logs[1])
    forward = torch.linalg.vecdot(p, difference)[:, None]
    backward = -torch.linalg.vecdot(q, difference)[:, None]
    # `of_one` reuses the memory of `difference`, so `of_other`, which reads it, comes first.
    of_other = torch.mul(difference, -quarter, out=logs[1]).add_(quarter * (1 - backward) + 0.5).mul_(q)
    of_other.sub_(p, alpha=quarter).sub_(0.5 * parts.mass / parts.count)
    of_one = difference.mul_(quarter).add_(quarter * (1 - forward) + 0.5).mul_(p)
    of_one.sub_(q, alpha=quarter).sub_(0.5 * parts.mass / parts.count)
    target = torch.full_like(wanted, -0.5 * parts.on_target, dtype=p.dtype)
    for error in (of_one, of_other):
        error[:, without] += 0.5 * parts.share
        error.scatter_add_(1, wanted, target)
    mean = (sums[0] + sums[1]) / 2
    return torch.stack([mean[0] + quarter * (forward + backward).sum(), mean[1]]), of_one, of_other


class _ConsistentLoss(torch.autograd.Function):
    """`kernels.loss._SmoothedLoss` for two passes: the gradients are computed together with the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        alpha: float,
        smoothing: tuple[float, SmoothingKind, int],
        chunk_tokens: int,
        compute: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        statistics = torch.promote_types(first.dtype, torch.float32)
        compute = compute or first.dtype
        amount, kind, pad_id = smoothing
        parts = spread(kind, amount, len(weight))
        without = excluded_row(parts.count, len(weight), pad_id)
        needs = ctx.needs_input_grad
        grads = [torch.empty_like(x) if need else None for x, need in zip((first, second), needs, strict=False)]
        grad_weight = torch.zeros_like(weight, dtype=statistics) if needs[3] else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=statistics) if bias is not None and needs[4] else None
        rows = policy.logit_rows_at_once(chunk_tokens, weight.shape[0], first.device)
        tile = policy.logit_rows_in_a_tile(rows, weight.shape[0], first.device)
        sums = first.new_zeros(2, dtype=statistics)
        with torch.autocast(first.device.type, enabled=False):
            low_weight = weight.to(compute)
            low_bias = None if bias is None else bias.to(compute)
            for start in range(0, first.shape[0], rows):
                chunk = slice(start, start + rows)
                wanted = targets[chunk, None]
                count = wanted.shape[0]
                hidden = [pad_rows(x[chunk].to(compute), rows) for x in (first, second)]
                logits = [linear(x, low_weight, low_bias) for x in hidden]
                tiles = zip(*(torch.split(x[:count], tile) for x in (*logits, wanted)), strict=True)
                for one, other, tile_wanted in tiles:
                    found, of_one, of_other = _errors(one, other, tile_wanted, parts, without, alpha)
                    sums += found
                    one.copy_(of_one)  # from here on `logits` contains the gradients
                    other.copy_(of_other)
                for x, error, grad in zip(hidden, logits, grads, strict=True):
                    error[count:] = 0  # rows of padding have no gradient
                    if grad is not None:
                        grad[chunk] = product(error, low_weight)[:count]
                    if grad_weight is not None:
                        add_tiles(grad_weight, product_of_rows(error, x))
                    if grad_bias is not None:
                        grad_bias += error.sum(dim=0, dtype=statistics)
        ctx.save_for_backward(*grads, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        loss_sum, nll_sum = (total.clone() for total in sums)
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        first, second, grad_weight, grad_bias = ctx.saved_tensors
        hidden = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in (first, second)]
        maps = [None if grad is None else (grad * grad_loss).to(ctx.weight_dtype) for grad in (grad_weight, grad_bias)]
        return *hidden, None, *maps, None, None, None, None
