"""Tokens and titles come from files; in a picture they are text and nothing else."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("matplotlib")

from manyheads.extras.inspect.drawings.attention import attention_figure
from manyheads.extras.inspect.drawings.curves import learning_curve_figure
from manyheads.extras.inspect.drawings.figure import save_figure

NAMES = [
    "<script>",
    "--><svg onload=x",
    "]]>&amp;\"'",
    "$\\frac{",
    "\x00\x1b[2J",
    "javascript:x",
    "\u202eabc",
    "x" * 5000,
]


def test_they_are_escaped(tmp_path: Path) -> None:
    weights = torch.softmax(torch.randn(2, len(NAMES), len(NAMES)), -1)
    attention = attention_figure(weights, query_tokens=NAMES, key_tokens=NAMES, title="<script>alert(1)</script>")
    curve = learning_curve_figure([{"step": 1, "train_nll": 3.0}], title="--><script>alert($1)</script>")
    for number, figure in enumerate((attention, curve)):
        png, svg = save_figure(figure, tmp_path / str(number))
        assert png.stat().st_size > 1000
        tree = ElementTree.parse(svg)  # well-formed, comments included
        tags = {element.tag.rpartition("}")[2].lower() for element in tree.iter() if isinstance(element.tag, str)}
        assert "script" not in tags
        assert not any(name.lower().startswith("on") for element in tree.iter() for name in element.attrib)
        assert "<script>" in "".join(tree.getroot().itertext())
