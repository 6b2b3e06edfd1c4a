"""Readers: every oddity of text files has one written outcome."""

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.lines import read_blocks, stored_lines
from manyheads.data.translation.readers import PairFiles, ReadReport, read_lines
from manyheads.errors import ConfigError, DataError, ManyHeadsError


def lines_of(tmp_path: Path, content: bytes, **options: object) -> list[str]:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return list(read_lines(path, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\n\nb\n\n", ["a", "", "b", ""]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        ("a\u2028b\x85c\x0bd\x0ce\x1cf\u2029g\n".encode(), ["a\u2028b\x85c\x0bd\x0ce\x1cf\u2029g"]),
        (b"a\x00b\n", ["a\x00b"]),
        (gzip.compress(b"a\nb\n", mtime=0), ["a", "b"]),
        (gzip.compress(b"", mtime=0), []),
        (gzip.compress(b"a\n", mtime=0) + gzip.compress(b"b\n", mtime=0), ["a", "b"]),
        (b"\x1f\n", ["\x1f"]),
        (b"x", ["x"]),
        (b"a\r\r\nb\r", ["a\r", "b"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n", [""]),
        (b"\xef\xbb\xbf\nb", ["", "b"]),
        (gzip.compress(b"\xef\xbb\xbf", mtime=0), []),
        (b"BZh is no bzip2 file\n", ["BZh is no bzip2 file"]),
        (b"a\x00b\x00c\n", ["a\x00b\x00c"]),
        (b"\xc3\xa4" * 5_000_000 + b"\nend", ["ä" * 5_000_000, "end"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_lines(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    assert lines_of(tmp_path, content) == expected


@settings(deadline=None, max_examples=50)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n\r\ufeff"))),
    packed=st.booleans(),
)
def test_any_lines_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str], packed: bool) -> None:
    content = "".join(text + "\n" for text in texts).encode()
    assert lines_of(tmp_path_factory.mktemp("lines"), gzip.compress(content, mtime=0) if packed else content) == texts


def test_bad_utf8_names_file_line_and_byte(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"text\.txt: line 2 is not UTF-8: byte 0xfc at byte offset 5 .*iconv .* FILE > NEW\)"
    ):
        lines_of(tmp_path, b"abc\nf\xfcr\n")
    with pytest.raises(DataError, match="byte offset 8 "):
        lines_of(tmp_path, b"\xef\xbb\xbfabc\nf\xfcr\n"[0:7] + b"f\xfcr\n")


def test_bad_utf8_replaced_or_skipped_is_counted(tmp_path: Path) -> None:
    report = ReadReport()
    assert lines_of(tmp_path, b"a\n\xff\xfeb\nc\n", on_bad_utf8="replace", report=report) == ["a", "\ufffd\ufffdb", "c"]
    assert (report.lines, report.bad_utf8_replaced, report.bad_utf8_skipped) == (3, 1, 0)
    report = ReadReport()
    assert lines_of(tmp_path, b"a\n\xff\xfeb\nc\n", on_bad_utf8="skip", report=report) == ["a", "", "c"]
    assert (report.lines, report.bad_utf8_replaced, report.bad_utf8_skipped) == (3, 0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text".encode("utf-16"), "begins with the byte order mark of UTF-16; convert it: iconv"),
        ("text".encode("utf-32"), "begins with the byte order mark of UTF-32; convert it: iconv"),
        ("a text".encode("utf-16-le"), "looks like UTF-16 without a byte order mark"),
        ("a text".encode("utf-16-be"), "looks like UTF-16 without a byte order mark"),
        (lzma.compress(b"a"), "is an xz file; unpack it"),
        (bz2.compress(b"a"), "is a bzip2 file; unpack it"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "is a zstd file; unpack it"),
        (b"PK\x03\x04\x14\x00", "is a zip file; unpack it"),
        (gzip.compress(b"abc\n" * 100, mtime=0)[:-9], "cut off or damaged"),
        (gzip.compress(b"abc\n" * 100, mtime=0)[:-9], "damaged after line 100: "),
        (b"\x1f\x8bnot gzip", "cut off or damaged at its beginning: "),
        (gzip.compress(b"abc\n", mtime=0) + b"more", "damaged after line 1: Not a gzipped file"),
        (gzip.compress(b"abc\n" * 100, mtime=0).replace(b"\x90\x01\0\0", b"\x91\x01\0\0"), "cut off or damaged"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lines_of(tmp_path, content)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.data.lines.MAX_LINE_BYTES", 1000)
    with pytest.raises(DataError, match="line 2, at byte 2, is longer than 1000 bytes"):
        lines_of(tmp_path, b"a\n" + b"x" * 1001)
    with pytest.raises(DataError, match="longer than 1000"):
        lines_of(tmp_path, gzip.compress(b"\x00" * 10_000_000, mtime=0))


def test_missing_directory_and_odd_names(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no", "No such file"), (tmp_path, "is a directory"), ("a\x00b", "Cannot read")):
        with pytest.raises(DataError, match=message):
            list(read_lines(path))


@pytest.mark.parametrize("content", [b"a\nb\n", gzip.compress(b"a\nb\n", mtime=0), b"", b"a"])
def test_fifo(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    assert list(read_lines(path)) == (["a"] if content == b"a" else ["a", "b"] if content else [])
    writer.join()


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"a\nb"))))
    assert list(read_lines("-")) == ["a", "b"]


def test_lines_arrive_before_the_pipe_is_closed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb", buffering=0) as writer:
        lines = read_lines(f"/dev/fd/{reading}")
        writer.write(b"\n")
        assert next(lines) == ""
        writer.write(b"first\nsec")
        assert next(lines) == "first"
        writer.write(b"ond\n")
        assert next(lines) == "second"
        lines.close()  # type: ignore[attr-defined]
    os.close(reading)


def test_blocks_are_full_unless_a_pipe_pauses(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"line\n" * 10)
    assert [len(block) for block in read_blocks(tmp_path / "text", 4)] == [4, 4, 2]
    (tmp_path / "packed").write_bytes(gzip.compress(b"line\n" * 10, mtime=0))
    assert [len(block) for block in read_blocks(tmp_path / "packed", 5)] == [5, 5]
    assert list(read_blocks(os.devnull, 4)) == []


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_pipe_has_comes_when_it_pauses(packed: bool) -> None:
    """Whole lines come at once, though the next has begun; after the writer's end the rest."""
    reading, writing = os.pipe()
    report = ReadReport()
    blocks = read_blocks(f"/dev/fd/{reading}", 3, report=report)
    with os.fdopen(writing, "wb", buffering=0) as writer:
        deadline = threading.Timer(20, writer.close)  # a reader that waits for more gets the end, and fails
        deadline.start()
        if packed:
            writer.write(gzip.compress(b"1\n2\n3\n4\n", mtime=0))
            assert next(blocks) == ["1", "2", "3"]
        else:
            writer.write(b"first\nsecond\nthi")
            assert next(blocks) == ["first", "second"]
            writer.write(b"rd\n4\n5\n6\n")
            assert next(blocks) == ["third", "4", "5"]
            assert next(blocks) == ["6"]
            writer.write(b"end")
        deadline.cancel()
    assert list(blocks) == ([["4"]] if packed else [["end"]])
    assert report.lines == (4 if packed else 7)
    os.close(reading)


def test_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="Standard input is closed; name a file"):
        list(read_lines("-"))


def test_names_are_shown_on_one_line(tmp_path: Path) -> None:
    for name, shown in (("ä b", "ä b"), ("a\nb", r"a\nb"), ("a\udcffb", r"a\udcffb")):
        with pytest.raises(DataError) as caught:
            list(read_lines(tmp_path / name))
        assert str(caught.value) == f"Cannot read {tmp_path}/{shown}: No such file or directory."


def test_stored_lines_are_as_they_were_written(tmp_path: Path) -> None:
    lines = ["\ufeffa", "b\r", "", "a\0b\0c\0d\0", "c\u2028d\x85"]
    (tmp_path / "own").write_bytes("".join(f"{line}\n" for line in lines).encode())
    assert list(stored_lines(tmp_path / "own")) == lines
    (tmp_path / "own").write_bytes(b"\xff\n")
    for path in (tmp_path / "own", tmp_path / "none"):
        with pytest.raises(DataError, match=r"Cannot read .* Prepare the data again"):
            list(stored_lines(path))


def aligned(
    tmp_path: Path, source: bytes, target: bytes, report: ReadReport | None = None, **options: object
) -> list[tuple[str, str]]:
    (tmp_path / "a.en").write_bytes(source)
    (tmp_path / "a.de").write_bytes(target)
    return list(PairFiles(source=tmp_path / "a.en", target=tmp_path / "a.de", **options).read(report))  # type: ignore[arg-type]


def test_aligned_files_keep_empty_lines(tmp_path: Path) -> None:
    assert aligned(tmp_path, b"a\n\nc\n", gzip.compress(b"A\nB\n\n", mtime=0)) == [("a", "A"), ("", "B"), ("c", "")]
    assert aligned(tmp_path, b"", b"") == []


def test_odd_separators_do_not_misalign(tmp_path: Path) -> None:
    source, target = "a\u2028x\nb\n", "A\nB\x85\n"
    assert aligned(tmp_path, source.encode(), target.encode()) == [("a\u2028x", "A"), ("b", "B\x85")]


def test_unequal_counts_name_both_and_a_suspicious_line(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"a\.en has 4 lines, .*a\.de has 2 .*Line 2 looks suspicious first: '' beside 'B'"
    ):
        aligned(tmp_path, b"a\n\nc\nd\n", b"A\nB\n")
    with pytest.raises(DataError, match=r"has 1 lines, .* has 3 .*No single pair looks wrong"):
        aligned(tmp_path, b"a\n", b"A\nB\nC\n")


def test_skipping_a_bad_line_skips_the_pair(tmp_path: Path) -> None:
    report = ReadReport()
    pairs = aligned(tmp_path, b"a\n\xff\nc\n", b"A\nB\nC\n", on_bad_utf8="skip", report=report)
    assert pairs == [("a", "A"), ("c", "C")]
    assert (report.lines, report.bad_utf8_skipped) == (3, 1)
    with pytest.raises(DataError, match=r"a\.de: line 1"):
        aligned(tmp_path, b"a\n", b"\xff\n")


def test_newstest_lines_match(shared: Path) -> None:
    folder = shared / "data" / "wmt-newstest"
    pairs = list(PairFiles(source=folder / "newstest2009.en.gz", target=folder / "newstest2009.de.gz").read())
    assert len(pairs) == 2525


def test_tsv(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\tA\n\nb\tB\tCC-BY\t2\n\tC\n")
    report = ReadReport()
    assert list(PairFiles(tsv=path).read(report)) == [("a", "A"), ("", ""), ("b", "B"), ("", "C")]
    assert report.columns_ignored == 1
    path.write_bytes(b"a\tA\nno tab here\n")
    with pytest.raises(DataError, match=r"a\.tsv: line 2 has no tab: 'no tab here'"):
        list(PairFiles(tsv=path).read())


def jsonl(tmp_path: Path, *lines: str, report: ReadReport | None = None, **options: object) -> list[tuple[str, str]]:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return list(PairFiles(jsonl=path, **options).read(report))  # type: ignore[arg-type]


def test_jsonl(tmp_path: Path) -> None:
    line = json.dumps({"source": "a 🎉", "target": "A\nB", "more": 1})
    report = ReadReport()
    assert jsonl(tmp_path, line, "", report=report) == [("a 🎉", "A B"), ("", "")]
    assert report.line_breaks_replaced == 1
    assert jsonl(tmp_path, '{"en": "a", "de": "b"}', source_key="en", target_key="de") == [("a", "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"en": "a", "target": "b"}', "has no key 'source'; its keys are: en, target"),
        ('{"source": 1, "target": "b"}', "the value of 'source' is not text: '1'"),
        ('{"source": null, "target": "b"}', "is not text"),
        ("[" * 100_000, "not valid JSON"),
        ('{"source": "\\ud800", "target": "b"}', "half a surrogate pair"),
        ('{"source": ' + "1" * 10_000 + "}", "not valid JSON"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: line 2.*" + message):
        jsonl(tmp_path, '{"source": "a", "target": "b"}', line)


def test_half_surrogates_follow_the_policy(tmp_path: Path) -> None:
    line = '{"source": "x\\ud800", "target": "b"}'
    report = ReadReport()
    assert jsonl(tmp_path, line, on_bad_utf8="replace", report=report) == [("x\ufffd", "b")]
    assert jsonl(tmp_path, line, on_bad_utf8="skip", report=report) == []
    assert (report.bad_utf8_replaced, report.bad_utf8_skipped) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "given: none of them"),
        ({"source": "a"}, "but no target file"),
        ({"target": "a"}, "but no source file"),
        ({"tsv": "a", "jsonl": "b"}, "given: tsv and jsonl"),
        ({"source": "-", "target": "-"}, "cannot both be standard input"),
        ({"tsv": "a", "on_bad_utf8": "ignore"}, "must be fail, replace or skip"),
    ],
)
def test_contradictions_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PairFiles(**options)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=80)
@given(
    content=st.binary(max_size=200),
    form=st.sampled_from(["tsv", "jsonl", "source"]),
    policy=st.sampled_from(["fail", "replace", "skip"]),
)
def test_any_bytes_give_pairs_or_a_clean_error(tmp_path_factory, content, form, policy):
    path = tmp_path_factory.mktemp("fuzz") / "f"
    path.write_bytes(content)
    options = {"source": path, "target": path} if form == "source" else {form: path}
    try:
        pairs = list(PairFiles(**options, on_bad_utf8=policy).read())  # type: ignore[arg-type]
    except ManyHeadsError:
        return
    assert all("\n" not in text for pair in pairs for text in pair)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a.json", "JSON"),
        ("test.EN.XML.gz", "XML"),
        ("b.docx", "an office document"),
        ("c.pdf", "a book or a printed page"),
        ("d.tmx", "a translation memory or glossary"),
    ],
)
def test_documents_are_no_lines(name: str, what: str, tmp_path: Path) -> None:
    lines = tmp_path / "a.en"
    for path in (lines, tmp_path / name):
        path.write_text("a\n", encoding="utf-8")
    for files in ({"source": lines, "target": tmp_path / name}, {"source": tmp_path / name, "target": lines}):
        with pytest.raises(DataError, match=rf"{name} is {what}, and its lines are no sentences; convert it"):
            list(PairFiles(**files).read())


@pytest.mark.parametrize("name", ["a.arb", "a.lrc", "a.cs", "a.ts", "a.txt", "a"])
def test_names_of_languages_are_lines(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a\n", encoding="utf-8")
    assert list(PairFiles(source=tmp_path / name, target=tmp_path / name).read()) == [("a", "a")]
