"""Several classifiers, or several chart parsers, as one model: their probabilities are averaged.

Translators: see `ensemble`; language models: see `language_ensemble`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.architectures.encoder_with_head import EncoderWithHead
from manyheads.architectures.ensemble import mean_log_probs, shortest_limit
from manyheads.data.batch import SpanBatch
from manyheads.errors import ConfigError
from manyheads.extras.parsing.span_parser import Charts, SpanProbabilities, charts_of
from manyheads.nn.shapes import Float, Int

__all__ = ["ClassifierEnsemble", "EncoderEnsemble", "SpanParserEnsemble"]


class EncoderEnsemble(nn.Module):
    """The common part of both.

    Args: models: at least one; the same model twice counts twice. Sizes and architectures may differ.

    Attributes: config: the first model's. names: fields of a config that are equal in all models.

    Raises: ConfigError: there is no model, or the models do not predict the same names.
    Cost: time and memory are the sums of those of the models.
    """

    names: tuple[str, ...]
    models: Any

    def __init__(self, models: Sequence[EncoderWithHead]) -> None:
        super().__init__()
        if not models:
            raise ConfigError("an ensemble needs at least one model, but none was given.")
        self.config: Any = models[0].config
        for number, model in enumerate(models, 1):
            for name in self.names:
                its, mine = getattr(model.config, name), getattr(self.config, name)
                if its != mine:
                    raise ConfigError(
                        f"model {number} of the ensemble has {_difference(name, its, mine)}, but model 1 has"
                        f" {_difference(name, mine, its)}; only models that predict the same can be averaged."
                    )
        self.models = nn.ModuleList(models)

    @property
    def max_len(self) -> int | None:
        """Maximum length of a text: the smallest limit of the models; None: there is no limit."""
        return shortest_limit(self.models)


class ClassifierEnsemble(EncoderEnsemble):
    """Classifiers of the same labels.

        model = ClassifierEnsemble([manyheads.load("models/a"), manyheads.load("models/b")])
        log_probs = model.log_probs(tokens, lengths)

    P(label | text) = 1/n sum over models of P_i(label | text)
    """

    names = ("labels",)

    def log_probs(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch num_labels"]:
        """See `SequenceClassifier.log_probs`."""
        return mean_log_probs([model.log_probs(tokens, lengths) for model in self.models])


class SpanParserEnsemble(EncoderEnsemble):
    """Chart parsers of the same labels and tags.

        model = SpanParserEnsemble([manyheads.load("models/a"), manyheads.load("models/b")])
        charts = model.charts(pieces, affixes, lengths)

    The best tree is that of the averaged probabilities of constituents. The probability of a tree is the average of its
    probabilities.
    """

    names = ("constituents", "tags", "root")

    def probabilities(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> SpanProbabilities:
        """See `SpanParser.probabilities`."""
        each = [model.probabilities(pieces, affixes, lengths) for model in self.models]
        constituents, tags = (torch.stack(values).mean(0) for values in zip(*each, strict=True))
        return SpanProbabilities(constituents, tags)

    def charts(
        self,
        pieces: Int[Tensor, "batch words pieces"],
        affixes: Int[Tensor, "batch words hashes"],
        lengths: Int[Tensor, " batch"],
    ) -> Charts:
        """See `SpanParser.charts`."""
        return charts_of(self.probabilities(pieces, affixes, lengths))

    def tree_log_prob(self, batch: SpanBatch) -> Float[Tensor, ""]:
        """See `SpanParser.tree_log_prob`."""
        each = torch.stack([model.tree_log_prob(batch) for model in self.models])
        return each.logsumexp(0) - math.log(len(each))


def _difference(name: str, its: Any, other: Any) -> str:
    """A field for a message: what one has and the other does not."""
    if isinstance(its, str):
        return f"{name} {its!r}"
    alone = [value for value in its if value not in other]
    if alone:
        return f"the {name} {', '.join(map(repr, alone[:3]))}{' ...' if len(alone) > 3 else ''}"
    return f"{len(its)} {name}" if len(its) != len(other) else f"the {name} in another order"
