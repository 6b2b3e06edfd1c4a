"""Output that is empty, or the same words again and again, is counted and told once, on standard error."""

import json
import tracemalloc
from pathlib import Path

import pytest

from manyheads.cli.lines.output import OutputCheck
from manyheads.decoding.generator import Generator
from manyheads.decoding.inputs_and_results import repeats_itself
from manyheads.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        ("Tom Tom Tom Tom Tom", True),
        ("Das ist ist ist ist ist ist.", True),
        ("Ich , , , , , , , , , ,", True),
        ("................", True),
        ("bebebebebebe", True),
        ("ich habe ich habe ich habe ich habe ich habe", True),
        ("Tom \n Tom \t Tom   Tom Tom Tom", True),
        ("", False),
        ("   ", False),
        ("Hallo!", False),
        ("Wenn Fliegen hinter Fliegen fliegen, fliegen Fliegen Fliegen nach.", False),
        ("Nein, nein, nein!", False),
        ("Das kostet 1000000000 Euro ...", False),
        ("100000000", False),
        # A short repetition in a long text.
        ("He laughed, ha ha ha ha ha ha, and went home with all of the others who had been there.", False),
    ],
)
def test_what_repeats_itself(text: str, repeats: bool) -> None:
    assert repeats_itself(text) == repeats


def test_a_long_text_takes_no_long_time() -> None:
    """The search is linear in the length: a pattern with two open ends would never come to an end here."""
    assert repeats_itself("a" * 300_000)
    assert not repeats_itself("".join(f"{number * number % 7919:04} " for number in range(60_000)))


def check() -> OutputCheck:
    return OutputCheck("translations", learn_more="train it longer.", forbid="--min-new-tokens 1 forbids them.")


def test_many_are_the_models_fault_and_few_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    known = check()
    for number in range(1, 9):
        known.see(number, "Hello.", "" if number > 2 else "Tom Tom Tom Tom Tom Tom")
    known.see(9, "Hello.", "Hallo.")
    known.report()
    known.report()
    assert capsys.readouterr().err == (
        "manyheads: warning: 8 of 9 translations are empty (6) or repeat the same words again and again (2)"
        " (lines 1, 2, 3, 4, 5, ...). The model has hardly learned: train it longer.\n"
    )
    few = check()
    for number in range(1, 10):
        few.see(number, "Hello.", "" if number == 4 else "Hallo.")
    few.report()
    assert capsys.readouterr().err == (
        "manyheads: warning: 1 of 9 translations is empty (line 4). --min-new-tokens 1 forbids them.\n"
    )


def test_what_the_source_repeats_may_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    known = check()
    known.see(1, "no, no, no, no, no, no", "nein, nein, nein, nein, nein, nein")
    known.report()
    assert capsys.readouterr().err == ""


def says(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Lets a model say these, one after the other, whatever its weights."""
    left = iter(texts)
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: next(left))


@pytest.mark.parametrize("form", [[], ["--json"], ["--nbest", "1"]])
def test_translate_warns_and_standard_output_holds_results_only(
    form, manyheads, model_folder, stdin, capsys, monkeypatch
):
    says(monkeypatch, "", "das das das das das")
    stdin(b"I am hungry.\n\nWhere?\n")
    assert manyheads("translate", model_folder, "--num-beams", "1", *form) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith(
        "manyheads: warning: 2 of 2 translations are empty (1) or repeat the same words again and again (1)"
        " (lines 1, 3). The model has hardly learned: "
    )
    assert f"info {model_folder}" in shown.err
    assert shown.err.count("\n") == 1
    lines = shown.out.split("\n")
    if not form:
        assert lines == ["", "", "das das das das das", ""]
    elif form == ["--json"]:
        assert [json.loads(line)["translations"][0]["text"] for line in lines[:-1]] == ["", "", "das das das das das"]


def test_translate_says_nothing_of_empty_lines(manyheads, model_folder, stdin, capsys, monkeypatch):
    says(monkeypatch, "Hallo.")
    stdin(b"\n   \nHello.\n\n")
    assert manyheads("translate", model_folder, "--num-beams", "1") == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("\n\nHallo.\n\n", "")


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer-XL after two steps: its likeliest byte is the same again and again."""
    from manyheads.cli.main import main

    place = tmp_path_factory.mktemp("runs") / "language"
    few = ["--training.max-steps=2", "--training.plots=false", "--quiet"]
    assert main(["train", "--preset", "xl-debug", f"--run-dir={place}", *few]) == 0
    return place


@pytest.mark.parametrize("form", [[], ["--json"], ["--lines"]])
def test_generate_warns(form, manyheads, language_model, stdin, capsys, monkeypatch):
    if form:
        given = Generator.continuations

        def repeated(self: Generator, *arguments: object, **options: object) -> object:
            found = given(self, *arguments, **options)  # type: ignore[arg-type]
            for one in (one for several in found for one in several):
                object.__setattr__(one, "text", "the " * 10)
            return found

        monkeypatch.setattr(Generator, "continuations", repeated)
    else:
        monkeypatch.setattr(Generator, "stream", lambda self, prompt, **options: iter(["the "] * 10))
    stdin(b"He opened the door\n")
    assert manyheads("generate", language_model, "-n", "40", *form) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith(
        "manyheads: warning: 1 of 1 texts repeats the same words again and again (line 1). The model has hardly learned"
    )
    assert "warning" not in shown.out


@pytest.mark.parametrize(
    ("text", "more", "warned"),
    [("", [], True), ("", ["--stop", "."], False), (" ", [], False), (" " * 20, [], True), ("a new day", [], False)],
)
def test_a_text_of_few_characters_or_stopped_at_once_may_be_blank(
    text, more, warned, manyheads, language_model, capsys, monkeypatch
):
    monkeypatch.setattr(Generator, "stream", lambda self, prompt, **options: iter([text]))
    assert manyheads("generate", language_model, "He ", *more) == 0
    assert ("1 of 1 texts is empty" in capsys.readouterr().err) == warned


def test_a_stream_without_end_takes_no_memory() -> None:
    """The first numbers and the counts are enough: `translate` of a pipe writes millions of lines."""
    check = OutputCheck("translations", learn_more="train it longer", forbid="forbid it")
    check.see(1, "w", "")
    tracemalloc.start()
    try:
        for number in range(2, 20_002):
            check.see(number, "w", "")
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()
    assert "20,001 of 20,001 translations are empty (lines 1, 2, 3, 4, 5, ...)" in check.describe()
