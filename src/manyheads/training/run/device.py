"""Computation settings and memory use of a run, and a check that a model can fit into memory, made before any of its
memory is taken.

The precision of a run: `auto` becomes fp32 or bf16, once, before anything is built.

The arithmetic of the machine, on which the bytes of a run depend besides its settings.

Sums of floating-point numbers depend on their order, and the order depends on the library, its instruction set, the
number of threads and the number of ranks. If the arithmetic changes, a resumed run is as good as before, but it does
not produce the bytes of an uninterrupted run (goal R1 in docs/reliability.md).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from manyheads.catalogue import build_model
from manyheads.checkpoint.format import list_checkpoints, read_pointer, read_scalars
from manyheads.decoding.model_runner import choose_device, on_cpu_by_default
from manyheads.distributed.group import Group
from manyheads.errors import CheckpointError, ConfigError
from manyheads.nn.kernels.modes import by_fixed_rules, fast, tf32_products
from manyheads.nn.kernels.policy import tf32_lack
from manyheads.training.run.resume import RunFolder, freeze
from manyheads.training.settings import RunConfig

if TYPE_CHECKING:
    from manyheads.nn.kernels.precision import FixedPrecision, PrecisionMeasurement


@contextmanager
def computing(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Set threads, determinism and generators from the config; restore them after the block.

    A resumed run must have the losses of an undisturbed one, so no measurement of speed selects a kernel.
    """
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses cuBLAS
        torch.use_deterministic_algorithms(True)
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        plain = config.training.plain
        with (
            on_cpu_by_default(),
            by_fixed_rules(),
            fast(not plain),
            tf32_products(config.precision == "tf32"),
            torch.random.fork_rng(devices=gpus),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        if config.num_threads:
            torch.set_num_threads(threads)


@contextmanager
def settled() -> Iterator[None]:
    """Exclude existing objects from garbage collection during a long block.

    Modules, classes and the model are some hundred thousand objects. Traversing them all from time to time took 2% of
    the time of the demo's model.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of torch on a GPU, of the process on a CPU; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory_bytes(device: torch.device) -> int | None:
    """Return the memory available on the device, within the limits of the container; None if it is not reported."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    free = status_bytes("/proc/meminfo", "MemAvailable")
    found = [] if free is None else [free]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # `max` means no limit and raises ValueError
        found.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    if not found:
        with suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def status_bytes(file: str, name: str) -> int | None:
    """Return the bytes of a line such as `VmRSS:  12 kB`; None if the system has no such file or line."""
    with suppress(OSError, ValueError, IndexError), open(file, encoding="ascii") as lines:  # noqa: PTH123
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    return None


_GIB = 2**30


def check_capacity(config: RunConfig, model_config: Any, device: torch.device, world: int = 1) -> str:
    """Compare the least memory that training needs with what is free, without building the model.

    Weights always exist, and gradients and one moment of the optimiser for those that are not frozen. Activations and
    a second moment come on top, so a run that passes may still not fit; `train --dry-run` and `--fit` measure all.

    Args:
        config: of the run.
        model_config: of the architecture, with vocabulary sizes filled in.
        device: device of the model. Where the free memory is not reported, nothing is checked.
        world: ranks over which FSDP divides gradients and moments.

    Returns: a warning if the model cannot fit and `training.ignore_memory` is set; otherwise empty.
    Raises: ConfigError: the model cannot fit, or a pattern of `training.freeze` is wrong.
    """
    with torch.device("meta"):
        model = build_model(model_config)
    freeze(model, config.training.freeze)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = world if config.training.parallel == "fsdp" else 1
    averaged = parameters if config.training.ema_decay else 0
    needed = 4 * parameters + 4 * (2 * trained + averaged) // parts
    free = free_memory_bytes(device)
    if free is None or needed <= free:
        return ""
    found = (
        f"the model has {parameters:,} parameters. To train them takes at least {needed / _GIB:,.1f} GiB for"
        f" weights, gradients and the optimiser, but {free / _GIB:,.1f} GiB are free on {device}."
    )
    if config.training.ignore_memory:
        return f"{found[0].upper()}{found[1:]} --force continues; the system may end the process."
    raise ConfigError(
        f"{found} Choose a smaller d_model, d_ff, vocabulary or number of layers, or a device with more memory; --force"
        " tries it nevertheless.",
        fields=("d_model", "d_ff", "num_layers"),
    )


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
        from manyheads.nn.kernels.precision import measure_precision

        measured = measure_precision(device)
        log(f"precision auto: {measured.choice}{_reason(measured)}", "info")
        return measured.choice
    chosen = stored if asked == "auto" else asked
    precision: FixedPrecision = "bf16" if chosen == "bf16" else "tf32" if chosen == "tf32" else "fp32"
    if precision == "tf32" and (lack := tf32_lack(device)):
        raise ConfigError(f"The precision is tf32, {lack}: --precision fp32.")
    if precision != "bf16":
        return precision
    from manyheads.nn.kernels.precision import LEAST_SPEED_UP, measure_precision

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
    from manyheads.nn.kernels.precision import OVERRIDE

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
    from manyheads.nn.kernels.precision import FixedPrecision

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
