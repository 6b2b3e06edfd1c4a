"""The TensorFlow original of Transformer-XL: its own checkpoints, what it computed from them, and its evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from manyheads.extras.peers import PEERS
from manyheads.extras.peers.tensorflow import find_prefix, read_checkpoint
from tests.extras.peers.test_tensorflow import CASES
from tests.parity.test_parity import compare

LOADER: Any = PEERS["tf/Transformer-XL"]


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    folder = shared / "fixtures" / "tf-transformer-xl"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_output_of_three_segments(folder: Path, case: str) -> None:
    meta = json.loads((folder / f"{case}.json").read_text())
    assert [peer for peer, loader in PEERS.items() if loader.matches(meta)] == ["tf/Transformer-XL"]
    wrapper = LOADER.from_peer(meta["config"], read_checkpoint(find_prefix(folder / case)))
    tensors = load_file(folder / f"{case}.safetensors")
    answer = wrapper.run({name: tensor for name, tensor in tensors.items() if name.startswith("in.")})
    wanted = {name: tensor for name, tensor in tensors.items() if name.startswith("out.")}
    assert answer.keys() == wanted.keys()
    problems = [compare(name, answer[name], wanted[name], meta["tolerance"]) for name in sorted(wanted)]
    assert not [problem for problem in problems if problem]


@pytest.mark.parametrize("case", CASES)
def test_the_flags_follow_from_shapes_and_dataset(folder: Path, case: str) -> None:
    config = json.loads((folder / f"{case}.json").read_text())["config"]
    weights = read_checkpoint(find_prefix(folder / case), LOADER.is_weight)
    flags = LOADER.options_of_checkpoint(weights, config["corpus_info"])
    reading = {"tgt_len", "mem_len", "clamp_len", "same_length", "eval_batch_size", "dropout", "dropatt"}
    wanted = {name: value for name, value in config["flags"].items() if name not in reading}
    found = LOADER.config_of(
        LOADER.read({"flags": {**config["flags"], **flags}, "corpus_info": config["corpus_info"]}), {}
    )
    expected = LOADER.config_of(LOADER.read({"flags": {**flags, **wanted}, "corpus_info": config["corpus_info"]}), {})
    assert found == expected
