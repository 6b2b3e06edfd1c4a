"""A mistake in a command's arguments is one sentence that names the option and the remedy."""

from dataclasses import dataclass
from typing import Literal

import pytest

from manyheads.cli.command_line.parsing import option_rows, parse, read
from manyheads.config.options import CommandPage, argument, group, option
from manyheads.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Search:
    """How to search."""

    num_beams: int | None = option("Width.", None, metavar="N", aliases=("--beam",), default_is="the model's")


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = argument("A model.", metavar="MODEL")
    input: str = argument("A text; 100% of it is read.", "-", metavar="INPUT")
    output: str = option("A file.", metavar="FILE", aliases=("-o",))
    rate: float = option("A rate.", 0.5)
    kind: Literal["plain", "fancy"] | None = option("A kind.", None)
    loud: bool = option("Noise.", False)
    ids: tuple[int, ...] = option("Some ids.", (), metavar="ID ...", name="the-ids")
    search: Search = group(Search)


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int = 1
    shuffle: bool = False
    max_steps: int = 1
    names: tuple[str, ...] = ()


def parsed(*arguments: str) -> Options:
    return parse(CommandPage(Options, "Tries.", ["manyheads try a", "manyheads try b"]), arguments, "try")


def test_options_are_read() -> None:
    expected = Options(model="m", output="f", rate=0.25, kind="fancy", loud=True, search=Search(num_beams=3))
    assert parsed("m", "-o", "f", "--rate=0.25", "--kind", "fancy", "--loud", "--beam", "3") == expected
    expected = Options(model="m", output="f", search=Search(num_beams=3))
    assert parsed("m", "--output", "f", "--num_beams", "3", "--loud=false") == expected
    assert parsed("-o", "f", "m", "--the-ids", "1", "2").ids == (1, 2)
    assert parsed("m", "-o", "f", "--", "-x").input == "-x"


def test_values_of_an_option_that_is_given_twice_are_all_kept() -> None:
    assert parsed("-o", "f", "m", "--the-ids", "1", "2", "--the-ids", "3").ids == (1, 2, 3)
    given = read(Options, ["--names", "a", "--names", "b", "c"], (Settings,))
    assert given.settings.values == {"names": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 1 --rate 2", "--rate: takes one value, but is given as '1' and as '2'; give it once."),
        (
            "--beam 4 --num_beams=5",
            "--num-beams/--beam: takes one value, but is given as '4' and as '5'; give it once.",
        ),
        ("-o g", "--output/-o: takes one value, but is given as 'f' and as 'g'; give it once."),
        ("--seed 1 --seed=2", "--seed: takes one value, but is given as '1' and as '2'; give it once."),
        ("--shuffle --shuffle false", "--shuffle: takes one value, but is given as true and as 'false'; give it once."),
    ],
)
def test_an_option_with_one_value_is_given_once(arguments: str, message: str) -> None:
    given = read(Options, ["m", "-o", "f", *arguments.split()], (Settings,))
    assert given.mistakes == [message]


def test_the_same_value_may_be_repeated() -> None:
    given = read(
        Options, ["-o", "f", "m", "--loud", "-o", "f", "text", "--loud", "--seed", "1", "--seed", "1"], [Settings]
    )
    assert (given.mistakes, given.settings.values) == ([], {"seed": "1"})
    assert given.options == {"model": "m", "input": "text", "output": "f", "loud": True}


def test_arguments_stand_anywhere() -> None:
    assert parsed("m", "-o", "f", "text") == parsed("-o", "f", "m", "text") == parsed("m", "text", "-o", "f")


@pytest.mark.parametrize("value", ["-1e-3", "-0.5", "-", "-x"])
def test_values_may_begin_with_a_dash(value: str) -> None:
    assert parsed("m", "--output", value).output == value
    assert parsed("m", f"--output={value}").output == value


def test_settings_are_read_beside_options() -> None:
    given = read(Options, ["--seed", "-3", "m", "--max-steps=7", "--rate", "1"], [Settings])
    assert given.settings.values == {"seed": "-3", "max_steps": "7"}
    assert (given.options, given.mistakes) == ({"model": "m", "rate": "1"}, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("m -o f --baem 4", "There is no option --baem. Did you mean --beam? See manyheads try --help."),
        (
            "--baem 4 --rat 3",
            "There is no option --baem. Did you mean --beam? There is no option --rat. Did you mean --rate?",
        ),
        ("m -o f -x", "There is no option -x."),
        ("m -o f text more", "Unexpected argument: 'more'."),
        ("", "Missing: MODEL, --output."),
        ("m", "Missing: --output."),
        ("m -o f --beam", "--num-beams needs a value."),
        ("m -o f --the-ids --loud", "--the-ids needs a value."),
        ("m -o f --loud=x", "--loud is 'x'; it takes no value."),
        ("m -o f --beam x", "--num-beams is 'x'; input should be a valid integer"),
        ("m -o f --rate x", "--rate is 'x'; input should be a valid number"),
        ("m -o f --the-ids 1 x", "--the-ids is ['1', 'x']; input should be a valid integer"),
        ("m -o f --kind fancie", "--kind is 'fancie'; choose one of: plain, fancy. Did you mean fancy?"),
        ("m -o f --beam x --rate y", "--rate is 'y'; input should be a valid number"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(ConfigError) as caught:
        parsed(*arguments.split())
    text = str(caught.value)
    assert message in text
    assert text.endswith(" See manyheads try --help.")
    assert "\n" not in text
    assert capsys.readouterr() == ("", "")


def test_help_is_printed_with_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr()
    assert "  manyheads try a\n" in shown.out
    assert shown.out.startswith("usage: manyheads try MODEL [INPUT] --output FILE [OPTIONS]\n")
    for line in (
        "  INPUT                       A text; 100% of it is read. [-]",
        "  --output, -o FILE           A file.",
        "  --kind plain|fancy          A kind.",
        "  --the-ids ID ...            Some ids.",
        "How to search:\n  --num-beams, --beam N       Width. [default: the model's]",
    ):
        assert f"{line}\n" in shown.out
    assert "exit codes: 0" in shown.out
    assert shown.err == ""


@dataclass(frozen=True, kw_only=True)
class MoreOptions(Options):
    others: tuple[str, ...] = argument("Other models.", (), metavar="MODEL ...", after="model")
    pages: int = option("Pages.", 1)
    depth: int = option("Depth.", 1, after="kind")
    width: int = option("Width.", 1)


def test_added_options_stand_where_they_say() -> None:
    assert [name for name, _ in option_rows(MoreOptions)] == [
        "--pages INT", "--output, -o FILE", "--rate FLOAT", "--kind plain|fancy", "--depth INT", "--width INT",
        "--loud", "--the-ids ID ...",
    ]  # fmt: skip
    given = parse(CommandPage(MoreOptions, "Tries.", []), ["a", "b", "c", "-o", "f", "--depth", "2"], "try")
    assert (given.model, given.input, given.others, given.depth) == ("a", "-", ("b", "c"), 2)
