"""Log-probabilities of given texts, each line by itself."""

from __future__ import annotations

from collections.abc import Iterator

from manyheads.data.lines import LinesOf, Progress, telling
from manyheads.decoding.generator import Generator
from manyheads.decoding.text_scoring import score_texts
from manyheads.distributed.sharded_lines import model_identity
from manyheads.tasks.language_modelling.options import ScoreOptions
from manyheads.tasks.report import LineWork, score_line


def score(options: ScoreOptions, show: Progress) -> LineWork[str]:
    """Load the model."""
    generator = options.run_on.load(Generator.from_pretrained, options.models.all(options.model), show)

    def work(first: int, lines: list[str]) -> Iterator[str]:
        told = telling(show, "scoring lines", 0, first)
        found = score_texts(generator, lines, max_rows=options.max_rows, told=told, first_number=first + 1)
        return (score_line(first + place, one, tokens=options.tokens) for place, one in enumerate(found, 1))

    identity = {
        "command": "score",
        "model": model_identity(options.model),
        **options.models.identity(),
        "form": (options.tokens, options.on_bad_utf8, options.max_rows),
        "precision": generator.precision,
    }
    return LineWork(
        LinesOf(options.text, 16 * options.max_rows, options.on_bad_utf8), work, identity, {"text": options.text}
    )
