"""Where sentences end, in many scripts and languages."""

import re

import pytest
from growth import assert_grows_in_proportion
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from manyheads.extras.documents import sentence_ends as sentences
from manyheads.extras.documents.sentence_ends import split_sentences

# Borders are `|`, which stands for a space, or for nothing in the second list.
SPACED = {
    "en": [
        "I said no.|Then he left.",
        "No. 5 is here.",
        "No.|I don't know.",
        "He met Mr. Smith.",
        "Apples, pears, etc.|Then he left.",
        "Apple Inc.|He left.",
        "Apple Inc. announced it.",
        "St. Louis is big.",
        "He lives on Main St.|It is nice.",
        "John Smith Jr.|He left.",
        "See vol. 3.",
        "See Vol. III now.",
        "This is the last vol.|Then he left.",
        "It holds approx. Twelve men.",
        "« Oui ! » dit-il.",
        "He came at 5 p.m.|She left.",
        "The U.S. Army was in Washington, D.C.|The end.",
        "Visit https://a.b/c.|Then go.",
        "v1.2.3 is out.|Go.",
        '"Stop!" he said.|"Why?" she asked.',
        'He said: "No."|She left.',
        "J. S. Bach wrote it.|Yes.",
        "What?!|No way.|Really‽|Yes",
        "Wait...|What? hmm... yes.|Wait…|No",
        "(He left.)|She came.",
        "It is 3.5 cm.|Next.",
        "One.Two three.",
        "i.e. This. e.g. That.",
        "See fig. 3 and pp. 5-7.|Next.",
        "1. Apples are good.|2. Pears are better.",
        "He is 30.|Tom is 40.",
        "It ended in 1990.|Then he left.",
        "Wow!!!|Great.",
        'Really?|"Yes."',
        "Hello!😀 Next",
        "a; Then b.",
        "So am I.|He left.",
        "vitamin C.|It is.",
        "Ph.D. Smith",
        "He has a Ph.D.|He left.",
        "Text.[1]|Next[2].|More",
        "Then he said (e.g. in Rome) no.|Yes.",
        "Open \U000f0000.|Click \U000f0001.",
        "Is it?|No. 7 left.",
        "the No. 1 Club",
        "$5.|He paid.",
        "Smith et al. (2003) said.",
        "Smith & Co. Ltd. was.",
        "He said ' Chaos '.|In",
        "I am.|— No!|— Yes.",
        "Yahoo! is.",
        "Yes.|(No.)|Yes",
        "A.B.|He left.",
    ],
    "fr": [
        "« Oui ! » dit-il.",
        "Il dit : « Oui. »|Puis il part.",
        "M. Dupont est là.|Il part.",
        "M. Le Pen est là.",
        "« Oui !\xa0»\xa0dit-il.",
        "p. ex. Paris et c.-à-d. Lyon.",
        "Êtes-vous là ?|Oui !",
        "Mme. Curie, art. 5 et vol. II.",
    ],
    "de": [
        "Am 3. Mai kam sie.|Er ging.",
        "Am 5. Dez. kam er.|Er ging.",
        "Das war 1990.|Dann kam er.",
        "z. B. Hunde.|Er kam.",
        "z. B. Die Hunde.",
        "Er sagte: „Nein.“|Dann ging er.",
        "Es war der 3.|Er ging.",
        "Hunde, Katzen usw.|Er kam.",
        "Hunde u. a. Tiere.",
        "»Nein.«|Er ging.",
        "Er ging.|»Nein«, sagte er.",
        "GmbH & Co. KG ist",
        "Ludwig XIV. König",
        "Nr. 5 ist da, d. h. Er.",
    ],
    "ur": ["یہ کتاب ہے۔|وہ گیا۔|کیوں؟|ہاں۔"],
    "hi": ["यह किताब है।|वह गया।|क्यों?|हाँ॥|ठीक।"],
    "hy": ["Սա գիրք է։|Նա գնաց։"],
    "am": ["ይህ መጽሐፍ ነው።|እሱ ሄደ።|ለምን፧|አዎ።"],
    "my": ["ဒါစာအုပ်ဖြစ်တယ်။|သူသွားတယ်။"],
    "km": ["នេះជាសៀវភៅ។|គាត់ទៅ។|ហើយ៕|ទៅ", "នេះ។ល។|គាត់"],
    "th": ["นี่คือหนังสือ เขาไป", "เวลา 10.00 น. เขาไป พ.ศ. 2560"],
    "el": ["Τι είναι αυτό;|Πήγε σπίτι.|Ναι.", "Έχεις iPhone;|Ναι.", "Τι;;|Ναι"],
    "ru": [
        "Это т. е. книга.|Он ушёл.",
        "в 2010 г. Москва",
        "А. С. Пушкин написал.|Да.",
        "это я.|Он ушёл.",
        "и т. д.|Он ушёл.",
    ],
    "tr": ["Bu bir kitap.|3. sınıf.|O gitti.", "Dr. Ali geldi.|O gitti."],
    "vi": ["Đây là sách.|Anh ấy đi.", "Vâng ạ.|Em đi."],
    "es": ["¿Qué?|¡No!|El Sr. López vino.|Sí."],
    "ar": ["هذا كتاب.|ذهب.|لماذا؟|نعم.", "د. أحمد هنا."],
    "ka": ["ეს არის.|ის წავიდა."],
    "ko": ["이것은 책이다.|해.|가자."],
    None: [
        "Τι είναι αυτό;|Πήγε σπίτι.",
        "I said; Then.",
        "M. Dupont, Mr. Smith, Hr. Müller, Sig. Rossi.|Er ging.",
        "It was in 2020.|The 100. Tag.|Er ging.",
        "He came in Jan.|She left long ago.|5 men saw it.",
        "Am 5. Dez. kam er.|See Fig. 3 and Sec. 4 now.",
    ],
}
UNSPACED = {
    "hi": ["यह किताब है।|वह गया"],
    "am": ["ነው።|እሱ"],
    "my": ["ဖြစ်တယ်။|သူသွားတယ်။"],
    "zh": [
        "这是书。|他走了！|为什么？|“好。”|他说。",
        "你好!|我是?|他。",
        "他说：“好。”，然后走了。",
        "圆周率是３．５。|好",
    ],
    "ja": ["これは本です。|彼は行った。|「はい。」と言った。", "そう。|「はい。」"],
}


