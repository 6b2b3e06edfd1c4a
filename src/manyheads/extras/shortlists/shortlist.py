"""Lexical shortlists: a search over the words that can translate a batch instead of the whole vocabulary.

The candidates of a batch are the most frequent target words and the likeliest translations of each of its source words.
They are learned by IBM model 1 on pairs of ids. The search runs as if they were the vocabulary, so its results are
exact among them, and its log-probabilities are normalised over the candidates, so they are higher than those of a full
search. See docs/decisions/023.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES
from manyheads.data.translation.prepared import PreparedData
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import ConfigError, DataError, ModelFileError, RequestError
from manyheads.files.commit import write_folder
from manyheads.files.verify import MANIFEST, list_files, verify_folder
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.models.protocols import Restrictable, Searchable
from manyheads.tasks.held_out import COPY_TASK, EMBEDDED, copy_settings, own_data, pairs_of_split, run_file
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.pipeline import has_tokenizer

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.decoding.inputs_and_results import Hypothesis
    from manyheads.decoding.settings import DecodingSettings
    from manyheads.text.sides import TranslationTokenizer

SHORTLIST = "shortlist.safetensors"
_VERSION = "1"
_NAMES = ("frequent", "offsets", "candidates")


@dataclass(frozen=True, kw_only=True)
class Shortlist:
    """Likely translations of each source id.

    Attributes:
        frequent: all target ids, the most frequent one first. (target_vocab_size,)
        offsets: the candidates of source id i are `candidates[offsets[i]:offsets[i + 1]]`. (source_vocab_size + 1,)
        candidates: target ids, those of a source id by decreasing probability.
        is_shared: source and target have one vocabulary; then the source's own ids are candidates, too.
        vocabulary: digest of the tokenizer whose ids these are.
        count: number of frequent ids, and of candidates of each source id, that are used.
    """

    frequent: Tensor
    offsets: Tensor
    candidates: Tensor
    is_shared: bool
    vocabulary: str
    count: int = 100

    def __post_init__(self) -> None:
        if self.count < 1:
            raise RequestError(
                f"shortlist is {self.count}; it must be at least 1. To search the whole vocabulary, leave it out."
            )

    @classmethod
    def load(cls, folder: Path, count: int, *, vocabulary: str, sizes: tuple[int, int]) -> Shortlist:
        """Read the shortlist of a model folder.

        Args:
            folder: the model folder.
            count: see the class.
            vocabulary: digest of the model's tokenizer.
            sizes: number of source and of target ids of the model.

        Raises: RequestError: there is no shortlist, or count is below 1. ModelFileError: it is damaged, or was learned
            with another vocabulary.
        """
        file = folder / SHORTLIST
        if not file.is_file():
            raise RequestError(f"{folder} has no {SHORTLIST}; learn one first: manyheads shortlist {folder}.")
        try:
            with safe_open(file, framework="pt") as reader:
                about = reader.metadata() or {}
                tensors = {name: reader.get_tensor(name) for name in _NAMES}
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file} is not an intact shortlist: {error}. Learn it again.") from error
        if about.get("version") != _VERSION:
            raise ModelFileError(
                f"{file} has version {about.get('version')!r}, this program reads {_VERSION}; learn it again."
            )
        if about.get("vocabulary") != vocabulary:
            raise ModelFileError(
                f"{file} was learned with another vocabulary ({about.get('vocabulary', '')[:12]}) than the model's"
                f" ({vocabulary[:12]}); learn it again: manyheads shortlist {folder}."
            )
        if not _fits(tensors, *sizes):
            raise ModelFileError(f"{file} is damaged, or of another model: its ids do not fit; learn it again.")
        return cls(**tensors, is_shared=about.get("shared") == "yes", vocabulary=vocabulary, count=count)

    @staticmethod
    def files(folder: Path) -> dict[str, bytes]:
        """Return name and content of a shortlist, for `save_pretrained` of a model with the same tokenizer.

        Empty if the model folder has none.
        """
        file = folder / SHORTLIST
        return {SHORTLIST: file.read_bytes()} if file.is_file() else {}

    def to_bytes(self) -> bytes:
        """The content of a file for `load`."""
        about = {"version": _VERSION, "vocabulary": self.vocabulary, "shared": "yes" if self.is_shared else "no"}
        return save({name: getattr(self, name) for name in _NAMES}, metadata=about)

    def of_batch(self, source: Tensor, always: Sequence[int]) -> Candidates:
        """The candidates of a batch.

        Args:
            source: ids with padding, of any shape.
            always: target ids that are always among them, such as EOS.
        """
        words: Tensor = torch.unique(source.cpu())
        starts = self.offsets[words]
        counts = (self.offsets[words + 1] - starts).clamp_max(self.count)
        # The indices of all ranges, concatenated.
        places = torch.arange(int(counts.sum())) + (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
        chosen = torch.zeros(len(self.frequent), dtype=torch.bool)
        chosen[self.candidates[places].long()] = True
        chosen[self.frequent[: self.count].long()] = True
        chosen[torch.tensor(always)] = True
        if self.is_shared:
            chosen[words] = True
        return Candidates(chosen.nonzero()[:, 0].to(source.device))


@dataclass(frozen=True)
class Candidates:
    """The vocabulary of one search.

    Attributes: ids: the real ids, increasing; candidate i is ids[i]. (count,)
    """

    ids: Tensor

    def restrict(self, model: Searchable) -> Searchable:
        """The model with the candidates as its target vocabulary.

        Raises: RequestError: the model cannot be restricted.
        """
        if not isinstance(model, Restrictable):
            raise RequestError(f"a {type(model).__name__} cannot be searched with a shortlist; leave it out.")
        return model.restricted(self.ids)

    def place(self, token: int) -> int:
        """The candidate's number of a real id that is among them."""
        return int(torch.searchsorted(self.ids, token))

    def settings(self, settings: DecodingSettings) -> DecodingSettings:
        """The settings with the candidates' numbers in place of real ids."""
        known = set(self.ids.tolist()) if settings.banned_ids else set()
        return replace(
            settings,
            banned_ids=tuple(self.place(token) for token in settings.banned_ids if token in known),
            forced_prefix_ids=tuple(map(self.place, settings.forced_prefix_ids)),
        )

    def real(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses with real ids."""
        ids = self.ids.tolist()
        return [replace(one, ids=[ids[token] for token in one.ids]) for one in hypotheses]


def _fits(tensors: dict[str, Tensor], source_vocab_size: int, target_vocab_size: int) -> bool:
    """Return whether all offsets and ids are in range."""
    frequent, offsets, candidates = (tensors[name] for name in _NAMES)
    if any(one.dim() != 1 for one in tensors.values()) or any(one.is_floating_point() for one in tensors.values()):
        return False
    if len(offsets) != source_vocab_size + 1 or offsets[0] != 0 or offsets[-1] != len(candidates):
        return False
    in_range = not len(candidates) or (int(candidates.min()) >= 0 and int(candidates.max()) < target_vocab_size)
    is_permutation = torch.equal(frequent.long().sort().values, torch.arange(target_vocab_size))
    return bool((offsets.diff() >= 0).all()) and in_range and is_permutation


MOST_CANDIDATES = 256
"""Target ids that are kept of each source id."""

_ITERATIONS = 4
# (source id, target id) entries that the table has at most: 0.5 GB. If there are more, the rarest ones are left out.
_MOST_ENTRIES = 1 << 24
# Links of a source token with a target token that are processed at once.
_LINKS_AT_ONCE = 1 << 21
_LEAST_PROBABILITY = 1e-6

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lexicon:
    """Likely translations of each source id.

    Attributes:
        frequent: all target ids, the most frequent one first. (target_vocab_size,)
        offsets: the candidates of source id i are `candidates[offsets[i]:offsets[i + 1]]`. (source_vocab_size + 1,)
        candidates: target ids, those of one source id by decreasing probability.
        num_pairs: sentence pairs that it was learned from.
    """

    frequent: _Ints
    offsets: _Ints
    candidates: _Ints
    num_pairs: int


@dataclass(frozen=True)
class _Side:
    """Sentence i is ids[offsets[i]:offsets[i + 1]]."""

    ids: _Ints
    offsets: _Ints

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> _Side:
        lengths = np.fromiter((len(one) for one in sentences), np.int64, len(sentences))
        ids = np.fromiter(chain.from_iterable(sentences), np.int64, int(lengths.sum()))
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> _Ints:
        return np.diff(self.offsets)


def learn_lexicon(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    source_vocab_size: int,
    target_vocab_size: int,
    progress: Progress = lambda what, done, total: None,
) -> Lexicon:
    """Learn p(target id | source id) by expectation maximisation.

    Paper: Brown et al. 1993, sec. 4.2 (model 1). Differs: the probability of a target word without a source word is its
        frequency, and is not learned; the first estimate is how often two words occur in one pair.
    Args:
        pairs: (source ids, target ids), without special ids.
        source_vocab_size: every source id is below it.
        target_vocab_size: every target id is below it.
        progress: called with what is done, how much of it, and the total.

    Cost: memory 16 bytes a token and 0.5 GB; time (iterations + 1) x the sum of source_len x target_len.
    """
    known = list(pairs)
    sides = _Side.of([source for source, _ in known]), _Side.of([target for _, target in known])
    counts = np.bincount(sides[1].ids, minlength=target_vocab_size)
    keys, weights = _together(*sides, target_vocab_size)
    owners = keys // target_vocab_size
    probabilities = _normalised(weights, owners, source_vocab_size)
    unaligned = counts / max(1, counts.sum())
    for number in range(_ITERATIONS):
        progress("learning the lexicon", number, _ITERATIONS)
        expected = np.zeros(len(keys))
        for codes, target, ids in _links(*sides, target_vocab_size) if len(keys) else ():
            row = np.minimum(np.searchsorted(keys, codes), len(keys) - 1)
            share = np.where(keys[row] == codes, probabilities[row], 0.0)
            total = np.bincount(target, share, minlength=len(ids)) + unaligned[ids]
            expected += np.bincount(row, share / total[target], minlength=len(keys))
        probabilities = _normalised(expected, owners, source_vocab_size)
    progress("learning the lexicon", _ITERATIONS, _ITERATIONS)
    offsets, kept = _best(owners, probabilities, source_vocab_size)
    frequent = np.argsort(-counts, kind="stable")
    return Lexicon(frequent, offsets, (keys % target_vocab_size)[kept], len(known))


def _links(source: _Side, target: _Side, target_vocab_size: int) -> Iterator[tuple[_Ints, _Ints, _Ints]]:
    """Link every source token with every target token of its pair, some pairs at a time.

    Yields: the code of each link, source id x target_vocab_size + target id; the number of its target token; the ids of
        the target tokens.
    """
    sizes = np.cumsum(source.lengths * target.lengths)
    first = 0
    while first < len(sizes):
        before = sizes[first - 1] if first else 0
        end = max(first + 1, int(np.searchsorted(sizes, before + _LINKS_AT_ONCE, side="right")))
        ids = target.ids[target.offsets[first] : target.offsets[end]]
        lengths = np.repeat(source.lengths[first:end], target.lengths[first:end])  # of each target token's source
        starts = np.repeat(source.offsets[first:end], target.lengths[first:end])
        number = np.repeat(np.arange(len(ids)), lengths)
        within = np.arange(len(number)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if len(number):
            yield source.ids[starts[number] + within] * target_vocab_size + ids[number], number, ids
        first = end


def _together(source: _Side, target: _Side, target_vocab_size: int) -> tuple[_Ints, _Floats]:
    """Count how often each source id is in a pair with each target id. Returns: sorted codes (see `_links`), counts."""
    keys: _Ints = np.empty(0, np.int64)
    counts: _Floats = np.empty(0)
    for codes, _, _ in _links(source, target, target_vocab_size):
        new, new_counts = np.unique(codes, return_counts=True)
        joined, rows = np.unique(np.concatenate([keys, new]), return_inverse=True)
        counts = np.bincount(rows, np.concatenate([counts, new_counts]), len(joined)).astype(np.float64)
        keys = joined
        least = 1
        while len(keys) > _MOST_ENTRIES:
            least += 1
            keys, counts = keys[counts >= least], counts[counts >= least]
    return keys, counts


def _normalised(weights: _Floats, owners: _Ints, source_vocab_size: int) -> _Floats:
    sums = np.bincount(owners, weights, minlength=source_vocab_size)
    return weights / np.maximum(sums, 1e-300)[owners]


def _best(owners: _Ints, probabilities: _Floats, source_vocab_size: int) -> tuple[_Ints, _Ints]:
    """The most probable entries of each source id. Returns: their offsets, and their rows in the table."""
    order = np.lexsort((-probabilities, owners))
    sorted_owners = owners[order]
    starts = np.searchsorted(sorted_owners, np.arange(source_vocab_size + 1))
    rank = np.arange(len(order)) - starts[sorted_owners]
    keep = (rank < MOST_CANDIDATES) & (probabilities[order] >= _LEAST_PROBABILITY)
    counts = np.bincount(sorted_owners[keep], minlength=source_vocab_size)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), order[keep]


_LINES_AT_ONCE = 1000
_Ids = list[int]


@dataclass(frozen=True)
class LearnedShortlist:
    """A learned shortlist. lexicon: the translations of each source id. folder: the model folder that now has it."""

    lexicon: Lexicon
    folder: Path

    def describe(self) -> str:
        """Return the file and its contents in one line."""
        lexicon = self.lexicon
        known = int((lexicon.offsets[1:] > lexicon.offsets[:-1]).sum())
        return (
            f"{self.folder / SHORTLIST}: {len(lexicon.candidates):,} translations of {known:,} of"
            f" {len(lexicon.offsets) - 1:,} source ids, from {lexicon.num_pairs:,} pairs"
        )


def learn_shortlist(
    model: str,
    *,
    data: str | None = None,
    source: str | None = None,
    target: str | None = None,
    max_pairs: int,
    progress: Progress,
) -> LearnedShortlist:
    """Learn a shortlist from training pairs, and write it into the model folder, which is replaced in one step.

    Args:
        model: a model folder or a run folder.
        data: prepared data, an embedded corpus or the copy task; None: the data of the run, or the two files.
        source: a file of sentences; target: a file of their translations.
        max_pairs: pairs that are read at most.
        progress: called with what is done, how much of it, and the total.

    Raises: ModelFileError: the folder holds no translator, or it is damaged. ConfigError: no data is known. DataError:
        the data has other ids than the model, or no pairs. SaveError: the folder could not be written.
    """
    folder = resolve_model_path(model)
    if not Path(model).is_dir():
        raise ConfigError(f"{model} is no folder; copy the model here first, because a shortlist is written into it.")
    verify_folder(folder)
    config = read_config(folder)
    if ARCHITECTURES[config.architecture].task != "translation" or not has_tokenizer(folder):
        raise ModelFileError(f"{folder} holds no translator with its tokenizer; shortlists are for translators.")
    tokenizer = load_tokenizer(folder)
    if tokenizer.model_kind != "translator":
        raise ModelFileError(f"{folder} holds a {tokenizer.model_kind}; shortlists are for translators.")
    if source is not None and target is not None:
        if tokenizer.needs_language and tokenizer.target_languages:
            raise ConfigError(f"{folder} translates into several languages; give its prepared data by --data.")
        pairs = _encoded(PairFiles(source=source, target=target).read(), tokenizer)
    else:
        pairs = _training_pairs(model, data, tokenizer)
    found = list(islice(_counted(pairs, max_pairs, progress), max_pairs))
    if not found:
        raise DataError("There are no training pairs, so no words to learn.")
    lexicon = learn_lexicon(found, config.source_vocab_size, config.target_vocab_size, progress)
    shortlist = Shortlist(
        frequent=torch.from_numpy(lexicon.frequent).int(),
        offsets=torch.from_numpy(lexicon.offsets),
        candidates=torch.from_numpy(lexicon.candidates).int(),
        is_shared=tokenizer.is_shared,
        vocabulary=tokenizer.digest,
    )
    _write(folder, shortlist.to_bytes())
    return LearnedShortlist(lexicon, folder)


def _training_pairs(model: str, data: str | None, tokenizer: TranslationTokenizer) -> Iterator[tuple[_Ids, _Ids]]:
    """Raises: ConfigError: the data is unknown. DataError: it was prepared with another tokenizer."""
    if data is None and run_file(model) is None:
        raise ConfigError(
            f"{model} is no run folder, so its training pairs are unknown; give --data, or --source and --target."
        )
    path, seed = (data, 1) if data is not None else own_data(model)
    if path in (EMBEDDED, COPY_TASK):
        pairs, _ = pairs_of_split(path, "train", seed, copy_settings(model))
        yield from _encoded(pairs, tokenizer)
        return
    prepared = PreparedData.open(path)
    if prepared.tokenizer.digest != tokenizer.digest:
        raise DataError(
            f"{path} was prepared with another tokenizer ({prepared.tokenizer.digest[:12]}) than the model's"
            f" ({tokenizer.digest[:12]}), so its ids mean other words; give --source and --target."
        )
    for index in range(len(prepared.train)):
        source, target = prepared.train[index]
        yield source.tolist(), target.tolist()


def _encoded(pairs: Iterable[tuple[str, str]], tokenizer: TranslationTokenizer) -> Iterator[tuple[_Ids, _Ids]]:
    remaining = iter(pairs)
    while block := list(islice(remaining, _LINES_AT_ONCE)):
        sources = tokenizer.source.encode_batch([source for source, _ in block])
        targets = tokenizer.target.encode_batch([target for _, target in block])
        yield from zip(sources, targets, strict=True)


def _counted(pairs: Iterable[tuple[_Ids, _Ids]], most: int, progress: Progress) -> Iterator[tuple[_Ids, _Ids]]:
    for number, pair in enumerate(pairs):
        if number % _LINES_AT_ONCE == 0:
            progress("reading pairs", number, most)
        yield pair


def _write(folder: Path, content: bytes) -> None:
    """Replace the folder by one that also holds the shortlist; its manifest covers it."""
    kept = [name for name in list_files(folder) if name not in (MANIFEST, SHORTLIST)]

    def write(new: Path) -> None:
        for name in kept:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, new / name)
        (new / SHORTLIST).write_bytes(content)

    write_folder(folder, write, needed_bytes=len(content) + sum((folder / name).stat().st_size for name in kept))
