"""manyheads: the encoder-decoder Transformer, Transformer-XL and Reformer, from training to translation.

    import manyheads
    translator = manyheads.Translator.from_pretrained("runs/demo/model")
    translator("I am hungry.")

Importing this package does not import torch or pydantic; the names below, and the package `manyheads.nn`, are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from manyheads.decoding.engines import OPENERS

if TYPE_CHECKING:
    from pathlib import Path

    from manyheads import nn
    from manyheads.architectures.pretrained import load
    from manyheads.decoding.engines import SearchEngine
    from manyheads.decoding.generator import Generator
    from manyheads.decoding.translator import Translator
    from manyheads.extras.classification.classifier import Classifier
    from manyheads.extras.parsing.parser import Parser

__version__ = "0.1.0"

_LAZY = {
    "Classifier": "manyheads.extras.classification.classifier",
    "Generator": "manyheads.decoding.generator",
    "Parser": "manyheads.extras.parsing.parser",
    "Translator": "manyheads.decoding.translator",
    "load": "manyheads.architectures.pretrained",
}

__all__ = ["Classifier", "Generator", "Parser", "Translator", "__version__", "load", "nn"]


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("manyheads.nn")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'manyheads' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _open_ctranslate2(name: str, folder: Path, runs_plainly: str) -> SearchEngine:
    from manyheads.extras.exports.ctranslate2_engine import open_for

    return open_for(name, folder, runs_plainly)


# This package is above all others: it hands the engine to `decoding`, which is below it.
OPENERS.update(ctranslate2=_open_ctranslate2, auto=_open_ctranslate2)
