"""`manyheads train`: what it makes of its arguments, what it says, how it ends."""

import io
import json
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from manyheads.catalogue import PRESETS
from manyheads.cli.command_line.parsing import program
from manyheads.cli.commands.train import read_arguments
from manyheads.cli.watching.training import LiveReporter, summary, train_and_watch
from manyheads.config.files import dotted_names
from manyheads.distributed.process import Process
from manyheads.errors import ConfigError
from manyheads.files.verify import FORMAT_VERSION
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.record.report import RunStart, Sample, StepReport, TrainResult, ValidationReport

SHORT = ("--training.max_steps", "4", "--validation.bleu_sentences", "2", "--training.plots", "false")


def mistakes(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_arguments(arguments)
    return str(caught.value).split("\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_settings_may_come_from_a_pipe_that_the_user_names(tmp_path: Path) -> None:
    """As in `--config <(command)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("seed: 17\n",), daemon=True)
    writer.start()
    assert read_arguments(["--config", str(pipe)])[1].seed == 17


def test_a_restart_resumes_what_was_named_until_the_run_has_a_checkpoint(tmp_path, monkeypatch):
    """Otherwise a run that begins from a checkpoint of another one would begin with random weights."""
    seen: list[str] = []
    monkeypatch.setattr("manyheads.training.run.loop.train", lambda config, *, resume, **_: seen.append(resume))
    config = replace(PRESETS["debug"](), run_dir=str(tmp_path))
    for named in ("none", "other/step-00000010"):
        train_and_watch(config, named, Process(restarts=1), quiet=True)
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)
    train_and_watch(config, "other/step-00000010", Process(restarts=1), quiet=True)
    assert seen == ["auto", "other/step-00000010", "auto"]


def test_layers_win_in_their_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("model: {dropout: 0.2, num_heads: 2}\nseed: 5\n", encoding="utf-8")
    second.write_text("seed: 6\n", encoding="utf-8")
    options, config = read_arguments(
        ["--preset", "debug", "--config", str(first), "--config", str(second), "--model.num-heads=8",
         "-q", "--minutes", "1.5", "--run-dir", "x"]
    )  # fmt: skip
    assert options.quiet
    assert not options.verbose
    assert (config.model.dropout, config.model.num_heads, config.seed) == (0.2, 8, 6)
    assert (config.model.d_model, config.training.max_steps) == (32, 20)
    assert config.training.max_minutes == 1.5
    assert config.run_dir == "x"


def test_every_preset_can_be_printed_and_read_back(manyheads, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MANYHEADS_PRECISION", "bf16")  # which the presets take for granted, unless told otherwise
    monkeypatch.chdir(tmp_path)  # where no run is to be resumed
    for name, make in PRESETS.items():
        assert manyheads("train", "--preset", name, "--print-config") == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        (tmp_path / "printed.yaml").write_text(shown.out, encoding="utf-8")
        assert read_arguments(["--config", str(tmp_path / "printed.yaml")])[1] == make()


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model:\n  dmodel: 3\n", encoding="utf-8")
    text = mistakes("--preset", "debug", "--config", str(tmp_path / "bad.yaml"), "--minutes", "x", "--verbos",
                    "--optimiser.name", "sgd")  # fmt: skip
    joined = "\n".join(text)
    for expected in (
        "There is no option --verbos. Did you mean --verbose?",
        "minutes is 'x'",
        f"{tmp_path / 'bad.yaml'}, line 2: there is no setting model.dmodel. Did you mean model.d_model?",
        "the command line: optimiser.name is 'sgd'; choose one of: adam, adamw",
    ):
        assert expected in joined


def test_a_removed_setting_is_taken_at_its_neutral_value() -> None:
    for value in ("0", "0.0"):
        _, config = read_arguments(["--preset", "debug", "--training.r_drop", value])
        assert config == read_arguments(["--preset", "debug"])[1]
    said = "the command line: training.r_drop is '5', but it is no longer there; set it to 0.0, or leave it out."
    assert mistakes("--preset", "debug", "--training.r-drop", "5") == [said]
    assert any("There is no option --optimiser.r-drop" in one for one in mistakes("--optimiser.r_drop", "0"))


def test_adam_does_not_take_the_weight_decay_of_muon(tmp_path: Path) -> None:
    [said] = mistakes("--preset", "demo", "--optimiser.name", "adam")
    assert said.startswith("optimiser.name is adam (the command line), but optimiser.weight_decay 0.1 (preset demo) is")
    (tmp_path / "mine.yaml").write_text("optimiser:\n  name: adam\n", encoding="utf-8")
    [said] = mistakes("--preset", "demo", "--config", str(tmp_path / "mine.yaml"))
    assert f"adam ({tmp_path / 'mine.yaml'}, line 2)" in said
    for more in (("adamw",), ("adam", "--optimiser.weight_decay", "0"), ("adam", "--optimiser.weight_decay", "0.01")):
        config = read_arguments(["--preset", "demo", "--optimiser.name", *more])[1]
        assert config.optimiser.name == more[0]
    assert read_arguments(["--preset", "xl-demo", "--optimiser.name", "adam"])[1].optimiser.weight_decay == 0


def test_an_unknown_preset_brings_no_other_mistakes() -> None:
    assert mistakes("--preset", "dbug", "--model.num_heads", "3") == [
        f"there is no preset 'dbug'; there are: {', '.join(PRESETS)}. Did you mean debug?"
    ]
    assert mistakes("--preset") == ["--preset needs a value."]
    assert "contradict" in mistakes("--preset", "debug", "-q", "-v")[0]


def test_a_presets_number_of_pairs_is_about_its_own_data(tmp_path: Path) -> None:
    """The debug preset makes 500 pairs of the copy task; of a user's own data it takes all, unless told otherwise."""
    file = tmp_path / "mine.yaml"
    file.write_text("data: {path: data/mine}\n", encoding="utf-8")
    own = PRESETS["debug"]().data.num_train_pairs
    assert own == 500
    for arguments, expected in (
        ([], own),
        (["--data.path", "copy-task"], own),
        (["--data.path", "data/mine"], 0),
        (["--config", str(file)], 0),
        (["--config", str(file), "--data.path", "copy-task"], own),
        (["--config", str(file), "--data.num_train_pairs", "7"], 7),
        (["--data.path", "embedded:tatoeba-en-de", "--data.num_train_pairs", "7"], 7),
    ):
        assert read_arguments(["--preset", "debug", *arguments])[1].data.num_train_pairs == expected, arguments


def test_the_opening_lines_say_what_is_not_used(manyheads, tmp_path, capsys):
    """Once for pairs, once for a text: counts, the setting, the remedy."""
    few = ("--training.max_steps", "1", "--training.plots", "false")
    pairs = ("--data.path", "embedded:tatoeba-en-de", "--data.num_train_pairs", "200", "--tokenizer.vocab_size", "300",
             "--tokenizer.kind", "bpe", "--data.max_target_len", "24", "--validation.bleu_sentences", "1")  # fmt: skip
    assert manyheads("train", "--preset", "debug", "--run-dir", tmp_path / "a", *few, *pairs) == 0
    shown = capsys.readouterr().err
    found = re.search(
        r"(\d+) of 200 training pairs kept, (\d+) too long and dropped \(.*target (\d+) tokens\): (.*)", shown
    )
    assert found is not None, shown
    assert int(found[1]) + int(found[2]) == 200
    assert int(found[2]) > 0
    assert found[4] == (
        f"data.max_target_len is 24, {found[3]} would drop none. Only the first 200 of 60000 pairs are used, because"
        " data.num_train_pairs is 200; 0 uses all"
    )
    assert "validation translates the first 1 of 500 pairs, because validation.bleu_sentences is 1; -1" in shown
    assert manyheads("train", "--preset", "xl-debug", "--run-dir", tmp_path / "b", *few) == 0
    shown = capsys.readouterr().err
    assert "validation reads the first 2,000 of 57,914 tokens, because reading.max_tokens is 2000; 0 reads all" in shown


def test_with_nothing_it_says_where_to_start() -> None:
    for arguments in ([], ["--run-dir", "x"]):
        text = "\n".join(mistakes(*arguments))
        assert "manyheads train --preset demo" in text
        assert "manyheads train --data.path data/mine" in text
    assert read_arguments(["--data.path", "data/mine"])[1].model == TrainConfig().model


def test_a_runs_own_settings_are_taken_when_nothing_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {d_model: 64}\ndata: {path: copy-task}\n", encoding="utf-8")
    config = read_arguments(["--run-dir", str(tmp_path), "--seed", "3"])[1]
    assert (config.model.d_model, config.data.path, config.seed) == (64, "copy-task", 3)
    assert config.run_dir == str(tmp_path)


@pytest.mark.parametrize(("kind", "rises"), [("cosine", True), ("noam", False)])
def test_a_longer_run_says_that_the_rate_goes_up_again(manyheads, tmp_path, capsys, kind, rises):
    run, schedule = tmp_path / "run", ("--schedule.kind", kind, "--schedule.warmup_steps", "1")
    options = ("--preset", "debug", "--run-dir", run, *SHORT, *schedule, "--optimiser.learning_rate", "0.003")
    assert manyheads("train", *options, "--quiet") == 0
    capsys.readouterr()
    assert manyheads("train", "--run-dir", run, "--training.max_steps", "8", "--quiet") == 0
    said = capsys.readouterr().err
    assert "training.max_steps was 4, is 8" in said
    assert ("the learning rate goes up again" in said) == rises
    if rises:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rate = {one["step"]: one["learning_rate"] for one in map(json.loads, lines) if "learning_rate" in one}
        assert f"from {rate[4]:.3g} at step 4 to {rate[5]:.3g} at step 5" in said
        assert rate[5] > rate[4]
        assert "--init THIS_RUN --run-dir NEW" in said


def test_train_then_go_on(manyheads, refused, tmp_path, capsys):
    run = tmp_path / "run"
    assert manyheads("train", "--preset", "debug", "--run-dir", run, *SHORT) == 0
    shown = capsys.readouterr()
    assert f"run      {run}\n" in shown.out
    assert "best     step 4, validation loss " in shown.out
    assert shown.out.endswith(f"next     {program()} translate {run}\n")
    assert "a new run" in shown.err
    assert "\x1b" not in shown.err  # no terminal, no colours
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["training"]["max_steps"] == 4
    assert manyheads("train", "--run-dir", run, "--training.max_steps", "6", "--quiet") == 0
    shown = capsys.readouterr()
    assert "best     step 6" in shown.out
    assert shown.err == "warning: changed since the checkpoint: training.max_steps was 4, is 6\n"
    assert manyheads("train", "--run-dir", run, "--training.max_steps", "6", "--optimiser.learning_rate", "0.01") == 2
    shown = capsys.readouterr()
    assert "optimiser.learning_rate was" in shown.err
    assert "--init THIS_RUN --run-dir NEW" in shown.err
    assert "no checkpoint 'nowhere'" in refused("train", "--preset", "debug", "--run-dir", run, "--resume", "nowhere")


def test_dry_run_leaves_nothing(printed, tmp_path):
    run = tmp_path / "run"
    shown = printed("train", "--preset", "debug", "--run-dir", run, "--dry-run")
    assert "43,392 parameters" in shown
    assert "MiB at the peak of one step" in shown
    assert re.search(r"^one step: \d+\.\d\d s, \d+\.\d\d s of processor time, loss", shown, re.MULTILINE)
    assert not run.exists()


def test_a_signal_ends_in_a_checkpoint_and_its_code(tmp_path: Path, warm_program: list[str]) -> None:
    run = tmp_path / "run"
    command = [*warm_program, "train", "--preset", "debug", "--run-dir", str(run)]
    command += ["--training.max_steps", "1000000", "--validation.every_steps", "0", "--training.tensorboard", "false"]
    command += ["--training.log_every", "2", "--training.plots", "false"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors
    assert "stopped  by SIGTERM at step " in output
    assert "Traceback" not in errors
    assert (run / "checkpoints" / "latest").exists()


def test_help_names_every_setting_and_preset(printed):
    page = printed("train", "--help")
    sections = {"data", "tokenizer", "model", "optimiser", "schedule", "training", "validation", "decoding"}
    sections |= {"initial", "data.copy_task"}
    for name in set(dotted_names(TrainConfig)) - sections - {"model.attention.kind"}:
        assert f"  --{name if '.' in name else name.replace('_', '-')} " in page or f"  --{name}\n" in page, name
    for name in PRESETS:
        assert f"\n  {name}" in page
    assert "two small layers" in page
    assert "exit codes: 0" in page
    assert "[8000]" in printed("train", "--preset", "tiny", "--help")


def step(number: int, *, logged: bool) -> StepReport:
    return StepReport(
        step=number, max_steps=100, epoch=0, loss=3.25, nll=3.0, learning_rate=1e-3, grad_norm=1.5, tokens=1000,
        tokens_per_second=12345.0, elapsed_seconds=65.0, eta_seconds=30.0, memory_bytes=2**30, progress=number / 100,
        logged=logged,
    )  # fmt: skip


def test_the_live_display(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with LiveReporter(console, verbose=True, clock=lambda: 0.0) as reporter:
        reporter.start(
            RunStart(run_dir=tmp_path, device="cpu", precision="fp32", num_parameters=7, data="a [bold]line",
                     step=0, max_steps=100, max_minutes=2.0)
        )  # fmt: skip
        reporter.step(step(40, logged=True))
        sample = Sample(source="a [red]source", text="t", reference="r")
        reporter.validation(
            ValidationReport(step=40, loss=2.5, bleu=1.5, chrf=20.0, bleu_signature="sig", best=True,
                             samples=(sample,))
        )  # fmt: skip
        reporter.message("careful [x]", "warning")
    text = screen.getvalue()
    for shown in ("a [bold]line", "40%", "1:05 of 2:00  ETA 30s", "step 40/100", "loss 3.250", "rate 1.00e-03",
                  "12,345 tokens/s", "1,024 MiB", "BLEU 1.50", "best so far", "a [red]source", "sig",
                  "warning: careful [x]"):  # fmt: skip
        assert shown in text, shown
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_the_summary_of_a_run_judged_by_bleu(tmp_path: Path) -> None:
    result = TrainResult(
        run_dir=tmp_path, step=9, epoch=0, tokens=1, elapsed_seconds=1.0, stopped_by="signal",
        signal_number=signal.SIGINT, checkpoint=None, model_dir=None, best_step=3, best_score=-21.5,
        best_by="bleu", plots=(Path("a.png"), Path("a.svg")),
    )  # fmt: skip
    text = summary(result)
    assert "best     step 3, BLEU 21.50" in text
    assert "curve    a.png  a.svg" in text
    assert "stopped  by SIGINT at step 9; the same command continues from there" in text
    assert "next" not in text


@pytest.mark.parametrize(("precision", "width"), [("fp32", 192), ("bf16", 256)])
def test_a_preset_has_sizes_for_each_precision(manyheads, printed, capsys, monkeypatch, tmp_path, precision, width):
    monkeypatch.setenv("MANYHEADS_PRECISION", precision)
    monkeypatch.chdir(tmp_path)  # where no run is to be resumed
    settings = yaml.safe_load(printed("train", "--preset", "demo", "--print-config"))
    assert (settings["precision"], settings["model"]["d_model"]) == ("auto", width)
    assert manyheads("train", "--preset", "demo", "--model.d_model", "64", "--print-config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["d_model"] == 64


def test_a_resumed_preset_keeps_the_sizes_that_it_began_with(printed, monkeypatch, tmp_path):
    """Also where another precision is asked for by name, which is the remedy for a run that is slow here."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    scalars = {"format_version": FORMAT_VERSION, "step": 1, "scalars": {"config": {"precision": "bf16"}}}
    (checkpoint / "scalars.json").write_text(json.dumps(scalars), encoding="utf-8")
    monkeypatch.setenv("MANYHEADS_PRECISION", "fp32")
    command = ["train", "--preset", "demo", "--run-dir", str(tmp_path / "run"), "--print-config"]
    for resume, width in (("auto", 256), ("none", 192)):
        assert yaml.safe_load(printed(*command, "--precision", "fp32", "--resume", resume))["model"]["d_model"] == width
