"""Language models from their folders, with their vocabulary: one model, or several of one vocabulary as an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from manyheads.decoding.model_runner import model_folder
from manyheads.decoding.settings import GenerationSettings, read_settings
from manyheads.errors import ConfigError, ModelFileError
from manyheads.models.ensemble import LanguageEnsemble
from manyheads.models.language_model import LanguageModel
from manyheads.models.pretrained import load
from manyheads.text.vocabularies import load_vocabulary
from manyheads.text.vocabulary import Vocabulary


def load_language_models(
    path: str | Path | Sequence[str | Path], device: torch.device, revision: str | None = None
) -> tuple[LanguageModel | LanguageEnsemble, Vocabulary, GenerationSettings]:
    """Load one model, or several as an ensemble. All vocabularies are compared before any weights are read.

    Args: path, revision: see `Generator.from_pretrained`.

    Returns: the model, its vocabulary, and its settings, or those of the first model.
    Raises: ModelFileError: a file is damaged, or a model and its vocabulary do not fit. ConfigError: there is no path,
        or the vocabularies differ. DataError: a vocabulary is damaged.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise ConfigError("an ensemble needs at least one model, but the list of paths is empty.")
    folders = [model_folder(one, "language-modelling", revision) for one in paths]
    vocabulary = load_vocabulary(folders[0])
    for other in folders[1:]:
        _check_alike(folders[0], vocabulary, other, load_vocabulary(other))
    models = [_load_model(folder, vocabulary, device) for folder in folders]
    settings = read_settings(folders[0], GenerationSettings)
    return (models[0] if len(models) == 1 else LanguageEnsemble(models)), vocabulary, settings


def _load_model(folder: Path, vocabulary: Vocabulary, device: torch.device) -> LanguageModel:
    model = load(folder, device=device)
    assert isinstance(model, LanguageModel)
    if vocabulary.vocab_size > model.config.vocab_size:
        raise ModelFileError(
            f"{folder}: the model knows {model.config.vocab_size:,} ids, its vocabulary has"
            f" {vocabulary.vocab_size:,}; they do not fit."
        )
    return model


def _check_alike(first: Path, vocabulary: Vocabulary, other: Path, others: Vocabulary) -> None:
    """Raises: ConfigError: two models of an ensemble have unlike vocabularies."""
    if others.digest == vocabulary.digest:
        return
    its, mine = _difference(others, vocabulary)
    raise ConfigError(
        f"the vocabulary of {other} has {its}, but that of {first} has {mine}, so their probabilities cannot be"
        " averaged; train the models of an ensemble on data with the same vocabulary."
    )


def _difference(one: Vocabulary, other: Vocabulary) -> tuple[str, str]:
    """Return the first property in which two vocabularies differ, of each of them."""
    if one.kind != other.kind:
        return f"level {one.kind}", f"level {other.kind}"
    if one.documents != other.documents:
        return f"documents {one.documents}", f"documents {other.documents}"
    if one.vocab_size != other.vocab_size:
        return f"{one.vocab_size:,} ids", f"{other.vocab_size:,}"
    for index in range(one.vocab_size):
        [its], [mine] = one.tokens([index]), other.tokens([index])
        if its != mine:
            return f"{its!r} as id {index}", repr(mine)
    return f"other settings ({one.digest[:12]})", f"the settings {other.digest[:12]}"
