"""A language model as one ONNX file: Transformer-XL with memories, Reformer with exact attention."""

from __future__ import annotations

from pathlib import Path

from manyheads.architectures.language_model import LanguageModel

__all__ = ["write_language_model"]


def write_language_model(module: LanguageModel, model: Path, target: Path, suffix: str) -> list[str]:
    raise NotImplementedError
