"""Nothing in the package can turn a file into running code: the words for it do not occur."""

import ast
from pathlib import Path

import pytest

import manyheads

SOURCES = sorted(Path(manyheads.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "runpy", "code", "pty"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.Loader",
    "yaml.UnsafeLoader",
    "yaml.FullLoader",
    "np.load",
    "numpy.load",
    "os.system",
    "os.popen",
    "distributed.checkpoint",
}
ARGUMENTS = {"allow_pickle", "trust_remote_code", "shell", "weights_only"}


ALLOWED = {
    "checkpoint/format.py": {
        "torch.distributed.checkpoint.api.CheckpointException",
        "torch.distributed.checkpoint.hf_storage.HuggingFaceStorageReader",
        "torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter",
        "torch.distributed.checkpoint.state_dict_loader.load",
        "torch.distributed.checkpoint.state_dict_saver.save",
    }
}
"""Distributed checkpointing with its safetensors storage; the default one unpickles. In one file."""


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
            found += [alias.name for alias in node.names if alias.name.endswith("distributed.checkpoint")]
        elif isinstance(node, ast.ImportFrom):
            found += [str(node.module)] if str(node.module).partition(".")[0] in MODULES else []
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in full if any(name.endswith(bad) for bad in ATTRIBUTES)]
            found += [name for name in full if "distributed.checkpoint" in name]
        elif isinstance(node, ast.Call):
            found += [node.func.id] if isinstance(node.func, ast.Name) and node.func.id in CALLS else []
            found += [keyword.arg for keyword in node.keywords if keyword.arg in ARGUMENTS]
        elif isinstance(node, ast.Attribute):
            found += [dotted(node)] if any(dotted(node).endswith(bad) for bad in ATTRIBUTES) else []
    return found


def test_no_word_for_it():
    found = {path.relative_to(SOURCES[0].parent).as_posix(): findings(ast.parse(path.read_text())) for path in SOURCES}
    assert {name: set(words) for name, words in found.items() if words} == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from torch import load",
        "import torch\ntorch.load('x')",
        "import yaml\nyaml.load('x', yaml.Loader)",
        "eval('1')",
        "exec('1')",
        "__import__('os')",
        "import numpy as np\nnp.load('x')",
        "f(allow_pickle=True)",
        "f(trust_remote_code=True)",
        "import marshal",
        "import torch.distributed.checkpoint",
        "from torch.distributed import checkpoint",
        "import torch\ntorch.distributed.checkpoint.load(x)",
        "import joblib",
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert findings(ast.parse(text))


def test_modules_are_imported_by_names_from_literal_tables_alone() -> None:
    """importlib.import_module stands in few places; each takes its name from a table of ours."""
    users = {path.relative_to(SOURCES[0].parent).as_posix() for path in SOURCES if "import_module" in path.read_text()}
    lazy = {"__init__.py", "nn/__init__.py", "extras/hf/__init__.py"}
    commands = {"extras/inspect/commands/__init__.py", "cli/main.py"}
    # Of the catalogue also what an installed package has as an entry point, and what --plugin names.
    tables = {"catalogue.py", "extras/documents/formats.py", "extras/exports/engine.py"}
    # A class of this package, of which a command line writes the call: no file names it.
    calls = {"extras/inspect/commands/model.py"}
    # A runtime of other people, by a name in the same file: it is an extra, and mypy has no types for it.
    runtimes = {"extras/loggers/services.py"} | {
        f"extras/exports/{name}.py" for name in ("ctranslate2", "onnx_graphs", "transformers")
    }
    assert users == lazy | commands | tables | calls | runtimes
