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

from manyheads.catalogue import PUBLIC
from manyheads.catalogue import load as _load

if TYPE_CHECKING:
    from manyheads import nn
    from manyheads.api import evaluate, prepare, train
    from manyheads.decoding.generator import Generator
    from manyheads.decoding.translator import Translator
    from manyheads.extras.classification.classifier import Classifier
    from manyheads.extras.inspect.display import inspect_model, show_attention
    from manyheads.extras.parsing.parser import Parser
    from manyheads.models.pretrained import load
    from manyheads.training.record.log import Callback, Logger

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Classifier",
    "Generator",
    "Logger",
    "Parser",
    "Translator",
    "__version__",
    "evaluate",
    "inspect_model",
    "load",
    "nn",
    "prepare",
    "show_attention",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in ("hf", "nn"):
        return importlib.import_module(f"manyheads.{name}")
    if name in PUBLIC:
        return _load(PUBLIC[name])
    raise AttributeError(f"module 'manyheads' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
