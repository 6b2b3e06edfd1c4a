"""Every field of the manifest of prepared data has its type, or the folder is refused and the message names both."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from slices import drawn

from manyheads.cli.main import main
from manyheads.cli.records import describe_folder
from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.prepared_folder import prepared_task
from manyheads.data.preparing import write_manifest
from manyheads.data.translation.prepared import PreparedData
from manyheads.data.translation.preparing import PairList, prepare_corpus
from manyheads.errors import ManyHeadsError
from manyheads.extras.classification.labelled_files import LabelledList
from manyheads.extras.classification.prepare import LabelledData, prepare_labelled
from manyheads.extras.parsing.span_data import SpanData
from manyheads.extras.parsing.span_task.prepare import prepare_spans
from manyheads.extras.parsing.tokenizer import ParsingTask, TreeFile
from manyheads.extras.parsing.trees import ParsingSettings
from manyheads.text.settings import TokenizerSettings, VocabularySettings

SETTINGS = TokenizerSettings(vocab_size=300)
OTHERS: list[Any] = [None, True, 7, -1, 1.5, "many", "\ud800", [1], [[]], {"a": 1}, {"train": [1]}, {}]
KINDS: dict[str, Any] = {
    "translation": PreparedData,
    "language-modelling": TextData,
    "classification": LabelledData,
    "spans": SpanData,
}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "data"
    if request.param == "translation":
        pairs = PairList("x", [(f"a cat {n}", f"eine Katze {n}") for n in range(9)])
        prepare_corpus(path, train=pairs, valid=pairs, tokenizer=SETTINGS, languages=[("en", "de")])
    elif request.param == "language-modelling":
        text = TextBlock("t", b"The cat sees the dog.\n" * 9)
        prepare_text(path, train=text, valid=text, vocabulary=VocabularySettings(level="words"))
    elif request.param == "classification":
        rows = [("no", "red blue red"), ("yes", "cat dog"), ("no", "blue")]
        prepare_labelled(path, train=labelled(rows), valid=labelled(rows), tokenizer=SETTINGS)
    else:
        (tmp_path / "trees").write_text("(ROOT (S (NP (PRP She)) (VP (VBZ sleeps)) (. .)))\n", encoding="utf-8")
        trees = TreeFile(path=tmp_path / "trees", task=ParsingTask(ParsingSettings(tags="keep")))
        prepare_spans(path, train=trees, valid=trees, tokenizer=SETTINGS)
    return path


def places(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value, also to those within others."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


def changed(folder: Path, file: str = "manifest.json") -> Iterator[tuple[str, Any]]:
    """Write the manifest with one field of another type at a time, sealed. Returns: the field's name and the value.

    A fifth of the values, two or three for each field; all of them without xdist.
    """
    original = (folder / file).read_text(encoding="utf-8")
    cases = list(product(places(json.loads(original)), OTHERS))
    for number in sorted(drawn(len(cases), 5, "types of fields")):
        place, other = cases[number]
        content = json.loads(original)
        at = content
        for key in place[:-1]:
            at = at[key]
        if type(at[place[-1]]) is type(other) and not isinstance(other, dict | list):
            continue
        at[place[-1]] = other
        try:
            write_manifest((folder / file).parent, content)
        except UnicodeEncodeError:
            continue
        yield ".".join(map(str, place)), other
    (folder / file).write_text(original, encoding="utf-8")


def refusal(kind: Any, folder: Path) -> str | None:
    """What opening, describing or `info` says against the folder; None: all work. Any other error is raised."""
    try:
        kind.open(folder, verify=False).describe()
        describe_folder(folder)
    except ManyHeadsError as error:
        return str(error)
    return None


def test_a_field_of_another_type_is_refused_by_name_or_harmless(folder: Path) -> None:
    kind, tried, refused = KINDS[prepared_task(folder)], 0, 0
    for field, other in changed(folder):
        tried += 1
        error = refusal(kind, folder)
        if error:
            refused += 1
            assert str(folder) in error, (field, other)
        else:
            top = field.split(".")[0]
            assert top not in ("counts", "label_counts", "languages", "origin", "files") or other in ({}, {"a": 1}), (
                field,
                other,
            )
    assert tried > 60
    assert refused > tried * 3 // 4


def test_the_manifest_of_a_store_too(folder: Path) -> None:
    kind = KINDS[prepared_task(folder)]
    for field, other in changed(folder, "valid/manifest.json"):
        error = refusal(kind, folder)
        assert error is None or str(folder) in error, (field, other)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("counts", [1], r"counts is \[1\] \("),
        ("counts.train", [1], r"counts\.train is \[1\] \("),
        ("counts.train.pairs", "many", r'counts\.train\.pairs is "many" \('),
        ("counts.train.pairs", True, r"counts\.train\.pairs is true \("),
        ("counts.train.pairs", -1, r"counts\.train\.pairs is -1, below 0"),
        ("task.name", 3, r"task\.name is 3"),
        ("languages", [["en"]], r"languages\.0\.1 is"),
        ("tokenizer.vocab_size", "330", r'tokenizer\.vocab_size is "330"'),
    ],
)
@pytest.mark.parametrize("folder", ["translation"], indirect=True)
def test_the_message_names_file_field_and_value(folder, field, value, message, capsys):
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    at = content
    *above, last = field.split(".")
    for key in above:
        at = at[key]
    at[last] = value
    write_manifest(folder, content)
    with pytest.raises(ManyHeadsError, match=rf"data/manifest\.json is damaged: {message}"):
        PreparedData.open(folder)
    for command in (["train", "--data.path", str(folder)], ["info", str(folder)]):
        assert main(command) == 2
        assert "manifest.json is damaged: " in capsys.readouterr().err


def labelled(rows: list[tuple[str, str]]) -> LabelledList:
    from manyheads.extras.classification.labelled_files import Labelled

    return LabelledList("x", [Labelled(label, text, number) for number, (label, text) in enumerate(rows, 1)])
