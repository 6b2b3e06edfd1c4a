"""Requests of our own protocol, and the parts that its answers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.extras.serving.api.shared import Body, Ids, Text, Texts, body_of, finite

_MOST_NGRAM = 100
"""Every n-gram of a prompt is kept, so their memory is n times that of the prompt."""


class TranslateBody(body_of(DecodingSettings, "native", Body)):  # type: ignore[misc]
    """A request for translations. Options that are not given are the model's."""

    model: Text | None = Field(None, description="Name of the model; default: the first that translates.")
    text: Text | Texts = Field(description="One text or several.")
    source_lang: Text | None = Field(None, description="Chooses the model by its languages, if no model is named.")
    target_lang: Text | None = None
    split_sentences: bool = Field(
        True, description="Translate each sentence separately; otherwise split at line breaks only."
    )
    stream: bool = Field(False, description="Send the sentences as server-sent events as they are finished.")
    alignments: bool = Field(
        False,
        description="Add the cross-attention of the best translation of each sentence, if it has at most 1,000 tokens.",
    )
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token of the best translation.")
    forced_prefix: Text | None = Field(None, description="How the translation begins; for one sentence.")
    forced_prefix_ids: Ids | None = Field(None, description="The same as token ids.")
    no_repeat_ngram_size: Annotated[int, Field(le=_MOST_NGRAM)] | None = None
    json_schema: dict[str, Any] | Text | None = Field(None, description="The output is JSON that this permits.")
    terms: Text | None = Field(
        None, description="Terms as lines of source, tab, target, which are forced in the best translations."
    )


class GenerateBody(body_of(GenerationSettings, "native", Body)):  # type: ignore[misc]
    """A request for continuations. Options that are not given are the model's."""

    model: Text | None = Field(None, description="Name of the model; default: the first language model.")
    prompt: Text | Texts = ""
    prompt_ids: Ids | None = Field(None, description="One prompt as token ids, instead of prompt.")
    stream: bool = Field(False, description="Send the text as server-sent events while it is generated.")
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token, best first.")
    stop: Texts | None = Field(None, description="Texts that end a continuation.", max_length=16)
    no_repeat_ngram_size: Annotated[int, Field(le=_MOST_NGRAM)] | None = None
    json_schema: dict[str, Any] | Text | None = Field(None, description="The output is JSON that this permits.")


class ScoreBody(Body):
    """A request for log-probabilities: of translations (source and target), or of texts."""

    model: Text | None = None
    source_lang: Text | None = Field(None, description="Of pairs: as in /v1/translate.")
    target_lang: Text | None = None
    source: Texts | None = Field(None, description="Sources; their translations are in target.")
    target: Texts | None = None
    text: Texts | None = Field(None, description="Texts for a language model.")
    top_log_probs: int = Field(0, ge=0, le=20, description="Alternatives of each token, best first.")


class AttentionBody(Body):
    """A request for the attention weights of a pair.

    If no layer or head is named, weights are averaged over all of them.
    """

    model: Text | None = None
    source_lang: Text | None = Field(None, description="Chooses the model by its languages, if no model is named.")
    target_lang: Text | None = None
    source: Text
    target: Text | None = Field(None, description="Default: the model's own translation.")
    kind: Literal["cross", "encoder", "decoder"] = "cross"
    layer: Annotated[int, Field(ge=0)] | None = None
    head: Annotated[int, Field(ge=0)] | None = None


def of_tokens(
    ids: list[int], log_probs: list[float], top: list[list[tuple[int, float]]], show: Callable[[list[int]], list[str]]
) -> dict[str, Any]:
    """Return the entries about tokens. top: alternatives of each, if they are asked for."""
    shown = {"tokens": show(ids), "token_ids": ids, "token_log_probs": [finite(value) for value in log_probs]}
    return {**shown, "top_log_probs": of_alternatives(top, show)} if top else shown


def of_alternatives(
    top: list[list[tuple[int, float]]], show: Callable[[list[int]], list[str]]
) -> list[list[dict[str, Any]]]:
    """Return the alternatives of each token, as records. show: readable tokens of ids."""
    return [
        [{"token": show([index])[0], "token_id": index, "log_prob": finite(value)} for index, value in one]
        for one in top
    ]


def rounded(weights: Tensor) -> list[list[float]]:
    """Return attention weights with four digits."""
    return [[round(value, 4) for value in row] for row in weights.tolist()]
