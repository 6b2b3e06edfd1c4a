"""What `import manyheads` offers: names that load late, and a translator that is saved, moved and shown."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import manyheads as package
from manyheads.errors import RequestError, SaveError


def test_all_names_are_there_and_none_is_loaded_early() -> None:
    program = (
        "import sys, manyheads; assert 'torch' not in sys.modules and 'manyheads.nn' not in sys.modules;"
        "assert 'MultiHeadAttention' in dir(manyheads.nn); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Translater'"):
        _ = package.Translater


def test_a_translator_saved_and_moved(model_folder: Path, tmp_path: Path) -> None:
    translator = package.Translator.from_pretrained(model_folder)
    translator.languages = (("en", "de"),)
    translator.save_pretrained(tmp_path / "model")
    again = package.Translator.from_pretrained(tmp_path / "model").to("cpu")
    assert again.settings == translator.settings
    assert again("I am hungry.\nWhere?") == translator("I am hungry.\nWhere?")
    assert again.score("I am hungry.", "Ich habe Hunger.") == again.score(["I am hungry."], ["Ich habe Hunger."])[0]
    size = again.tokenizer.target.vocab_size
    assert repr(again) == f"Translator(transformer, en to de, {size} ids, cpu, fp32)"
    with pytest.raises(RequestError, match="cuda:99"):
        again.to("cuda:99")
    assert again.device == torch.device("cpu")


def test_a_model_saved_in_bf16_is_half_as_large_and_loads_in_fp32(model_folder: Path, tmp_path: Path) -> None:
    translator = package.Translator.from_pretrained(model_folder)
    translator.save_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    again = package.load(tmp_path / "model")
    for name, tensor in translator.model.state_dict().items():  # type: ignore[attr-defined]
        assert again.state_dict()[name].dtype == torch.float32
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "model", model_folder)]
    assert sizes[0] < 0.6 * sizes[1]
    with pytest.raises(RequestError, match=r"dtype torch.int8 is no floating type"):
        translator.save_pretrained(tmp_path / "other", dtype=torch.int8)
    with torch.no_grad():
        translator.model.body.encoder.layers[0].self_attn.q_proj.weight[0, 0] = 1e6  # type: ignore[attr-defined]
    with pytest.raises(SaveError, match=r"q_proj.weight has numbers that are too large for torch.float16"):
        translator.save_pretrained(tmp_path / "other", dtype=torch.float16)
    assert not (tmp_path / "other").exists()


def test_rounded_weights_are_not_saved(model_folder: Path, tmp_path: Path) -> None:
    translator = package.Translator.from_pretrained(model_folder)
    translator.model.body.encoder.layers[0].to(torch.bfloat16)  # type: ignore[attr-defined]
    with pytest.raises(SaveError, match="Load the model again, in fp32"):
        translator.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
