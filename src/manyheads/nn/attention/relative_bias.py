"""A trained number for each head and distance between query and key, added to the scores of self-attention.

Paper: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", arXiv:1910.10683, sec. 2.1 (T5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.nn.attention.masks import Bias, ByDistance

if TYPE_CHECKING:
    from manyheads.nn.shapes import Bool, Float

PENALTY_UNIT = 10.0
"""A trained penalty is stored divided by this: a step moves every number by about the learning rate, and penalties are
larger than the weights for which learning rates are chosen."""


def local_slopes(num_heads: int) -> Float[Tensor, " heads"]:
    """Return the slope of each head: what is subtracted from a score per position of distance.

    Slopes are 1/2 to 1/128, evenly spaced in log scale.

    Paper: Press et al. 2022, "Train Short, Test Long" (ALiBi), arXiv:2108.12409, sec. 3. Differs: the paper's slopes of
        n heads are 2^(-8 i / n), so with 4 heads the steepest is 1/4. A local layer has a short window, in which one
        head needs a steeper slope to select the position before its own.
    """
    steepest_first = torch.linspace(1, 7, num_heads, device="cpu")
    return 2.0**-steepest_first if num_heads > 1 else torch.tensor([0.5], device="cpu")


class RelativeBias(nn.Module):
    """A trained number for each head and distance.

        >>> bias = RelativeBias(num_heads=4, reach=8, causal=True)
        >>> bias.numbers().shape  # distances -8 to 0
        torch.Size([4, 9])

    Paper: Raffel et al. 2020, sec. 2.1. Differs: each distance up to `reach` has a number of its own, where T5 has
        buckets that grow with the distance; and the numbers begin at -slope x distance (`slopes.local_slopes`), not at
        random.
    Args:
        num_heads: number of heads.
        reach: largest distance with a number of its own; farther keys have the number of this one.
        causal: no query sees a later key, so these have no numbers.

    Raises: ConfigError: num_heads or reach is below 1.
    """

    muon_without_decay: tuple[str, ...] = ("table",)

    def __init__(self, num_heads: int, reach: int, *, causal: bool) -> None:
        super().__init__()
        if num_heads < 1 or reach < 1:
            raise ConfigError(f"num_heads {num_heads} and reach {reach} of a relative bias must be at least 1.")
        self.reach = reach
        self.table = nn.Parameter(torch.empty(num_heads, reach + 1 + (0 if causal else reach)))
        self.reset_parameters()

    def check_heads(self, num_heads: int) -> None:
        """Raise ConfigError if the attention that uses these numbers has another number of heads."""
        if self.table.shape[0] != num_heads:
            raise ConfigError(
                f"the relative bias has numbers for {self.table.shape[0]} heads, but the attention has {num_heads}; "
                f"make it with RelativeBias({num_heads}, ...)."
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """-slope x distance."""
        num_heads, columns = self.table.shape
        distances = (torch.arange(columns, device="cpu") - self.reach).abs()
        self.table.copy_(-local_slopes(num_heads)[:, None] * distances / PENALTY_UNIT)

    def numbers(self) -> Float[Tensor, "heads distances"]:
        """Return what is added to the scores, from distance -reach (a key before the query) on."""
        return self.table * PENALTY_UNIT

    def forward(self) -> ByDistance:
        """Return the numbers as a mask."""
        return ByDistance(self.numbers(), before=self.reach)

    def of_keys(self, count: int) -> Float[Tensor, "heads count"]:
        """Return the numbers of the last `count` keys for the last query, farthest first; for causal attention."""
        column = (torch.arange(1 - count, 1, device=self.table.device) + self.reach).clamp(min=0)
        return self.numbers()[:, column]

    def of_slots(self, seen: Bool[Tensor, "groups 1 branches slots"], length: int) -> Bias:
        """Return the numbers for one query in each branch of a group, at position `length`.

        Args: seen: the slots that each branch sees, in the order of their positions (see `cache.Slots`).

        Returns: values of shape (groups, heads, branches, slots); those of slots that are not seen have no meaning.
        """
        column = (seen.long().cumsum(-1) - 1 - length + self.reach).clamp(0, self.reach)
        return Bias(self.numbers()[:, column[:, 0]].transpose(0, 1))
