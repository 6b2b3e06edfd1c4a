"""A chart parser from end to end: trees are prepared, learned, judged and given."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import manyheads as package
from manyheads.cli.main import main
from manyheads.errors import ModelFileError, NonFiniteError, RequestError
from manyheads.extras.parsing.parser import ChartParser
from manyheads.extras.parsing.trees import format_tree, leaves_of, parse_tree

Cli = Callable[..., int]

NOUNS, VERBS = ("cat", "dog", "bird", "man"), ("sees", "likes", "hears")
TREES = [
    f"(ROOT (S (NP-SBJ (DT The) (NN {one})) (VP (VBZ {verb}) (NP (DT a) (NN {other}))) (. .)))"
    for one in NOUNS
    for other in NOUNS
    for verb in VERBS
]
SENTENCE = "The cat sees a dog ."
TREE = "(ROOT (S (NP (DT The) (NN cat)) (VP (VBZ sees) (NP (DT a) (NN dog))) (. .)))"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, prepared data and a run that has learned them."""
    folder = tmp_path_factory.mktemp("chart")
    (folder / "train.ptb").write_text("".join(f"{tree}\n" for tree in TREES))
    unseen = "(ROOT (INTJ (UH Oh)))\n"
    (folder / "test.ptb").write_text("".join(f"{tree}\n" for tree in TREES[::9]))
    (folder / "unseen.ptb").write_text((folder / "test.ptb").read_text() + unseen)
    files = [
        "--trees",
        folder / "train.ptb",
        "--valid-trees",
        folder / "unseen.ptb",
        "--test-trees",
        folder / "test.ptb",
    ]
    prepare = ["prepare", "--task", "spans", *files, "--vocab-size", "330", "--output", folder / "data"]
    assert main([str(one) for one in prepare]) == 0
    settings = {
        "run-dir": folder / "run",
        "data.path": folder / "data",
        "training.max_steps": 40,
        "training.save_every": 20,
        "training.plots": False,
        "training.tensorboard": False,
        "training.ema_decay": 0,
        "validation.every_steps": 20,
        "optimiser.learning_rate": 0.01,
        "model.dropout": 0,
        "model.feature_dropout": 0,
        "model.span_dropout": 0,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    assert main(["train", "--preset", "chart-debug", "--quiet", *options]) == 0
    return folder


def test_training_reports_f1(place: Path) -> None:
    records = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    judged = [record for record in records if "f1" in record]
    assert [record["step"] for record in judged] == [20, 40]
    assert 90 < judged[-1]["f1"] < 100  # the tree with an unseen label is not found
    config = json.loads((place / "run/model/config.json").read_text())
    assert config["task"] == "spans"
    assert config["constituents"] == ["NP", "S", "VP"]
    assert config["tags"] == [".", "DT", "NN", "VBZ"]
    assert config["root"] == "ROOT"
    assert "manyheads.Parser.from_pretrained" in (place / "run/model/README.md").read_text()


def test_evaluate(place, manyheads, printed, tmp_path, capsys):
    assert manyheads("evaluate", place / "run", "--output", tmp_path / "trees") == 0  # the run's test trees
    shown = capsys.readouterr().out
    assert "F1 = 100.00" in shown
    assert "most probable constituents of a chart, 3 labels, 4 tags" in shown
    assert (tmp_path / "trees").read_text().splitlines()[0] == TREES[0].replace("-SBJ", "")
    for given in (["--trees", place / "unseen.ptb"], ["--split", "valid"]):
        record = json.loads(printed("evaluate", place / "run", *given, "--json"))
        assert record["brackets"]["sentences"] == len(TREES[::9]) + 1
        assert 90 < record["brackets"]["f1"] < 100
        assert record["brackets"]["errors"] == 0


def test_trees_from_a_pipe(place, manyheads, printed, capsys, monkeypatch):
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    give(f"{SENTENCE}\n\n  The   man hears a\tbird .\n")
    lines = printed("translate", place / "run").splitlines()
    assert lines[:2] == [TREE, ""]
    assert [leaf.word for leaf in leaves_of(parse_tree(lines[2]))] == ["The", "man", "hears", "a", "bird", "."]
    give(f"{SENTENCE}\n")
    assert manyheads("translate", place / "run", "--json", "--verbose") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"line": 1, "source": SENTENCE, "tree": TREE}
    assert f"{place / 'run'} on " in shown.err
    assert "1 lines in " in shown.err


