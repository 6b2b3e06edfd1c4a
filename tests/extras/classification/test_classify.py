"""A classifier from end to end: labelled texts are prepared, learned, judged and used from a pipe."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import manyheads as package
from manyheads.cli.main import main
from manyheads.errors import ModelFileError, NonFiniteError, RequestError
from manyheads.extras.exports import EXPORTS

Cli = Callable[..., int]

WORDS = {"animal": ("cat", "dog", "bird"), "colour": ("red", "blue", "green"), "fruit": ("pear", "plum", "fig")}
ROWS = [(label, f"{one} and {two}") for label, words in WORDS.items() for one in words for two in words]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, prepared data and a run that has learned them."""
    folder = tmp_path_factory.mktemp("classifier")
    text = "".join(f"{label}\t{text}\n" for label, text in ROWS)
    (folder / "train.tsv").write_text(text * 4)
    (folder / "test.tsv").write_text(text)
    files = ["--tsv", folder / "train.tsv", "--valid-tsv", folder / "test.tsv", "--test-tsv", folder / "test.tsv"]
    prepare = ["prepare", "--task", "classification", *files, "--tokenizer.kind", "word", "-o", folder / "data"]
    assert main([str(one) for one in prepare]) == 0
    settings = {
        "run-dir": folder / "run",
        "data.path": folder / "data",
        "data.accumulate": 1,
        "training.max_steps": 30,
        "training.save_every": 15,
        "training.plots": False,
        "training.tensorboard": False,
        "training.ema_decay": 0,
        "validation.every_steps": 15,
        "validation.best_by": "f1",
        "optimiser.learning_rate": 0.01,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    assert main(["train", "--preset", "classifier-debug", "--quiet", *options]) == 0
    return folder


def test_training_reports_accuracy_and_macro_f1(place: Path) -> None:
    records = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    judged = [record for record in records if "accuracy" in record]
    assert [record["step"] for record in judged] == [15, 30]
    assert judged[-1]["accuracy"] == judged[-1]["f1"] == 100
    log = (place / "run/train.log").read_text()
    assert "labels animal 36, colour 36, fruit 36; always answering animal would be right in 33.3%" in log
    config = json.loads((place / "run/model/config.json").read_text())
    assert config["task"] == "classification"
    assert config["labels"] == ["animal", "colour", "fruit"]
    card = (place / "run/model/README.md").read_text()
    assert "Its labels: animal, colour, fruit." in card
    assert "manyheads.Classifier.from_pretrained" in card
    assert not (place / "run/model/generation_config.json").exists()


def test_a_model_that_gives_nan_gives_no_label(place: Path) -> None:
    classifier = package.Classifier.from_pretrained(place / "run")
    with torch.no_grad():
        next(classifier.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="gave NaN log-probabilities"):
        classifier("cat and dog")


def test_evaluate(place, manyheads, printed, tmp_path, capsys):
    picture, output = tmp_path / "matrix.svg", tmp_path / "labels.txt"
    record = json.loads(printed("evaluate", place / "run", "--picture", picture, "-o", output, "--json"))
    assert (record["accuracy"], record["macro_f1"], record["texts"]) == (1.0, 1.0, 27)
    assert record["confusion"]["counts"] == [[9, 0, 0], [0, 9, 0], [0, 0, 9]]
    assert record["protocol"]["data"] == f"{place / 'data'} test"
    assert output.read_text().split() == [label for label, _ in ROWS]
    assert "predicted label" in picture.read_text()
    (tmp_path / "file").touch()
    assert manyheads("evaluate", place / "run", "--picture", tmp_path / "file" / "matrix.svg") == 2
    assert "accuracy = 100.00%" in capsys.readouterr().out
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"label": "fruit", "text": "cat and dog"}\n{"label": "fruit", "text": "pear"}\n')
    shown = printed("evaluate", place / "run", "--jsonl", wrong)
    assert "accuracy = 50.00% (1 of 2 texts" in shown
    assert "fruit        1       0      1" in shown


def classify(monkeypatch: pytest.MonkeyPatch, run: Cli, text: str, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return run("classify", *arguments)


def test_labels_from_a_pipe(place, manyheads, monkeypatch, capsys):
    """One line in, one line out, in order; an empty line gives an empty line."""
    text, run = "red and green\n\ncat and cat\n", place / "run"
    assert classify(monkeypatch, manyheads, text, run) == 0
    assert capsys.readouterr().out == "colour\n\nanimal\n"
    assert classify(monkeypatch, manyheads, text, run, "--scores") == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[1] == ""
    assert lines[0].startswith("colour\t0.")
    assert classify(monkeypatch, manyheads, text, run, "--nbest", "2") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert rows[0][2] == "colour"
    assert float(rows[0][1]) > float(rows[1][1])
    assert rows[2] == ["2", "", ""]
    assert classify(monkeypatch, manyheads, text, run, "--json", "--lines-at-once", "1") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3]
    assert sum(one["probability"] for one in records[0]["labels"]) == pytest.approx(1)
    assert records[1]["labels"] == []


