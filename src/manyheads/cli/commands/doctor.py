"""The findings of `doctor` about this machine: versions, devices, speed, disk.

`manyheads doctor`: checks this machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from manyheads.cli.command_line.parsing import command
from manyheads.cli.lines.output import lines_of
from manyheads.cli.process import say_or_json, set_up_machine
from manyheads.config.options import CommandPage, Shared
from manyheads.installation import install_command

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "sacrebleu", "pydantic", "shtab", "rich", "huggingface-hub")
EXTRAS = {
    "markdown-it-py": "documents",
    "matplotlib": "plot",
    "py3langid": "lang",
    "pyarrow": "parquet",
    "sentencepiece": "spm",
    "tensorboard": "tensorboard",
}
LEAST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 2 * 2**30
MATRIX = 1024
SECONDS_A_RATE = 0.3


def examine(folder: Path) -> dict[str, Any]:
    """Return all findings; `problems` lists what must be repaired.

    Args: folder: where runs would be written.
    """
    problems: list[str] = []
    versions = {name: _version(name) for name in ("manyheads", *NEEDED)}
    problems += [f"{name} is not installed: pip install {name}" for name, found in versions.items() if found is None]
    if sys.version_info < LEAST_PYTHON:
        problems.append(f"Python {platform.python_version()} is too old; {'.'.join(map(str, LEAST_PYTHON))} is needed.")
    extras = {name: _version(name) or f"not installed: {install_command(extra)}" for name, extra in EXTRAS.items()}
    disk = _disk(folder, problems)
    record = {
        "versions": {"python": platform.python_version(), **versions},
        "extras": extras,
        "machine": _machine(),
    }
    if versions.get("torch"):
        record |= {"torch": _torch(), "speed": _speed()}
    return {**record, "disk": disk, "problems": problems}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    from manyheads.training.run.device import INSTRUCTION_SETS, processor

    name, flags = processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    record: dict[str, Any] = {
        "system": platform.platform(),
        "processor": name or platform.processor() or platform.machine(),
        "usable_cores": cores,
        "instructions": [flag for flag in INSTRUCTION_SETS if flag in flags],
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        record["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return record


def _torch() -> dict[str, Any]:
    import torch

    devices = ["cpu"]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} {facts.name} ({facts.total_memory / 2**30:.0f} GiB)")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "devices": devices,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "triton_kernels": triton_line() if torch.cuda.is_available() else None,
    }


def triton_line() -> str:
    """Return whether the Triton kernels can be used on the first GPU."""
    import torch

    from manyheads.nn.kernels import policy

    lack = policy.triton_lack(torch.device("cuda", 0), torch.float32)
    return "can be asked for" if lack is None else f"not used; a kernel {lack}"


def _speed() -> dict[str, Any]:
    """By device: the rate of square float32 products in 10^9 operations a second, and how bf16 compares with it."""
    import torch
    from torch.utils.benchmark import Timer

    from manyheads.nn.kernels.precision import measure_precision

    kinds = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    record: dict[str, Any] = {}
    for kind in kinds:
        matrix = {"matrix": torch.ones(MATRIX, MATRIX, device=kind)}
        timer = Timer("matrix @ matrix", globals=matrix, num_threads=torch.get_num_threads())
        seconds = min(timer.blocked_autorange(min_run_time=SECONDS_A_RATE).times)  # other programs only ever add to it
        record[f"{kind}_fp32_gflops"] = round(2 * MATRIX**3 / seconds / 1e9)
        measured = measure_precision(torch.device(kind))
        if measured.bf16_factor is not None:
            record[f"{kind}_bf16_factor"] = float(f"{measured.bf16_factor:.2g}")
        record[f"{kind}_precision_auto"] = measured.choice
    return record


def _disk(folder: Path, problems: list[str]) -> dict[str, Any]:
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        problems.append(f"only {free / 2**30:.1f} GiB are free in {folder}; a run needs room for its checkpoints.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            writable = True
    except OSError as error:
        writable = False
        problems.append(f"nothing can be written in {folder}: {error.strerror or error}.")
    return {"folder": str(folder), "free_gib": round(free / 2**30, 1), "writable": writable}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `manyheads doctor`."""

    json: bool = Shared.json("Print JSON.")


PAGE = CommandPage(
    DoctorOptions,
    "Check this machine: versions, devices, cores, speed, optional packages, free disk space. It changes nothing.",
    ("manyheads doctor", "manyheads doctor --json"),
)


@command(PAGE, "doctor")
def run(options: DoctorOptions) -> int:
    """Returns: 0, or 2 if something must be repaired before manyheads can work here."""
    kept = set_up_machine()
    record = examine(Path.cwd())
    record["machine"]["big_blocks_kept"] = kept
    lines = lines_of({name: value for name, value in record.items() if name != "problems"})
    verdict = [f"problem: {problem}" for problem in record["problems"]] or ["ready"]
    say_or_json(record, "\n".join([*lines, "", *verdict]), as_json=options.json)
    return 2 if record["problems"] else 0