def test_from_python(place: Path, tmp_path: Path) -> None:
    parser = package.Parser.from_pretrained(place / "run", "cpu")
    assert repr(parser) == "Parser(ChartParser(transformer-spans, cpu, fp32))"
    found = parser(SENTENCE)
    assert format_tree(found.tree) == TREE
    assert not found.repairs
    sentences = [SENTENCE, "", "Oh ( dear )", "word " * 60]
    trees = [one and one.tree for one in parser.parse(sentences)]
    assert trees[1] is None
    assert [leaf.word for leaf in leaves_of(trees[2])] == ["Oh", "-LRB-", "dear", "-RRB-"]  # type: ignore[arg-type]
    assert len(leaves_of(trees[3])) == 60  # type: ignore[arg-type]
    assert [one and one.tree for one in map(parser, sentences)] == trees
    parser.save_pretrained(tmp_path / "copy")
    again = package.Parser.from_pretrained(tmp_path / "copy")
    assert [one and one.tree for one in again.parse(sentences)] == trees
    half = ChartParser.from_pretrained(place / "run", "cpu", "bf16")
    assert half.parse([SENTENCE]) == [found.tree]
    with pytest.raises(RequestError, match="does not search over text; leave out num_beams"):
        parser(SENTENCE, num_beams=4)
    with pytest.raises(RequestError, match="no search over text"):
        _ = parser.translator
    with pytest.raises(RequestError, match="list of sentences"):
        half.parse(SENTENCE)


def test_a_model_that_gives_nan_gives_no_tree(place: Path) -> None:
    parser = ChartParser.from_pretrained(place / "run")
    with torch.no_grad():
        for parameter in parser.model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="gave NaN log-probabilities"):
        parser.parse([SENTENCE])
    with pytest.raises(NonFiniteError, match="gave NaN log-probabilities"):
        parser.log_probs([TREE])


def test_scores_info_and_average(place, manyheads, tmp_path, capsys):
    trees = [TREE, TREE.replace("(VP (VBZ sees) (NP (DT a) (NN dog)))", "(NP (VBZ sees) (DT a)) (NN dog)")]
    (tmp_path / "two.ptb").write_text("\n".join(trees))
    assert manyheads("score", place / "run", "--trees", tmp_path / "two.ptb") == 0
    right, wrong = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert right[1] == wrong[1] == "6"
    assert -8 < float(right[0]) < 0
    assert float(wrong[0]) < float(right[0]) - 2
    for folder in ("run", "run/model", "data"):
        assert manyheads("info", place / folder, "--verify") == 0
    shown = capsys.readouterr().out
    assert "transformer-spans" in shown
    assert manyheads("average", place / "run", "--last", "2", "--output", tmp_path / "mean") == 0
    assert package.Parser.from_pretrained(tmp_path / "mean")(SENTENCE) is not None


def test_several_as_one(place, manyheads, printed, tmp_path, capsys):
    run, other = place / "run", tmp_path / "mean"
    assert manyheads("average", run, "--last", "2", "--output", other) == 0
    (tmp_path / "tree").write_text(TREE)
    (tmp_path / "sentence").write_text(SENTENCE)
    averaged = package.Parser.from_pretrained([run, other], "cpu").chart
    capsys.readouterr()
    score = float(printed("score", run, "--trees", tmp_path / "tree", "--ensemble", other).split()[0])
    assert score == pytest.approx(float(averaged.log_probs([TREE])), abs=1e-5)
    assert score != pytest.approx(float(ChartParser.from_pretrained(run, "cpu").log_probs([TREE])), abs=1e-4)
    assert manyheads("translate", run, tmp_path / "sentence", "--verbose", "--ensemble", other) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{TREE}\n"
    assert f"{run} + {other} on " in shown.err
    assert manyheads("evaluate", run, "--ensemble", other) == 0
    shown = capsys.readouterr()
    assert "F1 = 100.00" in shown.out
    assert f"  model      {run} + {other}, " in shown.out


def test_a_model_on_the_hub(place, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *arguments, **more: str(place / "run/model"))
    Path("sentences").write_text(f"{SENTENCE}\n")
    assert printed("translate", "owner/chart", "sentences") == f"{TREE}\n"
    assert "F1 = 100.00" in printed("evaluate", "owner/chart", "--trees", place / "test.ptb")
    assert len(printed("score", "--trees", place / "test.ptb", "owner/chart").splitlines()) == len(TREES[::9])


def test_the_card_of_a_parser(place, manyheads, printed, tmp_path, capsys):
    assert manyheads("evaluate", place / "run", "--json") == 0
    (tmp_path / "figures.json").write_text(capsys.readouterr().out)
    figures = ["--evaluation", tmp_path / "figures.json", "--dry-run"]
    card = printed("push", place / "run", "owner/chart", *figures)
    assert "| F1 of brackets | 100 | `evalb:COLLINS" in card
    assert "It gives a sentence its constituent tree." in card
    assert "It continues text" not in card


