"""Pairs from CSV, TMX and Parquet files, and nested keys."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from manyheads.data.lines import ReadReport
from manyheads.data.translation.readers import PairFiles, nested_value
from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.parts import Text
from manyheads.extras.tables.pairs import parquet_pairs, table_pairs

KEYS = ("en", "de")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def csv_pairs(path: Path, keys: tuple[str | None, str | None], policy: Any, report: ReadReport) -> Any:
    return table_pairs(path, keys, policy, report, is_tsv=path.suffix == ".tsv")


def test_nested_value() -> None:
    record = {"translation": {"en": "a"}, "x.y": "b", "n": 1}
    assert nested_value(record, "translation.en", "line 1") == "a"
    assert nested_value(record, "x.y", "line 1") == "b"
    with pytest.raises(DataError, match=r"line 1 has no key 'translation\.fr'; its keys are: en"):
        nested_value(record, "translation.fr", "line 1")
    with pytest.raises(DataError, match="value of 'n' is not text"):
        nested_value(record, "n", "line 1")
    with pytest.raises(DataError, match=r"no key 'n\.x'; its keys are: none"):
        nested_value(record, "n.x", "line 1")


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", '\ufeffid,de, en \r\n1,"Hund, ""gut""",dog\r\n\r\n2,"zwei\nZeilen",two\n')
    report = ReadReport()
    found = list(csv_pairs(path, KEYS, "fail", report))
    assert found == [("dog", 'Hund, "gut"'), ("", ""), ("two", "zwei Zeilen")]
    assert report.line_breaks_replaced == 1
    semicolons = write(tmp_path, "b.csv", "en;de\na, b;c\n")
    assert list(csv_pairs(semicolons, KEYS, "fail", ReadReport())) == [("a, b", "c")]
    for sep in ("sep=;\r\n", '\ufeff"sep=;"\n'):  # a line for Excel
        named = write(tmp_path, "s.csv", f"{sep}en;de,at\na, b;c\n")
        assert list(csv_pairs(named, ("en", "de,at"), "fail", ReadReport())) == [("a, b", "c")]
    for sep in ("", "\ufeff", "sep=;\n"):
        bare = write(tmp_path, "n.csv", f'{sep}"a, ""b"", f, g";d;"e\nh"\n2;1;3\n')
        assert list(csv_pairs(bare, ("1", "3"), "fail", ReadReport())) == [('a, "b", f, g', "e h"), ("2", "3")]
    numbered = write(tmp_path, "o.csv", "1,2\na,b\n")
    assert list(csv_pairs(numbered, ("2", "1"), "fail", ReadReport())) == [("b", "a")]
    unended = write(tmp_path, "c.csv", 'en,de\na,"b\nc"')
    assert list(csv_pairs(unended, KEYS, "fail", ReadReport())) == [("a", "b c")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "no column 'en'; the first line has: a, b"),
        ("", "no column 'en'"),
        ("x,en,de\n1,a\n", "line 2 has 2 col"),
        ("a,b\n", "Numbers, from 1, name the columns of a file without a header"),
        ("sep=,\nx,en,de\n1,a\n", "line 3 has 2 col"),
        ("sep=;", "no column 'en'; the first line has: none"),
        ('en,de\na,b\n"c\nd",e\nf,"g\nh,i\n', "line 5 opens a quotation mark that is never closed"),
        ("en,de\ra,b\r", "has a carriage return in a row"),
        ("en,de\na\rb,c\n", "has a carriage return in a row"),
    ],
)
def test_csv_refusals(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        list(csv_pairs(write(tmp_path, "a.csv", text), KEYS, "fail", ReadReport()))


def test_csv_numbers_beyond_a_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 has 2 columns; column 3 was asked for"):
        list(csv_pairs(write(tmp_path, "a.csv", "a,b,c\nd,e\n"), ("1", "3"), "fail", ReadReport()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'en,de\n"He said \\"no\\".","Er sagte."\n',
            r"line 2: the text .* follows a closing .* not written with a back",
        ),
        ('en,de\n"Hello,Hallo\nGood day.,Guten Tag.\n"Yes",Ja\n', r"line 4: the text 'Yes\",Ja' .* begins in line 2"),
        ('en,de\n"a" b,c\n', r"line 2: the text ' b,c' follows a closing quotation mark; double the marks"),
        ("en,de\nHello, my friend,Hallo\n", r"line 2 has 3 columns, but the first has 2"),
        ("en,en\na,b\n", "there are 2 columns 'en'"),
    ],
)
@pytest.mark.parametrize("form", ["prepare", "translate"])
def test_malformed_csv_is_refused_everywhere(text: str, message: str, form: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", text)
    readers = {
        "prepare": lambda: list(csv_pairs(path, KEYS, "fail", ReadReport())),
        "translate": lambda: read_document(text, "a.csv", "csv", ["en"]),
    }
    with pytest.raises(DataError, match=message):
        readers[form]()


TSV = 'id\ten\tde\n1\t"Yes," he said.\t"Ja", sagte er.\n\n2\t"Yes."\t"Ja."\n3\t"He said ""no""."\t5" Rohr\n'


def test_quotation_marks_in_tsv_are_text_everywhere(tmp_path: Path) -> None:
    """Only a cell that a spreadsheet has quoted is read without its marks."""
    path = write(tmp_path, "a.tsv", TSV)
    expected = [('"Yes," he said.', '"Ja", sagte er.'), ("", ""), ('"Yes."', '"Ja."'), ('He said "no".', '5" Rohr')]
    assert list(csv_pairs(path, KEYS, "fail", ReadReport())) == expected
    document = read_document(TSV, "a.tsv", "tsv", ["en"])
    assert [segment.parts for segment in document.segments] == [(Text(pair[0]),) for pair in expected if pair[0]]
    result, kept = document.with_translations([[Text('a\t"b"')] for _ in document.segments])
    assert not kept
    write(tmp_path, "a.tsv", result)
    assert [pair[0] for pair in csv_pairs(path, KEYS, "fail", ReadReport()) if pair[0]] == ['a "b"'] * 3
    assert result.replace('a "b"', "x").replace('"a ""b"""', "x") == (
        'id\ten\tde\n1\tx\t"Ja", sagte er.\n\n2\tx\t"Ja."\n3\tx\t5" Rohr\n'
    )


def test_keys_and_numbers_mean_the_same_in_every_table(tmp_path: Path) -> None:
    rows = [("1", "Hallo.", "Hello."), ("2", "Danke.", "Thank you.")]
    for suffix, delimiter in ((".tsv", "\t"), (".csv", ","), (".csv", "\t")):
        bare = "".join(delimiter.join(row) + "\n" for row in rows)
        expected = [("Hello.", "Hallo."), ("Thank you.", "Danke.")]
        path = write(tmp_path, f"a{suffix}", delimiter.join(("id", "de", "en")) + "\n" + bare)
        report = ReadReport()
        assert list(csv_pairs(path, ("en", "de"), "fail", report)) == expected
        assert report.headers_kept == 0
        assert list(csv_pairs(path, ("3", "2"), "fail", report))[1:] == expected
        assert report.headers_kept == 1
        with pytest.raises(DataError, match="there is no column 'fr'; the first line has: id, de, en"):
            list(csv_pairs(path, ("fr", "de"), "fail", report))
        path = write(tmp_path, f"b{suffix}", bare)
        assert list(csv_pairs(path, ("3", "2"), "fail", report)) == expected
        assert report.headers_kept == 1
        path = write(tmp_path, f"c{suffix}", delimiter.join(("id", "target", "source")) + "\n" + bare)
        assert list(csv_pairs(path, (None, None), "fail", report)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "de\ten\nHallo.\tHello.\n",
            "line 1 looks like a header: de, en. Name the columns by --source-key and --target",
        ),
        ("sentence1\tsentence2\nHello.\tHallo.\n", "looks like a header: sentence1, sentence2"),
        ("source_text\tTarget text (de)\nHello.\tHallo.\n", "looks like a header: source_text, Target text"),
        ("en_sentence\tde-sentence\nHello.\tHallo.\n", "looks like a header: en_sentence, de-sentence"),
        ("English\tGerman\tlicence\nHello.\tHallo.\tCC\n", "looks like a header: English, German, licence"),
        (
            "1276\tLet us go.\t77\tGehen wir.\n",
            r"column 1 has numbers only .*--source-key 2 --target-key 4; if the num",
        ),
        ("Yes.\t0.98\tJa.\nNo.\t1\tNein.\n", r"column 2 has numbers only .*--source-key 1 --target-key 3; if the num"),
        ("1\tone\n2\ttwo\n", "if the numbers are texts, --source-key 1 --target-key 2"),
    ],
)
def test_tsv_without_keys_is_asked_about(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", text)
    with pytest.raises(DataError, match=message):
        list(csv_pairs(path, (None, None), "fail", ReadReport()))
    found = next(csv_pairs(path, ("1", "2"), "fail", ReadReport()))
    assert found == tuple(text.split("\n")[0].split("\t")[:2])


@pytest.mark.parametrize("first", ["1984\t1984", "No text.\tKein Text.", "Text 123\tText 123", "No!\tNo!"])
def test_a_first_line_of_text_is_no_header(first: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", f"{first}\nYes.\tJa.\n")
    assert list(csv_pairs(path, (None, None), "fail", ReadReport())) == [tuple(first.split("\t")), ("Yes.", "Ja.")]


def test_a_cell_that_never_ends_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.extras.tables.cells.MOST_CELL_CHARS", 1000)
    with pytest.raises(DataError, match="line 2 opens a quotation mark that is never closed within 1,000 characters"):
        list(csv_pairs(write(tmp_path, "a.csv", 'en,de\n"a,b\n' + "c,d\n" * 1000), KEYS, "fail", ReadReport()))


def test_csv_lines_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"en,de\na,b\n\xff,c\nd,e\n")
    assert list(csv_pairs(path, KEYS, "skip", ReadReport())) == [("a", "b"), None, ("d", "e")]
    with pytest.raises(DataError, match="line 3"):
        list(csv_pairs(path, KEYS, "fail", ReadReport()))


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"translation": {"en": "a\nb", "de": "c"}, "n": 1}, {"translation": {"en": None, "de": "d"}, "n": 2}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    report = ReadReport()
    keys = ("translation.en", "translation.de")
    assert list(parquet_pairs(tmp_path / "a.parquet", keys, report)) == [("a b", "c"), ("", "d")]
    assert report.line_breaks_replaced == 1
    with pytest.raises(DataError, match="no column 'en'; it has: translation, n"):
        list(parquet_pairs(tmp_path / "a.parquet", KEYS, report))
    with pytest.raises(DataError, match="row 1: the value of 'n' is not text"):
        list(parquet_pairs(tmp_path / "a.parquet", ("n", "n"), report))
    with pytest.raises(DataError, match="row 1 has no key"):
        list(parquet_pairs(tmp_path / "a.parquet", ("translation.fr", "translation.de"), report))
    with pytest.raises(DataError, match=r"Cannot read .* as a Parquet file"):
        list(parquet_pairs(write(tmp_path, "b.parquet", "no parquet"), KEYS, report))
    with pytest.raises(DataError, match="Cannot read"):
        list(parquet_pairs(tmp_path / "missing.parquet", KEYS, report))


