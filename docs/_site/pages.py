"""Writes the documentation as a folder of Markdown that any builder of sites reads, without hooks.

    python docs/_site/pages.py build/pages      # make docs
    python docs/_site/pages.py --addresses      # MANYHEADS_REPOSITORY=... and others, which mkdocs.yml reads

Pages are written for a Git host as well as for the site, so their links name files of the repository. Those that lie
outside docs/ come below `repository/`: Markdown as pages, other text as pages that show it. Formulas become MathML,
which browsers draw without a script or a font of ours. The reference is one page of directives of mkdocstrings.
A page in Chinese (chinese.py) and the English one that it follows link to each other below their titles.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
import chinese

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MOUNT = "repository"
# Pages of the navigation that lie outside docs/; what they and others link to follows by itself.
FIRST = [
    "README.md",
    "README.zh-CN.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "RELEASING.md",
    "recipes/README.md",
]
FOLDERS = ["benchmarks", "experiments", "src/manyheads/models"]
GROUPS = {
    "Attention": "attention",
    "Masks": "attention.masks",
    "Heads and embeddings": "heads",
    "Positions": "positions",
    "Layers": "",
}
# Logs and reasons: searched, they would stand above the pages that say how something is done.
UNSEARCHED = (
    f"{MOUNT}/experiments/",
    f"{MOUNT}/CHANGELOG.md",
    f"{MOUNT}/benchmarks/",
    "decisions/",
)
ADDRESSES = ROOT / "release" / "addresses.toml"

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = chinese.FENCE
_TITLE = re.compile(r"^# .+\n", re.MULTILINE)
_CODE = re.compile(r"(`+[^`\n]+`+|(?<=\n\n) {4}[^\n]*\n(?: {4}[^\n]*\n)*)")
_DISPLAYED = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<![\\$])\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\$)")
_TAG = re.compile(r"(<[^>]+>)")
_MARKDOWN = str.maketrans({sign: f"&#{ord(sign)};" for sign in "*_`[]|\\~"})


def pages() -> dict[str, str | Path]:
    """Return every file of the site: its path below the folder -> text, or the file to copy."""
    waiting = [*FIRST, *(str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).rglob("*.md"))]
    own = [path for path in DOCS.rglob("*") if path.is_file() and "_site" not in path.parts]
    found: dict[str, str | Path] = {}
    for path in sorted(own):
        place = path.relative_to(ROOT).as_posix()
        found[_site_path(place)] = _page(place) if path.suffix == ".md" else path
        if path.suffix == ".md":
            waiting += [other for other in _linked(place) if not other.startswith("docs/")]
    while waiting:
        place = waiting.pop()
        uri = _site_path(place)
        if uri in found or not (ROOT / place).is_file():
            continue
        if place.endswith(".md"):
            waiting += [other for other in _linked(place) if not other.startswith("docs/")]
            found[uri] = _page(place)
        elif uri.endswith(".md"):
            language = {"yaml": "yaml", "py": "python", "json": "json"}.get(place.rpartition(".")[2], "")
            text = (ROOT / place).read_text(encoding="utf-8")
            found[uri] = _head(uri) + f"# {place}\n\n````{language}\n{text}````\n"
        else:
            found[uri] = ROOT / place
    found["reference.md"] = _reference()
    return found


def write(folder: Path) -> None:
    """Replace the folder by one with all pages."""
    shutil.rmtree(folder, ignore_errors=True)
    for uri, content in pages().items():
        path = folder / uri
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, path)
        else:
            path.write_text(content, encoding="utf-8", newline="\n")


def _page(place: str) -> str:
    """Return a page, a file of the repository, with links, formulas and instructions as the site has them."""
    uri = _site_path(place)
    markdown = (ROOT / place).read_text(encoding="utf-8")
    in_chinese = place == chinese.README or place.startswith(f"{chinese.FOLDER}/")
    if in_chinese and place != chinese.README:
        markdown = chinese.pair_of(place).text()
    if name := _addresses()["index_name"]:
        markdown = with_index_name(markdown, name)
    if in_chinese:
        markdown = chinese.with_anchors(chinese.in_one_line(markdown))
    parts = _FENCE.split(markdown)
    text = "".join(part if number % 2 else with_formulas(_relinked(part, place)) for number, part in enumerate(parts))
    return _head(uri, in_chinese) + _TITLE.sub(lambda title: title[0] + _switch(place), text, count=1)


def _switch(place: str) -> str:
    """Return a link to the same page in the other language, if there is one; both README have their own."""
    if place.startswith(f"{chinese.FOLDER}/"):
        other: str | None = chinese.pair_of(place).english
        name, language = "English", "en"
    else:
        other, name, language = chinese.chinese_of(place), "简体中文", "zh-Hans"
    if other is None:
        return ""
    path = posixpath.relpath(_site_path(other), posixpath.dirname(_site_path(place)) or ".")
    return f'\n[{name}]({path}){{ lang="{language}" hreflang="{language}" rel="alternate" }}\n{{ .languages }}\n'


def _head(uri: str, in_chinese: bool = False) -> str:
    """Return the head of a page: its language, and whether the search leaves it out; empty for most."""
    facts = "language: zh\n" if in_chinese else ""
    facts += "search:\n  exclude: true\n" if uri.startswith(UNSEARCHED) else ""
    return f"---\n{facts}---\n" if facts else ""


def _relinked(text: str, place: str) -> str:
    here = posixpath.dirname(_site_path(place))

    def rewritten(match: re.Match[str]) -> str:
        path = _resolved(place, match[1])
        return match[0] if path is None else posixpath.relpath(_site_path(path), here or ".") + (match[2] or "")

    return _LINK.sub(rewritten, text)


def with_formulas(text: str) -> str:
    """Return Markdown without fences whose formulas, `$...$` and `$$...$$`, are MathML."""
    parts = _CODE.split(_DISPLAYED.sub(_displayed, text))
    return "".join(
        part if number % 2 else _INLINE.sub(lambda match: _mathml(match[1], "inline"), part)
        for number, part in enumerate(parts)
    )


def _displayed(match: re.Match[str]) -> str:
    # A wide formula scrolls; with tabindex the keyboard reaches it, too.
    return f'<div class="formula" tabindex="0">{_mathml(match[1], "block")}</div>'


def _mathml(formula: str, display: str) -> str:
    """Return MathML in which no sign means something to Markdown."""
    parts = _TAG.split(convert(formula.replace("\\|", "|").strip(), display=display))
    return "".join(part if part.startswith("<") else part.translate(_MARKDOWN) for part in parts)


def with_index_name(markdown: str, name: str) -> str:
    """Instructions that install from a clone, as they are once the package is on the index under this name."""
    return re.sub(r"(pip install '?)\.(?=[\['`\s])", rf"\g<1>{name}", markdown)


def _addresses() -> dict[str, str]:
    return tomllib.loads(ADDRESSES.read_text(encoding="utf-8"))


def _version() -> str:
    text = (ROOT / "src" / "manyheads" / "__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(version)


def _linked(place: str) -> list[str]:
    text = _FENCE.sub("", (ROOT / place).read_text(encoding="utf-8"))
    found = [_resolved(place, match[1]) for match in _LINK.finditer(text)]
    return [path for path in found if path is not None]


def _resolved(place: str, link: str) -> str | None:
    """The path in the repository of what a link names; None if it names no file there."""
    if re.match(r"[a-z]+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    return path if (ROOT / path).is_file() else None


def _site_path(place: str) -> str:
    """Where a file of the repository stands in the site."""
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    kind = place.rpartition(".")[2]
    shown = kind not in ("md", "png", "svg", "jsonl")
    return f"{MOUNT}/{place}.md" if shown else f"{MOUNT}/{place}"


def _reference() -> str:
    """Every public name of `manyheads.nn`, by the room that it lives in."""
    os.environ.setdefault("MANYHEADS_TYPECHECK", "0")
    from manyheads import nn
    from manyheads.catalogue import HOOKS

    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    paths: dict[str, str] = {}
    for name in nn.__all__:
        place, _, inside = nn._LAZY.get(name, "attention.").partition(":")  # attention of other libraries is an extra's
        paths[name] = f"manyheads.nn.{place}.{inside or name}"
        if name not in nn._LAZY:
            paths[name] = HOOKS[nn._OF_EXTRAS[name]].replace(":", ".")
        fitting = [t for t, room in GROUPS.items() if place == room or place.startswith(f"{room}.") or not room]
        groups[max(fitting, key=lambda title: len(GROUPS[title]))].append(name)
    lines = ["# Reference: manyheads.nn", "", "Every name can be imported from `manyheads.nn`.", ""]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"### {name} {{ #manyheads.nn.{name} }}", "", f"::: {paths[name]}", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="it is replaced")
    told = "print the version, and the addresses of the project, if it has any"
    parser.add_argument("--addresses", action="store_true", help=told)
    options = parser.parse_args(arguments)
    if options.folder is not None:
        write(options.folder)
    if options.addresses:
        known = {**_addresses(), "version": _version()}
        keys = ("repository", "documentation", "version")
        print(*(f"MANYHEADS_{key.upper()}={known[key]}" for key in keys if known[key]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
