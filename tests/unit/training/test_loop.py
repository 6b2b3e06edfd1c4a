"""Whole small runs: what is written, how they end, how they go on."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import manyheads.tasks.translation.objective
import manyheads.training.record.recorder
import manyheads.training.run.clock
import manyheads.training.run.loop
from manyheads.checkpoint.format import list_checkpoints, load_checkpoint, read_pointer
from manyheads.cli.commands.info import compare_runs
from manyheads.cli.lines.output import lines_of
from manyheads.cli.records import describe_folder
from manyheads.config.files import to_plain
from manyheads.data.translation.prepared import prepare_corpus
from manyheads.data.translation.preparing import PairList
from manyheads.decoding.inputs_and_results import SearchStopped
from manyheads.distributed.group import Group
from manyheads.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RequestError, SaveError
from manyheads.extras.planning.first_step import first_step
from manyheads.files.commit import temporary_name
from manyheads.files.verify import verify_folder
from manyheads.models.pretrained import load
from manyheads.tasks.translation.objective import Validator
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.optim.optimiser import MuonWithAdam
from manyheads.training.record.report import TrainResult, ValidationReport
from manyheads.training.run.checkpoints import CheckpointManager
from manyheads.training.run.clock import StopFlag
from manyheads.training.run.components import assemble
from manyheads.training.run.loop import train
from manyheads.training.run.state import Counters
from manyheads.training.run.step import TrainStep

Make = Callable[..., TrainConfig]


class Recording:
    """Keeps what a reporter is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda value, *rest: self.told.append((name, value))

    def of(self, name: str) -> list[Any]:
        return [value for kind, value in self.told if kind == name]


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    text = (Path(config.run_dir) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def weights(result: TrainResult) -> bytes:
    assert result.checkpoint is not None
    return (result.checkpoint / "model.safetensors").read_bytes()


def echo(texts: list[str], stop: Callable[[], bool]) -> list[str]:
    return texts


def test_a_run_leaves_what_the_page_of_the_product_says(small: Make) -> None:
    config = small(
        validation={"every_steps": 3, "bleu_sentences": 5, "num_samples": 2},
        training={"plots": True, "tensorboard": True, "ema_decay": 0.9},
    )
    reporter = Recording()
    result = train(config, reporter=reporter, translate=echo)
    run = Path(config.run_dir)
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.yaml", "environment.json", "train.log", "metrics.jsonl", "samples", "plots", "checkpoints"}
    assert names >= {"model", "tensorboard"}
    assert {path.name for path in (run / "plots").iterdir()} == {"learning-curve.png", "learning-curve.svg"}
    sample = (run / "samples" / "step-6.txt").read_text(encoding="utf-8")
    assert sample.count("reference:") == 2
    assert [record["step"] for record in metrics(config)] == [2, 3, 4, 6, 6]
    validations = [record for record in metrics(config) if "valid_nll" in record]
    assert all(record["bleu"] == pytest.approx(100) and "version" in record["bleu_signature"] for record in validations)
    assert all(record["train_nll"] > 0 and record["grad_norm"] > 0 for record in metrics(config) if "tokens" in record)
    assert result.stopped_by == "steps"
    assert result.step == 6
    assert read_pointer(run / "checkpoints", "latest") == result.checkpoint
    assert read_pointer(run / "checkpoints", "best") == run / "checkpoints" / f"step-{result.best_step:08d}"
    assert [report.step for report in reporter.of("step")] == [1, 2, 3, 4, 5, 6]
    assert [report.logged for report in reporter.of("step")] == [False, True] * 3
    assert len(reporter.of("validation")) == 2
    assert reporter.of("done") == [result]
    saved = load_checkpoint(run / "checkpoints" / f"step-{result.best_step:08d}")
    for name, tensor in load(run / "model").body.state_dict().items():
        if name in saved.tensors["ema"]:
            assert torch.equal(tensor, saved.tensors["ema"][name])
    verify_folder(run / "model")


@pytest.mark.parametrize("name", ["13a", "none"])
def test_bleu_is_tokenized_as_the_settings_say(name: str, small: Make) -> None:
    config = small(validation={"bleu_sentences": 5, "bleu_tokenize": name})
    train(config, translate=echo)
    signatures = {record["bleu_signature"] for record in metrics(config) if "bleu_signature" in record}
    assert all(f"tok:{name}" in signature for signature in signatures)
    assert signatures


def in_chinese(path: Path, languages: Sequence[tuple[str, str]] = (("en", "zh"),)) -> None:
    """Data whose sides are equal, so that `echo` is perfect."""
    pairs = [(text, text) for text in ("今天我喜欢一只狗。", "她明天看见那座房子。", "我们现在想要一本书。")] * 4
    settings = TokenizerSettings(vocab_size=300)
    train_pairs, valid = PairList("made up", pairs), PairList("made up", pairs[:3])
    prepare_corpus(path, train=train_pairs, valid=valid, tokenizer=settings, languages=languages)


@pytest.mark.parametrize("languages", [(("en", "zh"),), ()])
def test_bleu_is_tokenized_for_the_language(languages: Sequence[tuple[str, str]], small: Make, tmp_path: Path) -> None:
    in_chinese(tmp_path / "data", languages)
    config = small(data={"path": str(tmp_path / "data")}, validation={"bleu_sentences": -1, "best_by": "bleu"})
    result = train(config, translate=echo)
    records = [record for record in metrics(config) if "bleu" in record]
    assert all("tok:zh" in record["bleu_signature"] and "of_the_first" not in record for record in records)
    assert result.best() == f"step {result.best_step}, BLEU 100.00"
    assert "bleu_tokenize: zh" in (Path(config.run_dir) / "config.yaml").read_text()


def test_a_missing_tokenizer_does_not_end_a_run(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    in_chinese(tmp_path / "data", [("en", "ja")])
    for name in ("auto", "ja-mecab"):
        config = small(
            data={"path": str(tmp_path / "data")},
            validation={"bleu_sentences": -1, "bleu_tokenize": name},
            run_dir=str(tmp_path / name),
        )
        train(config, translate=echo)
        assert all("tok:char" in record["bleu_signature"] for record in metrics(config) if "bleu" in record)
        log = (tmp_path / name / "train.log").read_text()
        assert log.count("pip install 'sacrebleu[ja]'") == 1


def test_an_older_run_is_told_that_its_tokenizer_changes(small: Make, tmp_path: Path) -> None:
    in_chinese(tmp_path / "data")
    common = {"bleu_sentences": -1, "best_by": "bleu", "every_steps": 3}
    config = small(data={"path": str(tmp_path / "data")}, validation={**common, "bleu_tokenize": "13a"})
    train(config, translate=lambda texts, stop: ["1 2 3 4"] * len(texts))
    longer = small(data={"path": str(tmp_path / "data")}, validation=common, training={"max_steps": 9})
    reporter = Recording()
    result = train(longer, resume="auto", reporter=reporter, translate=echo)
    log = (Path(config.run_dir) / "train.log").read_text()
    assert "validation.bleu_tokenize was '13a', is 'zh'" in log
    assert "computed in another way" in log
    assert result.best() == "step 9, BLEU 100.00"


def test_scores_of_a_part_say_so(small: Make) -> None:
    config = small(validation={"bleu_sentences": 5, "best_by": "bleu"})
    result = train(config, translate=echo)
    run = Path(config.run_dir)
    assert all(record["of_the_first"] == 5 for record in metrics(config) if "bleu" in record)
    log = (run / "train.log").read_text()
    assert "BLEU 100.00 of the first 5 | chrF 100.00 of the first 5" in log
    assert result.best() == f"step {result.best_step}, BLEU 100.00 of the first 5"
    assert f"best: {result.best()}" in log
    assert train(config, resume="auto", translate=echo).best() == result.best()  # without a validation of its own
    [row] = compare_runs([run])
    assert row["of_the_first"] == 5
    assert "of the first" in "\n".join(lines_of(describe_folder(run)))


def test_a_validation_pair_that_does_not_fit_is_refused_before_the_first_step(small: Make, tmp_path: Path) -> None:
    """Its loss and its translation would end the run at the first validation, hours later."""
    train_pairs, words = PairList("made up", [("1 2 3", "3 2 1")] * 20), "1 2 " * 200
    settings = TokenizerSettings(kind="word", vocab_size=16)
    for name, pair in (("source", (words, "1")), ("target", ("1", words))):
        valid = PairList("made up", [("1", "2"), pair])
        prepare_corpus(tmp_path / name, train=train_pairs, valid=valid, tokenizer=settings)
    run = tmp_path / "run"
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("source", {}, r"Validation pair 2 of .*source has 401 source tokens, but at most 256 fit \(data.max_tokens\)"),
        (
            "target",
            {},
            r"has 402 target tokens, but at most 256 fit \(data.max_tokens\); shorten it, leave it out, or raise",
        ),
        (
            "source",
            {
                "data": {"path": "", "max_tokens": 512},
                "decoding": {"max_tokens": 300},
                "validation": {"bleu_sentences": 2},
            },
            r"has 401 source tokens, but at most 300 fit \(max_tokens 300 / 1 beams\)",
        ),
    ]
    for name, changes, message in cases:
        changes["data"] = {**changes.get("data", {}), "path": str(tmp_path / name)}
        with pytest.raises(DataError, match=message):
            train(small(**changes))
        assert not list(run.glob("checkpoints/*"))


@pytest.mark.parametrize("bleu_sentences", [2, 0])
@pytest.mark.parametrize(
    ("decoding", "model"),
    [({"banned_ids": (5000,)}, {}), ({"max_new_tokens": 40}, {"positions": "learned", "max_len": 20})],
)
def test_a_search_that_cannot_be_is_refused_before_the_first_step(small, decoding, model, bleu_sentences):
    """Also where nothing is translated during training: the model is saved with these settings."""
    validation = {"bleu_sentences": bleu_sentences}
    config = small(decoding=decoding, model=model, validation=validation, training={"log_every": 1})
    with pytest.raises(RequestError):
        train(config)
    assert not (Path(config.run_dir) / "metrics.jsonl").exists()


@pytest.mark.parametrize("kind", ["noam", "inverse_sqrt", "constant"])
def test_muon_has_its_own_rate_where_the_schedule_is_highest(kind, small, monkeypatch):
    rates: list[list[float]] = []
    inner = MuonWithAdam.step

    def step(self: MuonWithAdam) -> None:
        rates.append([group["lr"] for group in self.param_groups if "momentum" in group])
        inner(self)

    monkeypatch.setattr(MuonWithAdam, "step", step)
    optimiser = {"name": "muon", "learning_rate": 0.5, "muon_learning_rate": 0.02}
    train(small(optimiser=optimiser, schedule={"kind": kind, "warmup_steps": 2}, training={"max_steps": 3}))
    assert rates[0] == pytest.approx([0.01] * len(rates[0]))
    assert rates[1] == pytest.approx([0.02] * len(rates[0]))


def test_the_loss_falls_and_the_seed_decides(small: Make, tmp_path: Path) -> None:
    runs = []
    for number, seed in enumerate((1, 1, 2)):
        run, sections = str(tmp_path / f"run{number}"), {"training": {"max_steps": 40, "save_every": 0}}
        config = small(**sections, validation={"every_steps": 20}, run_dir=run, seed=seed)
        runs.append((train(config), config))
    losses = [record["train_nll"] for record in metrics(runs[0][1]) if "train_nll" in record]
    assert losses[-1] < losses[0] - 0.2
    assert weights(runs[0][0]) == weights(runs[1][0])
    assert metrics(runs[0][1]) == metrics(runs[1][1])
    assert weights(runs[0][0]) != weights(runs[2][0])


def test_going_on_step_by_step_gives_the_bytes_of_one_run(small: Make, tmp_path: Path) -> None:
    """Also checks state that falls between saves: half a window of metrics, patience, the best score."""
    changes: dict[str, Any] = {"training": {"max_steps": 7, "save_every": 1, "log_every": 3, "ema_decay": 0.9}}
    whole = small(**changes, validation={"every_steps": 2, "best_by": "bleu", "bleu_sentences": 2})
    good: list[bool] = []

    def judged(texts: list[str], stop: Callable[[], bool]) -> list[str]:
        return texts if good.pop(0) else ["w1"] * len(texts)

    good[:] = [True, False, False, False]
    expected = train(whole, translate=judged)
    good[:] = [True, False, False, False]
    parts = replace(whole, run_dir=str(tmp_path / "parts"))
    stepped = None
    while stepped is None or stepped.stopped_by == "signal":
        flag = StopAfter(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manyheads.training.run.loop, "StopFlag", lambda flag=flag: flag)
            stepped = train(parts, reporter=flag, translate=judged)
    assert weights(stepped) == weights(expected)
    assert (Path(parts.run_dir) / "metrics.jsonl").read_bytes() == (Path(whole.run_dir) / "metrics.jsonl").read_bytes()
    assert stepped.best_step == expected.best_step == 2
    assert stepped.best_score == expected.best_score


class StopAfter(StopFlag):
    """A stop flag that is raised after some steps; reporter and flag in one."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def step(self, report: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.stop()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def test_a_signal_within_a_validation_leaves_it_to_the_next_start(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(validation={"every_steps": 3, "bleu_sentences": 2})
    flag = StopFlag()
    monkeypatch.setattr(manyheads.training.run.loop, "StopFlag", lambda: flag)

    def interrupted(texts: list[str], stop: Callable[[], bool]) -> list[str]:
        flag.stop(15)
        assert stop()
        raise SearchStopped

    result = train(config, translate=interrupted)
    assert (result.stopped_by, result.signal_number, result.step) == ("signal", 15, 3)
    assert not [record for record in metrics(config) if "valid_nll" in record]
    flag.signal_number = None
    result = train(config, translate=echo)
    assert result.stopped_by == "steps"
    assert [record["step"] for record in metrics(config) if "valid_nll" in record] == [3, 6]


@pytest.mark.parametrize("broken_off", [3, 6])
def test_a_checkpoint_saved_within_a_validation_is_completed_by_the_next_start(
    small, tmp_path, monkeypatch, broken_off
):
    """The step is saved already, but not that it is the best; after step 6 nothing comes that would mend it."""
    sections = {"validation": {"every_steps": 3, "bleu_sentences": 2}}
    whole = train(replace(small(**sections), run_dir=str(tmp_path / "whole")), translate=echo)
    config, flag = small(**sections), StopFlag()
    monkeypatch.setattr(manyheads.training.run.loop, "StopFlag", lambda: flag)

    def interrupted(texts: list[str], stop: Callable[[], bool]) -> list[str]:
        if len(list_checkpoints(Path(config.run_dir) / "checkpoints")) == broken_off // 3 - 1:
            flag.stop(15)
            raise SearchStopped
        return echo(texts, stop)

    assert train(config, translate=interrupted).step == broken_off
    flag.signal_number = None
    again = train(config, translate=echo)
    assert (again.best_step, again.step) == (whole.best_step, whole.step) == (6, 6)
    for run in (whole.run_dir, again.run_dir):
        assert read_pointer(run / "checkpoints", "best") == run / "checkpoints" / "step-00000006"
    newest = [load_checkpoint(run / "checkpoints/step-00000006") for run in (whole.run_dir, again.run_dir)]
    counted = [checkpoint.scalars["counters"] for checkpoint in newest]
    clocks = [counters.pop("elapsed_seconds") for counters in counted]
    assert counted[0] == counted[1]
    assert all(clocks)
    assert weights(whole) == weights(again)


def test_a_raised_flag_stops_the_loss_of_a_validation(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = StopAfter(3)
    monkeypatch.setattr(manyheads.training.run.loop, "StopFlag", lambda: flag)
    config = small()
    result = train(config, reporter=flag)
    assert (result.stopped_by, result.step) == ("signal", 3)
    assert not [record for record in metrics(config) if "valid_nll" in record]
    assert result.checkpoint is not None
    verify_folder(result.checkpoint)


def scripted(losses: list[float]) -> Callable[[Validator, int], ValidationReport]:
    return lambda self, step: ValidationReport(step=step, loss=losses.pop(0))


def test_patience_ends_a_run_and_survives_a_resume(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(training={"max_steps": 100}, validation={"every_steps": 2, "patience": 2})
    monkeypatch.setattr(Validator, "run", scripted([3.0, 2.0, 2.5, 2.0]))
    result = train(config)
    assert (result.stopped_by, result.step, result.best_step, result.best_score) == ("patience", 8, 4, 2.0)
    assert {path.name for path in list_checkpoints(Path(config.run_dir) / "checkpoints")} >= {"step-00000004"}
    again = train(config)  # an ended run ends at once
    assert (again.stopped_by, again.step) == ("patience", 8)
    monkeypatch.setattr(Validator, "run", scripted([2.5, 1.0, 1.5, 1.5]))
    more = train(replace(config, validation=replace(config.validation, patience=3)))
    assert (more.step, more.best_step) == (10, 4)  # 2 of 3 were used up before
    assert metrics(config)[-1]["best"] is False


def test_a_best_score_of_another_kind_is_forgotten_at_a_resume(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss is below a negated BLEU: the run would end by patience with its old model."""
    reports = [(5.0, 30.0), (4.0, 20.0), (3.0, 10.0), (2.0, 25.0), (1.0, 26.0)]

    def judged(self: Validator, step: int) -> ValidationReport:
        loss, bleu = reports.pop(0)
        return ValidationReport(step=step, loss=loss, bleu=bleu)

    monkeypatch.setattr(Validator, "run", judged)
    validation = {"every_steps": 2, "patience": 2, "best_by": "bleu", "bleu_sentences": 1}
    first = train(small(training={"max_steps": 4}, validation=validation))
    assert (first.best_step, first.best_score) == (2, -30.0)
    reporter = Recording()
    by_loss = small(training={"max_steps": 8}, validation={**validation, "best_by": "loss"})
    second = train(by_loss, reporter=reporter)
    assert (second.stopped_by, second.best_step, second.best_score) == ("steps", 8, 2.0)
    assert any("counts as the best one" in text for text in reporter.of("message"))
    # BLEU of other sentences is another score, too; the loss is not.
    fewer = small(training={"max_steps": 8}, validation={**validation, "best_by": "loss", "bleu_sentences": 2})
    assert train(fewer).best_score == 2.0
    by_bleu = small(training={"max_steps": 10}, validation=validation)
    assert train(by_bleu).best_score == -26.0
    again = small(training={"max_steps": 10}, validation={**validation, "bleu_sentences": 2})
    assert train(again).best_score is None


def test_a_run_from_a_checkpoint_of_another_folder_has_its_own_best_model(small, tmp_path, monkeypatch):
    monkeypatch.setattr(Validator, "run", scripted([1.0, 1.5, 2.0, 1.9, 1.8]))
    first = train(small(validation={"every_steps": 3}))
    config = replace(small(training={"max_steps": 9}), run_dir=str(tmp_path / "elsewhere"))
    result = train(config, resume=str(first.checkpoint))
    assert (result.step, result.best_step, result.best_score) == (9, 9, 1.9)
    assert result.model_dir is not None
    verify_folder(result.model_dir)
    checkpoints = Path(config.run_dir) / "checkpoints"
    assert read_pointer(checkpoints, "best") == checkpoints / "step-00000009"


def test_the_time_of_a_validation_counts_after_a_resume(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose last validation used up its minutes has ended, and does not go on when it is started again."""
    now = [0.0]

    def slow(self: Validator, step: int) -> ValidationReport:
        now[0] += 100.0
        return ValidationReport(step=step, loss=1.0)

    monkeypatch.setattr(Validator, "run", slow)
    monkeypatch.setattr(manyheads.training.run.clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    config = small(training={"max_steps": 0, "max_minutes": 1.0}, validation={"every_steps": 3})
    result = train(config)
    assert (result.stopped_by, result.step, result.elapsed_seconds) == ("minutes", 3, 100.0)
    reporter = Recording()
    again = train(config, reporter=reporter)
    assert (again.stopped_by, again.step) == ("minutes", 3)
    [told] = [text for text in reporter.of("message") if "nothing is left" in text]
    assert told.startswith("nothing is left to train, because training.max_minutes is 1. A higher --training.max_min")


@pytest.mark.parametrize("killed_at", [None, 5, 8, 11])
def test_work_that_is_due_by_the_clock(small: Make, monkeypatch: pytest.MonkeyPatch, killed_at: int | None) -> None:
    """A step takes 10 s and a validation 15. Both limits count from the end of the last one, also over a kill."""
    now, judged, saved, steps = [0.0], [], [], []

    def slow(self: Validator, step: int) -> ValidationReport:
        now[0] += 15.0
        judged.append(step)
        return ValidationReport(step=step, loss=float(step))  # only the first is the best

    def timed(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        if step == killed_at and step not in steps:
            steps.append(step)
            raise KeyboardInterrupt
        now[0] += 10.0
        return run(self, batches, step, rate)

    run, save = TrainStep.run, CheckpointManager.save
    monkeypatch.setattr(TrainStep, "run", timed)
    monkeypatch.setattr(Validator, "run", slow)
    monkeypatch.setattr(manyheads.training.run.clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        CheckpointManager, "save", lambda self, must: (saved.append(self._done()[0]), save(self, must=must))[1]
    )
    config = small(
        training={"max_steps": 12, "save_every": 0, "save_every_minutes": 0.75},
        validation={"every_steps": 0, "every_minutes": 0.5},
    )
    if killed_at:
        with pytest.raises(KeyboardInterrupt):
            train(config)
        now[0] += 1e6  # nobody trained
    assert train(config).stopped_by == "steps"
    # Validations end at 45, 90 and 135 s; the first is the best, so it is saved; then saves at 90 and 135 s.
    assert sorted(set(judged)) == [3, 6, 9, 12]
    assert sorted(set(saved)) == [3, 6, 9, 12]
    again = [step for step in judged if judged.count(step) > 1]
    assert again == [], "what was saved is not judged again"


def test_a_checkpoint_of_an_older_version_has_no_time_of_a_validation() -> None:
    record = {name: value for name, value in asdict(Counters(step=3)).items() if name != "validated_seconds"}
    assert Counters.from_json(record) == Counters(step=3)
    with pytest.raises(CheckpointError, match="validated_seconds is 'x'"):
        Counters.from_json({**record, "validated_seconds": "x"})


def test_minutes_end_a_run(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(
        training={"max_steps": 0, "max_minutes": 0.01, "save_every": 0},
        validation={"every_steps": 0},
        schedule={"kind": "linear"},
    )
    # The run's own watch moves by 10 ms whenever it is read: a busy machine's first step would use up 0.6 s by itself.
    readings = count()
    monkeypatch.setattr(manyheads.training.run.clock, "time", SimpleNamespace(monotonic=lambda: 0.01 * next(readings)))
    result = train(config)
    assert result.stopped_by == "minutes"
    assert 0.6 <= result.elapsed_seconds < 0.7
    rates = [record["learning_rate"] for record in metrics(config) if "learning_rate" in record]
    assert rates[-1] < rates[0] / 2
    assert train(config).step == result.step


def test_an_ended_run_can_be_made_longer_and_begun_again(small: Make) -> None:
    config = small()
    first = train(config)
    longer = replace(config, training=replace(config.training, max_steps=8))
    assert train(longer).step == 8
    fresh = train(config, resume="none")
    assert weights(fresh) == weights(first)
    run = Path(config.run_dir)
    assert (run / "previous-1" / "checkpoints" / "step-00000008").is_dir()
    assert not (run / "checkpoints" / "step-00000008").exists()


def test_a_mistake_leaves_the_earlier_run_where_it_is(small: Make) -> None:
    """With resume none the earlier run is set aside when settings and data have been checked, and the log with it."""
    config = small(training={"max_steps": 2})
    train(config)
    run = Path(config.run_dir)
    with pytest.raises(DataError, match="nowhere"):
        train(replace(config, data=replace(config.data, path="nowhere")), resume="none")
    with pytest.raises(ConfigError, match=r"training\.freeze"):
        train(replace(config, training=replace(config.training, freeze=("nothing",))), resume="none")
    assert (run / "metrics.jsonl").stat().st_size
    assert not list(run.glob("previous-*"))
    train(config, resume="none")
    for log in (run / "previous-1" / "train.log", run / "train.log"):
        assert log.read_text(encoding="utf-8").count("step 2/2 |") == 1
    assert "are now in" in (run / "train.log").read_text(encoding="utf-8")


def test_a_damaged_checkpoint_is_skipped_with_a_warning_and_replaced(small: Make) -> None:
    config = small()
    expected = weights(train(config))
    newest = Path(config.run_dir) / "checkpoints" / "step-00000006"
    (newest / "model.safetensors").write_bytes(b"x")
    reporter = Recording()
    again = train(config, reporter=reporter)
    assert any("Skipped checkpoint step-00000006" in text for text in reporter.of("message"))
    assert weights(again) == expected
    for path in list_checkpoints(newest.parent):
        (path / "scalars.json").unlink()
    with pytest.raises(CheckpointError, match="--resume none"):
        train(config)


def test_what_a_kill_after_the_commit_left_undone_is_done_at_the_next_start(small: Make) -> None:
    config = small()
    result = train(config)
    checkpoints = Path(config.run_dir) / "checkpoints"
    (checkpoints / "latest").write_text("step-00000003\n", encoding="utf-8")
    (checkpoints / "best").unlink()
    for path in (checkpoints / "step-00000009", checkpoints.parent / "model"):
        aside = temporary_name(path).name
        path.with_name(aside.replace(f"-{os.getpid()}-", "-999999999-")).mkdir()
    train(config)
    assert read_pointer(checkpoints, "latest") == result.checkpoint
    assert read_pointer(checkpoints, "best") is not None
    assert not list(checkpoints.parent.rglob("*.tmp-*"))


def test_an_older_checkpoint_can_be_named(small: Make, tmp_path: Path) -> None:
    config = small(training={"save_every": 2})
    expected = weights(train(config))
    older = Path(config.run_dir) / "checkpoints" / "step-00000004"
    assert weights(train(config, resume=str(older))) == expected
    assert [record["step"] for record in metrics(config) if "tokens" in record] == [2, 4, 6]
    assert (older.parent / "step-00000006.aside").is_dir()
    elsewhere = replace(config, run_dir=str(tmp_path / "elsewhere"))
    assert weights(train(elsewhere, resume=str(older))) == expected
    for wrong in (older.parent / "step-00000099", older.parent.parent):
        with pytest.raises(CheckpointError, match=r"no checkpoint .* give a folder step-"):
            train(config, resume=str(wrong))


def test_the_checkpoint_of_another_folder_does_not_replace_a_run(small: Make, tmp_path: Path) -> None:
    first = train(small(training={"max_steps": 2}))
    config = replace(small(training={"max_steps": 3}), run_dir=str(tmp_path / "elsewhere"))
    train(config)
    before = Path(config.run_dir, "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"is not in .*elsewhere.checkpoints, where there are checkpoints"):
        train(config, resume=str(first.checkpoint))
    assert Path(config.run_dir, "metrics.jsonl").read_bytes() == before


def test_a_resume_with_other_settings_or_data_is_refused(small: Make, corpus: Path, tmp_path: Path) -> None:
    config = small()
    train(config)
    wider = replace(config, model=replace(config.model, d_ff=64), seed=5)
    with pytest.raises(ConfigError, match=r"model\.d_ff was 32, is 64; seed was 1, is 5"):
        train(wider)
    with pytest.raises(ConfigError, match=r"training\.plain was False, is True"):
        train(replace(config, training=replace(config.training, plain=True)))
    other = small(data={"path": "copy-task", "num_train_pairs": 100}, tokenizer={"kind": "word", "vocab_size": 20})
    with pytest.raises(ConfigError, match="the data changed"):
        train(other)
    reporter = Recording()
    train(replace(config, training=replace(config.training, log_every=5)), reporter=reporter)
    assert any("training.log_every was 2, is 5" in text for text in reporter.of("message"))


def test_ranks_with_different_data_are_refused(small: Make, tmp_path: Path) -> None:
    """As where each of two machines has prepared the data, in another order."""

    class Second(Group):
        def from_main(self, make: Callable[[], Any]) -> Any:
            mine = make()
            return "of the main rank" if isinstance(mine, str) else mine

    with pytest.raises(DataError, match=r"is not that of rank 0 \(of the main"):
        assemble(small(), torch.device("cpu"), tmp_path, Second())


def test_ranks_with_different_settings_are_refused(small: Make) -> None:
    """As where each of two machines has its own file of settings. Paths and threads may differ."""
    main = small(data={"accumulate": 2}, training={"max_steps": 1, "freeze": ("*.bias",)})

    class Second(Group):
        def from_main(self, make: Callable[[], Any]) -> Any:
            mine = make()
            return json.loads(json.dumps(to_plain(main))) if isinstance(mine, dict) else mine

    with pytest.raises(ConfigError, match=r"rank 0: data\.accumulate, training\.freeze, training\.max_steps\. Give"):
        train(small(), group=Second())
    train(replace(main, run_dir=main.run_dir + "-here", num_threads=1), group=Second())


def test_two_runs_cannot_share_a_folder(small: Make) -> None:
    config = small()

    class Second(Recording):
        def start(self, start: Any) -> None:
            with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
                train(config)
            self.told.append(("second", None))

    reporter = Second()
    train(config, reporter=reporter)
    assert reporter.of("second")


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    real = TrainStep.forward

    def forward(self: TrainStep, batch: Any, step: int, micro: int, model: Any = None) -> Any:
        output = real(self, batch, step, micro, model)
        return output._replace(loss_sum=output.loss_sum * float("nan")) if step in steps else output

    monkeypatch.setattr(TrainStep, "forward", forward)


def test_nan_stops_the_run_and_spares_the_checkpoint(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    poison(monkeypatch, {5})
    with pytest.raises(NonFiniteError, match=r"Step 5: the loss is nan.*sample ids.*First bad module"):
        train(config)
    run = Path(config.run_dir)
    dump = json.loads((run / "nonfinite-step-5.json").read_text(encoding="utf-8"))
    assert dump["sample_ids"]
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    verify_folder(run / "checkpoints" / "step-00000003")
    assert "error: Step 5" in (run / "train.log").read_text(encoding="utf-8")


def test_a_full_disk_does_not_hide_a_nan(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise SaveError("Cannot save it: No space left on device.")

    poison(monkeypatch, {2})
    monkeypatch.setattr("manyheads.training.record.recorder.write_text", full)
    with pytest.raises(NonFiniteError, match=r"loss is nan.*ids could not be kept \(.*No space left on device\)"):
        train(small())


def test_nan_can_be_skipped_up_to_a_cap(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(training={"on_nonfinite": "skip", "max_skips": 2})
    poison(monkeypatch, {2, 4, 5})
    result = train(config)
    assert result.step == 6
    assert [record["step"] for record in metrics(config) if "skipped" in record] == [2, 4, 5]
    poison(monkeypatch, {1, 2, 3})
    with pytest.raises(NonFiniteError, match="2 updates before it were skipped"):
        train(config, resume="none")


def test_a_save_that_fails_stops_or_is_survived(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    config = small(training={"save_every": 2}, validation={"every_steps": 0})
    failing = [False]

    def fsync(handle: int) -> None:
        if failing[0] and "step-00000004" in os.readlink(f"/proc/self/fd/{handle}"):  # noqa: PTH115
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    failing[0] = True
    with pytest.raises(SaveError, match="No space left"):
        train(config)
    checkpoints = Path(config.run_dir) / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-00000002"]
    reporter = Recording()
    patient = replace(config, training=replace(config.training, on_save_error="continue"))
    assert train(patient, reporter=reporter).step == 6
    assert any("Training goes on" in text for text in reporter.of("message"))


def test_too_little_space_is_said_before_the_first_step(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.files.commit.free_bytes", lambda path: 10_000)
    reporter = Recording()
    with pytest.raises(SaveError, match="10000 bytes are free"):
        train(small(), reporter=reporter)
    assert not reporter.of("step")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
    ids=["CUDA", "CPU", "Python"],
)
def test_out_of_memory_names_the_remedy(small: Make, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Reported with the tokens of the step; what was saved before stays."""
    real, calls = TrainStep.run, []

    def take(self: TrainStep, batches: Any, step: int, rate: float) -> Any:
        calls.append(step)
        if step == 5:
            raise error
        return real(self, batches, step, rate)

    monkeypatch.setattr(TrainStep, "run", take)
    message = r"step 5, whose largest part is \d+ rows of \d+ source .*max_tokens 256, .*raise accumulate to 2"
    config = small()
    with pytest.raises(ConfigError, match=message):
        train(config)
    assert calls == [1, 2, 3, 4, 5]
    verify_folder(Path(config.run_dir) / "checkpoints" / "step-00000003")


def test_other_errors_are_not_taken_for_too_little_memory(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: TrainStep, *_: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(TrainStep, "run", take)
    with pytest.raises(RuntimeError, match="shapes"):
        train(small())


def test_the_callers_generator_and_threads_are_left_alone(small: Make) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    train(small(training={"deterministic": True}))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_dry_run_tells_all_and_leaves_nothing(small: Make) -> None:
    config = small(data={"accumulate": 2})
    told = first_step(config)
    assert not Path(config.run_dir).exists()
    assert told.num_parameters == sum(torch.Size(shape).numel() for shape in told.shapes.values())
    assert told.state_bytes == told.num_parameters * 16
    assert len(told.batch) == 2
    assert told.fault is None
    text = told.describe()
    for part in ("encoder.layers.0.self_attn", "parameters on", "MiB at the peak", "loss", "training pairs kept"):
        assert part in text


def test_a_dry_run_writes_nothing_into_the_folder_of_a_run(small: Make) -> None:
    """An embedded corpus with another number of pairs would be another folder in the run's data."""
    config = small(data={"path": "copy-task", "num_train_pairs": 60})
    (Path(config.run_dir) / "data").mkdir(parents=True)
    first_step(config)
    assert not list(Path(config.run_dir, "data").iterdir())


def test_a_reporter_is_told_what_the_run_does(small: Make) -> None:
    """So that whoever watches knows what takes long."""
    reporter = Recording()
    train(small(training={"max_steps": 4, "save_every": 2}, validation={"every_steps": 4}), reporter=reporter)
    assert reporter.of("doing") == [
        "opening the data",
        "building the model",
        "looking for a checkpoint",
        "step 1",
        "step 2",
        "saving step 2",
        "step 3",
        "step 4",
        "validation at step 4",
        "saving the model of step 4",
        "saving step 4",
        "drawing the learning curve",
    ]
    kinds = [kind for kind, _ in reporter.told]
    assert kinds.index("start") < kinds.index("step")
    assert reporter.told.index(("doing", "step 1")) < kinds.index("step")


def test_data_that_is_prepared_is_told_of(small: Make) -> None:
    reporter = Recording()
    data = {"path": "copy-task", "max_source_len": 16, "max_target_len": 16, "num_train_pairs": 50}
    train(small(data=data, training={"max_steps": 1}), reporter=reporter)
    told = reporter.of("doing")
    assert "count words" in told
    assert "encode train" in told


@pytest.mark.parametrize(("seconds", "num_warnings"), [(60.0, 1), (0.01, 0)])
def test_a_run_of_too_few_steps_says_so_once(small, monkeypatch, seconds, num_warnings):
    """And metrics do not depend on it."""
    clock = count()
    fake = SimpleNamespace(monotonic=lambda: seconds * next(clock))
    monkeypatch.setattr(manyheads.training.record.recorder, "time", fake)
    reporter = Recording()
    config = small(training={"max_steps": 12, "max_minutes": 5.0}, run_dir=small().run_dir + f"-{seconds}")
    train(config, reporter=reporter)
    warned = [text for text in reporter.of("message") if "This run will make about" in text]
    assert len(warned) == num_warnings
    assert len(metrics(config)) == 6 + 4  # every second step, and every third is judged
    if warned:
        assert "steps in 5 minutes" in warned[0]
        assert "In fp32 with" in warned[0]
        log = (Path(config.run_dir) / "train.log").read_text(encoding="utf-8")
        assert log.count("This run will make about") == 1


def test_tokens_per_second_are_those_of_the_steps_alone(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation between two lines of metrics took 1,000 s, a step 2 s."""
    now = [0.0]

    def slow(self: Validator, step: int) -> ValidationReport:
        now[0] += 1000.0
        return ValidationReport(step=step, loss=1.0)

    take = TrainStep.run

    def taken(self: TrainStep, *given: Any) -> Any:
        now[0] += 2.0
        return take(self, *given)

    monkeypatch.setattr(Validator, "run", slow)
    monkeypatch.setattr(TrainStep, "run", taken)
    monkeypatch.setattr(manyheads.training.record.recorder, "time", SimpleNamespace(monotonic=lambda: now[0]))
    reporter = Recording()
    train(small(), reporter=reporter)
    reports = reporter.of("step")
    tokens = [after.tokens - before.tokens for before, after in zip(reports[1::2], reports[3::2], strict=False)]
    assert [report.tokens_per_second for report in reports[3::2]] == [number / 4.0 for number in tokens]


def test_a_default_device_without_values_does_not_matter(small: Any) -> None:
    """`torch.set_default_device("meta")`: a run computes what it does without."""
    expected = weights(train(small(), translate=echo))
    try:
        torch.set_default_device("meta")
        found = train(small(), resume="none", translate=echo)
    finally:
        torch.set_default_device(None)
    assert weights(found) == expected
