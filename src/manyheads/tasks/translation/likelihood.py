"""The likelihood of references, which are translations or trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from manyheads.data.batch import PairBatch
from manyheads.data.store import PairStore
from manyheads.data.stream import eval_batches
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.decoding.truncation import cut, fit, scored_limit, source_limit
from manyheads.errors import RequestError
from manyheads.evaluation.likelihood import Likelihood, counted, evaluate_likelihood
from manyheads.evaluation.perplexity import show_perplexity


def likelihood_of(
    translator: Translator,
    pairs: list[tuple[str, str]],
    settings: DecodingSettings,
    what: str = "reference",
    first: int = 0,
    told: Callable[[int], None] | None = None,
) -> Likelihood:
    """Of the references, given the sources as the search sees them; what does not fit is refused or cut likewise.

    Args:
        what: a reference is called so in messages.
        first: number of the first pair, from 0.
        told: told after each batch how many pairs are done.
    """
    model: Any = translator.model
    batches = reference_batches(translator, pairs, settings, what, first)
    with translator.runner.inference():
        return evaluate_likelihood(model, counted(batches, told), device=translator.device)


def reference_batches(
    translator: Translator,
    pairs: list[tuple[str, str]],
    settings: DecodingSettings,
    what: str = "reference",
    first: int = 0,
) -> Iterator[PairBatch]:
    """Yield the pairs as the model reads them; arguments as for `likelihood_of`."""
    model: Any = translator.model
    both = (translator.tokenizer.source, translator.tokenizer.target)
    if not getattr(both[0], "ends_sources", True):
        raise RequestError(
            "the likelihood is computed from sources that end in EOS, but those of this model do not; use"
            " Translator.score, or leave the likelihood out."
        )
    sources, references = (
        [[*ids, token.eos_id] for ids in token.encode_batch(list(texts))]
        for token, texts in zip(both, zip(*pairs, strict=True), strict=True)
    )
    # Sources that do not fit are named, and counted, by the search.
    sources = cut(sources, source_limit(settings, model.max_len)[0])
    limit, reason = scored_limit(settings, model.max_len)
    numbers = range(first + 1, first + len(pairs) + 1)
    references = fit(references, numbers, limit, reason, too_long=settings.too_long, what=what)
    bare = ([ids[:-1] for ids in side] for side in (sources, references))  # the store and its batches add EOS
    store = PairStore.from_lists(zip(*bare, strict=True), max(token.vocab_size for token in both))
    ids = {name: getattr(both[1], name) for name in ("pad_id", "bos_id", "eos_id")}
    return eval_batches(store, settings.max_tokens, **ids)


def likelihood_record(likelihood: Likelihood) -> dict[str, Any]:
    """For JSON."""
    return {
        "nats_per_token": likelihood.nats_per_token,
        "perplexity": likelihood.perplexity,
        "target_tokens": likelihood.num_tokens,
    }


def likelihood_lines(likelihood: Likelihood) -> list[str]:
    """For people."""
    nats, tokens = likelihood.nats_per_token, f"{likelihood.num_tokens:,}"
    return [
        f"likelihood = {nats:.4f} nats/token",
        f"  perplexity {show_perplexity(likelihood.perplexity)}, {tokens} target tokens, end of sentence included",
    ]
