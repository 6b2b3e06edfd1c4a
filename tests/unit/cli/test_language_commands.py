"""A language model from end to end: trained, evaluated, scored and asked for text, by the commands of translators."""

import gzip
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.cli.main import main
from manyheads.decoding.generator import Generator
from manyheads.decoding.options import GenerationOptions
from manyheads.errors import ConfigError
from manyheads.models.pretrained import save_pretrained
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.tasks.language_modelling.score import score_texts
from manyheads.text.vocabulary import ByteVocabulary

Cli = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("language") / "run"
    more = ["--training.max-steps=6", "--validation.every-steps=3", "--training.plots=False", "--quiet"]
    assert main(["train", "--preset", "xl-debug", f"--run-dir={place}", *more]) == 0
    return place


def test_training_says_what_comes_next(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"--run-dir={run}", "--quiet"]) == 0  # again: there is nothing left to do
    assert f"generate {run}" in capsys.readouterr().out
    assert "text        " in (run / "train.log").read_text(encoding="utf-8")


def test_settings_of_another_architecture_are_refused(manyheads, printed, capsys):
    cases = [
        (["--preset", "xl-debug", "--data.max-tokens", "9"], "there is no setting data.max_tokens"),
        (["--preset", "debug", "--model.architecture", "transformer-xl"], "model.architecture is set twice"),
        (["--model.architecture", "transformer-xxl", "--data.path", "x"], "Did you mean transformer-xl?"),
        (["--preset", "xl-debug", "--data.lanes", "0"], "data.lanes is 0"),
        (["--preset", "xl-debug", "--reading.segment-len", "0"], "segment_len is 0"),
        (["--preset", "xl-debug", "--generation.temperature", "0"], "temperature is 0"),
    ]
    for arguments, message in cases:
        assert manyheads("train", *arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err, captured.err
    shown = printed("train", "--preset", "xl-debug", "--help")
    assert "--reading.memory_len" in shown
    assert "bleu_sentences" not in shown


def test_evaluate_prints_its_protocol(run, manyheads, printed, capsys):
    shown = printed("evaluate", run, "--split", "valid", "--max-tokens", "900")
    for part in (
        "perplexity = ",
        "nats/token",
        "tokens, each once; unit bytes",
        "segment 32, memory 32, clamp none, same length no, 8 lanes, documents joined",
    ):
        assert part in shown
    assert "bits/byte" not in shown  # of a part of the text nobody knows how many bytes it is
    options = ["--segment-len", "16", "--clamp-len", "5", "--same-length", "yes", "--lanes", "3", "--json"]
    record = json.loads(printed("evaluate", run, "--memory-len", "0", "8", "--max-tokens", "500", *options))
    assert [result["reading"]["memory_len"] for result in record["results"]] == [0, 8]
    first = record["results"][0]
    assert first["reading"] == {
        "segment_len": 16, "memory_len": 0, "clamp_len": 5, "same_length": True, "ext_len": 0, "lanes": 3,
        "documents": "joined", "max_tokens": 500,
    }  # fmt: skip
    assert first["perplexity"] == pytest.approx(math.exp(first["nats_per_token"]))
    assert [Path(path).name for path in record["pictures"]] == ["loss-by-memory.png", "loss-by-memory.svg"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert manyheads("evaluate", run, "--memory-len", "0", "8", "--max-tokens", "500", *options) == 0
    without = capsys.readouterr()
    assert json.loads(without.out) == {**record, "pictures": []}
    assert "no picture: plots need matplotlib" in without.err


def test_progress_is_shown(run: Path, manyheads: Cli, tmp_path: Path, told: Callable[[], dict[str, list[str]]]) -> None:
    assert manyheads("evaluate", run, "--split", "valid", "--max-tokens", "900") == 0
    shown = told()
    assert list(shown) == ["loading the model", "reading the text", "scoring tokens"]
    counts = [
        int(count.partition(" of 900")[0]) for count in shown["scoring tokens"]
    ]  # on a slow machine a time follows
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert 890 < counts[-1] <= 900
    arguments = ["--memory-len", "0", "8", "--max-tokens", "500", "--plot", tmp_path / "plot"]
    assert manyheads("evaluate", run, *arguments) == 0
    assert list(told())[2:] == ["scoring tokens, memory 0", "scoring tokens, memory 8"]
    (tmp_path / "in.txt").write_text("a\nb\nc\nd\n", encoding="utf-8")
    assert manyheads("score", run, "--text", tmp_path / "in.txt", "--max-rows", "2") == 0
    assert told()["scoring lines"] == ["0", "2", "4"]


def test_evaluate_a_file_is_what_score_says(run, printed, tmp_path):
    """One lane with a memory over everything is the text read at once; the first byte has nothing before it."""
    text = "He opened the door, and \u00fcber all. Once more."
    (tmp_path / "text.gz").write_bytes(gzip.compress(text.encode()))
    arguments = ["--text", tmp_path / "text.gz", "--segment-len", "7", "--memory-len", "100", "--lanes", "1", "--json"]
    [result] = json.loads(printed("evaluate", run, *arguments))["results"]
    generator = Generator.from_pretrained(run, "cpu")
    with torch.no_grad():
        ids = torch.tensor([list(text.encode())])
        expected = -generator.model.log_probs(ids)[0, :-1].gather(1, ids[0, 1:, None]).double().sum().item()
    size = len(text.encode())
    assert result["tokens"] == size - 1
    assert result["nats_per_token"] * (size - 1) == pytest.approx(expected, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(expected / math.log(2) / size, rel=1e-5)
    assert result["counts"] == {"bytes": size, "characters": len(text), "words": 9, "lines": 0}


def test_score(run: Path, manyheads: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["He opened", "", "a", "Zürich " * 100]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert manyheads("score", run, "--text", tmp_path / "in.txt", "--max-rows", "2") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [row[1] for row in rows] == ["9", "0", "1", "800"]
    generator = Generator.from_pretrained(run, "cpu")
    alone = [score_texts(generator, [line])[0] for line in lines]
    for row, scored in zip(rows, alone, strict=True):
        assert float(row[0]) == pytest.approx(scored.sum_log_prob, rel=1e-4)
    with torch.no_grad():
        tokens = torch.tensor([[10, *b"He opened"]])  # a text begins after a line break
        log_probs = generator.model.log_probs(tokens)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert alone[0].token_log_probs == pytest.approx(log_probs.tolist(), abs=1e-4)
    assert manyheads("score", run, "--text", tmp_path / "in.txt", "--tokens") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [record["line"] for record in records] == [1, 2, 3, 4]
    assert records[0]["tokens"][:3] == ["H", "e", "▁"]


def test_score_names_a_line_that_is_longer_than_the_models_positions(manyheads, tmp_path, capsys):
    config = replace(REFORMERS["debug"], vocab_size=256)
    save_pretrained(build_model(config), tmp_path / "model", tokenizer=ByteVocabulary())
    (tmp_path / "in.txt").write_text(f"a\n\n{'b' * config.max_len}\n", encoding="utf-8")
    assert manyheads("score", tmp_path / "model", "--text", tmp_path / "in.txt") == 0
    (tmp_path / "in.txt").write_text(f"a\n\n{'b' * (config.max_len + 1)}\n", encoding="utf-8")
    assert manyheads("score", tmp_path / "model", "--text", tmp_path / "in.txt") == 2
    message = "in.txt: line 3 has 65 tokens, but the model has 64 positions; split it."
    assert message in " ".join(capsys.readouterr().err.split())


def test_generate(run, manyheads, printed, refused, tmp_path, stdin, capsys):
    short = ["--max-new-tokens", "12", "--seed", "3"]
    text = printed("generate", run, "He opened", *short)
    expected = Generator.from_pretrained(run, "cpu").generate("He opened", max_new_tokens=12, seed=3)
    assert text == f"{expected}\n"
    stdin(b"He opened\n")
    assert printed("generate", run, *short) == text
    stdin(b"He \xff\n")
    assert "commands with --on-bad-utf8 can replace such bytes" in refused("generate", run, *short)
    stdin(b"He \xff\n")
    assert manyheads("generate", run, *short, "--on-bad-utf8", "replace") == 0
    assert "lines that are not UTF-8, bad bytes replaced: 1" in capsys.readouterr().err
    assert printed("generate", run, "He opened", *short, "--echo") == f"He opened{text}"
    stdin(b"He opened\n\nIt\n")
    assert manyheads("generate", run, "--lines", "--json", "--count", "2", *short) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [record["prompt"] for record in records] == ["He opened", "", "It"]
    assert records[0]["continuations"][0]["text"] == expected
    assert all(len(record["continuations"]) == 2 for record in records)
    assert manyheads("generate", run, "It", "--count", "2", *short, "--output", tmp_path / "out.txt") == 0
    assert b"\n---\n" in (tmp_path / "out.txt").read_bytes()
    assert manyheads("generate", run, "It", "--greedy", *short[:2]) == 0


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.compiles
def test_compiled_it_writes_the_same(run, manyheads, compiled_folder, capsys):
    shown = []
    for options in ([], ["--compile"]):
        assert manyheads("generate", run, "He opened", "--max-new-tokens", "30", "--seed", "3", *options) == 0
        shown.append(capsys.readouterr())
    assert shown[0].out == shown[1].out
    assert shown[1].err == "Compiling: half a minute the first time, some seconds from the cache.\n"
    assert any(compiled_folder.rglob("*.so"))


def test_options_of_drawing_draw() -> None:
    """Also where the model's settings take the likeliest token."""
    assert GenerationOptions(top_k=3).overrides()["do_sample"] is True
    assert GenerationOptions(greedy=True).overrides()["do_sample"] is False
    assert "do_sample" not in GenerationOptions(seed=1).overrides()
    with pytest.raises(ConfigError, match="--seed has no effect"):
        GenerationOptions(greedy=True, seed=1).overrides()


def test_mistakes_name_the_right_command(run, model_folder, manyheads, tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(b"a text\n")
    shutil.copytree(run / "model", tmp_path / "alone")
    cases: list[tuple[list[str | Path], str]] = [
        (["generate", model_folder, "a"], "translates; use `manyheads translate`"),
        (["translate", run, tmp_path / "text.txt"], "language model"),
        (["generate", run, "a", "--lines"], "give one of them"),
        (["generate", run, "a", "--greedy", "--top-k", "3"], "--top-k has no effect"),
        (["generate", run, "a", "--temperature", "0"], "temperature is 0.0"),
        (["generate", run, "a", "--count", "2", "--greedy"], "would be the same"),
        (["generate", run, "--input", tmp_path / "no.txt"], "no.txt"),
        (["evaluate", run, "--text", tmp_path / "text.txt", "--split", "test"], "leave out --data"),
        (["evaluate", run, "--plot", "x.png"], "--memory-len two values"),
        (["evaluate", run, "--data", tmp_path], "no"),
        (["evaluate", run, "--memory-len", "-1"], "memory_len is -1"),
        (["evaluate", tmp_path / "alone"], "give --data FOLDER, or --text FILE"),
        (
            ["evaluate", tmp_path / "alone", "--text", tmp_path / "text.txt", "--dynamic", "rms"],
            "give --dynamic-statistics FILE",
        ),
        (["evaluate", run, "--recl-step", "5"], "--recl-step cannot be used without --recl"),
        (["score", run, "--text", tmp_path / "text.txt", "--max-rows", "0"], "--max-rows is 0"),
    ]
    for arguments, message in cases:
        assert manyheads(*arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err, (arguments, captured.err)
        assert "Traceback" not in captured.err


def test_info(run, printed):
    record = json.loads(printed("info", run / "model", "--json"))
    assert record["architecture"] == "transformer-xl"
    assert record["tokenizer"]["documents"] == "none"
    assert record["decoding"]["max_new_tokens"] == 200


def test_recl_compares_models(run, manyheads, printed, capsys):
    base = ["evaluate", run, "--recl", "--max-tokens", "600", "--recl-step", "20", "--recl-longest", "80"]
    shown = printed(*base, "--beside", run / "model", "--recl-hardest", "0.1", "1")
    for part in ("RECL, in tokens", "r = 0.1", "r = 1", "perplexity by context", "scored     26 tokens, one in 20"):
        assert part in shown, shown
    found = json.loads(printed(*base, "--beside", run / "model", "--json"))
    assert found["protocol"]["contexts"] == [20, 40, 60, 80]
    first, second = found["results"]
    assert first["recl"] == second["recl"]
    assert set(first["recl"]) == {"0.1", "0.5", "1.0"}
    for wrong, message in [
        ([], "--recl compares two models or more"),
        (["--beside", run], "is named twice; name each model once"),
        (["--beside", run / "model", "--lanes", "2"], "leave out --lanes"),
        (["--beside", run / "model", "--documents", "joined"], "leave out --documents"),
        (["--beside", run / "model", "--same-length", "yes"], "leave out --same-length"),
        (["--beside", run / "model", "--memory-len", "4"], "leave out --memory-len"),
        (["--beside", run / "model", "--recl-hardest", "0"], "--recl-hardest holds 0"),
        (["--beside", run / "model", "--recl-longest", "30"], "less than two steps of 20"),
        (["--beside", run / "model", "--max-tokens", "30", "--recl-longest", "40"], "the text has at most 29"),
    ]:
        pairs = [pair for pair in zip(base[3::2], base[4::2], strict=True) if pair[0] not in wrong]
        assert manyheads(*base[:3], *(one for pair in pairs for one in pair), *wrong) == 2, wrong
        assert message in capsys.readouterr().err
    text = run.parent / "short.txt"
    text.write_text("he opened the door and went in. " * 4)
    short = ["evaluate", run, "--recl", "--beside", run / "model", "--text", text, "--recl-step", "20"]
    whole = json.loads(printed(*short, "--json"))
    assert manyheads(*short, "--max-tokens", "100000", "--json") == 0  # more than the text has
    assert json.loads(capsys.readouterr().out) == whole


@pytest.fixture(scope="module")
def damaged(run: Path) -> Path:
    """The model with NaN in its weights."""
    model = Generator.from_pretrained(run)
    with torch.no_grad():
        next(model.model.parameters()).fill_(math.nan)
    model.save_pretrained(run.parent / "damaged")
    return run.parent / "damaged"


@pytest.mark.parametrize("more", [["--recl", "--beside", "RUN"], [], ["--dynamic", "sgd", "--dynamic-rate", "0.1"]])
def test_a_model_that_gives_nan_is_not_judged(run, damaged, more, manyheads, refused, tmp_path, capsys):
    """No comparison with NaN is true, so its context would seem to help at every length."""
    (tmp_path / "text").write_text("he opened the door and went in. " * 40, encoding="utf-8")
    more = [str(run) if word == "RUN" else word for word in more]
    steps = ["--recl-step", "20", "--recl-longest", "80"] if more[:1] == ["--recl"] else []
    assert manyheads("evaluate", damaged, "--text", tmp_path / "text", *more, *steps) == 2
    shown = capsys.readouterr()
    assert "gave NaN log-probabilities for this text; its weights are damaged" in shown.err
    assert (f"{damaged} gave" in shown.err) == bool(steps)
    assert "learning rate" not in shown.err
    assert shown.out == ""
    assert "gave NaN log-probabilities" in refused("score", damaged, "--text", tmp_path / "text")


def test_dynamic_evaluation_says_what_it_is(run, printed):
    folder = run / "model"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    some = ["evaluate", run, "--split", "valid", "--max-tokens", "300", "--precision", "fp32"]
    shown = printed(*some, "--dynamic", "rms", "--dynamic-tokens", "5000")
    assert "(dynamic evaluation)" in shown
    assert "weights are adapted to the test text as it is read; not comparable with static figures" in shown
    assert "gradients of 5,000 tokens of" in shown
    assert " 1 lanes" in shown
    result = json.loads(printed(*some, "--dynamic", "sgd", "--dynamic-rate", "0.1", "--json"))["results"][0]
    assert result["dynamic"]["kind"] == "sgd"
    assert "not comparable" in result["dynamic"]["note"]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_dynamic_evaluation_refuses(run: Path, manyheads: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["--dynamic-rate", "0.1"], "--dynamic-rate cannot be used without --dynamic"),
        (["--dynamic", "sgd"], "--dynamic sgd has no usual learning rate"),
        (["--dynamic", "sgd", "--dynamic-rate", "1", "--dynamic-tokens", "9"], "--dynamic sgd uses no statistics"),
        (["--dynamic", "rms", "--dry-run"], "leave out --dry-run"),
        (["--dynamic", "rms", "--dynamic-decay", "2"], "--dynamic-decay is 2"),
        (["--dynamic", "rms", "--dynamic-rate", "-1"], "--dynamic-rate is -1"),
        (["--dynamic", "rms", "--dynamic-statistics", "nowhere.txt"], "nowhere.txt"),
        ([run, "--dynamic", "rms"], "named twice"),
    ]
    for arguments, message in cases:
        assert manyheads("evaluate", run, "--precision", "fp32", *arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err, captured.err
        assert "Traceback" not in captured.err
