"""Several runs in one table and one picture."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.extras.inspect.drawings.curves import compared_curves_figure
from manyheads.training.record.log import Metrics

Cli = Callable[..., int]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: two with BLEU, of which the second is better, and one that has just begun."""
    place = tmp_path_factory.mktemp("runs")
    for name, bleu in (("first", 12.5), ("second", 20.0), ("new", None)):
        (place / name).mkdir()
        (place / name / "config.yaml").write_text(
            "data: {path: data/mine}\nmodel: {architecture: transformer}\n", encoding="utf-8"
        )
        if bleu is not None:
            records = [
                {"step": 10, "valid_nll": 4.0, "bleu": bleu / 2},
                {"step": 20, "valid_nll": 3.0, "bleu": bleu, "best": True},
            ]
            lines = "".join(f"{json.dumps(record)}\n" for record in records)
            (place / name / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return place


def done(runs: Path) -> list[Path]:
    return [runs / "first", runs / "second"]


def test_one_table_best_first(runs, manyheads, printed, capsys):
    heading, *rows = printed("info", *sorted(runs.iterdir()), "--sort", "bleu").splitlines()
    assert heading.split() == ["run", "data", "architecture", "step", "valid_nll", "bleu"]
    assert [Path(row.split()[0]).name for row in rows] == ["second", "first", "new"]
    assert [row.split()[-1] for row in rows] == ["20.00", "12.50", "-"]
    assert manyheads("info", runs / "first", runs / "second", "--json") == 0
    assert [row["valid_nll"] for row in json.loads(capsys.readouterr().out)] == [3.0, 3.0]


def test_one_picture(runs: Path, manyheads: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "compared.svg"
    assert manyheads("info", *runs.iterdir(), "--curves", picture) == 0
    assert picture.is_file()
    figure = compared_curves_figure({path.name: Metrics(path / "metrics.jsonl").read() for path in done(runs)})
    loss, bleu = figure.axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["first  3", "second  3"]
    assert [list(line.get_ydata()) for line in bleu.get_lines()] == [[6.25, 12.5], [10.0, 20.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sort", "blue"), "--sort is 'blue'; these runs have run, data, architecture, step, valid_nll, bleu. Did"),
        (("--verify",), "--length and --verify take one PATH, but 2 were given"),
        (("--length", "64"), "--length and --verify take one PATH, but 2 were given"),
        (("--curves", "a.txt"), "--curves a.txt: it must end in .png, .svg, .pdf"),
    ],
)
def test_mistakes(runs, refused, options, message):
    assert message in refused("info", runs / "first", runs / "second", *options)


def test_only_runs_are_compared(runs, model_folder, refused):
    assert "is no run but model" in refused("info", runs / "first", model_folder)
    assert "None of these runs has a validation yet" in refused("info", runs / "new", "--curves", "a.png")
