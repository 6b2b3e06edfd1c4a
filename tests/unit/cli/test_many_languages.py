"""One model of several languages: prepared from several pairs of files, trained, and asked for one language each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.cli.main import main
from manyheads.data.translation.prepared import PreparedData
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.served import ServedTranslator
from manyheads.extras.serving.settings import ServingSettings
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

Cli = Callable[..., int]
Captured = pytest.CaptureFixture[str]
NOUNS = ["cat", "dog", "bird", "house", "train", "book", "city", "man"]
WORDS = {
    "de": ["Katze", "Hund", "Vogel", "Haus", "Zug", "Buch", "Stadt", "Mann"],
    "fr": ["chat", "chien", "oiseau", "maison", "train", "livre", "ville", "homme"],
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for language, words in WORDS.items():
        known = zip(NOUNS, words, strict=True)
        lines = [(f"I see the {noun} {n}", f"{language} {word} {n}") for noun, word in known for n in "12345"]
        for name, part in (("train", lines[:-4]), ("valid", lines[-4:])):
            for side, column in (("en", 0), (language, 1)):
                file = folder / f"{name}.{language}.{side}"
                file.write_text("".join(f"{line[column]}\n" for line in part), encoding="utf-8")
    return folder


def pair_options(texts: Path, *, split: str = "train", option: str = "--pair") -> list[Any]:
    found: list[Any] = []
    for language in WORDS:
        found += [option, "en", language, texts / f"{split}.{language}.en", texts / f"{split}.{language}.{language}"]
    return found


@pytest.fixture(scope="module")
def data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "data"
    options = [*pair_options(texts), *pair_options(texts, split="valid", option="--valid-pair")]
    assert main(["prepare", *map(str, options), "--vocab-size", "400", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "many"
    settings = [
        "--training.max-steps=40",
        "--training.plots=False",
        "--training.tensorboard=False",
        "--validation.every-steps=40",
        "--quiet",
    ]
    assert main(["train", "--preset", "debug", f"--data.path={data}", f"--run-dir={folder}", *settings]) == 0
    return folder


def test_the_data_has_tags_and_directions(data: Path, texts: Path) -> None:
    opened = PreparedData.open(data)
    tokenizer = opened.tokenizer
    assert opened.languages == (("en", "de"), ("en", "fr"))
    assert tokenizer.target_languages == ("de", "fr")
    assert tokenizer.pieces[-2:] == (">>de<<", ">>fr<<")
    assert opened.manifest["directions"] == {"valid": [["en", "de", 4], ["en", "fr", 4]]}
    assert opened.valid_text[0][0].startswith(">>de<< I see the ")
    assert opened.valid_text[4][0].startswith(">>fr<< I see the ")
    firsts = [int(opened.train.source.ids[start]) for start in opened.train.source.offsets[:-1]]
    assert firsts == [tokenizer.vocab_size - 2] * 36 + [tokenizer.vocab_size - 1] * 36
    # Tags are not learned as text, and do not count as such in the rules of cleaning.
    assert not any("<<" in piece for piece in tokenizer.pieces[260:-2])
    rules = json.loads((data / "cleaning.json").read_text())
    assert rules["pairs"] == 72


def test_validation_pairs_are_held_back_of_each_direction(texts: Path, tmp_path: Path, capsys: Captured) -> None:
    options = [*map(str, pair_options(texts)), "--valid-count", "3", "--vocab-size", "400"]
    assert main(["prepare", *options, "--output", str(tmp_path / "data")]) == 0
    assert "languages   en > de, en > fr" in capsys.readouterr().out
    opened = PreparedData.open(tmp_path / "data")
    assert opened.manifest["directions"]["valid"] == [["en", "de", 3], ["en", "fr", 3]]
    assert [source[:6] for source, _ in opened.valid_text] == [">>de<<"] * 3 + [">>fr<<"] * 3
    assert len(opened.train) == 66


def test_a_language_is_chosen(run: Path, manyheads: Cli, tmp_path: Path, capsys: Captured) -> None:
    assert json.loads((run / "model" / "config.json").read_text())["languages"] == [["en", "de"], ["en", "fr"]]
    whole = Translator.from_pretrained(run, "cpu")
    lines = ["I see the cat 1", "", "I see the dog 2"]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines))
    german, french = (whole.into(language).translate(lines) for language in ("de", "fr"))
    assert german[0].startswith("de")  # forty steps are enough to tell the languages apart
    assert french[0].startswith("fr")
    assert german[1] == french[1] == ""
    assert whole.translate([f">>de<< {lines[0]}"]) == german[:1]
    for language, expected in (("de", german), ("FR", french)):
        assert manyheads("translate", run, tmp_path / "in.txt", "--target-lang", language) == 0
        assert capsys.readouterr().out == "".join(f"{line}\n" for line in expected)
    assert whole.into("de").into("fr").languages == (("en", "fr"),)
    with pytest.raises(RequestError, match="text 1 has no target language"):
        whole.translate(["I see the cat 1"])
    with pytest.raises(ConfigError, match="translates into several languages"):
        whole.into(None)


def test_evaluation_by_direction(run, data, texts, printed):
    record = json.loads(printed("evaluate", run, "--json"))
    assert [(one["languages"], one["sentences"]) for one in record["directions"]] == [
        (["en", "de"], 4),
        (["en", "fr"], 4),
    ]
    files = ["--source", texts / "valid.fr.en", "--reference", texts / "valid.fr.fr"]
    for options in (["--data", data, "--target-lang", "fr"], [*files, "--target-lang", "fr"]):
        alone = json.loads(printed("evaluate", run, *options, "--json"))
        assert alone["bleu"]["score"] == pytest.approx(record["directions"][1]["bleu"])
        assert alone["protocol"]["sentences"] == 4
    shown = printed("evaluate", run)
    assert "\nen > de                  4  " in shown
    assert len(printed("score", run, "--source", files[1], "--target", files[3], "--target-lang", "fr").split()) == 12


def test_mistakes(run, data, texts, model_folder, manyheads, tmp_path, capsys):
    line = tmp_path / "line"
    line.write_text("I see the cat 1\n")
    out = ["--output", tmp_path / "data"]
    pairs = pair_options(texts)
    files = ["--source", texts / "valid.fr.en", "--reference", texts / "valid.fr.fr"]
    cases: list[tuple[list[Any], str]] = [
        (["translate", run, line], "translates into several languages (de, fr); choose one with --target-lang"),
        (["translate", run, line, "--target-lang", "es"], "--target-lang is es, but"),
        (["translate", model_folder, line, "--target-lang", "de"], "was trained for one pair of languages"),
        (["evaluate", run, *files], "choose one with --target-lang"),
        (["evaluate", run, "--target-lang", "es"], "--target-lang is es, but"),
        (["evaluate", model_folder, "--data", data], f"has translations into de, fr, for which {model_folder} has no"),
        (["evaluate", model_folder, *files, "--target-lang", "fr"], "has no tags; leave --target-lang out"),
        (["prepare", *pairs[:4], *out], "--pair takes four values"),
        (["prepare", *pairs[:5], "--valid-count", "1", *out], "--pair names one direction, en > de"),
        (
            ["prepare", *pairs, *out],
            "Give --valid-count 500 to hold back as much of the training data; or --valid-pair;",
        ),
        (["prepare", *pairs, "--valid-count", "1", "--source-lang", "en", *out], "leave out --source-lang"),
        (["prepare", *pairs, "--valid-pair", "en", "es", line, line, *out], "no training pairs of this direction"),
        (["prepare", *pairs, "--valid-pair", "en", "de", line, line, *out], "no validation pairs of en > fr"),
        (["prepare", "--pair", "en", "en", *pairs[3:], "--valid-count", "1", *out], "both languages are en"),
        (["prepare", "--pair", "english!", "de", *pairs[3:], "--valid-count", "1", *out], "this is not a language tag"),
        (["prepare", "--valid-pair", "en", "de", line, line, *out], "go with --pair"),
        (["prepare", *pairs, "--valid-count", "1", "--tokenizer", model_folder, *out], "has no tag for de, fr"),
        (
            ["prepare", "--source", line, "--target", line, "--valid-count", "0", "--tokenizer", run, *out],
            "is that of a model of several languages",
        ),
    ]
    for arguments, message in cases:
        assert manyheads(*arguments) == 2, arguments
        assert message in (said := capsys.readouterr().err), said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_tags_are_pieces_of_every_kind_of_tokenizer(kind: Any) -> None:
    sentences = ["the cat sees the dog", ">>de<< is a tag, and >>pt-BR<< too"] * 8
    made = Tokenizer.train(sentences, TokenizerSettings(kind=kind, vocab_size=330), languages=["de", "pt-BR"])
    read = Tokenizer.from_json(made.to_json())
    assert read.target_languages == ("de", "pt-BR")
    assert read.digest == made.digest
    tag = read.vocab_size - 1
    plain = read.encode(sentences[1])
    assert tag not in plain  # only at the start of a source
    assert tag - 1 not in plain
    assert read.source.encode(f">>pt-BR<< {sentences[1]}") == [tag, *plain]
    assert read.target.encode(f">>pt-BR<< {sentences[0]}")[0] != tag
    assert read.decode([tag, *read.encode(sentences[0])]) == sentences[0]


def test_a_server_takes_the_language_of_the_request(run: Path) -> None:
    reader = Translator.from_pretrained(run, "cpu")
    served = ServedTranslator(
        name="many", limits=ServingSettings(models=("many",)), reader=reader, pairs=reader.languages
    )
    rows = [served.into(language).rows(["I see the cat 1"], served.settings({})) for language in ("de", "fr")]
    (german,), (french,) = ([row.content[0] for row in one if row is not None] for one in rows)
    assert german[1:] == french[1:]
    assert (german[0], french[0]) == (reader.tokenizer.source.vocab_size - 2, reader.tokenizer.source.vocab_size - 1)
    for language in (None, "es"):
        with pytest.raises(Refusal, match="this model translates into de, fr"):
            served.into(language)


def test_scores_and_attention_take_the_language_of_the_request(run: Path) -> None:
    reader = Translator.from_pretrained(run, "cpu")
    source, target = "I see the cat 1", "fr chat 1"
    pair = {"source": [source], "target": [target]}
    settings = ServingSettings(models=(f"many={run}",), device="cpu", allowed_hosts=("testserver",))
    with TestClient(build_app(settings)) as client:
        found = {}
        for language in ("de", "FR"):
            answer = client.post("/v1/score", json={**pair, "target_lang": language})
            assert answer.status_code == 200, answer.text
            [scored] = answer.json()["scores"]
            found[language] = scored["log_prob"]
            [expected] = reader.into(language).score([source], [target])
            assert scored["log_prob"] == pytest.approx(expected.sum_log_prob, abs=1e-4)
            shown = client.post("/v1/attention", json={"source": source, "target_lang": language}).json()
            assert shown["key_tokens"][0] == f">>{language.lower()}<<"
        assert found["FR"] > found["de"]  # French, asked for in French
        body = {"source": source, "target": target, "kind": "encoder", "source_lang": "en", "target_lang": "fr"}
        assert client.post("/v1/attention", json=body).json()["query_tokens"][0] == ">>fr<<"
        for path, fields in (("score", pair), ("attention", {"source": source})):
            for wrong in ({}, {"target_lang": "es"}, {"target_lang": "de", "source_lang": "es"}):
                refused = client.post(f"/v1/{path}", json={**fields, **wrong})
                assert (refused.status_code, refused.json()["error"]["param"]) == (422, "target_lang"), wrong
        refused = client.post("/v1/score", json={"text": [target], "target_lang": "fr"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "target_lang")
