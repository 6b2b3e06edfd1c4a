"""The folder of a run, and what a run that goes on takes from one: its checkpoint, or the weights of a model.

A lock keeps two runs from sharing a folder.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.catalogue import HOOKS, load
from manyheads.checkpoint.format import (
    find_latest,
    list_checkpoints,
    read_pointer,
    read_scalars,
    step_of,
    verify_checkpoint,
)
from manyheads.config.build import REMOVED
from manyheads.config.checks import did_you_mean
from manyheads.config.files import to_json, to_plain, to_yaml
from manyheads.errors import CheckpointError, ConfigError, DataError
from manyheads.files.commit import make_folder, saving, sync, write_text
from manyheads.files.output_safety import check_spares_folders, locked
from manyheads.files.safe_open import RefusedFileError, check_no_link, check_writable_file
from manyheads.files.verify import file_sha256
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import data_notice, load_portable_state, load_weights, portable_state, read_config
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import Vocabulary
from manyheads.training.optim.schedule import learning_rate
from manyheads.training.run.clock import RunClock
from manyheads.training.run.state import Counters, named_parameters

if TYPE_CHECKING:
    from manyheads.training.settings import InitialSettings, RunConfig, TrainingSettings


class RunFolder:
    """Paths of a run.

    Args: path: the run's folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.train_log = path / "train.log"
        self.metrics = path / "metrics.jsonl"
        self.timing = path / "timing.jsonl"
        self.table = path / "metrics.csv"
        self.loggers = path / "loggers.json"
        self.samples = path / "samples"
        self.comparison = path / "comparison.json"
        self.plots = path / "plots"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.data = path / "data"
        self._of_a_run = (
            *(self.config, self.environment, self.train_log, self.metrics, self.timing, self.comparison),
            *(self.table, self.loggers, self.samples, self.plots, self.tensorboard, self.checkpoints, self.model),
        )

    def check(self) -> None:
        """Refuse a folder in which a run would write through a symbolic link, or to a pipe or a device.

        The folder may be of external origin. The folder itself may be a link, because the user chose it. Files that are
        written under a temporary name and renamed are not checked: the rename replaces a link and does not change its
        target.

        Raises: ConfigError: with the name of the first such entry. SaveError: the folder cannot be read.
        """
        try:
            str(self.path).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the name of the run folder {str(self.path)!r} is not UTF-8, which TensorBoard needs; choose another."
            ) from error
        in_place = (self.lock, self.train_log, self.metrics, self.timing, self.table)
        folders = (self.samples, self.plots, self.tensorboard, self.checkpoints, self.data)
        with saving(self.path, 0):
            try:
                for path in in_place:
                    check_writable_file(path)
                for path in (*folders, *sorted(self.path.glob("previous-*.partial"))):
                    check_no_link(path)
            except RefusedFileError as error:
                raise ConfigError(
                    f"{error.filename} is refused, since a run writes to it: {error} (the run folder itself may be a"
                    " link)."
                ) from error

    def create(self) -> None:
        """Create the folder.

        Raises: SaveError: it cannot be created. ConfigError: its name is a file's, or it would be in the folder of a
            model; see `check`.
        """
        check_spares_folders(self.checkpoints, is_folder=True)
        check_spares_folders(self.environment)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"run_dir is {self.path}, which is a file; a run needs a folder. Choose another run_dir.")
        with saving(self.path, 0):
            make_folder(self.path)
            if os.access(self.path.absolute().parent, os.R_OK):
                sync(self.path.absolute().parent)  # a killed process may have created the folder without syncing
            self.check()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; the system releases the lock when the process ends for any reason.

        Raises: ConfigError: another process has the lock. SaveError: the lock file cannot be written.
        """
        with locked(self.lock, self._in_use):
            yield

    def _in_use(self, owner: str) -> ConfigError:
        return ConfigError(
            f"The run folder {self.path} is in use by process {owner}; choose another run_dir, or end that process"
            " first."
        )

    def describe(self, config: RunConfig) -> None:
        """Write config.yaml and environment.json."""
        write_text(self.config, to_yaml(config))
        write_text(self.environment, to_json(environment()))

    def last_words(self) -> str:
        """Return the message for a run that is stopped at once: what is saved of it."""
        saved = list_checkpoints(self.checkpoints)
        if not saved:
            return "\nmanyheads: stopped at once; nothing is saved yet, so the same command begins again.\n"
        return f"\nmanyheads: stopped at once; saved is {saved[-1]}, from which the same command continues.\n"

    def has_run(self) -> bool:
        """Return whether there are files of an earlier run."""
        return self.metrics.exists() or self.checkpoints.exists() or self.model.exists()

    def set_aside(self) -> Path:
        """Move an earlier run's files into `previous-N`, so that they are not mixed with those of a new run.

        Prepared data stays, and so do files of the user, which no run writes. A crash in between leaves
        `previous-N.partial`, which `finish_setting_aside` completes.

        Raises: SaveError: a file could not be moved.
        """
        number = 1
        while os.path.lexists(self.path / f"previous-{number}"):
            number += 1
        partial = self.path / f"previous-{number}.partial"
        with saving(partial, 0):
            make_folder(partial)
            for entry in (*self._of_a_run, *sorted(self.path.glob("nonfinite-step-*.json"))):
                if os.path.lexists(entry):
                    entry.rename(partial / entry.name)
            for folder in (partial, self.path):
                sync(folder)
            target = partial.with_suffix("")
            partial.rename(target)
            sync(self.path)
        return target

    def finish_setting_aside(self) -> Path | None:
        """Complete an interrupted `set_aside`, because the remaining files would look like a run. Returns: as
        `set_aside`.

        Raises: SaveError: a file could not be moved.
        """
        return self.set_aside() if any(self.path.glob("previous-*.partial")) else None


def environment() -> dict[str, Any]:
    """Return versions and machine, on which a run also depends. No user names or environment variables."""
    packages = ("manyheads", "torch", "numpy", "safetensors", "tokenizers", "sacrebleu")
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "packages": found,
    }


_VOCABULARIES = ("source_vocab_size", "target_vocab_size", "vocab_size")


def begin_from(model: Any, settings: InitialSettings, tokenizer: Any) -> list[str]:
    """Give a new composite the weights of another model.

    Where the data's tokenizer has more ids than the model's and begins with them, a row for a new id is the mean of the
    rows of the ids that the old tokenizer has in its place, if they are known, otherwise of all old rows (Hewitt 2021).

    Args:
        model: of the run, with as many ids as the data.
        settings: where the weights are.
        tokenizer: of the data.

    Returns: sentences for the user.
    Raises: ModelFileError: the model cannot be read, or its weights do not fit. ConfigError: its ids are not those of
        the data, or its weights are not those that config.yaml records.
    """
    folder = resolve_model_path(settings.model)
    tensors = load_weights(folder)
    digest = file_sha256(folder / "model.safetensors")
    if settings.sha256 and digest != settings.sha256:
        raise ConfigError(
            f"The weights of {settings.model} have changed: SHA-256 {digest[:12]}..., but initial.sha256 is"
            f" {settings.sha256[:12]}.... Give --init {settings.model} and --resume none to begin from the new ones."
        )
    old_size = _check_ids(settings.model, folder, tokenizer)
    replaced = load(HOOKS["older ids"])(tokenizer, old_size) if tokenizer.vocab_size > old_size else []
    before, now = read_config(folder), model.config
    growths = {getattr(now, name) - getattr(before, name) for name in _VOCABULARIES if hasattr(now, name)}
    grown = _with_new_rows(tensors, portable_state(model), growths - {0}, replaced, old_size)
    load_portable_state(model, grown, where=f"the weights of {settings.model}")
    model.data_notice = data_notice(folder)
    lines = [f"begins from {settings.model} (SHA-256 {digest[:12]}...), with a new optimiser"]
    names = [name for name, tensor in grown.items() if tensor is not tensors[name]]
    if names:
        more = max(growths)
        whose = "of the pieces they replace" if replaced and all(replaced) else "of the old rows"
        lines.append(f"{more:,} new ids: their rows in {', '.join(names)} are the means {whose}")
    return lines


def _check_ids(name: str, folder: Path, tokenizer: Any) -> int:
    """Returns: the number of ids of the model. Raises: ConfigError: one of them has another meaning in the data."""
    from manyheads.text.of_folder import load_vocabulary

    file = folder / "tokenizer.json"
    remedy = f"prepare the data with the model's ids: `manyheads prepare --tokenizer {name} ...`"
    if not file.is_file():
        raise ConfigError(
            f"{name} has no tokenizer.json, so its ids cannot be compared with those of the data; only a model with one"
            " can be trained further."
        )

    try:
        known = load_vocabulary(file) if isinstance(tokenizer, Vocabulary) else Tokenizer.load(file)
    except DataError as error:
        raise ConfigError(f"The tokenizer of {name} is of another kind than the data's ({error}); {remedy}.") from error
    old, new = known.vocab_size, tokenizer.vocab_size
    if old > new:
        raise ConfigError(f"{name} has {old:,} ids, but the data only {new:,}; {remedy}.")
    if (known.kind, _special(known)) != (tokenizer.kind, _special(tokenizer)):
        raise ConfigError(f"The tokenizer of {name} treats text in another way than the data's; {remedy}.")
    ids = list(range(old))
    if old == new and known.to_json() == tokenizer.to_json():
        return old
    for index, (mine, other) in enumerate(zip(known.tokens(ids), tokenizer.tokens(ids), strict=True)):
        if mine != other:
            raise ConfigError(f"Id {index} is {mine!r} in {name}, but {other!r} in the data; {remedy}.")
    if old == new:
        raise ConfigError(f"The tokenizer of {name} divides text into its {old:,} ids in another way; {remedy}.")
    return old


def _special(tokenizer: Any) -> tuple[Any, ...]:
    return tuple(getattr(tokenizer, name, None) for name in ("lowercase", "documents", "end_id", "unk_id", "symbols"))


def _with_new_rows(
    tensors: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    growths: Collection[int],
    replaced: Sequence[Sequence[int]],
    old_size: int,
) -> dict[str, Tensor]:
    """Add mean rows to each tensor that has as many rows too few as there are new ids.

    Args: replaced: for each new id the old ids in its place; an empty list stands for all of them. old_size: number of
        old ids.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        wanted = own[name].shape if name in own else tensor.shape
        fits = tensor.dim() == len(wanted) and tensor.dim() > 0 and tensor.shape[1:] == wanted[1:]
        count = wanted[0] - tensor.shape[0] if fits else 0
        if count in growths:
            mean = tensor.mean(0)
            first = old_size - tensor.shape[0]  # above 0 in the last cluster of an adaptive softmax
            own_rows = [[one - first for one in ids if one >= first] for ids in replaced]
            ids_of = own_rows if len(replaced) == count else [[]] * count
            rows = [tensor[ids].mean(0) if ids else mean for ids in ids_of]
            found[name] = torch.cat([tensor, torch.stack(rows)])
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Exclude parameters from training.

    Args: patterns: see `TrainingSettings.freeze`.

    Returns: one sentence for the user; none without patterns.
    Raises: ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    named = named_parameters(model)
    for pattern in patterns:
        matched = [name for name in named if _matches(name, pattern)]
        if not matched:
            near = did_you_mean(pattern.removesuffix(".*"), _names_in(named))
            raise ConfigError(
                f"training.freeze: no parameter matches {pattern!r}.{near} `train --dry-run` lists all parameters."
            )
        for name in matched:
            named[name].requires_grad_(False)
    if not patterns:
        return []
    frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
    if len(frozen) == len(named):
        raise ConfigError(
            f"training.freeze {' '.join(patterns)} matches all {len(named)} tensors of the model, so nothing is left to"
            " train; freeze fewer."
        )
    count, total = (sum(one.numel() for one in group) for group in (frozen, named.values()))
    return [f"frozen: {count:,} of {total:,} parameters, {len(frozen)} of {len(named)} tensors"]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _names_in(named: Collection[str]) -> list[str]:
    """Return the names of all parameters and of the modules that contain them."""
    parts = (name.split(".") for name in named)
    return list(dict.fromkeys(".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)))


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
