"""Cleaning: each rule finds what it says, and natural pairs pass."""

import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from growth import assert_grows_in_proportion

from manyheads.data.corpora import load_tatoeba
from manyheads.data.lines import ReadReport
from manyheads.data.translation.preparing import PairList, RememberedPairs
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import ConfigError
from manyheads.extras.cleaning.cleaner import (
    CLEANING_RULES,
    WINDOW,
    CleanedPairs,
    describe_cleaning,
    misaligned_stretches,
)
from manyheads.extras.cleaning.rules import (
    HeldOut,
    SeenPairs,
    SideBlock,
    numbers_differ,
    parse_limits,
    usual_of,
)

GOOD = [
    (f"This is the sentence about {word}.", f"Das ist der Satz über {word}.")
    for word in ["tea", "milk", "bread", "ink"]
]


def cleaned(pairs: list[tuple[str, str]], **options: object) -> tuple[list[tuple[str, str]], CleanedPairs]:
    cleaner = CleanedPairs(PairList("pairs", pairs), clean=True, **options)  # type: ignore[arg-type]
    return list(cleaner.read(ReadReport())), cleaner


def test_repetitions_are_found_among_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    pairs = [(str(chance.randrange(900)), "x") for _ in range(2000)]
    for most in (10**6, 50):
        monkeypatch.setattr("manyheads.extras.cleaning.rules.MOST_SEEN", most)
        seen, known = SeenPairs(), set[tuple[str, str]]()
        for start in range(0, 2000, 70):
            block = pairs[start : start + 70]
            for pair, is_found in zip(block, seen.find(block), strict=True):
                assert is_found == (pair in known) if most > 50 else not is_found or pair in known
                known.add(pair)
        assert seen.full_at == (50 if most == 50 else 0)
        assert sum(map(len, seen._runs)) == min(most, len(known))


def test_the_summary_says_where_duplicates_were_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.extras.cleaning.rules.MOST_SEEN", 2)
    _, cleaner = cleaned(GOOD)
    assert "the first 2 different pairs" in describe_cleaning(cleaner.report.to_json())[-1]


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("empty", ("A sentence.", " \t")),
        ("empty", ("", "Ein Satz.")),
        ("identical", ("The same words.", "The same words.")),
        ("duplicate", GOOD[1]),
        ("length", ("word " * 201, "Wort " * 201)),
        ("length", ("a" * 2401, "b" * 2401)),
        ("ratio", ("Why did they not come to us yesterday evening?", "Warum")),
        ("letters", ("28.8.2009 ---", "am 28.8.2009")),
        ("script", ("This is a sentence.", "Это предложение.")),
        ("script", ("Τι είναι αυτό;", "Was ist das?")),
        ("numbers", ("It was in 1986.", "Es war 1968.")),
        ("markup", ("He is <b>here</b>.", "Er ist hier.")),
        ("markup", ("Salt &amp; pepper.", "Salz und Pfeffer.")),
        ("held-out", ("I have never seen it before.", "Etwas ganz anderes.")),
        ("held-out", ("Something else entirely.", "Ich habe es nie gesehen.")),
        ("held-out", ("Thank you.", "Danke.")),
    ],
)
def test_each_rule(name: str, pair: tuple[str, str]) -> None:
    held_out = [
        PairList("test", [("I have never seen it before.", "Ich habe es nie gesehen."), ("Thank you.", "Danke.")])
    ]
    kept, cleaner = cleaned([*GOOD, pair], held_out=held_out)
    assert kept == GOOD
    assert cleaner.report.counts == {name: 1}
    [example] = cleaner.report.examples[name]
    assert example["line"] == len(GOOD) + 1
    assert pair[0].startswith(example["source"].rstrip("…"))
    kept, cleaner = cleaned([*GOOD, pair], held_out=held_out, limits={name: None})
    assert name not in cleaner.report.counts


