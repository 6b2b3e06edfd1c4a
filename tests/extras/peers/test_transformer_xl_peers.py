"""Both implementations of Transformer-XL: there and back, what they cannot hold, what is asked of them wrongly."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError, ManyHeadsError, ModelFileError, RequestError
from manyheads.extras.peers import PEERS
from manyheads.extras.peers.transfo_xl import by_cluster, tied_projections
from manyheads.models.transformer_xl.config import TransformerXLConfig

HF: Any = PEERS["transformers/TransfoXL"]
OFFICIAL: Any = PEERS["kimiyoung/TransformerXL"]
SAMPLED: Any = PEERS["kimiyoung/sample_logits"]
BASE = TransformerXLConfig(
    vocab_size=31, d_model=12, num_heads=2, head_dim=5, d_ff=20, num_layers=2, memory_len=6, max_len=11
)
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"cutoffs": (7, 15), "div_value": 2, "tie_projections": (False, True, True)},
    "adaptive, one width": {"cutoffs": (7, 15), "d_embed": 8, "tie_projections": (False, True, True)},
    "adaptive, one tied": {"cutoffs": (7, 15), "div_value": 2, "tie_projections": (True, False, True)},
    "adaptive, nothing tied": {"cutoffs": (7, 15), "div_value": 2, "tie_embeddings": False},
    "projected": {"d_embed": 8},
    "pre-norm, clamped": {"norm_position": "pre", "clamp_len": 4, "same_length": True, "dropout": 0.3},
}
KINDS: dict[str, dict[str, Any]] = {
    "relative_learned": {"attention": "relative_learned", "clamp_len": 4},
    "absolute": {"attention": "absolute", "clamp_len": 4, "norm_position": "pre"},
    "absolute_learned": {"attention": "absolute_learned", "head_dim": 0, "ext_len": 2},
}


def random_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = build_model(replace(BASE, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("peer", [HF, OFFICIAL], ids=["transformers", "kimiyoung"])
def test_there_and_back(peer: Any, changes: dict[str, Any]) -> None:
    there_and_back(peer, changes)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_the_other_kinds_there_and_back(changes: dict[str, Any]) -> None:
    there_and_back(OFFICIAL, changes)


def test_biases_of_each_layer_there_and_back() -> None:
    there_and_back(HF, {"share_biases": False})
    with pytest.raises(ConfigError, match="share_biases"):
        OFFICIAL.to_peer(random_model(share_biases=False))


def there_and_back(peer: Any, changes: dict[str, Any]) -> None:
    first = "zeros" if peer is HF and changes.get("norm_position") != "pre" else "empty"
    model = random_model(initial_memory=first, **changes)
    config, weights = peer.to_peer(model)
    assert len({tensor.data_ptr() for tensor in weights.values()}) == len(weights)  # safetensors shares nothing
    again = peer.from_peer(config, weights).module
    if again.config.attention not in ("relative_learned", "absolute_learned"):
        again.config = replace(again.config, max_len=BASE.max_len)  # kinds without tables have no place for it
    assert again.config == replace(
        model.config, d_embed=model.config.embedding_dim, head_dim=model.config.width_of_heads
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    ids = torch.arange(20).view(2, 10)
    assert torch.equal(again.log_probs(ids), model.log_probs(ids))


@pytest.mark.parametrize("peer", [HF, OFFICIAL], ids=["transformers", "kimiyoung"])
def test_tied_parameters_under_some_of_their_names(peer: Any) -> None:
    """A safetensors file keeps what is shared once, under whichever name came first; a pickle keeps all of them."""
    model = random_model(**CHANGES["adaptive"])
    config, weights = peer.to_peer(model)
    prefix = "transformer." if peer is HF else ""
    for lost in ([f"{prefix}word_emb.emb_layers.1.weight"], ["crit.out_layers.1.weight", "crit.out_projs.2"]):
        fewer = {name: tensor for name, tensor in weights.items() if name not in lost}
        found = peer.from_peer(config, fewer).module
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
    fewer = {name: tensor for name, tensor in weights.items() if not name.endswith("0.weight")}
    with pytest.raises(ModelFileError, match="is missing"):
        peer.from_peer(config, fewer)
    weights["crit.out_layers.1.weight"] += 1
    with pytest.raises(ModelFileError, match="differ, but the config says"):
        peer.from_peer(config, weights)


def test_tables_of_frequencies_are_no_weights() -> None:
    config, weights = HF.to_peer(random_model())
    HF.from_peer(config, {**weights, "transformer.pos_emb.inv_freq": torch.ones(6)})


def test_clusters_stand_in_reverse_in_the_original() -> None:
    _, ours = HF.to_peer(random_model(**CHANGES["adaptive"]))
    _, official = OFFICIAL.to_peer(random_model(**CHANGES["adaptive"]))
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        assert torch.equal(ours[name].flip(0), official[name])


@pytest.mark.filterwarnings("error")
def test_losses_by_cluster() -> None:
    losses = torch.arange(6.0).view(2, 3)
    targets = torch.tensor([[9, 1, 5], [0, 9, 4]])
    assert by_cluster(losses, targets, (4, 8)).tolist() == [[1.0, 3.0, 2.0], [5.0, 0.0, 4.0]]
    assert torch.equal(by_cluster(losses, targets, ()), losses)
    assert by_cluster(losses[:, 0], targets[:, 0], (4, 8)).tolist() == [3.0, 0.0]  # a column: no warning of torch's


def test_lists_of_ties() -> None:
    sizes = {"cutoffs": (3, 5), "div_value": 2, "d_embed": 8, "d_model": 8}
    assert tied_projections([False], sizes) == ()
    assert tied_projections([False, True], sizes) == (False, True, False)
    assert tied_projections([False, True, True], sizes | {"div_value": 1}) == ()


def test_zero_memories_are_attended_unless_empty() -> None:
    """Our own model begins as the peer does, but for pre-norm, where it cannot."""
    for changes in ({}, {"norm_position": "pre"}):
        config, weights = HF.to_peer(random_model(**changes))
        ids = {"in.ids.0": torch.arange(6).view(1, 6)}
        wrapper = HF.from_peer(config, weights)
        with_zeros = wrapper.run(ids)["out.logprobs.0"]
        empty = HF.from_peer({**config, "mems": "empty"}, weights).run(ids)["out.logprobs.0"]
        assert torch.equal(empty, random_model(**changes).log_probs(ids["in.ids.0"]))
        assert not torch.allclose(with_zeros, empty, atol=1e-3)
        begins = empty if changes else with_zeros
        torch.testing.assert_close(wrapper.module.log_probs(ids["in.ids.0"]), begins)


def test_raw_queries_are_put_back_to_normal() -> None:
    """The peer's habit lasts as long as its wrapper runs."""
    model = random_model(**KINDS["absolute"])
    config, weights = OFFICIAL.to_peer(model)
    wrapper = OFFICIAL.from_peer(config, weights)
    ids = torch.arange(10).view(5, 2)
    said = wrapper.run({"in.data.0": ids, "in.target.0": ids})["out.hidden.0"]
    ours = model.body(ids.t())[0].transpose(0, 1)
    assert not torch.allclose(said, ours, atol=1e-3)
    assert torch.equal(wrapper.module.body(ids.t())[0].transpose(0, 1), ours)


