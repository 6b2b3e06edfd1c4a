"""A model folder without some of the heads of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyheads.architectures.head_names import parse_heads, prunable
from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import load, read_config, read_languages, save_pretrained
from manyheads.architectures.pruning import prune
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import ARCHITECTURES
from manyheads.decoding.generation_config import read_settings
from manyheads.decoding.generation_settings import GenerationSettings
from manyheads.decoding.settings import DecodingSettings
from manyheads.tasks.table import task_of_folder
from manyheads.text.sides import has_tokenizer, load_tokenizer
from manyheads.text.vocabularies import load_vocabulary

__all__ = ["prune_folder"]


def prune_folder(name: str, removed: Sequence[str], output: Path) -> tuple[int, Seq2Seq | LanguageModel]:
    """Write a model folder without these heads; tokenizer, settings, task and languages are the model's own.

    Args:
        name: of a model folder, a run folder, or a model on the hub.
        removed: names of heads (see `head_names.parse_heads`).
        output: the model folder; an existing one is replaced.

    Returns: the number of parameters before, and the smaller model.
    Raises: RequestError: a head does not exist, none is named, or heads of this architecture cannot be removed.
        ModelFileError: the model cannot be read.
    """
    source = resolve_model_path(name)
    config = read_config(source)
    heads = parse_heads(removed, prunable(config, name))
    model = load(source)
    assert isinstance(model, Seq2Seq | LanguageModel)  # a classifier is not prunable
    smaller = prune(model, heads)
    translates = ARCHITECTURES[config.architecture].task == "translation"
    reads = load_tokenizer if translates else load_vocabulary
    save_pretrained(
        smaller,
        output,
        tokenizer=reads(source) if has_tokenizer(source) else None,
        generation=read_settings(source, DecodingSettings if translates else GenerationSettings),
        task=task_of_folder(name),
        languages=read_languages(source),
    )
    return sum(parameter.numel() for parameter in model.parameters()), smaller
