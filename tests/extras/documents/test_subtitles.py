"""SubRip and WebVTT; pysubs2, an independent reader, compares times and texts."""

from collections.abc import Callable

import pytest
from growth import assert_grows_in_proportion

from manyheads.errors import DataError
from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.parts import Text
from manyheads.extras.documents.placing import protected

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


TIMES = "00:00:01,000 --> 00:00:04,000"


def in_cue(*lines: str, name: str = "1") -> str:
    return "\n".join((name, TIMES, *lines, "", ""))


def check(texts: Texts, translated: Translated, document: str, expected: list[str], format_name: str = "srt") -> None:
    """Every text is found, and nothing but the texts changes."""
    assert [text.replace("<>", "").strip() for text in texts(document, format_name)] == expected
    result = translated(document, format_name)
    assert result.lower().split() == document.lower().split(), "line ends can move"
    assert result.count("\n") == document.count("\n")
    assert all(word.upper() in result for text in expected for word in text.split() if word.isalpha())


CAPTIONS = """WEBVTT
Kind: captions
Language: en

00:00:00.030 --> 00:00:05.720 align:start position:0%
 
I am very<00:00:00.719><c> hungry</c>

00:00:05.720 --> 00:00:05.730 align:start position:0%
i am very hungry
 

00:00:05.730 --> 00:00:07.000 align:start position:0%
i am very hungry
and<00:00:06.000><c> tired</c>
"""  # noqa: W293


def test_automatic_captions(texts: Texts, translated: Translated) -> None:
    assert texts(CAPTIONS, "vtt") == [
        "I am very<><> hungry<>", "i am very hungry", "i am very hungry and<><> tired<>",
    ]  # fmt: skip
    assert translated(CAPTIONS, "vtt").lower() == CAPTIONS.lower()


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_empty_lines_in_and_before_a_cue(line_end: str, texts: Texts, translated: Translated) -> None:
    srt = in_cue("", "I am hungry.", "", " ", "Thank you.") + in_cue("Yes.", name="2\n")
    check(texts, translated, srt.replace("\n", line_end), ["I am hungry.", "Thank you.", "Yes."])
    vtt = (
        f"WEBVTT\nKind: captions\n\nNOTE no text\nno text\n\nname\n{TIMES}\n\nI am hungry.\n\nThank you.\n\nNOTE\n"
        f"no text\n\nSTYLE\n::cue {{ color: red }}\n\nREGION\nid:x\n\na-name\n{TIMES}\n\nname-2\n{TIMES}\nBye.\n\n"
        f"You are late.\n{TIMES}\nNOTE this.\n"
    )
    expected = ["I am hungry.", "Thank you.", "Bye.", "You are late.", "NOTE this."]
    check(texts, translated, vtt.replace("\n", line_end), expected, "vtt")
    assert read_document(vtt, "file", "vtt").outside == ()
    check(texts, translated, vtt.replace("\n", line_end), expected)  # a file with another name


@pytest.mark.parametrize(
    "times",
    [
        "00:00:20 --> 00:00:24", "00:00:03:000 --> 00:00:04:000", "00:00:01:10 --> 00:00:02:11", "0:20 --> 0:24",
        "00:00:05,000 -> 00:00:06,000", "00:00:05,000 –> 00:00:06,000", "00:00:05,000 → 00:00:06,000",
        "-00:00:01,000 --> 00:00:06,000", "00: 00: 05, 000 - -> 00: 00: 06, 000", "00:00:05.5-->00:00:06.5",
        "00:00:05,000 --> 00:00:06,000 X1:100 X2:200", "00:00:05.000 --> 00:00:06.000 align:start position:0% line:-1",
        "00:00:05,000 - 00:00:06,000", "00:00:05,000 ---> 00:00:06,000", "00:00:05,000 -->", "5,000 --> 6,000",
        "00;00;05;10 --> 00;00;06;10", " \t00:00:05,000\t-->\t00:00:06,000 ", "100:00:05,000 --> 100:00:06,000",
    ],
)  # fmt: skip
@pytest.mark.parametrize("format_name", ["srt", "vtt"])
def test_lines_of_times_are_no_text(times: str, format_name: str, texts: Texts, translated: Translated) -> None:
    for text in (f"1\n{times}\nI am here.\n", in_cue("Good.").rstrip("\n") + f"\n4\n{times}\nI am here.\n"):
        found = ["I am here."] if text.startswith(f"1\n{times}") else ["Good.", "I am here."]
        check(texts, translated, text, found, format_name)
        assert read_document(text, "file", format_name).outside == ()


