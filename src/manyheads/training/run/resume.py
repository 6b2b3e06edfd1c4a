"""Choice of the checkpoint to resume from, and the check that it belongs to the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from manyheads.checkpoint.format import read_scalars, step_of, verify_checkpoint
from manyheads.checkpoint.retain import find_latest, read_pointer
from manyheads.config.build import REMOVED
from manyheads.config.files import to_plain
from manyheads.errors import CheckpointError, ConfigError
from manyheads.training.optim.schedule import learning_rate
from manyheads.training.run.clock import RunClock
from manyheads.training.run.state import Counters
from manyheads.training.settings import TrainingSettings

_MAY_CHANGE = (
    "run_dir",
    "device",
    "num_threads",
    "precision",
    "data.path",
    "initial.model",
    "initial.data",
    "training.max_steps",
    "training.max_minutes",
    "training.log_every",
    "training.save_every",
    "training.save_every_minutes",
    "training.keep",
    "training.on_nonfinite",
    "training.max_skips",
    "training.on_save_error",
    "training.parallel",
    "training.deterministic",
    "training.same_arithmetic",
    "training.ignore_memory",
    "training.plots",
    "training.tensorboard",
    "validation",
    "reading",
    "decoding",
    "generation",
)
"""Settings that do not change what a run computes: its folder, its length and its records. (The data itself has a
digest.)"""


def find_checkpoint(checkpoints_dir: Path, resume: str) -> tuple[Path | None, list[str]]:
    """Find and verify the checkpoint to resume from.

    Args:
        checkpoints_dir: the run's.
        resume: `auto` (the newest intact one, if any), `latest` (the same, but there must be one), `best`, `none`, or
            the path of a checkpoint folder.

    Returns: its folder or None, and one sentence for each damaged checkpoint that was skipped.
    Raises: CheckpointError: the named one is missing or damaged; or there are some, but none is intact.
    """
    if resume == "none":
        return None, []
    newest, warnings = find_latest(checkpoints_dir)
    if resume in ("auto", "latest"):
        if newest is None and warnings:
            raise CheckpointError(
                f"None of the {len(warnings)} checkpoints in {checkpoints_dir} is intact ({warnings[0]})."
                " To begin again use --resume none, which sets them aside."
            )
        if newest is None and resume == "latest":
            raise _nothing(resume)
        return newest, warnings
    named = read_pointer(checkpoints_dir, resume) if resume == "best" else Path(resume)
    if named is None or not named.is_dir() or (named / "checkpoints").is_dir():  # the last is a run's folder
        raise _nothing(resume)
    warnings = []
    if resume == "best" and newest is not None:
        best = _best_step(newest)
        if best != step_of(named):
            warnings.append(
                f"The pointer best names {named.name}, but {newest.name} knows step {best} as the best; the run "
                f"continues from {named.name}."
            )
    verify_checkpoint(named)
    return named, warnings


def _nothing(resume: str) -> CheckpointError:
    return CheckpointError(f"There is no checkpoint {resume!r} to resume from; give a folder step-XXXXXXXX, or auto.")


def _best_step(checkpoint: Path) -> int | None:
    counters = read_scalars(checkpoint)[1].get("counters")
    return counters.get("best_step") if isinstance(counters, dict) else None


def check_same_run(scalars: Mapping[str, Any], *, config: Any, data_digest: str, tokenizer_digest: str) -> list[str]:
    """Refuse to resume with other data or another model.

    Args:
        scalars: of the checkpoint.
        config: the current resolved config.
        data_digest: digest of the current data.
        tokenizer_digest: digest of the current tokenizer.

    Returns: a sentence for each setting that changed and is allowed to change.
    Raises: ConfigError: a setting changed that must not, or the data or the tokenizer changed.
    """
    changed = differences(scalars.get("config"), config)
    if "model.architecture" in dict(changed):  # then nearly all other settings differ too, so report only this one
        changed = [(name, text) for name, text in changed if name == "model.architecture" or name[:6] != "model."]
    is_mix = bool(to_plain(config).get("data", {}).get("mix"))  # then data.path determines the length of an epoch
    fatal = [text for name, text in changed if not _may_change(name) or (is_mix and name == "data.path")]
    for what, now in (("data", data_digest), ("tokenizer", tokenizer_digest)):
        before = scalars.get(f"{what}_digest")
        if before != now:
            fatal.append(f"the {what} changed (SHA-256 {str(before)[:12]}..., now {now[:12]}...)")
    if fatal:
        raise ConfigError(
            "The checkpoint belongs to another run: " + "; ".join(fatal) + "."
            " Restore these settings, or begin a new run from its model with them: --init THIS_RUN --run-dir NEW; or"
            " choose another run_dir, or --resume none."
        )
    return [text for _, text in changed]


def differences(before: Any, now: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves that differ between two nested dicts, as (dotted name, "name was x, is y").

    Args: now: may be a dataclass; then a setting that an older version did not record had its default, and one that
        this version has no longer may have had its value without effect.
    """
    defaults: dict[str, Any] = {}
    if is_dataclass(now) and not isinstance(now, type):
        for item in fields(now):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            defaults[item.name] = None if default is MISSING else to_plain(default)
        now = {item.name: getattr(now, item.name) for item in fields(now)}
    if isinstance(now, Mapping) and (before is None or isinstance(before, Mapping)):
        before, found = before or {}, []
        for key in sorted({*before, *now}):
            name = f"{prefix}.{key}" if prefix else str(key)
            found += differences(before.get(key, defaults.get(key)), now.get(key), name)
        return found
    now = to_plain(now)
    if before == now or (now is None and prefix in REMOVED and before == REMOVED[prefix]):
        return []
    return [(prefix, f"{prefix} was {before!r}, is {now!r}")]


def risen_rate(before: Any, config: Any, d_model: int, counters: Counters) -> str | None:
    """Return a sentence if the next step's learning rate is above the last one, because the run became longer.

    Args: before: the checkpoint's config, as plain data. config: the present run config. counters: of the checkpoint.
    """
    step, schedule, now = counters.step, config.schedule, config.training
    old = {name: before["training"].get(name) for name in ("max_steps", "max_minutes")}
    if schedule.kind not in ("cosine", "linear") or step <= schedule.warmup_steps:
        return None

    def rate(training: TrainingSettings, step: int) -> float:
        progress = RunClock(training, counters.elapsed_seconds).progress(step)
        peak = config.optimiser.learning_rate
        return learning_rate(schedule, peak=peak, d_model=d_model, step=step, progress=progress)

    last, following = rate(replace(now, **old), step), rate(now, step + 1)
    if following <= last:
        return None
    return (
        f"the learning rate goes up again, from {last:.3g} at step {step} to {following:.3g} at step {step + 1},"
        f" because the {schedule.kind} schedule now falls over a longer run. If that is not wanted, keep the old length"
        " and begin a new run from the model: --init THIS_RUN --run-dir NEW with a lower optimiser.learning_rate."
    )


_CHANGE_SCORES = ("validation.bleu_sentences", "validation.bleu_tokenize", "decoding")
"""Settings on which BLEU and F1 depend, but not the loss. (A language model's loss depends on `reading`.)"""


def judges_alike(before: Any, now: Any) -> bool:
    """Return whether the best scores of two configs, the first one as plain data, can be compared."""
    best_by = now.validation.best_by
    count = ("validation.best_by", "reading", *(() if best_by == "loss" else _CHANGE_SCORES))
    return not any(name.startswith(count) for name, _ in differences(before, now))


def _may_change(name: str) -> bool:
    return any(name == allowed or name.startswith(allowed + ".") for allowed in _MAY_CHANGE)