@pytest.mark.parametrize(
    "pair",
    [
        ("Hi.", "Guten Tag."),
        ("It costs 1,000.50 dollars at 3 p.m.", "Es kostet um 15 Uhr 1.000,50 Dollar."),
        ("Two dogs.", "2 Hunde."),
        ("5 < 6 & 7 > 3 is right.", "5 < 6 & 7 > 3 stimmt."),
        ("Thank you.", "Vielen Dank."),  # short, so that only both sides together count as held out
        ("“Really?” – she asked…", "„Wirklich?“ – fragte sie …"),
    ],
)
def test_natural_pairs_pass(pair: tuple[str, str]) -> None:
    kept, cleaner = cleaned([*GOOD, pair], held_out=[PairList("test", [("Thank you.", "Danke.")])])
    assert kept == [*GOOD, pair]
    assert describe_cleaning(cleaner.report.to_json()) == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("around 2,000 start-ups", "rund 2000 Start-ups"),
        ("1 200 euros", "1200 Euro"),
        ("1\u202f200 euros", "1200 Euro"),
        ("1,500 people", "1500 Menschen"),
        ("1'500 people", "1.500 Menschen"),
        ("1,00,000 rupees", "100000 Rupien"),
        ("१,००,००० people", "100,000 Menschen"),
        ("२०१२ में 15", "15th in 2012"),
        ("कमरा 12, मंज़िल १५", "Room 12 on floor 15"),
        ("في عام ٢٠١٢ و ١٥٫٥", "in 2012 and 15.5"),
        ("the ’90s", "die 1990er Jahre"),
        ("the 1990s", "die 90er"),
        ("from 2000-08", "2000 bis 2008"),
        ("It costs 1.5 euros.", "Es kostet 1,50 Euro."),
        ("a mile of 1,600 metres", "eine Meile von 1,6 Kilometern"),
        ("10 thousand people", "10000 Menschen"),
        ("on 01/15/2012", "am 15.1.2012"),
        ("on 2012-01-15", "am 15.01.2012"),
        ("at 3:30", "um 15.30 Uhr"),
        ("at 2:30", "à 14 h 30"),
        ("at 10:15", "um 22.15 Uhr"),
        ("at 11:00 p.m.", "um 23 Uhr"),
        ("at 9:00 pm", "um 21 Uhr"),
        ("until 10 o'clock", "bis 22 Uhr"),
        ("the 15th of 12", "der 15. von 12"),
    ],
)
def test_the_same_number_written_in_another_way(source: str, target: str) -> None:
    for pair in ((source, target), (target, source)):
        assert not numbers_differ(*pair)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("It was in 1986.", "Es war 1968."),
        ("in 1990", "in 1890"),
        ("2,000 people", "3000 Menschen"),
        ("1,697 cases in 2001", "1.967 Fälle in 2001"),
        ("२०१२", "2021"),
        ("on 12.05.1986", "am 12.05.1968"),
        ("at 3:30", "um 15.45 Uhr"),
        ("43% in 3 years", "47 % in drei Jahren"),
        ("85 or 75", "135 oder 120"),
    ],
)
def test_another_number(source: str, target: str) -> None:
    assert numbers_differ(source, target)


def test_many_numbers_are_compared_in_linear_time() -> None:
    def work(count: int) -> None:
        one, other = (" ; ".join(str(n) for n in range(first, first + count)) for first in (10_000, 10_001))
        assert numbers_differ(one, other)

    assert_grows_in_proportion(work, 5_000)


