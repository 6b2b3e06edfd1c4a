"""The linear head: hidden states to log-probabilities, or hidden states and targets to a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.torch_version import TorchVersion

__all__ = ["HeadLoss", "LinearHead", "smoothed_loss"]

HeadLoss = tuple[Tensor, Tensor]


class LinearHead(nn.Module):
    """One row of weights a token: logits = W h + b.

    Paper: Vaswani et al. 2017, sec. 3.4 (tied weights: Press and Wolf 2017) and 5.4 (label smoothing).
    Args:
        d_model: width of the hidden states.
        vocab_size: number of tokens.
        bias: b.

    To share the matrix with an embedding, assign its parameter to `weight`.
    """

    def __init__(self, d_model: int, vocab_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab_size"]:
        """Scores before the softmax."""
        return F.linear(hidden, self.weight, self.bias)

    def log_probs(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab_size"]:
        """Log-probabilities, in float32 at least."""
        logits = self.logits(hidden)
        return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def loss(
        self,
        hidden: Float[Tensor, "*rows d_model"],
        targets: Int[Tensor, "*rows"],
        keep: Tensor,
        *,
        label_smoothing: float = 0.0,
        chunk_tokens: int = 2048,
    ) -> HeadLoss:
        """Summed loss over the positions to keep.

        Args:
            keep: bool like targets; False for padding, which costs nothing: those rows are never multiplied.
            label_smoothing: this share of probability is spread evenly over the whole vocabulary.
            chunk_tokens: rows of logits that exist at once.

        Returns: (loss_sum, nll_sum), float32 scalars; the gradient flows through the first alone.
        Cost: memory chunk_tokens x vocab_size, not tokens x vocab_size.
        """
        rows = keep.flatten().nonzero().squeeze(1)
        kept = hidden.flatten(0, -2).index_select(0, rows)
        wanted = targets.flatten().index_select(0, rows)
        return smoothed_loss(kept, wanted, self.weight, self.bias, label_smoothing, chunk_tokens)


def smoothed_loss(
    hidden: Float[Tensor, "tokens d_model"],
    targets: Int[Tensor, " tokens"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None,
    label_smoothing: float = 0.0,
    chunk_tokens: int = 2048,
) -> HeadLoss:
    """Cross-entropy against (1 - s) on the target plus s / vocab_size on every token, summed over tokens.

    Paper: Szegedy et al. 2016, arXiv:1512.00567, sec. 7. Symbols: epsilon = label_smoothing.
    Computes the gradients along with the loss, chunk by chunk, so that no logits are kept for the backward pass.
    """
    if not torch.is_grad_enabled():
        # autograd.Function is not told of no_grad: without this, validation would pay for gradients too.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    compute = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
    return _apply(hidden, targets, weight, bias, label_smoothing, chunk_tokens, compute)


def _apply(*arguments: Any) -> HeadLoss:
    result: HeadLoss = _SmoothedLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


if TorchVersion(torch.__version__) < "2.13":
    # Dynamo of torch 2.11 traces the function below and silently gets zeros for the gradient of `hidden`; what it is
    # not shown it cannot break. (2.12 was not tried.)
    _apply = torch.compiler.disable(_apply)  # type: ignore[no-untyped-call]


# Numbers worked on at once on a CPU: 1 MB in float32, which stays in a core's own cache from one operation to the next.
_TILE_NUMBERS = 1 << 18
# Rows of a product on a CPU: oneDNN makes a kernel for every number of rows, and the count of real tokens is always
# another.
_ROWS_MULTIPLE = 64


def _loss_and_error(logits: Tensor, wanted: Tensor, smoothing: float, needs_error: bool) -> Tensor:
    """Negative log-likelihood summed over some rows, and the sum of their log-normalisers; logits become the error.

    Shape: logits (rows, vocab_size), wanted (rows, 1); the result (2,). The error is d loss / d logits = p - t, with
        p = softmax(logits) and t the smoothed target.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = z.gather(1, wanted)
    highest = z.amax(dim=1, keepdim=True)
    z = z.sub_(highest).exp_() if z is not logits else (z - highest).exp_()
    total = z.sum(dim=1, keepdim=True)
    normaliser = highest + total.log()
    if needs_error:
        torch.sub(z.mul_(total.reciprocal_()), smoothing / logits.shape[1], out=logits)
        logits.scatter_add_(1, wanted, logits.new_full((1, 1), smoothing - 1.0).expand_as(wanted))
    return torch.stack([(normaliser - target_logits).sum(), normaliser.sum()])


class _SmoothedLoss(torch.autograd.Function):
    """With p = softmax(logits) and t the smoothed target, d loss / d logits = p - t: known as soon as the loss is."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        smoothing: float,
        chunk_tokens: int,
        compute: torch.dtype | None,
    ) -> HeadLoss:
        statistics = torch.promote_types(hidden.dtype, torch.float32)
        compute = compute or hidden.dtype
        vocab_size = weight.shape[0]
        low_weight = weight.to(compute)
        loss_sum = hidden.new_zeros((), dtype=statistics)
        nll_sum = hidden.new_zeros((), dtype=statistics)
        needs = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=statistics) if needs[2] else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=statistics) if bias is not None and needs[3] else None
        on_cpu = hidden.device.type == "cpu"
        tile_rows = max(1, _TILE_NUMBERS // vocab_size) if on_cpu else chunk_tokens
        with torch.autocast(hidden.device.type, enabled=False):
            low_bias = None if bias is None else bias.to(compute)
            for start in range(0, hidden.shape[0], chunk_tokens):
                wanted = targets[start : start + chunk_tokens, None]
                count = wanted.shape[0]
                low_hidden = hidden[start : start + chunk_tokens].to(compute)
                if on_cpu:
                    low_hidden = F.pad(low_hidden, (0, 0, 0, min(-count % _ROWS_MULTIPLE, chunk_tokens - count)))
                padded = F.linear(low_hidden, low_weight, low_bias)
                logits = padded[:count]
                padded[count:] = 0  # nobody's rows: no error, so no gradient
                mean_logit = logits.sum(dtype=statistics) / vocab_size if smoothing else loss_sum.new_zeros(())
                sums = loss_sum.new_zeros(2)
                tiles = zip(torch.split(logits, tile_rows), torch.split(wanted, tile_rows), strict=True)
                for tile, tile_wanted in tiles:
                    sums += _loss_and_error(tile, tile_wanted, smoothing, any(needs))
                nll_sum += sums[0]
                loss_sum += (1 - smoothing) * sums[0] + smoothing * (sums[1] - mean_logit)
                # From here on `logits` holds the error.
                if grad_hidden is not None:
                    grad_hidden[start : start + chunk_tokens] = (padded @ low_weight)[:count]
                if grad_weight is not None:
                    grad_weight += padded.t() @ low_hidden
                if grad_bias is not None:
                    grad_bias += logits.sum(dim=0, dtype=statistics)
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
