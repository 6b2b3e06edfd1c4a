"""Models of which 0.1.0 pruned all heads of a layer: they are read, and compute what they computed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.errors import ModelFileError
from manyheads.models.pretrained import load, load_weights, save_pretrained

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


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_trained_and_saved_as_any_other_model(name: str, tmp_path: Path) -> None:
    """Its zeros stay, and the biases of its outputs learn."""
    model = load(FOLDERS / name)
    zeros = {key: one for key, one in model.named_parameters() if not one.any()}
    assert len(zeros) >= 4
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        given = (IDS, torch.tensor([5, 3]), IDS.flip(1)) if name == "transformer" else (IDS,)
        model.log_probs(*given)[..., 4].mean().neg().backward()  # type: ignore[arg-type]
        optimiser.step()
    assert not any(one.any() for one in zeros.values())
    save_pretrained(model, tmp_path / "again")
    assert last_log_probs(load(tmp_path / "again")) == last_log_probs(model)
    if name == "transformer":
        assert model.config.encoder_heads == (2, 1)
        bias = "encoder.layers.1.self_attn.out_proj.bias"
        assert not torch.equal(load_weights(tmp_path / "again")[bias], load_weights(FOLDERS / name)[bias])


def test_what_is_missing_elsewhere_is_an_error(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "transformer", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["encoder_heads"] = [2, 1]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"encoder\.layers\.1\.self_attn\.q_proj\.weight is missing"):
        load(folder, verify=False)
