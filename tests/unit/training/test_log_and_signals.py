"""The parts around the loop: metrics file, plain reporter, signals, presets, run folder."""

import io
import os
import signal
import subprocess
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from manyheads.catalogue import PRESETS
from manyheads.config.files import to_plain
from manyheads.errors import CheckpointError, ConfigError
from manyheads.training.record.log import MetricsLog, PlainReporter, TensorBoardLogger, format_seconds
from manyheads.training.record.report import RunStart, Sample, TrainResult, ValidationReport
from manyheads.training.run.clock import StopFlag, catch_signals
from manyheads.training.run.resume import RunFolder, check_same_run, differences
from manyheads.training.run.state import Counters
from manyheads.training.settings import RunConfig, TrainingSettings


def test_metrics_are_cut_back_to_what_a_checkpoint_knows(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 0.1 + 0.2, "text": "é\u2028"})
    size = log.num_bytes()
    whole = log.path.read_bytes()
    assert size == len(whole)
    log.append({"step": 2, "loss": float("nan")})
    assert b'"loss": null' in log.path.read_bytes()
    assert log.cut(size)
    assert log.path.read_bytes() == whole
    assert not log.cut(size + 1)
    assert log.cut(0)
    assert log.path.read_bytes() == b""


def test_plain_lines() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    sample = Sample(source="a\nb", text="\x00 \u00a0é\x1b[1m", reference="r")
    reporter.validation(
        ValidationReport(step=5, loss=1.5, bleu=12.345, chrf=30.0, bleu_signature="sig", best=True,
                         samples=(sample,))
    )  # fmt: skip
    reporter.message("careful", "warning")
    lines = stream.getvalue().split("\n")
    assert lines[0] == "validation at step 5 | nll 1.5000 | perplexity 4.48 | BLEU 12.35 | chrF 30.00 | best so far"
    assert lines[1] == "  BLEU sig"
    assert lines[2] == "  source      a\\nb"
    assert lines[4] == "  translation \\x00 \u00a0é\\x1b[1m"
    assert lines[-2] == "warning: careful"
    assert [format_seconds(value) for value in (4.4, 59.6, 200, 7400)] == ["4s", "1:00", "3:20", "2:03:20"]


@pytest.mark.parametrize(
    ("best_by", "score", "shown"),
    [
        ("loss", 1.25, "; best: step 1,200, validation loss 1.2500"),
        ("bleu", -41.37, "; best: step 1,200, BLEU 41.37"),
        ("f1", -44.71, "; best: step 1,200, F1 44.71"),
        ("f1", None, ""),
    ],
)
def test_the_last_line_names_the_best_as_users_know_it(tmp_path, best_by, score, shown):
    stream = io.StringIO()
    result = TrainResult(
        run_dir=tmp_path, step=2000, epoch=3, tokens=1, elapsed_seconds=200.0, stopped_by="minutes",
        signal_number=None, checkpoint=None, model_dir=None, best_step=None if score is None else 1200,
        best_score=score, best_by=best_by,
    )  # fmt: skip
    PlainReporter(stream).done(result)
    assert stream.getvalue() == f"ended at step 2000 after 3:20 (time is up){shown}\n"