@pytest.mark.parametrize(
    ("language", "space", "case"),
    [
        (lang, gap, case)
        for gap, table in ((" ", SPACED), ("", UNSPACED))
        for lang, cases in table.items()
        for case in cases
    ],
)
def test_sentences(language: str | None, space: str, case: str) -> None:
    text = case.replace("|", space)
    pieces = split_sentences(text, language)
    assert [piece.rstrip() for piece in pieces] == case.split("|")
    assert "".join(pieces) == text


def test_languages_have_their_tags() -> None:
    assert len(split_sentences("Am 3. Mai kam sie. Er ging.", "de-AT")) == 2
    assert len(split_sentences("Am 3. Mai kam sie. Er ging.", "de_CH")) == 2
    assert len(split_sentences("It is 3. May came.", "en-US")) == 2
    assert len(split_sentences("Τι; Ναι.", "EL")) == 2
    assert len(split_sentences("Τι; Ναι.", "en")) == 1


def test_every_terminator_of_unicode_ends_a_sentence() -> None:
    chars = "".join(f"a{chr(code)}" for code in range(0x21, 0x20000) if not 0xD800 <= code < 0xE000)
    pieces = Split(Regex(r"\p{Sentence_Terminal}"), "isolated").pre_tokenize_str(chars)
    found = {piece for piece, _ in pieces if len(piece) == 1 and not piece.isalnum()}
    assert len(found) >= 150
    ours = re.compile(f"[.{sentences._STOPS}{sentences._TERMINAL}\u104a]")
    assert {mark for mark in found if not ours.match(mark)} == set(), "tokenizers knows a newer version of Unicode"
    for mark in sorted(found - {"\u104a"}):
        assert split_sentences(f"Ab{mark} Cd") == [f"Ab{mark} ", "Cd"]
    assert split_sentences("က၊ ခ") == ["က၊ ခ"], "a comma"


@given(
    st.text(st.sampled_from('ABab1. !?;»“"。។\n\t\u00a0([…') | st.characters()),
    st.sampled_from([None, "en", "de", "el"]),
)
def test_nothing_is_lost(text: str, language: str | None) -> None:
    pieces = split_sentences(text, language)
    assert "".join(pieces) == text
    assert all(pieces)


FRAGMENTS = [
    ". ", "a.", ".", '."', "«", "“", "a", "Aa. ", "(", ". (", ".\n", "'", "\n", "No. ", "1. ", "。", "z. B. ", ".[1",
    ".»", "a ", "A.", "α;", "!", "…", "J.-",
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_the_time_grows_with_the_length_alone(fragment: str) -> None:
    """A client of a server chooses the text."""
    assert_grows_in_proportion(lambda length: split_sentences(fragment * (length // len(fragment))), 10_000)