@pytest.mark.parametrize("alone", ["00:00:19,000", "0:00:19.5", "00:00:19,000 00:00:20,000", "\t00:00:19,000 "])
def test_a_line_of_one_time_is_no_text(alone: str, texts: Texts, translated: Translated) -> None:
    text = in_cue("I like red.") + f"10\n{alone}\nI like blue.\n"
    check(texts, translated, text, ["I like red.", "10", "I like blue."])
    assert texts(in_cue("I came at 00:00:19,000"), "srt") == ["I came at 00:00:19,000"]


def test_an_arrow_or_a_time_alone_is_text(texts: Texts) -> None:
    lines = (
        "That light -->> they will",
        "meet at 08:00 next, or 09:00,",
        "and take 3 -> 4 apples. 10:30 - 11:00 it is.",
    )
    assert texts(in_cue(*lines), "srt") == [" ".join(lines)]


def test_text_that_belongs_to_no_cue_is_named(translated: Translated) -> None:
    srt = f"Made by me\n\n1\n{TIMES} Hello there\nOne.\nat 00:01:02 -> 00:01:03\nTwo.\n"
    document = read_document(srt, "file", "srt")
    assert [document.line_at(place) for place in document.outside] == [1, 4, 6]
    assert translated(srt, "srt") == srt.replace("One", "ONE").replace("Two", "TWO")
    vtt = f"WEBVTT a title\nKind: captions\n\nmade by me\n\nname\n{TIMES}\nOne.\n"
    document = read_document(vtt, "file", "vtt")
    assert [document.line_at(place) for place in document.outside] == [4]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("<i>- Are you hungry?", "- Yes, I am.</i>"), ["Are you hungry?", "Yes, I am."]),
        (("{\\an8}- Who?", "- Me."), ["Who?", "Me."]),
        (('<font color="#fff">- Who?</font>', "<font>-Me.</font>"), ["Who?", "Me."]),
        (("{\\an8}<i>– Who are", "you?</i>", ">> Me."), ["Who are you?", "Me."]),
        (("Wait.", "- No!"), ["Wait.", "No!"]),
        (("He came", "- as always - late"), ["He came - as always - late"]),
        (("-Are you hungry? -Yes, I am. - no-one?",), ["Are you hungry?", "Yes, I am.", "no-one?"]),
        ((">> Who? >> Me.", "MAN: Yes. – <i>No.</i>"), ["Who?", "Me.", "Yes.", "No."]),
        (("He came. - Late - as always.",), ["He came. - Late - as always."]),
        (("♪ My heart is blue ♪", "♪ I love you so ♪"), ["My heart is blue", "I love you so"]),
        (("<i>♪ My heart is", "blue ♪</i>"), ["My heart is blue"]),
        (("# My heart is blue #",), ["My heart is blue"]),
        (("♪♪", "♫ La la ♫ ♪"), ["La la"]),
        (("[door opens]", "Who are you?"), ["door opens", "Who are you?"]),
        (("[door", "opens]"), ["door opens"]),
        (("(SIGHS) I am tired. [laughs]",), ["SIGHS", "I am tired.", "laughs"]),
        (("- [door opens] Who?", "- MAN: Me. (laughs)"), ["door opens", "Who?", "Me.", "laughs"]),
        (("MAN: Where are you?", "WOMAN 2: I am here."), ["Where are you?", "I am here."]),
        (("<b>MAN</b>: Where?",), ["MAN: Where?"]),
        (("DR. SMITH:", "Where are you?"), ["Where are you?"]),
        (("John: Where?", "Mary: Here."), ["Where?", "Here."]),
        (("Listen: he came.",), ["Listen: he came."]),
        (("HE SAID: GO AWAY.",), ["HE SAID: GO AWAY."]),
        (("He (Tom) came [late].",), ["He (Tom) came [late]."]),
        (("(Tom) came late.",), ["(Tom) came late."]),
    ],
)
def test_marks_stay_and_texts_between_them_are_apart(lines, expected, texts, translated):
    check(texts, translated, in_cue(*lines), expected)
    check(texts, translated, "WEBVTT\n\n" + in_cue(*lines).replace(">>", "&gt;&gt;"), expected, "vtt")


