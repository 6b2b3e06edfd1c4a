"""`manyheads help [COMMAND [WORD ...]]`: a help page, or of a command's options only those about a word."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from manyheads.catalogue import COMMANDS, PRESETS, RUNS, TASKS
from manyheads.cli.command_line.parsing import command, parse
from manyheads.cli.commands.task_commands import page_of
from manyheads.cli.main import main, module_of
from manyheads.cli.process import echo
from manyheads.config.checks import did_you_mean
from manyheads.config.options import CommandPage, argument


@dataclass(frozen=True, kw_only=True)
class HelpOptions:
    """Options of `manyheads help`."""

    command: str | None = argument("A command.", metavar="COMMAND", default_is="all commands are listed")
    words: tuple[str, ...] = argument(
        "Only options and settings whose names or descriptions contain this word (upper or lower case); with several "
        "words all of them. Every task of the command is searched.",
        (),
        metavar="WORD ...",
    )


PAGE = CommandPage(
    HelpOptions,
    "Show the help page of a command, as --help does; or of its options and settings only those about a word.",
    (
        "manyheads help train dropout",
        "manyheads help translate length penalty",
    ),
)


@command(PAGE, "help")
def run(options: HelpOptions) -> int:
    """Returns: 0; 2 if there is no such command, or nothing about the words."""
    if options.command is None:
        return main(["--help"])
    name, words = options.command, list(options.words)
    if name not in COMMANDS:
        echo(f"manyheads: there is no command {name!r}.{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    kind = [words.pop(0)] if name == "inspect" and words and words[0] in module_of(name).KINDS else []
    whole = partial(module_of(name).run, [*kind, "--help"])
    if not words:
        with contextlib.suppress(SystemExit):
            whole()
        return 0
    pages: list[tuple[str, Callable[[], object]]] = [("", whole), *_pages_of_other_tasks(name)]
    seen: set[str] = set()
    for place, (label, show) in enumerate(pages):
        for heading, entries in _sections(_printed(show)):
            found = [entry for entry in entries if _contains(words, entry) and entry not in seen]
            if found:
                title = f"{heading}{label if place else ''}:"
                echo("\n".join([*([""] if seen else []), title, *found]))
                seen.update(found)
    if not seen:
        page = " ".join(["manyheads", name, *kind, "--help"])
        echo(f"manyheads: no option of {name} is about {' '.join(words)!r}. All of them: {page}", file=sys.stderr)
    return 0 if seen else 2


def _pages_of_other_tasks(name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a note for headings, and what prints the page."""
    if name == "train":
        shown: set[type] = {RUNS[next(iter(RUNS))]}  # the page without a preset has its settings
        for preset, make in PRESETS.items():
            if (kind := type(make())) not in shown:
                shown.add(kind)
                yield "", partial(module_of(name).run, ["--preset", preset, "--help"])
    for page in getattr(module_of(name), "PAGES", [])[1:]:
        tasks = [task for task in TASKS if page_of(task, name) is page]
        yield f" [task {', '.join(tasks)}]", partial(parse, page, ["--help"], name)


def _printed(show: Callable[[], object]) -> list[str]:
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        show()
    return page.getvalue().split("\n")


def _sections(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield heading and entries of each section with options.

    An entry begins with two spaces; what it says is on the same line, or below with more spaces.
    """
    heading, entries = "", list[str]()
    for line in [*lines, ":"]:
        if line.startswith("   ") and entries:
            entries[-1] += f"\n{line}"
        elif line.startswith("  "):
            entries.append(line)
        elif line.endswith(":"):
            if heading != "examples":
                yield heading, entries
            heading, entries = line[:-1], []


def _contains(words: list[str], entry: str) -> bool:
    text = re.sub(r"\s+", " ", entry).lower().replace("-", "_")
    return all(word.lower().replace("-", "_") in text for word in words)
