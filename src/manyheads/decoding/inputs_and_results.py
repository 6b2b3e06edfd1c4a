"""The inputs and results of every search, as plain Python values.

Sentences to ids and to batches: types are checked, texts that are too long are refused or truncated, reported with file
and line and counted, and rows of different lengths are grouped and padded to one tensor. Results of a search and of a
translator, and the errors that end a search. The engines that search: this package, or another runtime on an export of
the model. Importing this module does not import torch.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from manyheads.catalogue import HOOKS, load
from manyheads.data.lines import ReadReport, describe
from manyheads.errors import NonFiniteError, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from manyheads.decoding.settings import DecodingSettings
    from manyheads.text.sides import Side

_log = logging.getLogger(__name__)
_SHOWN = 5


def source_limit(settings: DecodingSettings, max_len: int | None) -> tuple[int, str]:
    """Return the maximum length of a source including EOS, and the reason: positions of the model, or the token budget.

    All beams of one sentence must fit into `max_tokens`.
    """
    rows = settings.num_return_sequences if settings.do_sample else settings.num_beams
    return _limit(max(1, settings.max_tokens // rows), f"max_tokens {settings.max_tokens} / {rows} beams", max_len)


def scored_limit(settings: DecodingSettings, max_len: int | None) -> tuple[int, str]:
    """Return the same as `source_limit` for either side of a scored pair, where there are no beams."""
    return _limit(settings.max_tokens, f"max_tokens {settings.max_tokens}", max_len)


def _limit(budget: int, reason: str, max_len: int | None) -> tuple[int, str]:
    return (max_len, "the model's positions") if max_len is not None and max_len < budget else (budget, reason)


def fit(
    rows: Sequence[list[int]],
    numbers: Sequence[int],
    limit: int,
    reason: str,
    *,
    too_long: Literal["fail", "truncate"],
    what: str = "text",
) -> list[list[int]]:
    """Truncate rows of more than `limit` tokens with a warning, or refuse them, as `too_long` says.

    Args:
        rows: ids of each, EOS last.
        numbers: the number of each row in messages: its position in the input, counted from 1.
        limit, reason: see `source_limit`.
        what: a row is called so in messages.

    Raises: RequestError: a row is too long.
    """
    named: set[int] = set()  # a text can have several rows
    for ids, number in zip(rows, numbers, strict=True):
        if len(ids) > limit and too_long == "fail":
            raise RequestError(
                f"{what} {number} has {len(ids)} tokens, EOS included, but at most {limit} fit ({reason});"
                " split the text, raise max_tokens if that is the limit, or set too_long to truncate."
            )
        if len(ids) > limit and number not in named:
            named.add(number)
            _log.warning("%s %d has %d tokens; only its first %d are used", what, number, len(ids), limit - 1)
    return cut(rows, limit)


def cut(rows: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Return each row truncated to `limit` ids: its first limit - 1 ids and its last one, which is EOS."""
    return [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in rows]


def check_target_limit(settings: DecodingSettings, max_len: int | None) -> None:
    """Check that the model has enough positions for the requested number of target tokens.

    Raises: RequestError: max_new_tokens, min_new_tokens or the forced prefix needs more positions.
    """
    longest = max(settings.max_new_tokens, settings.min_new_tokens, len(settings.forced_prefix_ids) + 1)
    if max_len is not None and longest > max_len:
        raise RequestError(
            f"{longest} target tokens are requested, but the model has positions for {max_len};"
            " lower max_new_tokens or min_new_tokens, or shorten the forced prefix."
        )


class TruncationCounter(logging.Handler):
    """Shows the first few warnings about truncated texts on standard error, and counts all of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        self.count += 1
        if self.count <= _SHOWN:
            _tell(record.getMessage().replace("text ", "line ", 1))


@contextmanager
def naming_lines(unit: str = "line", /, **paths: str) -> Iterator[None]:
    """In errors about a numbered text, replace the number by the file and the line.

    Args:
        unit: what the number counts in the file.
        paths: the name of such a text in errors (`text`, `source`, `reference`) -> the file of which it is a line.

    Raises: RequestError: with the changed message.
    """
    try:
        yield
    except RequestError as error:
        kind, _, rest = str(error).partition(" ")
        if kind not in paths or not rest[:1].isdigit():
            raise
        told = f"{describe(paths[kind])}: {unit} {rest}".replace("set too_long to", "use --too-long")
        raise RequestError(told.replace("max_tokens if", "--max-tokens if")) from error


def tell_bad_lines(report: ReadReport) -> None:
    """Print how many lines were not UTF-8, if there were any, and how they were treated."""
    for count, what in ((report.bad_utf8_replaced, "bad bytes replaced"), (report.bad_utf8_skipped, "skipped")):
        if count:
            _tell(f"lines that are not UTF-8, {what}: {count}")


@contextmanager
def counted_truncations() -> Iterator[TruncationCounter]:
    """Count the texts that are truncated in the block. If there were any, print their number at its end."""
    counter = TruncationCounter()
    propagated, _log.propagate = _log.propagate, False
    _log.addHandler(counter)
    try:
        yield counter
    finally:
        _log.removeHandler(counter)
        _log.propagate = propagated
        if counter.count:
            _tell(f"lines cut because they were too long: {counter.count}")


def _tell(text: str) -> None:
    """Print a line in one call, so that another thread's line of progress cannot begin before its end."""
    sys.stderr.write(f"manyheads: {text}\n")
    sys.stderr.flush()


