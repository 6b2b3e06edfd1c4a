"""Heads of a translator: figures of each, a model without some of them, and BLEU by the share of pruned heads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.pretrained import save_pretrained
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.transformer.pruning import Head, heads_of, parse_heads, prune, transformer_of
from manyheads.data.batch import PairBatch
from manyheads.data.progress import Progress, telling
from manyheads.data.readers import PairFiles, ReadReport
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, DataError, RequestError
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.evaluation.heads import (
    HeadLook,
    head_ablations,
    head_importance,
    head_looks,
    least_important,
    normalised_importance,
)
from manyheads.files.commit import write_text
from manyheads.files.guarded import read_limited
from manyheads.tasks.held_out import copy_settings, held_out_pairs, own_data
from manyheads.tasks.table import task_of_folder
from manyheads.tasks.translation.head_options import PairsOptions
from manyheads.tasks.translation.likelihood import reference_batches

__all__ = [
    "HeadReport",
    "head_report",
    "least_important_heads",
    "pairs_of",
    "prune_folder",
    "pruning_curve",
    "translator_of",
]

_MOST_RECORD_BYTES = 4 << 20


def pairs_of(options: PairsOptions, model: str, split: Literal["test", "valid"] = "valid") -> list[tuple[str, str]]:
    """Return the first pairs of the text that the options name.

    Args: split: of the data, if the options name none.

    Raises: DataError: the text cannot be read or is empty. ConfigError: nothing says where it is.
    """
    if options.source is not None and options.reference is not None:
        found = list(PairFiles(source=options.source, target=options.reference).read(ReadReport()))
    else:
        data, seed = (options.data, 1) if options.data is not None else own_data(model)
        try:
            found, _ = held_out_pairs(data, options.split or split, seed, copy_settings(model))
        except DataError:
            if options.split is not None:
                raise
            found, _ = held_out_pairs(data, None, seed, copy_settings(model))
    if not found:
        raise DataError("the text has no sentences, so heads cannot be judged; give another one.")
    return found[: options.pairs]


def translator_of(model: str, load: Callable[..., Translator]) -> Translator:
    """Load a translator whose heads can be masked and pruned. load: as of `DeviceOptions.load`.

    Raises: RequestError: the model is of another kind.
    """
    task = task_of_folder(str(model))
    if task is not None and task != "translation":
        raise RequestError(f"{model} was trained for the task {task}; heads can be judged in translators only.")
    translator = load(Translator.from_pretrained, model)
    transformer_of(translator.model, model)
    return translator


def _batches(translator: Translator, pairs: list[tuple[str, str]]) -> list[PairBatch]:
    return list(reference_batches(translator, pairs, translator.options(too_long="truncate")))


@dataclass(frozen=True)
class HeadReport:
    """Figures of every head.

    nats: per token, of the whole model. importance, normalised: see `evaluation.heads`. ablations: nats per token more
    without the head.
    """

    num_pairs: int
    nats: float
    importance: dict[Head, float]
    normalised: dict[Head, float]
    ablations: dict[Head, float]
    looks: dict[Head, HeadLook]

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per head, for JSON and tables."""
        return [
            {
                "head": str(head),
                "importance": self.importance[head],
                "normalised": self.normalised[head],
                "ablation": self.ablations[head],
                "entropy": look.entropy,
                "confidence": look.confidence,
                "offset": look.offset,
                "offset_share": look.offset_share,
            }
            for head, look in self.looks.items()
        ]


def head_report(translator: Translator, pairs: list[tuple[str, str]], show: Progress) -> HeadReport:
    """Judge every head on the pairs."""
    model, device = _model(translator), translator.device
    batches = _batches(translator, pairs)
    show("importance", 0, 0)
    importance = head_importance(model, batches, device=device)
    show("weights", 0, 0)
    looks = head_looks(model, batches, device=device)
    told = telling(show, "ablation", len(looks))
    nats, ablations = head_ablations(model, batches, device=device, told=told)
    return HeadReport(len(pairs), nats, importance, normalised_importance(importance), ablations, looks)


