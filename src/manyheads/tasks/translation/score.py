"""Log-probabilities of given translations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from manyheads.data.lines import GivenItems, Progress, telling
from manyheads.data.translation.readers import PairFiles, ReadReport
from manyheads.decoding.translator import Translator
from manyheads.distributed.sharded_lines import model_identity
from manyheads.tasks.report import LineWork, score_line
from manyheads.tasks.translation.options import ScoreOptions

BLOCK_PAIRS = 2048


def score(options: ScoreOptions, show: Progress) -> LineWork[tuple[str, str]]:
    """Load the model. Raises: DataError: the files cannot be read, or differ in length."""
    # Read all pairs first: unequal counts show only at the end of the files, and scores of misaligned lines would be
    # wrong.
    report = ReadReport()
    files = PairFiles(source=options.source, target=options.target, on_bad_utf8=options.on_bad_utf8)
    pairs = list(files.read(report))
    translator = options.run_on.load(Translator.from_pretrained, options.models.all(options.model), show)
    translator = translator.into(options.target_lang, "--target-lang")
    budget: dict[str, Any] = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
    translator.settings = translator.options(**budget, too_long=options.too_long)

    def work(first: int, some: list[tuple[str, str]]) -> Iterator[str]:
        sources, targets = zip(*some, strict=True)
        told = telling(show, "scoring", len(pairs), first)
        scored = translator.score(sources, targets, told=told, first_number=first + 1)
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
