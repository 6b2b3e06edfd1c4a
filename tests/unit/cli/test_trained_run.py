"""What comes after training: `info` on every kind of folder, and the second half of the demo."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.command_line.parsing import program
from manyheads.cli.lines.output import lines_of
from manyheads.cli.main import main
from manyheads.extras.demo import __main__ as demo
from manyheads.installation import install_command

Program = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the debug preset on embedded sentences, so that there is real text."""
    folder = tmp_path_factory.mktemp("runs") / "debug"
    settings = {
        "run-dir": folder,
        "data.path": "embedded:tatoeba-en-de",
        "data.num_train_pairs": 300,
        "data.max_tokens": 1024,
        "tokenizer.kind": "bpe",
        "tokenizer.vocab_size": 400,
        "decoding.max_new_tokens": 8,
        "validation.bleu_sentences": 4,
    }
    typed = [f"--{name}={value}" for name, value in settings.items()]
    assert main(["train", "--preset", "debug", "--quiet", *typed]) == 0
    return folder


def described(manyheads: Program, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert manyheads("info", *arguments, "--json") == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_info_of_a_run(run: Path, manyheads: Program, capsys: pytest.CaptureFixture[str]) -> None:
    record = described(manyheads, capsys, run)
    assert (record["kind"], record["step"], record["checkpoints"]) == ("run", 20, [10, 20])
    assert record["latest_checkpoint"] == "step-00000020"
    assert record["best"]["valid_nll"] > 0
    assert record["best"]["bleu_signature"].startswith("nrefs:1|")
    assert record["config"]["tokenizer"]["vocab_size"] == 400
    assert record["environment"]["packages"]["torch"]
    assert record["model"]["kind"] == "model"


def test_info_of_a_model(run: Path, manyheads: Program, capsys: pytest.CaptureFixture[str]) -> None:
    from manyheads.models.pretrained import load

    record = described(manyheads, capsys, run / "model")
    model = load(run)
    assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert sum(record["parameters_by_part"].values()) == record["parameters"]
    layer = sum(parameter.numel() for parameter in model.body.encoder.layers[0].self_attn.parameters())
    assert record["parameters_by_part"]["encoder.self_attn"] == 2 * layer
    assert record["tokenizer"]["vocab_size"] == 400
    assert len(record["weights_sha256"]) == 64


def test_info_of_prepared_data(run: Path, manyheads: Program, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = (path for path in (run / "data").iterdir() if path.is_dir())
    record = described(manyheads, capsys, folder)
    assert record["kind"] == "prepared data"
    assert record["languages"] == described(manyheads, capsys, run / "model")["languages"] == ["en > de"]
    assert {split: counts["pairs"] for split, counts in record["counts"].items()} == {
        "train": 300, "valid": 500, "test": 1000,
    }  # fmt: skip


def test_info_for_eyes(run, printed):
    lines = printed("info", run).split("\n")
    assert lines[0] == "kind               run"
    assert "  parameters" in "\n".join(lines)
    assert max(map(len, lines)) < 160
    assert len(lines) < 120
    assert lines_of({"a_b": 1234, "c": None, "d": {"e": 0.5, "f": True}}) == [
        "a b  1,234",
        "d",
        "  e  0.5",
        "  f  true",
    ]


def test_info_finds_damage(run, tmp_path, manyheads, refused, capsys):
    assert manyheads("info", run, "--verify") == 0
    broken = tmp_path / "model"
    shutil.copytree(run / "model", broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert manyheads("info", broken) == 0
    assert manyheads("info", broken, "--verify") == 2
    assert "model.safetensors" in capsys.readouterr().out
    for more in (["--curves", tmp_path / "c.png"], ["--sort", "bleu"], ["--length", 8]):
        assert f"leave out {more[0]}" in refused("info", run, "--verify", *more)


def test_info_of_nothing(tmp_path, refused):
    assert "no config.yaml" in refused("info", tmp_path)
    assert "there is no folder" in refused("info", tmp_path / "none")
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    assert "cannot be read as JSON" in refused("info", tmp_path)


def test_the_demo_shows_draws_and_scores(run, capsys, monkeypatch):
    from manyheads.decoding.translator import Translator
    from manyheads.evaluation.bleu import corpus_bleu

    translations: list[str] = []
    translate = Translator.translate

    def noted(self: Translator, texts: list[str], **options: Any) -> list[str]:
        assert options.keys() == {"num_beams", "on_progress"}
        assert options["num_beams"] == 4
        translations.extend(translate(self, texts, **options))
        return translations

    monkeypatch.setattr(Translator, "translate", noted)
    assert demo.main([str(run)]) == 0
    told = capsys.readouterr()
    assert re.search(r"warning: [\d,]+ of 1,000 translations .*(empty|repeat).* The model has hardly learned", told.err)
    lines = told.out.rstrip("\n").split("\n")
    data = demo.held_out_data(run, demo.run_config(run))
    assert len(data.test_text) == 1000
    sources, references = zip(*data.test_text, strict=True)
    score = corpus_bleu(translations, references)
    assert lines[-2] == f"held-out BLEU = {score.value:.2f}"
    assert lines[-1] == score.signature
    assert [line for line in lines if "BLEU" in line] == [lines[-2]]
    assert lines[-4].startswith("held-out chrF = ")
    for name in ("source", "reference", "translation"):
        assert sum(line.startswith(f"  {name:<11}") for line in lines) == 10
    assert f"  source       {sources[100]}" in lines
    assert f"type next   {program()} translate {run}" in lines
    for picture in ("learning-curve", "attention"):
        assert any(str(run / "plots" / f"{picture}.png") in line for line in lines)
        assert (run / "plots" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_a_sentence_of_middling_length_and_much_right_is_drawn() -> None:
    sources = ["one two three", "a b c d e f g", "h i j k l m n", "x " * 30]
    references = ["eins", "A B C D E F G", "H I J K L M N", "X " * 30]
    translations = ["eins", "A B C", "H I J K L M", "X " * 30]
    assert demo.choose_sentence(sources, references, translations) == 2


def test_the_demo_without_matplotlib_still_scores(run, capsys, monkeypatch):
    from manyheads.decoding.translator import Translator

    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.setattr(Translator, "translate", lambda self, texts, **options: list(texts))
    assert demo.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert install_command("plot") in shown
    assert "held-out BLEU = " in shown


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("minutes", "right", "code", "said"),
    [
        (5.0, False, 4, "The model did not learn"),
        (1.0, False, 0, "The model has learned little so far"),
        (0.0, False, 0, "The model has learned little so far"),  # limited by its steps, and done in seconds
        (5.0, True, 0, None),
    ],
)
def test_the_demo_of_a_model_that_did_not_learn(run, tmp_path, capsys, monkeypatch, minutes, right, code, said):
    from manyheads.decoding.translator import Translator

    place = tmp_path / "run"
    shutil.copytree(run, place)
    text = (place / "config.yaml").read_text(encoding="utf-8")
    assert "max_minutes: 0.0\n" in text
    (place / "config.yaml").write_text(text.replace("max_minutes: 0.0", f"max_minutes: {minutes}"), encoding="utf-8")
    references = dict(demo.held_out_data(place, demo.run_config(place)).test_text)
    monkeypatch.setattr(
        Translator, "translate", lambda self, texts, **options: [references[text] if right else "" for text in texts]
    )
    monkeypatch.setattr(demo, "draw_pictures", lambda *arguments: None)
    assert demo.main([str(place)]) == code
    shown = capsys.readouterr()
    assert shown.out.split("\n")[-2].startswith("nrefs:1|")  # the score comes first, whatever it is
    if said is None:
        assert "learn" not in shown.err
        return
    assert f"manyheads: {said}" in shown.err
    for part in ("BLEU is 0.00", "made 20 steps in ", "target tokens/s", "precision fp32 and 1 thread.", "doctor"):
        assert part in shown.err, part


def test_a_model_that_took_enough_steps_is_not_told_to_hurry(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"step": 900, "target_tokens": 600_000, "minutes": 5.0}
    monkeypatch.setattr("manyheads.cli.records.describe_folder", lambda path: record)
    config = demo.run_config(run)
    failed, message = demo.judge(run, config, 9.9)
    assert failed
    assert "900 steps in 5 minutes, 2,000 target tokens/s, with precision fp32 and unknown threads" in message
    assert "metrics.jsonl" in message
    record["minutes"] = 4.0
    assert not demo.judge(run, config, 9.9)[0]


@pytest.mark.parametrize(("minutes", "said"), [("1", "1 minute,"), ("5", "5 minutes,"), ("0.5", "0.5 minutes,")])
def test_make_demo_says_how_long_it_takes(minutes: str, said: str) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    root = Path(__file__).parents[3]
    done = subprocess.run([make, "-n", "demo", f"MINUTES={minutes}"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = done.stdout.split("\n")
    [place] = [number for number, line in enumerate(commands) if f"Training takes {said} evaluation" in line]
    assert "manyheads train --preset demo" in commands[place + 1]


def test_the_demo_names_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--help"]) == 2
    assert "4 means" in capsys.readouterr().err


def test_the_demo_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([]) == 2
    assert demo.main([str(tmp_path)]) == 2
    assert "manyheads train --preset demo" in capsys.readouterr().err
