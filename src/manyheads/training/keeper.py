"""What a run leaves on disk while it goes on: checkpoints, their pointers, and the best model so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from manyheads.architectures.pretrained import load_weights, portable_state, save_pretrained
from manyheads.checkpoint.commit import remove_stale
from manyheads.checkpoint.faults import check_free_space
from manyheads.checkpoint.format import Checkpoint, checkpoint_name, load_checkpoint, needed_bytes, save_checkpoint
from manyheads.checkpoint.retain import apply_retention, read_pointer, set_aside_newer, write_pointer
from manyheads.errors import CheckpointError, ConfigError, ModelFileError, NonFiniteError, SaveError
from manyheads.training.assembly import Assembly
from manyheads.training.log import MetricsLog
from manyheads.training.nonfinite import first_bad
from manyheads.training.resume import check_same_run, choose_checkpoint
from manyheads.training.run_folder import RunFolder
from manyheads.training.state import Counters, gather, restore

__all__ = ["Keeper"]


class Keeper:
    """Saves and restores an assembly.

    Args:
        assembly: what is saved; its counters are replaced by `resume`.
        folder: of the run.
        metrics: cut back by `resume`, measured by `save`.
        warn: told what was skipped or could not be saved.
    """

    def __init__(self, assembly: Assembly, folder: RunFolder, metrics: MetricsLog, warn: Callable[[str], None]) -> None:
        self._assembly = assembly
        self._folder = folder
        self._metrics = metrics
        self._warn = warn
        self._saved = (0, 0)
        self._model_failed = False
        self.last: Path | None = None

    def resume(self, resume: str) -> None:
        """Put the assembly into the state of a checkpoint (see `choose_checkpoint`), or leave it new.

        Raises: CheckpointError, ConfigError, ModelFileError: there is none, or it is damaged or of another run.
        """
        for place in (self._folder.checkpoints, self._folder.path):
            remove_stale(place)
        checkpoint, warnings = choose_checkpoint(self._folder.checkpoints, resume)
        for text in warnings:
            self._warn(text)
        if checkpoint is None:
            self._metrics.cut(0)
            return
        self._restore(checkpoint)
        counters = self._assembly.counters
        own = checkpoint.path.resolve().parent == self._folder.checkpoints.resolve()
        if own:
            for path in set_aside_newer(self._folder.checkpoints, counters.step):
                self._warn(f"{path.name} is newer than step {counters.step}, where the run goes on; it is out of use.")
            if not self._metrics.cut(counters.metrics_bytes):
                self._warn(f"{self._folder.metrics} is shorter than it was; lines of metrics are lost.")
            self._saved, self.last = self._done(), checkpoint.path
            self._tidy(checkpoint.path)  # in case the run was killed right after that checkpoint's commit
            self._mend_model()
        else:
            self._metrics.cut(0)

    def is_saved(self) -> bool:
        """Whether the newest checkpoint knows all that was done: the step, and its validation if there was one.

        A signal within a validation leaves a checkpoint that does not; the next start validates and saves again.
        """
        return self._saved == self._done()

    def _done(self) -> tuple[int, int]:
        counters = self._assembly.counters
        return counters.step, counters.validated_step

    def _restore(self, checkpoint: Checkpoint) -> None:
        assembly = self._assembly
        for change in check_same_run(checkpoint.scalars, **assembly.identity):
            self._warn(f"changed since the checkpoint: {change}")
        assembly.counters = Counters.from_json(checkpoint.scalars.get("counters"))
        row, rows = assembly.counters.row, assembly.stream.rows(assembly.counters.epoch)
        if row >= rows:
            raise CheckpointError(
                f"{checkpoint.path} goes on at row {row:,} of an epoch of {rows:,} rows; it is damaged."
            )
        bad = first_bad(checkpoint.tensors)
        if bad is not None:
            raise CheckpointError(
                f"{checkpoint.path} holds NaN or infinity in {bad}; go on from an older one: --resume PATH."
            )
        first = assembly.objective.first_state(assembly.model)
        restore(checkpoint.tensors, assembly.model, assembly.optimiser, assembly.average, assembly.memory, first)

    def check_space(self) -> None:
        """Refuse to begin a run whose second checkpoint would not fit.

        Raises: SaveError: less than twice a checkpoint's size is free. on_save_error `continue` begins all the same,
            with a warning.
        """
        parameters = portable_state(self._assembly.model)
        copies = 3 + (self._assembly.average is not None)  # weights, two moments, averages
        try:
            check_free_space(
                self._folder.checkpoints,
                2 * copies * needed_bytes({"model": parameters}),
                also=" Two checkpoints must fit; training.on_save_error continue begins all the same.",
            )
        except SaveError as error:
            if self._assembly.config.training.on_save_error == "stop":
                raise
            self._warn(str(error))

    def save(self, *, must: bool) -> None:
        """Write a checkpoint of the current step, move the pointers, delete what is too old.

        Args: must: raise in any case; otherwise on_save_error decides.

        Raises: SaveError: it could not be written; older ones are as they were.
        """
        try:
            self._save()
        except SaveError as error:
            if must or self._assembly.config.training.on_save_error == "stop":
                raise
            self._warn(f"{error} Training goes on.")

    def _save(self) -> None:
        assembly, folder = self._assembly, self._folder
        counters = assembly.counters
        counters.metrics_bytes = self._metrics.num_bytes()
        tensors = gather(assembly.model, assembly.optimiser, assembly.average, assembly.memory)
        bad = first_bad(tensors)
        if bad is not None:
            raise NonFiniteError(
                f"After step {counters.step} there is NaN or infinity in {bad}, so no checkpoint is saved; the last one"
                f" is {self.last or 'none'}. Try a lower learning rate, a longer warm-up or optimiser.clip_norm."
            )
        scalars = {"counters": counters.to_json(), **assembly.identity}
        path = save_checkpoint(folder.checkpoints, counters.step, tensors, scalars)
        self._saved, self.last = self._done(), path
        self._tidy(path)
        if self._model_failed:
            self._mend_model()

    def _tidy(self, newest: Path) -> None:
        """Move the pointers, then delete what is too old and what dead processes left."""
        folder, assembly = self._folder, self._assembly
        targets = {"latest": newest}
        if assembly.counters.best_step is not None:
            targets["best"] = folder.checkpoints / checkpoint_name(assembly.counters.best_step)
        for pointer, target in targets.items():
            if target.is_dir() and read_pointer(folder.checkpoints, pointer) != target:
                write_pointer(folder.checkpoints, pointer, target)
        apply_retention(folder.checkpoints, assembly.config.training.keep)
        for place in (folder.checkpoints, folder.path, folder.samples):
            remove_stale(place)

    def save_model(self) -> None:
        """Replace model/ by the model as it is now, with averaged weights if there are any.

        Written before the checkpoint that calls it the best: after a crash between the two, the resumed run comes to
        the same validation again and writes the same folder.

        Raises: SaveError: it could not be written; on_save_error `continue` tries again after the next checkpoint.
        """
        assembly = self._assembly
        weights = portable_state(assembly.model)
        if assembly.average is not None:
            weights = {**weights, **assembly.average.tensors}
        try:
            self._write_model(weights)
        except SaveError as error:
            if assembly.config.training.on_save_error == "stop":
                raise
            self._warn(f"{error} Training goes on.")

    def _write_model(self, weights: Mapping[str, Tensor]) -> None:
        assembly = self._assembly
        self._model_failed = True
        save_pretrained(
            assembly.model,
            self._folder.model,
            tokenizer=assembly.data.tokenizer,
            generation=assembly.objective.generation,
            weights=weights,
        )
        self._model_failed = False

    def _mend_model(self) -> None:
        """Write model/ from the checkpoint that it belongs to, unless it holds the same weights already."""
        step = self._assembly.counters.best_step
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
