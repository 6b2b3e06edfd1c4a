"""What is printed for people does not control their terminal."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import manyheads
from manyheads.catalogue import build_model
from manyheads.cli.process import echo, printable
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.vocabulary import ByteVocabulary

CLI = Path(manyheads.__file__).parent / "cli"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ü, 日本", "plain, ü, 日本"),
        ("two\nlines", "two\nlines"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\u202eb", "a\\u202eb"),
        ("a\0b\x9bc\rd", "a\\x00b\\x9bc\\rd"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_become_visible(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(text) == shown
    echo(text, 1)
    assert capsys.readouterr().out == f"{shown} 1\n"


def test_everything_for_people_is_printed_by_one_function() -> None:
    """`print` only writes JSON, YAML, a page of help or another text that is ours or is read by a program."""
    allowed = {"json_text", "dumps", "help_page", "to_yaml", "settings_page", "complete", "format"}
    found = []
    for path in sorted(CLI.rglob("*.py")):
        if path.name == "process.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                called = {
                    getattr(inner.func, "attr", getattr(inner.func, "id", ""))
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Call) and inner is not node
                }
                if not called & allowed:
                    found.append(f"{path.relative_to(CLI)}:{node.lineno}")
    assert found == []


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no pseudo-terminals")
def test_a_prompt_on_a_terminal(warm_program: list[str], tmp_path: Path) -> None:
    """`generate --echo` repeats a prompt, which may come from anywhere."""
    torch.manual_seed(1)
    config = TransformerXLConfig(vocab_size=256, d_model=8, num_heads=1, head_dim=8, d_ff=8, num_layers=1, memory_len=4)
    save_pretrained(build_model(config), tmp_path / "model", tokenizer=ByteVocabulary())
    ours, theirs = os.openpty()
    hostile = "a\x1b]0;title\x07\u202e"
    command = [*warm_program, "generate", str(tmp_path / "model"), hostile, "--echo", "--max-new-tokens", "2"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, check=False).returncode == 0
    os.close(theirs)
    shown = os.read(ours, 2**16)
    os.close(ours)
    assert rb"a\x1b]0;title\x07\u202e" in shown
    assert not any(raw in shown for raw in (b"\x1b", b"\x07", "\u202e".encode()))
