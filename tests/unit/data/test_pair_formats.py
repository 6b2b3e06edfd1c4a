"""Pairs from CSV, TMX and Parquet files, and nested keys."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from manyheads.data.lines import ReadReport
from manyheads.data.pair_formats import csv_pairs, nested_value, parquet_pairs, tmx_pairs
from manyheads.data.readers import PairFiles
from manyheads.errors import ConfigError, DataError

KEYS = ("en", "de")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


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
        ("a,b\n", "no column 'en'; its first line has: a, b"),
        ("", "no column 'en'"),
        ("x,en,de\n1,a\n", "line 2 has 2 col"),
        ("a,b\n", "Numbers, from 1, name the columns of a file without a header"),
        ("sep=,\nx,en,de\n1,a\n", "line 3 has 2 col"),
        ("sep=;", "no column 'en'; its first line has: none"),
        ('en,de\na,b\n"c\nd",e\nf,"g\nh,i\n', "begins in line 5 has a quotation mark that is never closed"),
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


def test_csv_lines_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"en,de\na,b\n\xff,c\nd,e\n")
    assert list(csv_pairs(path, KEYS, "skip", ReadReport())) == [("a", "b"), None, ("d", "e")]
    with pytest.raises(DataError, match="line 3"):
        list(csv_pairs(path, KEYS, "fail", ReadReport()))


TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="de-DE" segtype="sentence"/><body>
<tu><tuv xml:lang="en-US"><seg>The <bpt i="1">&lt;b></bpt>big<ept i="1"/> <hi>dog</hi> &amp; cat</seg></tuv>
<tuv xml:lang="de-DE"><seg>Der
Hund</seg></tuv></tu>
<tu><tuv xml:lang="de-de"><seg>allein</seg></tuv></tu>
</body></tmx>"""


def test_tmx(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tmx", TMX)
    assert list(tmx_pairs(path, (None, None))) == [("Der Hund", "The big dog & cat"), ("allein", "")]
    assert list(tmx_pairs(path, ("en", "de"))) == [("The big dog & cat", "Der Hund"), ("", "allein")]
    assert next(tmx_pairs(path, (None, "de"))) == ("The big dog & cat", "Der Hund")


def test_units_before_both_languages_are_known_are_left_out(tmp_path: Path) -> None:
    first = "<tu><tuv xml:lang='de'><seg>eins</seg></tuv></tu>"
    path = write(tmp_path, "a.tmx", TMX.replace("<tu>", first + "<tu>", 1))
    assert len(list(tmx_pairs(path, ("de", "en")))) == 2


@pytest.mark.parametrize(
    ("text", "languages", "message"),
    [
        ("no xml", (None, None), "is not a TMX file"),
        ("<tmx><body/></tmx>", (None, None), "no translation units"),
        (TMX, ("fr", "de"), "has no fr; its languages are de-de, en-us"),
        (TMX.replace("de-DE", "*all*", 1), (None, None), "which of its languages is the source"),
        (TMX.replace('"de-de"', '"fr"'), (None, None), "has the languages de-de, en-us, fr; choose two"),
        (TMX[:300], ("de", "en"), "is not a TMX file"),
        (TMX.replace("UTF-8", "klingon"), ("de", "en"), "unknown encoding: klingon; convert it to UTF-8"),
        (TMX.replace("UTF-8", "shift_jis"), ("de", "en"), "multi-byte encodings are not supported; convert it"),
    ],
)
def test_tmx_refusals(text: str, languages: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        list(tmx_pairs(write(tmp_path, "a.tmx", text), languages))


def test_a_tmx_file_cannot_expand_or_read_other_files(tmp_path: Path) -> None:
    entities = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    bomb = f'<!DOCTYPE tmx [<!ENTITY e0 "{"a" * 100}">{entities}]>'
    text = TMX.split("\n", 2)[2].replace("Hund", "&e9;")
    with pytest.raises(DataError, match="not a TMX file"):
        list(tmx_pairs(write(tmp_path, "a.tmx", bomb + text), ("de", "en")))
    other = f'<!DOCTYPE tmx [<!ENTITY e9 SYSTEM "file://{write(tmp_path, "secret", "secret")}">]>'
    with pytest.raises(DataError, match="not a TMX file"):
        list(tmx_pairs(write(tmp_path, "b.tmx", other + text), ("de", "en")))


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
    files = {
        "a.csv": "en,de\na,b\n",
        "a.tsv": "a\tb\n",
        "a.jsonl": '{"en": "a", "de": "b"}\n',
        "a.tmx": TMX,
    }
    for name, text in files.items():
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(text.encode()))
        for path in (write(tmp_path, name, text), packed):
            files_read = PairFiles(pairs=path, source_key="en", target_key="de", languages=("en", "de"))
            assert next(files_read.read()) == (("The big dog & cat", "Der Hund") if "tmx" in name else ("a", "b"))
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
