"""What goes into files: the same model comes back, under names that do not change."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from manyheads.decoding.model_runner import narrow
from manyheads.errors import ModelFileError, SaveError
from manyheads.models.pretrained import load, load_portable_state, portable_state, save_pretrained
from manyheads.training.optim.optimiser import build_optimiser
from manyheads.training.settings import OptimiserSettings

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def test_saved_and_loaded_says_the_same(any_subject: Any, precision: Any, tmp_path: Path) -> None:
    model = any_subject.build()
    save_pretrained(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config == any_subject.config
    assert not again.training
    with torch.no_grad(), precision.on():
        for m in (model, again):
            m.said = any_subject.say(m)
    assert torch.equal(model.said, again.said)
    ties = [sum(p is q for q in m.parameters()) for m in (model, again) for p in m.parameters()]
    assert set(ties) == {1}
    assert len(list(model.parameters())) == len(list(again.parameters()))


def test_rounded_for_decoding_it_is_not_saved(any_subject: Any, tmp_path: Path) -> None:
    """The folder that is there stays as it was; given weights of another model, only those count."""
    model = any_subject.build()
    save_pretrained(model, tmp_path / "model")
    before = portable_state(load(tmp_path / "model"))
    narrow(model, "bf16")
    with pytest.raises(SaveError, match=r"partly bfloat16 and partly float32.*in fp32"):
        save_pretrained(model, tmp_path / "model")
    save_pretrained(model, tmp_path / "other", weights=before)
    for folder in ("model", "other"):
        after = portable_state(load(tmp_path / folder))
        assert all(torch.equal(before[name], after[name]) for name in {**before, **after})


def check_golden(file: str, name: str, value: Any) -> None:
    """Compare with an entry of a snapshot. MANYHEADS_UPDATE_GOLDEN=1 writes it anew, for a new model."""
    path = GOLDEN / file
    golden = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if os.environ.get("MANYHEADS_UPDATE_GOLDEN") == "1":
        golden[name] = value
        lines = [f"  {json.dumps(name)}: {json.dumps(golden[name])}" for name in sorted(golden)]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert name in golden
    assert value == golden[name]


@pytest.mark.golden
def test_names_are_those_of_the_snapshot(any_subject: Any) -> None:
    """Files of today must be readable tomorrow."""
    names = {name: list(tensor.shape) for name, tensor in portable_state(any_subject.build()).items()}
    check_golden("state_dict_names.json", any_subject.name, names)


@pytest.mark.golden
def test_groups_of_the_optimiser_are_those_of_the_snapshot(any_subject: Any) -> None:
    """What Muon trains and what decays; `N` in a name stands for any number. The rest is AdamW's, without decay."""
    model = any_subject.build()
    names = {id(parameter): re.sub(r"\d+", "N", name) for name, parameter in model.named_parameters()}
    optimiser = build_optimiser(model, OptimiserSettings(name="muon", learning_rate=1e-3, weight_decay=0.1))
    groups: dict[str, set[str]] = {}
    for group in optimiser.param_groups:
        kind = ("muon" if "momentum" in group else "adamw") + (", decays" if group["weight_decay"] else "")
        groups.setdefault(kind, set()).update(names[id(parameter)] for parameter in group["params"])
    groups.pop("adamw")
    check_golden("optimiser_groups.json", any_subject.name, {kind: sorted(groups[kind]) for kind in sorted(groups)})


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel does: the model is its `module`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.thinned(3)
@pytest.mark.parametrize("wrap", ["plain", "compiled", "distributed", "both", "averaged"])
def test_wrappers_never_leak(any_subject: Any, wrap: str) -> None:
    """A wrapped model has the names, and the numbers, of the model in it."""
    model = any_subject.build()
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


def test_a_language_models_ties_are_kept_once(language_model: Any, tmp_path: Path) -> None:
    """Tables, projections and shared biases: as many numbers in the file as the model has parameters."""
    model = language_model.build()
    save_pretrained(model, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as reader:
        names = list(reader.keys())
    assert len(names) == len(list(model.parameters()))
    tied = [name for name in names if name.startswith(("head.tables", "head.weight"))]
    assert bool(tied) != language_model.config.tie_embeddings
    biases = [name for name in names if name.endswith("content_bias")]
    config = language_model.config
    shared = config.share_biases and config.attention == "relative"
    assert len(biases) == (0 if config.attention.startswith("absolute") else 1 if shared else config.num_layers)


def test_a_config_of_another_model_is_refused_before_it_is_built(any_subject: Any, tmp_path: Path) -> None:
    """Hundreds of gigabytes that a damaged config asks for are never taken."""
    save_pretrained(any_subject.build(), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    values = json.loads(file.read_text("utf-8"))
    for name in ("d_ff", "num_layers", "num_encoder_layers"):
        if name in values:
            file.write_text(json.dumps({**values, name: 1024 if name.endswith("_layers") else 2**24}), encoding="utf-8")
            with pytest.raises(ModelFileError, match="do not belong together"):
                load(tmp_path / "model", verify=False)


def test_the_card_tells_the_sizes(any_subject: Any, tmp_path: Path) -> None:
    save_pretrained(any_subject.build(), tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    assert any_subject.config.describe() in card
    assert any_subject.task in card


def test_weights_that_do_not_fit_are_named(any_subject: Any) -> None:
    model = any_subject.build()
    tensors = portable_state(model)
    name = next(iter(tensors))
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        load_portable_state(model, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(ModelFileError, match="stray is not part"):
        load_portable_state(model, {**tensors, "stray": torch.zeros(1)})
    with pytest.raises(ModelFileError, match="has shape"):
        load_portable_state(model, {**tensors, name: torch.zeros(1)})
