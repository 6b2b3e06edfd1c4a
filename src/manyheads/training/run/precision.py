"""The precision of a run: `auto` becomes fp32 or bf16, once, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch

from manyheads.checkpoint.format import list_checkpoints, read_pointer, read_scalars
from manyheads.decoding.model_runner import choose_device
from manyheads.distributed.group import Group
from manyheads.errors import CheckpointError, ConfigError
from manyheads.nn.kernels.policy import tf32_lack
from manyheads.nn.kernels.precision import (
    LEAST_SPEED_UP,
    OVERRIDE,
    FixedPrecision,
    PrecisionMeasurement,
    measure_precision,
)
from manyheads.training.run.run_folder import RunFolder
from manyheads.training.settings import RunConfig

C = TypeVar("C", bound=RunConfig)
Level = Literal["info", "warning"]


def resolve_precision(
    config: C,
    device: torch.device,
    *,
    stored: FixedPrecision | None = None,
    log: Callable[[str, Level], None] = lambda text, level: None,
    group: Group | None = None,
) -> C:
    """Return the config with `fp32`, `tf32` or `bf16` instead of `auto`; the main rank decides for all.

    Args:
        config: of the run.
        device: device for training.
        stored: the precision of the checkpoint from which the run resumes; None: a new run.
        log: receives a message about a measured choice, and a warning if the precision is slow on this device.
        group: the ranks of the run; None: a single process.

    Raises: ConfigError: bf16 or tf32 is requested or stored, and the device has no such products.
    """
    group = group or Group()
    precision: FixedPrecision = group.from_main(lambda: _decide(config.precision, device, stored, log))
    return replace(config, precision=precision)


def starting_precision(config: RunConfig, resume: str, group: Group | None = None) -> FixedPrecision:
    """Return the precision in which a run began, or will begin. Args: as of `training.run.loop.train`."""

    def decide() -> FixedPrecision:
        stored = stored_precision(RunFolder(Path(config.run_dir)).checkpoints, resume)
        return stored or _decide(config.precision, choose_device(config.device), None, lambda text, level: None)

    return (group or Group()).from_main(decide)


def _decide(
    asked: str, device: torch.device, stored: FixedPrecision | None, log: Callable[[str, Level], None]
) -> FixedPrecision:
    if asked == "auto" and stored is None:
        measured = measure_precision(device)
        log(f"precision auto: {measured.choice}{_reason(measured)}", "info")
        return measured.choice
    chosen = stored if asked == "auto" else asked
    precision: FixedPrecision = "bf16" if chosen == "bf16" else "tf32" if chosen == "tf32" else "fp32"
    if precision == "tf32" and (lack := tf32_lack(device)):
        raise ConfigError(f"The precision is tf32, {lack}: --precision fp32.")
    if precision != "bf16":
        return precision
    measured = measure_precision(device)
    resumed = asked == "auto" or asked == stored
    remedy = "use --precision fp32" if resumed else "use --precision auto or fp32"
    if not measured.has_bf16:
        origin = "The checkpoint was trained in bf16" if resumed and stored else "The precision is bf16"
        raise ConfigError(f"{origin}, and {device} has no bf16 matrix products; {remedy}.")
    factor = measured.bf16_factor
    if factor is not None and factor < 1:
        origin = "The run resumes in bf16, as its checkpoint was trained" if resumed and stored else "Training in bf16"
        log(
            f"{origin}, but on this machine ({device}) bf16 matrix products run at {factor:.2g} times the rate of fp32"
            f" ones. To train faster, {remedy} (auto takes bf16 from {LEAST_SPEED_UP:g} times on).",
            "warning",
        )
    return precision


def _reason(measured: PrecisionMeasurement) -> str:
    if measured.bf16_factor is None:
        return f" (set by the environment variable {OVERRIDE})"
    return f" (bf16 matrix products run at {measured.bf16_factor:.2g} times the rate of fp32 ones on this machine)"


def stored_precision(checkpoints_dir: Path, resume: str) -> FixedPrecision | None:
    """Return the precision of the checkpoint that `resume` names (see `resume.find_checkpoint`), without verifying it.

    Returns: `fp32`, `tf32` or `bf16`; None if there is no such checkpoint or its file cannot be read, which is
        reported when the checkpoint itself is loaded.
    """
    if resume == "none":
        return None
    with suppress(CheckpointError, OSError):
        if resume == "best":
            named = read_pointer(checkpoints_dir, resume)
            candidates = [named] if named is not None else []
        elif resume in ("auto", "latest"):
            candidates = list_checkpoints(checkpoints_dir)[::-1]
        else:
            candidates = [Path(resume)]
        for path in candidates:
            with suppress(CheckpointError):
                config = read_scalars(path)[1].get("config")
                precision = config.get("precision") if isinstance(config, dict) else None
                return precision if precision in get_args(FixedPrecision) else None
    return None
