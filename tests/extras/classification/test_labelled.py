"""Labelled texts: the forms of files, what is refused, the prepared folder, and batches by position."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads.errors import ConfigError, DataError
from manyheads.extras.classification.labelled_files import Labelled, LabelledFiles, LabelledList, LabelledReport
from manyheads.extras.classification.labelled_store import LabelledStore, LabelledStream, eval_labelled
from manyheads.extras.classification.prepare import (
    LabelledData,
    describe_balance,
    languages_of,
    open_labelled,
    prepare_labelled,
)
from manyheads.extras.classification.settings import LabelledSettings
from manyheads.text.settings import TokenizerSettings

ROWS = [("no", "red blue red"), ("yes", "cat dog"), ("no", "blue"), ("yes", "dog dog cat cat")]
WORDS = TokenizerSettings(kind="word", vocab_size=20)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def read(**given: Any) -> tuple[list[Labelled], LabelledReport]:
    report = LabelledReport()
    return list(LabelledFiles(**given).read(report)), report


def test_the_three_forms_say_the_same(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", "".join(f"{label}\t{text}\n" for label, text in ROWS))
    lines = [json.dumps({"meta": {"topic": label}, "body": text}) for label, text in ROWS]
    jsonl = write(tmp_path / "a.jsonl", "\n".join(lines))
    texts = write(tmp_path / "texts", "".join(f"{text}\n" for _, text in ROWS))
    labels = write(tmp_path / "labels", "".join(f" {label}\n" for label, _ in ROWS))
    expected = [Labelled(label, text, number) for number, (label, text) in enumerate(ROWS, 1)]
    assert read(tsv=tsv)[0] == expected
    assert read(jsonl=jsonl, label_key="meta.topic", text_key="body")[0] == expected
    assert read(texts=texts, labels=labels)[0] == expected


def test_numbers_are_labels_and_tabs_are_text(tmp_path: Path) -> None:
    assert read(jsonl=write(tmp_path / "a", '{"label": 3, "text": "one\\ntwo"}'))[0] == [Labelled("3", "one two", 1)]
    nested = write(tmp_path / "c", '{"meta": {"label": 4}, "text": "a"}')
    assert read(jsonl=nested, label_key="meta.label")[0] == [Labelled("4", "a", 1)]
    assert read(tsv=write(tmp_path / "b", "x\tone\ttwo\n"))[0] == [Labelled("x", "one two", 1)]


def test_the_columns_of_a_table_have_names_or_numbers(tmp_path: Path) -> None:
    table = write(tmp_path / "a.tsv", 'id\ttext\tlabel\n1\t"Yes," he said.\tpos\n2\tNo.\tneg\n')
    expected = [Labelled("pos", '"Yes," he said.', 2), Labelled("neg", "No.", 3)]
    rows, report = read(tsv=table, text_key="text", label_key="label")
    assert (rows, report.headers_kept) == (expected, 0)
    rows, report = read(tsv=table, text_key="2", label_key="3")
    assert (rows, report.headers_kept) == ([Labelled("label", "text", 1), *expected], 1)
    with pytest.raises(DataError, match="there is no column 'topic'; the first line has: id, text, label"):
        read(tsv=table, text_key="text", label_key="topic")
    with pytest.raises(
        DataError, match=r"line 1 looks like a header: label, text\. .* give --label-key 1 --text-key 2"
    ):
        read(tsv=write(tmp_path / "b.tsv", "label\ttext\npos\tYes.\n"))
    with pytest.raises(DataError, match="line 2 has 4 columns, but the first has 3"):
        read(tsv=write(tmp_path / "c.tsv", "id\ttext\tlabel\n1\ta\tb\tc\n"), text_key="text", label_key="label")


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("tsv", "no\tred\nblue\n", r"line 2 has no tab: 'blue'; expected label<TAB>text"),
        ("tsv", "no\tred\nyes\t \n", r"line 2 has no text; correct it, or leave out such lines by --on-empty skip"),
        ("tsv", "no\tred\n\tcat\n", r"line 2 has no label; correct it"),
        ("tsv", "no\tred\n\nyes\tcat\n", r"line 2 has no label"),
        ("jsonl", '{"label": "no"}\n', r"line 1 has no key 'text'; its keys are: label"),
        ("jsonl", '{"label": true, "text": "a"}\n', r"the value of 'label' is not text: 'True'"),
        ("jsonl", "[1]\n", r"line 1 is not a JSON object"),
        ("jsonl", "{\n", r"line 1 is not valid JSON"),
        ("jsonl", '{"label": "a", "text": "\\ud800"}\n', r"half a surrogate pair"),
    ],
)
def test_what_a_file_must_not_contain(tmp_path: Path, form: str, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(**{form: write(tmp_path / "file", content)})


def test_what_is_skipped_is_counted(tmp_path: Path) -> None:
    rows, report = read(tsv=write(tmp_path / "a", "no\tred\n\n\tcat\nyes\tdog\n"), on_empty="skip")
    assert [row.line for row in rows] == [1, 4]
    assert (report.lines, report.empty_dropped) == (4, 2)
    jsonl = write(tmp_path / "b", '{"label": "a", "text": "\\ud800"}\n{"label": "a", "text": "b"}')
    assert [row.text for row in read(jsonl=jsonl, on_bad_utf8="replace")[0]] == ["\ufffd", "b"]
    assert [row.text for row in read(jsonl=jsonl, on_bad_utf8="skip")[0]] == ["b"]


def test_files_of_unlike_length_and_forms(tmp_path: Path) -> None:
    texts, labels = write(tmp_path / "texts", "red\nblue\ncat\n"), write(tmp_path / "labels", "no\nno\n")
    with pytest.raises(DataError, match=r"not aligned: .*texts has 3 lines, .*labels has 2 .*Align the files again"):
        read(texts=texts, labels=labels)
    with pytest.raises(ConfigError, match="There is a file of texts but none of labels"):
        read(texts=texts)
    with pytest.raises(ConfigError, match="given: tsv and jsonl"):
        read(tsv="a", jsonl="b")
    with pytest.raises(ConfigError, match="cannot both be standard input"):
        read(texts="-", labels="-")


def split(*rows: tuple[str, str]) -> LabelledList:
    return LabelledList("given", [Labelled(label, text, number) for number, (label, text) in enumerate(rows, 1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labelled") / "data"
    prepare_labelled(path, train=split(*ROWS), valid=split(*ROWS[1:3], ("no", "red")), tokenizer=WORDS)
    return path


def test_a_prepared_folder(folder: Path) -> None:
    data = LabelledData.open(folder)
    assert data.labels == ("no", "yes")
    assert data.train.label.tolist() == [0, 1, 0, 1]
    assert data.tokenizer.decode(data.train.text[1].tolist()) == "cat dog"
    assert [(row.label, row.text) for row in data.texts["valid"]] == [ROWS[1], ROWS[2], ("no", "red")]
    assert data.manifest["counts"]["valid"]["known_texts"] == 2
    assert data.manifest["label_counts"]["train"] == {"no": 2, "yes": 2}
    assert "labels no 2, yes 2; always answering no would be right in 50.0%" in data.describe()


def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "valid.label.txt").write_text("no\n")
    with pytest.raises(DataError):
        LabelledData.open(copy)


def test_imbalance_is_told() -> None:
    assert "imbalanced, 4.5 to 1" in describe_balance({"a": 9, "b": 2})
    assert "imbalanced" not in describe_balance({"a": 5, "b": 2})
    many = describe_balance({f"l{number:02}": 100 - number for number in range(20)})
    assert "l11 89, ... l19 81" in many


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (ROWS, [("maybe", "cat")], r"given: line 1 has the label 'maybe', which no training text has; .* are no, yes"),
        ([("no", "a"), ("no", "b")], ROWS, r"given has 1 labels \(no\), but a classifier has 2 to 10,000"),
        (ROWS, [], r"There are no test texts in given"),
        ([], ROWS, r"There are no train texts in given"),
    ],
)
def test_what_cannot_be_prepared(tmp_path: Path, train: Any, test: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare_labelled(tmp_path / "data", train=split(*train), test=split(*test), tokenizer=WORDS)
    assert not (tmp_path / "data").exists()


def test_texts_are_held_back_by_their_hash(tmp_path: Path) -> None:
    """The order does not matter, equal texts stay together, and sorted labels are no trap."""
    rows = [(label, f"{word} {n // 2}") for label, word in (("no", "red"), ("yes", "cat")) for n in range(40)]
    found = []
    for name, given in (("a", rows), ("b", rows[::-1])):
        prepare_labelled(tmp_path / name, train=split(*given), tokenizer=WORDS, num_held_back=20)
        data = LabelledData.open(tmp_path / name)
        assert len(data.texts["valid"]) == 20
        assert len(data.train) == 60
        assert data.manifest["counts"]["valid"]["known_texts"] == 0
        found.append(sorted(data.texts["valid"]))
    assert found[0] == found[1]
    assert {row.label for row in found[0]} == {"no", "yes"}
    with pytest.raises(DataError, match="Hold back fewer"):
        prepare_labelled(tmp_path / "c", train=split(*ROWS), tokenizer=WORDS, num_held_back=4)


def test_batches_have_each_text_once_and_pad_only_what_they_must() -> None:
    random = np.random.default_rng(0)
    rows = [(random.integers(4, 30, size=length).tolist(), length % 3) for length in range(1, 40)]
    store = LabelledStore.from_lists(rows, 30)
    settings = LabelledSettings(max_tokens=60, max_len=30, accumulate=2)
    stream = LabelledStream(store, settings, 1, pad_id=0, eos_id=2)
    seen: list[int] = []
    for row in range(stream.rows(0)):
        batches = stream.at(0, row)
        assert sum(batch.size for batch in batches) <= 60
        for batch in batches:
            seen += batch.sample_ids.tolist()
            for tokens, length, label, sample in zip(
                batch.tokens, batch.lengths.tolist(), batch.labels, batch.sample_ids, strict=True
            ):
                ids = rows[int(sample)][0][:29]
                assert tokens.tolist() == [*ids, 2] + [0] * (len(tokens) - length)
                assert int(label) == rows[int(sample)][1]
    assert sorted(seen) == list(range(39))
    again = LabelledStream(store, settings, 1, pad_id=0, eos_id=2)
    assert [one.sample_ids.tolist() for one in again.at(0, 3)] == [one.sample_ids.tolist() for one in stream.at(0, 3)]
    assert "10 too long and truncated" in stream.describe()
    judged = [place for batch in eval_labelled(store, 60, pad_id=0, eos_id=2) for place in batch.sample_ids.tolist()]
    assert sorted(judged) == list(range(39))


def test_too_long_for_training() -> None:
    store = LabelledStore.from_lists([([5] * 9, 0), ([5], 1)], 30)
    special = {"pad_id": 0, "eos_id": 2}
    with pytest.raises(DataError, match=r"the first is text 1 with 10 tokens, and data.max_len is 5"):
        LabelledStream(store, LabelledSettings(max_tokens=60, max_len=5, too_long="fail"), 1, **special)
    dropped = LabelledStream(store, LabelledSettings(max_tokens=60, max_len=5, too_long="drop"), 1, **special)
    assert [batch.sample_ids.tolist() for batch in dropped.at(0, 0)] == [[1]]
    long = LabelledStore.from_lists([([5] * 9, 0), ([5] * 3, 1)], 30)
    with pytest.raises(DataError, match=r"all 2 are longer than data.max_len 2"):
        LabelledStream(long, LabelledSettings(max_tokens=60, max_len=2, too_long="drop"), 1, **special)


def test_names_of_data(tmp_path: Path, folder: Path) -> None:
    assert {row.label for row in languages_of("valid")} == {"en", "de"}
    with pytest.raises(ConfigError, match="There is no labelled corpus 'embedded:genres'"):
        open_labelled(LabelledSettings(path="embedded:genres"), WORDS, tmp_path)
    with pytest.raises(DataError, match="manyheads prepare --task classification"):
        open_labelled(LabelledSettings(path=str(tmp_path / "none")), WORDS, tmp_path)
    assert open_labelled(LabelledSettings(path=str(folder)), WORDS, tmp_path).labels == ("no", "yes")
