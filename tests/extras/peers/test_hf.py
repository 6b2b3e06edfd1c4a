"""Language models of this package through AutoConfig and AutoModelForCausalLM of transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError, MissingExtraError
from manyheads.extras.peers import hf
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 20, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_layers": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "transformer-xl": {"architecture": "transformer-xl", **SIZES, "memory_len": 8},
    "adaptive": {"architecture": "transformer-xl", **SIZES, "cutoffs": [5, 10], "div_value": 2},
    "reformer": {"architecture": "reformer", **SIZES, "max_len": 16, "chunk_len": 4, "positions": "sinusoidal"},
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hf.register()
    hf.register()  # once more changes nothing


def made(kind: str) -> Any:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("manyheads", settings=SETTINGS[kind])
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", SETTINGS)
def test_loss_is_the_mean_over_labels_and_training_lowers_it(kind: str) -> None:
    model = made(kind).train()
    ids = torch.arange(32).view(2, 16) % 7
    labels = ids.clone()
    labels[1, 8:] = -100
    model.eval()
    with torch.no_grad():
        before = model(ids, labels=labels)
    counted = labels[:, 1:] != -100
    gained = before.logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0][counted]
    torch.testing.assert_close(before.loss, -gained.mean())
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(10):
        loss = model(ids, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.8 * before.loss


@pytest.mark.parametrize("kind", SETTINGS)
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = made(kind).eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert again.config.settings == model.config.settings
    assert len(list(again.parameters())) == len(list(model.parameters()))  # tied ones are still one


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    model = made("transformer-xl").eval()
    ids, padding = torch.arange(6)[None], torch.zeros(1, 3, dtype=torch.int64)
    real, hidden = torch.ones_like(ids), torch.zeros_like(padding)
    padded, mask = ([padding, ids], [hidden, real]) if side == "left" else ([ids, padding], [real, hidden])
    with torch.no_grad():
        found = model(torch.cat(padded, 1), attention_mask=torch.cat(mask, 1)).logits
        torch.testing.assert_close(found[:, 3:] if side == "left" else found[:, :6], model(ids).logits)


def test_state_in_and_state_out() -> None:
    model = made("transformer-xl").eval()
    ids = torch.arange(14)[None]
    with torch.no_grad():
        first = model(ids[:, :7])
        second = model(ids[:, 7:], state=first.state)
        torch.testing.assert_close(second.logits, model(ids).logits[:, 7:], atol=1e-5, rtol=1e-4)


def test_generate() -> None:
    model = made("transformer-xl").eval()
    ids = torch.arange(5)[None]
    found = model.generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        for place in range(5, 9):
            assert found[0, place] == model(found[:, :place]).logits[0, -1].argmax()


def test_a_trained_model_of_this_package(tmp_path: Path) -> None:
    model = build_model(TransformerXLConfig(**SIZES)).eval()
    save_pretrained(model, tmp_path / "model")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(hf.from_folder(tmp_path / "model")(ids).logits, model.log_probs(ids))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "transformer"}, "there are: transformer-xl, reformer"),
        ({**SETTINGS["reformer"], "num_hash": 3}, "num_hashes"),
        (None, "settings are missing"),
    ],
)
def test_wrong_settings(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("manyheads", settings=settings))


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[hf\]"):
        hf.register()
