"""The engine of exports, the command, and `translate --engine`."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from export_models import LINES, write_transformer

from manyheads.cli.main import main
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, MissingExtraError, ModelFileError, RequestError
from manyheads.extras.exports import EXPORTS, Check, ExportOptions
from manyheads.extras.exports.engine import export_model, sample_sentences, tokenizer_of
from manyheads.extras.parsing.tokenizer import ParsingTokenizer

MISSING = {"ctranslate2": "[ct2]", "transformers": "[hf]"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Transformer with a tokenizer; not to be changed."""
    return write_transformer(tmp_path_factory.mktemp("export") / "model", norm_position="pre")


def test_the_command_tells_what_it_wrote(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["export", str(model), "--to", "torch/Transformer", "--output", str(out)]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "torch/Transformer"
    assert said["num_bytes"] == sum(path.stat().st_size for path in out.iterdir() if path.name != "manifest.json")
    assert "not a runtime" in said["not_checked"]
    assert main(command) == 2
    assert f"{out} exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "ctranslate"), "Did you mean ctranslate2?"),
        (("--to", "transformers", "--quantization", "int8"), "this format has none"),
        (("--to", "ctranslate2", "--quantization", "int4"), "one of int8, int16, float16, bfloat16"),
    ],
)
def test_bad_options(options, said, model, tmp_path, capsys):
    assert main(["export", str(model), *options, "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_runtime_is_told_with_its_remedy(name, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    if name == "transformers":  # written without its runtime, but not compared
        assert MISSING[name] in export_model(model, tmp_path / "out", ExportOptions(to=name)).not_checked
        return
    with pytest.raises(MissingExtraError, match=r"pip install .*\[ct2\]"):
        export_model(model, tmp_path / "out", ExportOptions(to=name))
    with pytest.raises(MissingExtraError, match=r"pip install .*\[ct2\]"):
        Translator.from_pretrained(model, device="cpu", precision="int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [2e-3, float("nan")])
def test_an_export_that_deviates_is_not_written(value, model, tmp_path, monkeypatch):
    from manyheads.extras.exports import transformers

    check = Check(what="log-probabilities", deviation=value, limit=1e-3, num_sentences=20, num_equal=1)
    monkeypatch.setattr(transformers, "deviation", lambda *_: check)
    with pytest.raises(ModelFileError, match="--no-check"):
        export_model(model, tmp_path / "out", ExportOptions(to="torch/Transformer"))
    assert not list(tmp_path.iterdir())
    export_model(model, tmp_path / "out", ExportOptions(to="torch/Transformer"), check=False)


def test_sentences_are_the_same_each_time_and_without_special_ids() -> None:
    config: Any = type("Config", (), {"source_vocab_size": 50})
    found = sample_sentences(config)
    assert found == sample_sentences(config)
    assert {len(ids) for ids in found} == set(range(3, 23))
    assert all(4 <= index < 50 for ids in found for index in ids)


def test_every_format_has_its_module_and_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name, one in EXPORTS.items():
        assert name == one.name
        assert f"{name} ({one.summary}" in said


@pytest.fixture(scope="module")
def translators(tmp_path_factory: pytest.TempPathFactory) -> tuple[Translator, ...]:
    """The same model with our own search, with CTranslate2's, and with that in int8."""
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    folder = write_transformer(tmp_path_factory.mktemp("engine") / "model", norm_position="pre")
    return (
        Translator.from_pretrained(folder, device="cpu"),
        Translator.from_pretrained(folder, device="cpu", engine="ctranslate2"),
        Translator.from_pretrained(folder, device="cpu", precision="int8"),
    )


class TestEngine:
    """Needs CTranslate2."""

    @pytest.fixture(autouse=True)
    def _needs_the_runtime(self) -> None:
        pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")

    def test_greedy_outputs_are_equal_at_every_limit(self, translators: tuple[Translator, ...]) -> None:
        texts = [*LINES, "", "a cat and a dog " * 5]
        for limits in ({"max_len_ratio": 1.0, "max_len_offset": 2}, {"max_new_tokens": 7}):
            options: Any = {"num_beams": 1, "length_penalty_kind": "power", "length_penalty": 0.6, **limits}
            ours = translators[0].translate_nbest(texts, **options, renormalize_logits=True)
            theirs = translators[1].translate_nbest(texts, **options)
            assert [one[0].text for one in ours] == [one[0].text for one in theirs]
            assert [one[0].score for one in theirs] == pytest.approx([one[0].score for one in ours], abs=1e-3)

    def test_beams_have_our_scores(self, translators: tuple[Translator, ...]) -> None:
        options: Any = {"num_beams": 3, "num_return_sequences": 3, "length_penalty_kind": "power", "max_new_tokens": 9}
        ours, theirs = (one.translate_nbest(LINES, **options, renormalize_logits=True) for one in translators[:2])
        best = {(number, *found.tokens): found.score for number, rows in enumerate(ours) for found in rows}
        found = [((number, *one.tokens), one.score) for number, rows in enumerate(theirs) for one in rows]
        common = [(score, best[key]) for key, score in found if key in best]
        assert len(common) >= 6
        assert all(abs(a - b) < 1e-3 for a, b in common)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"num_beams": 4}, "length_penalty_kind 'gnmt'"),
            ({"do_sample": True}, "do_sample True"),
            ({"num_beams": 1, "no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3"),
            ({"num_beams": 2, "length_penalty": 0.0, "rules": "marian"}, "rules 'marian'"),
        ],
    )
    def test_what_it_cannot_search_is_refused(self, options, said, translators):
        with pytest.raises(RequestError, match=said):
            translators[1].translate("the cat", **options)

    def test_a_long_source_is_refused(self, translators: tuple[Translator, ...]) -> None:
        with pytest.raises(RequestError, match="at most 2048"):
            translators[1].translate("a " * 3000, num_beams=1)

    def test_the_export_is_kept_and_made_anew_for_other_weights(self, tmp_path: Path) -> None:
        folder = write_transformer(tmp_path / "model")
        Translator.from_pretrained(folder, device="cpu", engine="ctranslate2")
        [first] = (tmp_path / "model.ctranslate2").iterdir()
        before = (first / "model.bin").stat().st_mtime_ns
        Translator.from_pretrained(folder, device="cpu", engine="ctranslate2")
        assert (first / "model.bin").stat().st_mtime_ns == before
        (first / "model.bin").write_bytes(b"damaged")
        Translator.from_pretrained(folder, device="cpu", engine="ctranslate2")
        assert (first / "model.bin").stat().st_size > 1000
        write_transformer(folder, d_ff=32)
        Translator.from_pretrained(folder, device="cpu", engine="ctranslate2")
        [second] = (tmp_path / "model.ctranslate2").iterdir()
        assert second.name != first.name

    def test_only_exports_are_deleted_and_only_of_this_model(self, tmp_path: Path) -> None:
        for name in ("one", "other"):
            Translator.from_pretrained(write_transformer(tmp_path / name), device="cpu", engine="ctranslate2")
        place = tmp_path / "one.ctranslate2"
        (place / "notes.txt").write_text("mine", encoding="utf-8")
        (place / "0123456789abcdef").symlink_to(tmp_path / "other")
        write_transformer(tmp_path / "one", d_ff=32)
        Translator.from_pretrained(tmp_path / "one", device="cpu", engine="ctranslate2")
        assert len(list(place.iterdir())) == 3
        assert (tmp_path / "other" / "config.json").exists()
        assert len(list((tmp_path / "other.ctranslate2").iterdir())) == 1

    def test_in_the_users_cache_each_model_keeps_its_newest(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for name in ("one", "other"):
            (tmp_path / f"{name}.ctranslate2").write_text("no folder can have this name", encoding="utf-8")
            for d_ff in (16, 32):
                folder = write_transformer(tmp_path / name, d_ff=d_ff)
                Translator.from_pretrained(folder, device="cpu", engine="ctranslate2")
        places = list((tmp_path / "cache" / "manyheads" / "ctranslate2").iterdir())
        assert [len(list(place.iterdir())) for place in places] == [1, 1]

    @pytest.mark.parametrize(("seconds", "taken"), [(1.0, "ctranslate2"), (9.0, "torch")])
    def test_auto_takes_the_faster_one_and_measures_once(self, seconds, taken, tmp_path, monkeypatch):
        folder = write_transformer(tmp_path / "model")
        translator = Translator.from_pretrained(folder, device="cpu", engine="auto")
        from manyheads.extras.exports import ctranslate2

        times = iter([0.0, seconds, 10.0, 13.0])
        monkeypatch.setattr(ctranslate2, "time", SimpleNamespace(perf_counter=lambda: next(times)))
        settings = translator.options(num_beams=1, max_new_tokens=5)
        assert translator.search.choose_engine(settings).startswith(f"engine {taken}: ")
        assert translator.search.choose_engine(settings).startswith(f"engine {taken}: ")  # the times are used up
        found = translator.translate_nbest("the cat", num_beams=1, max_new_tokens=5)[0]
        assert (found.token_log_probs == []) == (taken == "ctranslate2")
        assert "gnmt" in translator.search.choose_engine(translator.options(num_beams=4))

    def test_auto_says_why_a_model_is_not_held(self, tmp_path: Path) -> None:
        folder = write_transformer(tmp_path / "model", activation="mish")
        translator = Translator.from_pretrained(folder, device="cpu", engine="auto")
        assert "model.activation 'mish'" in translator.search.choose_engine(translator.options())
        assert isinstance(translator.translate("the cat", num_beams=1, max_new_tokens=3), str)
        with pytest.raises(ConfigError, match="mish"):
            Translator.from_pretrained(folder, device="cpu", engine="ctranslate2")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_other_ways_to_run_are_refused(self, model: Path) -> None:
        with pytest.raises(RequestError, match="precision bf16"):
            Translator.from_pretrained(model, device="cpu", precision="bf16", engine="ctranslate2")
        wrong: Any = "onnx"
        with pytest.raises(RequestError, match="one of torch, ctranslate2, auto"):
            Translator.from_pretrained(model, device="cpu", engine=wrong)

    def test_int8_rounds_the_search_and_nothing_else(self, translators: tuple[Translator, ...]) -> None:
        ours, theirs, narrow = translators
        assert (narrow.precision, narrow.runner.precision, theirs.precision) == ("int8", "fp32", "fp32")
        options: Any = {"num_beams": 1, "max_new_tokens": 5}
        assert narrow.search.choose_engine(narrow.options(**options)) == "engine ctranslate2 in int8"
        wide, rounded = (one.translate_nbest(LINES, **options) for one in (theirs, narrow))
        off = [abs(a[0].score - b[0].score) for a, b in zip(wide, rounded, strict=True)]
        assert max(off) > 1e-5  # float32 deviates by a tenth of that
        assert min(off) < 0.2
        assert narrow.score(LINES, LINES) == ours.score(LINES, LINES)
        with pytest.raises(RequestError, match=r"'gnmt' .* use precision fp32 or bf16"):
            narrow.translate("the cat", num_beams=4)

    def test_where_int8_is_refused(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(match: str, path: Any = model, **options: Any) -> None:
            with pytest.raises(RequestError, match=match):
                Translator.from_pretrained(path, **{"device": "cpu", "precision": "int8", **options})

        for engine in ("torch", "auto"):
            refused(f"the engine is {engine}; name ctranslate2 or none, or use precision fp32 or bf16", engine=engine)
        refused("searches one model, but 2 are given; use precision fp32", path=[model, model])
        whole = Translator.from_pretrained(model, device="cpu")
        with pytest.raises(RequestError, match=r"precision is int8, in which only .* use fp32, bf16 or auto"):
            Translator(whole.model, whole.tokenizer, precision=cast(Any, "int8"))
        import ctranslate2

        monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda device: {"float32"})
        refused("has no int8 products on this processor; use fp32")

    def test_the_command_line(self, tmp_path, capfd, monkeypatch):
        folder = write_transformer(tmp_path / "model")
        (tmp_path / "in.txt").write_text("the cat\nA dog\n", encoding="utf-8")
        command = ["translate", str(folder), str(tmp_path / "in.txt"), "--num-beams", "1", "--max-new-tokens", "6"]

        def run(*more: str) -> str:
            assert main([*command, "--output", str(tmp_path / "out.txt"), *more]) == 0
            return (tmp_path / "out.txt").read_text(encoding="utf-8")

        assert run("--engine", "ctranslate2") == run()
        assert "manyheads: engine ctranslate2" in capfd.readouterr().err
        assert main([*command, "--engine", "ctranslate2", "--json"]) == 2
        assert "use --engine torch" in capfd.readouterr().err
        assert len(run("--precision", "int8").splitlines()) == 2
        assert "manyheads: engine ctranslate2 in int8" in capfd.readouterr().err
        for more, said in (
            (("--json",), "--json gives token log-probabilities, which --precision int8 may not have"),
            (("--engine", "torch"), "only the engine ctranslate2 computes, but the engine is torch"),
            (("--ensemble", str(folder)), "--precision int8 searches one model, but 2 are named"),
        ):
            assert main([*command, "--precision", "int8", *more]) == 2
            assert said in capfd.readouterr().err


def test_a_parser_is_sent_to_the_command_that_writes_trees(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers with the text that the model writes."""
    monkeypatch.setattr(
        "manyheads.extras.exports.engine.load_tokenizer", lambda folder: object.__new__(ParsingTokenizer)
    )
    with pytest.raises(ConfigError, match=r"is a parser: .*; use manyheads translate, which writes trees\.$"):
        tokenizer_of(model, "onnx")
