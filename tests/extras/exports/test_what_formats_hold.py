"""Every format lists the fields that it holds: what is new to a config, or is another architecture, is refused."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from export_models import tokenizer, write_language_model, write_transformer

from manyheads.catalogue import ARCHITECTURES, PEERS, Architecture, build_model
from manyheads.errors import ConfigError
from manyheads.extras.exports import EXPORTS, ExportOptions, ctranslate2, onnx, web
from manyheads.extras.exports.engine import export_model
from manyheads.extras.peers import FORMATS
from manyheads.extras.peers.convert import export_folder
from manyheads.extras.peers.peer import check_held
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import TransformerConfig

pytestmark = pytest.mark.unhooked  # tracing gives tensors where the signatures say int

RUNTIMES = {"ctranslate2": "ctranslate2", "onnx": "onnx", "web": "onnx"}
PRE_NORM = {"norm_position": "pre", "tie_embeddings": "all"}
# What a format holds only of some values.
CHANGES: dict[str, dict[str, Any]] = {
    "annotated-transformer": {"norm": "unbiased", "norm_position": "pre", "head_bias": True, "num_decoder_layers": 2},
    "torch/Transformer": {"final_norm": True},
    "transformers/Pegasus": PRE_NORM,
    "karpathy/nanoGPT": {"activation": "gelu"},
    "transformers/Reformer": {
        **{"visible": "chunk", "look_across_rounds": True, "wrap": True, "exact_len": 4, "num_buckets": (2,)}
    },
}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "transformer-xl": {"memory_len": 4},
    "reformer": {"max_len": 16, "chunk_len": 4, "layers": ("lsh",)},
    "decoder": {"max_len": 16, "d_ff": 32, "attention_dropout": 0.1},
}
CASES = [(name, architecture) for name, one in EXPORTS.items() for architecture in one.architectures]
CASES += [(name, one.architecture) for name, one in FORMATS.items() if one.is_written and name not in EXPORTS]


@pytest.fixture
def _without_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_runtime_files", lambda folder: [])


@pytest.fixture
def twisted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An architecture whose config has one field more, `twist`."""
    entry = ARCHITECTURES[request.param]

    @dataclass(frozen=True, kw_only=True)
    class Twisted(entry.config):  # type: ignore[misc,name-defined]
        twist: int = 0

    monkeypatch.setattr(entry, "_config", Twisted)
    name: str = request.param
    return name


def written(folder: Path, name: str, architecture: str, twist: int) -> Path:
    changes = {"twist": twist, **CHANGES.get(name, {})}
    if architecture == "transformer":
        return write_transformer(folder, **changes)
    sizes = {"vocab_size": 20, "d_model": 8, "num_heads": 2, "d_ff": 8, "num_layers": 1}
    if name == "transformers" and architecture == "reformer":
        changes |= CHANGES["transformers/Reformer"]
    return write_language_model(folder, architecture, **{**sizes, **LANGUAGE_MODELS[architecture], **changes})


@pytest.mark.usefixtures("_without_npm")
@pytest.mark.parametrize(("name", "twisted"), CASES, indirect=["twisted"])
def test_a_new_field_is_refused_by_name(name: str, twisted: str, tmp_path: Path) -> None:
    if name in RUNTIMES:
        pytest.importorskip(RUNTIMES[name], reason=f"{RUNTIMES[name]} is not installed")

    def export(model: Path, output: Path) -> None:
        if name in EXPORTS:
            export_model(model, output, ExportOptions(to=name), check=False)
        else:
            export_folder(model, output, name)

    export(written(tmp_path / "neutral", name, twisted, 0), tmp_path / "held")
    with pytest.raises(ConfigError, match=r"cannot hold a model with (model\.)?twist 1; take another format"):
        export(written(tmp_path / "model", name, twisted, 1), tmp_path / "out")
    assert (tmp_path / "held").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name, architecture in CASES if architecture == "transformer"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"positions": "rotary"}, "positions 'rotary'"),
        ({"num_kv_heads": 1}, "num_kv_heads 1"),
        ({"norm": "rms"}, "norm 'rms'"),
        ({"ffn": "swiglu"}, "ffn 'swiglu'"),
    ],
)
def test_options_of_later_transformers_are_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    holds = ctranslate2.HOLDS["transformer"] if name == "ctranslate2" else onnx.HOLDS["transformer"]
    holds = PEERS[name].holds if name in FORMATS else holds
    if holds is onnx.HOLDS["transformer"] and named == "ffn 'swiglu'":
        return  # the graph has it
    with pytest.raises(ConfigError, match=f"cannot hold a model with {named}"):
        check_held(name, TransformerConfig(**{**CHANGES.get(name, {}), **changes}), holds)


def test_all_listed_fields_exist() -> None:
    tables = [(architecture, holds) for one in (ctranslate2, onnx) for architecture, holds in one.HOLDS.items()]
    tables += [(one.architecture, PEERS[name].holds) for name, one in FORMATS.items() if one.is_written]
    for architecture, holds in tables:
        assert holds
        assert set(holds) <= {item.name for item in fields(ARCHITECTURES[architecture].config)}
    for name in EXPORTS.keys() & FORMATS.keys():
        assert EXPORTS[name].architectures == (FORMATS[name].architecture,)


@dataclass(frozen=True, kw_only=True)
class NewConfig(ARCHITECTURES["transformer-xl"].config):  # type: ignore[misc,name-defined]
    """A language model that no format knows."""

    architecture: Literal["new-model"] = field(default="new-model")


@pytest.mark.usefixtures("_without_npm")
@pytest.mark.parametrize("name", EXPORTS)
def test_another_architecture_is_refused_with_the_formats_that_exist(name, tmp_path, monkeypatch):
    if name in RUNTIMES:
        pytest.importorskip(RUNTIMES[name], reason=f"{RUNTIMES[name]} is not installed")
    xl = ARCHITECTURES["transformer-xl"]
    new = Architecture("language-modelling", NewConfig, {}, xl._builder)
    monkeypatch.setitem(ARCHITECTURES._entries, "new-model", new)
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "num_layers": 1}
    save_pretrained(build_model(NewConfig(vocab_size=20, **sizes)), tmp_path / "new-model")
    with pytest.raises(ConfigError, match="cannot hold a new-model") as error:
        export_model(tmp_path / "new-model", tmp_path / "out", ExportOptions(to=name))
    assert "transformer" in str(error.value)
    assert all(one in str(error.value) for one in EXPORTS)
    assert not (tmp_path / "out").exists()
    for architecture, entry in ARCHITECTURES.items():
        if architecture in EXPORTS[name].architectures or architecture == "new-model":
            continue
        config = entry.presets["debug"]
        sizes = {one.name: 300 for one in fields(config) if one.name.endswith("vocab_size")}
        config = type(config)(**{**vars(config), **sizes})
        own = tokenizer() if entry.task == "translation" else None
        save_pretrained(build_model(config), tmp_path / architecture, tokenizer=own)
        with pytest.raises(ConfigError, match=f"cannot hold a {architecture}"):
            export_model(tmp_path / architecture, tmp_path / "out", ExportOptions(to=name))
