"""`manyheads evaluate A B`: several models on one test set, as text, as JSON and as a page."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline_pages import record_of

from manyheads.catalogue import build_model
from manyheads.data.store import TokenStore
from manyheads.decoding.translator import Translator
from manyheads.errors import NonFiniteError
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.evaluation.likelihood import evaluate_text, token_losses
from manyheads.evaluation.reading import Reading
from manyheads.extras.inspect.drawings.attention import shown_token
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.vocabulary import ByteVocabulary


@pytest.fixture(scope="session")
def other_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer, other weights, and languages."""
    first = Translator.from_pretrained(model_folder, "cpu")
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("other") / "model"
    model = build_model(first.model.config)
    save_pretrained(model, folder, tokenizer=first.tokenizer, generation=first.settings, languages=[("en", "de")])
    return folder


@pytest.fixture
def files(tmp_path: Path, pairs: list[tuple[str, str]]) -> list[str | Path]:
    for name, column in (("source", 0), ("reference", 1)):
        (tmp_path / name).write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")
    return ["--source", tmp_path / "source", "--reference", tmp_path / "reference"]


def test_translators_side_by_side(printed, model_folder, other_folder, files, pairs, tmp_path):
    page = tmp_path / "compared.html"
    lines = printed("evaluate", model_folder, other_folder, *files, "--page", page, "--differences", 3).split("\n")
    assert lines[:2] == [f"A = {model_folder}", f"B = {other_folder}"]
    assert re.fullmatch(r" +BLEU +± +p +chrF +± +p +nats/sentence", lines[2])
    assert sum(line.startswith("  line ") for line in lines) == 3
    assert any("|bs:1000|" in line for line in lines)
    sources, references = map(list, zip(*pairs, strict=True))
    written = [Translator.from_pretrained(one, "cpu").translate(sources) for one in (model_folder, other_folder)]
    record = record_of(page.read_text("utf-8"))
    scores = [float(row[1]) for row in record["rows"]]
    assert scores == [pytest.approx(corpus_bleu(texts, references).value, abs=1e-2) for texts in written]
    shown = {int(one["place"].removeprefix("line ")) - 1: one for one in record["examples"]}
    assert len(shown) > 3  # the page has more than the text
    for place, one in shown.items():
        assert (one["source"], one["reference"]) == pairs[place]
        assert one["outputs"] == [shown_token(texts[place].replace("\n", " ")) for texts in written]
    spreads = [abs(one["scores"][0] - one["scores"][1]) for one in record["examples"]]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] > 0


def test_a_page_that_cannot_be_written_costs_no_figures(manyheads, model_folder, other_folder, files, tmp_path, capsys):
    (tmp_path / "file").touch()
    page = tmp_path / "file" / "compared.html"
    assert manyheads("evaluate", model_folder, other_folder, *files, "--page", page) == 2
    shown = capsys.readouterr()
    assert f"A = {model_folder}" in shown.out
    assert str(page) in shown.err


def test_equal_models_do_not_differ(printed, model_folder, files, tmp_path):
    (tmp_path / "same").symlink_to(model_folder)
    record = json.loads(printed("evaluate", model_folder, tmp_path / "same", *files, "--json"))
    for score in record["scores"].values():
        assert score["models"][0]["p_value"] is None
        assert score["models"][1]["p_value"] == 1.0
        assert score["models"][0]["score"] == score["models"][1]["score"]
    assert record["differences"] == []


@pytest.fixture(scope="module")
def language_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("languages")
    vocabulary = ByteVocabulary()
    config = TransformerXLConfig(
        d_model=8, num_heads=2, d_ff=8, num_layers=1, memory_len=8, vocab_size=vocabulary.vocab_size
    )
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_pretrained(build_model(config), folder / str(seed), tokenizer=vocabulary)
    return [folder / "1", folder / "2"]


def test_language_models_side_by_side(printed, language_models, tmp_path):
    text = tmp_path / "text"
    text.write_text("the cat sees the dog, and the dog sees the cat.\n" * 12, encoding="utf-8")
    page = tmp_path / "compared.html"
    record = json.loads(printed("evaluate", *language_models, "--text", text, "--page", page, "--json"))
    found = record["scores"]["nats/token"]["models"]
    for model, one in zip(language_models, found, strict=True):
        alone = json.loads(printed("evaluate", model, "--text", text, "--json"))["results"][0]
        assert one["score"] == pytest.approx(alone["nats_per_token"], rel=1e-5)
        assert record["figures"]["bits/byte"][language_models.index(model)] == f"{alone['bits_per_byte']:.4f}"
    assert 0 < found[1]["p_value"] <= 1
    passages = record_of(page.read_text("utf-8"))["examples"]
    assert passages[0]["outputs"] == []
    assert passages[0]["reference"].replace("⏎", "\n") in text.read_text()


