"""`--section.key value` and the nearest name to a typo."""

from dataclasses import dataclass

import pytest

from manyheads.cli.command_line.parsing import read as read_options
from manyheads.config.checks import did_you_mean, nearest
from manyheads.errors import ConfigError
from manyheads.tasks.translation.settings import TrainConfig


@dataclass
class NoOptions:
    pass


def read(*arguments: str) -> dict[str, object]:
    given = read_options(NoOptions, arguments, [TrainConfig])
    if given.mistakes:
        raise ConfigError("\n".join(given.mistakes))
    return given.settings.values


def test_forms_of_an_override() -> None:
    assert read("--data.max-tokens", "512", "--model.d_model=64", "--training.deterministic", "--seed", "-3") == {
        "data": {"max_tokens": "512"},
        "model": {"d_model": "64"},
        "training": {"deterministic": True},
        "seed": "-3",
    }


def test_null_lists_and_kinds() -> None:
    assert read("--model.final_norm", "null", "--decoding.banned_ids", "[1, 2]") == {
        "model": {"final_norm": None},
        "decoding": {"banned_ids": ["1", "2"]},
    }
    assert read("--model.attention", "additive", "--model.attention.hidden_dim", "7") == {
        "model": {"attention": {"kind": "additive", "hidden_dim": "7"}}
    }


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--data.max_tokns", "Did you mean --data.max_tokens?"),
        ("--dmodel", "Did you mean --model.d_model?"),
        ("--optimizer.learning_rate", "Did you mean --optimiser.learning_rate?"),
        ("--model.attention.hiden_dim", "Did you mean --model.attention.hidden_dim?"),
    ],
)
def test_typos_are_answered_with_the_nearest_name(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="There is no option") as caught:
        read(argument, "1")
    assert hint in str(caught.value)


def test_stray_words_are_refused_with_the_rest() -> None:
    with pytest.raises(ConfigError, match="Unexpected argument: 'stray'"):
        read("stray", "--seed", "1")


def test_nothing_near_nothing_said() -> None:
    assert nearest("zzzz", ["model", "data"]) is None
    assert did_you_mean("zzzz", ["model"]) == ""
    assert did_you_mean("trian", ["train", "translate"]) == " Did you mean train?"


def test_initials_find_their_words() -> None:
    known = ["optimiser", "optimiser.learning_rate", "optimiser.eps", "model.attention", "training.log_every"]
    assert nearest("optimiser.lr", known) == "optimiser.learning_rate"
    assert nearest("lr", known) == "optimiser.learning_rate"
    assert nearest("xyzzy", known) is None
