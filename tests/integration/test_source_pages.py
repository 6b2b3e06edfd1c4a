"""The pages of docs/sources: every name of the tables is there, and the tables hold the names that our loaders know."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from doc_names import found_in, is_known, is_setting
from doc_pages import REPOSITORY

from manyheads.extras.peers import PEERS

FOLDER = REPOSITORY / "docs" / "sources"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
LOADERS = {
    "annotated-transformer": ["annotated-transformer"],
    "d2l": [name for name in PEERS if re.match(r"d2l/[A-Z]", name)],
    "fused-qkv": ["fused-qkv/MultiheadAttention"],
    "labml": ["labml/MultiHeadAttention", "labml/RelativeMultiHeadAttention"],
    "reformer": ["reformer-pytorch/LSHSelfAttention", "transformers/Reformer"],
    "transformer-xl": ["kimiyoung/TransformerXL"],
}


def rows(page: str) -> Iterator[list[str]]:
    """The rows of a page's tables of names: what is there, English, Chinese, what is here."""
    for table in re.findall(r"(?:^\|.*\n)+", (FOLDER / f"{page}.md").read_text("utf-8"), re.MULTILINE):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if lines[0] == ["there", "English", "中文", "here"]:
            yield from lines[2:]


def coded(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_text_has_a_page_with_names() -> None:
    assert set(PAGES) == set(LOADERS)
    assert all(len(list(rows(page))) >= 20 for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_ours_is_in_the_code(page: str) -> None:
    wrong = [name for row in rows(page) for name in coded(row[3]) if not is_known(name)]
    assert not wrong, f"{page}: {wrong} are nowhere"


@pytest.mark.parametrize("page", PAGES)
def test_every_row_is_complete(page: str) -> None:
    """A name of theirs once, both languages, and something in place of it."""
    names = [name for row in rows(page) for name in coded(row[0])]
    assert sorted(set(names)) == sorted(names), f"{page}: {sorted(n for n in names if names.count(n) > 1)} twice"
    for row in rows(page):
        assert coded(row[0]), row
        assert row[1], row
        assert re.search(r"[\u4e00-\u9fff]|softmax", row[2]), row
        assert row[3], row


@pytest.mark.parametrize("page", PAGES)
def test_the_names_that_the_loaders_read_are_listed(page: str) -> None:
    """Arguments of constructors, and the last parts of weights' names."""
    known = {part for row in rows(page) for name in coded(row[0]) for part in (name, *name.split("."))}
    missing = {name for loader in LOADERS[page] for name in read_by(PEERS[loader]) if name not in known}
    assert not missing, f"{page} lacks {sorted(missing)}"


def names_in_code(page: str) -> set[str]:
    """Classes, functions, arguments, attributes and variables of a text's modules, and names in short strings."""
    names: set[str] = set()
    for path in (REPOSITORY / "src/manyheads/extras/texts").glob(f"{page.partition('-')[0]}*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names |= {getattr(node, field) for field in ("name", "arg", "attr", "id") if hasattr(node, field)} - {None}
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and not re.search(r"\w \w+ \w", node.value)
            ):
                names |= set(re.findall(r"\w+", node.value))  # of parameters that a loop makes; no sentences
    return names


@pytest.mark.parametrize("page", PAGES)
def test_each_public_name_of_a_texts_module_has_a_row(page: str) -> None:
    """The pages are the map of the texts' functions: what a module offers, its page explains."""
    module = importlib.import_module(f"manyheads.extras.texts.{page.replace('-', '_')}")
    listed = {name for row in rows(page) for name in coded(row[0])}
    assert not set(module.__all__) - listed, f"{page} lacks {sorted(set(module.__all__) - listed)}"


def figures_and_results() -> list[list[str]]:
    """The rows of the index: page, what, kind, what is here, state."""
    [table] = re.findall(
        r"^\| page \| what \| kind \|.*\n\|.*\n((?:\|.*\n)+)", (FOLDER / "index.md").read_text("utf-8"), re.M
    )
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


@pytest.mark.parametrize("row", figures_and_results(), ids=lambda row: row[1][:40])
def test_a_figure_or_result_names_what_is_here(row: list[str]) -> None:
    page, _, kind, here, state = row
    assert re.fullmatch(r"\[(.+)\]\(\1\.md\)", page)[1] in PAGES  # type: ignore[index]
    assert kind in ("figure", "result")
    assert state in ("works", "needs the papers' hardware", "not here")
    assert coded(here)
    for name in coded(here):
        files = re.findall(r"\S+\.(?:py|yaml)\b", name)
        assert all((REPOSITORY / file).is_file() for file in files), name
        assert name.startswith("python ") or is_known(name), name
        if state == "needs the papers' hardware" and files:
            assert name in (REPOSITORY / "docs/reproducing.md").read_text("utf-8"), f"{name}: its cost is nowhere"


def test_the_counts_of_all_rows() -> None:
    states = Counter(row[4] for row in figures_and_results())
    names = sum(len(list(rows(page))) for page in PAGES)
    counts = [names, names + states.total(), names + states["works"]]
    said = (FOLDER / "index.md").read_text("utf-8").replace("\n", " ")
    wanted = "With the {} rows of names there are {} rows: {} work, {} need the papers' hardware, {} is not here."
    assert wanted.format(*counts, states["needs the papers' hardware"], states["not here"]) in said


@pytest.mark.parametrize("page", PAGES)
def test_how_many_rows_run_is_as_the_index_says(page: str) -> None:
    """A row runs if the text's module has all its names; a name that is lost changes the count."""
    known = names_in_code(page)
    outside = [row[0] for row in rows(page) if not {part for n in coded(row[0]) for part in n.split(".")} <= known]
    [said] = re.findall(rf"^\| \[.+\]\({page}\.md\) \| (\d+) \| (\d+) \|", (FOLDER / "index.md").read_text(), re.M)
    count = len(list(rows(page)))
    assert [int(number) for number in said] == [count, count - len(outside)], outside


def read_by(peer: Any) -> set[str]:
    """`attention.W_{q,k}.*` has W_q and W_k; numbers, stars, weight and bias are no names of a text."""
    names = set(peer.options)
    for theirs in vars(peer).get("layout", {}):
        for part in theirs.split("."):
            start, braces, rest = part.partition("{")
            names |= {start + choice for choice in rest.rstrip("}").split(",")} if braces else {part}
    return {name for name in names if not re.fullmatch(r"\d*|\*|weight|bias|model_type", name)}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("nn.MultiHeadAttention", True),
        ("nn.MultiHeadAttention.num_heads", True),
        ("nn.MultiHeadAttention.num_head", False),
        ("nn.masked_softmax.fully_masked", True),
        ("nn.masked_softmax.filled_with", False),
        ("nn.no_such_thing", False),
        ("model.dropout", True),
        ("--model.memory-len", True),
        ("model.drop", False),
        ("translate --beam 4", True),
        ("translate --bean 4", False),
        ("train --preset base --model.dropout 0.2", True),
        ("train --preset base --model.drop 0.2", False),
        ("inspect masks", True),
        ("inspect mask", False),
    ],
)
def test_names_are_told_apart(name: str, known: bool) -> None:
    assert is_known(name) == known


def test_a_setting_is_no_name_in_python() -> None:
    assert is_setting("data.max_tokens")
    assert not found_in("manyheads", ["data", "max_tokens"])
