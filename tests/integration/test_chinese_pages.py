"""Each page in Chinese says what its English page says: the same code, figures, links, structure, and agreed terms.

Blocks of these pages are not run: they are those of the English pages. What changed in English text alone is no error;
`docs/_site/chinese.py --report` lists it.
"""

import contextlib
import posixpath
import re
from collections import Counter
from typing import Any

import pytest
from doc_pages import REPOSITORY, site_script

from manyheads.cli.main import main

CHINESE = site_script("chinese")
PAIRS = {pair.chinese: pair for pair in CHINESE.pairs()}
README = "README.zh-CN.md"
COMMANDS = ("docs/commands.md", "docs/zh/commands.md")

pytestmark = pytest.mark.page

HAN = "[\u3400-\u9fff]"
_CODE = re.compile(r"`([^`\n]+)`")
_DISPLAYED = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<![\\$])\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\$)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ", re.MULTILINE)
_ROW = re.compile(r"^ *\|(.+)\| *$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?) ?(million|billion|万|亿)?")
_UNITS = {"million": 1e6, "billion": 1e9, "万": 1e4, "亿": 1e8, "": 1.0}


def outside(text: str) -> str:
    """A page without its blocks."""
    return str(CHINESE.FENCE.sub("", text))


def words(text: str) -> str:
    """A page without blocks, code, formulas, comments and targets of links."""
    text = CHINESE.LINK.sub("", outside(text))
    for pattern in (_COMMENT, _CODE, _DISPLAYED, _INLINE):
        text = pattern.sub(" ", text)
    return str(text)


def numbers(text: str) -> Counter[float]:
    """Numbers in figures; 4.5 million is 450 万."""
    return Counter(
        round(float(number.rstrip(".,").replace(",", "")) * _UNITS[unit], 6)
        for number, unit in _NUMBER.findall(words(text))
    )


def targets(page: str, text: str) -> Counter[str]:
    """What the links and pictures lead to, as paths in the repository, in English where there are both."""
    found: Counter[str] = Counter()
    for path, anchor in CHINESE.LINK.findall(outside(CHINESE.with_links(page, text, to_chinese=False))):
        inside = not re.match(r"[a-z]+:", path)
        where = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path and inside else path or page
        found[f"{PAIRS[where].english if where in PAIRS else where}{anchor}"] += 1
    return found


def rows(text: str) -> list[tuple[int, Counter[float], Counter[str]]]:
    """Of each row of a table: how many cells, the numbers and the code in it."""
    return [
        (len(re.split(r"(?<!\\)\|", _CODE.sub("", row))), numbers(row), Counter(_CODE.findall(row)))
        for row in _ROW.findall(outside(text))
    ]