def test_pairs_by_the_ending_of_a_name(tmp_path: Path) -> None:
    files = {"a.csv": "en,de\na,b\n", "a.tsv": "a\tb\n", "a.jsonl": '{"en": "a", "de": "b"}\n'}
    for name, text in files.items():
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(text.encode()))
        for path in (write(tmp_path, name, text), packed):
            keys = {"source_key": "1", "target_key": "2"} if "tsv" in name else {"source_key": "en", "target_key": "de"}
            assert next(PairFiles(pairs=path, **keys).read()) == ("a", "b")
    for name in ("a.txt", "a", "a.parquet.gz", "-"):
        with pytest.raises(ConfigError, match=r"ends in \.csv"):
            PairFiles(pairs=name)
    with pytest.raises(ConfigError, match=r"parquet\. Save the table as CSV UTF-8\.$"):
        PairFiles(pairs="Words.XLSX")
    with pytest.raises(ConfigError, match="given: tsv and pairs"):
        PairFiles(pairs="a.csv", tsv="a.tsv")
    nested = write(tmp_path, "b.jsonl", '{"translation": {"en": "a", "de": "b"}}\n')
    keys = {"source_key": "translation.en", "target_key": "translation.de"}
    assert list(PairFiles(jsonl=nested, **keys).read()) == [("a", "b")]
