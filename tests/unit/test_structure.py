"""The structure of the package, read from its syntax: imports without circles, tasks and architectures that are
declared and not recognised by inspection.
"""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

from long_files import LONGEST_FIRST

SOURCES = Path(__file__).resolve().parents[2] / "src"


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> set[str]:
    """The modules of this package that a module imports, anywhere in it: at the top, in functions, for types."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules().keys()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach one another (Tarjan 1972), each sorted."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]


def test_no_two_modules_import_one_another() -> None:
    # The package itself names its parts for type checkers alone.
    graph = {name: imported(tree) - {name, "manyheads"} for name, tree in modules().items()}
    assert circles(graph) == []


def layers() -> dict[str, int]:
    """Package -> its place in the list of pyproject.toml, 0 for the highest."""
    with (SOURCES.parent / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    [found] = [one for one in contracts if one["type"] == "layers"]
    return {name: place for place, row in enumerate(found["layers"]) for name in row.split(" | ")}


def test_no_module_names_one_above_it_to_import_it_late() -> None:
    """import-linter sees import statements; this test sees the names of modules in strings, for `import_module`."""
    place = layers()
    found = []
    for name, tree in modules().items():
        own = place.get(".".join(name.split(".")[:2]))
        if own is None or name == "manyheads.catalogue":  # whose strings are all there is
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules():
                other = place.get(".".join(node.value.split(".")[:2]), own)
                found += [f"{name} names {node.value}"] * (other < own)
    assert found == []


def test_architectures_and_tasks_are_never_recognised_by_their_config_class() -> None:
    """Facts are asked of the config itself, so that a new architecture or task needs no change elsewhere."""
    found = []
    for name, tree in modules().items():
        if name.startswith(("manyheads.models.", "manyheads.tasks.")) and name.count(".") >= 3:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = ast.unparse(node.args[1])
                found += [f"{name}: isinstance(..., {asked})"] * ("Config" in asked)
    assert found == []


def test_training_and_everything_below_know_no_task() -> None:
    above = ("manyheads.api", "manyheads.cli", "manyheads.extras", "manyheads.tasks", "manyheads.__main__")
    below = [name for name in modules() if not name.startswith(above)]
    known = {name: {one for one in imported(modules()[name]) if one.startswith("manyheads.tasks")} for name in below}
    assert {name: tasks for name, tasks in known.items() if tasks} == {}


# Modules that ask about devices or compilers for another reason than speed.
ASKING = {
    "manyheads.cli.commands.doctor": "prints what the machine has",
    "manyheads.decoding.model_runner": "chooses the device; a compiler is needed on CPUs only",
    "manyheads.decoding.translation_model": "another engine runs on CPUs only",
    "manyheads.distributed.process": "the GPU of this rank",
    "manyheads.distributed.group": "tensors of NCCL are on GPUs",
    "manyheads.nn.kernels.loss": "autocast",
    "manyheads.nn.kernels.reversible": "autocast, and the random generators of GPUs",
    "manyheads.nn.kernels.precision": "measures larger products on a GPU",
    "manyheads.nn.kernels.linear": "autocast",
    "manyheads.nn.kernels.modes": "is a compiler tracing what the caller asked for",
    "manyheads.extras.sample_model.making": "records the processor's instruction set in the card",
    "manyheads.training.run.device": "chooses the device, and records its name",
    "manyheads.training.run.objective": "pins batches for a GPU",
    "manyheads.training.run.step": "GPUs have a random generator of their own",
}
QUESTIONS = ("is_compiling", "get_cpu_capability", "element_size", "is_autocast_enabled", "is_available")


def test_only_the_policy_asks_about_processors_compilers_and_sizes() -> None:
    """`nn/kernels/policy.py` decides which implementation is faster; the other kernels ask it."""
    found = set()
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                parts = [ast.unparse(part) for part in (node.left, *node.comparators)]
                asks = any("device.type" in part for part in parts) and any(
                    part in ("'cpu'", "'cuda'") for part in parts
                )
            else:
                asks = isinstance(node, ast.Attribute) and node.attr in QUESTIONS
            if asks:
                found.add(name)
    assert found - ASKING.keys() == {"manyheads.nn.kernels.policy"}


def test_the_files_that_are_tested_first_are_there() -> None:
    tests = Path(__file__).resolve().parents[1]
    assert [name for name in LONGEST_FIRST if not (tests / name).is_file()] == []


def test_the_settings_of_the_gpu_tests_know_their_markers() -> None:
    """They are run with settings of their own, in which an unknown marker is an error."""
    folder = Path(__file__).resolve().parents[1] / "gpu"
    settings = (folder / "pytest.ini").read_text()
    known = {"parametrize", "skip", *re.findall(r"^    (\w+)(?:\(\w+\))?: ", settings, re.MULTILINE)}
    used = {name for file in folder.glob("*.py") for name in re.findall(r"mark\.(\w+)", file.read_text())}
    assert used - known == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    root = SOURCES.parent
    navigation = (root / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"[\w/.-]+\.md", navigation))
    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    assert pages - named == set()


# Files of other projects.
FOREIGN_FILES = {"average_checkpoints.py", "mem_transformer.py", "scripts/plot_validations.py"}


def test_every_python_file_that_a_page_names_is_there() -> None:
    root = SOURCES.parent
    there = [
        f"/{path.relative_to(root).as_posix()}"
        for folder in ("src", "tests", "benchmarks", "deploy", "docs", "examples", "recipes", "release")
        for path in (root / folder).rglob("*.py")
    ]
    pages = [root / name for name in ("CONTRIBUTING.md", "README.md", "benchmarks/README.md")]
    pages += SOURCES.rglob("README.md")
    pages += [path for path in (root / "docs").rglob("*.md") if not {"decisions", "zh"} & set(path.parts)]
    named = {
        (page.relative_to(root).as_posix(), name)
        for page in pages
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    lost = {(page, name) for page, name in named if not any(path.endswith(f"/{name}") for path in there)}
    assert {(page, name) for page, name in lost if name not in FOREIGN_FILES} == set()


def test_every_file_in_the_table_of_a_folder_is_in_it() -> None:
    rows = [
        (page.parent, name)
        for page in SOURCES.rglob("README.md")
        for name in re.findall(r"^\| `([\w/]+\.py)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(rows) > 20
    assert [(folder.name, name) for folder, name in rows if not (folder / name).is_file()] == []
