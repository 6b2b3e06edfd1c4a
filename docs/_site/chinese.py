"""The pages in Chinese, docs/zh, beside the English ones that they follow.

    python docs/_site/chinese.py                    # links between pages in Chinese; then as --report
    python docs/_site/chinese.py --report           # lists pages whose English text has changed since; writes nothing
    python docs/_site/chinese.py --accept PAGE ...  # these follow their English page as it is now

A page names in its first line the English page and the version of it, as Git names its content:
`<!-- follows docs/notation.md at 3f2a91c0b7d4 -->`; `git diff 3f2a91c0b7d4 HEAD:docs/notation.md` shows what changed.
With `, to "Heading" -->` it ends before this heading. Links lead to pages in Chinese where there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "docs/zh"
NOTEBOOKS = "docs/notebooks/"
README, ENGLISH_README = "README.zh-CN.md", "README.md"
BLOB_DIGITS = 12

FENCE = re.compile(r"^( *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
# Browsers show the end of a line as a space. After full-width signs, and between two Chinese ones, there is none.
_JOINED = re.compile(
    r"(?<=[\u3001-\u303f\uff00-\uffef”])\n *+(?![\n|#>]|[-*+] |\d+\. |!\[|<|\Z)"
    r"|(?<=[\u3400-\u9fff])\n *+(?=[\u3400-\u9fff])"
)
_FIRST = re.compile(r"\A<!-- follows (?P<english>\S+) at (?P<blob>[0-9a-f]+)(?:, to \"(?P<end>.+)\")? -->\n\n")


class ChineseError(Exception):
    """Something to be repaired, in one sentence."""


class Pair(NamedTuple):
    """A page in Chinese and the English one, both as paths in the repository. end: the heading before which it ends."""

    chinese: str
    english: str
    blob: str
    end: str | None

    def text(self) -> str:
        """The page in Chinese without its first line."""
        return _FIRST.sub("", _read(self.chinese))

    def english_text(self) -> str:
        """What of the English page this one follows."""
        return _before(_read(self.english), self.end)


def pairs() -> list[Pair]:
    """Every page in Chinese below docs/zh.

    Raises: ChineseError: a page does not name what it follows.
    """
    return [pair_of(path.relative_to(ROOT).as_posix()) for path in sorted((ROOT / FOLDER).rglob("*.md"))]


def pair_of(page: str) -> Pair:
    """Raises: ChineseError: there is no such page in Chinese, or its first line is not as it should be."""
    if not (ROOT / page).is_file():
        raise ChineseError(f"there is no page {page}.")
    first = _FIRST.match(_read(page))
    english = f"docs/{posixpath.relpath(page, FOLDER)}"
    if not (ROOT / english).is_file():
        raise ChineseError(f"{page} follows {english}, which is not there.")
    if first is None or first["english"] != english:
        raise ChineseError(
            f"{page} must begin with <!-- follows {english} at {blob_of(english)} --> and an empty line."
        )
    pair = Pair(page, english, first["blob"], first["end"])
    if pair.end is not None and f"\n## {pair.end}\n" not in _read(english):
        raise ChineseError(f'{page} ends before "## {pair.end}", which {english} has not.')
    return pair


def chinese_of(english: str) -> str | None:
    """The page in Chinese that follows an English one, if there is one."""
    page = f"{FOLDER}/{english.removeprefix('docs/')}" if english.startswith("docs/") else ""
    return page if page and (ROOT / page).is_file() else None


def blob_of(place: str) -> str:
    """How Git names the content of a file, its first digits."""
    content = (ROOT / place).read_bytes().replace(b"\r\n", b"\n")
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()[:BLOB_DIGITS]


def slug(title: str) -> str:
    """The anchor that Git hosts make of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def slugs(text: str) -> list[str]:
    """Anchors of all headings of a page, in order."""
    return [slug(title) for _, title in HEADING.findall(FENCE.sub("", text))]


