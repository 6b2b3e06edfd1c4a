"""The score of a model by the share of pruned heads: BLEU of a translator, perplexity of a language model."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from manyheads.architectures.head_names import Head, all_heads
from manyheads.architectures.hub import resolve_model_path
from manyheads.data.progress import Progress
from manyheads.decoding.translator import Translator
from manyheads.errors import DataError
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.evaluation.perplexity import perplexity_of, show_perplexity
from manyheads.evaluation.reading import BleuTokenizer
from manyheads.evaluation.tokenizers import choose_tokenizer
from manyheads.extras.inspect.head_scores import nats_per_token
from manyheads.extras.inspect.heads.judging import num_removed, pruning_order
from manyheads.extras.inspect.heads.options import CurveOptions, Order
from manyheads.extras.inspect.heads.subject import HeldPairs, HeldSegments, Subject
from manyheads.extras.inspect.pruning import prune
from manyheads.files.commit import write_text
from manyheads.files.guarded import open_regular, read_limited
from manyheads.files.json_object import json_text

__all__ = ["PruningCurve", "pruning_curve"]

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


def pruning_curve(subject: Subject, options: CurveOptions, record: Path, show: Progress) -> PruningCurve:
    """Measure the score at each share of pruned heads; each point is stored as soon as it is known.

    Paper: Michel et al. 2019, sec. 4.2, figure 3: importance is measured once, on the whole model.
    Args: record: a JSON Lines file; points of the same model, texts and options in it are not computed again.

    Raises: DataError: the record cannot be read. As `Subject.text`.
    """
    subject.check_options(options, options.text)
    longer = replace(options.text, pairs=options.judge_pairs, max_tokens=options.judge_tokens)
    held, judged = subject.text(options.text), subject.text(longer, "test")
    heads = all_heads(subject.model.config)
    options = replace(options, tokenize=_tokenizer(subject, judged, options.tokenize))
    counts = sorted({num_removed(share, heads) for share in options.share})
    lines = _lines(record)
    orders = tuple(dict.fromkeys(options.by))
    identities = {by: _identity(subject, held, judged, options, by) for by in orders}
    known = {(line["by"], line["pruned"]): line for line in lines if line["identity"] == identities.get(line["by"])}
    found = []
    for by in orders:
        order: list[Head] = []
        for count in counts:
            show(f"without {count} of {len(heads)} heads", counts.index(count), len(counts))
            if (by, count) not in known:
                order = order or pruning_order(subject, held, by, show, seed=options.text.seed)
                point = {"identity": identities[by], "by": by, "pruned": count, "share": count / len(heads)}
                point |= _score(subject, order[:count], judged, options)
                known[by, count] = point
                lines.append(point)
                write_text(record, "".join(json_text(line) + "\n" for line in lines))
            found.append(known[by, count])
    return PruningCurve(judged.name, found)


def _tokenizer(subject: Subject, judged: HeldPairs | HeldSegments, asked: BleuTokenizer) -> BleuTokenizer:
    """Return the name of BLEU's tokenizer. Raises: MissingExtraError: something that it needs is missing."""
    if isinstance(judged, HeldSegments) or not isinstance(subject.reader, Translator):
        return asked
    languages = {target for _, target in subject.reader.languages}
    choice = choose_tokenizer(asked, languages, [reference for _, reference in judged.pairs])
    if choice.warning:
        warnings.warn(choice.warning, stacklevel=2)
    return cast(BleuTokenizer, choice.name)


def _score(
    subject: Subject, removed: Sequence[Head], judged: HeldPairs | HeldSegments, options: CurveOptions
) -> dict[str, Any]:
    model = prune(subject.model, removed).eval() if removed else subject.model
    parameters = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if isinstance(judged, HeldSegments):
        nats = nats_per_token(model, judged.batches, device=subject.device)
        return {**parameters, "nats_per_token": nats, "perplexity": perplexity_of(nats)}
    assert isinstance(subject.reader, Translator)
    whole = subject.reader
    smaller = Translator(model, whole.tokenizer, whole.settings, whole.device)  # type: ignore[arg-type]
    beams = options.num_beams or whole.settings.num_beams
    texts = smaller.translate([source for source, _ in judged.pairs], too_long="truncate", num_beams=beams)
    score = corpus_bleu(texts, [reference for _, reference in judged.pairs], tokenize=options.tokenize)
    return {**parameters, "bleu": score.value, "signature": score.signature}


def _identity(
    subject: Subject,
    held: HeldPairs | HeldSegments,
    judged: HeldPairs | HeldSegments,
    options: CurveOptions,
    by: Order,
) -> str:
    """A digest of all that a point depends on."""
    weights = resolve_model_path(subject.name) / "model.safetensors"
    with open_regular(weights) as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    asked = [content, by, repr(subject.reader.settings)]
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
