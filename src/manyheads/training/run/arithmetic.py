"""The arithmetic of the machine, on which the bytes of a run depend besides its settings.

Sums of floating-point numbers depend on their order, and the order depends on the library, its instruction set, the
number of threads and the number of ranks. If the arithmetic changes, a resumed run is as good as before, but it does
not produce the bytes of an uninterrupted run (goal R1 in docs/reliability.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from manyheads.distributed.group import Group

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
)


def arithmetic_of_run(device: torch.device, precision: str, group: Group) -> dict[str, str]:
    """Return the facts, by name: library, device, instruction sets, variables that limit them, threads, ranks."""
    import torch

    name, flags = processor()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "torch": torch.__version__,
        "device": f"{device.type} {gpu or name}".strip(),
        "instructions": " ".join(one for one in INSTRUCTION_SETS if one in flags),
        "limits": " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)),
        "threads": str(torch.get_num_threads()),
        "precision": precision,
        "ranks": str(group.world),
    }


def changed_arithmetic(before: Any, now: Mapping[str, str], *, refuse: bool) -> str | None:
    """Compare the arithmetic of a checkpoint with the present one.

    Args:
        before: as the checkpoint records it; if it is not a mapping, an older version wrote the checkpoint and recorded
            nothing.
        now: see `arithmetic_of_run`.
        refuse: raise an error instead of returning a sentence.

    Returns: one sentence that names what changed; None if nothing did.
    Raises: ConfigError: something changed, or is not recorded, and `refuse` is given.
    """
    if not isinstance(before, Mapping):
        if refuse:
            raise ConfigError(
                "The checkpoint does not record the arithmetic of its run, so it cannot be compared; leave out"
                " --same-arithmetic."
            )
        return None
    changed = [
        f"{name} was {str(before.get(name, ''))[:80] or 'not set'}, is {value or 'not set'}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if not changed:
        return None
    text = "; ".join(changed)
    if refuse:
        raise ConfigError(
            f"The arithmetic changed since the checkpoint: {text}. Restore it, or leave out --same-arithmetic."
        )
    return (
        f"The arithmetic changed since the checkpoint: {text}. The run continues, but it will not have the bytes of an "
        "uninterrupted run; --same-arithmetic refuses this."
    )


def processor() -> tuple[str, set[str]]:
    """Return the processor's name and its instruction sets as Linux lists them; both are empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", set()
    facts: dict[str, str] = {}
    for line in text.split("\n"):
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts.get("model name", ""), set((facts.get("flags") or facts.get("Features") or "").split())
