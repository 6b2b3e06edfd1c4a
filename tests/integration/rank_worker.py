"""Runs jobs on several ranks, each in a process forked from this one, which has imported torch before.

Lines in: JSON `{"world": 2, "job": "steps", ...}`. Lines out: JSON, a list of what each rank's job returned, or
`{"error": ...}` in the place of one that raised.
"""

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from preloading import preload
from tiny_run import TINY, TINY_REFORMER, TINY_TEXT, changed

from manyheads.checkpoint.format import save_checkpoint
from manyheads.data.sampler import next_position
from manyheads.distributed.group import Group
from manyheads.distributed.launch import start
from manyheads.distributed.process import this_process
from manyheads.distributed.wrap import whole
from manyheads.errors import SaveError
from manyheads.models.pretrained import portable_state
from manyheads.tasks.translation.objective import Validator
from manyheads.training.record.log import MetricsLog
from manyheads.training.record.report import ValidationReport
from manyheads.training.run.checkpoints import CheckpointManager
from manyheads.training.run.components import RunComponents, assemble
from manyheads.training.run.device import resolve_precision
from manyheads.training.run.loop import train
from manyheads.training.run.resume import RunFolder
from manyheads.training.run.state import gather

CONFIGS = {"transformer": TINY, "xl": TINY_TEXT, "reformer": TINY_REFORMER}
TIMEOUT = 60.0


def config_of(job: dict[str, Any]) -> Any:
    """A tiny run of the named kind; `dropout` false takes all of it away, `sections` change anything."""
    config = CONFIGS[job["kind"]]
    if not job.get("dropout", True):
        config = changed(config, model={"dropout": 0.0, "attention_dropout": 0.0})
    config = changed(config, **job.get("sections", {}))
    config = changed(config, training={"parallel": job.get("parallel", "ddp")})
    return replace(config, run_dir=job["run_dir"])


def advance(components: RunComponents, steps: int) -> list[list[float]]:
    """Take steps as the loop does; losses and norms."""
    train_step, counters, found = components.train_step(), components.counters, []
    for _ in range(steps):
        if counters.row == 0:
            components.memory.forget()
        counters.step += 1
        batches = components.stream.at(counters.epoch, counters.row)
        result = train_step.run(batches, counters.step, 3e-3)
        assert result.fault is None, result.fault
        if components.average is not None:
            components.average.update(counters.step)
        num_rows = components.stream.rows(counters.epoch)
        counters.epoch, counters.row = next_position(counters.epoch, counters.row, num_rows)
        found.append([result.loss_sum / result.num_tokens, result.grad_norm])
    return found


def precision(job: dict[str, Any], group: Group) -> Any:
    """What `auto` becomes on each rank, where the main one finds bf16 faster and the others fp32."""
    os.environ["MANYHEADS_PRECISION"] = "bf16" if group.is_main else "fp32"
    return resolve_precision(config_of(job), torch.device("cpu"), group=group).precision


def steps(job: dict[str, Any], group: Group) -> Any:
    """Losses and gradient norms of some steps, and a digest of the weights after them."""
    if job.get("float64", True):
        torch.set_default_dtype(torch.float64)
    components = assemble(config_of(job), torch.device("cpu"), Path(job["run_dir"]) / "data", group)
    losses = advance(components, job["steps"])
    weights = {name: whole(tensor) for name, tensor in portable_state(components.parallel_model.trained).items()}
    return {"losses": losses, "weights": float(sum(tensor.double().sum() for tensor in weights.values()))}


def resharded(job: dict[str, Any], group: Group) -> Any:
    """Restore a checkpoint if there is one, take steps, save; then all tensors, whole, go to a file beside it."""
    config = config_of(job)
    folder = RunFolder(Path(job["run_dir"]))
    if group.is_main:
        folder.create()
    group.meet()
    components = assemble(config, torch.device("cpu"), folder.data, group)
    checkpoints = CheckpointManager(components, folder, MetricsLog(folder.metrics), lambda text: None)
    checkpoints.resume("auto")
    losses = advance(components, job["steps"])
    components.counters.step += job["steps"] == 0
    checkpoints.save(must=True)
    tensors = gather(
        components.parallel_model.trained, components.optimiser, components.average, components.memory, group
    )
    full = {stem: {name: whole(one) for name, one in found.items()} for stem, found in tensors.items()}
    if group.is_main:
        save_checkpoint(Path(job["whole"]), components.counters.step, full, {})
    return {"losses": losses, "step": components.counters.step, "checkpoint": str(checkpoints.last)}