def _model(translator: Translator) -> Seq2Seq:
    return transformer_of(translator.model)


def least_important_heads(translator: Translator, pairs: list[tuple[str, str]], keep: float) -> list[Head]:
    """Return the heads to be removed so that a share of all is kept, the least important first.

    Raises: ConfigError: the share is not from 0 to below 1.
    """
    if not 0 <= keep < 1:
        raise ConfigError(f"--keep is {keep:g}; it must be from 0 to below 1, the share of the heads that are kept.")
    model = _model(translator)
    importance = head_importance(model, _batches(translator, pairs), device=translator.device)
    return least_important(importance, len(importance) - round(keep * len(importance)))


def prune_folder(translator: Translator, name: str, removed: Sequence[Head] | Sequence[str], output: Path) -> Seq2Seq:
    """Write a model folder without these heads; tokenizer, settings, task and languages are the model's own.

    Args: name: of the model. removed: heads, or their names.

    Raises: RequestError: a head does not exist. ConfigError: no head is removed.
    """
    model = _model(translator)
    heads = parse_heads([str(head) for head in removed], model.config)
    smaller = prune(model, heads)
    save_pretrained(
        smaller,
        output,
        tokenizer=translator.tokenizer,
        generation=translator.settings,
        task=task_of_folder(name),
        languages=translator.languages,
    )
    return smaller


def pruning_curve(
    translator: Translator,
    name: str,
    pairs: list[tuple[str, str]],
    judged: list[tuple[str, str]],
    keep: Sequence[float],
    record: Path,
    show: Progress,
) -> list[dict[str, Any]]:
    """Return BLEU by the share of heads that are kept; each point is stored as soon as it is known.

    Paper: Michel et al. 2019, sec. 4.2, figure 3: importance is measured once, on the whole model.
    Args:
        name: of the model.
        pairs: on which importance is measured.
        judged: on which BLEU is measured.
        keep: shares, from 0 to 1.
        record: a JSON Lines file; the points of the same model, pairs and settings in it are not computed again.

    Raises: ConfigError: a share is out of range. DataError: the record cannot be read.
    """
    if not keep or not all(0 <= share <= 1 for share in keep):
        raise ConfigError(f"--keep {' '.join(f'{share:g}' for share in keep)}: give shares from 0 to 1.")
    model = _model(translator)
    weights = resolve_model_path(name) / "model.safetensors"
    asked = [hashlib.sha256(weights.read_bytes()).hexdigest(), pairs, judged, repr(translator.settings)]
    identity = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    lines = _lines(record)
    known = {line["num_heads"]: line for line in lines if line.get("identity") == identity}
    total = len(heads_of(model.config))
    counts = sorted({round(share * total) for share in keep}, reverse=True)
    order: list[Head] = []
    for done, count in enumerate(counts):
        show("translating with fewer heads", done, len(counts))
        if count in known:
            continue
        if not order:
            importance = head_importance(model, _batches(translator, pairs), device=translator.device)
            order = least_important(importance, total)
        removed = order[: total - count]
        searched = prune(model, removed).eval() if removed else model
        smaller = Translator(searched, translator.tokenizer, translator.settings, translator.device)
        texts = smaller.translate([source for source, _ in judged])
        score = corpus_bleu(texts, [reference for _, reference in judged])
        point = {
            "identity": identity,
            "num_heads": count,
            "share": count / total,
            "bleu": score.value,
            "signature": score.signature,
            "parameters": sum(parameter.numel() for parameter in searched.parameters()),
        }
        known[count] = point
        lines.append(point)
        write_text(record, "".join(json.dumps(line) + "\n" for line in lines))
    return [known[count] for count in counts]


def _lines(record: Path) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    try:
        found = [json.loads(line) for line in read_limited(record, _MOST_RECORD_BYTES).decode().split("\n") if line]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{record} is no record of pruning: {error}; move it away, or name another file.") from error
    if not all(isinstance(line, dict) and isinstance(line.get("num_heads"), int) for line in found):
        raise DataError(f"{record} is no record of pruning; move it away, or name another file.")
    return found