def test_a_token_of_probability_zero_is_no_token_left_out(refused, language_models, tmp_path):
    model = load(language_models[1])
    with torch.no_grad():
        model.head.bias[ord("t")] = -torch.inf
    save_pretrained(model, tmp_path / "never", tokenizer=ByteVocabulary())
    (tmp_path / "text").write_text("the cat sees the dog\n" * 3)
    given = ("evaluate", language_models[0], tmp_path / "never", "--text", tmp_path / "text")
    assert "gives 8 of the tokens" in refused(*given)


@pytest.mark.parametrize(
    ("documents", "ends", "reading"),
    [
        ("none", False, Reading(segment_len=5, lanes=3)),
        ("none", False, Reading(segment_len=4, lanes=2, ext_len=3, memory_len=6)),
        ("lines", True, Reading(segment_len=5, lanes=2, documents="separate")),
        ("lines", True, Reading(segment_len=1, lanes=4, max_tokens=17)),
    ],
)
def test_losses_by_token_are_those_of_the_whole(language_models, documents, ends, reading):
    vocabulary = ByteVocabulary(documents=documents)
    config = dataclasses.replace(load(language_models[0]).config, vocab_size=vocabulary.vocab_size)
    torch.manual_seed(3)
    model = build_model(config)
    texts = [list(text) + [vocabulary.end_id] * ends for text in (b"one line", b"another, longer", b"a", b"last")]
    store = TokenStore.from_lists(texts, vocabulary.vocab_size)
    whole = evaluate_text(model, store, reading, vocabulary)
    found = token_losses(model, store, reading, vocabulary)
    assert np.isfinite(found).sum() == whole.num_tokens
    assert np.nansum(found) == pytest.approx(whole.nll_sum, rel=1e-5)
    if reading.segment_len == 5 and documents == "lines":  # each document by itself: its losses stand at its tokens
        alone = token_losses(model, TokenStore.from_lists(texts[1:2], vocabulary.vocab_size), reading, vocabulary)
        assert found[9:25] == pytest.approx(alone, rel=1e-4)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="weights are damaged"):  # not: no token is scored
        token_losses(model, store, reading, vocabulary)


def test_mistakes(manyheads, model_folder, other_folder, language_models, files, tmp_path, capsys):
    french = tmp_path / "french"
    first = Translator.from_pretrained(model_folder, "cpu")
    save_pretrained(first.model, french, tokenizer=first.tokenizer, languages=[("en", "fr")])
    words = tmp_path / "words"
    config = dataclasses.replace(load(language_models[0]).config, vocab_size=257)
    save_pretrained(build_model(config), words, tokenizer=ByteVocabulary(documents="lines"))
    own = []
    for number, split in enumerate(("test", "valid")):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "model").symlink_to(model_folder)
        path = "embedded:tatoeba-en-de" if split == "test" else "copy-task"
        (tmp_path / f"run{number}" / "config.yaml").write_text(f"seed: 1\ndata:\n  path: {path}\n", encoding="utf-8")
        own.append(tmp_path / f"run{number}")
    text = ["--text", tmp_path / "source"]
    cases: list[tuple[list[Any], str]] = [
        ([model_folder, *files, "--page", "x.html"], "--page compares models; name two models or more"),
        ([model_folder, *files, "--differences", "3"], "--differences compares models"),
        ([model_folder, model_folder, *files], "is named twice"),
        ([model_folder, other_folder, *files, "--output", tmp_path / "o"], "--output is for one model, but 2 are"),
        ([model_folder, other_folder, *files, "--page", tmp_path], "name a file that ends in .html"),
        ([model_folder, other_folder, *files, "--differences", "-1"], "--differences is -1"),
        ([model_folder, language_models[0], *files], "is no translator"),
        ([language_models[0], model_folder, *text], "is no language model"),
        ([other_folder, french, *files], "translates en > fr, but"),
        ([language_models[0], words, *text], "has another vocabulary"),
        ([*language_models, *text, "--memory-len", "0", "4"], "--memory-len with several values is for one model"),
        ([*language_models, *text, "--recl", "--beside", "x"], "--beside and --recl is for one model"),
        (own, "has another test set (copy-task"),
    ]
    for arguments, message in cases:
        assert manyheads("evaluate", *arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
    assert not (tmp_path / "o").exists()