def run(job: dict[str, Any], group: Group) -> Any:
    """A whole run."""
    result = train(config_of(job), resume=job.get("resume", "auto"), group=group)
    return {"step": result.step, "stopped_by": result.stopped_by}


def judged_apart(job: dict[str, Any], group: Group) -> Any:
    """A whole run whose ranks compute losses that differ in the last digit, as different processors do."""

    def judge(self: Validator, step: int) -> ValidationReport:
        return ValidationReport(step=step, loss=2.0 if group.is_main or step > 3 else 2.0000001)

    Validator.run = judge  # type: ignore[method-assign]
    result = train(config_of(job), group=group)
    return {"step": result.step, "stopped_by": result.stopped_by, "best_step": result.best_step}


def full_disk(job: dict[str, Any], group: Group) -> Any:
    """A whole run whose main rank cannot write metrics when it saves for the first time."""
    measure, failures = MetricsLog.num_bytes, iter([True])

    def num_bytes(self: MetricsLog) -> int:
        if next(failures, False):
            raise SaveError("metrics.jsonl could not be written: no space is left.")
        return measure(self)

    MetricsLog.num_bytes = num_bytes  # type: ignore[method-assign]
    return run(job, group)


class Stopping:
    """Keeps what it is called with; ends the run after step 4, or raises there."""

    def __init__(self, raises: bool) -> None:
        self.raises, self.got = raises, list[str]()

    def on_start(self, report: Any) -> None:
        self.got.append(f"start {report.step}")

    def on_step(self, report: Any) -> str | None:
        self.got.append(f"step {report.step}")
        if self.raises and report.step == 4:
            raise ValueError("no such luck")
        return "stop" if report.step == 4 else None

    def on_checkpoint(self, report: Any) -> None:
        self.got.append(f"checkpoint {report.step}")

    def on_end(self, report: Any) -> None:
        self.got.append(f"end {report.step}")


def called(job: dict[str, Any], group: Group) -> Any:
    """A whole run with a callback on each rank: what it gave, and what this rank's callback was called with."""
    stopping = Stopping(job["raises"])
    result = train(config_of(job), group=group, callbacks=[stopping])
    return {"step": result.step, "stopped_by": result.stopped_by, "got": stopping.got}


def same(job: dict[str, Any], group: Group) -> Any:
    """The exchanges of a group."""
    part = torch.full((group.rank, 2), float(group.rank)) if group.rank else None
    return {
        "sum": group.sum(torch.tensor([1.0, float(group.rank)])).tolist(),
        "highest": group.highest([float(group.rank), 7.0]),
        "joined": group.joined(part, rows=sum(range(group.world))).tolist(),
        "exchange": group.exchange({"rank": group.rank}),
        "word": [group.from_main(lambda: f"of {group.rank}") for _ in range(30)][-1],
    }


JOBS: dict[str, Callable[[dict[str, Any], Group], Any]] = {
    "precision": precision,
    "steps": steps,
    "resharded": resharded,
    "run": run,
    "same": same,
    "judged apart": judged_apart,
    "full disk": full_disk,
    "called": called,
}


def _as_rank(job: dict[str, Any], rank: int, port: int, pipe: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world"], "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}})
    try:
        group = start(this_process(), timeout=job.get("timeout", TIMEOUT))
        with group.guarding():
            answer: Any = JOBS[job["job"]](job, group)
        group.close()
    except BaseException as error:
        if job.get("verbose"):
            traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(pipe, "w") as file:
        file.write(json.dumps(answer))
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    torch.set_num_threads(1)
    preload()
    for line in sys.stdin:
        job = json.loads(line)
        port, pipes = _free_port(), []
        for rank in range(job["world"]):
            read, write = os.pipe()
            if os.fork() == 0:
                os.close(read)
                _as_rank(job, rank, port, write)
            os.close(write)
            pipes.append(read)
        answers = []
        for read in pipes:
            with os.fdopen(read) as file:
                answers.append(json.loads(file.read() or '{"error": "the process ended without a word"}'))
        for _ in pipes:
            os.wait()
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
