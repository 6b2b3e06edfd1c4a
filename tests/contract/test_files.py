"""What goes into files: the same model comes back, under names that do not change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from manyheads.architectures.pretrained import load, load_portable_state, portable_state, save_pretrained
from manyheads.errors import ModelFileError

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "state_dict_names.json"


def test_saved_and_loaded_says_the_same(subject: Any, precision: Any, make_batch: Any, tmp_path: Path) -> None:
    model, batch = subject.build(), make_batch([5, 3], [6, 4])
    save_pretrained(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == subject.config
    assert not again.training
    with torch.no_grad(), precision.on():
        for m in (model, again):
            m.said = m.log_probs(batch.source, batch.source_lengths, batch.target_input)
    assert torch.equal(model.said, again.said)
    ties = [sum(p is q for q in m.parameters()) for m in (model, again) for p in m.parameters()]
    assert set(ties) == {1}
    assert len(list(model.parameters())) == len(list(again.parameters()))


def test_names_are_those_of_the_snapshot(subject: Any) -> None:
    """Files of today must be readable tomorrow. MANYHEADS_UPDATE_GOLDEN=1 writes the snapshot anew, for a new model."""
    names = {name: list(tensor.shape) for name, tensor in portable_state(subject.build()).items()}
    golden = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}
    if os.environ.get("MANYHEADS_UPDATE_GOLDEN") == "1":
        golden[subject.name] = names
        lines = [f"  {json.dumps(name)}: {json.dumps(golden[name])}" for name in sorted(golden)]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert subject.name in golden
    assert names == golden[subject.name]


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel does: the model is its `module`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", ["plain", "compiled", "distributed", "both", "averaged"])
def test_wrappers_never_leak(subject: Any, wrap: str) -> None:
    """A wrapped model has the names, and the numbers, of the model in it."""
    model = subject.build()
    wrapped: Any = model
    if wrap == "averaged":
        wrapped = torch.optim.swa_utils.AveragedModel(model)
    if wrap in ("distributed", "both"):
        wrapped = Wrapper(wrapped)
    if wrap in ("compiled", "both"):
        wrapped = torch.compile(wrapped, backend="eager")
    state, plain = portable_state(wrapped), portable_state(model)
    assert list(state) == list(plain)
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    load_portable_state(wrapped, {name: tensor + 1 for name, tensor in plain.items()})
    assert all(
        torch.equal(tensor, before)
        for tensor, before in zip(portable_state(wrapped).values(), state.values(), strict=True)
    )


def test_a_file_holds_each_tied_matrix_once(subject: Any, tmp_path: Path) -> None:
    save_pretrained(subject.build(), tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as reader:
        names = list(reader.keys())
    tied = getattr(subject.config, "tie_embeddings", "none")
    tables = [name for name in names if name in ("source_embedding.weight", "target_embedding.weight", "head.weight")]
    assert len(tables) == {"all": 1, "decoder": 2, "embeddings": 2, "none": 3}[tied]


def test_weights_that_do_not_fit_are_named(subject: Any) -> None:
    model = subject.build()
    tensors = portable_state(model)
    name = next(iter(tensors))
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        load_portable_state(model, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(ModelFileError, match="stray is not part"):
        load_portable_state(model, {**tensors, "stray": torch.zeros(1)})
    with pytest.raises(ModelFileError, match="has shape"):
        load_portable_state(model, {**tensors, name: torch.zeros(1)})
