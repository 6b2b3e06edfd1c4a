"""Weights of transformers' Reformer there and back, and what cannot be held."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers import PEERS
from manyheads.extras.peers.convert import export_folder, guess_peer, import_folder
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.reformer.config import ReformerConfig

LOADER: Any = PEERS["transformers/Reformer"]

HELD = ReformerConfig(
    vocab_size=19,
    d_model=24,
    num_heads=2,
    head_dim=8,
    d_ff=40,
    num_layers=4,
    layers=("local", "lsh"),
    axial_shape=(4, 8),
    axial_dims=(8, 16),
    max_len=32,
    num_buckets=(2, 4),
    chunk_len=4,
    exact_len=4,
    local_chunk_len=4,
    visible="chunk",
    look_across_rounds=True,
    wrap=True,
    local_wrap=True,
    norm_eps=1e-12,
    ff_chunk_len=5,
    shared_rotations=True,
    pad_to_chunks=True,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False, "chunks_after": 1, "local_chunks_after": 1, "activation": "gelu"},
        {"positions": "learned", "axial_shape": (), "axial_dims": (), "num_buckets": (4,), "layers": ("lsh",)},
    ],
    ids=["decoder", "encoder", "learned"],
)
def test_there_and_back(changes: dict[str, Any], tmp_path: Path) -> None:
    """Through both kinds of folder; the same config, weights and words."""
    torch.manual_seed(0)
    model = build_model(replace(HELD, **changes)).eval()
    save_pretrained(model, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "theirs", "transformers/Reformer")
    assert guess_peer(tmp_path / "theirs") == "transformers/Reformer"
    done = import_folder(tmp_path / "theirs", tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == replace(model.config, layers=model.config.kinds)
    ids = torch.randint(0, 19, (2, 16))
    assert torch.equal(again.log_probs(ids), model.log_probs(ids))
    assert done.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"visible": "bucket", "look_across_rounds": False, "wrap": False}, "visible 'bucket'"),
        ({"exact_len": 0}, "exact_len 0"),
        ({"correct_duplicates": True}, "correct_duplicates"),
        ({"layers": ("full",)}, "attend exactly"),
        ({"layers": ("local",), "local_wrap": False, "causal": True, "local_slopes": True}, "local layers with slopes"),
        ({"layers": ("local",), "positions": "sinusoidal", "axial_shape": (), "axial_dims": ()}, "sinusoidal"),
    ],
)
def test_what_the_peer_cannot_hold(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LOADER.to_peer(build_model(replace(HELD, **changes)))


def weights() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return LOADER.to_peer(build_model(HELD))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tie_word_embeddings": True}, "twice as wide"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"attn_layers": ["lsh", "linear"]}, "attn_layers"),
        ({"attn_layers": []}, "attn_layers"),
        ({"num_buckets": "many"}, "num_buckets is 'many'"),
        ({"num_hashes": 2.0}, "num_hashes is 2.0"),
        ({"hash_seed": -1}, "hash_seed is -1"),
        ({"model_type": "bert"}, "model_type 'bert'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    config, state = weights()
    with pytest.raises(ConfigError, match=said):
        LOADER.from_peer({"model": {**config["model"], **options}}, state)


def test_weights_that_do_not_fit() -> None:
    config, state = weights()
    with pytest.raises(ModelFileError, match="one parameter"):
        LOADER.from_peer(config, {**state, "lm_head.bias": state["lm_head.bias"] + 1})
    with pytest.raises(ModelFileError, match="is missing"):
        LOADER.from_peer(config, {name: x for name, x in state.items() if "query_key" not in name})
    turned = {**state, "reformer.embeddings.position_embeddings.weights.0": torch.zeros(1, 4, 8)}
    with pytest.raises(ModelFileError, match="axial_pos_shape"):
        LOADER.from_peer(config, turned)
    old = {"reformer.encoder.layers.1.attention.self_attention.mask_value_float32": torch.tensor(-1e9)}
    LOADER.from_peer(config, {**state, **old})


def test_a_base_model_has_no_head() -> None:
    config, state = weights()
    base = {name.removeprefix("reformer."): x for name, x in state.items() if not name.startswith("lm_head.")}
    with pytest.raises(ModelFileError, match="have no language-model head"):
        LOADER.from_peer(config, base)


@pytest.mark.parametrize("activation", ["gelu_fast", "gelu_pytorch_tanh"])
def test_approximations_of_gelu(activation: str) -> None:
    config, state = weights()
    config["model"]["hidden_act"] = activation
    assert LOADER.from_peer(config, state).module.config.activation == "gelu_tanh"


@pytest.mark.parametrize(("seed", "ours"), [(None, 0), (0, 0), (7, 7)])
def test_the_seed_of_the_hashes_goes_there_and_back(seed: int | None, ours: int, tmp_path: Path) -> None:
    config, state = weights()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps({**config["model"], "model_type": "reformer", "hash_seed": seed}))
    save_file(state, theirs / "model.safetensors")
    notes = import_folder(theirs, tmp_path / "ours").notes
    assert any("new rotations in every call" in note for note in notes) == (seed is None)
    assert any("rounding fault" in note for note in notes)
    read = load(tmp_path / "ours").config
    assert read.hash_seed == ours
    assert read.shared_rotations == (seed is not None)
    export_folder(tmp_path / "ours", tmp_path / "again", "transformers/Reformer")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["hash_seed"] == seed


def test_an_open_number_of_buckets_follows_from_the_length() -> None:
    config, state = weights()
    config["model"]["num_buckets"] = None
    assert LOADER.from_peer({**config, "seq_len": 8}, state).module.config.num_buckets == (4,)
    assert LOADER.from_peer(config, state).module.config.num_buckets == (4, 4)
    assert any("num_buckets is null" in note for note in LOADER.notes_of_import(config["model"], None))


def test_factors_of_buckets_as_a_list_or_a_tuple() -> None:
    config, state = weights()
    for given, ours in (([2, 4], (2, 4)), ((2, 4), (2, 4)), ((8,), (8,)), (8, (8,))):
        config["model"]["num_buckets"] = given
        assert LOADER.from_peer(config, state).module.config.num_buckets == ours


@pytest.mark.parametrize(
    ("changes", "rounds", "lengths", "shows"),
    [
        ({}, 2, (8, 8), True),  # the first token, in two rounds
        ({}, 1, (8, 8), False),
        ({"chunks_before": 2}, 1, (8, 8), True),  # two chunks: the window reaches around to its own
        ({"chunks_before": 2}, 1, (12, 12), False),
        ({"causal": False, "local_chunks_after": 1}, 2, (8, 8), False),
        ({"causal": False, "local_chunks_after": 1}, 2, (8, 1), True),  # only padding beside it
        ({"causal": False, "local_chunks_after": 1}, 1, (8, 1), False),
        ({"causal": False, "chunks_after": 2, "local_chunks_after": 1}, 1, (8, 1), True),
    ],
)
def test_where_the_rounding_fault_shows(changes, rounds, lengths, shows):
    """As seen with transformers 5 in float32 and float64; the answer is then named as the exact one."""
    config, state = LOADER.to_peer(build_model(replace(HELD, num_hashes=rounds, **changes)))
    ids = torch.ones(2, max(lengths), dtype=torch.int64)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    answer = LOADER.from_peer(config, state).run({"in.ids": ids, "in.attention_mask": mask})
    assert ("exact.logits" in answer) == shows
    assert not shows or any("rounding fault" in note for note in LOADER.notes_of_import(config["model"], None))


def test_padding_stands_on_the_right() -> None:
    config, state = weights()
    wrapper = LOADER.from_peer(config, state)
    with pytest.raises(RequestError, match="zeros on the right"):
        wrapper.run({"in.ids": torch.zeros(1, 3, dtype=torch.int64), "in.attention_mask": torch.tensor([[0, 1, 1]])})


def test_an_export_says_where_the_peer_hashes_otherwise(tmp_path: Path) -> None:
    held = replace(HELD, ff_chunk_len=0)
    save_pretrained(build_model(replace(held, pad_to_chunks=False)), tmp_path / "ours")
    [note] = export_folder(tmp_path / "ours", tmp_path / "theirs", "transformers/Reformer").notes
    assert "model.pad_to_chunks, which is off" in note
    save_pretrained(build_model(held), tmp_path / "alike")
    assert export_folder(tmp_path / "alike", tmp_path / "theirs", "transformers/Reformer").notes == []