@pytest.mark.parametrize(
    ("usual", "texts"),
    [
        ("Tôi không biết anh ấy đi đâu.", ["Tớ ở tổ ấy.", "Ở ổ ấy", unicodedata.normalize("NFD", "Tớ ở tổ ấy.")]),
        ("나는 학교에 갑니다.", [unicodedata.normalize("NFD", "나는 갑니다."), "ㅋㅋㅋ"]),
        ("これは本です。", ["カタカナ", "ﾊﾝｶｸ", "漢字", "々〆", "ＡＢ漢字漢字"]),
        ("这是一本书。", ["𠀀𠀁𠮷", "ㄅㄆㄇ"]),
        ("This is a book.", ["Ọ̀rọ̀ ẹ̀kọ́", "ꞗꞔ Ɐ ẞ", "ＦＵＬＬ", "𝐛𝐨𝐥𝐝", "ﬁ ª º"]),
        ("Это книга.", ["Ӑҥҩ", "ꙀꙂ", "Ґедь й ӡ"]),
        ("Αυτό είναι βιβλίο.", ["ἐν ἀρχῇ ἦν", "Ὀδυσσεύς"]),
        ("هذا كتاب", ["ﻫﺬﺍ ﻛﺘﺎﺏ", "پنجاه گچ", "ﷲ"]),
        ("यह एक किताब है।", ["क्षि", "ॐ"]),
        ("ნახვამდის", ["ᲜᲐᲮᲕᲐ"]),
    ],
)
def test_letters_of_a_language_are_not_foreign(usual: str, texts: list[str]) -> None:
    pairs = [(f"The sentence {n} is good enough.", f"{usual} {n}") for n in range(30)]
    odd = [("Short text.", text) for text in texts]
    kept, cleaner = cleaned([*pairs, *odd], limits={"ratio": None, "letters": None, "numbers": None})
    assert kept == [*pairs, *odd]
    foreign = "Это" if "Это" not in usual else "Its"
    assert cleaned([*pairs, ("x", foreign)])[1].report.counts == {"script": 1}
    assert not cleaner.report.counts


def test_a_tag_is_no_word_and_has_its_own_sentences() -> None:
    held_out = HeldOut([[(">>de<< I like it.", "Ich mag es."), (">>de<< I like it too.", "Ich auch.")]])
    assert not held_out.has(">>de<< I like it.", "Mir gefällt es.")
    assert held_out.has(">>de<< I like it too.", "Mir auch.")
    assert not held_out.has(">>fr<< I like it too.", "Moi aussi.")


def test_without_clean_everything_is_kept_and_counted() -> None:
    pairs = [*GOOD, ("", "x"), GOOD[0]]
    cleaner = CleanedPairs(PairList("pairs", pairs), clean=False)
    report = ReadReport()
    assert list(cleaner.read(report)) == pairs
    assert report.lines == len(pairs)
    assert cleaner.report.counts == {"empty": 1, "duplicate": 1}
    told = describe_cleaning(cleaner.report.to_json())  # the empty pair is left out and counted elsewhere
    assert told[0].startswith("cleaning: 1 of 6 training pairs are suspicious, and kept; --clean leaves")


def test_the_report_has_rules_with_defaults_and_three_examples() -> None:
    _, cleaner = cleaned(GOOD[:1] * 9, limits={"ratio": 5.0})
    content = json.loads(json.dumps(cleaner.report.to_json()))
    assert [rule["name"] for rule in content["rules"]] == list(CLEANING_RULES)
    by_name = {rule["name"]: rule for rule in content["rules"]}
    assert (by_name["ratio"]["default"], by_name["ratio"]["limit"]) == (3, 5)
    assert by_name["duplicate"]["count"] == 8
    assert [example["line"] for example in by_name["duplicate"]["examples"]] == [2, 3, 4]
    assert (content["pairs"], content["found"], content["left_out"]) == (9, 8, 8)


def test_lines_that_are_skipped_have_numbers(tmp_path: Path) -> None:
    lines = ["\t".join(pair).encode() for pair in GOOD]
    (tmp_path / "a.tsv").write_bytes(b"\n".join([lines[0], b"b\xe4d\tx", lines[1], lines[0]]))
    report = ReadReport(lines=7)  # of another file
    cleaner = CleanedPairs(PairFiles(tsv=tmp_path / "a.tsv", on_bad_utf8="skip"), clean=True)
    assert list(cleaner.read(report)) == GOOD[:2]
    [example] = cleaner.report.examples["duplicate"]
    assert example["line"] == 4


