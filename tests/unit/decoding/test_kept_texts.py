"""Translations contain what is no word, whatever the model does; copied lines, emoji at the ends, capitals."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.catalogue import build_model
from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.decoding.kept_texts import restored, show
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.extras.documents.terms import translate_with_phrases
from manyheads.models.transformer import config as presets
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.words import hide, unhide

WORDS = "the cat sees a dog and Tom and Maria and you read a book in the old house X Y Z"
THINGS = ("https://x.org/a_b?c=d", "a.b@c.de", "{name}", "2020-01-01", "@alice", "😊", "👨👩", "🇩🇪", "/usr/bin/x")


@pytest.fixture(scope="module")
def translator() -> Translator:
    """An untrained Transformer, which copies nothing by itself."""
    tokenizer = Tokenizer.train([WORDS] * 3, TokenizerSettings(vocab_size=340, normalize_spaces=True))
    size = tokenizer.vocab_size
    torch.manual_seed(3)
    config = dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size)
    decoding = DecodingSettings(num_beams=2, max_len_offset=8)
    return Translator(build_model(config), tokenizer, decoding, device="cpu")


@pytest.mark.parametrize(
    "line", ["2020-01-01", "+447378099903", "user@example.org", "---", ".", " {name}  %s", "😊 👍", "12.5"]
)
def test_a_line_without_a_letter_is_copied(translator: Translator, line: str) -> None:
    assert translator.translate(line) == line
    assert next(translator.translate_lines([line])) == line
    assert translator.translate_nbest(line)[0].text == line
    assert translator.translate(line, keep_words=False) != line


@settings(max_examples=10)
@given(st.lists(st.tuples(st.sampled_from(["the cat", "sees", "a dog."]), st.sampled_from([*THINGS, ""])), max_size=4))
def test_nothing_that_is_kept_gets_lost(translator: Translator, parts: list[tuple[str, str]]) -> None:
    line = " ".join(word for part in parts for word in part if word)
    wanted = hide(line)[1]
    [text], [candidates] = translator.translate([line]), translator.translate_nbest([line], num_return_sequences=2)
    for found in (text, *(one.text for one in candidates)):
        assert all(found.count(thing) == line.count(thing) for thing in wanted)
    assert text == candidates[0].text


def test_the_company_of_a_text_changes_nothing(translator: Translator) -> None:
    lines = ["the cat sees {name}.", "a dog", "", "😊", "THE CAT READS A BOOK", "see a.b@c.de! 😊 and you"]
    together = translator.translate(lines)
    assert together == [translator.translate(line) for line in lines]
    sampled = translator.translate(lines, do_sample=True, seed=4)
    plain = translator.translate(["x", "a dog"], do_sample=True, seed=4)
    assert sampled[1] == plain[1]  # the lines before it do not change its draws


def test_emoji_at_the_ends_and_behind_sentences_are_not_read(translator: Translator) -> None:
    def read(text: str) -> list[str]:
        return translator.kept([text], translator.settings).rows

    assert read("😊 the cat. 😊👍") == ["the cat."]
    assert read("the cat 😊.") == ["the cat."]
    assert read("the cat! 😊 a dog?") == ["the cat!", "a dog?"]
    cat, dog = translator.translate(["the cat!", "a dog?"])
    assert translator.translate("the cat! 😊 a dog?") == f"{cat} 😊 {dog}"
    assert translator.translate("😊  the cat! ") == f"😊  {cat}"


def test_a_forced_prefix_begins_the_whole_output(translator: Translator) -> None:
    ids = tuple(translator.tokenizer.target.encode("the old house"))
    for line in ("2020-01-01", "😊 the cat", "the cat! 😊 a dog {x}"):
        assert translator.translate(line, forced_prefix_ids=ids).startswith("the old house")


def test_stand_ins_are_words_that_both_sides_restore(translator: Translator) -> None:
    found = translator.stand_ins()
    assert found is translator.by_torch().stand_ins()
    assert set(found) <= {"Tom", "Maria", *"XYZ", *"xyz", *found}
    assert all(translator.tokenizer.decode(translator.tokenizer.encode(word)) == word for word in found)
    assert "X" in found


@pytest.mark.parametrize(
    ("text", "read", "written", "expected"),
    [
        ("see {a} now", "see Tom now", "nun Tom sehen", "nun {a} sehen"),
        ("<b>old</b> {a}", "Tom old Maria Anna", "Tom alt Maria Anna", "<b>alt</b> {a}"),
        ("Tom sees {a}", "Tom sees Maria", "Tom sieht Marias Haus", "Tom sieht {a} Haus"),
        ("{a} and {b}.", "Tom and Maria.", "Maria und Tom, Tom.", "{b} und {a}, ."),
        ("{a}{b}", "Tom Maria", "Tom Maria", "{a}{b}"),
        ("go 😊!", "go!", "geh!", "geh 😊!"),
        ("打开{a}文件", "打开Tom文件", "open the Tom file", "open the {a} file"),
    ],
)
def test_what_the_model_reads_and_what_becomes_of_its_output(text: str, read: str, written: str, expected: str) -> None:
    hidden, words = hide(text)
    shown = show(hidden, ["Tom", "Maria", "Anna"])
    assert shown.text == read
    assert unhide(restored(shown, written)[0], words) == expected


def test_what_has_no_place_is_named() -> None:
    hidden, words = hide("{a} {b} {c} x")
    shown = show(hidden, ["Tom", "Maria"])
    text, lost = restored(shown, "Tom")
    assert (unhide(text, words), unhide(lost, words)) == ("{a}", "{c}{b}")


def test_of_capitals_the_more_probable_translation_is_taken(translator: Translator) -> None:
    line = "THE CAT SEES TOM"
    kept = translator.kept([line], translator.settings)
    assert [row.lower() for row in kept.rows] == [line.lower()] * 2
    assert kept.rows[1].startswith("The cat sees")

    def hypothesis(text: str, *log_probs: float) -> list[Hypothesis]:
        return [Hypothesis(translator.tokenizer.target.encode(text), 0.0, list(log_probs), True)]

    capitals, sentence = hypothesis("DIE", -1.0, -1.0), hypothesis("die", -0.4, -0.4, -0.4, -0.4)
    assert kept.candidates([capitals, sentence])[0][0].text == "die"
    assert kept.candidates([sentence, capitals])[0][0].text == "die"
    again = hypothesis("A A A A A A A A A A", -0.1)
    assert kept.candidates([again, capitals])[0][0].text == "DIE"
    assert translator.kept(["NATO and you", "USA"], translator.settings).rows == ["NATO and you", "USA"]


def test_rows_whose_translation_lacks_a_stand_in_are_named(translator: Translator) -> None:
    kept = translator.kept(["see {name}", "the cat"], translator.settings)
    name = kept.rows[0].split()[-1]

    def found(text: str) -> list[list[Hypothesis]]:
        return [[Hypothesis(translator.tokenizer.target.encode(one), 0.0, [-1.0], True)] for one in (text, "a dog")]

    assert kept.lacking(found("a dog")) == {0: (name,)}
    assert kept.lacking(found(f"a dog {name}")) == {}


def test_phrases_and_kept_words_are_forced_together(translator: Translator) -> None:
    [text] = translate_with_phrases(translator, ["the cat reads {name}"], [["old house"]])
    assert "old house" in text
    assert text.count("{name}") == 1


def test_the_switch_is_off(translator: Translator) -> None:
    lines = ["see {name}", "2020-01-01", "THE CAT SEES A DOG"]
    assert translator.kept(lines, DecodingSettings(keep_words=False)).rows == lines
