"""Preparation of the bytes of one file, without its last tenth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextFiles
from manyheads.data.preparing import Holdout
from manyheads.text.settings import VocabularySettings
from newcomers.counting.options import PrepareOptions


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `tasks.report.Task`."""
    holdout = Holdout(valid=Path(options.counted).stat().st_size // 10)
    text = TextFiles(paths=[options.counted])
    return partial(prepare_text, train=text, vocabulary=VocabularySettings(level="bytes"), holdout=holdout)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `tasks.report.Task`."""
    return f"counted {manifest['counts']['train']['bytes']} bytes into {folder}"