def test_the_ratio_is_relative_to_what_is_usual() -> None:
    chinese = [
        (f"This is sentence number {n} of the book that I am reading. " * 4, f"这是我正在读的书的第{n}句话。" * 4)
        for n in range(30)
    ]
    assert usual_of(chinese).ratio < 0.4
    latin, han = (SideBlock([text]).usual_script() for text in ("word", "漢字"))
    assert usual_of(chinese).scripts == (latin, han)
    assert latin != han
    kept, _ = cleaned([*chinese, (chinese[0][0] * 5, chinese[0][1])])
    assert kept == chinese


def test_a_shift_is_found_where_it_begins() -> None:
    pairs = load_tatoeba("train")[:2000]
    for size in (1, -2):
        sources, targets = zip(*pairs, strict=True)
        at = 1000
        moved = (*targets[:at], *targets[at + size :]) if size > 0 else (*targets[:at], "x", "y", *targets[at:])
        shifted = list(zip(sources, moved, strict=False))
        _, cleaner = cleaned(shifted)
        first, last, shift = cleaner.report.stretches[0]
        assert abs(first - at) <= WINDOW
        assert last > first + WINDOW / 2
        assert shift == -size
        assert cleaner.report.counts["misaligned"] > 700
    assert not cleaned(pairs)[1].report.stretches


def test_a_stretch_in_several_blocks_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all pairs were one block, also where one window of it is in a block."""
    pairs = load_tatoeba("train")[:2000]
    sources, targets = map(list, zip(*pairs, strict=True))
    for first, last in ((760, 840), (1120, 1280)):
        targets[first:last] = targets[first + 1 : last + 1]
    moved = list(zip(sources, targets, strict=True))
    expected, whole = cleaned(moved)
    assert whole.report.stretches == [(761, 840, -1), (1121, 1280, -1)]
    monkeypatch.setattr("manyheads.extras.cleaning.cleaner.BLOCK_PAIRS", 400)
    kept, cleaner = cleaned(moved)
    assert cleaner.report.stretches == whole.report.stretches
    assert kept == expected
    assert cleaner.report == whole.report


def test_few_pairs_and_random_lengths_are_no_shift() -> None:
    chance = random.Random(0)
    numbers = [[chance.randint(5, 90) for _ in range(4000)] for _ in range(2)]
    import numpy as np

    assert len(misaligned_stretches(np.array(numbers[0]), np.array(numbers[1]))) == 0
    assert misaligned_stretches(np.array([1, 2]), np.array([2, 1])) == []


def test_counts_of_characters() -> None:
    side = SideBlock(["Ab 1é", "", "。漢字 한", "े\u3000१❤️"])
    assert side.chars.tolist() == [5, 0, 5, 5]
    assert side.letters.tolist() == [3, 0, 3, 1]
    assert side.digits.tolist() == [1, 0, 0, 1]
    assert side.spaces.tolist() == [1, 0, 1, 1]
    assert side.has("1").tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lengths=3", "no rule 'lengths'; the rules are empty, identical"),
        ("ratio=0", "give a number from 1 to 1,000, or off; the default is 3"),
        ("ratio=x", "give a number"),
        ("ratio", "give a number"),
        ("empty=3", "the rule empty has no limit; empty=off"),
    ],
)
def test_bad_limits(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_limits([text], CLEANING_RULES)
    assert parse_limits(["ratio=4.5", "numbers=off"], CLEANING_RULES) == {"ratio": 4.5, "numbers": None}


def test_remembered_pairs_are_read_once() -> None:
    reads = []

    class Stream(PairList):
        def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
            reads.append(1)
            return super().read(report)

    remembered = RememberedPairs(Stream("pairs", GOOD))
    first, second = ReadReport(), ReadReport()
    assert list(remembered.read(first)) == list(remembered.read(second)) == GOOD
    assert first == second
    assert first.lines == len(GOOD)
    assert reads == [1]
