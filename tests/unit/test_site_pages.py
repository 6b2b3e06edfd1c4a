"""The site's folder of Markdown: complete by itself, so that any builder reads it without hooks."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_pages import site_script

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ *(````*).*?^ *\1$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pages() -> Any:
    pytest.importorskip("latex2mathml", reason="no latex2mathml; pip install '.[docs]'")
    return site_script("pages")


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


@pytest.fixture
def chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, in a repository of its own: a page in both languages, a first part, and a page in English alone."""
    module = site_script("chinese")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for place, text in {
        "docs/a.md": "# A\n\n## One\n\nold words\n\n## Two\n",
        "docs/part.md": "# Part\n\n## First\n\n## Second\n\nmore words\n",
        "docs/alone.md": "# Alone\n\n## Here\n",
        "docs/zh/a.md": "# 甲\n\n## 一（一）\n\n## 二\n",
        "docs/zh/part.md": "# 部分\n\n## 第一\n",
    }.items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    for name, end in (("a", ""), ("part", ', to "Second"')):
        path = tmp_path / "docs" / "zh" / f"{name}.md"
        first = f"<!-- follows docs/{name}.md at {module.blob_of(f'docs/{name}.md')}{end} -->"
        path.write_text(f"{first}\n\n{path.read_text(encoding='utf-8')}", encoding="utf-8", newline="\n")
    (tmp_path / "README.zh-CN.md").write_text("[甲](docs/a.md#two)\n", encoding="utf-8")
    return module


@pytest.mark.parametrize(
    ("english", "chinese_link"),
    [
        ("../a.md", "a.md"),
        ("../a.md#one", "a.md#一一"),
        ("../part.md#first", "#第一"),
        ("../part.md#second", "../part.md#second"),
        ("../alone.md#here", "../alone.md#here"),
        ("../../src/x.py", "../../src/x.py"),
        ("https://host/a.md", "https://host/a.md"),
    ],
)
def test_links_follow_the_language(chinese: Any, english: str, chinese_link: str) -> None:
    page = "docs/zh/part.md"
    assert chinese.with_links(page, f"`[x]` [甲]({english})", to_chinese=True) == f"`[x]` [甲]({chinese_link})"
    back = chinese.with_links(page, f"[甲]({chinese_link})", to_chinese=False)
    assert back == f"[甲]({english})"
    assert (
        chinese.with_links(page, f"```sh\n[甲]({english})\n```\n", to_chinese=True) == f"```sh\n[甲]({english})\n```\n"
    )


def test_pages_whose_english_text_changed_are_listed(chinese, tmp_path, capsys):
    """Not those of which a block or a part that is left out changed."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    git("add", ".")
    assert chinese.main([]) == 0
    assert "All pages in Chinese follow" in capsys.readouterr().out
    assert (tmp_path / "README.zh-CN.md").read_text(encoding="utf-8") == "[甲](docs/zh/a.md#二)\n"
    english, part = tmp_path / "docs" / "a.md", tmp_path / "docs" / "part.md"
    part.write_text(part.read_text(encoding="utf-8").replace("more words", "other words"), encoding="utf-8")
    english.write_text(english.read_text(encoding="utf-8") + "\n```sh\nls\n```\n", encoding="utf-8")
    assert chinese.report() == []
    english.write_text(english.read_text(encoding="utf-8").replace("old", "new"), encoding="utf-8")
    [line] = chinese.report()
    assert re.fullmatch(r"docs/zh/a\.md: docs/a\.md has changed since; git diff [0-9a-f]{12} HEAD:docs/a\.md", line)
    assert chinese.main(["--accept", "docs/zh/a.md"]) == 0
    assert chinese.report() == []


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("", "docs/zh/b.md must begin with <!-- follows docs/b.md at "),
        ("<!-- follows docs/a.md at 0a -->\n\n", "docs/zh/b.md must begin with <!-- follows docs/b.md at "),
        (
            '<!-- follows docs/b.md at 0a, to "Nowhere" -->\n\n',
            'docs/zh/b.md ends before "## Nowhere", which docs/b.md has not',
        ),
    ],
)
def test_a_bad_first_line_gets_one_sentence(chinese, tmp_path, capsys, first, said):
    (tmp_path / "docs" / "b.md").write_text("# B\n", encoding="utf-8")
    page = tmp_path / "docs" / "zh" / "b.md"
    page.write_text(f"{first}# 乙\n", encoding="utf-8")
    assert chinese.main(["--report"]) == 2
    page.rename(page.with_name("c.md"))
    assert chinese.main(["--report"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "docs/zh/c.md follows docs/c.md, which is not there" in err
    assert err.count("\n") == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("一，\n二 three\n四\n五\n", "一，二 three\n四五\n"),
        (
            "一：\n- 二，\n  三\n1. 四。\n\n五。\n```\n六，\n七\n```\n",
            "一：\n- 二，三\n1. 四。\n\n五。\n```\n六，\n七\n```\n",
        ),
        ("| 一，|\n|---|\n一，\n`x`，\n**二**\n", "| 一，|\n|---|\n一，`x`，**二**\n"),
    ],
)
def test_chinese_lines_are_joined_without_a_space(chinese: Any, text: str, wanted: str) -> None:
    assert chinese.in_one_line(text) == wanted


def test_a_page_and_the_one_in_chinese_link_to_each_other(written: Path) -> None:
    one, other = ((written / name).read_text(encoding="utf-8") for name in ("own-data.md", "zh/own-data.md"))
    assert '\n[简体中文](zh/own-data.md){ lang="zh-Hans" hreflang="zh-Hans" rel="alternate" }\n' in one
    assert '\n[English](../own-data.md){ lang="en" hreflang="en" rel="alternate" }\n' in other
    assert other.startswith("---\nlanguage: zh\n---\n# 自己的数据 { #自己的数据 }\n")
    assert "简体中文" not in (written / "serving.md").read_text(encoding="utf-8")