def compared(chinese: str, english: str) -> list[str]:
    """What differs between two texts, beside their words; links are compared apart."""
    kinds: dict[str, Any] = {
        "blocks": CHINESE.FENCE.findall,
        "comments": _COMMENT.findall,
        "levels of headings": lambda text: [len(level) for level, _ in CHINESE.HEADING.findall(outside(text))],
        "items of lists": lambda text: len(_ITEM.findall(outside(text))),
        "rows of tables": rows,
        "displayed formulas": lambda text: _DISPLAYED.findall(outside(text)),
        "formulas": lambda text: set(_INLINE.findall(_CODE.sub("", outside(text)))),
        "code in the text": lambda text: set(_CODE.findall(outside(text))),
        "numbers": lambda text: set(numbers(text)),
    }
    mistakes = []
    for kind, of in kinds.items():
        one, other = of(chinese), of(english)
        if one == other:
            continue
        if isinstance(one, set):
            mistakes.append(f"{kind}: only in Chinese {sorted(one - other)}, only in English {sorted(other - one)}")
        elif isinstance(one, list):
            first = next(
                (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            mistakes.append(
                f"{kind}: {len(one)}, {len(other)}; at {first} {one[first : first + 1]}, {other[first : first + 1]}"
            )
        else:
            mistakes.append(f"{kind}: {one} in Chinese, {other} in English")
    return mistakes


def test_there_are_pages() -> None:
    assert {"docs/zh/index.md", "docs/zh/sources/index.md", "docs/zh/own-data.md", COMMANDS[1]} <= set(PAIRS)


@pytest.mark.parametrize("page", PAIRS)
def test_a_page_is_the_english_one_but_for_its_words(page: str) -> None:
    pair = PAIRS[page]
    mistakes = compared(pair.text(), pair.english_text())
    one, other = targets(page, pair.text()), targets(pair.english, pair.english_text())
    other.update([f"{pair.english}#{CHINESE.slug(pair.end)}"] if pair.end else [])  # where the rest is
    mistakes += (
        [f"links: only in Chinese {dict(one - other)}, only in English {dict(other - one)}"] if one != other else []
    )
    assert not mistakes, f"{page} and {pair.english} differ.\n" + "\n".join(mistakes)


def test_the_readme_has_the_links_of_the_english_one() -> None:
    one, other = (targets(page, (REPOSITORY / page).read_text(encoding="utf-8")) for page in ("README.md", README))
    assert set(one) - set(other) == {README}


@pytest.mark.parametrize("page", [*PAIRS, README])
def test_links_lead_to_pages_in_chinese(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    wanted = CHINESE.with_links(page, text, to_chinese=True)
    found, meant = ([match[0] for match in CHINESE.LINK.finditer(one)] for one in (text, wanted))
    assert found == meant, "python docs/_site/chinese.py repairs links"


@pytest.mark.parametrize(
    ("chinese", "english", "mistake"),
    [
        ("在 450 万个句对上，`a` 和 $x$", "on 4.5 million pairs, `a` and $x$", ""),
        ("共 2 层，60,000 个", "60,000 in 2 layers", ""),
        ("用 32.8 分", "with 32.9", "numbers: "),
        ("`a`", "`b`", "code in the text: "),
        ("$x$", "$y$", "formulas: "),
        ("## 一\n\n### 二", "## one\n\n## two", "levels of headings: "),
        ("- 一\n- 二", "- one", "items of lists: "),
        ("| 一 | 1 |", "| one | two | 1 |", "rows of tables: "),
        ("| 一 | 1 |\n| 二 | 2 |", "| one | 2 |\n| two | 1 |", "rows of tables: "),
        ("```sh\na # 注释\n```", "```sh\na # comment\n```", "blocks: "),
        ("<!-- not run: 为什么 -->", "<!-- not run: why -->", "comments: "),
    ],
)
def test_differences_are_found(chinese: str, english: str, mistake: str) -> None:
    found = compared(chinese, english)
    assert [one[: len(mistake)] for one in found] == ([mistake] if mistake else [])


def terms() -> list[tuple[str, str]]:
    """The term in Chinese, and a word that is not used for it."""
    table = (REPOSITORY / "docs/notation.md").read_text(encoding="utf-8").split("## Terms in Chinese")[1]
    cells = [[cell.strip() for cell in row.split("|")] for row in _ROW.findall(table)][2:]
    assert len(cells) >= 60
    return [(term, variant) for _, term, variants in cells for variant in variants.split("、") if variant]


@pytest.mark.parametrize(
    "page",
    [
        README,
        *(
            place
            for path in sorted((REPOSITORY / "docs").rglob("*.md"))
            if (place := path.relative_to(REPOSITORY).as_posix()) != "docs/notation.md"
        ),
    ],
)
def test_terms_are_the_agreed_ones(page: str) -> None:
    """Also in the tables of English pages."""
    text = words((REPOSITORY / page).read_text(encoding="utf-8"))
    assert not [f"{variant}; say {term}" for term, variant in terms() if variant in text]


STYLE = {
    "a space between Chinese and other letters": rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9%]{HAN}",
    "full-width signs": rf"{HAN}[,;:?!(]|[,;:?!)]{HAN}|{HAN}\.(?!\w)",
    "no space beside full-width signs": r"[，。：；！？（）、《》] (?!\|)(?! )|(?<![ |]) [，。：；！？）、》]",
    "signs outside of the stars, which Git hosts show else": rf"\*\*[^*\n]+[，。：；！？）》”]\*\*(?=[\w{HAN[1:-1]}])",
}


@pytest.mark.parametrize("page", [*PAIRS, README])
def test_pages_are_set_alike(page: str) -> None:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", outside((REPOSITORY / page).read_text(encoding="utf-8")))
    text = _COMMENT.sub("", re.sub(r"`[^`\n]+`|\$[^$\n]+\$", "`", text))
    mistakes = [
        f"{kind}: {text[max(0, match.start() - 12) : match.end() + 12]!r}"
        for kind, pattern in STYLE.items()
        for match in re.finditer(pattern, text)
    ]
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_have_the_examples_of_their_help(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    sections = (REPOSITORY / page).read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) == 10
    for section in sections:
        command = section.split("\n")[0]
        with contextlib.suppress(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out.partition("examples:\n")[2].partition("\n\n")[0].split("\n")
        assert re.findall(r"```sh\n(.*?)\n```", section, re.DOTALL) == ["\n".join(line.strip() for line in shown[:2])]