@pytest.mark.parametrize(
    ("peer", "option", "value", "said"),
    [
        (HF, "attn_type", 1, "knows 0 alone"),
        (HF, "d_model", "12", "of type int"),
        (HF, "same_length", 1, "of type bool"),
        (HF, "cutoffs", [1.5], "of type list"),
        (HF, "tie_projs", [1], "of type list"),
        (HF, "model_type", "gpt2", "not of a TransfoXL"),
        (HF, "vocab_size", 2**24, "do not belong together"),
        (HF, "n_layer", 1024, "do not belong together"),
        (HF, "n_layer", 10**9, "from 1 to 1,024"),
        (HF, "dropout", 2.0, r"must be in \[0, 1\)"),
        (OFFICIAL, "attn_type", 4, "knows 0, 1, 2 and 3"),
        (OFFICIAL, "sample_softmax", 10, "itself cannot be built"),
        (OFFICIAL, "n_heads", 2, "no option 'n_heads'"),
        (OFFICIAL, "tie_projs", [1], "of type list"),
        (OFFICIAL, "d_inner", 2.0, "of type int"),
        (OFFICIAL, "n_token", 2**24, "do not belong together"),
    ],
)
def test_options_that_cannot_be_honoured(peer: Any, option: str, value: Any, said: str) -> None:
    config, weights = peer.to_peer(random_model())
    config["model"][option] = value
    with pytest.raises(ManyHeadsError, match=said):
        peer.from_peer(config, weights)


@pytest.mark.parametrize(
    ("peer", "changes", "said"),
    [
        (HF, KINDS["absolute"], "attention 'absolute'"),
        (HF, {"ext_len": 1}, "ext_len 1"),
        (HF, {"clamp_len": 0}, "clamp_len 0"),
        (OFFICIAL, {"norm_eps": 1e-6}, "norm_eps"),
        (OFFICIAL, {"clamp_len": 0}, "clamp_len 0"),
        (OFFICIAL, {"attention": "absolute_learned"}, "head_dim"),
        (OFFICIAL, {"attention": "relative_learned", "max_len": 5}, "max_len 5"),
    ],
)
def test_models_that_the_peer_cannot_hold(peer: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        peer.to_peer(random_model(**changes))


def test_inputs_that_make_no_run() -> None:
    for peer in (HF, OFFICIAL):
        wrapper = peer.from_peer(*peer.to_peer(random_model()))
        for inputs in ({}, {"in.ids.1": torch.zeros(1, 2, dtype=torch.int64)}, {"in.data.0": torch.zeros(2, 1)}):
            with pytest.raises(RequestError, match="needed"):
                wrapper.run(inputs)
        with pytest.raises(ConfigError, match="under 'model'"):
            peer.from_peer({}, {})


def sampled_inputs() -> dict[str, Tensor]:
    return {
        "in.hidden": torch.randn(3, 2, 8),
        "in.labels": torch.randint(0, 20, (3, 2)),
        "in.neg_samples": torch.tensor([0, 2, 5, 11]),
    }


def test_sampled_logits() -> None:
    torch.manual_seed(0)
    config = {"vocab": 20, "d": 8, "n_sample": 3}
    weights = {"emb.weight": torch.randn(20, 8), "bias": torch.randn(20)}
    wrapper = SAMPLED.from_peer(config, weights)
    answer = wrapper.run({**sampled_inputs(), "in.labels": torch.full((3, 2), 5)})
    assert (answer["out.logits"][..., 3] == -1e30).all()  # the candidate that is the target
    assert answer["out.loss"].shape == (3, 2)
    sizes, again = SAMPLED.to_peer(wrapper.module)
    assert sizes == {"vocab": 20, "d": 8}
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    with pytest.raises(ConfigError, match="above 0"):
        SAMPLED.from_peer({**config, "n_sample": 0}, weights)
    with pytest.raises(ConfigError, match="needs the option 'vocab'"):
        SAMPLED.from_peer({"d": 8, "n_sample": 3}, weights)
    with pytest.raises(RequestError, match="neg_samples is missing"):
        wrapper.run({name: tensor for name, tensor in sampled_inputs().items() if "neg" not in name})