def test_a_signal_sets_the_flag_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    flag = StopFlag()
    with catch_signals(flag):
        assert not flag
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before

    def elsewhere() -> None:
        with catch_signals(StopFlag()):
            pass

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_ends_the_process_at_once(number: signal.Signals, code: int, warm_program: list[str]) -> None:
    program = (
        "import os, time\nfrom manyheads.training.run.clock import *\nflag = StopFlag()\nwith catch_signals(flag):\n"
        f"  os.kill(os.getpid(), {int(number)}); print(bool(flag), flush=True)\n"
        f"  os.kill(os.getpid(), {int(number)}); time.sleep(600)\n"
    )
    done = subprocess.run([*warm_program, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert done.stdout == "True\n"
    assert done.stderr == ""


def test_a_closed_terminal_sets_the_flag_unless_it_is_ignored() -> None:
    for before, expected in ((signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, None)):
        kept = signal.signal(signal.SIGHUP, before)
        try:
            with catch_signals(StopFlag()) as flag:
                os.kill(os.getpid(), signal.SIGHUP if expected else 0)
                assert flag.signal_number == expected
                assert expected or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGHUP) is before
        finally:
            signal.signal(signal.SIGHUP, kept)


def test_the_second_signal_says_what_is_saved(tmp_path: Path, warm_program: list[str]) -> None:
    folder = RunFolder(tmp_path)
    assert "nothing is saved yet" in folder.last_words()
    (folder.checkpoints / "step-00000010").mkdir(parents=True)
    program = (
        "import os, pathlib\nfrom manyheads.training.run.clock import *\n"
        "from manyheads.training.run.resume import RunFolder\n"
        f"with catch_signals(StopFlag(), last_words=RunFolder(pathlib.Path({str(tmp_path)!r})).last_words):\n"
        "  os.kill(os.getpid(), 2); os.kill(os.getpid(), 2)\n"
    )
    done = subprocess.run([*warm_program, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 130
    assert f"saved is {folder.checkpoints / 'step-00000010'}" in done.stderr


def test_counters_survive_json_and_refuse_strangers() -> None:
    counters = Counters(step=3, window_loss=0.1, best_score=1 / 3)
    assert Counters.from_json(asdict(counters)) == counters
    record = asdict(counters)
    for wrong in ({**record, "more": 1}, {**record, "step": "3"}, {**record, "step": None}, None, []):
        with pytest.raises(CheckpointError):
            Counters.from_json(wrong)


def test_differences_name_the_leaves() -> None:
    before, now = {"a": 1, "b": {"c": [1], "d": None}}, {"a": 1, "b": {"c": [2]}, "e": 0}
    assert [text for _, text in differences(before, now)] == ["b.c was [1], is [2]", "e was None, is 0"]


def test_a_setting_that_an_older_run_lacks_had_its_default() -> None:
    config = RunConfig()
    old = to_plain(config)
    del old["training"]["plain"], old["training"]["log_every"], old["initial"]
    old["training"]["r_drop"] = 0.0
    assert differences(old, config) == []
    on = RunConfig(training=TrainingSettings(plain=True, log_every=7))
    texts = ["training.log_every was 50, is 7", "training.plain was False, is True"]
    assert [text for _, text in differences(old, on)] == texts
    old["training"]["r_drop"] = 5.0
    assert [text for _, text in differences(old, config)] == ["training.r_drop was 5.0, is None"]


def test_another_architecture_is_told_in_a_word() -> None:
    """And not by the forty settings that differ with it; what else is another still is."""
    before = {"seed": 1, "model": {"architecture": "transformer", "norm": "layer", "bias": True}}
    now = {"seed": 2, "model": {"architecture": "reformer-seq2seq", "chunk_len": 64}}
    digests = {"data_digest": "a", "tokenizer_digest": "b"}
    scalars = {"config": before, **digests}
    with pytest.raises(ConfigError) as error:
        check_same_run(scalars, config=now, **digests)
    said = str(error.value)
    assert "model.architecture was 'transformer', is 'reformer-seq2seq'; seed was 1, is 2." in said
    assert "choose another run_dir" in said
    assert "begin a new run from its model with them: --init THIS_RUN --run-dir NEW" in said
    for name in ("norm", "bias", "chunk_len"):
        assert name not in said


def test_the_main_data_of_a_mix_stays() -> None:
    """It determines the steps of an epoch; of a run on one data set, the folder can have another name."""
    digests = {"data_digest": "a", "tokenizer_digest": "b"}
    for mix, may in (([], True), (["old=1", "new=1"], False)):
        before, now = ({"data": {"path": path, "mix": mix}} for path in ("old", "new"))
        with nullcontext() if may else pytest.raises(ConfigError, match=r"data\.path was 'old', is 'new'"):
            assert check_same_run({"config": before, **digests}, config=now, **digests)


def test_presets_are_what_they_cite() -> None:
    made: dict[str, Any] = {name: make() for name, make in PRESETS.items()}
    language = {"lm-demo", "xl-debug", "xl-demo", "reformer-debug", "reformer-demo", "duplication"}
    papers = {"vanilla-lm", "vanilla-lm-64", "million", "enwik8", "imagenet64"}
    classes = {"classifier-debug", "classifier-demo", "reformer-classifier-demo"}
    trees = {"chart-debug", "chart-parser"}
    assert set(made) == {"debug", "copy", "demo", "sample", "tiny", "base", "big", *language, *papers, *classes, *trees}
    assert made["copy"].training.label_smoothing == 0
    tiny = made["tiny"]
    assert (tiny.optimiser.learning_rate, tiny.schedule.warmup_steps, tiny.data.max_tokens) == (0.005, 2000, 8192)
    assert (tiny.tokenizer.vocab_size, tiny.training.max_steps, tiny.decoding.num_beams) == (10_000, 8000, 5)
    base = made["base"]
    assert (base.schedule.kind, base.schedule.warmup_steps, base.training.max_steps) == ("noam", 4000, 100_000)
    assert (base.optimiser.beta1, base.optimiser.beta2, base.optimiser.eps) == (0.9, 0.98, 1e-9)
    assert (made["big"].model.dropout, made["big"].training.max_steps) == (0.3, 300_000)
    assert len({config.run_dir for config in made.values()}) == len(made)


def test_tensorboard_shows_the_steps_of_a_run_that_began_again_once(tmp_path: Path) -> None:
    """It was killed before its first checkpoint."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for loss in (2.0, 1.0):
        board = TensorBoardLogger()
        board.on_start(
            RunStart(
                run_dir=tmp_path, device="cpu", precision="fp32", num_parameters=1, data="", step=0, max_steps=1,
                max_minutes=0.0,
            )
        )  # fmt: skip
        board.on_log({"step": 1, "loss": loss})
        board.close()
        # TensorBoard reads files in the order of their names: whole seconds, host, process, files the process wrote.
        # A new run is another second; within one, "10" would come before "9".
        time.sleep(1)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [1.0]


def test_a_lock_outlives_nobody(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / ".lock").write_text("1\n", encoding="utf-8")  # process 1 lives, but does not hold the lock
    with folder.locked():
        assert (tmp_path / ".lock").read_text(encoding="utf-8").split()[0] == str(os.getpid())
    with folder.locked():
        pass
