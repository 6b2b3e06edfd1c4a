"""The public names with their signatures, as `release/public-api.txt` has them.

    python tests/public_api.py          prints what differs
    python tests/public_api.py --write  writes the file anew

The names are `manyheads.__all__`, `manyheads.nn.__all__`, and those of other modules in the table of docs/versions.md.
Nothing is imported: the signatures are read from the sources.
"""

import difflib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "release" / "public-api.txt"
PAGE = ROOT / "docs" / "versions.md"
HOW = (
    "If the change is meant, write the file anew with `python tests/public_api.py --write`, and add a line to"
    " CHANGELOG.md that says what users have to change."
)


@cache
def _package() -> Any:
    """What griffe has read of the sources, which takes seconds."""
    import griffe

    return griffe.load("manyheads", search_paths=[str(ROOT / "src")], resolve_aliases=True)


def names() -> list[str]:
    """The full names of all public objects."""
    found = []
    for module in ("manyheads", "manyheads.nn"):
        inside = _package() if module == "manyheads" else _package()["nn"]
        found += [f"{module}.{name}" for name in inside.exports or () if name not in ("nn", "__version__")]
    rows = re.findall(r"^\| `(manyheads\.[\w.]+)`([^|]*)\|", PAGE.read_text("utf-8"), re.MULTILINE)
    for first, others in rows:
        module = first.rpartition(".")[0]
        found += [first, *(f"{module}.{name}" for name in re.findall(r"`(\w+)`", others))]
    return found


def lines() -> list[str]:
    """A line for each public function, class, method and field."""
    return [line for name in sorted(names()) for line in _lines(_package()[name.removeprefix("manyheads.")], name)]


def _lines(found: Any, name: str) -> Iterator[str]:
    target = found.final_target if found.is_alias else found
    if target.is_function:
        yield f"{name}{_signature(target)}"
    elif target.is_class:
        bases = [str(base).rpartition(".")[2] for base in target.bases]
        yield f"class {name}({', '.join(bases)})"
        init = target.members.get("__init__")
        if init is not None and init.is_function:
            yield f"{name}.__init__{_signature(init)}"
        inherited = {member: value.final_target for member, value in target.inherited_members.items()}
        for member, value in sorted({**inherited, **target.members}.items()):
            if member.startswith("_") or value.is_alias:
                continue
            if value.is_function:
                yield f"{name}.{member}{_signature(value)}"
            elif value.is_attribute and value.annotation is not None and "instance-attribute" not in value.labels:
                yield f"{name}.{member}: {value.annotation}{'' if value.value is None else f' = {value.value}'}"
            elif value.is_attribute and "property" in value.labels:
                yield f"{name}.{member}: {value.annotation}"
    else:
        yield f"{name}: {target.annotation}"


def _signature(function: Any) -> str:
    shown, starred = [], False
    for one in function.parameters:
        kind = str(one.kind.value)
        if kind == "keyword-only" and not starred:
            shown.append("*")
            starred = True
        starred = starred or kind == "variadic positional"
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        default = "" if one.default is None or stars else f" = {one.default}"
        shown.append(f"{stars}{one.name}{'' if one.annotation is None else f': {one.annotation}'}{default}")
    return f"({', '.join(shown)}) -> {function.returns}"


def differences() -> list[str]:
    """What differs from the file, a line each; empty if nothing does."""
    known = FILE.read_text("utf-8").splitlines()
    found = difflib.unified_diff(known, lines(), "release/public-api.txt", "src", lineterm="", n=0)
    return [line for line in found if not line.startswith("@@")]


def main(arguments: list[str]) -> int:
    if "--write" in arguments:
        FILE.write_text("\n".join(lines()) + "\n", "utf-8")
        return 0
    found = differences()
    print(*(found or ["nothing differs"]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
