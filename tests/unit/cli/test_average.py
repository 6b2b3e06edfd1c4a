"""`manyheads average`: a model from checkpoints."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.checkpoint.format import save_checkpoint
from manyheads.cli.command_line.parsing import program
from manyheads.decoding.settings import load_settings
from manyheads.decoding.translator import Translator
from manyheads.models.pretrained import load, portable_state, save_pretrained
from manyheads.models.transformer_xl.config import PRESETS

Cli = Callable[..., int]


@pytest.fixture
def run_folder(tmp_path: Path, model_folder: Path) -> Path:
    """Checkpoints whose weights are 1, 2 and 6 times the model's, and running averages of 3 times in the last two."""
    folder = tmp_path / "run"
    shutil.copytree(model_folder, folder / "model")
    state = portable_state(load(model_folder))
    for step, factor in ((10, 1.0), (20, 2.0), (30, 6.0)):
        groups = {"model": {name: tensor * factor for name, tensor in state.items()}}
        if step > 10:
            groups["ema"] = {name: tensor * 3 for name, tensor in state.items()}
        save_checkpoint(folder / "checkpoints", step, groups, {})
    return folder


def _factor(folder: Path, model_folder: Path) -> float:
    """What every weight of the model in `model_folder` was multiplied by."""
    ours, before = (
        torch.cat([t.flatten() for t in portable_state(load(path)).values()]) for path in (folder, model_folder)
    )
    ratios = (ours / before)[before.abs() > 1e-3]
    assert torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=1e-4)
    return float(ratios[0])


def test_last_and_steps(manyheads, printed, run_folder, model_folder, tmp_path):
    assert "steps 20, 30" in printed("average", run_folder, "--last", "2", "--output", tmp_path / "a")
    assert _factor(tmp_path / "a", model_folder) == pytest.approx(4.0, rel=1e-4)
    assert "steps 20, 30" in (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    assert load_settings(tmp_path / "a") == load_settings(model_folder)
    assert Translator.from_pretrained(tmp_path / "a", "cpu").translate("I am hungry.")

    assert manyheads("average", run_folder, "--steps", "10", "30", "--output", tmp_path / "b") == 0
    assert _factor(tmp_path / "b", model_folder) == pytest.approx(3.5, rel=1e-4)
    assert manyheads("average", run_folder, "--last", "2", "--weights", "ema", "-o", tmp_path / "c") == 0
    assert _factor(tmp_path / "c", model_folder) == pytest.approx(3.0, rel=1e-4)


def test_the_card_of_a_language_model(manyheads: Cli, tmp_path: Path) -> None:
    """Its example is of a language model, and runs on the averaged model."""
    model = build_model(replace(PRESETS["debug"], vocab_size=20))
    save_pretrained(model, tmp_path / "run" / "model")
    save_checkpoint(tmp_path / "run" / "checkpoints", 10, {"model": portable_state(model)}, {})
    assert manyheads("average", tmp_path / "run", "--last", "1", "--output", tmp_path / "a") == 0
    card = (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    assert "tags: [language-modelling, transformer-xl]" in card
    assert "steps 10." in card
    _, example, _ = card.split("```")
    code = example.removeprefix("python\n").replace('"."', "folder")
    found = {"folder": str(tmp_path / "a"), "ids": torch.tensor([[3, 1, 4, 1, 5]])}
    exec(code, found)  # noqa: S102
    assert found["log_probs"].shape == (1, 5, 20)


def test_nothing_is_destroyed(manyheads, refused, run_folder, model_folder, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x", encoding="utf-8")
    for options in ([], ["--replace"]):
        assert manyheads("average", run_folder, "--last", "2", "--output", precious, *options) == 2
        assert (precious / "thesis.txt").exists()
    output = tmp_path / "out"
    assert manyheads("average", run_folder, "--last", "1", "--output", output) == 0
    assert "--replace" in refused("average", run_folder, "--last", "2", "--output", output)
    assert _factor(output, model_folder) == pytest.approx(6.0, rel=1e-4)
    assert manyheads("average", run_folder, "--last", "2", "--output", output, "--replace") == 0
    assert _factor(output, model_folder) == pytest.approx(4.0, rel=1e-4)


def test_mistakes(refused, run_folder, tmp_path):
    cases: list[tuple[list[str | Path], str]] = [
        ([run_folder], "got last 0"),
        ([run_folder, "--last", "1", "--steps", "10"], "Choose either"),
        ([run_folder, "--last", "9"], "9 were asked for"),
        ([run_folder, "--steps", "15"], "no checkpoint of step 15"),
        ([run_folder, "--last", "3", "--weights", "ema"], "no running averages"),
        ([tmp_path / "none", "--last", "1"], "is not a run folder"),
    ]
    for arguments, message in cases:
        assert message in refused("average", *arguments, "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    weights = run_folder / "checkpoints" / "step-00000030" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(bytes(raw))
    assert "step-00000030" in refused("average", run_folder, "--last", "1", "--output", tmp_path / "out")
    shutil.rmtree(run_folder / "model")
    assert "no model yet" in refused("average", run_folder, "--steps", "10", "--output", tmp_path / "out")


def test_the_next_command_reads_a_text_as_the_run_does(manyheads, run_folder, tmp_path, capsys):
    config = "seed: 1\ndata:\n  path: data/x\n"
    for reading, options in (
        ("", ""),
        (
            "reading: {segment_len: 32, memory_len: 16, ext_len: 0, clamp_len: null, lanes: 1, same_length: true,"
            " documents: joined, max_tokens: 2000}",
            " --segment-len 32 --memory-len 16 --lanes 1 --same-length yes",
        ),
    ):
        (run_folder / "config.yaml").write_text(config + reading)
        assert manyheads("average", run_folder, "--last", "1", "-o", tmp_path / "a", "--replace") == 0
        assert capsys.readouterr().out.endswith(
            f"\nnext: {program()} evaluate {tmp_path / 'a'} --data data/x{options}\n"
        )
