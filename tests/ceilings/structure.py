"""Figures of the package's structure, from its syntax alone: nothing is imported.

The core is all of `src/manyheads` but `extras/`. An import under `if TYPE_CHECKING` does not count, one within a
function does.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

SMALL = 60
"""Lines of a file that may be too small to be a subject."""
_MODEL_CLASS = re.compile(
    "(Attention|Transformer|TransformerXL|Reformer|Seq2Seq|LanguageModel|Ensemble|Parser|Classifier|Tokenizer|Encoder"
    "|Decoder|Head|Score|Translator|Generator)$"
)
_EXTRA = re.compile(r"(manyheads\.)?extras\.\w")


class Module:
    """A file of the package: its dotted name, lines and what its syntax names.

    Attributes: wanted: what it imports, as (module, name or None). strings: that name an extra.
        asked: names of classes in isinstance, issubclass, `type(x) is` and `case Class()`, with their lines.
    """

    def __init__(self, path: Path, root: Path) -> None:
        text = path.read_text("utf-8")
        parts = path.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(("manyheads", *parts)).removesuffix(".__init__")
        self.is_extra = self.name.startswith("manyheads.extras.")
        self.lines = len(text.splitlines())
        self.wanted: list[tuple[str, str | None]] = []
        self.strings = 0
        self.classes: list[str] = []
        self.asked: list[tuple[int, str]] = []
        self._read(ast.parse(text))

    @property
    def folder(self) -> str:
        return self.name.rpartition(".")[0]

    def _read(self, tree: ast.Module) -> None:
        waiting: list[tuple[ast.AST, bool]] = [(tree, False)]  # a node, and whether only type checkers see it
        while waiting:
            node, for_types = waiting.pop()
            for_types = for_types or (
                isinstance(node, ast.If) and any(name == "TYPE_CHECKING" for name in _names(node.test))
            )
            waiting += [(child, for_types) for child in ast.iter_child_nodes(node)]
            match node:
                case ast.Import() if not for_types:
                    self.wanted += [(alias.name, None) for alias in node.names]
                case ast.ImportFrom() if not for_types:
                    self.wanted += [(self._base(node), alias.name) for alias in node.names]
                case ast.ClassDef():
                    self.classes.append(node.name)
                case ast.Constant(value=str(text)):
                    self.strings += _EXTRA.match(text) is not None
                case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
                    self.asked += [(classes.lineno, name) for name in _names(classes)]
                case ast.Compare(left=left, comparators=[first, *_]) if "type" in _names(left):
                    self.asked += [(first.lineno, name) for name in _names(first)]
                case ast.MatchClass(cls=wanted):
                    self.asked += [(wanted.lineno, name) for name in _names(wanted)]

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = self.name.split(".")[: None if self.is_package else -1]
        return ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])


class Structure:
    """The figures of a checkout. root: the folder with `src` and `tests`."""

    def __init__(self, root: Path) -> None:
        source = root / "src" / "manyheads"
        self.modules = {module.name: module for module in (Module(path, source) for path in source.rglob("*.py"))}
        self.tests = sum(len(path.read_text("utf-8").splitlines()) for path in (root / "tests").rglob("*.py"))

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules of the package that it imports."""
        found = {}
        for name, module in self.modules.items():
            dotted = {f"{base}.{part}" if f"{base}.{part}" in self.modules else base for base, part in module.wanted}
            found[name] = dotted & self.modules.keys() - {name}
        return found

    def depth(self) -> int:
        """Modules in the longest chain of imports."""
        known: dict[str, int] = {}

        def of(name: str, above: frozenset[str]) -> int:
            if name in above:
                return 0
            if name not in known:
                known[name] = 1 + max((of(other, above | {name}) for other in self.imports[name]), default=0)
            return known[name]

        return max(of(name, frozenset()) for name in self.imports)

    def recognised(self) -> Iterator[str]:
        """Where the class of a model, an attention or a tokenizer is asked for outside its folder."""
        home = {name: module.folder for module in self.modules.values() for name in module.classes}
        for module in self.modules.values():
            for line, name in module.asked:
                if _MODEL_CLASS.search(name) and home.get(name, module.folder) != module.folder:
                    yield f"{module.name}:{line} {name}"

    def figures(self) -> dict[str, int]:
        core = [module for module in self.modules.values() if not module.is_extra]
        importers = Counter(name for names in self.imports.values() for name in names)
        bodies = [module for module in self.modules.values() if not module.is_package]
        to_extras = sum(self.modules[name].is_extra for module in core for name in self.imports[module.name])
        to_extras += sum(module.strings for module in core if module.name != "manyheads.catalogue")
        return {
            "lines of the package": sum(module.lines for module in self.modules.values()),
            "files of the package": len(self.modules),
            "lines of the core": sum(module.lines for module in core),
            "files of the core": len(core),
            "imports": sum(map(len, self.imports.values())),
            "imports of extras by the core": to_extras,
            "depth of imports": self.depth(),
            "files with one importer": sum(importers[module.name] == 1 for module in bodies),
            f"files of at most {SMALL} lines": sum(module.lines <= SMALL for module in bodies),
            "classes recognised outside their folder": len(set(self.recognised())),
            "lines of tests": self.tests,
        }


def _names(tree: ast.AST) -> list[str]:
    """Names and attributes within an expression."""
    found = (getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(tree))
    return [name for name in found if name]
