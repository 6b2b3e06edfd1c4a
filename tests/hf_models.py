"""Small models of every architecture that has a class in transformers, in folders of manyheads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.vocabulary import IdVocabulary
from manyheads.text.word_sides import WordSides

VOCAB = 20
END = VOCAB - 1  # of a document
SPECIAL = {"pad": 0, "bos": 1, "eos": 2}

_XL = TransformerXLConfig(vocab_size=VOCAB, d_model=32, num_heads=2, d_ff=48, num_layers=2, memory_len=6)
LANGUAGE: dict[str, Any] = {
    **{
        name: replace(entry.presets["debug"], vocab_size=VOCAB)
        for name, entry in ARCHITECTURES.items()
        if entry.task == "language-modelling"
    },
    "adaptive": replace(_XL, memory_len=64, cutoffs=(5, 10), div_value=2),
    "vanilla": replace(_XL, attention="absolute", memory_len=0),
}
TRANSLATION: dict[str, Any] = {
    name: replace(entry.presets["debug"], source_vocab_size=VOCAB + 3, target_vocab_size=VOCAB, tie_embeddings="none")
    for name, entry in ARCHITECTURES.items()
    if entry.task == "translation"
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    pytest.importorskip("transformers")
    import manyheads.hf

    manyheads.hf.register()  # once more changes nothing


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model by its kind, with weights that write different tokens."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind in made:
            return made[kind]
        torch.manual_seed(3)
        model = build_model({**LANGUAGE, **TRANSLATION}[kind])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2).add_((0.2 if kind in LANGUAGE else 0.6) * torch.randn_like(parameter))
        made[kind] = tmp_path_factory.mktemp("models") / kind
        is_language = kind in LANGUAGE
        words = [f"<{name}>" for name in SPECIAL] + [f"w{index}" for index in range(VOCAB)]
        save_pretrained(
            model,
            made[kind],
            tokenizer=IdVocabulary(END, documents="files") if is_language else WordSides(words, words[:VOCAB], SPECIAL),
            generation=GenerationSettings(do_sample=False) if is_language else DecodingSettings(num_beams=1),
        )
        return made[kind]

    return folder


def until(row: list[int], end: int) -> list[int]:
    """Return the ids of a row before the first `end`."""
    return row[: row.index(end)] if end in row else row
