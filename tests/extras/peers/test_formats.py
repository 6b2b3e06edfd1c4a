"""One table of formats: the command, its help and the documentation agree with it."""

import re
from pathlib import Path

import pytest

from manyheads.errors import ConfigError
from manyheads.extras.peers import FORMATS, PEERS
from manyheads.extras.peers.command import ConvertOptions

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_lists_every_format() -> None:
    page = (ROOT / "docs" / "converting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`[^|]*\| (yes|no)[^|]*\| (yes|no)[^|]*\|", page, re.MULTILINE)
    assert rows == [
        (peer, "yes" if one.is_read else "no", "yes" if one.is_written else "no") for peer, one in FORMATS.items()
    ]


@pytest.mark.parametrize("peer", FORMATS)
def test_every_format_can_be_asked_for(peer: str) -> None:
    assert ConvertOptions(source="a", output="b", to=peer).to == peer
    assert ConvertOptions(source="a", output="b", origin=peer).origin == peer


@pytest.mark.parametrize("peer", sorted(set(PEERS) - set(FORMATS)))
def test_single_modules_are_no_models(peer: str) -> None:
    with pytest.raises(ConfigError, match="there are:"):
        ConvertOptions(source="a", output="b", to=peer)
