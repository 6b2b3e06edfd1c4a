"""Tags of target languages: how a language is chosen."""

import pytest

from manyheads.errors import ConfigError
from manyheads.text.sides import check_target


@pytest.mark.parametrize("wanted", ["cmn_Hans", "cmn-hans", "CMN_HANS"])
def test_a_language_may_be_spelled_in_several_ways(wanted: str) -> None:
    assert check_target(("fra", "cmn_Hans"), wanted, "a model", "--target-lang") == "cmn_Hans"


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ConfigError, match="--target-lang is xx, but a model translates into fra, cmn_Hans"):
        check_target(("fra", "cmn_Hans"), "xx", "a model", "--target-lang")
