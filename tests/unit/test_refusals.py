"""What is refused before it costs memory, time or a terminal's sanity. The whole list: integration/test_hostile.py."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile.base import edit_json, reseal
from safetensors.torch import load_file, save_file

from manyheads.catalogue import build_model
from manyheads.cli.main import guarded
from manyheads.data.preparing import file_record, write_manifest
from manyheads.data.store import PairStore
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.errors import CheckpointError, ConfigError, DataError, ManyHeadsError, ModelFileError
from manyheads.files.verify import verify_folder
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.training.optim.optimiser import build_optimiser, load_optimiser_tensors, optimiser_tensors
from manyheads.training.run.state import Counters
from manyheads.training.settings import OptimiserSettings
from tests.stored_pairs import write_pairs

CONFIG = TransformerConfig(
    source_vocab_size=12,
    target_vocab_size=12,
    d_model=8,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_pretrained(build_model(CONFIG), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_decoder_layers": 1024},
        {"d_model": 2**23},
        {"positions": "learned", "max_len": 2**24},
        {"attention": {"kind": "additive", "hidden_dim": 2**24}},
    ],
)
def test_no_memory_is_taken_for_what_a_config_asks(model, changes, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *_, **__: taken.append(1))
    edit_json(model / "config.json", **changes)
    with pytest.raises(ModelFileError, match=r"(do not belong together|do not fit the model)"):
        load(reseal(model))
    assert taken == []


@pytest.mark.parametrize("changes", [{"num_decoder_layers": 10**12}, {"d_model": 10**9}, {"max_len": 10**13}])
def test_sizes_have_limits(model: Path, changes: dict[str, Any]) -> None:
    edit_json(model / "config.json", **changes)
    with pytest.raises(ConfigError, match=r"it must be from 1 to [0-9,]+"):
        load(reseal(model))


def test_weights_must_be_real_numbers(model: Path) -> None:
    path = model / "model.safetensors"
    save_file({name: tensor.view(torch.int32) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ModelFileError, match=r"holds torch.int32, the model needs torch.float32"):
        load(reseal(model))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.skipif(not Path(os.devnull).exists(), reason="no devices here")
def test_devices_are_not_read(model: Path, name: str) -> None:
    """Nor pipes, which would be waited for; the null device shows it without a wait."""
    (model / name).unlink()
    empty = {"sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "size": 0}
    reseal(model, **{name: empty})
    (model / name).symlink_to(os.devnull)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        verify_folder(model, strict=False)
    for verify in (True, False):
        with pytest.raises(ModelFileError):
            load(model, verify=verify)


def test_a_config_is_a_page(model: Path) -> None:
    with (model / "config.json").open("a") as file:
        file.write(" " * (1 << 20))
    with pytest.raises(ModelFileError, match="at most 1,048,576 bytes"):
        load(reseal(model))


def test_a_tokenizer_must_belong_to_its_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a b c d e f g h"], TokenizerSettings(kind="word", vocab_size=12))
    assert tokenizer.vocab_size == 12
    save_pretrained(build_model(CONFIG), tmp_path / "model", tokenizer=tokenizer)
    Translator.from_pretrained(tmp_path / "model", device="cpu")
    for words in ("a b c", "a b c d e f g h i j k l"):
        Tokenizer.train([words], TokenizerSettings(kind="word", vocab_size=40)).save(
            tmp_path / "model" / "tokenizer.json"
        )
        with pytest.raises(ModelFileError, match="they do not fit"):
            Translator.from_pretrained(reseal(tmp_path / "model"), device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 10**9},
        {"max_new_tokens": 10**12},
        {"min_new_tokens": 10**12},
        {"max_len_ratio": float("inf")},
        {"temperature": float("inf"), "do_sample": True, "num_beams": 1},
        {"temperature": float("nan")},
        {"banned_ids": (5,) * 200_000},
        {"forced_prefix_ids": (5,) * 200_000},
        {"max_tokens": 10**18},
    ],
)
def test_absurd_decoding_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DecodingSettings(**options)


def test_eps_is_a_small_number() -> None:
    for eps in (float("nan"), float("inf"), -1e-5):
        with pytest.raises(ConfigError, match="norm_eps"):
            TransformerConfig(norm_eps=eps)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 10**30),
        ("step", -1),
        ("epoch", 0.5),
        ("row", True),
        ("tokens", "1"),
        ("elapsed_seconds", float("nan")),
        ("window_loss", float("inf")),
        ("best_score", "low"),
        ("num_worse", None),
    ],
)
def test_counters_that_cannot_be(name: str, value: object) -> None:
    record = asdict(Counters(best_score=1.5, best_step=2))
    assert asdict(Counters.from_json(record)) == record
    with pytest.raises(CheckpointError, match=f"counter {name}"):
        Counters.from_json({**record, name: value})


def test_moments_are_real_numbers() -> None:
    model = build_model(CONFIG)
    named = dict(model.named_parameters())
    optimiser = build_optimiser(model, OptimiserSettings())
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    tensors = optimiser_tensors(optimiser, named)
    load_optimiser_tensors(optimiser, named, tensors)
    for key in ("exp_avg", "step"):
        name = next(name for name in tensors if name.startswith(key + "."))
        with pytest.raises(CheckpointError, match=r"is torch\.int8"):
            load_optimiser_tensors(optimiser, named, {**tensors, name: tensors[name].to(torch.int8)})


def test_offsets_that_wrap_around(tmp_path: Path) -> None:
    """2^62 ids of 4 bytes are as long as none, in 64 bits."""
    folder = tmp_path / "store"
    write_pairs(folder, [([5, 6, 7], [5]), ([6], [7])], vocab_size=70_000)
    path = folder / "source.offsets.bin"
    offsets = np.fromfile(path, "<i8")
    offsets[-1] += 1 << 62
    path.write_bytes(offsets.tobytes())
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {name: file_record(folder / name) for name in manifest["files"]}
    write_manifest(folder, manifest)
    with pytest.raises(DataError, match="does not fit"):
        PairStore.open(folder)


def test_messages_neither_paint_nor_fill_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(text: str) -> Callable[[], int]:
        def command() -> int:
            raise ManyHeadsError(text)

        return command

    assert guarded(fail("a\x1b[2Jb\x07\u202e ä\nsecond")) == 2
    assert capsys.readouterr().err == "manyheads: a\\x1b[2Jb\\x07\\u202e ä\nsecond\n"
    guarded(fail("\n".join(map(str, range(100)))))
    lines = capsys.readouterr().err.rstrip("\n").split("\n")
    assert len(lines) == 10
    assert lines[-1] == "... and 91 lines more"
    guarded(fail("x" * 10**6))
    assert len(capsys.readouterr().err) < 3000


def test_an_absurd_header_takes_no_memory(model: Path) -> None:
    path = model / "model.safetensors"
    for header in (1 << 60, (1 << 64) - 1, 101 << 20):
        path.write_bytes(struct.pack("<Q", header) + b"{}")
        os.truncate(path, 102 << 20)
        with pytest.raises(ModelFileError, match="not an intact safetensors file"):
            load(model, verify=False)
