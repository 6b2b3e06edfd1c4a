"""The program as a whole: help at once, typos answered, exit codes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyheads import __version__
from manyheads.catalogue import COMMANDS
from manyheads.cli import main as program
from manyheads.cli.command_line import parsing
from manyheads.cli.main import guarded, main, module_of
from manyheads.cli.process import stoppable
from manyheads.errors import DataError

HEAVY = ("rich", "shtab", "torch", "numpy", "pydantic", "tokenizers", "matplotlib", "sacrebleu", "huggingface_hub")


def ended(*arguments: str) -> int:
    """The exit code, whichever way the program leaves."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_every_command_is_there() -> None:
    for name in COMMANDS:
        assert callable(module_of(name).run), name


@pytest.fixture(scope="module")
def help_pages() -> list[str]:
    """The page of the program and of each command, printed one after the other by one process.

    The last line of each names the heavy modules that were imported by then.
    """
    script = (
        "import sys\n"
        "from manyheads.cli.main import main\n"
        f"for command in {[[], *([name] for name in COMMANDS)]!r}:\n"
        "    try: main([*command, '--help'])\n"
        "    except SystemExit as stop: assert not stop.code\n"
        f"    print('IMPORTED', [name for name in {HEAVY!r} if name in sys.modules], end='\\0')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert result.stderr == ""
    return result.stdout.removesuffix("\0").split("\0")


@pytest.mark.first_minute
@pytest.mark.parametrize(("number", "command"), enumerate(["", *COMMANDS]), ids=str)
def test_help_has_two_examples_and_imports_nothing_heavy(number: int, command: str, help_pages: list[str]) -> None:
    page = help_pages[number]
    assert page.endswith("IMPORTED []")
    examples = page.partition("examples:\n")[2].partition("\n\n")[0].split("\n")
    assert len(examples) >= 2
    named = [example for example in examples if f"manyheads {command}".strip() in example]
    assert len(named) >= 2, examples
    assert "exit codes: 0 success, 2 " in page
    assert "4 the model of `make demo` did not learn" in " ".join(page.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("--version", "-V", "version"):
        assert main([name]) == 0
        assert capsys.readouterr().out == f"manyheads {__version__}\n"


def test_help_shows_the_options_about_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("help", "train", "length_schedule") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("data [defaults preset xl-debug]:\n  --data.length_schedule [TEXT, ...]\n")
    assert "--model.dropout" not in shown
    assert ended("help", "translate", "Length-penalty", "fairseq") == 0
    assert capsys.readouterr().out.count("\n  --") == 1
    assert ended("help", "evaluate", "ext_len") == 0
    assert "options [task text, ids, duplication]:\n  --ext-len N" in capsys.readouterr().out
    assert ended("help", "inspect", "attention", "layer") == 0
    assert "  --layer N" in capsys.readouterr().out
    assert ended("help", "translate", "chocolate") == 2
    assert capsys.readouterr().err == (
        "manyheads: no option of translate is about 'chocolate'. All of them: manyheads translate --help\n"
    )


def test_help_of_a_command_is_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for arguments in (("help", "average"), ("average", "--help"), ("help",), ("--help",)):
        assert ended(*arguments) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != pages[2] == pages[3]
    assert ended("help", "tranlate") == 2
    assert "no command 'tranlate'. Did you mean translate?" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "there is no command 'trian'. Did you mean train?" in shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["translate"],
        ["translate", "/no/such/model"],
        ["train", "--prest", "demo"],
        ["train", "--config", "/no/such.yaml"],
        ["evaluate", "/no/such/model", "--reference"],
        ["score", "/no/such/model", "--source", "/no/file", "--target", "/no/file"],
        ["prepare", "--source", "/no/file", "--target", "/no/file", "--output", "/no/folder"],
        ["average", "/no/such/run", "--output", "x"],
        ["info", "/no/such/model"],
        ["completion", "tcsh"],
        ["doctor", "--fast"],
    ],
)
def test_a_users_mistake_is_a_paragraph_and_exit_code_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ended(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("manyheads: ")
    assert len(shown.err.rstrip().split("\n")) <= 10
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_and_debug(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> int:
        raise error

    for error, code, said in (
        (DataError("the file is empty."), 2, "manyheads: the file is empty."),
        (KeyError("lost"), 1, "a bug of ours: KeyError: 'lost'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        assert guarded(lambda error=error: raising(error)) == code  # type: ignore[misc]
        shown = capsys.readouterr().err
        assert said in shown
        assert "Traceback" not in shown
        assert guarded(lambda error=error: raising(error), debug=True) == code  # type: ignore[misc]
        assert "Traceback" in capsys.readouterr().err
    assert program.EXIT_CODES.startswith("exit codes: 0 ")


def test_a_reader_that_leaves_is_no_error() -> None:
    script = "import sys; from manyheads.cli.main import main; sys.exit(main(['train', '--help']))"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=300) == 0


def test_the_program_is_named_as_it_can_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name where the shell finds it, by path where it lies in an environment that is not active."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "manyheads"):
        (folder / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert parsing.program() == ".venv/bin/manyheads"
    monkeypatch.setenv("PATH", str(folder))
    assert parsing.program() == "manyheads"
    monkeypatch.setenv("MANYHEADS_PLUGINS", "one,two")
    assert parsing.program() == "manyheads --plugin one --plugin two"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_whoever_reads_the_help_page_may_leave(option: str) -> None:
    """As in `manyheads --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "manyheads", option], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_stopped_leaves_nothing_half_written(number, tmp_path, monkeypatch, capsys):
    """The signal comes while a file is written."""
    before = signal.signal(number, signal.SIG_DFL)
    signals = iter([number])

    def interrupted(handle: int) -> None:
        if (one := next(signals, None)) is not None:
            os.kill(os.getpid(), one)

    monkeypatch.setattr(os, "fsync", interrupted)
    try:
        assert main(["sample-data", str(tmp_path / "sample"), "--pairs", "5"]) == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == f"manyheads: stopped by {number.name}\n"
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_an_ignored_signal_stays_ignored() -> None:
    """As by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_stays_in_the_folder_for_temporary_files(tmp_path: Path) -> None:
    """torch makes a folder for its compiler when it imports it, which a backward pass or a Reformer causes."""
    temporary, caches = tmp_path / "tmp", tmp_path / "caches"
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(caches), "OMP_NUM_THREADS": "1"}
    arguments = ("train", "--preset", "reformer-debug", "--dry-run", "--run-dir", str(tmp_path / "run"))
    script = f"import sys; from manyheads.cli.main import main; code = main({arguments!r}); import torch._dynamo"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; sys.exit(code)"], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []
    assert (caches / "manyheads" / "compiled").is_dir()
