"""`manyheads.nn`: its names, without torch until one is used, each with an example that runs."""

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import nn
from manyheads.catalogue import HOOKS

OF_EXTRAS = {name: HOOKS[hook].partition(":")[0] for name, hook in nn._OF_EXTRAS.items()}
MODULES = sorted({f"manyheads.nn.{place.partition(':')[0]}" for place in nn._LAZY.values()})


def test_the_three_lists_agree() -> None:
    """What is loaded, what is exported, and what type checkers are told."""
    tree = ast.parse(Path(inspect.getfile(nn)).read_text("utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            inside = "" if alias.asname in (None, alias.name) else f":{alias.name}"
            told[alias.asname or alias.name] = f"{(node.module or '').removeprefix('manyheads.nn.')}{inside}"
    assert told == {**nn._LAZY, **OF_EXTRAS}
    assert nn.__all__ == sorted([*nn._LAZY, *OF_EXTRAS]) == dir(nn)


@pytest.mark.parametrize("name", nn.__all__)
def test_a_name(name: str) -> None:
    """It is there, it is public in its module, and its docstring shows it at work."""
    found = getattr(nn, name)
    module = importlib.import_module(found.__module__)
    assert getattr(module, found.__name__) is found
    assert ">>>" in (inspect.getdoc(found) or "")


@pytest.mark.parametrize(
    "module", [*MODULES, *sorted({*OF_EXTRAS.values()}), "manyheads.nn", "manyheads.extras.peers.conventions"]
)
def test_examples(module: str) -> None:
    torch.manual_seed(0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    found: Any = importlib.import_module(module)
    for example in doctest.DocTestFinder(exclude_empty=True).find(found, extraglobs={"torch": torch}):
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0


def test_examples_of_the_page() -> None:
    """docs/attention.md, from top to bottom."""
    page = Path(__file__).parents[3] / "docs" / "attention.md"
    text = "\n".join("" if line.startswith("```") else line for line in page.read_text("utf-8").split("\n"))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0))
    assert runner.failures == 0
    assert runner.tries > 10


def test_no_torch_until_a_name_is_used() -> None:
    code = (
        "import sys, manyheads.nn; assert 'torch' not in sys.modules;"
        "manyheads.nn.MultiHeadAttention; assert 'torch' in sys.modules;"
        "from manyheads.nn import *; print(RelativeMultiHeadAttention.__name__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "RelativeAttention\n"


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="MultiHeadAtention"):
        nn.MultiHeadAtention  # noqa: B018
