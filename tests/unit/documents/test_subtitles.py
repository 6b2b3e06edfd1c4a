"""SubRip and WebVTT; pysubs2, an independent reader, compares times and texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from manyheads.documents.formats import read_document
from manyheads.documents.parts import Text
from manyheads.documents.sentences import protected

Texts = Callable[..., list[str]]
Translated = Callable[..., str]

SRT = (
    "\ufeff1\r\n00:00:01,000 --> 00:00:04,000\r\n<i>i do not know what\r\nyou want.</i>\r\n\r\n"
    "2\r\n00:00:05,000 --> 00:00:06,500  X1:10\r\n{\\an8}stop & go!\r\n\r\n"
    "3\r\n00:00:07,000 --> 00:00:08,000\r\n- who?\r\n- me.\r\n\r\n4\r\n00:00:09,000 --> 00:00:10,000\r\n\r\n"
)
VTT = """WEBVTT - a title

STYLE
::cue { color: red }

NOTE no text --
no text

a-name
00:01.000 --> 00:04.000 align:start position:0%
<v Mary>where are you <b>going</b>
this &amp; every evening?

00:05.000 --> 00:06.000
last"""


def test_srt(texts: Texts, translated: Translated) -> None:
    assert texts(SRT, "srt") == ["<>i do not know what you want.<>", "<>stop & go!", "who?", "me."]
    expected = SRT.replace("know what\r\nyou want", "know\r\nwhat you want")  # lines of about equal length
    for text in ("i do not know", "what you want.", "stop & go!", "who?", "me."):
        expected = expected.replace(text, text.upper())
    assert translated(SRT, "srt") == expected


def test_vtt(texts: Texts, translated: Translated) -> None:
    assert texts(VTT, "vtt") == ["<>where are you <>going<> this & every evening?", "last"]
    expected = VTT.replace("<b>going</b>\nthis ", "<b>going</b> this\n")
    for text in ("where are you ", "going", "this", " every evening?", "last"):
        expected = expected.replace(text, text.upper())
    assert translated(VTT, "vtt") == expected


def test_a_cue_without_an_empty_line_after_it(texts: Texts, translated: Translated) -> None:
    srt = "1\n00:00:01,000 --> 00:00:02,000\nOne.\n2\n00:00:03,000 --> 00:00:04,000\nTwo.\n"
    assert texts(srt, "srt") == ["One.", "Two."]
    assert translated(srt, "srt") == srt.replace("One", "ONE").replace("Two", "TWO")


def test_kept_words_are_escaped_as_the_format_asks() -> None:
    text = "WEBVTT\n\n00:01.000 --> 00:02.000\nWrite &lt;name&gt; and https://x.org/?a=1&amp;b=2 here.\n"
    [segment] = read_document(text, "file", "vtt").segments
    assert segment.build(protected(segment.parts)) == text.split("\n")[3]


def test_a_no_break_space_stays(translated: Translated) -> None:
    srt = "1\n00:00:01,000 --> 00:00:02,000\nok\n"
    assert "Quoi\u00a0! Bien\u00a0?\n" in translated(srt, "srt", lambda _: "Quoi\u00a0! Bien\u00a0?")


def test_another_reader_sees_the_same_times(translated: Translated) -> None:
    pysubs2 = pytest.importorskip("pysubs2")

    def times(text: str) -> list[tuple[int, int]]:
        return [(event.start, event.end) for event in pysubs2.SSAFile.from_string(text, format_="srt")]

    plain = SRT.removeprefix("\ufeff").replace("\r\n", "\n")
    assert times(translated(plain, "srt")) == times(plain)


def test_a_cue_keeps_its_number_of_lines(translated: Translated) -> None:
    cue = "1\n00:00:01,000 --> 00:00:04,000\na b c d\ne f\n"
    result = translated(cue, "srt", lambda _: "one two three four five six seven")
    assert result.split("\n")[2:] == ["one two three four", "five six seven", ""]
    assert translated(cue, "srt", lambda _: "word").split("\n")[2:] == ["word", ""]


CONTINUED = """1
00:00:01,000 --> 00:00:02,000
when it rained,

2
00:00:02,000 --> 00:00:04,000
we stayed
at home

3
00:00:04,000 --> 00:00:05,000
and read.

4
00:00:06,000 --> 00:00:07,000
But not long.
"""


def test_a_sentence_through_several_cues_is_one_text(texts: Texts, translated: Translated) -> None:
    assert texts(CONTINUED, "srt") == ["when it rained, we stayed at home and read.", "But not long."]
    expected = CONTINUED
    for text in ("when it rained,", "we stayed", "at home", "and read.", "But not long."):
        expected = expected.replace(text, text.upper())
    assert translated(CONTINUED, "srt") == expected
    words = "wenn es regnete, blieben wir zu hause und lasen."
    result = translated(CONTINUED, "srt", lambda text: words if "rained" in text else text)
    assert result.split("\n") == [
        *CONTINUED.split("\n")[:2], "wenn es regnete,", "", "2", "00:00:02,000 --> 00:00:04,000",
        "blieben wir", "zu hause", "", *CONTINUED.split("\n")[9:11], "und lasen.", *CONTINUED.split("\n")[12:],
    ]  # fmt: skip


def test_a_sentence_of_fewer_words_than_cues_is_left(texts: Texts) -> None:
    document = read_document(CONTINUED, "file", "srt")
    assert document.with_translations([[Text("zwei Wörter")], [Text("ja.")]])[1] == [0]


def test_a_turn_of_several_lines_is_one_text(texts: Texts, translated: Translated) -> None:
    cue = "1\n00:00:01,000 --> 00:00:02,000\n- hello.\n- {}\n{}\n"
    assert texts(cue.format("hi, how", "are you?"), "srt") == ["hello.", "hi, how are you?"]
    expected = cue.replace("hello", "HELLO").format("HI, HOW", "ARE YOU?")
    assert translated(cue.format("hi, how", "are you?"), "srt") == expected
