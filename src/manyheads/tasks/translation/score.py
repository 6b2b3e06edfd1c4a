"""The likelihood of references, which are translations or trees.

Log-probabilities of given translations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from manyheads.data.lines import GivenItems, Progress, phase_progress
from manyheads.data.store import PairStore
from manyheads.data.translation.batches import eval_batches
from manyheads.data.translation.readers import PairFiles, ReadReport
from manyheads.decoding.inputs_and_results import cut, fit, scored_limit, source_limit
from manyheads.decoding.translator import Translator
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import RequestError
from manyheads.evaluation.likelihood import Likelihood, counted, evaluate_likelihood
from manyheads.evaluation.reading import show_perplexity
from manyheads.tasks.report import LineWork, score_line

if TYPE_CHECKING:
    from manyheads.data.batch import PairBatch
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.tasks.translation.options import ScoreOptions


def likelihood_of(
    translator: Translator,
    pairs: list[tuple[str, str]],
    settings: DecodingSettings,
    what: str = "reference",
    first: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Likelihood:
    """Of the references, given the sources as the search sees them; what does not fit is refused or cut likewise.

    Args:
        what: a reference is called so in messages.
        first: number of the first pair, from 0.
        on_progress: told after each batch how many pairs are done.
    """
    model: Any = translator.model
    batches = reference_batches(translator, pairs, settings, what, first)
    with translator.runner.inference():
        return evaluate_likelihood(model, counted(batches, on_progress), device=translator.device)


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


BLOCK_PAIRS = 2048


def score(options: ScoreOptions, progress: Progress) -> LineWork[tuple[str, str]]:
    """Load the model. Raises: DataError: the files cannot be read, or differ in length."""
    # Read all pairs first: unequal counts show only at the end of the files, and scores of misaligned lines would be
    # wrong.
    report = ReadReport()
    files = PairFiles(source=options.source, target=options.target, on_bad_utf8=options.on_bad_utf8)
    pairs = list(files.read(report))
    translator = options.run_on.load(Translator.from_pretrained, options.models.all(options.model), progress)
    translator = translator.into(options.target_lang, "--target-lang")
    budget: dict[str, Any] = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
    translator.settings = translator.options(**budget, too_long=options.too_long)

    def work(first: int, some: list[tuple[str, str]]) -> Iterator[str]:
        sources, targets = zip(*some, strict=True)
        on_progress = phase_progress(progress, "scoring", len(pairs), first)
        scored = translator.score(sources, targets, on_progress=on_progress, first_number=first + 1)
        return (score_line(first + place, one, tokens=options.tokens) for place, one in enumerate(scored, 1))

    identity = {
        "command": "score",
        "model": model_identity(options.model),
        **options.models.identity(),
        "settings": asdict(translator.settings),
        "form": (options.tokens, options.on_bad_utf8),
        "precision": translator.precision,
        "target_lang": translator.target_lang,
    }
    source = GivenItems(pairs, BLOCK_PAIRS, [options.source, options.target], report)
    return LineWork(source, work, identity, {"source": options.source, "reference": options.target})
