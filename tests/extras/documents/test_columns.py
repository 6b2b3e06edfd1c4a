"""CSV, TSV and JSONL: the named values change, and nothing else; Python's own readers compare the rest."""

import csv
import io
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.parts import Text

Texts = Callable[..., list[str]]
Translated = Callable[..., str]

CSV = '\ufeffid,text, note \r\n1,"i am tired, tom.",x\r\n\r\n2, where? ,"a ""b"""\r\n3,,\r\n4,"two\r\nlines",y\r\n5'


def test_csv(texts: Texts, translated: Translated) -> None:
    assert texts(CSV, "csv", ["text"]) == ["i am tired, tom.", "where?", "two", "lines"]
    expected = CSV.replace("i am tired, tom.", "I AM TIRED, TOM.").replace("where?", "WHERE?")
    assert translated(CSV, "csv", str.upper, ["text"]) == expected.replace("two\r\nlines", "TWO\r\nLINES")
    assert texts(CSV, "csv", ["note", "text"])[1:3] == ["x", "where?"]


def test_a_value_is_quoted_if_it_must_be(translated: Translated) -> None:
    assert translated("a;b\nx;y\n", "csv", lambda _: 'p;"q"', ["b"]) == 'a;b\nx;"p;""q"""\n'
    assert translated("a\tb\nx\ty\n", "tsv", lambda _: "p,q", ["b"]) == "a\tb\nx\tp,q\n"


def test_a_line_for_excel_names_the_delimiter_and_stays(translated: Translated) -> None:
    assert translated("\ufeffsep=;\r\na,c;b\r\nx;y\r\n", "csv", str.upper, ["b"]) == "\ufeffsep=;\r\na,c;b\r\nx;Y\r\n"
    assert translated("sep=;\nx,z;y\n", "csv", str.upper, ["1"]) == "sep=;\nX,Z;y\n"


def test_columns_by_number_have_no_header(texts: Texts) -> None:
    assert texts("a,b\nc,d\n", "csv", ["2"]) == ["b", "d"]


@pytest.mark.parametrize(
    ("format_name", "text", "columns", "message"),
    [
        ("csv", "a,b\n", [], "the first line has a, b"),
        ("csv", "a,b\n", ["c"], "there is no column 'c'; the first line has: a, b"),
        ("csv", "a,b\n", ["3"], "line 1 has 2 columns; column 3 was asked for"),
        ("csv", "a,b\n", ["²"], "there is no column"),
        ("csv", 'a,b\n"x,y\n', ["a"], "line 2 opens a quotation mark that is never closed until the end of the file"),
        ("jsonl", "{}\n", [], "for example text"),
        ("jsonl", '{"a": 1}\n{"b": 1}\n', ["b"], "line 1 has no key 'b'; its keys are: a"),
        ("jsonl", '{"a": 1}\n', ["a"], "line 1: the value of 'a' is neither a text"),
        ("jsonl", '{"a": "x"}\n{"a": "x"\n', ["a"], "line 2 is not a JSON object"),
        ("jsonl", '{"a": "x"}\n{"a": "\\ud800"}\n', ["a"], "line 2: a text contains half a surrogate pair (U+D800)"),
        ("jsonl", '[{"a": "x"}]\n', ["a"], "line 1"),
        ("jsonl", '{"a": "x"}\n{"a": "x"} {"a": "y"}\n', ["a"], "line 2: text follows the object"),
        ("markdown", "a", ["a"], "column a is given, but columns are of csv, tsv and jsonl only"),
    ],
)
def test_refusals(format_name: str, text: str, columns: list[str], message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        read_document(text, "FILE", format_name, columns)
    assert message in str(caught.value)
    assert "FILE" in str(caught.value)


JSONL = (
    '{"id": 1, "translation": {"en": "i am tired.",  "de": null}, "x":[1,2]}\n\n'
    ' {"translation":{"en":["a", "b c"]} , "b":2}\r\n'
)


def test_jsonl(texts: Texts, translated: Translated) -> None:
    assert texts(JSONL, "jsonl", ["translation.en"]) == ["i am tired.", "a", "b c"]
    expected = JSONL.replace("i am tired.", "I AM TIRED.").replace('"a"', '"A"').replace("b c", "B C")
    assert translated(JSONL, "jsonl", str.upper, ["translation.en"]) == expected


def test_a_key_may_have_a_dot_in_its_own_name(texts: Texts) -> None:
    assert texts('{"a.b": "x", "c": {"d.e": "y"}}\n', "jsonl", ["a.b", "c.d.e"]) == ["x", "y"]


def test_lines_of_a_value_stay_lines(texts: Texts, translated: Translated) -> None:
    text = '{"a": "one.\\n\\n  to c:\\\\new \\u00e9\\r\\n\\tthree\\n"}\n'
    assert texts(text, "jsonl", ["a"]) == ["one.", "to c:\\new é", "three"]
    expected = text.replace("one", "ONE").replace("to c:", "TO C:").replace("new", "NEW").replace("e9", "c9")
    assert translated(text, "jsonl", str.upper, ["a"]) == expected.replace("three", "THREE")


@pytest.mark.parametrize(("format_name", "text"), [("jsonl", '{"a":"x","b":1}\n'), ("csv", "a,b\nx,1\n")])
def test_a_column_that_is_named_twice(format_name: str, text: str, translated: Translated) -> None:
    assert translated(text, format_name, str.upper, ["a", "a"]) == text.replace("x", "X")


def test_letters_are_escaped_if_the_file_escapes_them(translated: Translated) -> None:
    assert translated('{"a": "\\u00e9"}', "jsonl", lambda _: "ü", ["a"]) == '{"a": "\\u00fc"}'
    assert translated('{"a": "e"}', "jsonl", lambda _: "ü", ["a"]) == '{"a": "ü"}'


@given(st.lists(st.lists(st.text('ab ",;\n', max_size=6), min_size=2, max_size=2), min_size=1, max_size=5))
def test_any_table(rows: list[list[str]]) -> None:
    file = io.StringIO()
    csv.writer(file).writerows([["k", "v"], *rows])
    text = file.getvalue()
    document = read_document(text, "file", "csv", ["v"])
    assert document.with_translations([one.parts for one in document.segments]) == (text, [])
    result, kept = document.with_translations([[Text('new "value"')] for _ in document.segments])
    assert not kept
    found = list(csv.reader(io.StringIO(result)))[1:]
    assert [row[0] for row in found] == [row[0] for row in csv.reader(io.StringIO(text))][1:]
    for before, after in zip(rows, found, strict=True):
        expected = ['new "value"' if line.strip() else "" for line in before[1].split("\n")]
        assert [line.strip() for line in after[1].split("\n")] == expected


@given(st.dictionaries(st.text('abé"\\', max_size=3), st.none() | st.integers() | st.text(max_size=5), max_size=4))
def test_any_object(record: dict[str, object]) -> None:
    text = json.dumps({**record, "key": "a text"}) + "\n"
    document = read_document(text, "file", "jsonl", ["key"])
    result, _ = document.with_translations([[Text("x")]])
    assert json.loads(result) == {**record, "key": "x"}
