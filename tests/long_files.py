"""The files of tests that take longest, so that processes which share the files end at the same time."""

from pathlib import PurePosixPath

import pytest

__all__ = ["LONGEST_FIRST", "longest_first"]

LONGEST_FIRST = (
    "contract/test_language_models.py",
    "integration/test_kill_resume.py",
    "unit/training/test_loop.py",
    "integration/test_ranks.py",
    "integration/test_torchrun.py",
    "fuzz/test_fuzz.py",
    "integration/test_io_errors.py",
    "integration/test_first_minute.py",
    "integration/test_hostile.py",
    "contract/test_forward.py",
    "extras/serving/test_connections.py",
    "unit/decoding/test_beam.py",
    "browser/test_serving_page.py",
    "unit/training/test_precision.py",
    "extras/inspect/test_inspect.py",
    "contract/test_without_memory.py",
    "contract/test_plugins.py",
    "unit/training/test_language_training.py",
    "integration/test_resume_state.py",
    "unit/cli/test_trained_run.py",
    "contract/test_files.py",
    "browser/test_attention_page.py",
    "extras/exports/test_export_transformers.py",
    "unit/cli/test_translate.py",
    "unit/decoding/test_generator.py",
    "extras/peers/test_legacy_pickle.py",
    "unit/benchmarks/test_harness.py",
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
