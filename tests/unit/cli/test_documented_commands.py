"""Every command that a page, a recipe or a help page shows is one that the program takes, with options that it has.

Nothing is run: each is read by its command's own parser, which then goes no further. What a page's commands do is held
by `tests/integration/test_docs.py`, `test_readme.py` and `test_recipes.py`.
"""

import argparse
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyheads.catalogue import COMMANDS
from manyheads.cli import main
from manyheads.cli.command_line import parsing
from manyheads.cli.command_line.parsing import make_parser
from manyheads.cli.commands.train import TrainOptions, read_arguments
from manyheads.config.files import Source, to_plain
from manyheads.errors import ManyHeadsError
from manyheads.extras.inspect.commands import KINDS, kind_of
from manyheads.models.transformer.config import TransformerConfig
from manyheads.tasks import settings_resolution
from manyheads.tasks.translation.settings import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "recipes/*.md", "recipes/**/*.yaml", "src/**/*.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # what was, at its time
)
MODULES: list[Any] = [
    importlib.import_module(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    for path in sorted((ROOT / "src/manyheads").rglob("*.py"))
    if path.is_relative_to(ROOT / "src/manyheads/cli")
    or path.name in ("command.py", "options.py")
    or path.parent.name == "commands"
] + [*map(kind_of, KINDS)]
_INLINE = re.compile(r"`(manyheads [^`\n]+)`")
_FENCE = re.compile(r"^```(?!text|python|json|yaml)\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n)+")
_COMMENTED = re.compile(r"^#   (manyheads .*)", re.MULTILINE)
_PROMPT = re.compile(r"^>>> .*|^\.\.\. .*", re.MULTILINE)
# Names in capitals, in running text, and a mounted file: they stand for something of the reader's.
_STANDS_FOR = {
    "/config/my.yaml": "my.yaml",
    "N": "3",
    "PATH": "runs/demo",
    "RUN": "runs/demo",
    "FILE": "a.txt",
    "MODEL": "runs/demo",
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the pages, such as runs/demo, are not here; they are not sought on the hub either."""
    monkeypatch.setattr("manyheads.models.hub.is_hub_name", lambda name: False)


class ParsedError(Exception):
    """Raised in place of going on."""


def shown_in(page: str) -> list[str]:
    source = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith((".yaml", ".yml")):
        return _COMMENTED.findall(source)
    lines = []
    for block in itertools.chain(_FENCE.findall(source), _INDENTED.findall(source)):
        lines += _PROMPT.sub("", block).replace("\\\n", " ").split("\n")
    return [line for line in lines if "manyheads " in line] + _INLINE.findall(_FENCE.sub("", source))


def arguments_of(line: str) -> Iterator[list[str]]:
    """Arguments of every call of the program in a line of shell: behind pipes, and behind `-m` of a launcher."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split = True
    words, calls = list(lexer), [[]]  # type: ignore[var-annotated]
    while words:
        word = words.pop(0)
        if set(word) <= set("|;&"):
            calls.append([])
        elif set(word) <= set("<>"):
            words.pop(0)
        else:
            calls[-1].append(word)
    for call in calls:
        at = next((place for place, word in enumerate(call) if Path(word).name == "manyheads"), None)
        if at is not None and (at == 0 or call[at - 1] == "-m"):
            yield call[at + 1 :]


def module_of(arguments: list[str]) -> Any:
    if arguments[0] == "inspect":
        return kind_of(arguments[1])
    return main.module_of(arguments[0])


def complaint_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the program says against these arguments; empty if it takes them."""
    if not arguments or arguments[0].startswith("-") or arguments[0] == "COMMAND":
        return ""
    if arguments[0] not in COMMANDS or (arguments[0] == "inspect" and arguments[1] not in (*KINDS, "--help")):
        return f"there is no {' '.join(arguments[:2])}"
    if "--help" in arguments:
        return ""
    arguments = [_STANDS_FOR.get(word, word) for word in arguments]
    cut_short = "..." in arguments
    arguments = [word for word in arguments if word != "..."]
    if arguments[0] == "train":
        if cut_short:
            arguments = [*arguments, "--preset", "debug"]
        with monkeypatch.context() as patch:
            patch.setattr(settings_resolution, "model_layer", _of_some_model)
            return said_by(lambda: read_arguments(arguments[1:]))

    parse = parsing.parse

    def reads(page: Any, given: Any, *told: Any) -> Any:
        unknown = [one for one in parsing.read(page.options, given).mistakes if "There is no option" in one]
        if cut_short and unknown:
            raise ManyHeadsError(" ".join(unknown))
        if not cut_short:
            parse(page, given, *told)
        raise ParsedError

    with monkeypatch.context() as patch:
        for module in MODULES:
            if hasattr(module, "parse"):
                patch.setattr(module, "parse", reads)
            if hasattr(module, "set_up_machine"):
                patch.setattr(module, "set_up_machine", lambda: None)
        rest = arguments[2:] if arguments[0] == "inspect" else arguments[1:]
        return said_by(lambda: module_of(arguments).run(rest))


def _of_some_model(name: str, run_dir: str, resume: str) -> Source:
    """The layer of a model that need not exist."""
    return Source({"model": to_plain(TransformerConfig()), "initial": {"model": name}}, f"the model {name}")


def said_by(call: Any) -> str:
    try:
        call()
    except ParsedError:
        return ""
    except ManyHeadsError as error:
        return str(error)
    return ""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pages' files are that say which settings there are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"data": {"path": "data/mine"}}), encoding="utf-8")
    return tmp_path


def test_there_are_many() -> None:
    found = [call for page in PAGES for line in shown_in(page) for call in arguments_of(line)]
    assert len(found) > 150
    assert {call[0] for call in found if call} >= set(COMMANDS) - {"completion", "doctor"}


@pytest.mark.parametrize("page", PAGES)
def test_the_program_takes_what_a_page_shows(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    for line in shown_in(page):
        for call in arguments_of(line):
            complaint = complaint_of(call, monkeypatch)
            wrong += [f"manyheads {shlex.join(call)}\n    {complaint}"] if complaint else []
    assert not wrong, "\n".join(wrong)


def test_the_program_takes_its_own_examples(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [module.PAGE for module in MODULES if hasattr(module, "PAGE")]
    pages += [page for module in MODULES for page in getattr(module, "PAGES", ())]
    examples = [line for page in pages for line in page.examples]
    examples += [line for module in MODULES for line in getattr(module, "_EXAMPLES", ())]
    assert len(examples) > 30
    for line in examples:
        for call in arguments_of(line):
            assert complaint_of(call, monkeypatch) == "", line


def test_no_option_with_one_value_is_won_by_its_last_one() -> None:
    pages = [module.PAGE for module in MODULES if hasattr(module, "PAGE")]
    pages += [page for module in MODULES for page in getattr(module, "PAGES", ())]
    tried = 0
    for cls in [page.options for page in pages] + [TrainOptions]:
        settings = (TrainConfig,) if cls is TrainOptions else ()
        parser = make_parser(cls, settings)
        for name in [action.option_strings[0] for action in parser._actions if action.option_strings]:
            if parser._option_string_actions[name].nargs == "?":
                with pytest.raises(argparse.ArgumentError, match="takes one value, but is given as '1' and as '2'"):
                    parser.parse_known_args([name, "1", f"{name}=2"])
                tried += 1
    assert tried > 300


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("manyheads translate runs/demo --beems 2", "There is no option --beems"),
        ("echo a | manyheads translat runs/demo", "there is no translat"),
        ("manyheads inspect shape runs/demo --text a", "there is no inspect shape"),
        ("manyheads inspect shapes runs/demo", "give --text"),
        ("torchrun --nproc-per-node 2 -m manyheads train --preset demoo", "there is no preset 'demoo'"),
        ("manyheads train --preset demo --model.d-mode 3", "model.d_mode"),
        ("manyheads prepare --task parsing --tree-tag keep ...", "There is no option --tree-tag"),
        ("manyheads score runs/demo --source a.en --text a", "--text is an option for the task"),
        ("manyheads evaluate runs/demo --memory-length 3", "There is no option --memory-length"),
    ],
)
def test_a_mistake_is_seen(line: str, said: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [complaint] = [complaint_of(call, monkeypatch) for call in arguments_of(line)]
    assert said in complaint