_LINE_BREAKS = re.compile(r"[\r\n]+")


def encode_texts(texts: Sequence[str], side: Side) -> list[list[int]]:
    """Return the ids of each text, which is one sentence.

    A line break inside it becomes a space; line breaks at its ends are removed, because models of sentences were not
    trained on line breaks.

    Raises: RequestError: a text is not a string.
    """
    check_texts(texts)
    return side.encode_batch([" ".join(filter(None, _LINE_BREAKS.split(text))) for text in texts])


def with_end(ids: Sequence[int], side: Side) -> list[int]:
    """Return the ids of a source with its EOS, unless the side's sources have none."""
    return [*ids, side.eos_id] if getattr(side, "ends_sources", True) else list(ids)


def prefix_ids(text: str, side: Side) -> tuple[int, ...]:
    """Return the ids of the beginning of a translation. White space at its end only ends a word: it is no piece."""
    return tuple(side.encode(text.rstrip()))


def check_texts(texts: Sequence[str], what: str = "text") -> None:
    """Raises: RequestError: it is no list, or a text is not a string. what: messages call a text so."""
    # Any kind of sequence will do; a generator would be empty after this check, and a set has no order.
    is_list = hasattr(texts, "__len__") and hasattr(texts, "__getitem__") and not isinstance(texts, bytes | Mapping)
    if not is_list:
        raise RequestError(f"a {type(texts).__name__} was given; give one {what}, a string, or a list of {what}s.")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise RequestError(f"{what} {number} is a {type(text).__name__}; {what}s are strings.")


T = TypeVar("T")
PADDED_TOKENS = 16_384
"""Tokens of a batch of texts for a language model, padding included."""
OnProgress = Callable[[int], None]
"""Called after each batch with the number of items that are done."""


def cut_batches(
    lengths: Sequence[int], max_tokens: int = PADDED_TOKENS, rows_each: int = 1, max_rows: int | None = None
) -> list[list[int]]:
    """Group indices of sentences by similar length, longest first.

    In a batch rows_each x sentences x longest <= max_tokens, and rows_each x sentences <= max_rows, if that is given. A
    sentence that exceeds a limit is a batch by itself.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    batches: list[list[int]] = []
    for place in order:
        rows = rows_each * (len(batches[-1]) + 1) if batches else 0
        if rows and rows * lengths[batches[-1][0]] <= max_tokens and (max_rows is None or rows <= max_rows):
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def map_batches(
    work: Callable[[list[int]], Sequence[T]], batches: Sequence[list[int]], on_progress: OnProgress | None
) -> list[T]:
    """Return the result for each item, in the order of their numbers. work: batch -> the results of its items."""
    results: dict[int, T] = {}
    for batch in batches:
        results.update(zip(batch, work(batch), strict=True))
        if on_progress is not None:
            on_progress(len(results))
    return [results[number] for number in range(len(results))]


def padded(rows: Sequence[Sequence[int]], pad_id: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return rows of ids padded on the right, (rows, longest), and their lengths, (rows,)."""
    import torch  # imported here, because help does not need it
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(row, device="cpu") for row in rows], batch_first=True, padding_value=pad_id)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


Stop = Callable[[], bool]
"""Called before each step of a search; true ends the search by SearchStopped."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a search.

    Args:
        ids: target tokens with the forced prefix, without BOS and EOS.
        score: the ranking score: the sum of the search's log-probabilities (after the repetition penalty, before the
            temperature), divided by the length penalty; of a reranked one see `extras.reranking`.
        token_log_probs: the model's log-probability of each id, and of EOS last if `ended`; 0 for forced tokens.
            Empty if another engine searched (see `SearchEngine`).
        ended: whether the model produced EOS; otherwise the hypothesis was cut at the length limit.
    """

    ids: list[int]
    score: float
    token_log_probs: list[float]
    ended: bool

    @property
    def sum_log_prob(self) -> float:
        """Log-probability of the whole output under the model, in nats, forced tokens excluded."""
        return sum(self.token_log_probs)


class SearchStopped(Exception):  # noqa: N818  (an event, not an error)
    """The `stop` hook returned true; the results of the current batch are lost."""


def check_stop(stop: Stop | None) -> None:
    """Raises: SearchStopped: the `stop` hook returned true."""
    if stop is not None and stop():
        raise SearchStopped


