"""`manyheads evaluate` of several references, of languages without spaces, and of texts that differ in form alone."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

Cli = Callable[..., int]
Evaluated = Callable[..., tuple[dict[str, Any], str]]

ZH = ["今天我喜欢一只狗。", "她明天看见那座老房子。", "我们现在想要一本书。"]
DE = ["Ich mag heute einen schönen Hund.", "Sie sieht morgen das alte Haus.", "Wir möchten jetzt ein Buch."]
OTHER = ["Heute mag ich einen schönen Hund.", "Sie sieht das alte Haus morgen.", "Wir wollen nun ein Buch."]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, list[str]], Path]:
    def make(name: str, lines: list[str]) -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return make


@pytest.fixture
def evaluated(manyheads: Cli, capsys: pytest.CaptureFixture[str]) -> Evaluated:
    """Runs evaluate --json. Returns: the record, and what was said."""

    def run(*arguments: str | Path) -> tuple[dict[str, Any], str]:
        capsys.readouterr()
        assert manyheads("evaluate", *arguments, "--json") == 0
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    return run


Write = Callable[[str, list[str]], Path]


def test_chinese_has_its_tokenizer(evaluated: Evaluated, write: Write, manyheads: Cli, capsys: Any) -> None:
    path = write("zh", ZH)
    record, said = evaluated("--hypotheses", path, "--reference", path)
    assert record["bleu"]["score"] == pytest.approx(100)
    assert "tok:zh" in record["bleu"]["signature"]
    assert record["protocol"]["bleu_tokenizer"] == "zh"
    assert (record["hints"], said) == ([], "")
    assert manyheads("evaluate", "--hypotheses", path, "--reference", path) == 0
    assert "  tokenizer  zh of BLEU, for Chinese characters" in capsys.readouterr().out
    record, said = evaluated("--hypotheses", path, "--reference", path, "--target-lang", "ja", "--tokenize", "char")
    assert "tok:char" in record["bleu"]["signature"]


def test_the_language_of_data_and_of_hypotheses_counts(evaluated: Evaluated, write: Write, manyheads: Cli) -> None:
    source, target = write("en", ["I see a dog."] * 6), write("xx", ["一 b"] * 3 + ["c d e f g h"] * 3)
    data = source.parent / "data"
    pairs = ["--source", source, "--target", target, "--valid-count", "3", "--vocab-size", "300"]
    assert manyheads("prepare", *pairs, "--source-lang", "en", "--target-lang", "th", "--output", data) == 0
    same = write("same", ["c d e f g h"] * 3)
    record, said = evaluated("--hypotheses", same, "--data", data)
    assert "The target language is th, but most of the references are in a script with spaces" in said
    record, said = evaluated("--hypotheses", write("zh", ZH), "--reference", write("zh", ZH), "--target-lang", "zh-TW")
    assert record["protocol"]["bleu_tokenizer_why"] == "for the language zh-TW"


def test_a_missing_package_is_said_once(evaluated, write, manyheads, refused, capsys, monkeypatch):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    path = write("ja", ["今日は犬が好きです。", "彼女は古い家を見ています。"])
    record, said = evaluated("--hypotheses", path, "--reference", path)
    assert said.count("manyheads: warning: ") == said.count("pip install 'sacrebleu[ja]'") == 1
    assert record["bleu"]["score"] == pytest.approx(100)
    assert "tok:char" in record["bleu"]["signature"]
    assert manyheads("evaluate", "--hypotheses", path, "--reference", path, "--tokenize", "ja-mecab") == 2
    assert "pip install 'sacrebleu[ja]'" in capsys.readouterr().err
    assert "ja-mecab" in refused("evaluate", "--hypotheses", path, "--reference", path, "--tokenize", "14a")


@pytest.mark.parametrize("given", [["--reference", "a", "b"], ["--reference", "a", "--reference", "b"]])
def test_several_references(given, evaluated, write, refused, monkeypatch):
    hypotheses, a, _ = write("h", [DE[0], OTHER[1], "Wir möchten nun ein Heft."]), write("a", DE), write("b", OTHER)
    monkeypatch.chdir(a.parent)
    record, _ = evaluated("--hypotheses", hypotheses, *given)
    texts = hypotheses.read_text(encoding="utf-8").splitlines()
    assert record["bleu"]["score"] == sacrebleu.corpus_bleu(texts, [DE, OTHER], force=True).score
    assert record["chrf"]["score"] == sacrebleu.corpus_chrf(texts, [DE, OTHER]).score
    assert record["bleu"]["signature"].startswith("nrefs:2|")
    assert record["chrf"]["signature"].startswith("nrefs:2|")
    assert record["protocol"]["references"] == 2
    write("b", OTHER[:2])
    error = refused("evaluate", "--hypotheses", hypotheses, *given)
    assert 'h has 3 lines, b has 2 (lines end at "\\n" alone)' in error.replace(f"{hypotheses.parent}/", "")


def test_models_with_several_references(evaluated, write, refused, model_folder, tmp_path):
    source, a, b = write("s", ["I see a dog."] * 3), write("a", DE), write("b", OTHER)
    other = tmp_path / "other"
    other.symlink_to(model_folder)
    record, _ = evaluated(model_folder, "--source", source, "--reference", a, b)
    assert record["bleu"]["signature"].startswith("nrefs:2|")
    # A folder behind the files is a model.
    record, _ = evaluated("--source", source, "--reference", a, model_folder)
    assert record["bleu"]["signature"].startswith("nrefs:1|")
    compared, _ = evaluated("--source", source, "--reference", a, b, model_folder, other)
    assert compared["models"] == [str(model_folder), str(other)]
    assert all(one["signature"].startswith("nrefs:2|") for one in compared["scores"].values())
    assert "Say what to evaluate: a MODEL" in refused("evaluate", "--source", source, "--reference", a, b)
    assert "only one of them can be standard input" in refused("evaluate", "--hypotheses", "-", "--reference", a, "-")


def test_forms_of_text_are_named(evaluated: Evaluated, write: Write) -> None:
    plain, apart = write("a", DE), write("nfd", [unicodedata.normalize("NFD", text) for text in DE])
    for one, other in ((plain, apart), (apart, plain)):
        record, said = evaluated("--hypotheses", one, "--reference", other)
        assert record["bleu"]["score"] == pytest.approx(100)
        assert said.count("not in Unicode's composed form (NFC)") == 1
        assert len(record["hints"]) == 1
    cut = write("tok", [text.replace(".", " .") for text in DE])
    for one, other, side in ((plain, cut, "references"), (cut, plain, "translations")):
        record, said = evaluated("--hypotheses", one, "--reference", other)
        assert said.count("look tokenised") == 1
        assert f"The {side} look" in said
    assert evaluated("--hypotheses", cut, "--reference", cut, "--tokenize", "none")[1] == ""


def test_files_with_other_ends_of_lines_are_equal(evaluated: Evaluated, write: Write, tmp_path: Path) -> None:
    other = tmp_path / "crlf"
    other.write_bytes(b"\xef\xbb\xbf" + "".join(f"{line}  \r\n" for line in DE).encode())
    record, said = evaluated("--hypotheses", write("a", DE), "--reference", other)
    assert record["bleu"]["score"] == pytest.approx(100)
    assert said == ""


def test_segments_of_sgm_files_must_agree(evaluated, write, refused):
    segments = [f'<seg id="{number}">{text}</seg>' for number, text in enumerate(DE, 1)]
    lines = ['<refset><doc docid="d">', *segments, "</doc></refset>"]
    path = write("a.sgm", lines)
    record, _ = evaluated("--hypotheses", write("a.txt", DE), "--reference", path, path)
    assert record["bleu"]["score"] == pytest.approx(100)
    other = write("b.sgm", [line.replace('id="2"', 'id="7"') for line in lines])
    assert "segment 2 of " in (said := refused("evaluate", "--hypotheses", path, "--reference", path, other))
    assert "b.sgm '7' of document 'd'. Give files of the same texts" in said


def test_scoring_is_shown(manyheads, write, told, monkeypatch):
    monkeypatch.setattr("manyheads.evaluation.bleu._BLOCK", 2)
    path = write("a", DE)
    assert manyheads("evaluate", "--hypotheses", path, "--reference", path) == 0
    shown = told()
    assert "translating" not in shown
    for name in ("scoring (BLEU)", "scoring (chrF)"):
        assert shown[name][0] == "0 of 3"
        assert shown[name][-2:] == ["2 of 3", "3 of 3"]
