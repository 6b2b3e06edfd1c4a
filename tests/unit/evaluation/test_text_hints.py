"""What a person is told about texts that are compared, and how they are compared."""

import unicodedata

import numpy as np
import pytest
import sacrebleu
from sacrebleu.metrics.chrf import CHRF

from manyheads.evaluation import bleu
from manyheads.evaluation.bleu import corpus_bleu, corpus_chrf, text_hints
from manyheads.extras.research.comparison import paired_scores, sentence_chrf

TEXTS = ["Ä schöner Tag für uns alle, sagte er.", "Die Käufer müssen früh aufstehen.", "Sie ist größer als er."]
FRENCH = ["Qui est là ?", "C'est moi : le roi !", "Je l'ai dit, et voilà."]


def nfd(texts: list[str]) -> list[str]:
    return [unicodedata.normalize("NFD", text) for text in texts]


def test_texts_are_compared_in_nfc() -> None:
    for one, other in ((TEXTS, nfd(TEXTS)), (nfd(TEXTS), TEXTS)):
        assert corpus_bleu(one, other).value == pytest.approx(100)
        assert corpus_chrf(one, other).value == pytest.approx(100)
        assert sentence_chrf(one, other) == pytest.approx(100)
        assert paired_scores([one, one[::-1]], other)["BLEU"][0].value == pytest.approx(100)
    assert corpus_bleu(nfd(TEXTS), nfd(TEXTS), tokenize="char") == corpus_bleu(TEXTS, TEXTS, tokenize="char")
    [hint] = text_hints(TEXTS, [nfd(TEXTS)], "13a")
    assert hint.startswith("3 of the references are not in Unicode's composed form (NFC)")
    [hint] = text_hints(nfd(TEXTS[:1]), [TEXTS], "13a")
    assert hint.startswith("1 of the translations is not")


@pytest.mark.parametrize("texts", [TEXTS, FRENCH, ["3.5 , no", "Dr. Who arrives.", "Yes, he is."], [""], ["a", "b"]])
def test_usual_text_has_no_hint(texts: list[str]) -> None:
    assert text_hints(texts, [texts, texts], "13a") == []


@pytest.mark.parametrize(
    "text", ["Hello , world .", "he 's here", "it &apos;s he", "do n't", "&quot; no &quot;", "a well @-@ known man"]
)
def test_tokenised_text_is_named(text: str) -> None:
    plain = ["Hello, world."] * 3
    [hint] = text_hints([text] * 3, [plain], "13a")
    assert hint.startswith("The translations look tokenised")
    [hint] = text_hints(plain, [plain, [text] * 8], "13a", "validation.bleu_tokenize")
    assert hint.startswith("The references look tokenised")
    assert "validation.bleu_tokenize none" in hint
    [hint] = text_hints([text] * 3, [[text] * 3], "13a")
    assert hint.startswith("The translations and the references look")
    assert text_hints([text] * 3, [[text] * 3], "none") == []


@pytest.mark.parametrize(
    ("form", "plain", "named"),
    [
        ("„Ja“, sagte er.", '"Ja", sagte er.', "quotation marks"),
        ("It’s mine", "It's mine", "apostrophes"),
        ("你好，世界！", "你好,世界!", "full-width"),
        ("Nun …", "Nun ...", "ellipses"),
        ("Oui\u202f!", "Oui !", "no-break"),
    ],
)
def test_other_forms_of_signs_are_named_and_still_count(form: str, plain: str, named: str) -> None:
    for one, other, side in ((form, plain, "translations"), (plain, form, "references")):
        [hint] = text_hints([one] * 6, [[other] * 6], "13a")
        assert hint.startswith(f"The {side} have {named}")
    assert text_hints([form] * 6, [[form] * 6], "13a") == []
    if "\u202f" not in form:
        assert corpus_bleu([form] * 6, [plain] * 6).value < 100


def test_ends_of_lines_do_not_count() -> None:
    assert corpus_bleu([f"{text}  " for text in TEXTS], TEXTS).value == pytest.approx(100)
    assert corpus_chrf([f"{text}  " for text in TEXTS], TEXTS).value == pytest.approx(100)


@pytest.mark.parametrize("word_order", [0, 2])
def test_sums_of_blocks_are_the_corpus_score(word_order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bleu, "_BLOCK", 2)
    generator = np.random.default_rng(1)
    words = ["ein", "Haus,", "und", "der", "alte", "Mann.", "sah", "(die)", "Straße", "nicht:", "gut", "😀", "今天"]
    texts = [[" ".join(generator.choice(words, generator.integers(0, 12))) for _ in range(51)] for _ in range(3)]
    hypotheses, *references = texts
    told: list[int] = []
    found = corpus_bleu(hypotheses, *references, tokenize="13a", on_progress=told.append)
    expected = sacrebleu.corpus_bleu(hypotheses, references, force=True)
    assert (found.value, found.ref_len, found.hyp_len) == (expected.score, expected.ref_len, expected.sys_len)
    assert found.signature.startswith("nrefs:2|")
    assert told == [*range(2, 51, 2), 51]
    chrf = corpus_chrf(hypotheses, *references, word_order=word_order)
    assert chrf.value == sacrebleu.corpus_chrf(hypotheses, references, word_order=word_order).score
    assert chrf.signature.startswith("nrefs:2|")
    alone = corpus_chrf(hypotheses, references[0], lowercase=True).value
    assert alone == CHRF(lowercase=True).corpus_score(hypotheses, references[:1]).score
    sentences = sentence_chrf(hypotheses, *references)
    assert sentences[3] == sacrebleu.sentence_chrf(hypotheses[3], [one[3] for one in references]).score


def test_each_reference_counts() -> None:
    hypotheses, one, other = ["the cat sat down there"], ["a dog was barking loudly"], ["the cat sat down there"]
    assert corpus_bleu(hypotheses, one, other).value == pytest.approx(100)
    assert corpus_chrf(hypotheses, one, other).value == pytest.approx(100)
    found = paired_scores([hypotheses, one], one, other)
    assert [score.value for score in found["BLEU"]] == pytest.approx([100, 100])
    assert "nrefs:2" in found["BLEU"][0].signature
