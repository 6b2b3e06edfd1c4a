"""Relative effective context length (RECL): the length up to which more context helps a language model.

Paper: Dai et al. 2019, arXiv:1901.02860, sec. 4.3 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from manyheads.data.token_store import TokenStore
from manyheads.errors import DataError, refuse_nan
from manyheads.evaluation.likelihood import evaluation_mode

__all__ = ["LEAST_GAIN", "Recl", "losses_by_context", "relative_lengths"]

LEAST_GAIN = 0.01
"""A longer context counts as useful if it lowers the relative perplexity by this share or more (appendix C)."""
_TOKENS_AT_ONCE = 16_384


class _Scores(Protocol):
    """A composite: `architectures.language_model.LanguageModel`."""

    def start(self, lanes: int, attending: Any = None, *, projected: bool = True) -> Any: ...

    def losses_at(
        self, tokens: Tensor, columns: Tensor, targets: Tensor, lengths: Tensor | None = None, state: Any = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Recl:
    """The result for one model and one share of positions.

    length: in tokens. is_longest: context longer than that was not measured, so the length is a lower bound.
    gains: gain of each context over the next shorter one, from the second context on.
    """

    length: int
    is_longest: bool
    gains: tuple[float, ...]


@torch.no_grad()
def losses_by_context(
    model: _Scores,
    store: TokenStore,
    *,
    step: int,
    longest: int,
    attending: Any = None,
    device: torch.device | str = "cpu",
    told: Callable[[int], None] | None = None,
    name: str = "The model",
) -> Tensor:
    """Return the loss in nats of some tokens, predicted from exactly c preceding tokens, for c = step, 2 step, ...

    Every `step`-th token is scored. A window of `longest` tokens begins at every `step`-th token; the model reads each
    without memory, so that a window gives one loss for each context length.

    Args:
        model: a module is put into evaluation mode during the call.
        store: the text.
        step: difference of two context lengths, and of two scored places, in tokens.
        longest: the longest context, in tokens; a multiple of `step`.
        attending: the model's context settings; None: its own.
        device: the model's device.
        told: called after each batch with the number of tokens that were read.
        name: of the model, for messages.

    Returns: (longest / step, places) in float64.
    Raises: DataError: the text is not longer than the longest context. NonFiniteError: a loss is NaN.
    """
    num_lengths, num_targets = longest // step, (len(store) - 1) // step
    if num_targets < num_lengths:
        raise DataError(
            f"The text has {len(store):,} tokens, and a context of {longest:,} leaves none to predict; give a longer"
            " text, or lower --recl-longest."
        )
    ids = torch.from_numpy(store.ids[: len(store)].astype("int64"))
    found = torch.full((num_lengths, num_targets + 1), torch.nan, dtype=torch.float64)
    contexts = torch.arange(1, num_lengths + 1)
    at_once = max(1, _TOKENS_AT_ONCE // longest)
    with evaluation_mode(model):
        for first in range(0, num_targets, at_once):
            windows = torch.arange(first, min(first + at_once, num_targets))
            places = windows[:, None] * step + torch.arange(longest)  # (windows, longest)
            tokens = ids[places.clamp(max=len(ids) - 1)].to(device)
            lengths = (len(ids) - windows * step).clamp(max=longest).to(device)
            predicted = windows[:, None] + contexts  # (windows, contexts), in steps
            targets = ids[(predicted * step).clamp(max=len(ids) - 1)].to(device)
            state = None if attending is None else model.start(len(windows), attending)
            losses = model.losses_at(tokens, (contexts * step - 1).to(device), targets, lengths, state).double().cpu()
            inside = predicted <= num_targets
            refuse_nan(bool(losses[inside].isnan().any()), name)
            rows = (contexts - 1).expand_as(predicted)
            found[rows[inside], predicted[inside]] = losses[inside]
            if told is not None:
                told(min(first + at_once, num_targets) * step)
    return found[:, num_lengths:]


def relative_lengths(losses: Sequence[Tensor], *, step: int, hardest: float) -> list[Recl]:
    """Return the RECL of every model of a group (appendix C).

    With b(c, t) the smallest loss of any model on token t with context c, and T the share `hardest` of the tokens with
    the largest b(c, t): f_i(c, c') is the mean over T of min(b(c, t), l_i(c', t)), and the gain of model i is
    1 - exp(f_i(c, c') - f_i(c, c)). Its RECL is the first c whose gain with c' = c + step is below `LEAST_GAIN`.

    Args:
        losses: of each model, see `losses_by_context`.
        step: difference of two context lengths, in tokens.
        hardest: the share of the tokens that count, above 0 and at most 1.
    """
    num_lengths, num_places = losses[0].shape
    baseline = torch.stack([*losses]).amin(dim=0)
    count = max(1, round(hardest * num_places))
    gains: list[list[float]] = [[] for _ in losses]
    for short in range(num_lengths - 1):
        hard = baseline[short].topk(count)
        for own, of_model in zip(gains, losses, strict=True):
            relative = torch.minimum(hard.values, of_model[short + 1, hard.indices]).mean()
            own.append(float(1 - (relative - hard.values.mean()).exp()))
    found = []
    for own in gains:
        stop = next((place for place, gain in enumerate(own) if gain < LEAST_GAIN), None)
        length = step * (num_lengths if stop is None else stop + 1)
        found.append(Recl(length, stop is None, tuple(own)))
    return found
