"""The site's folder of Markdown: complete by itself, so that any builder reads it without hooks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ *(````*).*?^ *\1$", re.MULTILINE | re.DOTALL)


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> Any:
    pytest.importorskip("latex2mathml", reason="no latex2mathml; pip install '.[docs]'")
    return script("pages")


@pytest.fixture(scope="module")
def written(pages: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site") / "pages"
    pages.write(folder)
    return folder


def test_every_link_and_every_page_of_the_menu_is_in_the_folder(written: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    missing = [("menu", name) for name in re.findall(r"[\w/.-]+\.md", menu) if not (written / name).is_file()]
    for page in written.rglob("*.md"):
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
        for link in re.findall(r"(?<=\]\()([^)\s#]+)(?=[#)])", text):
            if not re.match(r"[a-z]+:", link) and not (page.parent / link).is_file():
                missing.append((page.relative_to(written).as_posix(), link))
    assert not missing


def test_no_formula_is_left_and_nothing_of_a_builder_but_the_reference(written: Path) -> None:
    formulas = 0
    for page in written.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        plain = re.sub(r"`[^`\n]*`|^ {4}.*$", "", FENCE.sub("", text), flags=re.MULTILINE)
        assert "$" not in plain, page
        assert "\n::: " not in plain or page.name == "reference.md", page
        formulas += plain.count("<math")
    assert formulas > 60
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "hooks" not in re.findall(r"^(\w+):", settings, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a $x$ b", r"a <math [^$]*<mi>x</mi>[^$]*</math> b"),
        ("$$\na_1 * b\n$$", r'<div class="formula" tabindex="0"><math [^$\n]*display="block"[^$\n*_]*</math></div>'),
        ("it costs \\$5 and `$HOME` and $ 3", r"it costs \\\$5 and `\$HOME` and \$ 3"),
        ("code:\n\n    echo $a $b\n\nend", r"code:\n\n    echo \$a \$b\n\nend"),
    ],
)
def test_formulas_become_mathml_that_markdown_leaves_alone(pages: Any, text: str, wanted: str) -> None:
    assert re.fullmatch(wanted, pages.with_formulas(text))


def test_logs_are_out_of_the_search_and_links_follow_a_page(written: Path) -> None:
    for name in ("decisions/README.md", "repository/CHANGELOG.md", "repository/experiments/README.md"):
        head = yaml.safe_load((written / name).read_text(encoding="utf-8").split("---\n")[1])
        assert head == {"search": {"exclude": True}}
    assert not (written / "serving.md").read_text(encoding="utf-8").startswith("---")
    readme = (written / "repository" / "README.md").read_text(encoding="utf-8")
    assert "](../inspecting.md#the-attention-page)" in readme
