"""What MkDocs is told beyond `mkdocs.yml`: formulas as MathML, files outside docs/ as pages, the reference.

Pages are written for a Git host as well as for the site, so their links name files of the repository. Those that lie
outside docs/ are put into the site below `repository/`: Markdown as pages, other text as pages that show it.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
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
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_PLACES: dict[str, str] = {}
"""src_uri of a mounted page -> its path in the repository."""


def on_config(config: Any) -> Any:
    """The addresses of the project, where it has them: links to the repository, and to each page's own address."""
    addresses = _addresses()
    config.copyright = f"manyheads {_version()}"  # at the foot of each page
    config.repo_url = addresses["repository"] or None
    config.site_url = addresses["documentation"] or config.site_url
    return config


def _version() -> str:
    text = (ROOT / "src" / "manyheads" / "__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(version)


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside docs/, and the reference."""
    _PLACES.clear()
    waiting = [*FIRST, *(str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).rglob("*.md"))]
    docs = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = {path for page in docs for path in _linked(page) if not path.startswith("docs/")}
    waiting += sorted(seen - set(waiting))
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in done or not (ROOT / path).is_file():
            continue
        done.add(path)
        uri = _site_path(path)
        if path.endswith(".md"):
            waiting += [other for other in _linked(path) if not other.startswith("docs/")]
            files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
        elif uri.endswith(".md"):
            language = {"yaml": "yaml", "py": "python", "json": "json"}.get(path.rpartition(".")[2], "")
            text = (ROOT / path).read_text(encoding="utf-8")
            files.append(File.generated(config, uri, content=f"# {path}\n\n````{language}\n{text}````\n"))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        _PLACES[uri] = path
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them."""
    here = page.file.src_uri
    if here == "reference.md":
        return markdown
    source = _PLACES.get(here, f"docs/{here}")

    def rewritten(match: re.Match[str]) -> str:
        path = _resolved(source, match[1])
        if path is None:
            return match[0]
        target = path.removeprefix("docs/") if path.startswith("docs/") else _site_path(path)
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + (match[2] or "")

    if here.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    if name := _addresses()["index_name"]:
        markdown = with_index_name(markdown, name)
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in parts)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Formulas, which arithmatex has marked, as MathML: browsers draw it without a script or a font of ours."""

    def drawn(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        formula = convert(html.unescape(match[3]).strip(), display=display)
        return f'<div class="formula">{formula}</div>' if display == "block" else formula

    return _FORMULA.sub(drawn, content)


def with_index_name(markdown: str, name: str) -> str:
    """Instructions that install from a clone, as they are once the package is on the index under this name."""
    return re.sub(r"(pip install '?)\.(?=[\['`\s])", rf"\g<1>{name}", markdown)


def _addresses() -> dict[str, str]:
    return tomllib.loads(ADDRESSES.read_text(encoding="utf-8"))


def _linked(page: str) -> list[str]:
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found = [_resolved(page, match[1]) for match in _LINK.finditer(text)]
    return [path for path in found if path is not None]


def _resolved(page: str, link: str) -> str | None:
    """The path in the repository of what a link names; None if it names no file there."""
    if re.match(r"[a-z]+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if (ROOT / path).is_file() else None


def _site_path(path: str) -> str:
    """Where a file from outside docs/ stands in the site."""
    kind = path.rpartition(".")[2]
    shown = kind not in ("md", "png", "svg", "jsonl")
    return f"{MOUNT}/{path}.md" if shown else f"{MOUNT}/{path}"


def _reference() -> str:
    """Every public name of `manyheads.nn`, by the room that it lives in."""
    os.environ.setdefault("MANYHEADS_TYPECHECK", "0")
    from manyheads import nn

    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in nn.__all__:
        place = nn._LAZY[name].partition(":")[0]
        fitting = [t for t, room in GROUPS.items() if place == room or place.startswith(f"{room}.") or not room]
        groups[max(fitting, key=lambda title: len(GROUPS[title]))].append(name)
    lines = ["# Reference: manyheads.nn", "", "Every name can be imported from `manyheads.nn`.", ""]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            module, _, inside = nn._LAZY[name].partition(":")
            lines += [f"### {name} {{ #manyheads.nn.{name} }}", ""]
            lines += [f"::: manyheads.nn.{module}.{inside or name}", ""]
    return "\n".join(lines)
