"""The files of tests that take longest, so that processes which share the files end at the same time."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

__all__ = ["LONGEST_FIRST", "longest_first"]

LONGEST_FIRST = (
    "browser/test_serving_page.py",
    "integration/test_docs.py",
    "unit/training/test_loop.py",
    "integration/test_torchrun.py",
    "integration/test_kill_resume.py",
    "fuzz/test_fuzz.py",
    "unit/cli/test_translate.py",
    "integration/test_io_errors.py",
    "integration/test_readme.py",
    "contract/test_language_models.py",
    "integration/test_ranks.py",
    "browser/test_attention_page.py",
    "integration/test_first_minute.py",
    "unit/serving/test_connections.py",
    "unit/training/test_language_training.py",
    "integration/test_resume_state.py",
    "unit/training/test_initial.py",
    "integration/test_hostile.py",
    "contract/test_forward.py",
    "unit/cli/test_train_command.py",
    "unit/interop/exports/test_export_transformers.py",
    "unit/interop/test_legacy_pickle.py",
    "integration/test_durable_saves.py",
    "contract/test_additions.py",
    "unit/training/test_arithmetic.py",
    "integration/test_power_cuts.py",
    "unit/benchmarks/test_gpu.py",
    "parity/test_marian_live.py",
)
"""Below tests/. A process is given a file when it has nearly done those before: a long one at the end is waited for."""


def longest_first(items: list[pytest.Item]) -> None:
    """Put the tests of these files first; all else keeps its order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> int:
        file = PurePosixPath(item.nodeid.partition("::")[0])
        return places.get("/".join(file.parts[1:]), len(places))

    items.sort(key=place)
