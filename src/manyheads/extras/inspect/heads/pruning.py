"""Smaller models without some heads, which compute what the whole model computes without them.

`prune` makes one, `prune_folder` writes it, and `pruning_curve` measures the score by the share of pruned heads: BLEU
of a translator, perplexity of a language model.

Paper: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from manyheads.catalogue import ARCHITECTURES, HOOKS, build_model
from manyheads.catalogue import load as load_entry
from manyheads.decoding.settings import DecodingSettings, GenerationSettings, read_settings
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, DataError, RequestError
from manyheads.evaluation.bleu import choose_tokenizer, corpus_bleu
from manyheads.evaluation.reading import BleuTokenizer, perplexity_of, show_perplexity
from manyheads.extras.inspect.heads.judging import (
    HeldPairs,
    HeldSegments,
    NamedModel,
    num_removed,
    open_named_model,
    pruning_order,
)
from manyheads.extras.inspect.heads.names import Head, all_heads, kept_heads, parse_heads, prunable
from manyheads.extras.inspect.heads.scores import attention_layers, check_heads, nats_per_token
from manyheads.files.commit import write_text
from manyheads.files.safe_open import open_regular, read_limited
from manyheads.files.verify import json_text
from manyheads.models.composites import LanguageModel, Seq2Seq
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import load, read_config, read_languages, save_pretrained
from manyheads.tasks.held_out import task_of_folder
from manyheads.text.of_folder import tokenizer_of_folder

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.extras.inspect.options import CurveOptions, HeadTextOptions, Order

Model = TypeVar("Model", bound=Seq2Seq | LanguageModel)


@torch.no_grad()
def prune(model: Model, removed: Collection[Head]) -> Model:
    """Return a smaller model without these heads; its weights are copies.

    It computes what `model` computes with `masks_without(model, removed)`, up to rounding. The width of the heads stays
    as it was.

    Raises: RequestError: heads of this architecture cannot be removed, one does not exist, none is named, or a layer
        would have none left.
    """
    config = prunable(model.config)
    check_heads(removed, set(all_heads(config)))
    if not removed:
        raise RequestError("no head is removed, so the model would stay as it is; name at least one.")
    kept = kept_heads(config, removed)
    for kind, layers in kept.items():
        for layer, numbers in enumerate(layers):
            if not numbers:
                raise RequestError(
                    f"all heads of {Head(kind, layer, 0).layer_name} would be removed; keep at least one of each layer."
                )
    smaller: Model = build_model(config.with_heads({kind: tuple(map(len, layers)) for kind, layers in kept.items()}))
    smaller.data_notice = model.data_notice
    smaller.to(next(model.parameters()).device)
    inside: set[int] = set()
    for kind, names in attention_layers(model).items():
        for name, numbers in zip(names, kept[kind], strict=True):
            old = model.get_submodule(name)
            _copy_heads(old, smaller.get_submodule(name), numbers)
            inside |= {id(parameter) for parameter in old.parameters()}
    own = dict(smaller.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            own[name].copy_(parameter)
    smaller.train(model.training)
    return smaller


def _copy_heads(old: nn.Module, new: nn.Module, kept: Sequence[int]) -> None:
    """Copy the weights of some heads into a smaller attention module of the same kind.

    A parameter belongs to heads along the axis that is shorter in the smaller module; without one, to all together.
    """
    before = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        shape = before[name].shape
        axis = next((place for place, size in enumerate(parameter.shape) if size != shape[place]), None)
        if axis is None:
            parameter.copy_(before[name])
            continue
        by_head = before[name].view(*shape[:axis], cast(int, old.num_heads), -1, *shape[axis + 1 :])
        chosen = by_head.index_select(axis, torch.tensor(kept, device=parameter.device))
        parameter.copy_(chosen.flatten(axis, axis + 1))


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


def least_important(name: str, share: float, by: Order, text: HeadTextOptions, progress: Progress) -> list[str]:
    """Return the names of this share of a model's heads, those that matter least on the text; a layer keeps one.

    Raises: ConfigError: the share is less than one head, or each layer has one head only. As `open_named_model` and
        `NamedModel.text`.
    """
    named_model = open_named_model(name, lambda load, model: load(model, "cpu"))
    named_model.check_options(text)
    heads = all_heads(prunable(named_model.model.config))
    count = num_removed(share, heads)
    if len(heads) == len({head.layer_name for head in heads}):
        raise ConfigError(f"each layer of {name} has one head, and a layer keeps one, so there is nothing to remove.")
    if not count:
        raise ConfigError(
            f"--share {share:g} of {len(heads)} heads rounds to no head; give at least {1 / len(heads):.2g}."
        )
    held = None if by == "random" else named_model.text(text)
    order = pruning_order(named_model, held, by, progress, seed=text.seed)
    return [str(head) for head in order[:count]]


def prune_folder(name: str, removed: Sequence[str], output: Path, *, replace: bool = True) -> PrunedFolder:
    """Write a model folder without these heads; tokenizer, shortlist, settings, task and languages are the model's own.

    Args:
        name: of a model folder, a run folder, or a model on the hub.
        removed: names of heads (see `names.parse_heads`).
        output: the model folder.
        replace: replace an existing output.

    Raises: RequestError: a head does not exist, none is named, or heads of this architecture cannot be removed.
        ModelFileError: the model cannot be read.
    """
    source = resolve_model_path(name)
    config = read_config(source)
    heads = parse_heads(removed, prunable(config, name))
    model = cast(Seq2Seq | LanguageModel, load(source))  # a classifier is not prunable
    smaller = prune(model, heads)
    translates = ARCHITECTURES[config.architecture].task == "translation"
    save_pretrained(
        smaller,
        output,
        tokenizer=tokenizer_of_folder(source),
        generation=read_settings(source, DecodingSettings if translates else GenerationSettings),
        more=load_entry(HOOKS["shortlist"]).files(source),
        task=task_of_folder(str(source), strictly=True),
        languages=read_languages(source),
        replace=replace,
    )
    return PrunedFolder(output, smaller, sum(parameter.numel() for parameter in model.parameters()))


_MOST_RECORD_BYTES = 4 << 20
_KEYS = {"identity": str, "by": str, "pruned": int}


@dataclass(frozen=True)
class PruningCurve:
    """The score at each share of pruned heads.

    text: on which it was measured. points: with `by`, `pruned` (number of heads), `share`, `parameters`, and `bleu` or
    `perplexity`.
    """

    text: str
    points: list[dict[str, Any]]

    def table(self) -> str:
        """Return the points as a table."""
        measure = "bleu" if "bleu" in self.points[0] else "perplexity"
        lines = [f"by          pruned  share  parameters  {'BLEU' if measure == 'bleu' else measure:>10}"]
        lines += [
            f"{point['by']:<10}  {point['pruned']:>6}  {100 * point['share']:>4.0f}%  {point['parameters']:>10,}"
            f"  {show_perplexity(point[measure]):>10}"
            for point in self.points
        ]
        return "\n".join(lines)


def pruning_curve(named_model: NamedModel, options: CurveOptions, record: Path, progress: Progress) -> PruningCurve:
    """Measure the score at each share of pruned heads; each point is stored as soon as it is known.

    Paper: Michel et al. 2019, sec. 4.2, figure 3: importance is measured once, on the whole model.
    Args: record: a JSON Lines file; points of the same model, texts and options in it are not computed again.

    Raises: DataError: the record cannot be read. As `NamedModel.text`.
    """
    named_model.check_options(options, options.text)
    longer = replace(options.text, pairs=options.judge_pairs, max_tokens=options.judge_tokens)
    held, judged = named_model.text(options.text), named_model.text(longer, "test")
    heads = all_heads(named_model.model.config)
    options = replace(options, tokenize=_tokenizer(named_model, judged, options.tokenize))
    counts = sorted({num_removed(share, heads) for share in options.share})
    lines = _lines(record)
    orders = tuple(dict.fromkeys(options.by))
    identities = {by: _identity(named_model, held, judged, options, by) for by in orders}
    known = {(line["by"], line["pruned"]): line for line in lines if line["identity"] == identities.get(line["by"])}
    found = []
    for by in orders:
        order: list[Head] = []
        for count in counts:
            progress(f"without {count} of {len(heads)} heads", counts.index(count), len(counts))
            if (by, count) not in known:
                order = order or pruning_order(named_model, held, by, progress, seed=options.text.seed)
                point = {"identity": identities[by], "by": by, "pruned": count, "share": count / len(heads)}
                point |= _score(named_model, order[:count], judged, options)
                known[by, count] = point
                lines.append(point)
                write_text(record, "".join(json_text(line) + "\n" for line in lines))
            found.append(known[by, count])
    return PruningCurve(judged.name, found)


def _tokenizer(named_model: NamedModel, judged: HeldPairs | HeldSegments, asked: BleuTokenizer) -> BleuTokenizer:
    """Return the name of BLEU's tokenizer. Raises: MissingExtraError: something that it needs is missing."""
    if isinstance(judged, HeldSegments) or named_model.reader.task != "translation":
        return asked
    languages = {target for _, target in named_model.reader.languages}
    choice = choose_tokenizer(asked, languages, [reference for _, reference in judged.pairs])
    if choice.warning:
        warnings.warn(choice.warning, stacklevel=2)
    return cast(BleuTokenizer, choice.name)


