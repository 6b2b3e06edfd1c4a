"""The linear head: log-probabilities from hidden states, or a loss from hidden states and targets.

Sampled softmax is a training loss over a few candidates instead of the whole vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.linear import Packed, linear_by
from manyheads.nn.kernels.loss import HeadLoss, plain_loss, smoothed_loss
from manyheads.nn.shapes import Bool, Float, Int, check_sizes, check_targets, explained

if TYPE_CHECKING:
    from manyheads.nn.smoothing import SmoothingKind


class LogUniformCandidates:
    """Draws candidate ids, frequent ones more often: P(k) = log((k + 2) / (k + 1)) / log(V + 1).

    Paper: Jean et al. 2015, arXiv:1412.2007, sec. 3. Symbols: V = vocab_size. Ids must be ordered by decreasing
        frequency, as in a word vocabulary.
    Args:
        vocab_size: number of tokens.
        num_draws: draws with replacement for one set of candidates; an id that is drawn twice is one candidate.
    """

    def __init__(self, vocab_size: int, num_draws: int) -> None:
        if vocab_size < 2 or num_draws < 1:
            raise ConfigError(f"vocab_size {vocab_size} and num_draws {num_draws} must be at least 2 and 1.")
        ranks = torch.arange(vocab_size, dtype=torch.float64, device="cpu")
        self.probabilities = ((ranks + 2).log() - (ranks + 1).log()) / math.log(vocab_size + 1)
        # Probability of being among the candidates: 1 - (1 - p)^n, in a form that is precise for a small p.
        inclusion = -torch.expm1(num_draws * torch.log1p(-self.probabilities))
        self.log_inclusion = inclusion.log().float()
        self.num_draws = num_draws
        self._cumulated = self.probabilities.cumsum(0)

    def draw(self, generator: torch.Generator | None = None) -> Int[Tensor, " candidates"]:
        """Return distinct ids in increasing order, at most num_draws of them."""
        uniform = torch.rand(self.num_draws, dtype=torch.float64, generator=generator, device="cpu")
        uniform = uniform * self._cumulated[-1]
        drawn = torch.searchsorted(self._cumulated, uniform, right=True).clamp_(max=len(self.probabilities) - 1)
        return torch.unique(drawn)  # type: ignore[no-any-return]


def sampled_loss(
    hidden: Float[Tensor, "tokens d_model"],
    targets: Int[Tensor, " tokens"],
    weight: Float[Tensor, "vocab_size d_model"],
    bias: Float[Tensor, " vocab_size"] | None,
    candidates: Int[Tensor, " candidates"],
    log_inclusion: Float[Tensor, " vocab_size"],
) -> Float[Tensor, " tokens"]:
    """Return the cross-entropy of each target over itself and the candidates.

    Paper: Jean et al. 2015, sec. 3, with Z estimated after Horvitz and Thompson (1952): exp(logit) of the target, which
        is always included, plus exp(logit) / inclusion of each other candidate. Its mean is exactly the whole
        vocabulary's sum, so with more draws the loss tends to that of the full softmax.

    Shape: log_inclusion[k] = log of the probability that k is among the candidates.
    Cost: memory tokens x candidates.
    """
    candidates, log_inclusion = candidates.to(hidden.device), log_inclusion.to(hidden.device)
    rows = torch.cat([targets, candidates])
    own, others = torch.split(F.embedding(rows, weight), [len(targets), len(candidates)])
    true = (hidden * own).sum(-1, dtype=torch.float32)
    sampled = (hidden @ others.t()).float() - log_inclusion[candidates]
    if bias is not None:
        true, sampled = true + bias[targets], sampled + bias[candidates]
    sampled = sampled.masked_fill(targets[:, None] == candidates[None, :], -torch.inf)
    total: Tensor = torch.logsumexp(torch.cat([true[:, None], sampled], dim=1), dim=1)
    return total - true


class LinearHead(nn.Module):
    """A linear layer with one row of weights per token: logits = W h + b.

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
        check_sizes(d_model=d_model, vocab_size=vocab_size)
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self._candidates: LogUniformCandidates | None = None
        self.reset_parameters()

    def packed_maps(self) -> tuple[nn.Module, ...]:
        return (self,)

    @property
    def token_table(self) -> Tensor:
        """The weights, (ids, width): by this name the input and the output of every model are found."""
        return self.weight

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def tie_tables(self, tables: nn.ParameterList) -> None:
        """Share the matrix with the only table of an embedding."""
        self.weight = tables[0]

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        rows, columns = self.weight.shape
        return "Linear, softmax", f"{columns:,} → {rows:,}{'' if self.bias is None else ' + bias'}"

    def equation(self) -> tuple[str, str]:
        """See `TokenEmbedding.equation`."""
        return "log-probabilities", f"log softmax(x Wᵀ{'' if self.bias is None else ' + b'})"

    @torch.no_grad()
    def begin_at(self, counts: Float[Tensor, " vocab_size"]) -> None:
        """Set b so that a hidden state of zeros gives each token its share of the counts; a count of 0 is taken as 1/2.

        Without b nothing changes.
        """
        if self.bias is not None:
            logarithms = counts.clamp(min=0.5).log()
            self.bias.copy_(logarithms - logarithms.mean())  # their mean does not change a softmax

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab_size"]:
        """Return the scores before the softmax."""
        return linear_by(self, hidden)

    def log_probs(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab_size"]:
        """Return log-probabilities, in float32 or float64."""
        logits = self.logits(hidden)
        return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def restricted(self, ids: Int[Tensor, " count"]) -> LinearHead:
        """Return a head for inference over these tokens alone, with copies of their rows: its token i is ids[i].

        If the weight of this head is packed, so is that of the new one: it costs 5 ms for 6,000 rows, and saves 0.5 ms
        in each step of a search.
        """
        with torch.device("meta"):
            head = LinearHead(self.weight.shape[1], len(ids), bias=self.bias is not None)
        with torch.inference_mode(False), torch.no_grad():  # `Packed` needs version counters, which inference lacks
            ids = ids.clone()
            head.weight = nn.Parameter(self.weight.index_select(0, ids), requires_grad=False)
            if self.bias is not None:
                head.bias = nn.Parameter(self.bias.index_select(0, ids), requires_grad=False)
        if self.packed is not None:
            head.packed = Packed(head)
        return head

    @explained
    def loss(
        self,
        hidden: Float[Tensor, "*rows d_model"],
        targets: Int[Tensor, "*rows"],
        keep: Bool[Tensor, "*rows"],
        *,
        label_smoothing: float = 0.0,
        smoothing_kind: SmoothingKind = "all",
        pad_id: int = 0,
        chunk_tokens: int = 2048,
        num_sampled: int = 0,
    ) -> HeadLoss:
        """Return the summed loss over the positions to keep.

        Args:
            keep: bool like targets; False for padding, whose rows are not computed.
            label_smoothing: this probability is spread evenly over the tokens of smoothing_kind.
            smoothing_kind: all tokens, or those without padding; see `nn.smoothing.spread`.
            pad_id: the token of padding, for smoothing_kind.
            chunk_tokens: rows of logits that exist at once.
            num_sampled: number of draws of candidates that replace the whole vocabulary, from torch's global generator
                (see `heads.sampled`); both sums are then estimates. 0: the whole vocabulary.

        Returns: (loss_sum, nll_sum), float32 scalars; only the first has a gradient.
        Raises: ConfigError: num_sampled together with label_smoothing, which needs every token's probability.
        Cost: memory chunk_tokens x vocab_size, not tokens x vocab_size; tokens x num_sampled with candidates.
        """
        check_targets(hidden, targets, keep, self.weight.shape[1])
        kept, wanted = hidden.flatten(0, -2), targets.flatten()
        if modes.is_transformed() and not num_sampled:
            smoothing = (label_smoothing, smoothing_kind, pad_id)
            return plain_loss(kept, wanted, self.weight, self.bias, *smoothing, keep.flatten())
        if policy.saves_launches(hidden.device) and not num_sampled:
            more = (chunk_tokens, smoothing_kind, pad_id, keep.flatten())
            return smoothed_loss(kept, wanted, self.weight, self.bias, label_smoothing, *more)
        rows = keep.flatten().nonzero().squeeze(1)
        if modes.is_compiled() or len(rows) < keep.numel():  # otherwise all rows are kept, and need not be copied
            kept, wanted = kept.index_select(0, rows), wanted.index_select(0, rows)
        if num_sampled:
            if label_smoothing:
                raise ConfigError(
                    f"num_sampled is {num_sampled}: sampled softmax has no label smoothing ({label_smoothing}); set one"
                    " of them to 0."
                )
            loss = self._against_candidates(kept, wanted, num_sampled)
            return loss, loss.detach()
        return smoothed_loss(
            kept, wanted, self.weight, self.bias, label_smoothing, chunk_tokens, smoothing_kind, pad_id
        )

    def _against_candidates(self, hidden: Tensor, targets: Tensor, num_sampled: int) -> Tensor:
        if self._candidates is None or self._candidates.num_draws != num_sampled:
            self._candidates = LogUniformCandidates(self.weight.shape[0], num_sampled)
        drawn, log_inclusion = self._candidates.draw(), self._candidates.log_inclusion
        return sampled_loss(hidden, targets, self.weight, self.bias, drawn, log_inclusion).sum()

    @explained
    def token_losses(
        self, hidden: Float[Tensor, "tokens d_model"], targets: Int[Tensor, " tokens"]
    ) -> Float[Tensor, " tokens"]:
        """Return each token's loss in nats, in the tokens' order, in float32 or float64.

        Cost: without gradients, memory for as many rows of logits as `loss` computes at once.
        """
        rows = max(1, policy.logit_rows_at_once(len(targets), self.weight.shape[0], hidden.device))
        parts = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        return torch.cat([-self.log_probs(some).gather(1, wanted[:, None])[:, 0] for some, wanted in parts])


def token_scores(head: Any, hidden: Float[Tensor, "*rows d_model"], logits: bool) -> Float[Tensor, "*rows vocab_size"]:
    """Return the head's log-probabilities, or its logits in float32."""
    scores: Tensor = head.logits(hidden).float() if logits else head.log_probs(hidden)
    return scores
