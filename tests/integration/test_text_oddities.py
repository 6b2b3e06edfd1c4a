"""The table of text oddities, row by row: every command does what is written of it."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from oddities.kinds import COMMANDS, DE, EN, LIMIT, Oddity, text
from oddities.page import PAGE, render
from oddities.running import Judge
from oddities.table import LATER, ODDITIES
from slices import sliced

from manyheads.catalogue import build_model
from manyheads.decoding.settings import DecodingSettings
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer import config as presets
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

QUICK = [oddity for oddity in ODDITIES if not oddity.slow and oddity.name not in LATER]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """A tiny untrained model, in a folder that every user may enter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(prefix="manyheads-oddities-"))
    base.chmod(0o755)
    try:
        tokenizer = Tokenizer.train([*EN, *DE] * 4, TokenizerSettings(vocab_size=320))
        size = tokenizer.vocab_size
        torch.manual_seed(1)
        model = build_model(
            dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size)
        )
        settings = DecodingSettings(
            num_beams=1, max_new_tokens=4, min_new_tokens=3, max_tokens=LIMIT, banned_ids=(tokenizer.unk_id,)
        )
        save_pretrained(model, base / "model", tokenizer=tokenizer, generation=settings)
        for name, lines in (("en", EN), ("de", DE)):
            (base / name).write_bytes(text(lines))
        found = Judge(base / "model", (base / "en", base / "de"), base)
        for command in COMMANDS:  # whatever is imported late is imported now: an unprivileged user may be unable to
            found.judge(ODDITIES[0], command)
        yield found
    finally:
        shutil.rmtree(base, ignore_errors=True)
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("oddity", "command"),
    sliced(
        [(oddity, command) for oddity in QUICK for command in COMMANDS],
        6,
        "text oddities",
        lambda case: f"{case[0].id}-{case[1]}",
    ),
)
def test_a_quick_oddity(judge: Judge, oddity: Oddity, command: str) -> None:
    judge.judge(oddity, command)


@pytest.mark.slow
def test_the_whole_table(judge: Judge, figure: Callable[..., None]) -> None:
    wrong = []
    for oddity in ODDITIES:
        for command in COMMANDS:
            try:
                judge.judge(oddity, command)
            except AssertionError as error:
                wrong.append(f"{oddity.name}, {command}: {error}")
    outcomes = len(ODDITIES) * len(COMMANDS)
    figure(
        "R7",
        "text oddities x commands, as written",
        oddities=len(ODDITIES),
        commands=len(COMMANDS),
        outcomes=outcomes,
        as_written=outcomes - len(wrong),
        otherwise=len(wrong),
    )
    assert not wrong, "\n".join(wrong)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "python tests/oddities/page.py writes the page anew"


def test_the_table_is_whole() -> None:
    assert len(ODDITIES) >= 40
    assert len(QUICK) >= 30
    assert {oddity.name for oddity in ODDITIES} >= LATER
    assert len({oddity.id for oddity in ODDITIES}) == len(ODDITIES)
    for oddity in ODDITIES:
        assert set(oddity.cells) == set(COMMANDS), oddity.name
