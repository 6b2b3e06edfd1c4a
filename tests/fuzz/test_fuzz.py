"""Hostile and random input ends with exit 0, or with exit 2 and one message (R6).

All cases run in one process of their own, in forked children: this process may have threads, which a fork would lose.
`make fuzz` runs the whole campaign.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.campaign import Found
from fuzz.forks import forked
from fuzz.minimise import smaller_bytes, smaller_list
from fuzz.mutations import KINDS, mutate
from manyheads.config.files import parse_yaml
from manyheads.errors import ConfigError

TESTS = Path(__file__).resolve().parents[1]
FOUND = Path(__file__).with_name("found")

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="children are watched by pidfd, which Linux has")


def suite(folder: Path, mode: str) -> dict[str, Any]:
    """The report of `fuzz.suite`."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fuzz.suite", str(folder / "suite"), mode, str(FOUND)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return suite(tmp_path_factory.mktemp("fuzz"), "quick")


def test_cases_that_were_reported(quick: dict[str, Any]) -> None:
    """Sizes, endless texts, odd JSON and YAML, escape sequences, narrow terminals."""
    assert len(quick["cases"]) >= 7
    assert {name: wrong for name, wrong in quick["cases"].items() if wrong} == {}


def test_cases_that_were_found_before(quick: dict[str, Any]) -> None:
    assert set(quick["found"]) == {path.name for path in FOUND.glob("*.json")} != set()
    assert {name: wrong for name, wrong in quick["found"].items() if wrong} == {}


def test_a_slice_of_the_campaign(quick: dict[str, Any], figure: Callable[..., None]) -> None:
    """Some cases of every reader, and some command lines."""
    assert quick["counts"]["readers"] > 120
    assert quick["counts"]["commands"] >= 4
    assert quick["slice"] == []


@pytest.mark.slow
def test_all_cases_that_were_reported(tmp_path: Path) -> None:
    report = suite(tmp_path, "whole")
    assert len(report["cases"]) >= 60
    assert {name: wrong for name, wrong in report["cases"].items() if wrong} == {}


@pytest.mark.slow
def test_words_without_end_in_prepare(tmp_path: Path) -> None:
    report = suite(tmp_path, "slow")
    assert len(report["cases"]) >= 6
    assert {name: wrong for name, wrong in report["cases"].items() if wrong} == {}


# The instruments


def test_outcomes_of_children() -> None:
    """Each kind of fault is noticed."""

    def failing() -> int:
        print("manyheads: no", file=sys.stderr)
        return 2

    assert forked(lambda: 0).fault() == ""
    assert forked(failing).fault() == ""
    assert forked(lambda: 2).fault() == "exit code 2 without a message"
    assert forked(lambda: 1).fault() == "exit code 1"
    assert forked(lambda: int("x")).fault() == "a traceback: ValueError"
    assert forked(lambda: os.kill(os.getpid(), 9) or 0).fault() == "exit code -9"
    assert forked(lambda: sys.stderr.write("\x1b[31m") * 0).fault() == "an escape sequence on standard error"
    assert forked(lambda: os.read(os.pipe()[0], 1) and 0, seconds=0.2).fault() == "hung"
    assert forked(lambda: len(bytearray(b"x") * (300 << 20)) * 0).fault() == "memory grew by more than 200 MiB"


def test_mutations_keep_the_structure() -> None:
    seed = b'{"a": [1, 2.5, "x", null, true], "b": {"c": "d"}}'
    contents = [mutate("json", seed, random.Random(number)) for number in range(200)]
    assert contents == [mutate("json", seed, random.Random(number)) for number in range(200)], "a seed repeats a case"

    def is_json(content: bytes) -> bool:
        try:
            json.loads(content)
        except ValueError:
            return False
        return True

    assert 100 < sum(map(is_json, contents)) < 200
    assert len(set(contents)) > 150
    assert KINDS.keys() == {"json", "jsonl", "yaml", "text", "bytes", "safetensors", "gzip", "png"}


def test_cases_become_small() -> None:
    until = float("inf")
    assert smaller_bytes(b"abc" * 20 + b"!" + b"def" * 30, lambda content: b"!" in content, until) == b"!"
    assert smaller_list(list("abcdef"), lambda words: {"b", "e"} <= set(words), until) == ["b", "e"]


def test_found_cases_are_kept_as_text() -> None:
    for found in (Found("x", 1, "yaml", b"\xff\0"), Found("y", 2, command=("train", "\udcff", "é"))):
        if found.command:
            found = Found(found.fault, found.seed, command=("train", "\udcff"))
        assert Found.from_record(json.loads(json.dumps(found.record()))) == found


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))


def read_or_refused(text: str) -> dict[str, Any] | None:
    """The settings in a text; None if it was refused. The message names the file."""
    try:
        return parse_yaml(text, "file").values
    except ConfigError as error:
        return None if str(error).startswith("file") else {"its message": str(error)}


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=8), NESTED, max_size=4))
def test_json_of_any_shape_as_settings(values: dict[str, Any]) -> None:
    """JSON is YAML, nearly: what is read has the same keys, and what is refused is refused in a sentence."""
    found = read_or_refused(json.dumps(values))
    assert found is None or found.keys() <= values.keys()


@given(st.text(alphabet=st.characters(codec=None), max_size=60))
def test_any_text_as_settings(text: str) -> None:
    found = read_or_refused(text)
    assert found is None or "its message" not in found
