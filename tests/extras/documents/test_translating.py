"""Whole documents through a model that writes nonsense: whatever it writes, the promises hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from copy import copy
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.inputs_and_results import Hypothesis, Translation, is_degenerate
from manyheads.decoding.kept_texts import restored, show
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.errors import DataError, RequestError
from manyheads.extras.documents import translating
from manyheads.extras.documents.formats import read_document
from manyheads.extras.documents.placing import align
from manyheads.extras.documents.sentence_ends import split_sentences
from manyheads.extras.documents.terms import Term, Terms, contains
from manyheads.extras.documents.translating import DocumentReport, DocumentTranslation, Unit, UnitTranslator
from manyheads.models.transformer import config as presets
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import private

pytest.importorskip("markdown_it")

WORDS = "the cat sees a dog and you read a book in the old house near the river bank while it rains"
PAGE = """# The cat

The cat sees **a dog** and you. Read https://x.org/a_b and `code` in {place}.
The cat sees **a dog** and you.

- the river bank
- 12 %
"""


@pytest.fixture(scope="module")
def translator() -> Translator:
    """An untrained Transformer."""
    tokenizer = Tokenizer.train([WORDS, WORDS.upper()], TokenizerSettings(vocab_size=330))
    size = tokenizer.vocab_size
    torch.manual_seed(4)
    config = dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size)
    odd = (4 + byte for byte in range(256) if not 32 <= byte < 127)  # it writes readable letters only
    settings = DecodingSettings(num_beams=2, max_len_offset=4, banned_ids=(tokenizer.unk_id, *odd))
    return Translator(build_model(config), tokenizer, settings, device="cpu")


Result = tuple[str, DocumentReport]


def translated(translator: Translator, page: str, format_name: str = "markdown", terms: Terms | None = None) -> Result:
    units = UnitTranslator(translator, Terms() if terms is None else terms, {})
    document = DocumentTranslation(read_document(page, "page", format_name), split_sentences, units.fits)
    return document.finish(units.translate(document.units))


def test_what_is_kept_is_there_once(translator: Translator) -> None:
    result, report = translated(translator, PAGE)
    for kept in ("https://x.org/a_b", "`code`", "{place}", "- 12 %\n"):
        assert result.count(kept) == 1
    assert result.count("**") == 4
    assert result.startswith("# ")
    assert result.count("\n\n") == PAGE.count("\n\n")
    assert (report.segments, report.sentences, report.repeated) == (4, 5, 1)
    assert report.describe()[0] == "4 segments, 5 sentences, 1 of them repeated"


def test_terms_are_forced(translator: Translator) -> None:
    terms = Terms([Term("river bank", "house"), Term("cat", "book rains")])
    result, report = translated(translator, PAGE, terms=terms)
    # Lines may be broken, and markup may stand, between its words.
    assert " ".join(result.replace("**", "").split()).count("book rains") == 3
    assert "house" in next(line for line in result.split("\n") if line.startswith("- "))
    assert (report.terms, report.terms_met) == (4, 4)
    assert "terms in the translation: 4 of 4" in report.describe()


def test_long_sentences_are_divided(translator: Translator) -> None:
    long = "the cat sees a dog, and you read a book; " * 20 + "it rains."
    model = translator.model
    units = UnitTranslator(translator, Terms(), {"max_tokens": 60})
    document = DocumentTranslation(read_document(long, "page", "text"), split_sentences, units.fits)
    assert len(document.units) < 41
    assert all(units.fits(unit.text) for unit in document.units)
    _, report = document.finish(units.translate(document.units))
    assert (report.sentences, report.divided) == (1, 1)
    assert model is translator.model


def test_equal_sentences_are_translated_once(translator: Translator) -> None:
    units = UnitTranslator(translator, Terms(), {})
    page = "The dog `a` sees `b`.\n\nRead `x`. The dog `c` sees `a`.\n"
    document = DocumentTranslation(read_document(page, "page", "markdown"), split_sentences, units.fits)
    assert len(document.units) == 2
    result, _ = document.finish(units.translate(document.units))
    assert [result.count(code) for code in ("`a`", "`b`", "`c`", "`x`")] == [2, 1, 1, 1]


class _Scripted:
    """Stands in for a translator: answers of the first and of the second search."""

    def __init__(self, translator: Translator, first: str, again: str) -> None:
        self._translator = translator
        self._answers = (first, again)
        self.searches: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._translator, name)

    def by_torch(self) -> _Scripted:
        return self

    def translate(
        self, texts: list[str], *, on_progress: object = None, stop: object = None, **overrides: Any
    ) -> list[str]:
        self.searches.append(overrides)
        return [self._answers["repetition_penalty" in overrides]] * len(texts)


@pytest.mark.parametrize(
    ("first", "again", "expected", "counts"),
    [
        ("", "ein Hund", "ein Hund", (1, 0)),
        ("der der der der der", "ein Hund", "ein Hund", (1, 0)),
        ("der der der der der", "", "der der der der der", (1, 1)),
        ("ein Hund", "", "ein Hund", (0, 0)),
    ],
)
def test_degenerate_output_is_searched_again(first, again, expected, counts, translator):
    scripted = _Scripted(translator, first, again)
    result, report = translated(scripted, "the dog", "text")  # type: ignore[arg-type]
    assert result == expected
    assert (report.again, report.degenerate) == counts
    assert len(scripted.searches) == 1 + counts[0]
    assert ("(line 1)" in "".join(report.describe())) == bool(counts[0])


def test_the_second_search_stays_within_the_limit(translator: Translator) -> None:
    scripted = _Scripted(translator, "", "x")
    UnitTranslator(scripted, Terms(), {"max_new_tokens": 1}).translate([Unit("the dog", False)])  # type: ignore[arg-type]
    assert [translator.options(**each).max_new_tokens for each in scripted.searches] == [1, 1]


class _EmptyEngine:
    """An engine that was asked for by name, lacks the options of the second search, and finds empty translations."""

    choice = ""
    longest_source = 1_000

    def takes(self, settings: DecodingSettings, own_search: object) -> bool:
        if settings.repetition_penalty != 1:
            raise RequestError("the engine has no repetition_penalty.")
        return True

    def search(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        *,
        stop: object = None,
        on_progress: object = None,
    ) -> list[list[Hypothesis]]:
        return [[Hypothesis([], 0.0, [], True)] for _ in sources]


def test_the_second_search_is_ours_whatever_engine_is_used(translator: Translator) -> None:
    other = copy(translator)
    other.search = dataclasses.replace(translator.search, engine=_EmptyEngine())
    result, report = translated(other, "the dog", "text")
    assert report.again == 1
    assert result.strip()


@pytest.mark.parametrize(
    ("source", "text", "is_bad"),
    [
        ("a dog", "", True),
        ("a dog", "no no no no", True),
        ("very very very very good", "sehr sehr sehr sehr gut", False),
        ("a dog", "the a the b the c the d the", True),
        ("ab", "aaaaaaaaaaaa", True),
        ("a dog", "ein sehr, sehr, sehr guter Hund", False),
        ("", "", False),
    ],
)
def test_what_counts_as_degenerate(source: str, text: str, is_bad: bool) -> None:
    assert is_degenerate(source, text) == is_bad


def test_records_are_one_line_of_json_each(translator: Translator) -> None:
    units = UnitTranslator(translator, Terms(), {})
    document = DocumentTranslation(read_document(PAGE, "page", "markdown"), split_sentences, units.fits)
    records = units.translate(document.units)
    assert all("\n" not in record and "text" in json.loads(record) for record in records)


def test_an_alignment_lies_within_both_texts(translator: Translator) -> None:
    source, target = "the cat sees a dog", "you read a book"
    found = align(translator, source, target)
    assert found
    for t0, t1, s0, s1 in found:
        assert 0 <= t0 <= t1 <= len(target)
        assert 0 <= s0 <= s1 <= len(source)
    assert align(translator, "", target) == []


@pytest.mark.parametrize(
    ("source", "text", "is_found"),
    [
        ("Straße", "Die Straße ist lang.", True),
        ("Straße", "DIE STRASSE", True),
        ("STRASSE", "in den strassen", False),
        ("naïve", "a nai\u0308ve plan", True),
        ("苹果", "我喜欢苹果。", True),
        ("スマホ", "新しいスマホを買う", True),
        ("go", "用go写", True),
        ("go", "用gopher写", False),
    ],
)
def test_where_a_term_is_found(source: str, text: str, is_found: bool) -> None:
    assert bool(Terms([Term(source, "x")]).of(text)) == is_found


def test_of_terms_that_overlap_the_longer_one_counts() -> None:
    terms = Terms([Term("machine learning", "a"), Term("learning algorithm x", "b"), Term("machine", "c")])
    assert [term.target for term in terms.of("a machine, and a machine learning algorithm x")] == ["c", "b"]
    assert [term.target for term in terms.of("machine learning algorithm")] == ["a"]


def test_whether_a_translation_contains_a_term() -> None:
    assert contains("我喜欢苹果。", "苹果")
    assert contains("ein nai\u0308ver Plan", "naïv")
    assert contains("die Hunde", "hund")
    assert not contains("Schäferhunde", "Hund")
    assert Terms([Term("plus", "+")]).of("one plus two")[0].target == "+"


@pytest.mark.parametrize(("target", "text"), [("+", "1 + 2"), ("$", "5 $"), ("(", "a ( b"), ("火", "着火了")])
def test_a_term_of_one_character(target: str, text: str) -> None:
    assert contains(text, target)
    assert not contains("nothing", target)


def test_a_kept_word_between_letters_without_spaces() -> None:
    shown = show(f"Open {private(0)} now", ["X"])
    assert shown.text == "Open X now"
    assert restored(shown, "打开X文件") == (f"打开{private(0)}文件", "")


def test_terms_of_a_file(tmp_path: Any) -> None:
    file = tmp_path / "terms.tsv"
    file.write_text("# comment\nBank\tUfer\n\nriver bank\tFlussufer\n", encoding="utf-8")
    terms = Terms.read(file)
    assert [term.target for term in terms.of("The river bank, a bank; banks")] == ["Flussufer", "Ufer"]
    assert terms.of("nothing") == []
    file.write_text("one\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1 has 1 column"):
        Terms.read(file)
    file.write_text("house\tHaus\nHouse\tHaus\nhouse\tHeim\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 3 gives 'house' the target 'Heim', but an earlier line gives it 'Haus'"):
        Terms.read(file)
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="no terms"):
        Terms.read(file)


def test_of_a_sentence_in_capitals_the_better_translation_is_taken(translator, monkeypatch):
    monkeypatch.setattr(translating, "in_sentence_case", lambda text, reader: text.capitalize())
    units = UnitTranslator(translator, Terms(), {})
    capitals = Unit(f"THE CAT SEES {private(0)}", aligned=False)
    work = units.work([Unit("the cat", aligned=False), capitals])
    assert next(work).kind == "search"
    compare = work.send(["a", "A"])
    assert (compare.kind, [text[:8] for text in (*compare.texts, *compare.others)]) == (
        "compare",
        ["THE CAT ", "The cat "],
    )
    name = compare.others[0].split()[-1]
    own, other = Translation("A", -9.0, [], [-1.0, -1.0]), Translation(f"b {name}", -9.0, [], [-0.4] * 4)
    assert compare.better([("A", own), (other.text, other)]) == [(True, other.text)]
    assert compare.better([("A", other), ("b", own)]) == [(False, "A")]
    assert compare.better([None, ("b", own)]) == [(True, "b")]
    assert compare.better([("A", own), ("b " * 12, other)]) == [(False, "A")]
    again = work.send([(True, "b c")])
    assert (again.kind, again.texts) == ("search", [])
    force = work.send([])
    assert (force.kind, force.texts, force.others) == ("force", compare.others, [[name]])
    assert work.send([other.text]).kind == "align"
    with pytest.raises(StopIteration) as end:
        work.send([])
    assert json.loads(end.value.value[1])["text"] == f"b {private(0)}"


def test_the_switch_is_off(translator: Translator) -> None:
    units = UnitTranslator(translator, Terms(), {"keep_words": False})
    page = read_document("SEE a.b@c.de AND {name} `x`\n", "page", "markdown")
    document = DocumentTranslation(page, split_sentences, units.fits, keep_words=units.keep_words)
    assert document.units[0].text == f"SEE a.b@c.de AND {{name}} {private(0)}"
    work = units.work([Unit("THE CAT", aligned=False)])
    next(work)
    assert work.send(["A"]).texts == []
