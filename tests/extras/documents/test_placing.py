"""Where markup goes in a translation."""

import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manyheads.extras.documents.parts import Part, Tag, Text
from manyheads.extras.documents.placing import AlignedToken, Sentence, place
from manyheads.text.words import PRIVATE

CODE = Tag("`c`", "word")


def code_of(parts: Sequence[Part]) -> str:
    return "".join(part.text if isinstance(part, Text) else part.code for part in parts)


def marked(text: str) -> Sentence:
    """A sentence from text in which brackets are pairs of tags, `!` is a tag alone and `@` a kept word."""
    plain: list[str] = []
    marks = []
    for char in text:
        if char in "[]{}":
            pair = "[]{}".index(char) // 2
            marks.append((len(plain), Tag(char, "open" if char in "[{" else "close", pair)))
        elif char == "!":
            marks.append((len(plain), Tag("!", "alone")))
        else:
            plain.append(chr(PRIVATE) if char == "@" else char)
    return Sentence("".join(plain), (CODE,), tuple(marks))


def aligned(source: str, target: str, words: dict[str, str]) -> list[AlignedToken]:
    """An alignment from target word -> source word."""
    return [
        (target.index(t), target.index(t) + len(t), source.index(s), source.index(s) + len(s)) for t, s in words.items()
    ]


WORDS = {"der": "the", "Hund": "dog", "groß": "big", "ist": "is"}


@pytest.mark.parametrize(
    ("source", "target", "expected", "moved"),
    [
        ("the [big] dog", "der Hund groß", "der Hund [groß]", 0),
        ("[the big] dog", "groß der Hund", "[groß der] Hund", 0),
        ("[the big dog]", "xx yy", "[xx yy]", 0),
        ("[the big dog].", "xx yy.", "[xx yy].", 0),
        ("([the big dog])", "(xx yy)", "([xx yy])", 0),
        ("the [big {dog}]", "der Hund, groß", "der [{Hund}, groß]", 0),
        ("the [[big]] dog".replace("[[", "[{").replace("]]", "}]"), "der groß, Hund", "der [{groß}], Hund", 0),
        ("the [big] {dog}", "der groß Hund", "der [groß] {Hund}", 0),
        ("the big! dog", "der groß Hund", "der groß! Hund", 0),
        ("the big !dog", "der groß Hund", "der groß !Hund", 0),
        ("the big ! dog", "der groß Hund", "der groß ! Hund", 0),
        ("!the dog!", "der Hund", "!der Hund!", 0),
        ("the dog!.", "der Hund.", "der Hund!.", 0),
        ("the [small] dog", "der Hund.", "der [Hund].", 1),
        ("the small! dog", "der Hund", "der Hund!", 1),
        ("the @ dog", f"der {chr(PRIVATE)} Hund", "der `c` Hund", 0),
        ("the @ dog.", "der Hund.", "der Hund `c`.", 1),
        ("the @ dog", f"{chr(PRIVATE)} der {chr(PRIVATE)} Hund", "`c` der  Hund", 0),
        ("the [@] dog", f"der {chr(PRIVATE)} Hund", "der [`c`] Hund", 0),
        ("[small] {tiny} dog", "xx Hund", "[xx] {Hund}", 1),  # both were translated to one word
        ("[the big", "groß der", "[groß der", 0),
    ],
)
def test_places(source: str, target: str, expected: str, moved: int) -> None:
    sentence = marked(source)
    words = {t: s for t, s in (WORDS | {chr(PRIVATE): chr(PRIVATE)}).items() if t in target and s in sentence.text}
    alignment = aligned(sentence.text, target, words)
    if "xx" in target and "small" in source:
        alignment += [(0, 2, 0, 5), (0, 2, 6, 10)]
    parts, num_moved = place(sentence, target, alignment)
    assert (code_of(parts), num_moved) == (expected, moved)


@given(
    st.text("ab .,[]{}!@", max_size=14),
    st.text(f"xy .{chr(PRIVATE)}", max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 13)), max_size=8),
)
def test_every_tag_comes_once_and_pairs_nest(source: str, target: str, pairs: list[tuple[int, int]]) -> None:
    sentence = marked(source)
    assume(sentence.text.count(chr(PRIVATE)) <= 1)  # words have their own characters
    parts, _ = place(sentence, target, [(t, t + 1, s, s + 1) for t, s in pairs])
    found = [part for part in parts if isinstance(part, Tag) and part.kind != "word"]
    assert sorted(tag.code.strip() for tag in found) == sorted(tag.code for _, tag in sentence.marks)
    kept = [part for part in parts if part == CODE]
    assert len(kept) == (chr(PRIVATE) in sentence.text)


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=2, max_size=3), st.randoms())
def test_tags_never_cross(bounds: list[tuple[int, int]], chance: Random) -> None:
    """Pairs in a sentence of words; each tag closes after the tags that were opened inside it."""
    words = [f"w{number}" for number in range(11)]
    order = chance.sample(words, len(words))
    spans: list[tuple[int, int]] = []
    for low, high in (sorted(one) for one in bounds):
        if all(high < a or b < low or (a <= low and high <= b) for a, b in spans):
            spans.append((low, high))
    source, target = " ".join(words), " ".join(order)
    starts = {word: source.index(word + " ") if word + " " in source else source.index(word) for word in words}
    marks: list[tuple[int, int, Tag]] = []
    for pair, (low, high) in enumerate(spans):
        size = high - low
        marks.append((starts[words[low]], -size, Tag(f"<{pair}>", "open", pair)))
        marks.append((starts[words[high]] + len(words[high]), size - 100, Tag(f"</{pair}>", "close", pair)))
    tags = tuple((where, tag) for where, _, tag in sorted(marks, key=lambda one: one[:2]))
    alignment = [
        (target.index(word), target.index(word) + len(word), starts[word], starts[word] + len(word)) for word in words
    ]
    parts, _ = place(Sentence(source, (), tags), target, alignment)
    opened: list[int] = []
    for part in parts:
        if isinstance(part, Tag) and part.kind == "open":
            opened.append(part.pair)
        elif isinstance(part, Tag):
            assert opened.pop() == part.pair


def test_the_time_of_placing_is_bounded() -> None:
    """The server places markup of clients, in a thread that it has once."""
    words = [f"w{number}" for number in range(600)]
    text = " ".join(words)
    marks = []
    place_of = 0
    for pair, word in enumerate(words):
        tags = Tag("<b>", "open", pair), Tag("</b>", "close", pair)
        marks += [(place_of, tags[0]), (place_of + len(word), tags[1])]
        place_of += len(word) + 1
    begun = time.process_time()
    parts, moved = place(Sentence(text, (), tuple(marks)), text, [])
    assert moved == 600
    assert sum(isinstance(part, Tag) for part in parts) == 1200
    breaks = tuple((9_002 + 2 * number, Tag("<br>", "alone")) for number in range(300))
    place(Sentence("a" * 9_000 + " b" * 300, (), breaks), "x", [])
    assert time.process_time() - begun < 5


def test_tags_beyond_the_limit_go_to_the_end_and_are_counted() -> None:
    """Each pair is compared with all others, so thousands in one sentence would take minutes."""
    marks = tuple((1, Tag(f"<{kind}>", kind, pair)) for pair in range(4_000) for kind in ("open", "close"))
    parts, moved = place(Sentence("a b", (), marks), "c d", [])  # type: ignore[arg-type]
    assert moved >= 3_500
    assert sum(isinstance(part, Tag) for part in parts) == 8_000
