"""BLEU and chrF against sacreBLEU's own functions and hand-made cases."""

import pytest
import sacrebleu

from manyheads.errors import ConfigError, DataError
from manyheads.evaluation.bleu import corpus_bleu, corpus_chrf

HYPOTHESES = ["The cat sat on the mat.", "It is raining .", "Hello, World"]
REFERENCES = ["The cat sat on a mat.", "It's raining.", "hello, world"]


@pytest.mark.parametrize("tokenize", ["13a", "none", "intl", "char"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_is_sacrebleu(tokenize: str, lowercase: bool) -> None:
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize, lowercase=lowercase, force=True)
    score = corpus_bleu(HYPOTHESES, REFERENCES, tokenize=tokenize, lowercase=lowercase)
    assert score.value == pytest.approx(expected.score)
    assert (score.ref_len, score.hyp_len) == (expected.ref_len, expected.sys_len)
    assert f"tok:{tokenize}" in score.signature
    assert f"case:{'lc' if lowercase else 'mixed'}" in score.signature


def test_bleu_by_hand() -> None:
    """One sentence, 6 of 7 tokens right; n-gram precisions 6/7, 4/6, 2/5, 1/4 and no brevity penalty."""
    score = corpus_bleu(["the cat sat on the mat ."], ["the cat sat on a mat ."], tokenize="none")
    assert score.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25)
    assert str(score) == f"{score.value:.2f}"


def test_chrf() -> None:
    expected = sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES])
    score = corpus_chrf(HYPOTHESES, REFERENCES)
    assert score.value == pytest.approx(expected.score)
    assert "nc:6" in score.signature
    assert score.ref_len == sum(len(text.replace(" ", "")) for text in REFERENCES)
    assert corpus_chrf(REFERENCES, REFERENCES).value == pytest.approx(100)
    assert corpus_chrf(HYPOTHESES, REFERENCES, lowercase=True).value > score.value
    assert "nw:2" in corpus_chrf(HYPOTHESES, REFERENCES, word_order=2).signature


def test_mistakes_are_told() -> None:
    with pytest.raises(DataError, match="2 hypotheses but 3 references"):
        corpus_bleu(HYPOTHESES[:2], REFERENCES)
    with pytest.raises(DataError, match="no sentences"):
        corpus_chrf([], [])
    with pytest.raises(DataError, match="one string"):
        corpus_bleu("abc", "abc")
    with pytest.raises(ConfigError, match="13a, none"):
        corpus_bleu(HYPOTHESES, REFERENCES, tokenize="14a")
    with pytest.raises(ConfigError, match="word_order"):
        corpus_chrf(HYPOTHESES, REFERENCES, word_order=-1)


def test_empty_hypotheses_count() -> None:
    assert corpus_bleu([""], ["a b c d"]).value == 0