def _score(
    named_model: NamedModel, removed: Sequence[Head], judged: HeldPairs | HeldSegments, options: CurveOptions
) -> dict[str, Any]:
    model = prune(named_model.model, removed).eval() if removed else named_model.model
    parameters = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if isinstance(judged, HeldSegments):
        nats = nats_per_token(model, judged.batches, device=named_model.device)
        return {**parameters, "nats_per_token": nats, "perplexity": perplexity_of(nats)}
    whole = cast(Translator, named_model.reader)
    smaller = Translator(model, whole.tokenizer, whole.settings, whole.device)  # type: ignore[arg-type]
    beams = options.num_beams or whole.settings.num_beams
    texts = smaller.translate([source for source, _ in judged.pairs], too_long="truncate", num_beams=beams)
    score = corpus_bleu(texts, [reference for _, reference in judged.pairs], tokenize=options.tokenize)
    return {**parameters, "bleu": score.value, "signature": score.signature}


def _identity(
    named_model: NamedModel,
    held: HeldPairs | HeldSegments,
    judged: HeldPairs | HeldSegments,
    options: CurveOptions,
    by: Order,
) -> str:
    """A digest of all that a point depends on."""
    weights = resolve_model_path(named_model.name) / "model.safetensors"
    with open_regular(weights) as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    asked = [content, by, repr(named_model.reader.settings)]
    asked += [options.tokenize, str(options.num_beams), str(options.text.seed if by == "random" else "")]
    digest = hashlib.sha256(json.dumps(asked).encode())
    for text in (held, judged):
        for batch in text.batches:
            for tensor in vars(batch).values():
                digest.update(tensor.numpy().tobytes() if hasattr(tensor, "numpy") else str(tensor).encode())
        if isinstance(text, HeldPairs):
            digest.update(json.dumps(text.pairs).encode())
    return digest.hexdigest()


def _lines(record: Path) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    try:
        found = [json.loads(line) for line in read_limited(record, _MOST_RECORD_BYTES).decode().split("\n") if line]
    except (ValueError, RecursionError):
        found = [None]
    if not all(isinstance(line, dict) and _KEYS.items() <= _types(line).items() for line in found):
        raise DataError(f"{record} is no record of a pruning curve; move it away, or name another by --record.")
    # JSON has no infinity, so the perplexity of a very bad model is stored as null.
    return [line | {"perplexity": math.inf} if line.get("perplexity", 0) is None else line for line in found]


def _types(line: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in line.items()}
