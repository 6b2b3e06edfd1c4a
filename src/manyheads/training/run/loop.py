"""Scores of the old and the new data before and after a run that begins from a model.

The training loop.

After each step the loop does the following tasks, in this order: a line of metrics, validation, checkpoint. A
checkpoint records which of them were done. So a run that is killed at any time, or stopped by a signal during a
validation, completes the missing ones; with a fixed number of steps its files are byte for byte the same as without the
interruption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.config.files import to_json, to_plain
from manyheads.data.sampler import next_position
from manyheads.decoding.model_runner import choose_device
from manyheads.distributed.group import Group
from manyheads.errors import ConfigError, ManyHeadsError, NonFiniteError, is_out_of_memory
from manyheads.files.commit import write_text
from manyheads.files.safe_open import read_limited
from manyheads.models.pretrained import load
from manyheads.nn.kernels import modes, policy
from manyheads.training.optim.schedule import learning_rate
from manyheads.training.record.log import Callbacks, LogFile, MetricsLog, PlainReporter, Reporters, with_tensorboard
from manyheads.training.record.recorder import Recorder
from manyheads.training.record.report import (
    CheckpointReport,
    Reporter,
    RunStart,
    StopReason,
    TrainResult,
    ValidationReport,
)
from manyheads.training.run.checkpoints import CheckpointManager
from manyheads.training.run.clock import SAME_SIGNAL_SECONDS, RunClock, SharedStopFlag, StopFlag, catch_signals
from manyheads.training.run.components import RunComponents, Surroundings, assemble, check_same_settings
from manyheads.training.run.device import computing, resolve_precision, settled, stored_precision
from manyheads.training.run.objective import Batch, Batches, Objective, Translate
from manyheads.training.run.resume import RunFolder, find_checkpoint

if TYPE_CHECKING:
    from manyheads.training.run.step import Fault
    from manyheads.training.settings import RunConfig

_MOST_BYTES = 1 << 20


class Comparison:
    """Evaluates the model on every held-out set at the beginning and at the end of a run; comparison.json holds the
    results.

    Args:
        components: the parts of the run.
        folder: of the run.
        reporter: is told what is judged.
        stop: ends a judgement; the run then reports no comparison.
    """

    def __init__(self, components: RunComponents, folder: RunFolder, reporter: Reporter, stop: StopFlag) -> None:
        self._components = components
        self._folder = folder
        self._reporter = reporter
        self._stop = stop

    def before(self) -> None:
        """Judge the model before the first step. A run that has made steps keeps the scores from its beginning.

        Raises: DataError: a held-out set cannot be used.
        """
        if self._components.counters.step:
            return
        found = self._scores(self._components.model)
        if found is not None:
            self._write({"before": found})

    def after(self) -> tuple[tuple[str, str, str], ...]:
        """Judge the best model, which is in model/.

        Returns: name, scores before and scores after of each set; empty if one of them is unknown.
        """
        record = self._read()
        counters = self._components.counters
        # Without validations model/ is the model of the last step.
        judged = counters.step if counters.best_step is None else counters.best_step
        if "before" not in record:
            return ()
        if "after" not in record or record.get("step") != judged:
            try:
                model = load(self._folder.model, device=self._components.device)
                found = self._scores(model)
            except ManyHeadsError as error:  # the run is complete; only its comparison is not
                self._reporter.message(f"The data sets are not compared: {error}", "warning")
                return ()
            if found is None:
                return ()
            record |= {"after": found, "best_step": counters.best_step, "step": judged}
            self._write(record)
        pairs = ((name, record["before"].get(name), record["after"].get(name)) for name in record["after"])
        return tuple((name, _shown(old), _shown(new)) for name, old, new in pairs)

    def _scores(self, model: Any) -> dict[str, dict[str, Any]] | None:
        """Return the scores of each set; None if the run was told to stop. Every rank of a group computes them."""
        components = self._components
        found = {}
        for name, judge in components.objective.judge_sets(model, components.device, self._stop).items():
            self._reporter.doing(f"judging {name}")
            report = judge.run(components.counters.step)
            if any(components.group.exchange(report is None)) or report is None:
                return None
            found[name] = _numbers(report)
        return found

    def _read(self) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            try:
                record = json.loads(read_limited(self._folder.comparison, _MOST_BYTES).decode("utf-8"))
            except (OSError, ValueError):
                return {}
            return record if isinstance(record, dict) else {}

        return self._components.group.from_main(read)

    def _write(self, record: dict[str, Any]) -> None:
        if self._components.group.is_main:
            write_text(self._folder.comparison, to_json(record))


def _numbers(report: ValidationReport) -> dict[str, Any]:
    return {"loss": report.loss, "perplexity": report.perplexity, "scores": report.scores()}


def _shown(scores: dict[str, Any] | None) -> str:
    return "unknown" if scores is None else ", ".join([f"loss {scores['loss']:.3f}", *scores["scores"]])


def train(
    config: RunConfig,
    *,
    resume: str = "auto",
    reporter: Reporter | None = None,
    translate: Translate | None = None,
    group: Group | None = None,
    callbacks: object = (),
) -> TrainResult:
    """Train until the config's limits, a signal, or the end of patience; all output is in `config.run_dir`.

    Args:
        config: settings of the run.
        resume: `auto` resumes from the newest intact checkpoint of the folder if there is one; `none` starts again (an
            earlier run's files move to `previous-N/`); `latest`, `best` or a checkpoint's path resumes from that one.
        reporter: receives the reports; train.log is written in any case.
        translate: replaces the search for validation scores.
        group: the ranks that train together, all of which call this; the main one writes and reports. None: a single
            process.
        callbacks: `record.log.Callback`s, and names of loggers; the main rank calls them.

    Returns: the result. A signal is not an error: the result names it, and the last checkpoint is complete.
    Raises: ManyHeadsError: bad config or data, a locked folder, a checkpoint of another run, a failed save, a loss or
        gradient that is not finite, or a lost rank.
    """
    group = group or Group()
    folder = RunFolder(Path(config.run_dir))
    device = group.device_like(choose_device(config.device))
    with group.guarding():
        if not group.is_main:
            group.meet()  # wait until the main rank has prepared the folder
            with computing(config, device):
                return _run(config, device, folder, resume, Surroundings(Reporters([]), translate, group))
        # A logger that is refused leaves no folder.
        called = Callbacks(with_tensorboard(callbacks) if config.training.tensorboard else callbacks)
        folder.create()
        with folder.locked(), computing(config, device):
            moved = folder.finish_setting_aside()
            group.meet()
            warn = (lambda text: None) if reporter is None else (lambda text: reporter.message(text, "warning"))
            plain = PlainReporter(LogFile(folder.train_log, warn), timestamps=True)
            everyone = Reporters([plain] if reporter is None else [plain, reporter])
            if moved is not None:
                everyone.message(_moved(moved))
            called.warn, called.log = lambda text: everyone.message(text, "warning"), plain.message
            try:
                with closing(called):
                    return _run(config, device, folder, resume, Surroundings(everyone, translate, group, called))
            except ManyHeadsError as error:
                plain.message(f"error: {error}")
                raise


def _run(
    config: RunConfig, device: torch.device, folder: RunFolder, resume: str, surroundings: Surroundings
) -> TrainResult:
    reporter, group = surroundings.reporter, surroundings.group
    stored = stored_precision(folder.checkpoints, resume) if group.is_main else None
    config = resolve_precision(config, device, stored=stored, log=reporter.message, group=group)
    check_same_settings(config, group)
    reporter.doing("opening the data")
    # Finding a checkpoint verifies it, so it is found twice only where the answer matters.
    needs_data = config.initial.needs_data
    begins = not needs_data or group.from_main(lambda: find_checkpoint(folder.checkpoints, resume)[0] is None)
    components = assemble(config, device, folder.data, group, reporter.doing, begins=begins)
    stop = StopFlag() if group.is_alone else SharedStopFlag(group)
    group.is_told_to_end = lambda: stop.signal_number is not None
    # The guard is inside: a launcher ends all ranks when one is lost, and the message must be written before that.
    grace = 0.0 if group.is_alone else SAME_SIGNAL_SECONDS
    multiplying = modes.tf32_products(config.precision == "tf32")
    with multiplying, catch_signals(stop, grace=grace, last_words=folder.last_words), group.guarding():
        result = Trainer(components, folder, stop, surroundings).run(resume)
        group.meet()  # the main rank plots and reports, and keeps the lock until all have finished
        return result


class Trainer:
    """One run in this process; in a group, each rank has its own, and they compute the same steps.

    Args:
        components: data, model, optimiser.
        folder: the run's folder.
        stop: ends the run when set.
        surroundings: of the run.
    """

    def __init__(
        self, components: RunComponents, folder: RunFolder, stop: StopFlag, surroundings: Surroundings
    ) -> None:
        reporter = surroundings.reporter
        self._components = components
        self._config = components.config
        self._group = components.group
        self._folder = folder
        self._surroundings, self._reporter, self._callbacks = surroundings, reporter, surroundings.callbacks
        self._stop = stop
        self._metrics = MetricsLog(folder.metrics)
        self._checkpoints = CheckpointManager(
            components, folder, self._metrics, lambda text: reporter.message(text, "warning")
        )
        self._train_step = components.train_step()
        self._judge = components.objective.judge(components.model, components.device, stop, surroundings.translate)
        self._last_validation: ValidationReport | None = None
        self._asked_to_stop = self._callback_stops = False

    def run(self, resume: str) -> TrainResult:
        """Compute steps and the work after them until there is a reason to stop."""
        if resume == "none" and self._group.is_main and self._folder.has_run():
            # Not earlier, because a mistake in the settings or the data leaves the earlier run in its place.
            self._reporter.message(_moved(self._folder.set_aside()))
        self._reporter.doing("looking for a checkpoint")
        self._checkpoints.resume(resume)
        self._checkpoints.check_space()
        if self._group.is_main:
            self._folder.describe(self._config)
        counters = self._components.counters
        start = self._describe_start()
        self._reporter.start(start)
        self._call("on_start", start)  # before the clock starts: it may wait for a network
        self._clock = RunClock(self._config.training, counters.elapsed_seconds)
        self._saved_seconds = counters.elapsed_seconds
        self._recorder = Recorder(self._components, self._folder, self._metrics, self._surroundings, self._clock)
        if counters.step and (reason := self._stop_reason()) not in (None, "signal"):
            self._reporter.message(_already_ended(reason, self._config))
        self._comparison = Comparison(self._components, self._folder, self._reporter, self._stop)
        if self._config.initial.model:
            with self._as_judged():
                self._comparison.before()
        recorder, saves = closing(self._recorder), closing(self._checkpoints)
        with recorder, saves, settled(), closing(self._make_batches()) as self._batches:
            while True:
                self._agree()
                reason = self._do_duties(self._stop_reason())
                if reason is not None:
                    return self._end(reason)
                self._advance()

    def _make_batches(self) -> Batches:
        components = self._components
        schedule = getattr(getattr(self._config, "data", None), "length_schedule", ())
        by_clock = self._config.training.max_minutes and schedule  # the time of a later step is not known
        ahead = 0 if by_clock else policy.steps_made_ahead(components.device)
        return Batches(components.stream, self._clock.progress, components.device, ahead)

    def _describe_start(self) -> RunStart:
        components, config = self._components, self._config
        return RunStart(
            run_dir=self._folder.path,
            device=str(components.device),
            precision=config.precision,
            num_parameters=sum(parameter.numel() for parameter in components.model.parameters()),
            data="\n".join([components.objective.describe(), *components.notes]),
            step=components.counters.step,
            max_steps=config.training.max_steps,
            max_minutes=config.training.max_minutes,
            config=to_plain(config),
        )

    def _call(self, event: str, report: RunStart | CheckpointReport | TrainResult) -> None:
        """Call the callbacks of the main rank while the others wait, however long it takes."""
        self._callbacks.call(event, report)
        self._group.meet()

    def _agree(self) -> None:
        """Synchronise the stop flags and the clock of all ranks until the next call, so that all decide the same."""
        self._callback_stops = self._callbacks.wants_stop
        if self._group.is_alone:
            return
        asked = self._stop.signal_number if self._stop else 0
        mine = self._clock.measured() if self._group.is_main else 0.0
        number, elapsed, stops = self._group.highest([asked or 0, mine, self._callback_stops])
        self._callback_stops = bool(stops)
        if number:
            self._stop.stop(int(number))
            self._asked_to_stop = True
        self._clock.agree(elapsed)

    def _is_asked_to_stop(self) -> bool:
        return bool(self._stop) if self._group.is_alone else self._asked_to_stop

    def _stop_reason(self) -> StopReason | None:
        counters, training = self._components.counters, self._config.training
        patience = self._config.validation.patience
        if training.max_steps and counters.step >= training.max_steps:
            return "steps"
        if self._clock.is_over():
            return "minutes"
        if patience and counters.num_worse >= patience:
            return "patience"
        if self._callback_stops:
            return "callback"
        return "signal" if self._is_asked_to_stop() else None

    def _do_duties(self, reason: StopReason | None) -> StopReason | None:
        """Do the work that is due after a step; all of it if the run ends here.

        Returns: the reason to stop now, which a signal or a validation may have changed.
        """
        counters = self._components.counters
        ends = reason not in (None, "signal")
        if ends:
            self._recorder.flush(self._rate(counters.step))
        if not self._validate_if_due(ends):
            reason, ends = "signal", False
        reason = reason or self._stop_reason()
        training = self._config.training
        due = reason is not None or counters.best_step == counters.step
        due = due or self._is_due(training.save_every, training.save_every_minutes, self._saved_seconds)
        self._tell_saved(wait=due)
        if due and not self._checkpoints.is_saved():
            self._reporter.doing(f"saving step {counters.step}")
            # A validation may have followed the step.
            counters.elapsed_seconds = self._saved_seconds = self._clock.elapsed()
            self._recorder.catch_up()
            self._checkpoints.save(must=reason is not None)
            if not self._judge:
                self._checkpoints.save_model()
            self._tell_saved(wait=False)
        return reason

    def _tell_saved(self, *, wait: bool) -> None:
        report = self._checkpoints.ended(wait=wait)
        if report is not None:
            self._call("on_checkpoint", report)

    def _is_due(self, every_steps: int, every_minutes: float, since: float) -> bool:
        """Return whether work is due at this step. since: when it was last done, in seconds of the run."""
        if every_steps and self._components.counters.step % every_steps == 0:
            return True
        return bool(every_minutes) and self._clock.elapsed() - since >= 60 * every_minutes

    def _validate_if_due(self, ends: bool) -> bool:
        """Validate if it is due at this step and not done yet. Returns: False if a signal interrupted it."""
        counters, validation = self._components.counters, self._config.validation
        due = ends or self._is_due(validation.every_steps, validation.every_minutes, counters.validated_seconds)
        if not (due and self._judge and counters.validated_step < counters.step):
            return True
        components = self._components
        self._reporter.doing(f"validation at step {counters.step}")
        with self._as_judged(), _explained_memory(components.objective, "validation"):
            report = self._judge.run(counters.step)
        score = None if report is None else report.merit(validation.best_by)
        if not self._group.is_alone:
            self._agree()
            # The main rank's score counts: others can differ in the last digit, and all must decide the same.
            scores = self._group.exchange(score)
            score = None if None in scores else scores[0]
        if report is None or score is None:
            return False
        best = math.isfinite(score) and (counters.best_score is None or score < counters.best_score)
        if best:
            counters.best_score, counters.best_step = score, counters.step
            self._reporter.doing(f"saving the model of step {counters.step}")
            self._checkpoints.save_model()
        counters.num_worse = 0 if best else counters.num_worse + 1
        counters.validated_step = counters.step
        if validation.every_minutes:
            counters.validated_seconds = self._clock.elapsed()
        self._last_validation = replace(report, best=best)
        self._recorder.validation(self._last_validation)
        return True

    def _as_judged(self) -> AbstractContextManager[None]:
        """Within the block, use the whole model with the weights to validate: the averaged ones if there are any."""
        average, parallel_model = self._components.average, self._components.parallel_model
        if parallel_model.is_sharded:
            parallel_model.gather(None if average is None else average.tensors)
            return nullcontext()
        return nullcontext() if average is None else average.applied()

    def _rate(self, step: int) -> float:
        return learning_rate(
            self._config.schedule,
            peak=self._config.optimiser.learning_rate,
            d_model=self._components.objective.model_config.d_model,
            step=step,
            progress=self._clock.progress(step),
        )

    def _advance(self) -> None:
        """One optimiser step."""
        components = self._components
        counters = components.counters
        step = counters.step + 1
        rate = self._rate(step)
        self._recorder.begin(step)
        if counters.row == 0:
            components.memory.forget()
        self._group.doing(f"at step {step}")
        batches = self._batches.at(counters.epoch, counters.row, counters.step)
        with _explained_memory(components.objective, _sizes(step, batches)):
            result = self._train_step.run(batches, step, rate)
        if result.fault is not None:
            self._check_skip(result.fault)
        counters.step = step
        num_rows = components.stream.rows(counters.epoch)
        counters.epoch, counters.row = next_position(counters.epoch, counters.row, num_rows)
        counters.elapsed_seconds = self._clock.elapsed()
        if result.fault is not None:
            counters.skipped += 1
            self._recorder.skipped(result.fault)
            return
        counters.skipped = 0
        if components.average is not None:
            components.average.update(step)
        self._recorder.step(result, rate)

    def _check_skip(self, fault: Fault) -> None:
        """Raise an error before the update unless it may be skipped; write the sample ids to a file in either case."""
        training, skipped = self._config.training, self._components.counters.skipped
        where = self._recorder.dump(fault)
        if training.on_nonfinite == "stop" or skipped >= training.max_skips:
            also = f" The {skipped} updates before it were skipped." if skipped else ""
            raise NonFiniteError(
                f"{fault}{also} Nothing was updated and the last checkpoint is intact; {where}."
                " Try a lower learning rate, a longer warm-up, optimiser.clip_norm, or training.on_nonfinite skip."
            )

    def _end(self, reason: StopReason) -> TrainResult:
        counters, folder = self._components.counters, self._folder
        self._reporter.doing("drawing the learning curve")
        plots = self._recorder.draw() if counters.step else ()
        compared = self._comparison.after() if self._config.initial.model and reason != "signal" else ()
        result = TrainResult(
            run_dir=folder.path,
            step=counters.step,
            epoch=counters.epoch,
            tokens=counters.tokens,
            elapsed_seconds=counters.elapsed_seconds,
            stopped_by=reason,
            signal_number=self._stop.signal_number if reason == "signal" else None,
            checkpoint=self._checkpoints.last,
            model_dir=folder.model if folder.model.is_dir() else None,
            best_step=counters.best_step,
            best_score=counters.best_score,
            next_command=self._components.objective.next_command,
            best_by=self._config.validation.best_by,
            of_the_first=getattr(self._judge, "of_the_first", None),  # of judges that can score a part
            last_validation=self._last_validation,
            plots=plots,
            compared=compared,
        )
        self._call("on_end", result)
        self._reporter.done(result)
        return result


def _moved(folder: Path) -> str:
    """Return what to tell about an earlier run that was set aside."""
    return f"The files of an earlier run are now in {folder}."


def _already_ended(reason: StopReason | None, config: RunConfig) -> str:
    """Return what to tell about a resumed run that has reached its end."""
    name, limit = {
        "steps": ("training.max_steps", config.training.max_steps),
        "minutes": ("training.max_minutes", config.training.max_minutes),
    }.get(reason or "", ("validation.patience", config.validation.patience))
    return (
        f"nothing is left to train, because {name} is {limit:g}. A higher --{name} continues this run, --resume none"
        " begins it again"
    )


def _sizes(step: int, batches: Sequence[Batch]) -> str:
    """Describe the size of a step for messages about memory."""
    largest = max(batches, key=lambda batch: batch.size, default=None)
    return f"step {step}" + ("" if largest is None else f", whose largest part is {largest.describe()}")


@contextmanager
def _explained_memory(objective: Objective, what: str) -> Iterator[None]:
    """Convert an out-of-memory error into one that tells the user how to reduce memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).split("\n")[0][:200]
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"There was not enough memory for {what} {objective.lighter()} The last checkpoint is intact"
            f" ({text or 'out of memory'})."
        ) from error
