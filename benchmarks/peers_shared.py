"""The peers of the folder of shared fixtures, run by its own functions with its own settings.

`peers.py` there times each peer by its function `timed`; here that function hands the step out instead, so that it can
take turns with ours. Nothing else is changed.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from harness import Step

__all__ = ["build", "reformer", "shared_peers"]

NUM_TOKENS = 64  # that decoding is made to produce


def shared_peers() -> Path | None:
    """The file, beside this checkout or where MANYHEADS_SHARED says; None: there is none."""
    default = Path(__file__).resolve().parents[2] / "shared"
    path = Path(os.environ.get("MANYHEADS_SHARED", default)) / "peers.py"
    return path if path.is_file() else None


@dataclass(frozen=True)
class _Handed:
    step: Callable[[], object]
    tokens: int
    warm: int


def _hand_over(step: Callable[[], object], tokens: int, seconds: float = 0.0, warm: int = 2) -> _Handed:
    return _Handed(step, tokens, warm)


def build(task: str, peer: str, bf16: bool = False, folder: str | None = None) -> Step:
    """A peer of `peers.TASKS`.

    Args: folder: where a decoding peer leaves its weights, its source and what it makes of it, for ours to agree with.
    """
    import torch

    peers = _load()
    torch.manual_seed(0)  # as the file's own main does
    handed: _Handed = peers.TASKS[task][peer](bf16)
    if folder is not None:
        _export(_captured(handed.step), Path(folder))
    return _step(handed, "int8" if "int8" in peer else "bf16" if bf16 else "fp32")


def reformer(function: str, length: int) -> Step:
    """A Reformer's peer at any length, in bf16. function: of `peers.py`: `ref_hf`, `ref_lucid`, `ref_full`."""
    import torch

    peers = _load()
    torch.manual_seed(0)
    return _step(getattr(peers, function)(True, length), "bf16")


def _step(handed: _Handed, precision: str) -> Step:
    return Step(handed.step, handed.tokens, handed.warm, precision, _count(_captured(handed.step)))


def _load() -> ModuleType:
    path = shared_peers()
    if path is None:
        raise FileNotFoundError("there is no peers.py in ../shared; MANYHEADS_SHARED may name another folder.")
    spec = importlib.util.spec_from_file_location("peers", path)
    assert spec is not None
    assert spec.loader is not None
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    peers.timed = _hand_over  # type: ignore[attr-defined]
    return peers


def _captured(step: Any) -> dict[str, Any]:
    """What a step holds of the function that made it, by name."""
    cells = step.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(step.__code__.co_freevars, cells, strict=True)}


def _count(held: dict[str, Any]) -> int | None:
    """Parameters that are trained: of the optimiser, or of modules where there is none."""
    import torch

    given: list[torch.nn.Parameter] = []
    for one in held.values():
        if isinstance(one, torch.optim.Optimizer):
            given += [parameter for group in one.param_groups for parameter in group["params"]]
        elif isinstance(one, torch.nn.Module):
            given += one.parameters()
    # Of both, each once; a table of sinusoidal positions may be a parameter that is not trained.
    return sum({id(p): p.numel() for p in given if p.requires_grad}.values()) or None


def _export(held: dict[str, Any], folder: Path) -> None:
    """config.json, model.safetensors and ids.json: what goes in and, greedily or by beams, what comes out."""
    import torch

    model, source, beams = held["model"], held["src"], held["beams"]
    model.save_pretrained(folder, safe_serialization=True)
    with torch.inference_mode():
        found = model.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            num_beams=beams,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    ids = {"source": source.tolist(), "found": found[:, 1:].tolist(), "num_beams": beams}
    (folder / "ids.json").write_text(json.dumps(ids), encoding="utf-8")
