"""WMT's .sgm files: their segments are lines, in every command."""

import contextlib
import gzip
from pathlib import Path

import pytest
from growth import assert_grows_in_proportion

from manyheads.data.lines import ReadReport, read_blocks, read_lines
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import DataError

SOURCE = """<srcset setid="news" srclang="any">
<doc docid="a" genre="news">
<hl>
<seg id="1">A "headline" &amp; more</seg>
</hl>
<p>
<seg id="2"> R&D: 5 < 6 &quot;yes&quot; &#228; &what; &lt;b&gt; </seg> <seg id="3"></seg>
</p>
</doc>
<doc docid="b"><p><seg id="1">two
  lines</seg></p></doc>
</srcset>
"""
TEXTS = ['A "headline" & more', 'R&D: 5 < 6 "yes" ä &what; <b>', "", "two lines"]
REFERENCE = """<!DOCTYPE mteval>
<REFSET SETID=news srclang='any' trglang=de><DOC
 sysid=ref docid=a><SEG ID=1>Eins</SEG>
<seg id='2'>Zwei</seg><seg>Drei</seg></DOC><DOC docid="b" sysid="ref"><SEG id="1">Vier</SEG></DOC></REFSET>"""


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_segments_are_lines(tmp_path: Path) -> None:
    for name in ("a.sgm", "A.SGM", "a.sgml", "a.sgm.gz"):
        content = gzip.compress(SOURCE.encode()) if name.endswith("gz") else SOURCE.encode()
        path, report = write(tmp_path, name, content), ReadReport()
        assert list(read_lines(path, report=report)) == TEXTS
        assert report.lines == 4
        assert list(read_blocks(path, 3)) == [TEXTS[:3], TEXTS[3:]]
    assert list(read_lines(write(tmp_path, "b.sgm", REFERENCE))) == ["Eins", "Zwei", "Drei", "Vier"]
    assert next(read_lines(write(tmp_path, "a.txt", SOURCE))) == SOURCE.split("\n")[0]


def test_pairs_have_the_same_documents_and_segments(tmp_path: Path) -> None:
    files = PairFiles(source=write(tmp_path, "a.sgm", SOURCE), target=write(tmp_path, "b.sgm", REFERENCE))
    assert list(files.read()) == list(zip(TEXTS, ["Eins", "Zwei", "Drei", "Vier"], strict=True))
    plain = write(tmp_path, "b.de", "1\n2\n3\n4\n")
    assert [pair[1] for pair in PairFiles(source=tmp_path / "a.sgm", target=plain).read()] == ["1", "2", "3", "4"]
    write(tmp_path, "b.sgm", REFERENCE.replace("ID=1", "ID=9"))
    with pytest.raises(DataError, match=r"segment 1 of .*a\.sgm is '1' of document 'a', that of .*b\.sgm '9' of docum"):
        list(files.read())
    write(tmp_path, "b.sgm", REFERENCE.replace('docid="b"', 'docid="c"'))
    with pytest.raises(DataError, match=r"segment 4 of .*'1' of document 'b', that of .* '1' of document 'c'"):
        list(files.read())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SOURCE.replace("</seg>\n</hl>", "\n</hl>"),
            r"a\.sgm: line 4 begins a segment that is not closed by </seg>; clo",
        ),
        (SOURCE[: SOURCE.index("two") + 3], "line 10 begins a segment that is not closed by </seg>; is the file compl"),
        ("A line.\n", r"has no segments \(<seg>\)"),
        ("", "has no segments"),
        (
            REFERENCE + REFERENCE.replace("sysid=ref", "sysid=other"),
            r"more than one text of each document \(<refset> ref from line 3, <refset> other from line 6\)",
        ),
        (SOURCE + REFERENCE, "more than one text of each document .*<srcset> from line 4, <refset> ref from line 15"),
    ],
)
def test_refusals(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        list(read_lines(write(tmp_path, "a.sgm", text)))


def test_a_segment_with_bad_bytes_keeps_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "a.sgm", SOURCE.encode().replace(b"lines", b"l\xffnes").replace(b"5 < 6", b"\xff"))
    report = ReadReport()
    assert list(read_lines(path, on_bad_utf8="skip", report=report)) == [TEXTS[0], "", "", ""]
    assert (report.lines, report.bad_utf8_skipped, report.bad_utf8_replaced) == (4, 3, 0)  # two are in one line
    assert list(read_lines(path, on_bad_utf8="replace", report=report))[3] == "two l\ufffdnes"
    assert report.bad_utf8_replaced == 2
    with pytest.raises(DataError, match="line 7 is not UTF-8"):
        list(read_lines(path))


@pytest.mark.parametrize("part", ["<seg", "</seg", "<seg id=", "a", "a=", " ", "<doc ", "&a", "<seg>", '"'])
def test_time_grows_with_the_text(part: str, tmp_path: Path) -> None:
    def work(count: int) -> None:
        path = write(tmp_path, "a.sgm", f"<srcset a{part * count}><seg>{part * count}</seg>")
        with contextlib.suppress(DataError):
            list(read_lines(path))

    assert_grows_in_proportion(work, 10_000)