def with_links(page: str, text: str, *, to_chinese: bool) -> str:
    """Return text of a page whose links lead to pages in Chinese where there are any, or to the English ones.

    An anchor follows: the heading of the same number. A heading that is not in Chinese keeps its English link.
    """
    place = {pair.english: pair for pair in pairs()}
    place |= {pair.chinese: pair for pair in place.values()}
    here = posixpath.dirname(page)

    def linked(match: re.Match[str]) -> str:
        path, anchor = match[1], (match[2] or "").removeprefix("#")
        target = posixpath.normpath(posixpath.join(here, path)) if path else page
        if target.startswith(NOTEBOOKS):
            plain = NOTEBOOKS + target.removeprefix(NOTEBOOKS).removeprefix("zh/")
            translated = plain.replace(NOTEBOOKS, f"{NOTEBOOKS}zh/")
            return _link(here, translated if to_chinese and (ROOT / translated).is_file() else plain, "", page)
        if re.match(r"[a-z]+:", path) or target not in place:
            return match[0]
        pair = place[target]
        found = {True: slugs(pair.text()), False: slugs(_read(pair.english))}
        language = target == pair.chinese
        if anchor and anchor not in found[language]:  # of the other language, or wrong
            language = not language
        if anchor and anchor in found[language] and language != to_chinese:
            number = found[language].index(anchor)
            if number >= len(found[to_chinese]):
                return _link(here, pair.english, anchor, page)
            anchor = found[to_chinese][number]
        return _link(here, pair.chinese if to_chinese else pair.english, anchor, page)

    return _outside(text, lambda part: LINK.sub(linked, part))


def in_one_line(text: str) -> str:
    """Return Chinese text with each paragraph in one line."""
    return _outside(text, lambda part: _JOINED.sub("", part))


def with_anchors(text: str) -> str:
    """Return a page whose headings have the anchors of a Git host, as Python-Markdown's attribute lists."""
    return _outside(text, lambda part: HEADING.sub(lambda match: f"{match[0]} {{ #{slug(match[2])} }}", part))


def _outside(text: str, change: Callable[[str], str]) -> str:
    """Return a page with everything changed but its blocks of code."""
    return "".join(part if n % 2 else change(part) for n, part in enumerate(FENCE.split(text)))


def prose(text: str) -> str:
    """The words of a page: no blocks, no targets of links, no difference of white space."""
    return " ".join(LINK.sub("", FENCE.sub("", text)).split())


def changed(pair: Pair) -> bool:
    """Whether the English text changed since; where Git does not have the old one, whether anything did."""
    if blob_of(pair.english) == pair.blob:
        return False
    try:
        asked = subprocess.run(["git", "cat-file", "blob", pair.blob], cwd=ROOT, capture_output=True, check=False)  # noqa: S607 - git of the path
    except OSError:
        return True
    return asked.returncode != 0 or prose(_before(asked.stdout.decode(), pair.end)) != prose(pair.english_text())


def report() -> list[str]:
    """A line for each page whose English text has changed since."""
    return [
        f"{pair.chinese}: {pair.english} has changed since; git diff {pair.blob} HEAD:{pair.english}"
        for pair in pairs()
        if changed(pair)
    ]


def _link(here: str, target: str, anchor: str, page: str) -> str:
    path = "" if target == page and anchor else posixpath.relpath(target, here or ".")
    return f"{path}#{anchor}" if anchor else path


def _before(text: str, end: str | None) -> str:
    return text if end is None else text.partition(f"\n## {end}\n")[0]


def _read(place: str) -> str:
    return (ROOT / place).read_text(encoding="utf-8")


def _write(place: str, text: str) -> None:
    (ROOT / place).write_text(text, encoding="utf-8", newline="\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="write nothing")
    parser.add_argument("--accept", nargs="+", metavar="PAGE", default=[], help="such as docs/zh/index.md")
    options = parser.parse_args(arguments)
    try:
        for page in options.accept:
            pair = pair_of(page)
            _write(page, _read(page).replace(f" at {pair.blob}", f" at {blob_of(pair.english)}", 1))
        if not options.report:
            for page in [*(pair.chinese for pair in pairs()), README]:
                _write(page, with_links(page, _read(page), to_chinese=True))
        lines = report()
    except ChineseError as error:
        print(f"chinese: {error}", file=sys.stderr)
        return 2
    print(*lines or ["All pages in Chinese follow the English text as it is."], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