def test_from_python(place: Path, tmp_path: Path) -> None:
    classifier = package.Classifier.from_pretrained(place / "run")
    assert classifier.labels == ("animal", "colour", "fruit")
    assert classifier("blue and red") == "colour"
    assert classifier(["pear and fig", "bird and dog"]) == ["fruit", "animal"]
    assert classifier(["red and red and red and red", "cat", "pear and fig"]) == ["colour", "animal", "fruit"]
    assert classifier([]) == []
    [found] = classifier.predict(["pear and fig"])
    assert (found.label, found.probability) == ("fruit", max(found.probabilities.values()))
    assert next(iter(found.probabilities)) == "fruit"
    classifier.to("cpu").save_pretrained(tmp_path / "model")
    again = package.Classifier.from_pretrained(tmp_path / "model")
    assert again.log_probs(["cat"]).equal(classifier.log_probs(["cat"]))
    assert again.log_probs(["red\ncat\r\n"]).equal(again.log_probs(["red cat"]))  # as in training
    assert repr(again) == "Classifier(transformer-classifier, 3 labels, cpu, fp32)"
    with pytest.raises(RequestError, match="predict takes a list of texts"):
        again.predict("cat")
    with pytest.raises(RequestError, match="max_tokens is 1; it must be at least 2"):
        again.log_probs(["cat"], max_tokens=1)


def test_score_info_and_average(place, manyheads, printed, tmp_path, capsys):
    (tmp_path / "texts").write_text("cat and dog\ncat and dog\n")
    (tmp_path / "labels").write_text("animal\nfruit\n")
    run = place / "run"
    assert manyheads("score", run, "--texts", tmp_path / "texts", "--labels", tmp_path / "labels") == 0
    first, second = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert first[1] == "1"
    assert second[1] in ("2", "3")
    assert float(first[0]) > float(second[0])
    assert "animal, colour, fruit" in printed("info", run)
    assert "train  animal 36, colour 36, fruit 36" in printed("info", place / "data")
    assert manyheads("average", run, "--last", "2", "--output", tmp_path / "mean") == 0
    assert package.Classifier.from_pretrained(tmp_path / "mean")("dog and bird") == "animal"
    assert not (tmp_path / "mean/generation_config.json").exists()
    assert "pipeline_tag: text-classification" in printed("push", run / "model", "owner/name", "--dry-run")


@pytest.mark.slow
def test_a_run_goes_on_from_a_classifier_with_the_same_labels(place: Path, manyheads: Cli, tmp_path: Path) -> None:
    more = ["--data.path", place / "data", "--run-dir", tmp_path / "more", "--training.max-steps", "1"]
    quiet = ["--quiet", "--training.plots", "false", "--training.max-minutes", "0", "--data.max-tokens", "512"]
    assert manyheads("train", "--init", place / "run", *more, *quiet) == 0
    assert yaml.safe_load((tmp_path / "more/config.yaml").read_text())["initial"]["model"] == str(place / "run")


def test_several_as_one(place, manyheads, printed, tmp_path, monkeypatch, capsys):
    run, other = place / "run", tmp_path / "mean"
    assert manyheads("average", run, "--last", "2", "--output", other) == 0
    capsys.readouterr()
    averaged = package.Classifier.from_pretrained([run, other], "cpu")
    text = "cat and dog"
    probability = averaged.predict([text])[0].probability
    assert probability != package.Classifier.from_pretrained(run, "cpu").predict([text])[0].probability
    assert classify(monkeypatch, manyheads, f"{text}\n", run, "--scores", "--ensemble", other) == 0
    assert capsys.readouterr().out == f"animal\t{probability:.6f}\n"
    shown = printed("evaluate", run, "--ensemble", other)
    assert "accuracy = 100.00%" in shown
    assert f"  model      {run} + {other}, " in shown
    assert "pooling mean\n" in shown
    first = printed("score", run, "--tsv", place / "test.tsv", "--ensemble", other).splitlines()[0].split("\t")
    assert float(first[0]) == pytest.approx(float(averaged.log_probs([ROWS[0][1]])[0, 0]), abs=1e-5)


