"""Classification of text: model and tokenizer in one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from manyheads.decoding.text_ids import encode_texts, fit
from manyheads.errors import RequestError, refuse_nan
from manyheads.extras.classification.encoder_with_head import RunsEncoder
from manyheads.extras.classification.labelled_store import LabelledStore, eval_labelled
from manyheads.extras.classification.model import ClassifierEnsemble, SequenceClassifier

MAX_TOKENS = 4096
"""Tokens of a batch, padding included."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for a text. label: the most probable label. probabilities: label -> probability, best first."""

    label: str
    probabilities: dict[str, float]

    @property
    def probability(self) -> float:
        """Of the label."""
        return self.probabilities[self.label]


class Classifier(RunsEncoder[SequenceClassifier | ClassifierEnsemble]):
    """A model that gives each text one of its labels.

        classifier = Classifier.from_pretrained("runs/languages")
        classifier("Guten Tag!")  # "de"; a label for a text, a list for a list
        classifier.predict(["Guten Tag!"])[0].probabilities

    For the arguments see `RunsEncoder`.
    """

    task = "classification"
    ensemble = ClassifierEnsemble

    def __repr__(self) -> str:
        return (
            f"Classifier({self.model.config.architecture}, {len(self.labels)} labels, {self.device}, {self.precision})"
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the columns of `log_probs`."""
        labels: tuple[str, ...] = self.model.config.labels
        return labels

    def log_probs(
        self,
        texts: Sequence[str],
        *,
        max_tokens: int = MAX_TOKENS,
        too_long: Literal["fail", "truncate"] = "fail",
        first_number: int = 1,
        on_progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return log-probabilities of the labels, (texts, labels) in float32 on the CPU, in the order of the texts.

        Args:
            texts: an empty one is read as the end of a text alone; a line break counts as a space.
            max_tokens: tokens of a batch; a longer text does not fit.
            too_long: texts that do not fit: `fail`, or `truncate` them, with a warning each.
            first_number: number of the first text in messages.
            on_progress: called after each batch with the number of finished texts.

        Raises: RequestError: a text is too long, or no string. DataError: a text contains half a surrogate pair.
            NonFiniteError: the model gives NaN.
        """
        if max_tokens < 2:
            raise RequestError(f"max_tokens is {max_tokens}; it must be at least 2.")
        longest = self.model.max_len
        limit, reason = max_tokens, f"max_tokens {max_tokens}"
        if longest is not None and longest < max_tokens:
            limit, reason = longest, "the model's positions"
        rows = [[*ids, self.tokenizer.eos_id] for ids in encode_texts(texts, self.tokenizer)]
        rows = fit(rows, range(first_number, first_number + len(rows)), limit, reason, too_long=too_long)
        found = torch.empty(len(rows), len(self.labels))
        if not rows:
            return found
        store = LabelledStore.from_lists([(ids[:-1], 0) for ids in rows], self.model.config.vocab_size)
        special = {"pad_id": self.tokenizer.pad_id, "eos_id": self.tokenizer.eos_id}
        done = 0
        with self.runner.inference():
            for batch in eval_labelled(store, max_tokens, **special):
                moved = batch.to(self.device)
                found[batch.sample_ids] = self.model.log_probs(moved.tokens, moved.lengths).float().cpu()
                done += len(batch.sample_ids)
                if on_progress is not None:
                    on_progress(done)
        refuse_nan(bool(found.isnan().any()))
        return found

    def predict(self, texts: Sequence[str], *, too_long: Literal["fail", "truncate"] = "fail") -> list[Prediction]:
        """Return label and probabilities of each text; arguments and errors as of `log_probs`."""
        if isinstance(texts, str):
            raise RequestError("predict takes a list of texts; call the classifier itself for one text.")
        return self.predictions(self.log_probs(texts, too_long=too_long))

    def predictions(self, log_probs: Tensor) -> list[Prediction]:
        """Return the result of `log_probs` as predictions. Equal probabilities keep the order of the labels."""
        values, order = log_probs.exp().sort(dim=1, descending=True, stable=True)
        return [
            Prediction(self.labels[places[0]], {self.labels[i]: p for i, p in zip(places, probabilities, strict=True)})
            for places, probabilities in zip(order.tolist(), values.tolist(), strict=True)
        ]

    @overload
    def __call__(self, texts: str) -> str: ...  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
    @overload
    def __call__(self, texts: Sequence[str]) -> list[str]: ...
    def __call__(self, texts: str | Sequence[str]) -> str | list[str]:
        """Return the label of a text, or a list of labels of a list; errors as of `log_probs`."""
        if isinstance(texts, str):
            return self([texts])[0]
        return [one.label for one in self.predict(texts)]
