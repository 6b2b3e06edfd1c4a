"""The score of a model by the share of pruned heads: BLEU of a translator, perplexity of a language model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.architectures.head_names import Head, all_heads
from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.pruning import prune
from manyheads.data.progress import Progress
from manyheads.decoding.translator import Translator
from manyheads.errors import DataError
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.evaluation.heads import nats_per_token
from manyheads.files.commit import write_text
from manyheads.files.guarded import open_regular, read_limited
from manyheads.tasks.heads.judging import num_removed, pruning_order
from manyheads.tasks.heads.options import Order
from manyheads.tasks.heads.subject import HeldPairs, HeldSegments, Subject

__all__ = ["CurveSettings", "pruning_curve"]

_MOST_RECORD_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class CurveSettings:
    """What a curve depends on besides model and text.

    shares: of the heads that are pruned. by: the orders to compare. seed: of the random one. tokenize, num_beams: of
    BLEU and of the search; num_beams None: the model's.
    """

    shares: tuple[float, ...]
    by: tuple[Order, ...] = ("importance",)
    seed: int = 1
    tokenize: str = "13a"
    num_beams: int | None = None


def pruning_curve(
    subject: Subject,
    held: HeldPairs | HeldSegments,
    judged: HeldPairs | HeldSegments,
    settings: CurveSettings,
    record: Path,
    show: Progress,
) -> list[dict[str, Any]]:
    """Return the score at each share of pruned heads; each point is stored as soon as it is known.

    Paper: Michel et al. 2019, sec. 4.2, figure 3: importance is measured once, on the whole model.
    Args:
        held: on which heads are judged.
        judged: on which the score is measured.
        record: a JSON Lines file; points of the same model, texts and settings in it are not computed again.

    Returns: points with `by`, `pruned` (number of heads), `share`, `parameters`, and `bleu` or `perplexity`.
    Raises: ConfigError: a share is out of range. DataError: the record cannot be read.
    """
    heads = all_heads(subject.model.config)
    counts = sorted({num_removed(share, len(heads)) for share in settings.shares})
    lines = _lines(record)
    identities = {by: _identity(subject, held, judged, settings, by) for by in settings.by}
    known = {(line["by"], line["pruned"]): line for line in lines if line["identity"] == identities.get(line["by"])}
    found = []
    for by in settings.by:
        order: list[Head] = []
        for count in counts:
            show(f"without {count} of {len(heads)} heads", counts.index(count), len(counts))
            if (by, count) not in known:
                order = order or pruning_order(subject, held, by, show, seed=settings.seed)
                point = {"identity": identities[by], "by": by, "pruned": count, "share": count / len(heads)}
                point |= _score(subject, order[:count], judged, settings)
                known[by, count] = point
                lines.append(point)
                write_text(record, "".join(json.dumps(line) + "\n" for line in lines))
            found.append(known[by, count])
    return found


def _score(
    subject: Subject, removed: Sequence[Head], judged: HeldPairs | HeldSegments, settings: CurveSettings
) -> dict[str, Any]:
    model = prune(subject.model, removed).eval() if removed else subject.model
    parameters = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if isinstance(judged, HeldSegments):
        nats = nats_per_token(model, judged.batches, device=subject.device)
        return {**parameters, "nats_per_token": nats, "perplexity": math.exp(nats)}
    assert isinstance(subject.reader, Translator)
    whole = subject.reader
    smaller = Translator(model, whole.tokenizer, whole.settings, whole.device)  # type: ignore[arg-type]
    beams = settings.num_beams or whole.settings.num_beams
    texts = smaller.translate([source for source, _ in judged.pairs], too_long="truncate", num_beams=beams)
    score = corpus_bleu(texts, [reference for _, reference in judged.pairs], tokenize=settings.tokenize)
    return {**parameters, "bleu": score.value, "signature": score.signature}


def _identity(
    subject: Subject,
    held: HeldPairs | HeldSegments,
    judged: HeldPairs | HeldSegments,
    settings: CurveSettings,
    by: Order,
) -> str:
    """A digest of all that a point depends on."""
    weights = resolve_model_path(subject.name) / "model.safetensors"
    with open_regular(weights) as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    asked = [content, by, repr(subject.reader.settings)]
    asked += [settings.tokenize, str(settings.num_beams), str(settings.seed if by == "random" else "")]
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
    if not all(isinstance(line, dict) and {"identity", "by", "pruned"} <= line.keys() for line in found):
        raise DataError(f"{record} is no record of a pruning curve; move it away, or name another by --record.")
    return found
