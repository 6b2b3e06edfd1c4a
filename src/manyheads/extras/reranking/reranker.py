"""Hypotheses that a model ranks again by translating them back into the source.

Paper: Yee et al. 2019, arXiv:1908.05731, sec. 2.2, eq. 3, without a language model. Differs: both log-probabilities are
divided by the length penalty of the search, not by the target's length:

    score(y) = log P(y | x) / penalty(length of y) + weight * log P(x | y) / penalty(length of x)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from manyheads.decoding.inputs_and_results import OnProgress, cut, encode_texts, fit, scored_limit, with_end
from manyheads.decoding.search_problem import RULES
from manyheads.decoding.translator import score_ids
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import Hypothesis, Stop
    from manyheads.decoding.model_runner import ModelRunner
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.decoding.translation_model import TranslationModel
    from manyheads.models.protocols import Searchable
    from manyheads.text.sides import TranslationTokenizer

_log = logging.getLogger(__name__)


def reranker_of(model: TranslationModel, reverse: TranslationModel, weight: float) -> Reranker:
    """Return what ranks the hypotheses of a model; see `Translator.reranked_by`."""
    if not 0 <= weight < math.inf:
        raise ConfigError(f"the weight of the reverse model is {weight}; it must be a number of at least 0.")
    for kind in (model.tokenizer.model_kind, reverse.tokenizer.model_kind):
        if kind != "translator":
            raise ConfigError(f"reranking needs two translators, but one of the models is a {kind}.")
    if model.tokenizer.target_languages and model.target_lang is None:
        raise ConfigError(
            "this model translates into several languages; choose one before reranking, by --target-lang (in"
            " Python: translator.into(language))."
        )
    check_reverse(model.languages, reverse.languages)
    if reverse.tokenizer.target_languages and reverse.target_lang is None:
        sources = {source for source, _ in model.languages}
        reverse = reverse.into(sources.pop() if len(sources) == 1 else None)
    return Reranker(reverse.runner, reverse.tokenizer, reverse.settings, weight)


@dataclass(frozen=True)
class Reranker:
    """Ranks hypotheses with the help of a reverse model.

    Args:
        runner: runs the reverse model, which is `Scorable`.
        tokenizer: the reverse model's.
        settings: the reverse model's, of which `max_tokens` is read.
        weight: of the reverse model's score; 0 keeps the order of the search.
    """

    runner: ModelRunner[Searchable]
    tokenizer: TranslationTokenizer
    settings: DecodingSettings
    weight: float = 1.0

    def check(self, settings: DecodingSettings) -> None:
        """Raises: ConfigError: the search keeps no hypotheses to choose from."""
        if settings.do_sample or settings.num_beams == 1:
            how = "do_sample is set" if settings.do_sample else "num_beams is 1"
            raise ConfigError(
                f"a reverse model ranks the hypotheses of a beam, but {how}; search with num_beams of 2 or more."
            )

    def rerank(
        self,
        sources: Sequence[str],
        found: Sequence[list[Hypothesis]],
        outputs: Sequence[list[str]],
        settings: DecodingSettings,
        *,
        numbers: Sequence[int],
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each source with their new scores, best first; equal ones in the given order.

        Outputs that are too long for the reverse model are cut.

        Args:
            found: of each source.
            outputs: their texts.
            settings: of the search.
            numbers: of the sources in messages.
            on_progress: called after each batch with the number of outputs scored so far.

        Raises: RequestError: a source is too long for the reverse model. SearchStopped: the hook returned true.
        """
        reader, writer = self.tokenizer.source, self.tokenizer.target
        limit, reason = scored_limit(self.settings, self.runner.model.max_len)
        labels = [[*ids, writer.eos_id] for ids in encode_texts(sources, writer)]
        if settings.too_long == "fail":
            fit(labels, numbers, limit, f"{reason}, in the reverse model", too_long="fail")
        labels = cut(labels, limit)
        texts = [text for each in outputs for text in each]
        inputs = cut([with_end(ids, reader) for ids in encode_texts(texts, reader)], limit)
        targets = [ids for ids, each in zip(labels, outputs, strict=True) for _ in each]
        scored = score_ids(
            self.runner, self.tokenizer, inputs, targets, self.settings.max_tokens, stop=stop, on_progress=on_progress
        )
        rules, sums = RULES[settings.rules](settings), iter(sum(row) for row in scored)
        results = []
        for hypotheses, ids in zip(found, labels, strict=True):
            totals = torch.tensor(list(islice(sums, len(hypotheses))), dtype=torch.float64)
            reverse = rules.score(totals, len(ids)).tolist()
            both = zip(hypotheses, reverse, strict=True)
            ranked = [replace(one, score=one.score + self.weight * other) for one, other in both]
            results.append(sorted(ranked, key=lambda one: -one.score))
        return results


def check_reverse(languages: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> None:
    """Compare the directions of a model with those of its reverse model. If they cannot be compared, a warning says so.

    Args: languages, others: (source, target) of each direction; empty if they are unknown.

    Raises: ConfigError: both are known, and the reverse model does not translate back.
    """
    if not (languages and others):
        _log.warning(
            "%s, so it is not known whether the reverse model translates back. `prepare` records languages that are"
            " named by --source-lang and --target-lang",
            "Neither model records its languages"
            if not languages and not others
            else f"The {'reverse' if languages else 'first'} model does not record its languages",
        )
    known = {(source.lower(), target.lower()) for source, target in others}
    missing = [(target, source) for source, target in languages if (target.lower(), source.lower()) not in known]
    if known and missing:
        shown = [", ".join(f"{source} to {target}" for source, target in pairs) for pairs in (others, missing)]
        raise ConfigError(f"the reverse model translates {shown[0]}; reranking needs one that translates {shown[1]}.")
