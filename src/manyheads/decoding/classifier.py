"""Classification of text: model and tokenizer in one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, overload

import torch
from torch import Tensor

from manyheads.architectures.classifier import SequenceClassifier
from manyheads.architectures.pretrained import load, save_pretrained
from manyheads.data.labelled_store import LabelledStore, eval_labelled
from manyheads.decoding.device import Precision, choose_device, choose_precision
from manyheads.decoding.model_runner import ModelRunner, RunsModel, model_folder
from manyheads.decoding.text_ids import encode_texts
from manyheads.decoding.truncation import fit
from manyheads.errors import ModelFileError, RequestError
from manyheads.text.tokenizer import Tokenizer

__all__ = ["MAX_TOKENS", "Classifier", "Prediction"]

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


class Classifier(RunsModel[SequenceClassifier]):
    """A model that gives each text one of its labels.

        classifier = Classifier.from_pretrained("runs/languages")
        classifier("Guten Tag!")  # "de"; a label for a text, a list for a list
        classifier.predict(["Guten Tag!"])[0].probabilities

    Args:
        model: a composite; it is put into evaluation mode.
        tokenizer: of the texts.
        device: the device of the model; `auto` chooses one.
        precision: `fp32`; `bf16` by autocast; `auto`: the faster one of these on the device; `int8`: see `Translator`.

    Raises: RequestError: no such device or precision.
    """

    def __init__(
        self,
        model: SequenceClassifier,
        tokenizer: Tokenizer,
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
    ) -> None:
        self.runner = ModelRunner(model, device, precision)
        self.tokenizer = tokenizer

    def __repr__(self) -> str:
        return (
            f"Classifier({self.model.config.architecture}, {len(self.labels)} labels, {self.device}, {self.precision})"
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        revision: str | None = None,
    ) -> Self:
        """Load a classifier from a model folder, a run folder, or `owner/name` on the Hugging Face hub.

        Raises: ModelFileError: a file is missing, damaged or refused, or the model is no classifier. ConfigError,
            DataError: the content of a file is invalid. RequestError: no such device or precision.
        """
        folder = model_folder(path, "classification", revision)
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        chosen = choose_device(device)
        choose_precision(precision, chosen)  # its errors come before weights are read
        model = load(folder, device=chosen)
        assert isinstance(model, SequenceClassifier)
        if tokenizer.vocab_size > model.config.vocab_size:
            raise ModelFileError(
                f"{folder} does not fit together: its tokenizer has {tokenizer.vocab_size:,} ids, its model"
                f" {model.config.vocab_size:,}. Copy the folder again."
            )
        made = cls(model, tokenizer, chosen, precision)
        made.runner.prepare_weights()
        return made

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the columns of `log_probs`."""
        labels: tuple[str, ...] = self.model.config.labels
        return labels

    def save_pretrained(self, path: str | Path) -> None:
        """Write a model folder. Raises: SaveError: it could not be written, or the weights were rounded to bf16."""
        save_pretrained(self.model, path, tokenizer=self.tokenizer, task="classification")

    def log_probs(
        self,
        texts: Sequence[str],
        *,
        max_tokens: int = MAX_TOKENS,
        too_long: Literal["fail", "truncate"] = "fail",
        first_number: int = 1,
        told: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return log-probabilities of the labels, (texts, labels) in float32 on the CPU, in the order of the texts.

        Args:
            texts: an empty one is read as the end of a text alone; a line break counts as a space.
            max_tokens: tokens of a batch; a longer text does not fit.
            too_long: texts that do not fit: `fail`, or `truncate` them, with a warning each.
            first_number: number of the first text in messages.
            told: told after each batch how many texts are done.

        Raises: RequestError: a text is too long, or no string. DataError: a text contains half a surrogate pair.
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
                if told is not None:
                    told(done)
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
