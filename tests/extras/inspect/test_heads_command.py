"""`manyheads prune`, `inspect heads` and `inspect pruning`: from a model to a smaller one, and to pictures."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.settings import load_settings
from manyheads.errors import ConfigError
from manyheads.extras.inspect.heads.names import parse_heads
from manyheads.extras.inspect.heads.scores import masked_heads, masks_without
from manyheads.extras.peers.convert import export_folder
from manyheads.models.pretrained import load, read_config, save_pretrained
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.text.vocabulary import ByteVocabulary

REMOVED = ("encoder.0.self:1,3", "decoder.1.cross:0,1,2", "decoder.0.self:0")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> tuple[str, ...]:
    """The options that name a small parallel text."""
    folder = tmp_path_factory.mktemp("text")
    for number, name in enumerate(("source", "reference")):
        (folder / name).write_text("".join(pair[number] + "\n" for pair in pairs[:6]), encoding="utf-8")
    return ("--source", str(folder / "source"), "--reference", str(folder / "reference"))


def test_a_pruned_model_is_saved_and_used(manyheads, printed, model_folder, tmp_path, capsys):
    output = tmp_path / "small"
    out = printed("prune", model_folder, "--heads", *REMOVED, "--output", output).split("\n")
    assert "18 heads are left" in out[0]
    assert out[1].split() == ["encoder.0.self", "2"]
    assert "decoder.1.cross   1" in "\n".join(out)
    assert load_settings(output) == load_settings(model_folder)
    whole, small = load(model_folder), load(output)
    source, lengths, target = torch.randint(3, 300, (2, 6)), torch.tensor([6, 4]), torch.randint(3, 300, (2, 5))
    masks = masks_without(whole, parse_heads(REMOVED, whole.config))
    with torch.no_grad():
        with masked_heads(whole, masks):
            masked = whole.body(source, lengths, target)
        torch.testing.assert_close(small.body(source, lengths, target), masked, atol=1e-5, rtol=0)
    sentences = tmp_path / "sentences"
    sentences.write_text("I am hungry.\nHello\n", encoding="utf-8")
    assert manyheads("translate", output, sentences, "--output", tmp_path / "out", "--num-beams", "3") == 0
    assert len((tmp_path / "out").read_text(encoding="utf-8").split("\n")) == 3
    assert "decoder_heads 3, 4, cross_heads 4, 1" in " ".join(printed("info", output).split())
    page = tmp_path / "look.html"
    assert manyheads("inspect", "attention", output, "--text", "I am hungry.", "--output", page) == 0
    views = json.loads(page.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0])["views"]
    assert [len(layer) for layer in views[2]["figures"]] == [4, 1]
    assert manyheads("inspect", "shapes", output, "--text", "I am hungry.") == 0
    capsys.readouterr()
    # The same again with a second pruning, and nothing is replaced unasked.
    assert manyheads("prune", output, "--heads", "encoder.0.self:0", "--output", tmp_path / "less") == 0
    assert read_config(tmp_path / "less").encoder_heads == (1, 4)
    assert manyheads("prune", model_folder, "--heads", *REMOVED, "--output", output) == 2


def test_exports_refuse_uneven_heads_by_name(manyheads, refused, model_folder, language_folder, tmp_path, capsys):
    assert manyheads("prune", model_folder, "--heads", "encoder.0.self:1", "--output", tmp_path / "small") == 0
    capsys.readouterr()
    for name in ("ctranslate2", "transformers", "onnx"):
        message = refused("export", tmp_path / "small", "--to", name, "--output", tmp_path / name)
        assert "encoder_heads [3, 4]" in message or "not installed" in message
        assert not (tmp_path / name).exists()
    with pytest.raises(ConfigError, match=r"encoder_heads \[3, 4\]"):
        export_folder(tmp_path / "small", tmp_path / "marian", "transformers/Marian")
    assert manyheads("prune", language_folder, "--heads", "decoder.1.self:0", "--output", tmp_path / "xl") == 0
    for name in ("transformers/TransfoXL", "kimiyoung/TransformerXL"):
        with pytest.raises(ConfigError, match=r"layer_heads \[2, 1\]"):
            export_folder(tmp_path / "xl", tmp_path / "peer", name)


def test_heads_are_judged_and_the_least_important_go(manyheads, printed, model_folder, text, tmp_path, capsys):
    picture = tmp_path / "heads.svg"
    assert manyheads("inspect", "heads", model_folder, *text, "--json", "--output", picture) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert str(picture) in captured.err
    assert "decoder.1.cross" in picture.read_text(encoding="utf-8")
    rows = {row["head"]: row for row in found["heads"]}
    assert len(rows) == 24
    assert found["nats_per_token"] > 4
    least = sorted(rows, key=lambda name: float(rows[name]["normalised"]))[:7]
    output = tmp_path / "small"
    assert "17 heads are left" in printed("prune", model_folder, "--share", "0.3", *text, "--output", output)
    assert read_config(output).encoder_heads == tuple(
        sum(name.startswith(f"encoder.{layer}.") and name not in least for name in rows) for layer in range(2)
    )
    assert printed("inspect", "heads", output, *text, "--output", picture).startswith("6 pairs of ")


def test_the_curve_goes_on_where_it_was_stopped(
    manyheads, printed, refused, model_folder, text, tmp_path, capsys, monkeypatch
):
    arguments = ("inspect", "pruning", model_folder, *text, "--num-beams", "1", "--output", tmp_path / "curve.png")
    assert manyheads(*arguments, "--share", "0.5", "0") == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.split("\n")
    assert [line.split()[:3] for line in table[1:3]] == [["importance", "0", "0%"], ["importance", "12", "50%"]]
    before = (tmp_path / "curve.jsonl").read_text(encoding="utf-8")
    pruned: list[int] = []

    def counted(model: Any, removed: Any) -> Any:
        pruned.append(len(removed))
        return prune(model, removed)

    from manyheads.extras.inspect.heads.pruning import prune

    monkeypatch.setattr("manyheads.extras.inspect.heads.pruning.prune", counted)
    points = json.loads(printed(*arguments, "--share", "0", "0.5", "1", "--by", "importance", "random", "--json"))
    assert pruned == [18, 12, 18]  # each layer keeps one; the first two of the first order were known
    assert [(point["by"], point["pruned"]) for point in points] == [
        (by, count) for by in ("importance", "random") for count in (0, 12, 18)
    ]
    assert (tmp_path / "curve.jsonl").read_text(encoding="utf-8").startswith(before)
    assert len({json.dumps({**point, "by": "", "identity": ""}) for point in points}) < 6  # nothing or all removed
    (tmp_path / "curve.jsonl").write_text("[]\n", encoding="utf-8")
    assert "is no record of a pruning curve" in refused(*arguments, "--share", "0")


def test_a_language_model(manyheads, printed, language_folder, tmp_path):
    (tmp_path / "text").write_text("he opened the door and went in. " * 20, encoding="utf-8")
    given = ("--text", tmp_path / "text")
    picture = tmp_path / "heads.png"
    assert "decoder.1.self:1" in printed("inspect", "heads", language_folder, *given, "--output", picture)
    curve = ("inspect", "pruning", language_folder, *given, "--share", "0", "1", "--by", "ablation", "confidence")
    out = printed(*curve, "--output", picture)
    assert "perplexity" in out
    output = tmp_path / "small"
    assert manyheads("prune", language_folder, "--share", "1", *given, "--output", output) == 0
    assert read_config(output).layer_heads == (1, 1)
    assert manyheads("generate", output, "He ", "--max-new-tokens", "3") == 0


def test_the_curve_of_a_very_bad_model(manyheads, printed, language_folder, tmp_path, capsys):
    """Its perplexity is beyond the numbers that Python has, and JSON has no infinity."""
    model = load(language_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1e4
    save_pretrained(model, tmp_path / "bad", tokenizer=ByteVocabulary())
    (tmp_path / "text").write_text("he opened the door and went in. " * 20, encoding="utf-8")
    curve = ("inspect", "pruning", tmp_path / "bad", "--text", tmp_path / "text", "--share", "0")
    tables = []
    for _ in range(2):  # the second time from the record
        assert manyheads(*curve, "--by", "random", "--output", tmp_path / "curve.png") == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert " inf\n" in tables[0]
    assert "Infinity" not in (tmp_path / "curve.jsonl").read_text(encoding="utf-8")
    [point] = json.loads(printed(*curve, "--by", "random", "--output", tmp_path / "curve.png", "--json"))
    assert point["perplexity"] is None
    assert point["nats_per_token"] > 710


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--heads", "encoder.0.self:0", "decoder.1.cross"), "all heads of decoder.1.cross would be removed; keep at"),
        (("--heads", "encoder.9.self:0"), "there is no head 'encoder.9.self:0'; layers and heads count from 0"),
        (("--heads", "encoder.0.self:4"), "encoder.0.self:0 to 3"),
        (("--heads", "nonsense"), "there is no head 'nonsense'"),
        ((), "--heads HEADS ..., or --share X"),
        (("--heads", "encoder.0.self", "--share", "0.5"), "one of the two"),
        (("--heads", "encoder.0.self", "--pairs", "3"), "leave out --pairs"),
        (("--heads", "encoder.0.self", "--by", "random"), "leave out --by"),
        (("--share", "1.5"), "--share is 1.5"),
        (("--share", "0.5"), "is no run folder, so its data is unknown"),
        (("--share", "0.5", "--text", "x"), "translates; give --source and --reference"),
        (("--share", "0.5", "--source", "x"), "belong together"),
        (("--share", "0.5", "--seed", "2"), "--seed is for --by random, but heads are ordered by importance"),
        (("--share", "0.5", "--max-tokens", "9"), "--max-tokens: this is for language models"),
        (("--share", "0.5", "--by", "random", "--pairs", "3"), "--by random reads no text; leave out --pairs"),
        (
            ("--share", "0.01", "--source", "none", "--reference", "none"),
            "of 24 heads rounds to no head; give at least 0.042",
        ),
    ],
)
def test_mistakes(refused, model_folder, tmp_path, arguments, said):
    message = refused("prune", model_folder, *arguments, "--output", tmp_path / "x")
    assert said in message
    assert "Traceback" not in message
    assert not (tmp_path / "x").exists()


def test_other_models_are_refused_by_name(refused, tmp_path):
    folder = tmp_path / "reformer"
    save_pretrained(
        build_model(dataclasses.replace(REFORMERS["debug"], vocab_size=256)), folder, tokenizer=ByteVocabulary()
    )
    for command in (
        ("prune", folder, "--heads", "decoder.0.self:0", "--output", tmp_path / "x"),
        ("inspect", "heads", folder),
        ("inspect", "pruning", folder),
    ):
        assert f"{folder} is a reformer, whose heads can be neither masked nor pruned" in refused(*command)


def test_a_random_share_needs_no_text(printed, model_folder, tmp_path):
    arguments = ("prune", model_folder, "--share", "0.25", "--by", "random", "--seed", "2", "--output", tmp_path / "x")
    assert "18 heads are left" in printed(*arguments)


def test_options_that_would_not_be_used_are_refused(
    manyheads, refused, model_folder, language_folder, text, tmp_path, capsys
):
    (tmp_path / "text").write_text("he opened the door and went in. " * 20, encoding="utf-8")
    language = (language_folder, "--text", tmp_path / "text", "--output", tmp_path / "x.png")
    translator = (model_folder, *text, "--output", tmp_path / "x.png")
    for arguments, said in (
        (("heads", *translator, "--seed", "2"), "--seed orders heads at random"),
        (("heads", *translator, "--max-tokens", "9"), "--max-tokens: this is for language models"),
        (("heads", *language, "--pairs", "9"), "--pairs: this is for translators"),
        (("pruning", *language, "--num-beams", "1", "--tokenize", "zh"), "--num-beams, --tokenize: this is for"),
        (("pruning", *translator, "--judge-tokens", "9"), "--judge-tokens: this is for language models"),
        (("pruning", *translator, "--seed", "2"), "--seed is for --by random"),
    ):
        assert manyheads("inspect", *arguments) == 2, arguments
        assert said in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text('{"identity": "a", "by": [], "pruned": 0}\n', encoding="utf-8")
    assert "is no record of a pruning curve" in refused("inspect", "pruning", *translator)
