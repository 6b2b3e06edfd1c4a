"""The data of `curves.py`: prepared once by manyheads, written again as ids that every side reads, and the scores.

For translation, `train.source`, `train.target` and the same of `valid` and `test` have a line a sentence: its tokens'
ids. For language models, `train.npy`, `valid.npy` and `test.npy` are arrays of ids. `facts.json` names what else a
side has to know. Hypotheses come back as text, or as ids that our tokenizer decodes; BLEU is sacreBLEU's of the
detokenised text. A language model's nats over a whole held-out text become bits per byte of that text.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent / "curve_sides"))

from pairs import read_ids, write_ids

from manyheads.data.language.prepared import TextData, open_text
from manyheads.data.translation.prepared import PreparedData, open_data
from manyheads.errors import DataError
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.evaluation.likelihood import bits_per
from manyheads.tasks.language_modelling.settings import xl_demo
from manyheads.tasks.translation.settings import demo

HELD_OUT = ("valid", "test")


def export(what: str, path: str, folder: Path, sentences: int) -> dict[str, Any]:
    """Write the data for all sides.

    Args:
        what: `translation`, `language` or `long`.
        path: a folder of `manyheads prepare`; empty: the embedded corpus.
        folder: for the files; an embedded corpus is prepared below it.
        sentences: the most of each held-out split that are translated.

    Returns: the content of facts.json.
    Raises: DataError: the data is of another task, or lacks a split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = _pairs(path, folder, sentences) if what == "translation" else _text(path, folder)
    facts = {"what": what, **facts}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def _pairs(path: str, folder: Path, sentences: int) -> dict[str, Any]:
    config = demo()
    settings = replace(config.data, path=path or config.data.path)
    data = open_data(settings, config.tokenizer, config.seed, folder)
    if data.task != "translation":
        raise DataError(f"{data.path} is prepared for {data.task}; sentence pairs for translation are needed.")
    _refuse_missing(data)
    counts = {}
    for split in ("train", *HELD_OUT):
        store = getattr(data, split)
        counts[split] = len(store) if split == "train" else min(sentences, len(store))
        for side in ("source", "target"):
            rows = getattr(store, side)
            write_ids(folder / f"{split}.{side}", [rows[place].tolist() for place in range(counts[split])])
    tokenizer = data.tokenizer
    ids = {name: getattr(tokenizer, name) for name in ("vocab_size", "pad_id", "bos_id", "eos_id")}
    return {"prepared": str(data.path.resolve()), "digest": data.digest, **ids, "sentences": counts}


def _text(path: str, folder: Path) -> dict[str, Any]:
    config = xl_demo()
    data = open_text(replace(config.data, path=path or config.data.path), config.vocabulary, folder)
    _refuse_missing(data)
    for split in ("train", *HELD_OUT):
        np.save(folder / f"{split}.npy", np.asarray(getattr(data, split).ids))
    counts = {split: data.counts(split) for split in ("train", *HELD_OUT)}
    sizes = {name: {split: one[name] for split, one in counts.items()} for name in ("bytes", "tokens")}
    vocab_size = data.vocabulary.vocab_size
    return {"prepared": str(data.path.resolve()), "digest": data.digest, "vocab_size": vocab_size, **sizes}


def _refuse_missing(data: PreparedData | TextData) -> None:
    lacking = [split for split in HELD_OUT if not getattr(data, split)]
    if lacking:
        raise DataError(f"{data.path} has no {' and no '.join(lacking)} set; prepare the data with both.")


def score(facts: Mapping[str, Any], split: str, found: Mapping[str, Any], out: Path) -> float:
    """BLEU of hypotheses, or bits per byte.

    Args:
        facts: of the data.
        split: `valid` or `test`.
        found: what a side recorded: `hypotheses`, a file of its folder; or `nats`.
        out: the side's folder.

    Raises: DataError: it did not translate, or score, all of the split.
    """
    if facts["what"] == "translation":
        data = PreparedData.open(facts["prepared"], verify=False)
        count = facts["sentences"][split]
        references = [target for _, target in getattr(data, f"{split}_text")[:count]]
        path = out / found["hypotheses"]
        if path.suffix == ".ids":
            texts = data.tokenizer.decode_batch(read_ids(path))
        else:
            texts = path.read_text("utf-8").split("\n")[:-1]
        return corpus_bleu(texts, references).value
    expected = facts["tokens"][split]
    if not expected - 1 <= found["scored_tokens"] <= expected:
        raise DataError(f"{out.name} scored {found['scored_tokens']:,} of the {expected:,} tokens of the {split} text.")
    bits = bits_per(found["nats"], facts["bytes"][split])
    return bits if math.isfinite(bits) else math.inf
