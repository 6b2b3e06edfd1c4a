"""Lexical shortlists: a search over the words that can translate a batch instead of the whole vocabulary.

The candidates of a batch are the most frequent target words and the likeliest translations of each of its source words
(`extras.shortlists.learning`). The search runs as if they were the vocabulary, so its results are exact among them, and
its log-probabilities are normalised over the candidates, so they are higher than those of a full search. See
docs/decisions/023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ModelFileError, RequestError
from manyheads.models.protocols import Restrictable, Searchable

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
