"""`convert` for Transformer-XL: folders of transformers, and the original's modules that were pickled whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from official_xl import Official
from safetensors.torch import load_file, save_file

from manyheads.catalogue import build_model
from manyheads.extras.peers import PEERS
from manyheads.extras.peers.convert import export_folder, import_folder
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig

OFFICIAL, HF = "kimiyoung/TransformerXL", "transformers/TransfoXL"
KINDS: dict[str, dict[str, Any]] = {
    "relative": {"cutoffs": (7, 15), "div_value": 2, "d_embed": 8, "tie_projections": (False, True, True)},
    "one width": {"cutoffs": (7, 15), "d_embed": 8, "tie_projections": (False, True, True), "norm_position": "pre"},
    "untied": {"tie_embeddings": False, "clamp_len": 4, "same_length": True, "dropout": 0.2},
    "learned": {"attention": "relative_learned", "max_len": 14},
    "absolute": {"attention": "absolute"},
    "absolute learned": {"attention": "absolute_learned", "max_len": 14, "ext_len": 2},
}


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> Official:
    return Official(monkeypatch)


def random_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    given = {"vocab_size": 31, "d_model": 12, "num_heads": 2, "d_ff": 20, "num_layers": 2, "memory_len": 6}
    model = build_model(TransformerXLConfig(**{**given, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


IDS = torch.arange(20).view(2, 10)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old format"])
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_module_saved_whole(manyheads, official, tmp_path, changes, zipped):
    """As the original's training script leaves it: the module knows its shape, the pickle is never unpickled."""
    model = random_model(**changes)
    config, weights = PEERS[OFFICIAL].to_peer(model)
    (tmp_path / "work").mkdir()
    saved = official.model(config["model"], weights)
    torch.save(saved, tmp_path / "work" / "model.pt", _use_new_zipfile_serialization=zipped)
    torch.save({"state": {}}, tmp_path / "work" / "optimizer.pt")
    assert manyheads("convert", tmp_path / "work", "-o", tmp_path / "model") == 2
    assert manyheads("convert", tmp_path / "work", "--from-pickle", "-o", tmp_path / "model") == 0
    again = load(tmp_path / "model")
    assert torch.equal(again.log_probs(IDS), model.log_probs(IDS))
    wanted = {
        **config["model"],
        "tie_projs": [*config["model"]["tie_projs"], False, False][: len(model.config.cutoffs) + 1],
    }
    assert json.loads((tmp_path / "model" / "peer.json").read_text("utf-8"))["config"]["model"] == wanted
    assert manyheads("convert", tmp_path / "model", "--to", OFFICIAL, "-o", tmp_path / "back") == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    assert manyheads("convert", tmp_path / "back", "-o", tmp_path / "again") == 0
    assert torch.equal(load(tmp_path / "again").log_probs(IDS), model.log_probs(IDS))


def test_a_state_dict_alone_does_not_tell_its_shape(refused, tmp_path):
    _, weights = PEERS[OFFICIAL].to_peer(random_model())
    (tmp_path / "work").mkdir()
    torch.save(weights, tmp_path / "work" / "model.pt")
    assert "has no config.json" in refused("convert", tmp_path / "work", "--from-pickle", "-o", tmp_path / "model")


def test_a_module_of_another_kind(refused, tmp_path):
    (tmp_path / "work").mkdir()
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "work" / "model.pt")
    assert "not a MemTransformerLM" in refused("convert", tmp_path / "work", "--from-pickle", "-o", tmp_path / "model")


def test_transformers_folder(manyheads: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There and back: the same weights, and a config that still says what the peer's said beyond what we read."""
    model = random_model(**KINDS["relative"], initial_memory="zeros")
    save_pretrained(model, tmp_path / "model")
    assert manyheads("convert", tmp_path / "model", "--to", HF, "-o", tmp_path / "peer") == 0
    config = json.loads((tmp_path / "peer" / "config.json").read_text("utf-8"))
    assert config["model_type"] == "transfo-xl"
    (tmp_path / "peer" / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}), encoding="utf-8")
    capsys.readouterr()
    assert manyheads("convert", tmp_path / "peer", "-o", tmp_path / "again") == 0
    said = capsys.readouterr()
    assert "reads and writes ids" in said.err
    assert torch.equal(load(tmp_path / "again").log_probs(IDS), model.log_probs(IDS))
    assert manyheads("convert", tmp_path / "again", "--to", HF, "-o", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))["eos_token_id"] == 5
    assert (tmp_path / "peer" / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


NO_EXTRA_KEY = "has no model.same_length_extra_key"
SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    (HF, {"initial_memory": "zeros", "same_length": True}, []),
    (HF, {"memory_len": 0, "same_length_extra_key": True}, []),
    (HF, {}, ["model.initial_memory zeros, which is empty"]),
    (HF, {"initial_memory": "zeros", "same_length": True, "same_length_extra_key": True}, [NO_EXTRA_KEY]),
    (OFFICIAL, {}, []),
    (OFFICIAL, {"initial_memory": "zeros"}, ["model.initial_memory empty, which is zeros"]),
    (OFFICIAL, {"same_length": True, "same_length_extra_key": True}, [NO_EXTRA_KEY]),
]


@pytest.mark.parametrize(("peer", "changes", "said"), SETTINGS)
def test_settings_that_the_peer_lacks_are_named(peer, changes, said, tmp_path):
    save_pretrained(random_model(**changes), tmp_path / "model")
    notes = export_folder(tmp_path / "model", tmp_path / "peer", peer).notes
    assert len(notes) == len(said)
    assert all(part in note for part, note in zip(said, notes, strict=True))


@pytest.mark.parametrize(("changes", "said"), [({}, False), ({"norm_position": "pre"}, True)])
def test_a_first_memory_that_is_not_kept_is_named(changes: dict[str, Any], said: bool, tmp_path: Path) -> None:
    save_pretrained(random_model(**changes), tmp_path / "model")
    export_folder(tmp_path / "model", tmp_path / "peer", HF)
    notes = import_folder(tmp_path / "peer", tmp_path / "again").notes
    assert any("pre_lnorm" in note for note in notes) == said


def test_half_precision_weights_become_float32(manyheads: Callable[..., int], tmp_path: Path) -> None:
    save_pretrained(random_model(), tmp_path / "model")
    manyheads("convert", tmp_path / "model", "--to", HF, "-o", tmp_path / "peer")
    file = tmp_path / "peer" / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    assert manyheads("convert", tmp_path / "peer", "-o", tmp_path / "again") == 0
    assert {tensor.dtype for tensor in load(tmp_path / "again").state_dict().values()} == {torch.float32}


def test_what_does_not_fit_is_said(manyheads, refused, tmp_path, capsys):
    save_pretrained(random_model(), tmp_path / "model")
    for peer in ("transformers/Marian", "annotated-transformer", "torch/Transformer"):
        assert manyheads("convert", tmp_path / "model", "--to", peer, "-o", tmp_path / "peer") == 2
        assert f"{peer} cannot hold a transformer-xl" in capsys.readouterr().err
    save_pretrained(random_model(attention="absolute"), tmp_path / "absolute")
    assert "attention 'absolute'" in refused("convert", tmp_path / "absolute", "--to", HF, "-o", tmp_path / "peer")


def test_a_language_model_does_not_translate(manyheads: Callable[..., int], tmp_path: Path) -> None:
    from manyheads import Translator
    from manyheads.errors import ModelFileError

    save_pretrained(random_model(), tmp_path / "model")
    with pytest.raises(ModelFileError, match="is a language model; use `manyheads generate`"):
        Translator.from_pretrained(tmp_path / "model")
