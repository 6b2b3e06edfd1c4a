"""GPT-2 of transformers and of nanoGPT: the numbers of transformers' own code, folders there and back, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyheads.catalogue import PEERS, build_model
from manyheads.cli.main import main
from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.engine import export_model
from manyheads.extras.peers.convert import export_folder, guess_peer, import_folder
from manyheads.models.decoder.config import DecoderConfig
from manyheads.models.pretrained import load, save_pretrained
from manyheads.nn.kernels.modes import fast

GPT2, NANOGPT = PEERS["transformers/GPT2"], PEERS["karpathy/nanoGPT"]
NEW, BEAMS = 32, 4
SMALL = {"vocab_size": 1000, "n_positions": 64, "n_embd": 96, "n_layer": 3, "n_head": 4}
HELD = DecoderConfig(vocab_size=19, d_model=16, num_heads=2, d_ff=64, num_layers=2, max_len=12)


@torch.no_grad()
def continued(model: Any, prompt: Tensor, num_beams: int, *, cached: bool = True) -> list[int]:
    """Return the best continuation of a prompt by NEW tokens, of beams that are simply kept by their sums."""
    state = model.start(1)
    log_probs, state = model.step(prompt, state)
    sums, texts = torch.zeros(1, dtype=log_probs.dtype), prompt
    for _ in range(NEW):
        totals = (sums[:, None] + log_probs).flatten()
        sums, places = totals.topk(num_beams)
        rows, tokens = places // log_probs.shape[1], places % log_probs.shape[1]
        texts = torch.cat([texts[rows], tokens[:, None]], dim=1)
        if cached:
            log_probs, state = model.step(tokens[:, None], state.reorder(rows[None]))
        else:
            log_probs = model.log_probs(texts)[:, -1]
    return texts[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SMALL, id="small"), pytest.param({}, id="124M", marks=pytest.mark.slow)],
)
def test_the_numbers_are_those_of_transformers(sizes: dict[str, int]) -> None:
    """Logits, greedy search and 4 beams, plain and fast, with and without a cache.

    With the usual small random weights greedy search would write one token again and again.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(3)
    width = sizes.get("n_embd", 768)
    options = {**sizes, "initializer_range": 0.1 * (768 / width) ** 0.5, "bos_token_id": 0, "eos_token_id": 0}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)).eval()
    ours = GPT2.from_peer({"model": theirs.config.to_dict()}, theirs.state_dict()).module
    ids = torch.randint(theirs.config.vocab_size, (2, 30))
    search = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        wanted = theirs(ids).logits
        for enabled in (False, True):
            with fast(enabled):
                hidden, _ = ours.body(ids)
                torch.testing.assert_close(ours.head.logits(hidden), wanted, rtol=0, atol=1e-4)
        theirs, ours = theirs.double(), ours.double()
        wanted = theirs(ids).logits
        for enabled in (False, True):
            with fast(enabled):
                logits, _ = ours.body(ids)
                torch.testing.assert_close(ours.head.logits(logits), wanted, rtol=0, atol=1e-11)
                prompt = ids[:1, :5]
                for num_beams in (1, BEAMS):
                    theirs_says = theirs.generate(prompt, num_beams=num_beams, **search)[0, 5:].tolist()
                    assert continued(ours, prompt, num_beams) == theirs_says
                    if not enabled:
                        assert continued(ours, prompt, num_beams, cached=False) == theirs_says
                        assert num_beams > 1 or len(set(theirs_says)) >= 20