def check_finite(is_nan: bool, length: int) -> None:
    """Raises: NonFiniteError: a log-probability of token `length` of the output is NaN."""
    if is_nan:
        raise NonFiniteError(
            f"The model gave NaN log-probabilities for target token {length}; its weights are damaged or overflow in"
            " this precision. Check the model, or use precision fp32."
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A translation of a text. text: with the kept words. hypothesis: of the search, with stand-ins in its ids."""

    text: str
    hypothesis: Hypothesis


@dataclass(frozen=True, slots=True)
class Translation:
    """One translation of one text.

    Args:
        text: detokenised.
        score: the ranking score of the n-best list, see `Hypothesis.score`.
        tokens: readable pieces, EOS last unless the translation was cut at the length limit.
        token_log_probs: the model's log-probability of each piece, in nats; 0 for forced pieces. Empty if
            another engine searched (see `SearchEngine`).
    """

    text: str
    score: float
    tokens: list[str]
    token_log_probs: list[float]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a given reference.

    Args:
        tokens: readable pieces of the reference, EOS last.
        token_log_probs: log-probability of each, given the source and the pieces before it, in nats.
    """

    tokens: list[str]
    token_log_probs: list[float]

    @property
    def sum_log_prob(self) -> float:
        """Log-probability of the whole reference, in nats."""
        return sum(self.token_log_probs)


def one_line(text: str) -> str:
    """Return a translation as one line: a line feed in it becomes a space."""
    return text.replace("\n", " ")


_LEAST_REPEATS = 5
_LEAST_CHARACTERS = 10
_REPEATED = re.compile(rf"(.{{1,20}}?)\1{{{_LEAST_REPEATS - 1},}}")
_SAME_CHARACTERS = re.compile(r"(.)\1{9,}")
_LONGEST_RUN = 3  # up to this many repetitions are normal language: "very, very, very"


def repeats_itself(text: str) -> bool:
    """Return whether repetitions of one piece make up at least half of the text.

    The piece has at most 20 characters: a token, a word or a short phrase. It occurs at least 5 times in a row. That
    takes at least 10 characters, so that a number with many zeros is no repetition.
    """
    text = " " + " ".join(text.split())  # every word then begins with a space, the first too
    repeated = [len(found[0]) for found in _REPEATED.finditer(text)]
    return 2 * sum(length for length in repeated if length >= _LEAST_CHARACTERS) >= len(text)


def is_degenerate(source: str, text: str) -> bool:
    """Return whether a translation is empty, or repeats a word or a character that its source does not repeat.

    Stricter than `repeats_itself`: one run of a word in a long text is enough, because a second search costs little.
    """
    if not text.strip():
        return bool(source.strip())
    if _SAME_CHARACTERS.search(text) and not _SAME_CHARACTERS.search(source):
        return True
    words, source_words = text.casefold().split(), source.casefold().split()
    if _longest_run(words) > max(_LONGEST_RUN, _longest_run(source_words)):
        return True
    most, usual = (max(Counter(some).values(), default=0) for some in (words, source_words))
    return len(words) >= 8 and most > len(words) / 2 and most > 2 * usual


def _longest_run(words: Sequence[str]) -> int:
    return max((len(list(run)) for _, run in groupby(words)), default=0)


EngineName = Literal["torch", "ctranslate2", "auto"]


class SearchEngine(Protocol):
    """Another runtime.

    choice: a sentence that says which engine was taken and why; "" before the first call of `takes`.
    longest_source: tokens of the longest source that it takes, EOS included.
    is_int8: it computes in 8 bits.
    """

    choice: str
    longest_source: int
    is_int8: bool

    def takes(
        self,
        settings: DecodingSettings,
        own_search: Callable[[Sequence[list[int]], DecodingSettings], list[list[Hypothesis]]],
    ) -> bool:
        """Return whether this engine does searches with these settings; otherwise `own_search` does.

        Raises: RequestError: this engine was asked for by name, and it has no such option.
        """

    def search(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        *,
        stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Hypothesis]]:
        """Do what `search.search_all` does; the hypotheses have no token_log_probs."""


_OTHERS = ("ctranslate2", "auto")


def engine_named(name: EngineName | None, precision: str) -> EngineName:
    """Return the engine that searches; if none is named, ctranslate2 for precision int8, otherwise torch.

    Raises: RequestError: another engine than ctranslate2 is named for int8.
    """
    if precision == "int8" and name not in (None, "ctranslate2"):
        raise RequestError(
            f"precision is int8, in which only the engine ctranslate2 computes, but the engine is {name}; name"
            " ctranslate2 or none, or use precision fp32 or bf16."
        )
    return name or ("ctranslate2" if precision == "int8" else "torch")


def open_engine(name: EngineName, folder: Path, *, runs_plainly: str, is_int8: bool = False) -> SearchEngine | None:
    """Return an engine for a model folder; None for `torch`.

    Args:
        runs_plainly: "" if the translator computes in float32 on the CPU, uncompiled; otherwise a description of how
            it runs.
        is_int8: the engine computes in 8 bits.

    Raises: RequestError: there is no engine of this name; or ctranslate2 cannot run the model in this way.
        ConfigError: CTranslate2 cannot hold the model. MissingExtraError: it is not installed.
    """
    if name == "torch":
        return None
    if name not in _OTHERS:
        raise RequestError(f"engine is {name!r}; it must be one of {', '.join(('torch', *_OTHERS))}.")
    engine: SearchEngine = load(HOOKS["ctranslate2"])(name, folder, runs_plainly, is_int8)
    return engine
