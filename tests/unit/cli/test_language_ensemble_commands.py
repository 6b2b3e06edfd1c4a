"""`--ensemble` of `generate`, `evaluate` and `score` for language models, as a user gives it."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.cli.commands.generate import ContinuationLines, GenerateOptions
from manyheads.data.settings import DUPLICATION
from manyheads.data.store import TokenStore
from manyheads.decoding.generator import Generator
from manyheads.decoding.options import EnsembleOptions
from manyheads.decoding.settings import GenerationSettings
from manyheads.evaluation.likelihood import EnsembleReading, evaluate_text
from manyheads.evaluation.reading import Reading
from manyheads.models.pretrained import save_pretrained
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.options import ScoreOptions
from manyheads.tasks.language_modelling.score import score, score_texts
from manyheads.text.vocabulary import ByteVocabulary

Cli = Callable[..., int]
Folders = dict[str, Path]
XL = TransformerXLConfig(vocab_size=256, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=12, dropout=0.0)
LINES = ["It is a truth universally acknowledged,", "that a single man", "", "must be in want of a wife."]


def save(folder: Path, config: Any, seed: int, run: str = "", documents: Any = "none") -> Path:
    """A run folder, or with run "" a model folder."""
    vocabulary = ByteVocabulary(documents)
    torch.manual_seed(seed)
    model = build_model(replace(config, vocab_size=vocabulary.vocab_size))
    for parameter in model.parameters():
        parameter.data *= 6  # a model of strong opinions
    settings = GenerationSettings(max_new_tokens=8)
    save_pretrained(model, folder / "model" if run else folder, tokenizer=vocabulary, generation=settings)
    if run:
        (folder / "config.yaml").write_text(run, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Runs with unlike memories, a model without memory, one of another vocabulary, one of the duplication task."""
    root = tmp_path_factory.mktemp("ensemble")
    text = root / "TEXT"
    text.write_text("".join(f"{line}\n" for line in LINES * 5), encoding="utf-8")
    reading = "reading: {{segment_len: {}, memory_len: {}, lanes: {}}}\n"
    duplication = f"seed: 1\ndata: {{path: '{DUPLICATION}', segment_len: 16}}\n"
    return {
        "A": save(root / "a", XL, 1, reading.format(8, 5, 2)),
        "B": save(root / "b", replace(XL, d_model=12, num_layers=1), 2, reading.format(16, 7, 4)),
        "R": save(root / "models" / "reformer", REFORMERS["debug"], 3),
        "OTHER": save(root / "models" / "other", XL, 4, documents="files"),
        "D": save(root / "d", REFORMERS["debug"], 5, duplication),
        "TEXT": text,
        "PICTURE": root / "PICTURE",
    }


