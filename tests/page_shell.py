"""Lines of shell as pages of documentation have them; `manyheads` runs in this process, which takes less time."""

import contextlib
import io
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from manyheads.cli.main import main

__all__ = ["Printed", "run_line"]


@dataclass(frozen=True)
class Printed:
    """Standard output and standard error."""

    out: str
    err: str


def run_line(line: str) -> Printed:
    """Run a line in the current folder: a command, or `echo ... | manyheads ...`, with `< FILE` and `> FILE`.

    Raises: AssertionError: it failed.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>")
    lexer.whitespace_split = True  # otherwise `512:4000` is three words
    words = list(lexer)
    before = words[: words.index("|")] if "|" in words else []
    words = words[words.index("|") + 1 :] if before else words
    if words[0] != "manyheads" or "manyheads" in before or "|" in words:
        return _bash(line)
    given = _bash(shlex.join(before)).out.encode() if before else b""
    given = Path(_taken(words, "<")).read_bytes() if "<" in words else given
    target = Path(_taken(words, ">")) if ">" in words else None
    printed = _in_process(words[1:], given)
    if target is not None:
        target.write_text(printed.out, encoding="utf-8", newline="\n")
    return Printed("" if target else printed.out, printed.err)


def _taken(words: list[str], sign: str) -> str:
    place = words.index(sign)
    name = words[place + 1]
    del words[place : place + 2]
    return name


def _in_process(arguments: list[str], given: bytes) -> Printed:
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline="\n") for data in (given, b"", b"")]
    with (
        mock.patch("sys.stdin", streams[0]),
        contextlib.redirect_stdout(streams[1]),
        contextlib.redirect_stderr(streams[2]),
    ):
        code = main(arguments)
    for stream in streams[1:]:
        stream.seek(0)
    printed = Printed(streams[1].read(), streams[2].read())
    assert code == 0, f"manyheads {shlex.join(arguments)} gave {code}:\n{printed.out}\n{printed.err}"
    return printed


def _bash(line: str) -> Printed:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "-eo", "pipefail", "-c", line]
    done = subprocess.run(shell, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{line} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return Printed(done.stdout, done.stderr)
