"""reformer-pytorch's attention: what the fixtures do not show."""

import pytest
import torch

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers import PEERS
from manyheads.nn.attention.lsh import LSHSelfAttention, LSHSettings

OPTIONS = {"dim": 12, "heads": 3, "bucket_size": 4, "n_hashes": 2, "causal": True}


def test_there_and_back() -> None:
    loader = PEERS["reformer-pytorch/LSHSelfAttention"]
    weights = {name: torch.randn(12, 12) for name in ("toqk.weight", "tov.weight", "to_out.weight")}
    weights["to_out.bias"] = torch.randn(12)
    wrapper = loader.from_peer({"opts": OPTIONS}, weights)
    config, exported = loader.to_peer(wrapper.module)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    again = loader.from_peer(config, exported)
    x, rotations = torch.randn(2, 16, 12), torch.randn(1, 4, 2, 2)
    first, second = (one.run({"in.x": x, "in.rotations": rotations})["out.out"] for one in (wrapper, again))
    assert torch.equal(first, second)


def test_what_the_peer_cannot_hold() -> None:
    loader = PEERS["reformer-pytorch/LSHSelfAttention"]
    ours = LSHSelfAttention(12, 3, settings=LSHSettings(), max_len=64, bias=True)
    with pytest.raises(ConfigError, match="cannot hold a model with visible 'bucket'"):
        loader.to_peer(ours)


def test_refusals() -> None:
    bare, module = PEERS["reformer-pytorch/LSHAttention"], PEERS["reformer-pytorch/LSHSelfAttention"]
    with pytest.raises(ConfigError, match="needs D"):
        bare.from_peer({"opts": {}}, {})
    with pytest.raises(ConfigError, match="no option 'chunks'"):
        bare.from_peer({"opts": {"chunks": 1}, "D": 8}, {})
    with pytest.raises(ModelFileError, match="is unknown"):
        bare.from_peer({"opts": {}, "D": 8}, {"w": torch.zeros(1)})
    with pytest.raises(ConfigError, match="num_mem_kv is 2"):
        module.from_peer({"opts": {**OPTIONS, "num_mem_kv": 2}}, {})
    wrapper = bare.from_peer({"opts": {"bucket_size": 4}, "D": 8}, {})
    inputs = {"in.qk": torch.randn(1, 12, 8), "in.v": torch.randn(1, 12, 8), "in.rotations": torch.randn(1, 8, 8, 2)}
    with pytest.raises(RequestError, match="multiple of twice"):
        wrapper.run(inputs)