def test_written_from_the_average(manyheads: Cli, folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    others = ("--ensemble", folders["B"], folders["R"])
    averaged = Generator.from_pretrained([folders[name] for name in ("A", "B", "R")], "cpu")
    alone = Generator.from_pretrained(folders["A"], "cpu")
    for options, settings in ((("--greedy",), {"do_sample": False}), (("--seed", "3"), {"seed": 3})):
        assert manyheads("generate", folders["A"], "It is", *options, "--verbose", *others) == 0
        told = capsys.readouterr()
        expected = averaged.generate("It is", **settings)  # type: ignore[arg-type]
        assert told.out == f"{expected}\n" != f"{alone.generate('It is', **settings)}\n"  # type: ignore[arg-type]
        assert f"{folders['A']} + {folders['B']} + {folders['R']} on " in told.err
    assert manyheads("generate", folders["A"], "--lines", "--input", folders["TEXT"], "--json", *others) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    found = averaged.continuations(LINES * 5)
    assert [one["continuations"][0]["token_log_probs"] for one in records] == [
        pytest.approx(rows[0].log_probs, abs=1e-5) for rows in found
    ]


def test_scored_by_the_average(manyheads: Cli, folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert manyheads("score", folders["A"], "--text", folders["TEXT"], "--ensemble", folders["B"], folders["R"]) == 0
    sums = [float(line.split("\t")[0]) for line in capsys.readouterr().out.split("\n")[:-1]]
    averaged = Generator.from_pretrained([folders[name] for name in ("A", "B", "R")], "cpu")
    assert sums == pytest.approx([one.sum_log_prob for one in score_texts(averaged, LINES * 5)], abs=1e-3)


def test_evaluated_as_one(printed, folders):
    """In segments as the first model's run, each with the memory of its own run."""
    text = ("--text", folders["TEXT"])
    content = folders["TEXT"].read_bytes()
    given = ("evaluate", folders["A"], *text, "--ensemble", folders["B"], folders["R"])
    found = json.loads(printed(*given, "--json"))
    averaged = Generator.from_pretrained([folders[name] for name in ("A", "B", "R")], "cpu")
    reading = EnsembleReading(
        segment_len=8, memory_len=5, lanes=2, others=(Reading(memory_len=7), Reading(memory_len=None))
    )
    store = TokenStore.from_lists([list(content)], 256)
    wanted = evaluate_text(averaged.model, store, reading, averaged.vocabulary)
    [result], protocol = found["results"], found["protocol"]
    assert result["tokens"] == wanted.num_tokens == len(content) - 1
    assert result["nats_per_token"] == pytest.approx(wanted.nats_per_token, rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(wanted.nll_sum / math.log(2) / len(content), rel=1e-6)
    assert (result["reading"]["segment_len"], result["reading"]["lanes"]) == (8, 2)
    memories = [result["reading"], *result["reading"]["ensemble"]]
    assert [one["memory_len"] for one in memories] == [5, 7, None]
    assert protocol["ensemble"] == [str(folders["B"]), str(folders["R"])]
    assert protocol["parameters"] == sum(one.numel() for one in averaged.model.parameters())

    shown = printed(*given)
    assert f"  model      {folders['A']} + {folders['B']} + {folders['R']}, " in shown
    assert "segment 8, memory 5, clamp none, same length no, 2 lanes, documents joined\n" in shown
    assert f"             {folders['B']}: memory 7, clamp none, same length no\n" in shown
    assert f"             {folders['R']}: memory 0, clamp none, same length no\n" in shown

    alone = json.loads(printed("evaluate", folders["A"], *text, "--json"))
    assert "ensemble" not in alone["protocol"]
    assert "ensemble" not in alone["results"][0]["reading"]
    [twice] = json.loads(printed("evaluate", folders["A"], *text, "--ensemble", folders["A"], "--json"))["results"]
    assert twice["nats_per_token"] == pytest.approx(alone["results"][0]["nats_per_token"], rel=1e-6)
    assert f"{folders['A']}: memory" not in printed("evaluate", folders["A"], *text, "--ensemble", folders["A"])


def test_several_memories_of_all_models(manyheads, printed, folders, capsys):
    text = ("--text", folders["TEXT"], "--max-tokens", "60", "--memory-len", "0", "9")
    found = json.loads(printed("evaluate", folders["A"], *text, "--ensemble", folders["B"], "--json"))
    memories = [[one["reading"]["memory_len"], one["reading"]["ensemble"][0]["memory_len"]] for one in found["results"]]
    assert memories == [[0, 0], [9, 9]]
    assert [Path(path).stem for path in found["pictures"]] == ["loss-by-memory-ensemble"] * 2
    assert manyheads("evaluate", folders["A"], *text, "--ensemble", folders["B"], "--plot", folders["PICTURE"]) == 0
    assert "memory as in the table" in capsys.readouterr().out


def test_a_dry_run(printed, folders):
    given = ("evaluate", folders["A"], "--text", folders["TEXT"], "--dry-run", "--ensemble", folders["R"], folders["B"])
    found = json.loads(printed(*given, "--json"))
    assert found["dry_run"][0]["memory_len"] == 7
    assert found["protocol"]["ensemble"] == [str(folders["R"]), str(folders["B"])]


def test_what_resumed_work_depends_on(folders: Folders) -> None:
    """The contents of all models, not their names."""
    models = EnsembleOptions(ensemble=(str(folders["R"]),))
    digest = hashlib.sha256((folders["R"] / "manifest.json").read_bytes()).hexdigest()
    work = score(ScoreOptions(model=str(folders["A"]), text=str(folders["TEXT"]), models=models), lambda *_: None)
    assert work.identity["ensemble"] == [digest]
    options = GenerateOptions(model=str(folders["A"]), input=str(folders["TEXT"]), lines=True, models=models)
    generator = Generator.from_pretrained([folders["A"], folders["R"]], "cpu")
    assert ContinuationLines(generator, options).job().identity["ensemble"] == [digest]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate A It --ensemble OTHER", "has documents files, but that of "),
        ("score A --text TEXT --ensemble OTHER", "so their probabilities cannot be averaged; train the models of an"),
        ("evaluate A --text TEXT --ensemble B OTHER", "on data with the same vocabulary."),
        ("generate A It --ensemble B nowhere", "there is no folder nowhere"),
        ("generate A It --ensemble R --compile", "steps of this ensemble cannot be compiled"),
        ("generate A It --ensemble R --memory-len 9", "memory_len is 9, but a reformer sees all that it has read"),
        ("generate A It --ensemble B --precision int8", "precision is 'int8'; choose one of: auto, fp32, bf16"),
        ("evaluate A --text TEXT --ensemble R --memory-len 9", "memory_len is 9, but a reformer has no memory"),
        ("evaluate A --text TEXT --ensemble R --ext-len 4", "ext_len is 4, but a reformer has no memory"),
        ("evaluate A --text TEXT --ensemble B --dynamic rms", "--dynamic is for one model, but --ensemble"),
        ("evaluate R --text TEXT --ensemble B --num-hashes 2", "--num-hashes is for one model, but"),
        ("evaluate A --text TEXT --recl --beside B --ensemble R", "--recl is for one model, but"),
        ("evaluate A B --text TEXT --ensemble R", "--ensemble is for one model, but 2 are named; leave it out."),
        ("evaluate D --ensemble R", "--ensemble cannot be used on the duplication task"),
        ("evaluate D --dry-run --memory-len 2", "--dry-run and --memory-len cannot be used on the duplication task"),
        ("evaluate R --text TEXT --max-tokens 40 --num-hashes 2 --beside OTHER", "has another vocabulary than"),
    ],
)
def test_refused_with_one_sentence(manyheads, folders, capsys, arguments, message):
    words = arguments.split()
    assert manyheads(words[0], *(str(folders.get(word, word)) for word in words[1:])) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_a_duplication_model_reads_other_texts(printed, folders):
    given = ("--text", folders["TEXT"], "--segment-len", "32", "--ensemble", folders["R"])
    assert f"{folders['D']} + {folders['R']}, " in printed("evaluate", folders["D"], *given)
