"""A mistake in a command's arguments is one sentence that names the option and the remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from tyro.conf import Positional, arg

from manyheads.cli.parsing import parse
from manyheads.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Search:
    num_beams: Annotated[int | None, arg(aliases=["--beam"], metavar="N")] = None
    """Width."""


@dataclass(frozen=True, kw_only=True)
class Options:
    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model."""
    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")]
    """A file."""
    rate: float = 0.5
    """A rate."""
    kind: Literal["plain", "fancy"] | None = None
    """A kind."""
    loud: bool = False
    """Noise."""
    search: Annotated[Search, arg(name="")] = field(default_factory=Search)


def read(*arguments: str) -> Options:
    return parse(
        Options, arguments, command="try", description="Tries.", examples=["manyheads try a", "manyheads try b"]
    )


def test_options_are_read() -> None:
    expected = Options(model="m", output="f", rate=0.25, kind="fancy", loud=True, search=Search(num_beams=3))
    assert read("m", "-o", "f", "--rate=0.25", "--kind", "fancy", "--loud", "--beam", "3") == expected
    assert read("m", "--output", "f", "--num_beams", "3") == Options(model="m", output="f", search=Search(num_beams=3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("m -o f --baem 4", "There is no option --baem. Did you mean --beam? See manyheads try --help."),
        (
            "--baem 4 --rat 3",
            "There is no option --baem. Did you mean --beam? There is no option --rat. Did you mean --rate?",
        ),
        ("m -o f -x", "There is no option -x."),
        ("m -o f more", "There is no place for more."),
        ("", "Missing: MODEL, --output."),
        ("m", "--output"),
        ("m -o f --beam", "--num-beams"),
        ("m -o f --beam x", "'x' is no INT."),
        ("m -o f --rate x", "'x' is no FLOAT."),
        ("m -o f --kind fancie", "Choose one of: fancy, plain."),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(ConfigError) as caught:
        read(*arguments.split())
    text = str(caught.value)
    assert message in text
    assert text.endswith(" See manyheads try --help.")
    assert "\n" not in text
    assert not set(text) & set("│╭╰─")
    assert capsys.readouterr() == ("", "")


def test_help_is_printed_with_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr()
    assert "  manyheads try a\n" in shown.out
    assert "exit codes: 0" in shown.out
    assert shown.err == ""
