"""`manyheads evaluate`: the figures, and what they depend on."""

import json
from pathlib import Path

import pytest

from manyheads.decoding.translator import Translator
from manyheads.evaluation.bleu import corpus_bleu, corpus_chrf
from manyheads.evaluation.likelihood import Likelihood


@pytest.fixture
def files(tmp_path: Path, pairs: list[tuple[str, str]]) -> list[str | Path]:
    for name, column in (("source", 0), ("reference", 1)):
        (tmp_path / name).write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")
    return ["--source", tmp_path / "source", "--reference", tmp_path / "reference"]


def test_a_model_on_files(printed, model_folder, files, pairs, tmp_path):
    translator = Translator.from_pretrained(model_folder, "cpu")
    sources, references = map(list, zip(*pairs, strict=True))
    translations = [text.replace("\n", " ") for text in translator.translate(sources)]
    bleu, chrf = corpus_bleu(translations, references), corpus_chrf(translations, references)
    lines = printed("evaluate", model_folder, *files, "--output", tmp_path / "out").split("\n")
    assert (tmp_path / "out").read_bytes().decode() == "".join(f"{text}\n" for text in translations)
    for place, (name, score) in enumerate((("BLEU", bleu), ("chrF", chrf))):
        assert lines[3 * place : 3 * place + 3] == [
            f"{name} = {score}",
            f"  {score.signature}",
            f"  length {score.hyp_len:,}, the references' {score.ref_len:,}",
        ]
    assert "beam 2, length penalty 0.6 (gnmt)" in "\n".join(lines)

    record = json.loads(printed("evaluate", model_folder, *files, "--json", "--beam", "3"))
    scored = translator.score(sources, references)
    num_tokens = sum(len(one.tokens) for one in scored)
    nats = -sum(one.sum_log_prob for one in scored) / num_tokens
    assert record["likelihood"]["nats_per_token"] == pytest.approx(nats, rel=1e-5)
    assert record["likelihood"]["target_tokens"] == num_tokens
    assert record["bleu"]["signature"] == bleu.signature
    assert record["bleu"]["length"] > 0
    assert record["bleu"]["reference_length"] == bleu.ref_len
    protocol = record["protocol"]
    assert protocol["sentences"] == len(pairs)
    assert protocol["decoding"]["num_beams"] == 3
    assert protocol["tokenizer"] == translator.tokenizer.digest
    assert protocol["precision"] == "fp32"


def test_progress_is_shown(manyheads, model_folder, files, pairs, told):
    assert manyheads("evaluate", model_folder, *files, "--max-tokens", "60") == 0
    shown = told()
    assert list(shown) == [
        "reading",
        "loading the model",
        "likelihood",
        "translating",
        "scoring (BLEU)",
        "scoring (chrF)",
    ]
    for what in ("likelihood", "translating"):
        assert len(shown[what]) > 2  # for each batch
        assert shown[what][0] == f"0 of {len(pairs)}"
        assert shown[what][-1] == f"{len(pairs)} of {len(pairs)}"


def test_translations_made_elsewhere(printed, files, tmp_path):
    reference = tmp_path / "reference"
    out = printed("evaluate", "--hypotheses", reference, "--reference", reference)
    assert "BLEU = 100.00" in out
    assert "chrF = 100.00" in out
    assert "likelihood" not in out
    shouted = tmp_path / "shouted"
    shouted.write_text(reference.read_text(encoding="utf-8").upper(), encoding="utf-8")
    options = ["evaluate", "--hypotheses", shouted, "--reference", reference, "--tokenize", "none"]
    assert "tok:none" in (cased := printed(*options))
    assert "BLEU = 100.00" not in cased
    assert "BLEU = 100.00" in printed(*options, "--lowercase")


def test_data_by_name(printed, model_folder, tmp_path, monkeypatch):
    from manyheads.data import corpora

    real = corpora.load_tatoeba
    monkeypatch.setattr(corpora, "load_tatoeba", lambda split: real(split)[:3])
    fast = ["--max-new-tokens", "4"]
    data = ["--data", "embedded:tatoeba-en-de"]
    assert "embedded:tatoeba-en-de test\n  sentences  3" in printed("evaluate", model_folder, *data, *fast)
    # without --data: what the run was trained with
    (tmp_path / "model").symlink_to(model_folder)
    (tmp_path / "config.yaml").write_text("seed: 1\ndata:\n  path: embedded:tatoeba-en-de\n", encoding="utf-8")
    assert "embedded:tatoeba-en-de valid" in printed("evaluate", tmp_path, "--split", "valid", *fast)


