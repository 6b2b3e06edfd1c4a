"""Trains the run folders named on standard input, each in a child process that can be killed.

Forking from a process that has imported torch saves two seconds a trial; the child is killed like any other process.
Lines in: run folders, or `FOLDER<tab>N`: then the child kills itself right before its N-th operation on the disk below
that folder. Lines out: the child's process id, then, once it is gone, its exit status. Beside the run folder,
FOLDER.step holds the last step that was done, FOLDER.last the operation before which the child killed itself.
"""

import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from file_operations import REAL_OPEN, Operation, Watch
from preloading import preload
from tiny_run import TINY_REFORMER, TINY_TEXT

import manyheads.training.run.loop
from manyheads.data.settings import DataSettings
from manyheads.decoding.settings import DecodingSettings
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.kernels import policy
from manyheads.tasks.language_modelling.settings import TextValidationSettings
from manyheads.tasks.translation.settings import TrainConfig, ValidationSettings
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import OptimiserSettings, RunConfig, ScheduleSettings, TrainingSettings

STEP_SECONDS = 0.012  # so slow that a random moment falls into steps as well as into saves


class Slow:
    """A reporter that notes every step, and makes it last."""

    def __init__(self, run_dir: str, seconds: float) -> None:
        self._seconds = seconds
        self._file = os.open(f"{run_dir}.step", os.O_WRONLY | os.O_CREAT)

    def step(self, report: Any) -> None:
        os.pwrite(self._file, f"{report.step:8d}".encode(), 0)
        time.sleep(self._seconds)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def config(run_dir: str) -> RunConfig:
    """Of a language model where the folder is called text-... or reformer-..., else of a translator.

    In a folder beside-... a thread writes the checkpoints.
    """
    kinds = {"text": TINY_TEXT, "reformer": TINY_REFORMER}
    text = kinds.get(Path(run_dir).name.partition("-")[0])
    if text is not None:
        training = replace(text.training, max_steps=60, log_every=3, save_every=5)
        return replace(
            text,
            run_dir=run_dir,
            schedule=ScheduleSettings(kind="cosine", warmup_steps=10),
            training=training,
            validation=TextValidationSettings(every_steps=12, sample_tokens=6, patience=20),
        )
    return TrainConfig(
        precision="fp32",
        run_dir=run_dir,
        num_threads=1,
        data=DataSettings(
            path="copy-task", max_tokens=256, max_source_len=16, max_target_len=16, accumulate=2, num_train_pairs=300
        ),
        tokenizer=TokenizerSettings(kind="word", vocab_size=32),
        model=TransformerConfig(
            d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1, num_decoder_layers=1, dropout=0.2
        ),
        optimiser=OptimiserSettings(learning_rate=3e-3, clip_norm=1.0, weight_decay=0.01, name="adamw"),
        schedule=ScheduleSettings(kind="cosine", warmup_steps=10),
        training=TrainingSettings(
            max_steps=60, log_every=3, save_every=5, keep=2, ema_decay=0.9, plots=False, tensorboard=False
        ),
        validation=ValidationSettings(every_steps=12, bleu_sentences=4, num_samples=2, patience=20),
        decoding=DecodingSettings(num_beams=2, max_len_offset=5),
    )


def kill_before(run_dir: str, number: int) -> Watch:
    """Ends this process, as a kill would, right before its operation `number` below the run's folder."""

    def before(count: int, operation: Operation) -> None:
        if count == number:
            note(f"{run_dir}.last", f"{operation.kind} {operation.path.relative_to(run_dir)}")
            os.kill(os.getpid(), signal.SIGKILL)

    return Watch(Path(run_dir), before)


def note(path: str, text: str) -> None:
    with REAL_OPEN(path, "w", encoding="utf-8") as file:
        file.write(text)


def serve() -> None:
    preload()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_dir, _, number = line.strip().partition("\t")
            if Path(run_dir).name.startswith("beside"):
                policy.writes_beside = lambda device: True  # type: ignore[assignment]
            with kill_before(run_dir, int(number)) if number else nullcontext():
                reporter = Slow(run_dir, 0 if number else STEP_SECONDS)
                result = manyheads.training.run.loop.train(config(run_dir), resume="auto", reporter=reporter)
            os._exit(0 if result.stopped_by == "steps" else 128 + (result.signal_number or 0))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
