"""Several models as one: in each step the probabilities of the next token are averaged.

Paper: Sutskever et al. 2014, arXiv:1409.3215, sec. 3.6 and table 1, decode with ensembles; they name no formula. Here

    P(y_t | y_1 ... y_(t-1)) = 1/n sum over models of P_i(y_t | y_1 ... y_(t-1)),

the arithmetic mean, as fairseq and Marian with equal weights. Every language model keeps its own state: memory, keys
and values, or caches of hashed layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.models.protocols import Output, Searchable
from manyheads.nn.pytrees import register_state

if TYPE_CHECKING:
    from manyheads.data.batch import PairBatch, SegmentBatch
    from manyheads.models.composites import LanguageModel, Seq2Seq
    from manyheads.nn.shapes import Float, Int


def mean_log_probs(log_probs: Sequence[Tensor]) -> Tensor:
    """Return log(1/n sum exp(log_probs[i])), elementwise; all have one shape. For equal tensors exactly their value."""
    # The largest one is subtracted, so that no exp is infinite and not all are 0. A difference of infinities would be
    # NaN, so the subtracted value is finite.
    largest = reduce(torch.maximum, log_probs)
    largest = largest.clamp(min=torch.finfo(largest.dtype).min)
    total = reduce(torch.add, [(values - largest).exp() for values in log_probs])
    return largest + (total / len(log_probs)).log()


def mean_scores(scores: Sequence[Tensor], logits: bool) -> Tensor:
    """Return `mean_log_probs`; of logits, with the mean of the models' normalisers, so that equal ones stay as they
    are.
    """
    if not logits:
        return mean_log_probs(scores)
    normalisers = torch.stack([one.logsumexp(-1, keepdim=True) for one in scores])
    return mean_log_probs([one - own for one, own in zip(scores, normalisers, strict=True)]) + normalisers.mean(0)


@register_state
@dataclass(frozen=True)
class EnsembleState:
    """The state of each model; all have the same rows."""

    each: tuple[Any, ...]

    def reorder(self, rows: Tensor) -> EnsembleState:
        return EnsembleState(tuple(state.reorder(rows) for state in self.each))

    def clone(self) -> EnsembleState:
        """Return a copy that shares no tensor with this one."""
        return EnsembleState(tuple(state.clone() for state in self.each))


@dataclass(frozen=True)
class PreparedSteps:
    """A step of each model; see `protocols.PreparedStep`."""

    each: tuple[Any, ...]

    @property
    def can_compile(self) -> bool:
        return all(step.can_compile for step in self.each)

    @property
    def kind(self) -> tuple[object, ...]:
        return tuple(step.kind for step in self.each)

    def for_compiler(self) -> PreparedSteps:
        return PreparedSteps(tuple(step.for_compiler() for step in self.each))


def shortest_limit(models: Iterable[Any]) -> int | None:
    """Return the smallest `max_len` of the models; None: none of them has a limit."""
    return min((model.max_len for model in models if model.max_len is not None), default=None)


class PreparesForAll:
    """`protocols.PreparesSteps` of `models`, if all of them prepare their steps."""

    models: Any

    @property
    def prepares_steps(self) -> bool:
        return all(model.prepares_steps for model in self.models)

    def prepare_step(self, tokens: Tensor, state: EnsembleState) -> tuple[PreparedSteps, EnsembleState]:
        each = [model.prepare_step(tokens, one) for model, one in zip(self.models, state.each, strict=True)]
        return PreparedSteps(tuple(step for step, _ in each)), EnsembleState(tuple(after for _, after in each))

    def compute_step(self, step: PreparedSteps, logits: bool = False) -> Tensor:
        found = [model.compute_step(one, logits) for model, one in zip(self.models, step.each, strict=True)]
        return mean_scores(found, logits)


class _Averaging:
    """The search of `models`; each has `max_len`, `start` and `step`."""

    models: Any

    @property
    def max_len(self) -> int | None:
        """See `protocols.Searchable.max_len`: the smallest one of the models."""
        return shortest_limit(self.models)

    def start(self, source: Tensor, source_lengths: Tensor) -> EnsembleState:
        return EnsembleState(tuple(model.start(source, source_lengths) for model in self.models))

    def step(self, tokens: Tensor, state: EnsembleState, *, logits: bool = False) -> tuple[Tensor, EnsembleState]:
        each = [model.step(tokens, one, logits=logits) for model, one in zip(self.models, state.each, strict=True)]
        return mean_scores([scores for scores, _ in each], logits), EnsembleState(tuple(after for _, after in each))


class RestrictedEnsemble(_Averaging):
    """An ensemble for one search, whose target vocabulary is a part of the real one; see `protocols.Restrictable`.

    Args: models: the restricted models; each normalises its probabilities over the part.
    """

    def __init__(self, models: Sequence[Searchable]) -> None:
        self.models = models


class Ensemble(_Averaging, PreparesForAll, nn.Module):
    """Encoder-decoders of one vocabulary as one `protocols.Searchable`.

        model = Ensemble([manyheads.load("runs/a"), manyheads.load("runs/b")])
        log_probs, state = model.step(tokens, model.start(source, source_lengths))

    It is also `Scorable`, `Restrictable` and, if all models prepare their steps, `PreparesSteps`. The architectures may
    differ. `Translator.from_pretrained([a, b])` also compares the tokenizers.

    Args: models: at least one; the same model twice counts twice.

    Raises: ConfigError: there is no model, or the sizes of the vocabularies differ.
    Cost: time and memory are the sums of those of the models.
    """

    def __init__(self, models: Sequence[Seq2Seq]) -> None:
        super().__init__()
        if not models:
            raise ConfigError("an ensemble needs at least one model, but none was given.")
        sizes = [(model.config.source_vocab_size, model.config.target_vocab_size) for model in models]
        for number, (source, target) in enumerate(sizes, 1):
            if (source, target) != sizes[0]:
                raise ConfigError(
                    f"model {number} of the ensemble has {source:,} source and {target:,} target ids, but model 1 has"
                    f" {sizes[0][0]:,} and {sizes[0][1]:,}; only models of one vocabulary can be averaged."
                )
        self.models = nn.ModuleList(models)

    def forward(self, batch: PairBatch) -> Output:
        """Return the negative log-likelihood of a batch's targets with teacher forcing; for evaluation, not training.

        loss_sum equals nll_sum. Memory: one number a model and target token, besides what one model needs.
        """
        labels = batch.target_labels
        steps = torch.arange(labels.shape[1], device=labels.device)
        keep = steps[None, :] < batch.target_lengths[:, None] - 1
        found = []
        for model in self.models:
            hidden = model.body(batch.source, batch.source_lengths, batch.target_input)
            found.append(-model.head.token_losses(hidden[keep], labels[keep]))
        nll_sum = -mean_log_probs(found).sum().detach()
        return Output(loss_sum=nll_sum, nll_sum=nll_sum, num_tokens=keep.sum(), state=None)

    def log_probs(
        self,
        source: Int[Tensor, "batch source_len"],
        source_lengths: Int[Tensor, " batch"],
        target: Int[Tensor, "batch len"],
    ) -> Float[Tensor, "batch len vocab_size"]:
        return mean_log_probs([model.log_probs(source, source_lengths, target) for model in self.models])

    def restricted(self, ids: Int[Tensor, " count"]) -> RestrictedEnsemble:
        """See `protocols.Restrictable.restricted`. Each model is normalised over these ids before the average."""
        return RestrictedEnsemble([model.restricted(ids) for model in self.models])


def averaged_models(model: Any) -> Sequence[Any]:
    """Return the models of an ensemble; of another model, the model itself."""
    return tuple(model.models) if isinstance(model, Ensemble | LanguageEnsemble) else (model,)


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