@pytest.mark.parametrize(
    ("peer", "changes"),
    [
        ("transformers/GPT2", {}),
        ("transformers/GPT2", {"tie_embeddings": False, "activation": "relu", "d_ff": 24}),
        ("karpathy/nanoGPT", {"activation": "gelu", "bias": False}),
    ],
)
def test_there_and_back(peer: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = build_model(replace(HELD, **changes)).eval()
    save_pretrained(model, tmp_path / "ours")
    export_folder(tmp_path / "ours", tmp_path / "theirs", peer)
    assert guess_peer(tmp_path / "theirs") == peer
    assert main(["convert", str(tmp_path / "theirs"), "-o", str(tmp_path / "again")]) == 0, capsys.readouterr().err
    again = load(tmp_path / "again")
    assert again.config == model.config
    ids = torch.randint(0, 19, (2, 12))
    assert torch.equal(again.log_probs(ids), model.log_probs(ids))


def test_the_published_names(tmp_path: Path) -> None:
    """OpenAI's files: without `transformer.`, with the causal masks, without the head; matrices are (in, out)."""
    torch.manual_seed(0)
    model = build_model(HELD).eval()
    config, weights = GPT2.to_peer(model)
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (16, 48)
    assert weights["transformer.h.1.mlp.c_fc.weight"].shape == (16, 64)
    named = {name.removeprefix("transformer."): one for name, one in weights.items() if name != "lm_head.weight"}
    named["h.0.attn.bias"], named["h.0.attn.masked_bias"] = torch.ones(1, 1, 12, 12), torch.tensor(-1e4)
    (tmp_path / "theirs").mkdir()
    save_file(named, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({"model_type": "gpt2", **config["model"]}))
    import_folder(tmp_path / "theirs", tmp_path / "again")
    ids = torch.randint(0, 19, (2, 12))
    assert torch.equal(load(tmp_path / "again").log_probs(ids), model.log_probs(ids))


def test_a_checkpoint_of_nanogpt(tmp_path: Path) -> None:
    """ckpt.pt alone, as its train.py saves it, of a compiled model with an optimiser beside."""
    torch.manual_seed(0)
    model = build_model(replace(HELD, activation="gelu", dropout=0.0, attention_dropout=0.0)).eval()
    config, weights = NANOGPT.to_peer(model)
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (48, 16)
    weights = {f"_orig_mod.{name}": one for name, one in weights.items()}
    saved = {"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}}
    saved |= {"model_args": config["model"], "iter_num": 7, "best_val_loss": torch.tensor(1.5), "config": {"out": "x"}}
    (tmp_path / "theirs").mkdir()
    torch.save(saved, tmp_path / "theirs" / "ckpt.pt")
    import_folder(tmp_path / "theirs", tmp_path / "again", peer="karpathy/nanoGPT", from_pickle=True)
    ids = torch.randint(0, 19, (2, 12))
    again = load(tmp_path / "again")
    assert again.config == model.config
    assert torch.equal(again.log_probs(ids), model.log_probs(ids))


def test_an_export_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    save_pretrained(build_model(HELD), tmp_path / "ours")
    done = export_model(tmp_path / "ours", tmp_path / "out", ExportOptions(to="transformers"))
    assert done.check.deviation < 1e-5
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("peer", "changes", "said"),
    [
        (GPT2, {"positions": "rotary"}, "positions 'rotary'"),
        (GPT2, {"num_kv_heads": 1}, "num_kv_heads 1"),
        (GPT2, {"norm": "rms"}, "norm 'rms'"),
        (GPT2, {"bias": False}, "bias False"),
        (GPT2, {"head_dim": 12}, "head_dim 12"),
        (GPT2, {"scale_embedding": True}, "scale_embedding True"),
        (NANOGPT, {}, "activation 'gelu_tanh'"),
        (NANOGPT, {"activation": "gelu", "d_ff": 32}, "d_ff 32"),
        (NANOGPT, {"activation": "gelu", "dropout": 0.0}, "attention_dropout 0.1"),
    ],
)
def test_what_a_peer_cannot_hold(peer: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        peer.to_peer(build_model(replace(HELD, **changes)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"activation_function": "mish"}, "activation_function is 'mish'"),
        ({"embd_pdrop": 0.3}, "embd_pdrop is 0.3 and resid_pdrop 0.1"),
        ({"model_type": "bert"}, "model_type 'bert'"),
        ({"n_head": 3}, "not divisible"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    config, weights = GPT2.to_peer(build_model(HELD))
    with pytest.raises(ConfigError, match=said):
        GPT2.from_peer({"model": {**config["model"], **options}}, weights)


def test_weights_that_do_not_fit() -> None:
    config, weights = GPT2.to_peer(build_model(HELD))
    with pytest.raises(ModelFileError, match=r"h\.1\.ln_2\.bias is missing"):
        GPT2.from_peer(config, {name: one for name, one in weights.items() if name != "transformer.h.1.ln_2.bias"})
    name = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(ModelFileError, match=r"c_attn\.weight has shape"):
        GPT2.from_peer(config, {**weights, name: weights[name].t().contiguous()})
