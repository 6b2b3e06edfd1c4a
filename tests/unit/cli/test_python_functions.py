"""`manyheads.train`, `prepare` and `evaluate`: the commands as functions, and data from objects in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import manyheads as package
from manyheads.errors import ConfigError, DataError, ManyHeadsError
from manyheads.tasks.translation.settings import debug

PAIRS = [(f"a b {'c ' * (number % 5)}d", f"e {'f ' * (number % 5)}g") for number in range(60)]
SMALL = {"max_steps": 2, "plots": False, "tensorboard": False}
WORDS: dict[str, Any] = {"tokenizer": {"kind": "word"}, "valid_count": 10}


class Numbered(Dataset[tuple[str, str]]):
    """A data set of torch, which has no end of its own. num: of the pairs that it claims to have."""

    def __init__(self, num: int = len(PAIRS)) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, place: int) -> tuple[str, str]:
        return PAIRS[place % len(PAIRS)]


class Short:
    """Ends before its length, as a damaged data set does."""

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(PAIRS)


RECORDS = [{"id": 1, "translation": {"en": source, "de": target}} for source, target in PAIRS]
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "list": (PAIRS, {}),
    "generator": ((pair for pair in PAIRS), {}),
    "torch": (Numbered(), {}),
    "records": ([{"source": source, "target": target} for source, target in PAIRS], {}),
    "records with names": ([{"x": [], "s": s, "t": t} for s, t in PAIRS], {"source_key": "s", "target_key": "t"}),
    "translation": (RECORDS, {"source_lang": "en", "target_lang": "de"}),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return package.prepare(PAIRS, tmp_path_factory.mktemp("api") / "pairs", **WORDS)


@pytest.mark.parametrize("form", FORMS)
def test_any_iterable_gives_the_data_of_the_list(form: str, prepared: Any, tmp_path: Path) -> None:
    given, options = FORMS[form]
    more = {"task": "translation"} if form == "records with names" else {}
    found = package.prepare(given, tmp_path / "data", **WORDS, **options, **more)
    assert found.digest == prepared.digest
    assert found.path == tmp_path / "data"
    assert found.manifest["counts"]["train"]["pairs"] == 50
    assert found.manifest["origin"]["train"].startswith("the train data")


def test_the_data_is_that_of_the_command(prepared: Any, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS), "utf-8")
    found = package.prepare(output=tmp_path / "data", tsv=tmp_path / "pairs.tsv", **WORDS)
    assert found.digest == prepared.digest


@pytest.mark.parametrize(("documents", "num"), [("none", 0), ("files", 3), ("lines", 4)])
def test_texts(documents: str, num: int, tmp_path: Path) -> None:
    texts = ["one two", "three\nfour\n", "five two"]
    data = package.prepare(texts, tmp_path / "text", valid=[{"text": "two"}], level="words", documents=documents)
    (tmp_path / "a.txt").write_text("one two\nthree\nfour\nfive two\n", "utf-8")
    files = package.prepare(
        output=tmp_path / "files", task="lm", corpus=tmp_path / "a.txt", valid_bytes=0, level="words",
        documents="none",
    )  # fmt: skip
    assert data.manifest["counts"]["train"]["words"] == files.manifest["counts"]["train"]["words"] == 6
    if documents == "none":
        assert data.manifest["counts"]["train"]["tokens"] == files.manifest["counts"]["train"]["tokens"]
    ends = data.manifest["counts"]["train"]["tokens"] - 6
    assert ends >= num
    with pytest.raises(DataError, match=r"half a surrogate pair"):
        package.prepare(["a", "b \ud800"], tmp_path / "bad", valid_bytes=0)


def broken() -> Iterator[tuple[str, str]]:
    yield from PAIRS[:30]
    raise RuntimeError("the reader's own")


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (
            [("a", "b"), ("a", 5)],
            {"valid_count": 0},
            DataError,
            "the train data: item 2, target is '5', a int; give a text.",
        ),
        ([("a", "b"), "a b"], {"valid_count": 0}, DataError, "item 2 is 'a b', no pair; give pairs of texts"),
        ([("a", "b"), ("a", "b", "c")], {"valid_count": 0}, DataError, "no pair"),
        (["a", ("a", "b")], {"valid_bytes": 0}, DataError, "item 2 is .* a tuple; give a text."),
        ([{"source": "a", "target": None}], {"valid_count": 0}, DataError, "the value of 'target' is not text"),
        ([b"a"], {"valid_bytes": 0}, DataError, "a bytes; give a text"),
        ([], {}, DataError, "the train data has no items"),
        ("a text", {}, DataError, "the train data is 'a text', a str; give an iterable"),
        (7, {}, DataError, "a int; give an iterable"),
        (Short(), {"valid_count": 5}, DataError, "the train data has ended after 60 of its 100 items"),
        (broken(), {"valid_count": 5}, RuntimeError, "the reader's own"),
        (PAIRS, {}, ConfigError, "There is no validation data"),
        (PAIRS, {"valid_count": 5, "source": "x.en"}, ConfigError, "--source cannot be used beside other train data"),
        (PAIRS, {"valid_count": 5, "vocab_sice": 9}, ConfigError, "Did you mean --vocab-size"),
        (PAIRS, {"task": "classification"}, ConfigError, "for task 'classification' give files"),
        (None, {"valid": PAIRS}, ConfigError, "give data, too"),
        (["a"], {"layout": "enwik8"}, ConfigError, "layout is for files; leave it out."),
    ],
)
def test_data_that_is_refused(given: Any, options: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        package.prepare(given, tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


def test_a_run_from_a_preset_and_its_evaluation(prepared, tmp_path, capfd):
    run = tmp_path / "run"
    data = {"path": prepared.path}
    result = package.train("debug", run_dir=run, data=data, training=SMALL, callbacks=["csv"])
    assert (result.step, result.run_dir, result.stopped_by) == (2, run, "steps")
    assert (run / "metrics.csv").is_file()
    assert capfd.readouterr() == ("", "")
    again = package.train("debug", run_dir=run, data=data, training={**SMALL, "max_steps": 3})
    assert again.step == 3  # the run went on
    report = package.evaluate(run, split="valid", num_beams=1, max_new_tokens=3)
    assert report.to_json()["protocol"]["sentences"] == len(report.output) == 10
    assert report.to_json()["protocol"]["decoding"]["max_new_tokens"] == 3
    json.dumps(report.to_json())


def test_settings_as_an_object_or_a_file(prepared: Any, tmp_path: Path) -> None:
    config = debug()
    small = {"data": {"path": str(prepared.path)}, "training": SMALL, "validation": {"every_steps": 0}}
    first = package.train(config, run_dir=tmp_path / "object", **small)
    assert config.run_dir != str(tmp_path / "object")
    file = tmp_path / "mine.yaml"
    file.write_text(f"run_dir: {tmp_path}/file\n", "utf-8")
    second = package.train(file, **small, model=config.model, optimiser=config.optimiser, schedule=config.schedule)
    assert first.step == second.step == 2


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("debugg", {}, "there is no preset 'debugg'; there are: .* Did you mean debug"),
        ("debug", {"trainings": {}}, "the arguments: there is no setting trainings. Did you mean training"),
        ("debug", {"training": {"max_steps": "many"}}, "training.max_steps is 'many'"),
        ("debug", {"callbacks": ["wand"]}, "there is no logger 'wand'"),
        (None, {}, "nothing to train yet"),
    ],
)
def test_settings_that_are_refused(config: Any, settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        package.train(config, **{"run_dir": tmp_path / "run", **settings})
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_that_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManyHeadsError):
        package.evaluate(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--beems"):
        package.evaluate(tmp_path, beems=3)
