"""Pairs from TMX files: the whole file tells its languages, and a bad character concerns its unit only."""

import contextlib
import gzip
from pathlib import Path
from typing import Any

import pytest
from growth import assert_grows_in_proportion

from manyheads.data import lines
from manyheads.data.lines import ReadReport
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import DataError
from manyheads.extras.tmx.reader import tmx_pairs

Languages = tuple[str | None, str | None]
EN_DE = ("en", "de")


def unit(**texts: str) -> str:
    """A translation unit; `_` in a language is written as a hyphen."""
    variants = "".join(
        f'<tuv xml:lang="{name.replace("_", "-")}"><seg>{text}</seg></tuv>' for name, text in texts.items()
    )
    return f"<tu>{variants}</tu>\n"


def tmx(*units: str, header: str = 'srclang="en"', above: str = '<?xml version="1.0" encoding="UTF-8"?>') -> str:
    head = f'{above}\n<tmx version="1.4"><header segtype="sentence" {header}/><body>\n'
    return head + "".join(units) + "</body></tmx>\n"


def read(
    folder: Path, text: str | bytes, languages: Languages = EN_DE, policy: Any = "fail"
) -> tuple[list[tuple[str, str]], ReadReport]:
    path, report = folder / "a.tmx", ReadReport()
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(PairFiles(pairs=path, languages=languages, on_bad_utf8=policy).read(report)), report


GOOD = unit(en="Good night.", de="Gute Nacht.")
OTHERS = [unit(en="Good morning.", fr="Bonjour."), unit(en="Thank you.", de="Danke."), unit(en="a", de="b", fr="c")]


def test_units_of_different_languages(tmp_path: Path) -> None:
    pairs, report = read(tmp_path, tmx(*OTHERS))
    assert pairs == [("Thank you.", "Danke."), ("a", "b")]
    assert (report.lines, report.units_incomplete) == (3, 1)
    assert read(tmp_path, tmx(*OTHERS), ("de", "fr"))[0] == [("b", "c")]
    with pytest.raises(DataError, match=r"more than one language beside en; .* en \(3 units\), .*; choose two by --so"):
        read(tmp_path, tmx(*OTHERS), (None, None))
    with pytest.raises(DataError, match=r"has no es in its 3 translation units; its languages are en \(3 units\)"):
        read(tmp_path, tmx(*OTHERS), ("en", "es"))
    with pytest.raises(DataError, match="has no unit with both de and fr in its 2 translation units"):
        read(tmp_path, tmx(*OTHERS[:2]), ("de", "fr"))


def test_languages_of_the_whole_file_without_names(tmp_path: Path) -> None:
    units = [unit(en_US="colour", en_GB="colour"), unit(en_GB="Yes.", de_DE="Ja."), unit(de_AT="Nein.", en_US="No.")]
    pairs, report = read(tmp_path, tmx(*units), (None, None))
    assert pairs == [("Yes.", "Ja."), ("No.", "Nein.")]
    assert report.units_incomplete == 1
    assert read(tmp_path, tmx(*units), (None, "en"))[0] == [("Ja.", "Yes."), ("Nein.", "No.")]
    with pytest.raises(DataError, match="no language beside en"):
        read(tmp_path, tmx(units[0]), (None, None))
    for header in ('srclang="*all*"', ""):
        with pytest.raises(DataError, match="does not say which of its languages is the source"):
            read(tmp_path, tmx(*units, header=header), (None, None))
    assert read(tmp_path, tmx(*units, header="srclang = 'de'"), (None, None))[0][0] == ("Ja.", "Yes.")


@pytest.mark.parametrize(
    ("variants", "languages", "expected", "ignored"),
    [
        ({"EN_us": "a", "de": "b"}, ("en", "de"), ("a", "b"), 0),
        ({"en": "a", "de": "b"}, ("en-GB", "de_AT"), ("a", "b"), 0),
        ({"en_GB": "a", "en": "b", "de": "c"}, ("en", "de"), ("b", "c"), 1),
        ({"en_GB": "a", "en_US": "b", "de": "c"}, ("en-us", "de"), ("b", "c"), 0),
        ({"en_GB": "a", "en_US": "b", "de": "c"}, ("en", "de"), ("a", "c"), 1),
        ({"en_GB": "a", "en_US": "b"}, ("en-US", "en-GB"), ("b", "a"), 0),
        ({"en_GB": "a", "de": "b"}, ("en-US", "de"), None, 0),
        ({"en": "a"}, ("en", "en-GB"), None, 0),
    ],
)
def test_varieties(variants: dict[str, str], languages: Languages, expected: Any, ignored: int, tmp_path: Path) -> None:
    known = unit(en_US="x", de="y").replace("de", languages[1] or "")
    known = known.replace("en-US", languages[0] or "")
    pairs, report = read(tmp_path, tmx(known, unit(**variants)), languages)
    assert pairs[1:] == ([expected] if expected else [])
    assert report.variants_ignored == ignored
    assert report.units_incomplete == (expected is None)


