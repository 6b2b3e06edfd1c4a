"""Several language models as one: for each token the probabilities of all models are averaged, as in `ensemble`.

    P(y_t | y_1 ... y_(t-1)) = 1/n sum over models of P_i(y_t | y_1 ... y_(t-1))

Every model keeps its own state: memory, keys and values, or caches of hashed layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from manyheads.architectures.ensemble import EnsembleState, PreparesForAll, mean_log_probs, mean_scores, shortest_limit
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.protocols import Output
from manyheads.data.batch import SegmentBatch
from manyheads.errors import ConfigError
from manyheads.nn.shapes import Float, Int

NO_MEMORY: Final = "no memory"
"""Used in place of a model's context settings: the model reads each segment without context from before."""


@dataclass(frozen=True)
class LanguageEnsembleConfig:
    """Facts about an ensemble. each: the configs of its models, whose vocabularies have one size."""

    each: tuple[Any, ...]
    architecture: str = "ensemble"

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return int(self.each[0].vocab_size)


class LanguageEnsemble(PreparesForAll, nn.Module):
    """Language models of one vocabulary as one, for generation, scoring and evaluation; not for training.

        model = LanguageEnsemble([manyheads.load("runs/a"), manyheads.load("runs/b")])
        log_probs, state = model.step(prompts, model.start(lanes))

    It has `start`, `step`, `read`, `token_losses` and so on like a `LanguageModel`, and prepares steps if all models
    do. Architectures and sizes may differ. `Generator.from_pretrained([a, b])` also compares the vocabularies.

    Args: models: at least one; the same model twice counts twice.

    Raises: ConfigError: there is no model, or the sizes of the vocabularies differ.
    Cost: time and memory are the sums of those of the models.
    """

    def __init__(self, models: Sequence[LanguageModel]) -> None:
        super().__init__()
        if not models:
            raise ConfigError("an ensemble needs at least one model, but none was given.")
        first = models[0].config.vocab_size
        for number, model in enumerate(models, 1):
            if model.config.vocab_size != first:
                raise ConfigError(
                    f"model {number} of the ensemble has {model.config.vocab_size:,} ids, but model 1 has {first:,};"
                    " only models of one vocabulary can be averaged."
                )
        self.models = nn.ModuleList(models)
        self.config = LanguageEnsembleConfig(tuple(model.config for model in models))

    @property
    def max_len(self) -> int | None:
        """Longest sequence: the smallest limit of the models; None: there is no limit."""
        return shortest_limit(self.models)

    def start(self, lanes: int, attending: Sequence[Any] | None = None, *, projected: bool = True) -> EnsembleState:
        """Return the empty state of each model for `lanes` sequences; see `LanguageModel.start`.

        Args: attending: the context settings of each model, or `NO_MEMORY`; None: those of training.
        """
        chosen = (None,) * len(self.models) if attending is None else attending
        return EnsembleState(
            tuple(
                None if own == NO_MEMORY else model.start(lanes, own, projected=projected)
                for model, own in zip(self.models, chosen, strict=True)
            )
        )

    def forward(self, batch: SegmentBatch, state: EnsembleState | None = None) -> Output:
        """Return the negative log-likelihood of a segment of every lane, and the state for the next segment.

        loss_sum equals nll_sum and has no gradient. For the state see `LanguageModel.forward`.
        """
        losses, state = self.token_losses(batch, state)
        columns = torch.arange(batch.tokens.shape[1], device=batch.lengths.device)
        counted = (columns < batch.lengths[:, None]) & (columns >= batch.num_context)
        nll_sum = losses.sum().detach()
        return Output(loss_sum=nll_sum, nll_sum=nll_sum, num_tokens=counted.sum(), state=state)

    def token_losses(
        self, batch: SegmentBatch, state: EnsembleState | None = None
    ) -> tuple[Float[Tensor, "lanes len"], EnsembleState]:
        """Return each target's loss in nats, 0 where it is not scored, and the next state.

        Memory: one number a model and target, besides what one model needs.
        """
        losses, after = self._each(state, lambda model, one: model.token_losses(batch, one))
        return -mean_log_probs([-values for values in losses]), after

    def log_probs(
        self, tokens: Int[Tensor, "lanes len"], lengths: Int[Tensor, " lanes"] | None = None, state: Any = None
    ) -> Float[Tensor, "lanes len vocab_size"]:
        """Return log-probabilities of the token after each, in float32; see `LanguageModel.read`."""
        return self.read(tokens, lengths, state)[0]

    def read(
        self, tokens: Int[Tensor, "lanes len"], lengths: Int[Tensor, " lanes"] | None = None, state: Any = None
    ) -> tuple[Float[Tensor, "lanes len vocab_size"], EnsembleState]:
        """Return log-probabilities of the token after each, and the next state; see `LanguageModel.read`."""
        found, after = self._each(state, lambda model, one: model.read(tokens, lengths, one))
        return mean_log_probs(found), after

    def step(
        self,
        tokens: Int[Tensor, "rows new_len"],
        state: EnsembleState,
        lengths: Int[Tensor, " rows"] | None = None,
        *,
        logits: bool = False,
    ) -> tuple[Float[Tensor, "rows vocab_size"], EnsembleState]:
        """Append tokens to every row; see `LanguageModel.step`."""
        found, after = self._each(state, lambda model, one: model.step(tokens, one, lengths, logits=logits))
        return mean_scores(found, logits), after

    def _each(
        self, state: EnsembleState | None, call: Callable[[Any, Any], tuple[Tensor, Any]]
    ) -> tuple[list[Tensor], EnsembleState]:
        """Call every model with its own state. Returns: the results, and the next states.

        A model that was started with `NO_MEMORY` has no state before the call, and gets none after it.
        """
        before = (None,) * len(self.models) if state is None else state.each
        found = [call(model, one) for model, one in zip(self.models, before, strict=True)]
        after = tuple(
            None if state is not None and one is None else next_state
            for one, (_, next_state) in zip(before, found, strict=True)
        )
        return [values for values, _ in found], EnsembleState(after)
