"""`--ensemble` and `--rerank` of `translate`, `evaluate` and `score`, as a user gives them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.options import EnsembleOptions, RerankingOptions
from manyheads.decoding.translator import Translator
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer import config as presets
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

Cli = Callable[..., int]
Folders = dict[str, Path]


def save(folder: Path, tokenizer: Tokenizer, seed: int, languages: tuple[tuple[str, str], ...] = ()) -> Path:
    size = tokenizer.vocab_size
    config = replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size)
    torch.manual_seed(seed)
    save_pretrained(build_model(config), folder, tokenizer=tokenizer, languages=languages)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, pairs: list[tuple[str, str]]) -> Folders:
    """Two models to be averaged; one of another vocabulary; two of known languages, there and back."""
    root = tmp_path_factory.mktemp("ensemble")
    tokenizer = Tokenizer.load(model_folder / "tokenizer.json")
    other = Tokenizer.train([source for source, _ in pairs], TokenizerSettings(vocab_size=300))
    for name, column in (("FILE", 0), ("REFERENCE", 1)):
        (root / name).write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")
    return {
        "A": model_folder,
        "B": save(root / "b", tokenizer, 2),
        "OTHER": save(root / "other", other, 3),
        "EN-DE": save(root / "en-de", tokenizer, 4, (("en", "de"),)),
        "DE-EN": save(root / "de-en", tokenizer, 5, (("de", "en"),)),
        "FILE": root / "FILE",
        "REFERENCE": root / "REFERENCE",
    }


def test_translations_are_those_of_the_average(manyheads, folders, tmp_path, capsys, pairs):
    output = tmp_path / "out"
    given = ("translate", folders["A"], folders["FILE"], "--output", output, "--verbose")
    assert manyheads(*given, "--ensemble", folders["B"], folders["EN-DE"]) == 0
    assert f"{folders['A']} + {folders['B']} + {folders['EN-DE']} on " in capsys.readouterr().err
    sources = [source for source, _ in pairs]
    averaged = Translator.from_pretrained([folders[name] for name in ("A", "B", "EN-DE")], "cpu")
    lines = output.read_text(encoding="utf-8").split("\n")[:-1]
    assert lines == averaged.translate(sources) != Translator.from_pretrained(folders["A"], "cpu").translate(sources)
    assert manyheads(*given, "--ensemble", folders["A"]) == 0
    assert output.read_text(encoding="utf-8").split("\n")[:-1] == Translator.from_pretrained(
        folders["A"], "cpu"
    ).translate(sources)


def test_translations_are_ranked_again(manyheads, printed, folders, capsys, pairs):
    given = (
        "translate",
        folders["A"],
        folders["FILE"],
        "--rerank",
        folders["B"],
        "--rerank-weight",
        "2.5",
        "--beam",
        4,
    )
    assert manyheads(*map(str, given), "--nbest", "2") == 0
    first, reverse = (Translator.from_pretrained(folders[name], "cpu") for name in ("A", "B"))
    made = first.reranked_by(reverse, 2.5)
    expected = made.translate_nbest([source for source, _ in pairs], num_beams=4, num_return_sequences=2)
    shown = [line.split("\t") for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [float(score) for _, score, _ in shown] == pytest.approx([x.score for xs in expected for x in xs], abs=1e-5)
    assert printed(*map(str, given)).split("\n")[:-1] == made.translate([source for source, _ in pairs], num_beams=4)


def test_evaluated_and_scored(manyheads, printed, folders, tmp_path, capsys):
    texts = ("--source", folders["FILE"], "--reference", folders["REFERENCE"])
    several = ("--ensemble", folders["B"], "--rerank", folders["EN-DE"], "--rerank-weight", "0.5")
    translated, judged = tmp_path / "translated", tmp_path / "judged"
    assert manyheads("translate", folders["A"], folders["FILE"], "--output", translated, *several) == 0
    capsys.readouterr()
    told = printed("evaluate", folders["A"], *texts, *several, "--output", judged)
    assert judged.read_bytes() == translated.read_bytes()
    assert f"  model      {folders['A']} + {folders['B']}, " in told
    assert f"reranked by {folders['EN-DE']} (weight 0.5)" in told
    found = json.loads(printed("evaluate", folders["A"], *texts, *several, "--json"))
    protocol = found["protocol"]
    assert protocol["ensemble"] == [str(folders["B"])]
    assert (protocol["rerank"], protocol["rerank_weight"]) == (str(folders["EN-DE"]), 0.5)
    alone = json.loads(printed("evaluate", folders["A"], *texts, "--json"))
    assert protocol["parameters"] == 2 * alone["protocol"]["parameters"]
    assert "ensemble" not in alone["protocol"]
    assert "rerank" not in alone["protocol"]

    scored = ("score", folders["A"], "--source", folders["FILE"], "--target", folders["REFERENCE"])
    assert manyheads(*scored, "--ensemble", folders["B"]) == 0
    sums = [float(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines()]
    assert -sum(sums) / found["likelihood"]["target_tokens"] == pytest.approx(found["likelihood"]["nats_per_token"])
    assert found["likelihood"]["nats_per_token"] != alone["likelihood"]["nats_per_token"]


def test_a_document(manyheads: Cli, folders: Folders, tmp_path: Path) -> None:
    page, output = tmp_path / "page.md", tmp_path / "out.md"
    page.write_text("# I am hungry.\n\n*Where* is the station?\n", encoding="utf-8")

    def translated(*options: str | Path) -> str:
        assert manyheads("translate", folders["A"], page, "--output", output, *options) == 0
        return output.read_text(encoding="utf-8")

    alone = translated()
    assert translated("--ensemble", folders["A"]) == alone
    assert translated("--ensemble", folders["B"]) != alone
    assert translated("--rerank", folders["B"], "--rerank-weight", "0") == alone
    assert translated("--rerank", folders["B"], "--rerank-weight", "50", "--beam", "6") != translated("--beam", "6")


def test_what_resumed_work_depends_on(folders: Folders) -> None:
    """The contents of all models, not their names."""
    names = {name: str(folder) for name, folder in folders.items()}
    options = RerankingOptions(ensemble=(names["B"],), rerank=names["EN-DE"], rerank_weight=0.5)
    digests = [hashlib.sha256((folders[name] / "manifest.json").read_bytes()).hexdigest() for name in ("B", "EN-DE")]
    assert options.identity() == {"ensemble": digests[:1], "rerank": digests[1], "rerank_weight": 0.5}
    assert RerankingOptions().identity() == EnsembleOptions().identity() == {}
    assert RerankingOptions().record() == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("translate A FILE --ensemble OTHER", "so their probabilities cannot be averaged; train the models of an"),
        ("translate A FILE --ensemble B nowhere", "there is no folder nowhere"),
        ("translate EN-DE FILE --ensemble DE-EN", "the models of an ensemble translate the same languages."),
        ("evaluate EN-DE --ensemble DE-EN --source FILE --reference FILE", "the same languages."),
        ("score A --ensemble OTHER --source FILE --target FILE", "has another vocabulary ("),
        ("translate A FILE --ensemble B --engine ctranslate2", "searches one model, but 2 are named"),
        ("translate A FILE --ensemble B --engine auto", "leave out --engine or --ensemble"),
        ("translate EN-DE FILE --rerank EN-DE", "translates en to de; reranking needs one that translates de to en."),
        ("translate A FILE --rerank B --beam 1", "but num_beams is 1; search with num_beams of 2 or more."),
        ("translate A FILE --rerank B --do-sample", "but do_sample is set"),
        ("translate A FILE --rerank B --rerank-weight -1", "--rerank-weight is -1.0; it must be at least 0."),
        ("translate A FILE --rerank-weight 2", "name one by --rerank MODEL."),
        ("translate A FILE --rerank B --terms FILE", "leave out --rerank."),
        ("evaluate A B --ensemble EN-DE --source FILE --reference FILE", "--ensemble is for one model, but 2 are"),
        ("evaluate A B --rerank EN-DE --source FILE --reference FILE", "--rerank is for one model, but 2 are named"),
        ("evaluate --hypotheses FILE --reference FILE --ensemble A", "there is no model to run; leave out --ensemble."),
    ],
)
def test_refused_with_one_sentence(manyheads, folders, capsys, arguments, message):
    words = arguments.split()
    assert manyheads(words[0], *(str(folders.get(word, word)) for word in words[1:])) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
