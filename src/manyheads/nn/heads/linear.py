"""The linear head: hidden states to log-probabilities, or hidden states and targets to a loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from manyheads.errors import ConfigError
from manyheads.nn.heads.chunks import add_tiles, pad_rows, rows_at_once, rows_in_a_tile
from manyheads.nn.heads.consistency import consistent_loss
from manyheads.nn.heads.sampled import LogUniformCandidates, sampled_loss
from manyheads.nn.linear import Packed, linear, product, product_of_rows

__all__ = ["HeadLoss", "LinearHead", "smoothed_loss"]

HeadLoss = tuple[Tensor, Tensor]

_LOG2_E = math.log2(math.e)


class LinearHead(nn.Module):
    """One row of weights a token: logits = W h + b.

        >>> head = LinearHead(d_model=16, vocab_size=100)
        >>> hidden, targets = torch.randn(2, 5, 16), torch.randint(100, (2, 5))
        >>> head.log_probs(hidden).shape
        torch.Size([2, 5, 100])
        >>> loss_sum, nll_sum = head.loss(hidden, targets, keep=targets != 0, label_smoothing=0.1)
        >>> loss_sum.shape
        torch.Size([])

    Paper: Vaswani et al. 2017, sec. 3.4 (tied weights: Press and Wolf 2017) and 5.4 (label smoothing).
    Args:
        d_model: width of the hidden states.
        vocab_size: number of tokens.
        bias: b.

    To share the matrix with an embedding, assign its parameter to `weight`.
    """

    packed: Packed | None = None

    def __init__(self, d_model: int, vocab_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self._candidates: LogUniformCandidates | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab_size"]:
        """Scores before the softmax."""
        if self.packed is not None and self.packed.serves(hidden, self):
            return self.packed.linear(hidden)
        return linear(hidden, self.weight, self.bias)

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
        again: Float[Tensor, "*rows d_model"] | None = None,
        r_drop: float = 0.0,
        num_sampled: int = 0,
    ) -> HeadLoss:
        """Summed loss over the positions to keep.

        Args:
            keep: bool like targets; False for padding, which costs nothing: those rows are never multiplied.
            label_smoothing: this share of probability is spread evenly over the whole vocabulary.
            chunk_tokens: rows of logits that exist at once.
            again: the same positions' hidden states from a second pass under other dropout.
            r_drop: with `again`, the weight on the two passes' disagreement (see `heads.consistency`).
            num_sampled: draws of candidates that stand for the whole vocabulary, from torch's global generator (see
                `heads.sampled`); both sums are then estimates. 0 takes all of it.

        Returns: (loss_sum, nll_sum), float32 scalars; the gradient flows through the first alone.
        Raises: ConfigError: num_sampled along with label_smoothing or r_drop, which need every token's probability.
        Cost: memory chunk_tokens x vocab_size, not tokens x vocab_size; tokens x num_sampled with candidates.
        """
        rows = keep.flatten().nonzero().squeeze(1)
        kept, wanted = hidden.flatten(0, -2), targets.flatten()
        if not _nothing_to_drop(rows, keep):
            kept, wanted = kept.index_select(0, rows), wanted.index_select(0, rows)
        if num_sampled:
            if label_smoothing or again is not None:
                raise ConfigError(
                    f"num_sampled is {num_sampled}: candidates know nothing of label smoothing ({label_smoothing}) or"
                    f" R-Drop ({r_drop}); set these to 0, or num_sampled."
                )
            loss = self._against_candidates(kept, wanted, num_sampled)
            return loss, loss.detach()
        if again is not None:
            other = again.flatten(0, -2).index_select(0, rows)
            return consistent_loss(kept, other, wanted, self.weight, self.bias, r_drop, label_smoothing, chunk_tokens)
        return smoothed_loss(kept, wanted, self.weight, self.bias, label_smoothing, chunk_tokens)

    def _against_candidates(self, hidden: Tensor, targets: Tensor, num_sampled: int) -> Tensor:
        if self._candidates is None or self._candidates.num_draws != num_sampled:
            self._candidates = LogUniformCandidates(self.weight.shape[0], num_sampled)
        drawn, log_inclusion = self._candidates.draw(), self._candidates.log_inclusion
        return sampled_loss(hidden, targets, self.weight, self.bias, drawn, log_inclusion).sum()

    def token_losses(
        self, hidden: Float[Tensor, "tokens d_model"], targets: Int[Tensor, " tokens"]
    ) -> Float[Tensor, " tokens"]:
        """Each token's own loss in nats, in the tokens' order, in float32 at least.

        Cost: memory as many rows of logits as `loss` makes at once, where no gradient is asked for.
        """
        rows = max(1, rows_at_once(len(targets), self.weight.shape[0], hidden.device))
        parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        return torch.cat([-self.log_probs(some).gather(1, wanted[:, None])[:, 0] for some, wanted in parts])


def _nothing_to_drop(rows: Tensor, keep: Tensor) -> bool:
    """Whether all rows are kept, so that a copy of them can be spared; not where a compiler would have to know."""
    return not torch.compiler.is_compiling() and len(rows) == keep.numel()


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


def _exponentiate(logits: Tensor, highest: Tensor, totals: Tensor, needs_error: bool, grad_bias: Tensor | None) -> None:
    """Turn some rows of logits into E = exp(logits - row's highest), if it is needed; add to `grad_bias` E / total.

    Shape: logits (rows, vocab_size), highest and totals (rows, 1), grad_bias (vocab_size,).
    Fills in `highest`, and `totals` with the sums of E's rows. Softmax is E / total; the division is left to the small
    sides of the products, which have vocab_size times fewer numbers.
    """
    z = logits.to(highest.dtype)
    torch.amax(z, dim=1, keepdim=True, out=highest)
    # Of the two powers, torch leaves that of e to MKL, which is four times as slow on processors not made by Intel.
    z = z.sub_(highest) if z is not logits or needs_error else z - highest
    z.mul_(_LOG2_E).exp2_()
    torch.sum(z, dim=1, keepdim=True, out=totals)
    if grad_bias is not None:
        # Here, where the numbers are in full precision and in the cache: later they would have to be widened again.
        grad_bias.addmv_(z.t(), totals.reciprocal()[:, 0])
    if needs_error and z is not logits:
        logits.copy_(z)


def _put(values: Tensor, columns: Tensor, numbers: Tensor) -> None:
    """As `values.scatter_(1, columns, numbers)` of one number a row, which takes ten times as long."""
    values[torch.arange(len(values), device=values.device), columns[:, 0]] = numbers[:, 0]


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
        share = smoothing / vocab_size
        sums = hidden.new_zeros(2, dtype=statistics)
        needs = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        chunk_tokens = rows_at_once(chunk_tokens, vocab_size, hidden.device)
        tile_rows = rows_in_a_tile(chunk_tokens, vocab_size, hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            low_weight = weight.to(compute)
            low_bias = None if bias is None else bias.to(compute)
            summed_weight = weight.sum(dim=0, dtype=statistics)  # unrounded: torch would widen a copy of what is
            summed_hidden = hidden.to(compute).sum(dim=0, dtype=statistics)
            # What is there before any logits are: smoothing's share of the gradients, and of the bias' the targets'.
            grad_weight = (-share * summed_hidden).expand(vocab_size, -1).contiguous() if needs[2] else None
            grad_bias = None
            if bias is not None and needs[3]:
                grad_bias = torch.full_like(bias, -share * hidden.shape[0], dtype=statistics)
                grad_bias.index_add_(0, targets, grad_bias.new_full(targets.shape, smoothing - 1))
            for start in range(0, hidden.shape[0], chunk_tokens):
                wanted = targets[start : start + chunk_tokens, None]
                count = wanted.shape[0]
                low_hidden = pad_rows(hidden[start : start + chunk_tokens].to(compute), chunk_tokens)
                padded = linear(low_hidden, low_weight, low_bias)
                padded[count:].zero_()  # nobody's rows: no error, so no gradient, whatever the bias
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
                    # In full precision and only then rounded: a confident row's error is a small difference of near
                    # equals.
                    error = target_logits.sub_(highest).mul_(_LOG2_E).exp2_()
                    _put(logits, wanted, error.sub_(totals[:count], alpha=1 - smoothing).to(compute))
                # From here on `padded` holds the error times the totals, but for smoothing's share.
                if grad_hidden is not None:
                    error = product(padded, low_weight)[:count].to(statistics) / totals[:count] - share * summed_weight
                    grad_hidden[start : start + chunk_tokens] = error
                if grad_weight is not None:
                    add_tiles(grad_weight, product_of_rows(padded, (low_hidden / totals).to(compute)))
            summed_bias = 0.0 if low_bias is None else low_bias.sum(dtype=statistics)
            mean_logits = (summed_hidden @ summed_weight + hidden.shape[0] * summed_bias) / vocab_size
        nll_sum, normaliser_sum = sums.unbind()
        nll_sum = nll_sum.clone()
        loss_sum = nll_sum.clone()
        if smoothing:  # else a token that a bias forbids would make this NaN
            loss_sum = (1 - smoothing) * nll_sum + smoothing * (normaliser_sum - mean_logits)
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
