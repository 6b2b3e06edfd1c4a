"""The sample outputs of a validation, as a text file."""

from __future__ import annotations

from pathlib import Path

from manyheads.files.commit import write_text
from manyheads.training.record.report import ValidationReport

__all__ = ["write_samples"]


def write_samples(path: Path, report: ValidationReport) -> None:
    """Write the parts of each sample, with blank lines between samples.

    Raises: SaveError: the file cannot be written.
    """
    blocks = ["".join(f"{name + ':':<12} {text}\n" for name, text in sample.labelled()) for sample in report.samples]
    write_text(path, "\n".join(blocks))
