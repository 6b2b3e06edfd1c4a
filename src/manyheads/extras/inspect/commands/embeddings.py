"""`manyheads inspect embeddings MODEL`: nearest neighbours of words, and a map of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import echo, set_up_machine
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, Shared, option
from manyheads.errors import ConfigError
from manyheads.extras.inspect.options import check_kinds, picture_option, write_figure
from manyheads.files.verify import json_text

if TYPE_CHECKING:
    from manyheads.extras.inspect.embeddings import EmbeddedWord, NamedEmbeddings, Neighbour

_MOST_WORDS = 50
_MOST_NEIGHBOURS = 50
_MOST_TOKENS = 500


@dataclass(frozen=True, kw_only=True)
class EmbeddingsOptions:
    """Options of `manyheads inspect embeddings`."""

    model: str = Shared.model()
    words: tuple[str, ...] = option(
        "Words whose neighbours are printed and drawn. A word of several tokens is the mean of their vectors.",
        default=(),
        metavar="WORD ...",
        default_is="none",
    )
    ids: tuple[int, ...] = option(
        "The same for tokens, given by their ids.", default=(), metavar="N ...", default_is="none"
    )
    neighbours: int = option("Neighbours of each word.", default=8, metavar="N")
    tokens: int = option(
        "Number of frequent tokens on the map: the first words of the vocabulary.", default=80, metavar="N"
    )
    side: Literal["source", "target"] | None = option(
        "For a translator: the side whose embeddings are used.", default=None, default_is="source"
    )
    json: bool = Shared.json("Print a JSON object with the neighbours and the points of the map.")
    output: tuple[str, ...] = picture_option("embeddings.png")

    def __post_init__(self) -> None:
        check(self, "--", between(1, _MOST_NEIGHBOURS), "neighbours")
        check(self, "--", between(0, _MOST_TOKENS), "tokens")
        if len(self.words) + len(self.ids) > _MOST_WORDS:
            raise ConfigError(
                f"--words and --ids name {len(self.words) + len(self.ids)} words; give at most {_MOST_WORDS}."
            )


PAGE = CommandPage(
    EmbeddingsOptions,
    """Print the tokens whose embeddings have the highest cosine similarity with those of the given words. Draw a map of
words, neighbours and frequent tokens by their first two principal components. The embeddings are those that the layers
receive: in a Transformer-XL with adaptive widths, after the projection.""",
    (
        "manyheads inspect embeddings runs/demo --words man red walking",
        "manyheads inspect embeddings runs/demo --words Mann --side target --neighbours 20 --output map.svg",
        "manyheads inspect embeddings runs/xl-demo --ids 97 98 --tokens 60 --json",
    ),
)


@command(PAGE, "inspect embeddings")
def run(options: EmbeddingsOptions) -> int:
    """Print and draw. Returns: the exit code. The table and the paths of pictures go to standard output."""
    set_up_machine()
    check_kinds(options.output)
    from manyheads.extras.inspect.drawings.embeddings import embedding_map_figure
    from manyheads.extras.inspect.embeddings import embedding_map, neighbours_of, open_embeddings

    embeddings = open_embeddings(options.model, options.side)
    words = [*map(embeddings.word, options.words), *map(embeddings.token, options.ids)]
    found = neighbours_of(embeddings, words, options.neighbours)
    points, shares = embedding_map(embeddings, words, found, options.tokens)
    figure = embedding_map_figure(points, shares, title=f"Embeddings of {options.model}: {embeddings.name}")
    if options.json:
        record = {
            "table": embeddings.name,
            "shape": [embeddings.table.num_rows, embeddings.table.width],
            "words": _records(embeddings, words, found),
            "map": {"variance": shares, "points": [asdict(point) for point in points]},
        }
        print(json_text(record, indent=2))
    elif words:
        echo("\n".join(_lines(embeddings, words, found)))
    write_figure(figure, options.output, as_json=options.json)
    return 0


def _records(
    embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], found: Sequence[Sequence[Neighbour]]
) -> list[dict[str, object]]:
    return [
        {
            "word": word.text,
            "tokens": word.pieces,
            "ids": word.ids,
            "neighbours": [{"token": embeddings.label(one.id), "id": one.id, "cosine": one.cosine} for one in near],
        }
        for word, near in zip(words, found, strict=True)
    ]


def _lines(
    embeddings: NamedEmbeddings, words: Sequence[EmbeddedWord], found: Sequence[Sequence[Neighbour]]
) -> list[str]:
    """Return one line per word: its neighbours and their cosines."""
    from manyheads.extras.inspect.drawings.attention import shown_token

    lines = []
    for word, near in zip(words, found, strict=True):
        pieces = " ".join(map(shown_token, word.pieces))
        name = shown_token(word.text) + (f" (mean of {pieces})" if len(word.pieces) > 1 else "")
        lines.append(
            name + ": " + "  ".join(f"{shown_token(embeddings.label(one.id))} {one.cosine:.2f}" for one in near)
        )
    return lines