def test_what_is_refused(place: Path, manyheads: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One paragraph with the remedy, exit code 2, and nothing written."""
    run, data, files = place / "run", place / "data", {}
    for name, text in {
        "unknown": "metal\tiron\n",
        "empty": "animal\t\n",
        "one": "red\n",
        "two": "colour\ncolour\n",
        "nothing": "",
        "long": "red " * 40,
        "single": "animal\tcat\n",
        "gap": "animal\tcat\nanimal\t\ncolour\t" + "red " * 40,
        "wide": "colour\t" + "red " * 40,
    }.items():
        files[name] = tmp_path / name
        files[name].write_text(text)
    skip = ("--on-empty", "skip")
    new, prepare = tmp_path / "new", ("prepare", "--task", "classification", "-o", tmp_path / "new")
    train = ("train", "--preset", "classifier-debug", "--run-dir", new, "--data.path", data)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((*prepare, "--tsv", place / "train.tsv", "--valid-count", 0, "--test-tsv", files["unknown"]), "label 'metal'"),
        ((*prepare, "--tsv", place / "train.tsv"), "of the training data; or --valid-tsv; or --valid-count 0 to train"),
        ((*prepare, "--valid-count", 3), "There are no training texts"),
        (
            (*prepare, "--texts", files["one"], "--labels", files["two"], "--valid-count", 0),
            "The files are not aligned",
        ),
        ((*prepare, "--tsv", files["empty"], "--valid-count", 0), "line 1 has no text"),
        ((*prepare, "--tsv", files["single"], "--valid-count", 0), "a classifier has 2 to 10,000"),
        ((*prepare, "--tsv", place / "train.tsv", "--valid-count", -1), "valid-count is -1"),
        (("evaluate", run, "--tsv", files["unknown"]), "which the model does not know; its labels are animal, colour"),
        (("evaluate", run, "--tsv", files["nothing"]), "there is nothing to evaluate"),
        (("evaluate", run, "--tsv", files["single"], "--split", "test"), "leave out --data and --split"),
        (("evaluate", run, "--picture", "a.gif"), "it must end in .png, .svg or .pdf"),
        (("evaluate", run, "--source", "a"), "--source is an option for the task translation"),
        (("score", run, "--tsv", files["unknown"]), "which the model does not know"),
        (
            ("classify", run, files["long"], "--max-tokens", 20),
            "long: line 1 has 41 tokens, EOS included, but at most 20",
        ),
        (("score", run, "--tsv", files["gap"], "--max-tokens", 20), "gap: line 2 has no text"),
        (("score", run, "--tsv", files["gap"], "--max-tokens", 20, *skip), "gap: text 2 has 41 tokens"),
        (("evaluate", run, "--tsv", files["gap"], "--max-tokens", 20, *skip), "gap: text 2 has 41 tokens"),
        (("evaluate", run, "--tsv", files["wide"], "--max-tokens", 20, *skip), "wide: line 1 has 41 tokens"),
        (("classify", run, files["one"], "--nbest", 4), "--nbest is 4, but the model has 3 labels"),
        (("classify", run, files["one"], "--nbest", 0), "num-return-sequences is 0"),
        (("classify", tmp_path / "none"), "there is no folder"),
        (("translate", run, files["one"]), "gives texts labels; use `manyheads classify`"),
        (("generate", run, "a"), "gives texts labels; use `manyheads classify`"),
        (("inspect", "shapes", run, "--text", "a"), "gives texts labels"),
        (("train", "--data.path", data), "Name --preset classifier-demo"),
        ((*train, "--training.num_sampled", 1), "training.num_sampled is 1"),
        ((*train, "--validation.best_by", "bleu"), "a classifier is judged by 'loss' or 'f1'"),
        ((*train, "--model.labels", "a", "b"), "leave model.labels out"),
        ((*train, "--model.positions", "none"), "model.positions none needs a relative bias"),
        ((*train, "--model.vocab_size", 5), "set it to 0, which uses them all"),
        ((*train, "--model.positions", "learned", "--model.max_len", 9), "data.max_len is 64, but the model has 9"),
        (("train", "--preset", "debug", "--run-dir", new, "--data.path", data), "holds labelled texts for classifiers"),
        (("train", "--preset", "xl-debug", "--run-dir", new, "--data.path", data), "holds data for classification"),
    ]
    for arguments, message in cases:
        assert manyheads(*arguments) == 2, arguments
        shown = capsys.readouterr().err
        assert message in shown, (arguments, shown)
        assert "Traceback" not in shown
        assert not (new / "manifest.json").exists()


def test_a_truncated_text_is_counted(place, manyheads, tmp_path, capsys):
    (tmp_path / "long").write_text("red " * 40)
    assert manyheads("classify", place / "run", tmp_path / "long", "--max-tokens", 20, "--too-long", "truncate") == 0
    shown = capsys.readouterr()
    assert shown.out == "colour\n"
    assert "lines cut because they were too long: 1" in shown.err


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_no_export_holds_a_classifier(place, manyheads, tmp_path, name, capsys):
    runtime = ["--runtime", tmp_path] if name == "web" else []
    assert manyheads("export", place / "run", "--to", name, "--output", tmp_path / "out", *runtime) == 2
    assert "transformer-classifier" in capsys.readouterr().err or runtime
    assert not (tmp_path / "out").exists()


def test_other_models_have_no_labels(model_folder: Path) -> None:
    with pytest.raises(ModelFileError, match="holds a transformer, which translates; use `manyheads translate`"):
        package.Classifier.from_pretrained(model_folder)


def test_a_wrong_precision_is_found_before_weights_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "manyheads.extras.classification.encoder_with_head.load", lambda *_, **__: pytest.fail("weights were read")
    )
    with pytest.raises(RequestError, match="precision is 'fp8'"):
        package.Classifier.from_pretrained(place / "run", "cpu", "fp8")  # type: ignore[arg-type]