def test_characters_are_escaped_as_in_the_source(texts: Texts, translated: Translated) -> None:
    cue = in_cue("Tom {} Mary{} are here.")
    assert texts(cue.format("&amp;", "&nbsp;&#233;"), "srt") == ["Tom & Mary\u00a0é are here."]
    result = translated(cue.format("&amp;", "&nbsp;&#233;"), "srt", lambda _: "Tom & Maria\u00a0é <x>.")
    assert result == in_cue("Tom &amp; Maria&nbsp;&#233; <x>.")
    assert translated(cue.format("&", ""), "srt", lambda _: "Tom & Maria.") == in_cue("Tom & Maria.")
    joined = in_cue("Tom &amp; Mary,") + in_cue("and you", name="2")
    assert texts(joined, "srt") == ["Tom & Mary, and you"]
    assert "Tom &amp; Maria" in translated(joined, "srt", lambda _: "Tom & Maria und du")


def test_a_translation_like_times_or_like_a_number_keeps_the_source() -> None:
    srt = in_cue("One.") + f"2\n{TIMES}\nTwo.\n{TIMES}\nthree,\n\n{TIMES}\nfour.\n"
    document = read_document(srt, "file", "srt")
    assert len(document.segments) == 3
    for bad in ("00:00:05,000 --> 00:00:06,000", "so 0:05 -> 0:06", "00:00:05,000 -->"):
        assert document.with_translations([[Text(bad)], [Text(bad)], [Text(f"1:00 -> {bad}")]]) == (srt, [0, 1, 2])
    result, kept = document.with_translations([[Text("7")], [Text("7")], [Text("7 8")]])
    assert kept == [1, 2], "times follow, so a reader would take it for their number"
    assert result == srt.replace("One.", "7")


@pytest.mark.parametrize("text", ["", "Hello.\n", "WEBVTT\n\nNOTE no text\n", "1\n00:00:01,000\nHello.\n"])
@pytest.mark.parametrize("format_name", ["srt", "vtt"])
def test_a_file_without_cues_is_an_error(text: str, format_name: str) -> None:
    with pytest.raises(DataError, match=r"file: there is no cue; .*00:00:01,000 --> 00:00:04,000") as raised:
        read_document(text, "file", format_name)
    assert "--format lines" in raised.value.for_command()


FRAGMENTS = [
    " \t", "<", "<a", "<i>", "</b>", "<i></b>", "{\\", "&a", "♪ ", "♪\n", "[", "(", "[a] ", "[a]\n", "# ", "- ",
    "- a\n", "A: ", "A:\n", "a ", "a\n", "a\n\n", "\n", "1:1   ", "1:1:1 ->  ", "00:00:01", "NOTE\n\n", "x:y ",
    "&amp;", f"{TIMES}\na\n",
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fragment", FRAGMENTS)
@pytest.mark.parametrize("format_name", ["srt", "vtt"])
def test_the_time_grows_with_the_length_alone(fragment: str, format_name: str) -> None:
    def work(length: int) -> None:
        document = read_document(f"{TIMES}\na{fragment * (length // len(fragment))}", "file", format_name)
        document.with_translations([[*one.parts, Text("x")] for one in document.segments])

    assert_grows_in_proportion(work, 2_000)
