"""Checkpoints of a run, their pointers, and the folder of the best model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.checkpoint.format import (
    Checkpoint,
    apply_retention,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    needed_bytes,
    read_pointer,
    save_checkpoint,
    set_aside_newer,
    write_pointer,
    write_shards,
)
from manyheads.config.files import to_plain
from manyheads.distributed.wrap import local
from manyheads.errors import CheckpointError, ConfigError, ModelFileError, NonFiniteError, SaveError
from manyheads.files.commit import check_free_space, remove_stale
from manyheads.models.pretrained import data_notice, load_weights, portable_state, save_pretrained
from manyheads.nn.kernels import policy
from manyheads.training.optim.optimiser import without_foreign_momenta
from manyheads.training.record.report import CheckpointReport
from manyheads.training.run.device import changed_arithmetic
from manyheads.training.run.resume import check_same_run, find_checkpoint, judges_alike, risen_rate
from manyheads.training.run.state import MEMORY, Counters, allocator_for, gather, named_parameters, restore
from manyheads.training.run.step import first_bad

if TYPE_CHECKING:
    from manyheads.training.record.log import MetricsLog
    from manyheads.training.run.components import RunComponents
    from manyheads.training.run.resume import RunFolder


class CheckpointManager:
    """Saves and restores an assembly.

    Where `policy.writes_beside`, a thread writes a copy of the tensors while the next steps are computed; the next save
    waits for it. It writes below `checkpoints/` alone, and deletes nothing else there but what retention does.

    Args:
        components: the parts of the run; `resume` replaces its counters.
        folder: of the run.
        metrics: truncated by `resume`, measured by `save`.
        warn: called with messages about skipped and failed checkpoints.
    """

    def __init__(
        self, components: RunComponents, folder: RunFolder, metrics: MetricsLog, warn: Callable[[str], None]
    ) -> None:
        self._components = components
        self._folder = folder
        self._metrics = metrics
        self._warn = warn
        self._group = components.group
        self._saved = (0, 0)
        self._model_failed = False
        self._thread = ThreadPoolExecutor(1, "checkpoints") if self._writes_beside() else None
        self._begun: tuple[CheckpointReport, tuple[int, int], Future[None]] | None = None
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._report: CheckpointReport | None = None
        self.last: Path | None = None

    def _writes_beside(self) -> bool:
        alone = self._group.is_alone and not self._components.parallel_model.is_sharded
        return alone and policy.writes_beside(self._components.device)

    def resume(self, resume: str) -> None:
        """Restore the assembly from a checkpoint (see `find_checkpoint`), or leave it new.

        The main rank chooses, all ranks load, and then the main rank cleans up.

        Raises: CheckpointError, ConfigError, ModelFileError: there is no such checkpoint; it is damaged; it belongs to
            a run with other settings or data; or it is in another folder, although this folder has checkpoints.
        """
        chosen = self._group.from_main(lambda: self._choose(resume))
        if chosen is None:
            self._cut_metrics(0)
            return
        checkpoint = self._load(Path(chosen))
        self._restore(checkpoint)
        self._group.meet()
        own = self._is_own(checkpoint.path)
        self._check_best(checkpoint.scalars.get("config"), own=own)
        if own:
            self._saved, self.last = self._done(), checkpoint.path
            self._group.from_main(lambda: self._clear_up(checkpoint.path))
        else:
            self._cut_metrics(0)

    def _check_best(self, config: Any, *, own: bool) -> None:
        """Forget the best score if the next scores cannot be compared with it, or if its model is in another folder.

        Otherwise no later model could be the best one: a loss is never below a negated BLEU.

        Args: config: of the checkpoint.
        """
        counters = self._components.counters
        if not own:
            counters.best_score, counters.best_step, counters.num_worse, counters.validated_step = None, None, 0, 0
        elif counters.best_score is not None and not judges_alike(config, self._components.config):
            counters.best_score, counters.num_worse = None, 0
            self._warn("The scores so far were computed in another way, so the next validation counts as the best one.")

    def _choose(self, resume: str) -> str | None:
        for place in (self._folder.checkpoints, self._folder.path):
            for name in remove_stale(place):
                self._warn(f"{place / name} stays: it does not bear the mark of a temporary file of this machine.")
        path, warnings = find_checkpoint(self._folder.checkpoints, resume)
        for text in warnings:
            self._warn(text)
        if path is not None and not self._is_own(path) and list_checkpoints(self._folder.checkpoints):
            raise ConfigError(
                f"{path} is not in {self._folder.checkpoints}, where there are checkpoints of another run, which would"
                " be mixed with the new ones. Leave out --resume to continue that run, or choose another run_dir."
            )
        return None if path is None else str(path)

    def _is_own(self, path: Path) -> bool:
        return path.resolve().parent == self._folder.checkpoints.resolve()

    def _load(self, path: Path) -> Checkpoint:
        """Load a checkpoint that the main rank has verified; of sharded tensors, load this rank's shards."""
        return load_checkpoint(path, verify=False, allocate=allocator_for(self._components.parallel_model.trained))

    def _cut_metrics(self, num_bytes: int) -> bool:
        return self._metrics.cut(num_bytes) if self._group.is_main else True

    def _clear_up(self, newest: Path) -> None:
        """Restore the folder's state directly after the checkpoint from which the run resumes."""
        counters = self._components.counters
        for path in set_aside_newer(self._folder.checkpoints, counters.step):
            self._warn(
                f"{path.name} is newer than step {counters.step}, from which the run resumes; it is not used any more."
            )
        if not self._cut_metrics(counters.metrics_bytes):
            self._warn(f"{self._folder.metrics} is shorter than it was; lines of metrics are lost.")
        self._tidy(newest, counters.best_step)  # the run may have been killed directly after that checkpoint's commit
        self._sweep()
        self._mend_model()

    def is_saved(self) -> bool:
        """Whether the newest checkpoint contains all progress: the step, and its validation if it had one.

        A signal during a validation leaves a checkpoint without it; the next start validates and saves again.
        """
        return self._done() in (self._saved, None if self._begun is None else self._begun[1])

    def _done(self) -> tuple[int, int]:
        counters = self._components.counters
        return counters.step, counters.validated_step

    def _restore(self, checkpoint: Checkpoint) -> None:
        components = self._components
        for change in check_same_run(checkpoint.scalars, config=components.config, **components.digests):
            self._warn(f"changed since the checkpoint: {change}")
        told = changed_arithmetic(
            checkpoint.scalars.get("arithmetic"),
            components.arithmetic,
            refuse=components.config.training.same_arithmetic,
        )
        if told is not None:
            self._warn(told)
        components.counters = Counters.from_json(checkpoint.scalars.get("counters"))
        model, counters = components.objective.model_config, components.counters
        if risen := risen_rate(checkpoint.scalars.get("config"), components.config, model.d_model, counters):
            self._warn(risen)
        row, rows = components.counters.row, components.stream.rows(components.counters.epoch)
        if row >= rows:
            raise CheckpointError(
                f"{checkpoint.path} continues at row {row:,} of an epoch of {rows:,} rows; it is damaged."
            )
        found = self._group.exchange(first_bad(_own(checkpoint.tensors)))
        bad = next((one for one in found if one is not None), None)
        if bad is not None:
            raise CheckpointError(
                f"{checkpoint.path} contains NaN or infinity in {bad}; resume from an older one: --resume PATH."
            )
        trained, tensors = components.parallel_model.trained, dict(checkpoint.tensors)
        tensors["optimiser"], foreign = without_foreign_momenta(
            components.optimiser, named_parameters(trained), tensors.get("optimiser", {})
        )
        if foreign:
            self._warn(
                f"The checkpoint is of an older version, in which Muon trained {', '.join(foreign)}; AdamW trains them"
                " from now on, without earlier moments."
            )
        first = components.objective.first_state(components.model)
        restore(
            tensors,
            trained,
            components.optimiser,
            components.average,
            components.memory,
            first,
            self._group,
        )

    def check_space(self) -> None:
        """Refuse to begin a run if its second checkpoint would not fit on the disk.

        Raises: SaveError: less than twice a checkpoint's size is free. With on_save_error `continue` there is only a
            warning.
        """
        if not self._group.is_main:
            return
        parameters = portable_state(self._components.model)
        copies = 3 + (self._components.average is not None)  # weights, two moments, averages
        try:
            check_free_space(
                self._folder.checkpoints,
                2 * copies * needed_bytes({"model": parameters}),
                also=" Two checkpoints must fit; with training.on_save_error continue the run begins anyway.",
            )
        except SaveError as error:
            if self._components.config.training.on_save_error == "stop":
                raise
            self._warn(str(error))

    def save(self, *, must: bool) -> None:
        """Write a checkpoint of the current step, update the pointers, and delete old checkpoints.

        Args: must: write it now, and raise in any case; otherwise on_save_error decides, and a thread may write it
            (then `ended` must have waited for the one before).

        Raises: SaveError: it could not be written; older checkpoints are unchanged.
        """
        assert self._begun is None, "the thread still writes"
        with self._survived(must):
            self._save(beside=self._thread is not None and not must)

    def ended(self, *, wait: bool) -> CheckpointReport | None:
        """Return what a save wrote that has ended since the last call; None: none has.

        Args: wait: for the thread.

        Raises: SaveError: as `save`, of what the thread could not write.
        """
        if self._begun is not None and (wait or self._begun[2].done()):
            (report, done, written), self._begun = self._begun, None
            with self._survived():
                written.result()
                self._note(report, done)
                self._clean()
        report, self._report = self._report, None  # type: ignore[assignment]
        return report

    def close(self) -> None:
        """End the thread, after what it is writing; an error of it is told."""
        try:
            self.ended(wait=True)
        except SaveError as error:
            self._warn(str(error))
        if self._thread is not None:
            self._thread.shutdown()

    @contextmanager
    def _survived(self, must: bool = False) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            if must or self._components.config.training.on_save_error == "stop":
                raise
            self._warn(f"{error} Training goes on.")

    def _save(self, *, beside: bool = False) -> None:
        components = self._components
        counters = components.counters
        self._on_main(self._measure_metrics)
        parallel_model = components.parallel_model
        tensors = gather(
            parallel_model.trained, components.optimiser, components.average, components.memory, self._group
        )
        bad = next((found for found in self._group.exchange(first_bad(_own(tensors))) if found is not None), None)
        if bad is not None:
            raise NonFiniteError(
                f"After step {counters.step} there is NaN or infinity in {bad}, so no checkpoint is saved; the last one"
                f" is {self.last or 'none'}. Try a lower learning rate, a longer warm-up or optimiser.clip_norm."
            )
        scalars: dict[str, Any] = {"counters": asdict(counters), "arithmetic": components.arithmetic}
        scalars |= {"config": to_plain(components.config), **components.digests}
        step, best, done = counters.step, counters.best_step, self._done()
        path = self._folder.checkpoints / checkpoint_name(step)
        report = CheckpointReport(step=step, path=path, best=best == step)
        if beside and self._thread is not None:
            copies, wait_for_copies = self._copied(tensors)

            def write() -> None:
                wait_for_copies()
                save_checkpoint(path.parent, step, copies, scalars)
                self._tidy(path, best)

            self._begun = report, done, self._thread.submit(write)
            return
        self._write_checkpoint(tensors, scalars)
        self._note(report, done)
        self._on_main(lambda: self._tidy(path, best))
        self._on_main(self._clean)

    def _copied(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> tuple[dict[str, dict[str, Tensor]], Any]:
        """Begin to copy the tensors to the host, into the memory of the last copies, and return what waits for it.

        A GPU writes into pinned memory before it computes the next step; nobody waits but the thread.
        """
        pins, before, self._copies = policy.pinning(self._components.device), self._copies, {}
        with pins or nullcontext():
            for stem, group in tensors.items():
                own = self._copies[stem] = {}
                for name, tensor in group.items():
                    kept = before.get(stem, {}).get(name)
                    if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins is not None)
                    own[name] = kept.copy_(tensor.detach(), non_blocking=True)
        return self._copies, policy.waiting_for(self._components.device)

    def _note(self, report: CheckpointReport, done: tuple[int, int]) -> None:
        self._saved, self.last, self._report = done, report.path, report

    def _clean(self) -> None:
        """Do what needs a complete checkpoint, and no other writer."""
        self._sweep()
        if self._model_failed:
            self._mend_model()

    def _measure_metrics(self) -> None:
        self._components.counters.metrics_bytes = self._metrics.num_bytes()

    def _write_checkpoint(self, tensors: Mapping[str, Mapping[str, Tensor]], scalars: Mapping[str, Any]) -> None:
        step, checkpoints = self._components.counters.step, self._folder.checkpoints
        if not self._components.parallel_model.is_sharded:
            self._on_main(lambda: save_checkpoint(checkpoints, step, tensors, scalars))
            return
        parts = {stem: group for stem, group in tensors.items() if stem != MEMORY}
        whole = {stem: group for stem, group in tensors.items() if stem == MEMORY}

        def write_parts(folder: Path) -> None:
            self._group.from_main(lambda: str(folder))
            write_shards(folder, parts)

        if self._group.is_main:
            self._save_as_main(checkpoints, step, whole, scalars, write_parts, needed_bytes(parts))
        else:
            folder = self._group.from_main(str)
            if folder:
                with suppress(OSError):  # the main rank receives the error
                    write_shards(Path(folder), parts)
            self._on_main(lambda: None)

    def _save_as_main(
        self,
        checkpoints: Path,
        step: int,
        whole: Mapping[str, Mapping[str, Tensor]],
        scalars: Mapping[str, Any],
        write_parts: Callable[[Path], None],
        parts_bytes: int,
    ) -> None:
        """Receive the shards of the other ranks, and tell them the result, success or failure."""
        asked = False

        def ask(folder: Path) -> None:
            nonlocal asked
            asked = True
            write_parts(folder)

        failure: SaveError | None = None
        try:
            save_checkpoint(checkpoints, step, whole, scalars, write_parts=ask, parts_bytes=parts_bytes)
        except SaveError as error:
            failure = error
        if not asked:
            self._group.from_main(lambda: "")

        def result() -> None:
            if failure is not None:
                raise failure

        self._on_main(result)

    def _on_main(self, work: Callable[[], object]) -> None:
        """Run work on the main rank while the others wait.

        Raises: SaveError: on every rank, if it is raised on the main rank.
        """
        if self._group.is_alone:
            work()
            return

        def attempt() -> str | None:
            try:
                work()
            except SaveError as error:
                return str(error)
            return None

        failure = self._group.from_main(attempt)
        if failure is not None:
            raise SaveError(failure)

    def _tidy(self, newest: Path, best_step: int | None) -> None:
        """Update the pointers, then delete old checkpoints."""
        folder = self._folder
        targets = {"latest": newest}
        if best_step is not None:
            targets["best"] = folder.checkpoints / checkpoint_name(best_step)
        for pointer, target in targets.items():
            if target.is_dir() and read_pointer(folder.checkpoints, pointer) != target:
                write_pointer(folder.checkpoints, pointer, target)
        apply_retention(folder.checkpoints, self._components.config.training.keep)

    def _sweep(self) -> None:
        """Delete the temporary files of dead processes, and of this one: nothing is being written."""
        for place in (self._folder.checkpoints, self._folder.path, self._folder.samples):
            remove_stale(place)

    def save_model(self) -> None:
        """Replace model/ by the current model, with averaged weights if there are any.

        It is written before the checkpoint that records it as the best. After a crash between the two, the resumed run
        repeats the same validation and writes the same folder.

        Raises: SaveError: it could not be written; with on_save_error `continue` it is retried after the next
            checkpoint.
        """
        components = self._components
        average = components.average
        if components.parallel_model.is_sharded:
            components.parallel_model.gather(None if average is None else average.tensors)
            average = None
        weights = portable_state(components.model)
        if average is not None:
            weights = {**weights, **average.tensors}
        try:
            self._on_main(lambda: self._write_model(weights))
        except SaveError as error:
            if components.config.training.on_save_error == "stop":
                raise
            self._warn(f"{error} Training goes on.")

    def _write_model(self, weights: Mapping[str, Tensor]) -> None:
        components = self._components
        self._model_failed = True
        model: Any = components.model
        if not getattr(model, "data_notice", ""):  # the model that a resumed run began from may be gone
            model.data_notice = data_notice(self._folder.model)
        save_pretrained(
            model,
            self._folder.model,
            tokenizer=components.data.tokenizer,
            generation=components.objective.generation,
            weights=weights,
            task=components.objective.task,
            languages=components.objective.languages,
            data=str(getattr(getattr(components.config, "data", None), "path", "")),
        )
        self._model_failed = False

    def _mend_model(self) -> None:
        """Write model/ again from its checkpoint, unless it already contains the same weights."""
        step = self._components.counters.best_step
        path = self.last if step is None else self._folder.checkpoints / checkpoint_name(step)
        if path is None or not path.is_dir():
            return
        try:
            tensors = load_checkpoint(path).tensors
        except CheckpointError as error:
            self._warn(f"{self._folder.model} cannot be compared with the best checkpoint: {error}")
            return
        weights = {**tensors["model"], **tensors.get("ema", {})}
        if not self._is_model_of(weights):
            self._write_model(weights)

    def _is_model_of(self, weights: Mapping[str, Tensor]) -> bool:
        try:
            found = load_weights(self._folder.model)
        except (ModelFileError, ConfigError) as error:
            if self._folder.model.exists():
                self._warn(f"{error} It is written again from a checkpoint.")
            return False
        return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def _own(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors in this rank's memory."""
    return {stem: {name: local(tensor) for name, tensor in group.items()} for stem, group in tensors.items()}