def test_what_a_tokenizer_comes_from(place, model_folder, printed, tmp_path):
    files = ["--trees", place / "train.ptb", "--valid-trees", place / "test.ptb"]
    for number, (model, is_begun_from) in enumerate(((place / "run", True), (model_folder, False))):
        more = ["--tokenizer", model, "--output", tmp_path / str(number)]
        shown = printed("prepare", "--task", "spans", *files, *more)
        assert ("or begin from that model" in shown) == is_begun_from
        assert shown.count(" words") == 2  # of the two splits


def test_a_run_goes_on_from_a_model(place: Path, manyheads: Cli, tmp_path: Path) -> None:
    more = ["--init", place / "run", "--data.path", place / "data", "--run-dir", tmp_path / "on", "--quiet"]
    assert manyheads("train", *more, "--training.max-steps", "2", "--training.plots", "false") == 0
    assert (tmp_path / "on/model/model.safetensors").is_file()


def test_what_is_refused(place: Path, manyheads: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "run/model", tmp_path / "alone")
    (tmp_path / "empty").write_text("")
    (tmp_path / "flat").write_text("(ROOT (NN a))\n")
    (tmp_path / "bad").write_text("(ROOT (NP (NN a))\n")
    (tmp_path / "long").write_text(f"(ROOT\n  (NN\n  a))\n(ROOT {'(NN a) ' * 300})\n")
    (tmp_path / "sentences").write_text(f"{SENTENCE}\n{'a ' * 300}\n")
    valid, out = ["--valid-trees", place / "test.ptb"], ["--output", tmp_path / "out"]
    prepare = ["prepare", "--task", "spans"]
    for command, message in (
        ([*prepare, "--trees", tmp_path / "empty", *valid, *out], "There are no train trees in"),
        ([*prepare, "--trees", place / "test.ptb", "--valid-trees", tmp_path / "empty", *out], "no valid trees in"),
        ([*prepare, "--trees", tmp_path / "flat", *valid, *out], "has a constituent below its root"),
        ([*prepare, "--trees", tmp_path / "bad", *valid, *out], "not closed"),
        ([*prepare, "--trees", place / "test.ptb", *out], "Give --valid-trees FILE"),
        ([*prepare, "--trees", place / "test.ptb", *valid, *out, "--tree-words", "write"], "needs --task parsing"),
        (["evaluate", place / "run", "--trees", tmp_path / "empty"], "there is nothing to evaluate"),
        (
            ["evaluate", place / "run", "--trees", tmp_path / "long"],
            "long: tree 2 has 300 words, but the model reads at most",
        ),
        (["score", place / "run", "--trees", tmp_path / "long"], "long: tree 2 has 300 words"),
        (["evaluate", tmp_path / "alone"], "give --data FOLDER, or --trees FILE"),
        (["evaluate", place / "run", "--trees", "x", "--split", "test"], "leave out --data and --split"),
        (["translate", place / "run", tmp_path / "sentences"], "sentences: line 2 has 300 words"),
        (["translate", place / "run", tmp_path / "sentences", "--beam", "4"], "is a chart parser"),
        (["translate", place / "run", tmp_path / "sentences", "--shortlist", "9"], "leave out --shortlist"),
        (["translate", place / "run", tmp_path / "sentences", "--rerank", "x"], "leave out --rerank"),
        (["score", place / "run", "--trees", place / "unseen.ptb"], "has the label 'INTJ', which no training tree"),
        (["train", "--preset", "chart-debug", "--run-dir", tmp_path / "r"], "prepare --task spans"),
        (
            ["train", "--preset", "chart-debug", "--data.path", place / "data", "--model.max-len", "5"],
            "data.max_len is 64, but the model has 5 positions",
        ),
        (["train", "--preset", "debug", "--data.path", place / "data", "--run-dir", tmp_path / "r"], "chart parser"),
        (["train", "--data.path", place / "data", "--run-dir", tmp_path / "r"], "Name --preset chart-parser"),
    ):
        capsys.readouterr()
        assert manyheads(*command) == 2, command
        assert message in " ".join(capsys.readouterr().err.split()), command
    assert not (tmp_path / "out").exists()


def test_other_models_have_no_chart(model_folder: Path) -> None:
    with pytest.raises(ModelFileError, match="translates"):
        ChartParser.from_pretrained(model_folder)
