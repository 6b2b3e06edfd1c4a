"""Sentences of a segment, words that are kept, and the division of long sentences."""

import time
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.extras.documents.parts import Part, Tag, Text
from manyheads.extras.documents.placing import Sentence, protected, sentences_of, split_at_clauses, unchanged
from manyheads.extras.documents.sentence_ends import split_sentences
from manyheads.text.words import PRIVATE

OPEN, CLOSE, ALONE, CODE = Tag("<b>", "open", 1), Tag("</b>", "close", 1), Tag("[^1]", "alone"), Tag("`c`", "word")


def read(*parts: Part) -> list[Sentence]:
    found = sentences_of(parts, split_sentences)
    assert found is not None
    return found


def code_of(parts: Sequence[Part]) -> str:
    return "".join(part.text if isinstance(part, Text) else part.code for part in parts)


def test_sentences_with_the_space_between_them() -> None:
    found = read(Text("Dr. Smith came.  He saw it at 3 p.m. on Monday. Why?"))
    assert [(one.before, one.text) for one in found] == [
        ("", "Dr. Smith came."),
        ("  ", "He saw it at 3 p.m. on Monday."),
        (" ", "Why?"),
    ]


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        (
            "de",
            "Am 5. Jan. 2020 kam er. Siehe Bd. 3. Er ging.",
            ["Am 5. Jan. 2020 kam er.", "Siehe Bd. 3.", "Er ging."],
        ),
        ("fr", "Le 5 janv. 2020 il vint. Voir vol. 5.", ["Le 5 janv. 2020 il vint.", "Voir vol. 5."]),
        ("en", "See ch. 7 and Eq. 5. It was Jan. She left.", ["See ch. 7 and Eq. 5.", "It was Jan.", "She left."]),
    ],
)
def test_abbreviations_before_numbers(language: str, text: str, expected: list[str]) -> None:
    found = sentences_of([Text(text)], partial(split_sentences, language=language))
    assert found is not None
    assert [one.text for one in found] == expected


def test_tags_go_with_their_words() -> None:
    first, second = read(Text("I "), OPEN, Text("saw."), CLOSE, Text(" "), ALONE, Text("Use "), CODE, Text("."))
    assert first == Sentence("I saw.", (CODE,), ((2, OPEN), (6, CLOSE)))
    assert second == Sentence(f"Use {chr(PRIVATE)}.", (CODE,), ((0, ALONE),), " ")


def test_a_tag_behind_the_last_word_keeps_its_space() -> None:
    [only] = read(Text("Look here. "), ALONE)
    assert code_of(unchanged(only)) == "Look here. [^1]"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("See https://x.org/a_(b)?c=1#d.", ["https://x.org/a_(b)?c=1#d"]),
        ("Mail me@x.org, or www.x.org/a!", ["me@x.org", "www.x.org/a"]),
        (
            "Hi {name}, {{ a b }} ${x} {0:.2f} %s %(n)d %1$s",
            ["{name}", "{{ a b }}", "${x}", "{0:.2f}", "%s", "%(n)d", "%1$s"],
        ),
        (
            "{% if new %}New{% endif %} in {%- include 'a.html' %}",
            ["{% if new %}", "{% endif %}", "{%- include 'a.html' %}"],
        ),
        ("It is 50% done, 5 %.", []),
        ("<0>a</0> uses snake_case() and --beam-size", ["<0>", "</0>", "snake_case()", "--beam-size"]),
        ("A well-known and/or case -- here", []),
        ("Größe: größe_x, Mail an jörg@x.org", ["größe_x", "jörg@x.org"]),
        # Chinese and Japanese have no spaces around words, and signs of their own.
        ("访问https://x.org/a。更多信息（见www.x.org）", ["https://x.org/a", "www.x.org"]),
        ("请联系me@x.org或运行--help。", ["me@x.org", "--help"]),
        ("调用my_func()函数，输出%s的值", ["my_func()", "%s"]),
    ],
)
def test_what_is_protected(text: str, kept: list[str]) -> None:
    parts = protected([Text(text)])
    assert [part.code for part in parts if isinstance(part, Tag)] == kept
    assert code_of(parts) == text


def test_private_characters_in_a_document_leave_the_segment_alone() -> None:
    assert sentences_of([Text(f"a {chr(PRIVATE + 7)}")], split_sentences) is None


PIECES = st.lists(
    st.sampled_from([Text("One. "), Text("two words"), Text(" "), Text("a_b"), Text("? "), OPEN, CLOSE, ALONE, CODE]),
    max_size=9,
)


@given(PIECES, st.integers(3, 12))
def test_nothing_is_lost(parts: list[Part], limit: int) -> None:
    pieces = [
        piece for one in read(*parts) if one.text for piece in split_at_clauses(one, lambda text: len(text) <= limit)
    ]
    whole = [part for piece in pieces for part in ([Text(piece.before)] if piece.before else []) + unchanged(piece)]
    if any(isinstance(part, Text) and part.text.strip() for part in parts) or CODE in parts:
        assert "".join(code_of(whole).split()) == "".join(code_of(parts).split())
    assert all(len(piece.text) <= limit for piece in pieces)


def test_long_sentences_are_divided_at_clauses() -> None:
    text = "When it rained we stayed at home; we read books, and we played games because it was cold"
    [sentence] = read(Text(text))
    pieces = split_at_clauses(sentence, lambda one: len(one.split()) <= 8)
    assert [one.text for one in pieces] == [
        "When it rained we stayed at home;",
        "we read books,",
        "and we played games because it was cold",
    ]
    assert "".join(one.before + one.text for one in pieces) == text


def test_a_wide_gap_in_a_long_sentence_takes_no_longer_than_other_text() -> None:
    """A server divides sentences of its clients' pages, in which no-break spaces stay."""
    began = time.process_time()
    pieces = split_at_clauses(Sentence("a" + "\xa0" * 12_000 + "b", (), ()), lambda text: len(text) < 5)
    assert [one.text for one in pieces] == ["a", "b"]
    assert time.process_time() - began < 2
