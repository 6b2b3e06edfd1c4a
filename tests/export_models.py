"""Tiny models for the tests of exports, with weights that make their outputs differ from one another."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.models.pretrained import save_pretrained
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

LINES = ["I am hungry.", "Ich bin hungrig.", "A dog sees the cat.", "Ein Hund sieht die Katze.", "the end", "das Ende"]


@cache
def tokenizer(kind: Any = "bpe") -> Tokenizer:
    """A joint vocabulary of a few pieces."""
    return Tokenizer.train(LINES, TokenizerSettings(kind=kind, vocab_size=300))


def write_transformer(folder: Path, *, kind: str = "bpe", with_tokenizer: bool = True, **changes: Any) -> Path:
    """Write a Transformer of 2 + 1 layers with random weights. changes: settings of its config."""
    own = tokenizer(kind)
    sizes = {"source_vocab_size": own.vocab_size, "target_vocab_size": own.vocab_size}
    options = {"d_model": 16, "num_heads": 2, "d_ff": 24, "num_encoder_layers": 2, "num_decoder_layers": 1}
    config = ARCHITECTURES["transformer"].config(**{**sizes, **options, "max_len": 64, **changes})
    return _write(folder, config, own if with_tokenizer else None)


def write_language_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """Write a language model of ids."""
    return _write(folder, ARCHITECTURES[architecture].config(**changes), None)


def _write(folder: Path, config: Any, own: Tokenizer | None) -> Path:
    torch.manual_seed(7)
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in {id(one): one for one in model.parameters()}.values():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    save_pretrained(model, folder, tokenizer=own)
    return folder