def test_other_settings_in_the_working_folder_are_not_read(manyheads, tmp_path, monkeypatch, files):
    monkeypatch.chdir(tmp_path)
    pairs = ["--source", tmp_path / "source", "--target", tmp_path / "reference", "--vocab-size", "300"]
    assert manyheads("prepare", *pairs, "--valid-count", "2", "--output", "data") == 0
    Path("config.yaml").write_text("a: [settings of another program\n")
    Path("out").write_text("a\nb\n")
    assert manyheads("evaluate", "--hypotheses", "out", "--data", "data") == 0


def test_prepared_data(manyheads, refused, model_folder, files, tmp_path, capsys):
    pairs = ["--source", tmp_path / "source", "--target", tmp_path / "reference", "--vocab-size", "300"]
    assert manyheads("prepare", *pairs, "--valid-count", "2", "--output", tmp_path / "data") == 0
    capsys.readouterr()
    assert manyheads("evaluate", model_folder, "--data", tmp_path / "data", "--max-new-tokens", "4") == 0
    assert f"{tmp_path / 'data'} valid\n  sentences  2" in capsys.readouterr().out
    assert "no test pairs" in refused("evaluate", model_folder, "--data", tmp_path / "data", "--split", "test")


def test_what_is_cut_or_replaced_is_counted(manyheads, model_folder, files, tmp_path, capsys):
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_bytes(source.read_bytes() + b"x" * 40 + b"\nb\xe4d\nlast\n")
    reference.write_bytes(reference.read_bytes() + b"ok\n" + b"y" * 80 + b"\nlast\n")
    options = ["--max-tokens", "60", "--too-long", "truncate", "--on-bad-utf8", "replace"]
    assert manyheads("evaluate", model_folder, *files, *options, "--json") == 0
    captured = capsys.readouterr()
    protocol = json.loads(captured.out)["protocol"]
    assert (protocol["truncated_sources"], protocol["truncated_references"]) == (1, 1)
    assert protocol["sentences"] == 15
    assert "line 13 has 42 tokens; only its first 29 are used" in captured.err
    assert "reference 14 has 82 tokens; only its first 59 are used" in captured.err
    assert "manyheads: lines that are not UTF-8, bad bytes replaced: 1\n" in captured.err


def test_mistakes(manyheads, model_folder, files, tmp_path, capsys):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bad").write_bytes(b"\xff")
    empty, reference = tmp_path / "empty", tmp_path / "reference"
    cases: list[tuple[list[str | Path], str]] = [
        ([], "Say what to evaluate"),
        ([model_folder], "is no run folder"),
        ([model_folder, *files[:2]], "give both or neither"),
        ([model_folder, *files, "--data", "x"], "--data contains"),
        ([model_folder, *files, "--split", "test"], "--split"),
        ([model_folder, "--data", "embedded:tatoeba"], "embedded:tatoeba-en-de"),
        ([model_folder, "--data", tmp_path / "none"], "no folder"),
        ([model_folder, "--hypotheses", empty, "--reference", empty], "leave out MODEL"),
        (["--hypotheses", empty], "--reference"),
        (
            ["--hypotheses", reference, "--reference", reference, "--beam", "8", "--device", "cpu", "--compile"],
            "leave out --device, --compile, --num-beams.",
        ),
        (["--hypotheses", empty, "--reference", reference], "0 lines"),
        (["--hypotheses", empty, "--reference", empty], "nothing to evaluate"),
        (["--hypotheses", tmp_path / "bad", "--reference", reference], "line 1 is not UTF-8"),
        (["--hypotheses", reference, "--reference", reference, "--tokenize", "x"], "13a"),
        ([model_folder, *files, "--output", reference], "is the file"),
        ([model_folder, *files, "--output", tmp_path / "none" / "out"], "there is no folder"),
        ([model_folder, *files, "--output", tmp_path], "is a folder; name a file"),
        ([model_folder, *files, "--max-tokens", "4"], "reference: line 1 has 15 tokens, EOS included, but at most 4"),
        ([model_folder, *files, "--max-tokens", "20"], "source: line 1 has 14 tokens, EOS included, but at most 10"),
    ]
    for arguments, message in cases:
        assert manyheads("evaluate", *arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err


@pytest.mark.parametrize(("exchanged", "is_told"), [(3.6, False), (3.4, True)])
def test_exchanged_files_are_noticed(manyheads, model_folder, tmp_path, monkeypatch, capsys, exchanged, is_told):
    def likelihood(translator: object, pairs: list[tuple[str, str]], *more: object, **named: object) -> Likelihood:
        return Likelihood(4.0 if pairs[0][0] == "a cat" else exchanged, 1)

    monkeypatch.setattr("manyheads.tasks.translation.evaluate.likelihood_of", likelihood)
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_text("a cat\n")
    reference.write_text("eine Katze\n")
    assert manyheads("evaluate", model_folder, "--source", source, "--reference", reference) == 0
    assert ("Are --source and --reference exchanged?" in capsys.readouterr().err) == is_told