def test_two_variants_of_a_language_are_counted(tmp_path: Path) -> None:
    twice = (
        '<tu><tuv xml:lang="en"><seg>Hi.</seg></tuv><tuv lang="de"><seg>Hallo.</seg></tuv><tuv xml:lang="de"><seg>Tag.'
    )
    pairs, report = read(tmp_path, tmx(twice + "</seg></tuv></tu>"))
    assert pairs == [("Hi.", "Hallo.")]
    assert report.variants_ignored == 1


def test_units_without_segments(tmp_path: Path) -> None:
    bare = '<tu><tuv xml:lang="en"><note>x</note></tuv><tuv xml:lang="de"/></tu>'
    pairs, report = read(tmp_path, tmx(GOOD, "<tu tuid='1'/>", bare, "<tu/>"))
    assert pairs == [("Good night.", "Gute Nacht.")]
    assert report.units_incomplete == 3
    with pytest.raises(DataError, match=r"in its 2 translation units; none has a language and a segment \(<seg>\)"):
        read(tmp_path, tmx(bare, bare))
    with pytest.raises(DataError, match="has no translation units"):
        read(tmp_path, tmx())


@pytest.mark.parametrize(
    ("bad", "shown", "mended"),
    [
        ("Bad&#x1F;char.", "'&#x1F;'", "Bad\ufffdchar."),
        ("Bad&#0;char.", "'&#0;'", "Bad\ufffdchar."),
        ("R&D", "'&'", "R&D"),
        ("a & b &amp; c", "'&'", "a & b & c"),
        ("a&nbsp;b", "'&nbsp;'", "a\xa0b"),
        ("a&what;b", "'&what;'", "a&what;b"),
        ("5 < 6", "'<'", "5 < 6"),
        ("a\x0bb", r"'\\x0b'", "a\ufffdb"),
        ("a\x00b", r"'\\x00'", "a\ufffdb"),
        (b"f\xfcr", r"'\\xfc'", "f\ufffdr"),
    ],
)
def test_a_bad_character_concerns_its_unit(bad: str | bytes, shown: str, mended: str, tmp_path: Path) -> None:
    text = tmx(GOOD, unit(en="BAD", de="Schlecht."), unit(en="one", de="eins")).encode()
    text = text.replace(b"BAD", bad if isinstance(bad, bytes) else bad.encode())
    with pytest.raises(DataError, match=rf"a\.tmx: line 4: translation unit 2 has {shown}.*let --on-bad-utf8 repl"):
        read(tmp_path, text)
    good = [("Good night.", "Gute Nacht."), ("one", "eins")]
    pairs, report = read(tmp_path, text, policy="skip")
    assert pairs == good
    assert (report.lines, report.bad_units_skipped, report.bad_units_replaced) == (3, 1, 0)
    pairs, report = read(tmp_path, text, policy="replace")
    assert pairs == [good[0], (mended, "Schlecht."), good[1]]
    assert (report.lines, report.bad_units_skipped, report.bad_units_replaced) == (3, 0, 1)


@pytest.mark.parametrize("bad", ["<b>x", "</seg>", "<tu>", "a <b", '<ph x="1>'])
def test_a_unit_that_is_no_xml_concerns_no_other(bad: str, tmp_path: Path) -> None:
    text = tmx(GOOD, unit(en=bad, de="Schlecht."), unit(en="one", de="eins"))
    for policy in ("fail", "replace"):
        with pytest.raises(DataError, match=r"line [45]: translation unit [23] is not XML .*let --on-bad-utf8 skip it"):
            read(tmp_path, text, policy=policy)
    pairs, report = read(tmp_path, text, policy="skip")
    assert pairs == [("Good night.", "Gute Nacht."), ("one", "eins")]
    assert report.bad_units_skipped >= 1


