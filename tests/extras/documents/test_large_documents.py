"""Documents that would take minutes if the work grew with the square of their size."""

from collections.abc import Callable

import pytest
from growth import assert_grows_in_proportion

from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.markdown import MOST_BRACKETS
from manyheads.extras.documents.parts import Tag, Text
from manyheads.extras.documents.placing import Sentence, place, protected, sentences_of, split_at_clauses
from manyheads.extras.documents.sentence_ends import split_sentences
from manyheads.extras.documents.terms import Term, Terms
from manyheads.extras.documents.translating import DocumentTranslation

pytest.importorskip("markdown_it")
SIZE = 40_000


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("html", "<a " * SIZE),
        ("html", '<a "' * SIZE),
        ("html", "<!--" * SIZE),
        ("html", "<code>" * SIZE),
        ("html", "<p>a</p>" * SIZE),
        ("text", "a\n" * SIZE),
        ("text", "a " * SIZE),
        ("srt", "00:00:01,000 --> 00:00:02,000\na\n\n" * (SIZE // 10)),
        ("srt", "00:00:01,000 --> 00:00:02,000\n" + "{" * SIZE),
        ("markdown", "a\n\n" * (SIZE // 20)),
        ("markdown", "$a " * (SIZE // 20)),
    ],
)
def test_reading(format_name: str, text: str) -> None:
    document = read_document(text, "file", format_name)
    lines = [document.line_of(segment) for segment in document.segments]
    assert lines == sorted(lines)
    assert document.with_translations([[Text("b")] for _ in document.segments])[0]


@pytest.mark.parametrize("text", ["a." * SIZE, "a_" * SIZE, "{" * SIZE, "%" * SIZE, "http://" * SIZE, "www." * SIZE])
def test_protecting(text: str) -> None:
    assert "".join(part.text if isinstance(part, Text) else part.code for part in protected([Text(text)])) == text


def test_columns() -> None:
    rows = "id,text\n" + "1,a text\n" * SIZE
    document = read_document(rows, "file", "csv", ["text"])
    assert document.line_of(document.segments[-1]) == SIZE + 1
    records = '{"a": {"b": "a text"}}\n' * SIZE
    assert len(read_document(records, "file", "jsonl", ["a.b"]).segments) == SIZE


def translated(fragment: str, format_name: str, columns: tuple[str, ...] = ()) -> Callable[[int], object]:
    def work(size: int) -> object:
        document = read_document(fragment * size, "file", format_name, columns)
        translation = DocumentTranslation(document, split_sentences, lambda text: len(text) <= 200)
        return translation.finish(['{"text": "x"}'] * len(translation.units))

    return work


def divided(fragment: str) -> Callable[[int], object]:
    def work(size: int) -> object:
        found = sentences_of([Text(fragment * size), Tag("<br>", "alone")] * 2, split_sentences) or ()
        return [split_at_clauses(one, lambda text: len(text) <= 200) for one in found]

    return work


def placed(size: int) -> object:
    marks = [(2 * number, Tag("<b>", kind, number)) for number in range(size) for kind in ("open", "close")]
    alone = [(2 * number, Tag("<br>", "alone")) for number in range(size)]
    text = "a " * size
    return place(Sentence(text, (), tuple(marks)), text, []), place(Sentence(text, (), tuple(alone)), text, [])  # type: ignore[arg-type]


def many_terms(size: int) -> object:
    words = [f"word{number}" for number in range(size)]
    return Terms([Term(word, word) for word in words]).of(" ".join(words[:10]))


WORK = {
    **{f"sentences of {one!r}": divided(one) for one in ("a ", "a. ", "«", "a, ", "and ", "(", ". ", "😊", "a.b ")},
    **{
        f"markdown of {one!r}": translated(one, "markdown")
        for one in (
            r"\*\*\*\*\*\*" + "\\\n",
            r": \*\*\*\*\*\*" + "\n",
            "[^a]: *b*\n",
            "**a** ",
            "<b>x</b>",
            "| a ",
            "> a\n",
        )
    },
    **{f"html of {one!r}": translated(one, "html") for one in ("<b>x", "x<br>", "<p>a", "&amp;", "<i>a</i> b. ")},
    **{f"csv of {one!r}": translated(one, "csv", ("1",)) for one in ("a,b\n", '"a""b",c\n', "a\n")},
    **{
        f"jsonl of {one!r}": translated(one, "jsonl", ("a.b",))
        for one in ('{"a": {"b": "x"}}\n', '{"c": [1, 2], "a": {"b": ["x\\ny", "z"]}}\n')
    },
    "json object": lambda size: read_document("{" + '"c": {}, ' * size + '"a": "x"}', "f", "jsonl", ["a"]),
    "terms in a text": lambda size: Terms([Term("a b", "x"), Term("a", "y"), Term("ß", "z")]).of("a a b ß " * size),
    "number of terms": many_terms,
    "placing": placed,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WORK)
def test_time_grows_with_the_size(name: str) -> None:
    assert_grows_in_proportion(WORK[name], 125)


def test_a_paragraph_of_too_many_brackets_is_named() -> None:
    text = "# A title\n\n" + "a [ " * (MOST_BRACKETS + 1) + "\n\nb\n"
    document = read_document(text, "file", "markdown")
    assert document.notes == ("paragraphs with more than 2,000 [, not translated: 1; divide them with empty lines",)
    report = DocumentTranslation(document, split_sentences, lambda text: True).finish(['{"text": "x"}'] * 2)[1]
    assert (report.kept, report.lines["kept"]) == (1, [3])
