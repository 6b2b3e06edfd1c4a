"""The page for users of other toolkits: our names in it exist."""

import re
from pathlib import Path

from manyheads.catalogue import COMMANDS
from manyheads.cli.command_line.parsing import option_names
from manyheads.cli.commands.average import AverageOptions
from manyheads.cli.commands.info import InfoOptions
from manyheads.cli.commands.task_commands import EVALUATE, PREPARE, SCORE
from manyheads.cli.commands.train import TrainOptions
from manyheads.cli.commands.translate import TranslateOptions
from manyheads.config.files import dotted_names
from manyheads.extras.peers.command import ConvertOptions
from manyheads.tasks.translation.settings import TrainConfig

PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"


def ours() -> list[str]:
    """Code in the second column of all tables, except that of the Python API."""
    rows = PAGE.read_text(encoding="utf-8").partition("\n## transformers")[0].split("\n")
    cells = [row.split(" | ")[1] for row in rows if row.startswith("| ") and "here |" not in row]
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def test_options_settings_and_commands_exist() -> None:
    classes = [AverageOptions, ConvertOptions, InfoOptions, TrainOptions, TranslateOptions]
    classes += [page.options for command in (PREPARE, EVALUATE, SCORE) for page in command.PAGES]
    options = {name for one in classes for name in option_names(one)}
    settings = set(dotted_names(TrainConfig))
    found = ours()
    assert len(found) > 50
    for code in found:
        first = code.split()[0]
        if re.fullmatch(r"[a-z]+", first):
            assert first in COMMANDS, code
        for name in re.findall(r"(?<!\S)(--[\w.-]+)", code):
            assert name in options or name[2:] in settings, code
        if re.fullmatch(r"(data|training|schedule|validation|decoding|model)\.\w+", first) and first not in (
            "model.safetensors",
        ):
            assert first in settings, code