@pytest.mark.parametrize(
    ("segment", "expected"),
    [
        ("\n        Good\n        night.\n    ", "Good night."),
        ("Good\r\nnight.", "Good night."),
        ("two  spaces", "two  spaces"),
        ("hungry.<ph>&lt;br/&gt;</ph>Thank", "hungry. Thank"),
        ("one<ph/><it/>two", "one two"),
        ("one <ph/>two", "one two"),
        ("The <bpt i='1'>&lt;b></bpt>big<ept i='1'/>. (<bpt i='2'/>No<ept i='2'/>)", "The big. (No)"),
        ("a<hi>b</hi>c", "abc"),
        ("See<ph>&lt;img alt='<sub>a dog</sub>'></ph>here", "See here"),
        ("<ph/>start and end<ph/>", "start and end"),
        ("你好<ph/>世界", "你好世界"),
        ("x<![CDATA[ R&D <b> ]]>y", "x R&D <b> y"),
        ("a<!-- </tu> R&D -->b", "ab"),
        ("salt &amp; pepper&#33;", "salt & pepper!"),
    ],
)
def test_segments(segment: str, expected: str, tmp_path: Path) -> None:
    assert read(tmp_path, tmx(unit(en=segment, de="x"))) == ([(expected, "x")], ReadReport(lines=1))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1", "shift_jis"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    german = "日本" if encoding == "shift_jis" else "für ü"
    name = "UTF-16" if "16" in encoding else encoding.replace("-sig", "")
    above = f'<?xml version="1.0" encoding="{name}"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">'
    text = tmx(unit(en="a", de=german), above=above)
    for content in (text.encode(encoding), gzip.compress(text.encode(encoding))):
        assert read(tmp_path, content)[0] == [("a", german)]
    if encoding == "utf-16":  # a file that was converted, but still says the old name
        assert read(tmp_path, text.encode())[0] == [("a", german)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no xml", "is not a TMX file: it has no element <tmx>"),
        (tmx(GOOD)[:-40], "ends inside the translation unit that begins in line 3; is the file complete?"),
        (tmx(GOOD, GOOD)[:-15], "</tmx> is missing"),
        (tmx(GOOD).replace("UTF-8", "klingon"), "unknown encoding: klingon; convert it to UTF-8"),
        (tmx(GOOD).replace("UTF-8", "idna"), "unknown encoding: idna"),
    ],
)
def test_refusals(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, text)


def test_a_file_cannot_expand_or_read_other_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    entities = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    for declared in (f'<!ENTITY e0 "{"a" * 100}">{entities}', f'<!ENTITY e9 SYSTEM "file://{tmp_path}/secret">'):
        text = tmx(unit(en="x&e9;", de="y"), above=f"<!DOCTYPE tmx [{declared}]>")
        with pytest.raises(DataError, match="line 3: translation unit 1 has '&e9;', which XML does not allow there"):
            read(tmp_path, text)
        assert read(tmp_path, text, policy="replace")[0] == [("x&e9;", "y")]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_blocks_of_any_size_give_the_same(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmx(*OTHERS, GOOD, unit(en="a<!-- <tu> -->b\n", de="R&D"), unit(en="ü", de="ä" * 50), header="srclang='en'")
    text = text.replace("fr", "en-x")
    expected = read(tmp_path, text, (None, None), "replace")
    monkeypatch.setattr(lines, "CHUNK_BYTES", size)
    monkeypatch.setattr("manyheads.extras.tmx.reader._LONGEST_MARK", 20)
    assert read(tmp_path, text, (None, None), "replace") == expected
    with pytest.raises(DataError, match="line 8: translation unit 5 has '&'"):
        read(tmp_path, text, (None, None))


def test_a_unit_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.extras.tmx.reader.MOST_UNIT_CHARS", 10_000)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 1000)
    with pytest.raises(DataError, match="line 4: a translation unit does not end in 10,000 characters"):
        read(tmp_path, tmx(GOOD, unit(en="x\n" * 10_000, de="y")))


@pytest.mark.parametrize("part", ["<!--", "<![CDATA[", "<tu>", "&", "<ph/>", "<hi>", "&#", "<tuv>", "\n ", "<seg>"])
def test_time_grows_with_the_text(part: str, tmp_path: Path) -> None:
    def work(count: int) -> None:
        with contextlib.suppress(DataError):
            read(tmp_path, tmx(unit(en=part * count, de="x")), policy="replace")

    assert_grows_in_proportion(work, 4_000)


def test_a_pipe_needs_both_languages(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can be read once only, so give its languages by --source-lang and --target"):
        next(tmx_pairs(tmp_path / "none.tmx", ("en", None), "fail", ReadReport()))
