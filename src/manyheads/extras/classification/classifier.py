"""The composite for classification: an encoder, one vector for a whole text, and a head that chooses its label.

Encoders: that of the Transformer (Vaswani et al. 2017, arXiv:1706.03762, sec. 3.1, the left half of figure 1); and the
Reformer (Kitaev et al. 2020, arXiv:2001.04451), whose queries attend to later tokens, too, as in the encoder of the
translation model of sec. 5.

`Classifier` is a model and its tokenizer in one object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from manyheads.decoding.inputs_and_results import encode_texts, fit
from manyheads.errors import ConfigError, RequestError, refuse_nan
from manyheads.extras.classification.encoder_with_head import EncoderEnsemble, EncoderWithHead, RunsEncoder
from manyheads.extras.classification.labelled_store import LabelledStore, eval_labelled
from manyheads.models.ensemble import mean_log_probs
from manyheads.models.protocols import Output
from manyheads.models.reformer.model import Reformer
from manyheads.models.size_checks import check_vocabularies
from manyheads.models.transformer.model import Encoder
from manyheads.nn.attention.masks import Lengths
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.linear import low_precision
from manyheads.nn.layers import Dropout
from manyheads.nn.positions import TokenEmbedding, positions_of_kind

if TYPE_CHECKING:
    from manyheads.extras.classification.labelled_store import LabelledBatch
    from manyheads.extras.classification.settings import Pooling, ReformerClassifierConfig, TransformerClassifierConfig
    from manyheads.nn.shapes import Float, Int


class TextPooling(nn.Module):
    """The vector of each text, with dropout.

        >>> pool = TextPooling("mean")
        >>> pool(torch.randn(2, 5, 16), torch.tensor([5, 2])).shape
        torch.Size([2, 16])

    States at padding are never read: whatever they contain, NaN included, the result is the same.

    Args:
        kind: see `Pooling`.
        dropout: on the vector.
    """

    def __init__(self, kind: Pooling, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.dropout = Dropout(dropout)

    def facts(self) -> tuple[str, ...]:
        return "Pooling", self.equation()[1]

    def equation(self) -> tuple[str, str]:
        return "text vector", "h₁" if self.kind == "first" else "mean of the real positions' h"

    def forward(
        self, hidden: Float[Tensor, "batch len width"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        """Return the vectors. lengths: number of real positions; padding on the right. The mean of none is zeros."""
        if self.kind == "first":
            return self.dropout(hidden[:, 0])  # type: ignore[no-any-return]
        padding = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]  # (batch, len)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        mean = wide.masked_fill(padding[:, :, None], 0.0).sum(1) / lengths[:, None].clamp(min=1)
        return self.dropout(mean.to(hidden.dtype))  # type: ignore[no-any-return]


class SequenceClassifier(EncoderWithHead):
    """An encoder with pooling and its class head.

        model = manyheads.load("models/genres")
        log_probs = model.log_probs(tokens, lengths)     # (batch, labels), in the order of model.config.labels

    Args:
        body: a module: (tokens, lengths) -> hidden states. It reads no padding.
        pooling: makes one vector of the states of a text.
        head: with a row of weights for each label.
        config: the architecture's, stored for files; it contains the labels.
    """

    head: LinearHead

    def __init__(self, body: nn.Module, pooling: TextPooling, head: LinearHead, config: Any) -> None:
        super().__init__(body, head, config)
        self.pooling = pooling

    def card_text(self) -> str:
        return f"Its labels: {', '.join(self.config.labels)}.\n\n"

    def forward(
        self, batch: LabelledBatch, state: Any = None, *, label_smoothing: float = 0.0, chunk_tokens: int = 2048
    ) -> Output:
        """Return the loss of a batch, summed over its texts; num_tokens is the number of texts.

        Args: state, chunk_tokens: not used, as there is no memory, and a text has one row of logits.
        """
        keep = torch.ones_like(batch.labels, dtype=torch.bool)
        vectors = self._vectors(batch.tokens, batch.lengths)
        loss_sum, nll_sum = self.head.loss(vectors, batch.labels, keep, label_smoothing=label_smoothing)
        return Output(loss_sum=loss_sum, nll_sum=nll_sum, num_tokens=keep.sum())

    def log_probs(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch num_labels"]:
        """Return log-probabilities of the labels in float32.

        Args:
            tokens: ids, EOS last, padded on the right.
            lengths: number of real ids of each row, at least 1; None: all are real.
        """
        if lengths is None:
            lengths = torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
        return self.head.log_probs(self._vectors(tokens, lengths))

    def _vectors(self, tokens: Tensor, lengths: Tensor) -> Float[Tensor, "batch width"]:
        vectors: Tensor = self.pooling(self.body(tokens, lengths), lengths)
        return vectors


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
        return mean_log_probs([model.log_probs(tokens, lengths) for model in self.models])


def build_classifier_of(encoder: Callable[[Any], nn.Module], config: Any, width: int) -> SequenceClassifier:
    """Return body and head, with random weights. encoder: makes the body of a config. width: of its states.

    Raises: ConfigError: the vocabulary size or the labels are missing.
    """
    check_vocabularies(config, "vocab_size")
    if len(config.labels) < 2:
        raise ConfigError(f"model.labels has {len(config.labels)} labels; a classifier chooses among at least 2.")
    head = LinearHead(width, len(config.labels), bias=True)
    return SequenceClassifier(encoder(config), TextPooling(config.pooling, config.dropout), head, config)


class TransformerEncoder(nn.Module):
    """Token ids to hidden states: embedding, positions, and the encoder-decoder's stack of layers.

    Args: config: sizes and choices; the vocabulary size must be set.
    """

    def __init__(self, config: TransformerClassifierConfig) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model)
        self.positions = positions_of_kind(config.positions, config.d_model, config.max_len)
        self.dropout = Dropout(config.dropout)
        self.encoder = Encoder(config.stack)

    def forward(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch len d_model"]:
        """Return the states. Rows are padded on the right; states at padding are undefined."""
        x = self.dropout(low_precision(self.positions(self.embedding(tokens))))
        return self.encoder(x, Lengths(lengths))  # type: ignore[no-any-return]


def build_transformer(config: TransformerClassifierConfig) -> SequenceClassifier:
    """See `build_classifier_of`."""
    return build_classifier_of(TransformerEncoder, config, config.d_model)


class ReformerEncoder(nn.Module):
    """Token ids to hidden states of width 2 d_model, both streams of the reversible layers side by side.

    In training the hash seed of a call comes from torch's generator, as dropout does; evaluation uses the config's.

    Args: config: sizes and choices; the vocabulary size must be set.
    """

    def __init__(self, config: ReformerClassifierConfig) -> None:
        super().__init__()
        self.reformer = Reformer(config)

    def forward(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch len width"]:
        """Return the states. Rows are padded on the right; states at padding are undefined."""
        seed = int(torch.randint(1 << 62, (), device="cpu")) if self.training else None
        state = self.reformer.start(len(tokens), projected=False, hash_seed=seed)
        hidden, _ = self.reformer(tokens, lengths, state)
        return hidden  # type: ignore[no-any-return]


def build_reformer(config: ReformerClassifierConfig) -> SequenceClassifier:
    """See `build_classifier_of`."""
    return build_classifier_of(ReformerEncoder, config, 2 * config.d_model)


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
