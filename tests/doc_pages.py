"""Pages of documentation taken apart: blocks of code, what they print, and why some are not run."""

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["REPOSITORY", "Block", "blocks_of", "differing", "headings_of", "links_of", "notebook_path", "site_script"]

REPOSITORY = Path(__file__).resolve().parents[1]


def site_script(name: str) -> Any:
    """A script of docs/_site as a module."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / "_site" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


_FENCE = re.compile(
    r"^(?P<note><!--[^\n]*-->\n+)?^```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_NOTE = re.compile(r"<!-- (not run|not compared|not in the notebook): (.+?) -->")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w])")
_LINK = re.compile(r"(?<!!)!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. output: what the page shows below it. not_run, not_compared, not_in_notebook: the reason, or
    empty."""

    page: str
    line: int
    language: str
    text: str
    output: str | None
    not_run: str
    not_compared: str
    not_in_notebook: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page (its path in the repository), in order; a `text` block is the output of the one before it.

    A comment in the line above a block, `<!-- not run: why -->`, `<!-- not in the notebook: why -->` or, above its
    output, `<!-- not compared: why -->`, gives a reason.
    """
    source = (REPOSITORY / page).read_text(encoding="utf-8")
    found: list[Block] = []
    end = -1
    for match in _FENCE.finditer(source):
        note = _NOTE.search(match["note"] or "")
        kind, reason = (note[1], note[2]) if note else ("", "")
        between = source[end : match.start()] if end >= 0 else "x"
        end = match.end()
        if match["language"] == "text":
            if not between.strip() and found and found[-1].output is None:
                before = found.pop()
                found.append(
                    Block(
                        **{
                            **vars(before),
                            "output": match["text"],
                            "not_compared": reason if kind == "not compared" else "",
                        }
                    )
                )
            continue
        line = source[: match.start("text")].count("\n") + 1
        reasons = [reason if kind == name else "" for name in ("not run", "not compared", "not in the notebook")]
        found.append(Block(page, line, match["language"], match["text"], None, *reasons))
    return found


def notebook_path(page: str) -> Path:
    """Where the notebook of a page below docs/ lies, if it has one."""
    return REPOSITORY / "docs" / "notebooks" / Path(page).relative_to("docs").with_suffix(".ipynb")


def differing(shown: str, printed: str) -> str:
    """What differs between the output that a page shows and what was printed; empty if nothing does.

    White space counts as one space, after a bracket as none. A number with a point may be off by two units of its last
    digit; other numbers must be equal. A `...` in what is shown stands for anything.
    """
    pattern, wanted, last = "", [], 0
    shown, printed = (re.sub(r"(?<=[\[(]) ", "", " ".join(text.split())) for text in (shown, printed))
    for match in re.finditer(rf"{_NUMBER.pattern}|\.\.\.", shown):
        pattern += re.escape(shown[last : match.start()])
        last = match.end()
        if match[0] == "...":
            pattern += r".*?"
        else:
            pattern += f"({_NUMBER.pattern})"
            wanted.append(match[0])
    pattern += re.escape(shown[last:])
    found = re.fullmatch(pattern.replace(r"\ ", r"\s*"), printed)
    if found is None:
        return f"shown:\n{shown}\nprinted:\n{printed}"
    for one, other in zip(wanted, found.groups(), strict=True):
        if not _close(one, other):
            return f"{one} is shown, {other} was printed, in:\n{printed}"
    return ""


def _close(shown: str, printed: str) -> bool:
    if "." not in shown and "e" not in shown:
        return shown == printed
    mantissa, _, exponent = shown.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown) - float(printed)) <= 2 * unit + 1e-12


def links_of(page: str) -> list[str]:
    """Targets of links and pictures, code left out."""
    source = (REPOSITORY / page).read_text(encoding="utf-8")
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", source)))


def headings_of(page: str) -> set[str]:
    """Anchors of a page's headings, as Git hosts and MkDocs make them of ASCII headings."""
    source = _FENCE.sub("", (REPOSITORY / page).read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", source, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
