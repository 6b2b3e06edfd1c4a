"""Models of which 0.1.0 pruned all heads of a layer: they are read, and compute what they computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.architectures.pretrained import load

FOLDERS = Path(__file__).resolve().parents[2] / "golden" / "0.1.0" / "without_heads"
EXPECTED: dict[str, list[list[float]]] = json.loads((FOLDERS / "expected.json").read_text("utf-8"))
IDS = torch.arange(10).view(2, 5) * 7 % 9 + 3


def last_log_probs(model: Any) -> list[list[float]]:
    given = (IDS, torch.tensor([5, 3]), IDS.flip(1)) if hasattr(model.body, "encoder") else (IDS,)
    with torch.no_grad():
        found: list[list[float]] = model.log_probs(*given)[:, -1].tolist()
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_it_computes_what_it_computed(name: str) -> None:
    found = last_log_probs(load(FOLDERS / name))
    for row, wanted in zip(found, EXPECTED[name], strict=True):
        assert row == pytest.approx(wanted, abs=1e-5)
