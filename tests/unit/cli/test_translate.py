"""`manyheads translate`: lines in, lines out, whatever the lines are."""

import json
import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.cli.lines.output import LineWriter, converse
from manyheads.cli.main import main
from manyheads.decoding.translator import Translator
from manyheads.text.tokenizer import Tokenizer

Cli = Callable[..., int]
Stdin = Callable[[bytes], None]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ODD = ["", " ", "a", "é", "\r", "\t", "\0", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\ufeff", "\U0001f600"]
SETTINGS = settings(deadline=None, max_examples=15)


@pytest.fixture(scope="module")
def translator(model_folder: Path) -> Translator:
    return Translator.from_pretrained(model_folder, device="cpu")


def test_lines_from_stdin_to_stdout(manyheads, model_folder, translator, stdin, capsysbinary):
    lines = ["I am hungry.", "", "Where is the cat?", "   ", "no line feed at the end"]
    stdin("\n".join(lines).encode())
    assert manyheads("translate", model_folder) == 0
    captured = capsysbinary.readouterr()
    expected = translator.translate(lines)
    assert expected[0]
    assert expected[1] == expected[3] == ""
    assert captured.out.decode().split("\n") == [*expected, ""]
    [warning] = captured.err.decode().splitlines()  # an untrained model repeats itself, and that is said
    assert warning.startswith("manyheads: warning: ")
    assert " of 3 translations " in warning


@given(
    st.lists(
        st.text(
            st.sampled_from(ODD[2:]) | st.characters(exclude_categories=("Cs",), exclude_characters="\n"), max_size=12
        ),
        max_size=9,
    )
)
@SETTINGS
def test_as_many_lines_out_as_in(model_folder: Path, lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in", Path(folder) / "out"
        source.write_bytes("".join(f"{line}\n" for line in lines).encode())
        options = ("--output", output, "--max-new-tokens", 4, "--lines-at-once", 4)
        assert main(["translate", *map(str, (model_folder, source, *options))]) == 0
        found = output.read_bytes().decode()
        assert found.count("\n") == len(lines)
        for line, translation in zip(lines, found.split("\n"), strict=False):
            assert line.strip("\ufeff \t\r\n") or not translation.strip(
                "\ufeff"
            )  # an untrained model may write nothing


def test_odd_characters_keep_lines_apart(manyheads: Cli, model_folder: Path, tmp_path: Path) -> None:
    lines = [f"a{odd}b" for odd in ODD]
    (tmp_path / "in").write_bytes("\n".join(lines).encode())
    assert manyheads("translate", model_folder, tmp_path / "in", "-o", tmp_path / "out", "--max-new-tokens", "3") == 0
    found = (tmp_path / "out").read_bytes().decode()
    assert found.endswith("\n")
    assert len(found.removesuffix("\n").split("\n")) == len(lines)


def test_a_line_feed_that_a_model_says_is_a_space(printed, model_folder, stdin, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: "two\nlines\r")
    stdin(b"a\nb\n")
    assert printed("translate", model_folder) == "two lines\r\n" * 2


def test_empty_input(manyheads: Cli, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"")
    assert manyheads("translate", model_folder, tmp_path / "in", "-o", tmp_path / "out") == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_batches_do_not_change_translations(manyheads, model_folder, tmp_path, pairs):
    (tmp_path / "in").write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
    found = []
    for options in (["--lines-at-once", "3"], ["--max-tokens", "60"], []):
        assert manyheads("translate", model_folder, tmp_path / "in", "-o", tmp_path / "out", *options) == 0
        found.append((tmp_path / "out").read_text(encoding="utf-8"))
    assert found[0] == found[1] == found[2]


def test_progress_is_shown(manyheads, model_folder, tmp_path, pairs, stdin, told):
    text = "".join(f"{source}\n" for source, _ in pairs)
    (tmp_path / "in").write_text(text, encoding="utf-8")
    assert manyheads("translate", model_folder, tmp_path / "in", "-o", tmp_path / "out", "--lines-at-once", "5") == 0
    shown = {what: counts for what, counts in told().items() if what != "manyheads"}  # that one is a warning
    assert shown == {"translating lines": ["0", "5", "5", "10", "10", "12"]}
    stdin(text.encode())
    assert manyheads("translate", model_folder, "-o", tmp_path / "out", "--lines-at-once", "5") == 0
    assert told()["translating lines"][-1] == "12"


def test_lines_that_are_sorted_together_depend_on_the_device(
    manyheads: Cli, model_folder: Path, tmp_path: Path, pairs: Any, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in blocks of the policy's size; a pipe as its lines come, whatever that size."""
    monkeypatch.setattr("manyheads.nn.kernels.policy.lines_together", lambda device: 7)
    (tmp_path / "in").write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
    assert manyheads("translate", model_folder, tmp_path / "in", "-o", tmp_path / "out") == 0
    assert told()["translating lines"] == ["0", "7", "7", "12"]


def test_nbest_is_a_table(manyheads, model_folder, translator, stdin, capsys):
    stdin(b"I am hungry.\n\nThe cat sees the dog.\n")
    assert manyheads("translate", model_folder, "--nbest", "2") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.removesuffix("\n").split("\n")]
    assert [row[0] for row in rows] == ["1", "1", "2", "3", "3"]
    assert rows[2][1:] == ["0.000000", ""]
    expected = translator.translate_nbest(["I am hungry."], num_return_sequences=2)[0]
    assert [row[2] for row in rows[:2]] == [one.text for one in expected]
    assert [float(row[1]) for row in rows[:2]] == pytest.approx([one.score for one in expected], abs=1e-5)


def test_json_lines(manyheads: Cli, model_folder: Path, stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    stdin("I am\u2028hungry.\n\n".encode())
    assert manyheads("translate", model_folder, "--json", "--num-return-sequences", "2") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.removesuffix("\n").split("\n"))
    assert first["line"] == 1
    assert first["source"] == "I am\u2028hungry."
    assert len(first["translations"]) == 2
    best = first["translations"][0]
    assert best["log_prob"] == pytest.approx(sum(best["token_log_probs"]))
    assert len(best["tokens"]) == len(best["token_log_probs"])
    assert second["translations"] == [{"text": "", "score": 0.0, "log_prob": 0, "tokens": [], "token_log_probs": []}]


def test_options_reach_the_search(printed, model_folder, translator, stdin):
    text = "The cat sees the dog."
    cases: list[tuple[list[str], dict[str, object]]] = [
        (["--beam", "4", "--lenpen", "1.5"], {"num_beams": 4, "length_penalty": 1.5, "length_penalty_kind": "power"}),
        (["--num-beams", "1", "--max-new-tokens", "5"], {"num_beams": 1, "max_new_tokens": 5}),
        (["--do-sample", "--seed", "7", "--top-k", "9"], {"do_sample": True, "seed": 7, "top_k": 9}),
        (["--no-repeat-ngram-size", "1", "--early-stopping"], {"no_repeat_ngram_size": 1, "early_stopping": True}),
    ]
    for options, overrides in cases:
        stdin(text.encode())
        assert printed("translate", model_folder, *options) == translator.translate(text, **overrides) + "\n"


def test_forced_prefix(manyheads: Cli, model_folder: Path, stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    stdin(b"The cat sees the dog.\nI am hungry.\n")
    assert manyheads("translate", model_folder, "--forced-prefix", "Die Katze") == 0
    assert all(line.startswith("Die Katze") for line in capsys.readouterr().out.removesuffix("\n").split("\n"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--lenpen", "1", "--length-penalty", "1"], "--lenpen 1.0 means"),
        (["--do-sample", "--no-do-sample"], "contradict"),
        (["--nbest", "0"], "--num-return-sequences is 0"),
        (["--nbest", "5"], "num_beams is 2"),
        (["--lines-at-once", "0"], "--lines-at-once is 0"),
        (["--top-p", "2"], "top_p is 2"),
        (["--temperature", "0.5"], "temperature is 0.5, but do_sample is false"),
        (["--seed", "3"], "--seed is for sampling; give --do-sample with it"),
        (["--device", "abacus"], "abacus"),
        (["--banned-ids", "99999"], "banned_ids"),
        (["--baem", "3"], "--beam"),
        (["--beam", "many"], "many"),
    ],
)
def test_bad_options(manyheads, model_folder, stdin, capsys, options, expected):
    stdin(b"a\n")
    assert manyheads("translate", model_folder, *options) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


def test_bad_files(manyheads, refused, model_folder, tmp_path, capsys):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\nb\xe4d\n")
    output = tmp_path / "out.txt"
    output.write_text("older\n", encoding="utf-8")
    cases: list[tuple[list[str | Path], str]] = [
        ([model_folder, bad], f"{bad}: line 2 is not UTF-8: byte 0xe4 at byte offset 6"),
        ([model_folder, tmp_path], f"{tmp_path} is a directory"),
        ([model_folder, tmp_path / "none"], "No such file"),
        ([tmp_path / "none", bad], "there is no folder"),
        ([model_folder, output], "is the file"),
    ]
    for arguments, expected in cases:
        assert manyheads("translate", *arguments, "--output", output) == 2
        captured = capsys.readouterr()
        assert expected in captured.err
        assert "Traceback" not in captured.err
        assert output.read_text(encoding="utf-8") == "older\n"
    good = tmp_path / "good.txt"
    good.write_text("a\n", encoding="utf-8")
    assert "Cannot write" in refused("translate", model_folder, good, "--output", tmp_path / "no" / "out")


def test_bad_utf8_replaced_or_skipped(manyheads, model_folder, stdin, capsys):
    for policy in ("replace", "skip"):
        stdin(b"good\nb\xe4d\ngood\n")
        assert manyheads("translate", model_folder, "--on-bad-utf8", policy) == 0
        captured = capsys.readouterr()
        lines = captured.out.split("\n")
        assert len(lines) == 4
        assert policy == "replace" or not lines[1]
        said = "bad bytes replaced" if policy == "replace" else "skipped"
        told = [line for line in captured.err.splitlines() if not line.startswith("manyheads: warning: ")]
        assert told == [f"manyheads: lines that are not UTF-8, {said}: 1"]


def test_too_long_lines(manyheads: Cli, model_folder: Path, stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    text = b"a\n" * 40 + b"The cat sees the dog and the dog sees the cat.\n"
    stdin(text)
    assert manyheads("translate", model_folder, "--max-tokens", "20", "--lines-at-once", "16") == 2
    captured = capsys.readouterr()
    assert "standard input: line 41 has" in captured.err
    assert "--too-long truncate" in captured.err
    stdin(text)
    assert (
        manyheads("translate", model_folder, "--max-tokens", "20", "--lines-at-once", "16", "--too-long", "truncate")
        == 0
    )
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 41
    assert "line 41 has" in captured.err
    assert "lines cut because they were too long: 1" in captured.err


def test_verbose_speaks_on_stderr_alone(manyheads, model_folder, stdin, capsys):
    stdin(b"a\n")
    assert manyheads("translate", model_folder, "--verbose") == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "lines/s" in captured.err
    assert "num_beams=2" in captured.err


def test_processes_in_a_pipe(model_folder: Path, tmp_path: Path, warm_program: list[str]) -> None:
    """A closed pipe is no error, and results are UTF-8 whatever the locale says."""
    program = " ".join(warm_program)
    source = tmp_path / "in"
    source.write_text("I am hungry.\n" * 400, encoding="utf-8")
    options = "--max-new-tokens 3 --lines-at-once 4"
    script = f"set -o pipefail; {program} translate {model_folder} {options} < {source} | head -1"
    environment = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0
    assert done.stderr == b""
    assert done.stdout.count(b"\n") == 1
    if Path("/dev/full").exists():
        script = f"echo a | {program} translate {model_folder} > /dev/full"
        done = subprocess.run(["bash", "-c", script], capture_output=True, env=ENVIRONMENT, timeout=600, check=False)
        assert done.returncode == 2
        assert done.stderr.decode().startswith("manyheads: Cannot write standard output")
        assert done.stderr.count(b"\n") == 1


def test_a_pipe_that_pauses_is_answered(model_folder: Path, translator: Translator, warm_program: list[str]) -> None:
    """As behind `tail -f`: no option needed, and the half of a line that is there already holds up nothing."""
    process = subprocess.Popen(
        [*warm_program, "translate", str(model_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    process.stdin.write(b"I am hungry.\nThe cat\nWhere is")
    process.stdin.flush()
    found = [process.stdout.readline(), process.stdout.readline()]
    process.stdin.write(b" the station?\n")
    process.stdin.flush()
    found.append(process.stdout.readline())
    assert process.communicate(timeout=300) == (b"", None)
    assert process.returncode == 0
    expected = translator.translate(["I am hungry.", "The cat", "Where is the station?"])
    assert b"".join(found).decode() == "".join(f"{line}\n" for line in expected)


@pytest.mark.parametrize(
    ("redirections", "code", "message"),
    [
        ("<&-", 2, b"manyheads: Standard input is closed; name a file, or give the text through a pipe.\n"),
        (">&-", 2, b"manyheads: Standard output is closed; name a file by --output.\n"),
        ("2>&-", 0, b""),
        ("2>&- <&-", 2, b""),
    ],
)
def test_closed_streams(model_folder, redirections, code, message, warm_program):
    """Nothing that is meant for one stream or file lands in another."""
    program = " ".join(warm_program)
    script = f"printf 'a\nb\344d\n' | {program} translate {model_folder} --on-bad-utf8 replace {redirections}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=ENVIRONMENT, timeout=600, check=False)
    assert done.returncode == code
    assert done.stdout.count(b"\n") == (2 if code == 0 else 0)
    assert b"manyheads:" not in done.stdout
    assert done.stderr == message


def test_a_prompt_in_a_terminal(model_folder: Path, translator: Translator, warm_program: list[str]) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*warm_program, "translate", str(model_folder)],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        os.write(ours, b"I am hungry.\n\nThe cat\n\x04")
        out, err = process.communicate(timeout=600)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert out.decode() == f"{translator.translate('I am hungry.')}\n\n{translator.translate('The cat')}\n"
    assert err.decode().count("> ") == 4
    assert "Ctrl-D" in err.decode()


def test_commands_at_the_prompt(model_folder, translator, tmp_path, warm_program):
    page = tmp_path / "look.html"
    ours, theirs = pty.openpty()
    typed = [
        ":attention", "The cat", f":attention {page}", f":attention {page}", ":attention a.png", ":beam 3", ":nbest 9",
        ":nbest 2", "The cat", ":beam many", ":beem 3", ":help", "  :quit is a text", ":quit",
    ]  # fmt: skip
    try:
        process = subprocess.Popen(
            [*warm_program, "translate", str(model_folder)],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        os.write(ours, "".join(f"{line}\n" for line in typed).encode())
        out, err = process.communicate(timeout=600)
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    found = out.decode().split("\n")
    best = translator.translate_nbest("The cat", num_beams=3, num_return_sequences=2)
    assert found[0] == translator.translate("The cat")
    assert [line.split("\t")[2] for line in found[1:3]] == [one.text for one in best]
    assert len(found) == 6  # two lines for the text that begins with a colon, and the end
    assert page.is_file()
    said = err.decode()
    assert said.startswith(f"manyheads: loading {model_folder} ...\nType a sentence")
    for part in (
        ":attention draws the last sentence, but there is none yet",
        f"written: {page}",
        f"replaced: {page}",
        "let it end in .html",
        "num_beams is 3",
        "num_return_sequences is 9 but num_beams is 3",
        ":beam needs a whole number, for example :beam 4, but 'many' was given",
        "there is no command :beem. Did you mean :beam?",
        ":nbest N           show the N best translations",
    ):
        assert part in said, part


def test_interruption_clears_the_line_and_control_characters_are_shown(monkeypatch, capsys):
    typed = iter(["a", KeyboardInterrupt(), "b", EOFError()])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    def answer(number: int, line: str) -> None:
        seen.append((number, line))
        if line == "a":
            raise KeyboardInterrupt  # while it is translated

    seen: list[tuple[int, str]] = []
    monkeypatch.setattr("builtins.input", read)
    converse("a sentence", answer)
    assert seen == [(0, "a"), (1, "b")]
    monkeypatch.setattr(LineWriter, "is_in_terminal", property(lambda self: True))
    with LineWriter("-") as writer:
        writer.write(["red \x1b[31m, right to left \u202e, a tab \t and Zürich\u00a0"])
    assert capsys.readouterr().out == "red \\x1b[31m, right to left \\u202e, a tab \t and Zürich\u00a0\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nosuch.txt",), "Cannot read nosuch.txt: No such file"),
        (("--output", "nosuch/out.txt"), "Cannot write nosuch/out.txt: there is no folder"),
        (("--beam", "5000"), "num_beams is 5000"),
        (("--nbest", "3"), "num_return_sequences is 3 but num_beams is 2"),
    ],
)
def test_mistakes_show_before_the_model_is_loaded(refused, model_folder, options, message, monkeypatch):
    monkeypatch.setattr(Translator, "from_pretrained", lambda *arguments, **named: pytest.fail("it was loaded"))
    assert message in refused("translate", model_folder, *options)


def test_help_needs_no_torch() -> None:
    script = """
import sys
from manyheads.cli.main import main
for command in ("prepare", "translate", "evaluate", "score", "average"):
    try:
        main([command, "--help"])
    except SystemExit as left:
        assert left.code == 0, command
assert not {"torch", "numpy", "pydantic", "tokenizers", "sacrebleu"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples:") == 5


@pytest.mark.compiles
def test_compile_reaches_the_search(manyheads, model_folder, tmp_path, capsys):
    """With torch's compiler turned off, which takes half a minute: the steps for it run as they are."""
    import torch

    (tmp_path / "in").write_text("I am hungry.\nWhere is the cat?\n", "utf-8")
    assert manyheads("translate", model_folder, tmp_path / "in", "-o", tmp_path / "plain", "--beam", 1) == 0
    seen = []

    def compiler(function: Any, **options: Any) -> Any:
        seen.append(options)
        return function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compiler)
        assert (
            manyheads("translate", model_folder, tmp_path / "in", "-o", tmp_path / "c", "--beam", 1, "--compile") == 0
        )
    assert (tmp_path / "c").read_bytes() == (tmp_path / "plain").read_bytes()
    assert capsys.readouterr().err.count("Compiling: half a minute the first time") == 1
    assert [options["fullgraph"] for options in seen] == [True]


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.compiles
def test_compiled_it_gives_the_same(manyheads, model_folder, tmp_path, compiled_folder, capsys):
    source = tmp_path / "in"
    source.write_text("I am hungry.\nWhere is the cat?\n\nShe reads a book.\n", "utf-8")
    for name, options in (("compiled", ["--compile"]), ("plain", [])):
        assert manyheads("translate", model_folder, source, "-o", tmp_path / name, "--beam", 1, *options) == 0
    assert (tmp_path / "compiled").read_bytes() == (tmp_path / "plain").read_bytes()
    told = capsys.readouterr().err
    assert told.startswith("Compiling: half a minute the first time, some seconds from the cache.\n")
    assert told.count("Compiling") == 1
    assert any(compiled_folder.rglob("*.so"))
