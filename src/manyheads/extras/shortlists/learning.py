"""Learning of the shortlist of a translator: which target words translate which source words."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from manyheads.catalogue import ARCHITECTURES
from manyheads.data.lines import Progress
from manyheads.data.translation.prepared import PreparedData
from manyheads.data.translation.readers import PairFiles
from manyheads.decoding.shortlist import SHORTLIST, Shortlist
from manyheads.errors import ConfigError, DataError, ModelFileError
from manyheads.extras.shortlists.lexicon import Lexicon, learn_lexicon
from manyheads.files.commit import write_folder
from manyheads.files.verify import MANIFEST, list_files, verify_folder
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.tasks.held_out import COPY_TASK, EMBEDDED, copy_settings, own_data, pairs_of_split, run_file
from manyheads.text.of_folder import has_tokenizer, load_tokenizer
from manyheads.text.sides import TranslationTokenizer

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
