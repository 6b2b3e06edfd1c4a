"""A model folder without some of the heads of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyheads.architectures.head_names import Head, all_heads, parse_heads, prunable
from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import load, read_config, read_languages, save_pretrained
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.catalogue import ARCHITECTURES
from manyheads.data.progress import Progress
from manyheads.decoding.settings import DecodingSettings, GenerationSettings, read_settings
from manyheads.decoding.shortlist import shortlist_files
from manyheads.errors import ConfigError
from manyheads.extras.inspect.heads.judging import num_removed, pruning_order
from manyheads.extras.inspect.heads.options import HeadTextOptions, Order
from manyheads.extras.inspect.heads.subject import open_subject
from manyheads.extras.inspect.pruning import prune
from manyheads.tasks.table import task_of_folder
from manyheads.text.of_folder import tokenizer_of_folder

__all__ = ["PrunedFolder", "least_important", "prune_folder"]


@dataclass(frozen=True)
class PrunedFolder:
    """A model folder that was written. parameters_before: of the whole model."""

    output: Path
    model: Seq2Seq | LanguageModel
    parameters_before: int

    def describe(self) -> str:
        """Return the heads that are left in each layer, and the number of parameters."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        counts = {
            Head(kind, layer, 0).layer_name: count
            for kind, layers in self.model.config.heads_by_layer().items()
            for layer, count in enumerate(layers)
        }
        total = sum(counts.values())
        left = "1 head is left" if total == 1 else f"{total} heads are left"
        first = f"{self.output}: {left}; {parameters:,} of {self.parameters_before:,} parameters"
        return "\n".join([first, *(f"  {name:<16}  {count}" for name, count in counts.items())])


def least_important(name: str, share: float, by: Order, text: HeadTextOptions, show: Progress) -> list[str]:
    """Return the names of this share of a model's heads, those that matter least on the text.

    Raises: ConfigError: the share is less than one head. As `open_subject` and `Subject.text`.
    """
    subject = open_subject(name, lambda load, model: load(model, "cpu"))
    subject.check_options(text)
    total = len(all_heads(prunable(subject.model.config)))
    count = num_removed(share, total)
    if not count:
        raise ConfigError(f"--share {share:g} of {total} heads rounds to no head; give at least {1 / total:.2g}.")
    held = None if by == "random" else subject.text(text)
    order = pruning_order(subject, held, by, show, seed=text.seed)
    return [str(head) for head in order[:count]]


def prune_folder(name: str, removed: Sequence[str], output: Path, *, replace: bool = True) -> PrunedFolder:
    """Write a model folder without these heads; tokenizer, shortlist, settings, task and languages are the model's own.

    Args:
        name: of a model folder, a run folder, or a model on the hub.
        removed: names of heads (see `head_names.parse_heads`).
        output: the model folder.
        replace: replace an existing output.

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
    save_pretrained(
        smaller,
        output,
        tokenizer=tokenizer_of_folder(source),
        generation=read_settings(source, DecodingSettings if translates else GenerationSettings),
        more=shortlist_files(source),
        task=task_of_folder(str(source)),
        languages=read_languages(source),
        replace=replace,
    )
    return PrunedFolder(output, smaller, sum(parameter.numel() for parameter in model.parameters()))
