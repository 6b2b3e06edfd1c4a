"""The Annotated Transformer's habits that no fixture shows, and its weights both ways."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers import PEERS
from manyheads.extras.peers.annotated_transformer import LabelSmoothing
from manyheads.nn.positions import sinusoidal_table
from manyheads.training.optim.schedule import noam

LOADER: Any = PEERS["annotated-transformer"]
CONFIG: dict[str, Any] = {
    "model": {"src_vocab": 11, "tgt_vocab": 13, "N": 1, "d_model": 8, "d_ff": 12, "h": 2, "dropout": 0},
    "pad": 0,
}


def wrapper(**more: Any) -> Any:
    """Random weights that from_peer takes: made by exporting a fresh model of ours."""
    torch.manual_seed(0)
    config = {**CONFIG, **more}
    from manyheads.catalogue import build_model
    from manyheads.models.transformer.config import TransformerConfig

    m = config["model"]
    fresh = build_model(
        TransformerConfig(
            source_vocab_size=m["src_vocab"],
            target_vocab_size=m["tgt_vocab"],
            d_model=m["d_model"],
            num_heads=m["h"],
            d_ff=m["d_ff"],
            num_encoder_layers=m["N"],
            num_decoder_layers=m["N"],
            norm="unbiased",
            norm_eps=1e-6,
            norm_position="pre",
            tie_embeddings="none",
            head_bias=True,
        )
    )
    described, weights = LOADER.to_peer(fresh)
    assert described["model"].keys() == CONFIG["model"].keys()
    return LOADER.from_peer(config, weights)


def test_peers_are_listed_without_importing_torch() -> None:
    code = "import sys; from manyheads.extras.peers import PEERS; print(sorted(PEERS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{sorted(PEERS)} False"
    assert len(PEERS) > 6
    with pytest.raises(KeyError):
        PEERS["nobody"]


@pytest.mark.parametrize("peer", list(PEERS))
def test_loaders_know_their_own(peer: str) -> None:
    texts = {
        "annotated-transformer": "harvardnlp/annotated-transformer make_model",
        "torch/Transformer": "torch.nn.Transformer (eval)",
        "transformers/Marian": "transformers MarianMTModel (eval, dropout 0)",
        "transformers/Pegasus": "transformers PegasusForConditionalGeneration (eval, dropout 0)",
        "transformers/TransfoXL": "transformers TransfoXLLMHeadModel (eval, dropout 0)",
        "kimiyoung/TransformerXL": "kimiyoung/transformer-xl pytorch/mem_transformer.py MemTransformerLM (eval)",
        "kimiyoung/sample_logits": "kimiyoung/transformer-xl pytorch/utils/log_uniform_sampler.py sample_logits",
        "reformer-pytorch/LSHAttention": "lucidrains/reformer-pytorch LSHAttention",
        "reformer-pytorch/LSHSelfAttention": "lucidrains/reformer-pytorch LSHSelfAttention",
        "transformers/Reformer": "transformers ReformerModelWithLMHead (eval)",
        "d2l/attention": "d2l-ai/d2l-en d2l/torch.py masked_softmax, DotProductAttention",
        "fused-qkv/MultiheadAttention": "scaled_dot_product as printed in a tutorial (fused qkv projection)",
        "labml/attention": "labmlai/annotated_deep_learning_paper_implementations transformers/mha.py (eval)",
        "tf/Transformer-XL": "tf/Transformer-XL",
        "torch/MultiheadAttention": "torch.nn.MultiheadAttention (eval, dropout 0)",
        **{name: PEERS[name].name for name in ("marian-nmt", "transformers/GPT2", "karpathy/nanoGPT")},
    }
    texts |= {name: name for name in PEERS if name.partition("/")[0] in ("d2l", "labml") and name not in texts}
    texts |= {f"{name}/Transformer": PEERS[f"{name}/Transformer"].name for name in ("fairseq", "joeynmt", "opennmt-py")}
    assert [name for name, loader in PEERS.items() if loader.matches({"peer": texts[peer]})] == [peer]
    assert not any(loader.matches({"kind": "nobody's", "peer": texts[peer]}) for loader in PEERS.values())
    assert not PEERS["torch/Transformer"].matches({"peer": "torch.nn.TransformerEncoder"})
    assert callable(PEERS[peer].from_peer)
    if peer != "reformer-pytorch/LSHAttention":  # it has no weights
        assert callable(PEERS[peer].to_peer)


def test_masks_are_made_as_the_peer_makes_them() -> None:
    one = wrapper()
    source, target = torch.tensor([[3, 4, 5, 0]]), torch.tensor([[1, 6, 7, 0, 0]])
    given = {"in.src": source, "in.tgt": target}
    masks = {
        "in.src_mask": (source != 0)[:, None],
        "in.tgt_mask": (target != 0)[:, None] & torch.ones(5, 5, dtype=torch.bool).tril(),
    }
    for name, tensor in one.run({**given, **masks}).items():
        assert torch.equal(one.run(given)[name], tensor)
    for name, tensor in one.run({**given, **{k: v.int() for k, v in masks.items()}}).items():
        assert torch.equal(one.run(given)[name], tensor)


def test_a_source_of_padding_is_attended_evenly() -> None:
    """The peer's fill is finite: where nothing may be attended, everything is, padding too."""
    one = wrapper(greedy_len=4)
    attention = one.module.body.encoder.layers[0].self_attn
    seen = []
    attention.weights_hook = seen.append
    answer = one.run({"in.src": torch.zeros(1, 5, dtype=torch.int64), "in.tgt": torch.tensor([[1, 2]])})
    assert torch.allclose(seen[0], torch.full_like(seen[0], 0.2))
    assert attention.score is None
    assert all(bool(tensor.isfinite().all()) for tensor in answer.values())


def test_greedy_is_the_argmax_of_the_whole_prefix() -> None:
    one = wrapper(greedy_len=6, start_symbol=4)
    source = torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0]])
    ids = one.run({"in.src": source, "in.tgt": source})["out.greedy_ids"]
    assert ids.shape == (1, 6)
    assert ids[0, 0] == 4
    for length in range(1, 6):
        log_probs = one.run(
            {
                "in.src": source[:1],
                "in.tgt": ids[:, :length],
                "in.tgt_mask": torch.ones(1, length, length).tril().bool(),
            }
        )
        assert log_probs["out.logprobs"][0, -1].argmax() == ids[0, length]


def test_position_tables_are_checked_not_loaded() -> None:
    described, weights = LOADER.to_peer(wrapper().module)
    table = sinusoidal_table(torch.arange(20.0), 8)
    LOADER.from_peer({**CONFIG, **described}, {**weights, "src_embed.1.pe": table[None], "pe[:20]": table})
    with pytest.raises(ModelFileError, match="sinusoidal"):
        LOADER.from_peer({**CONFIG, **described}, {**weights, "src_embed.1.pe": table[None] + 1})
    with pytest.raises(ModelFileError, match="wide"):
        LOADER.from_peer({**CONFIG, **described}, {**weights, "pe[:20]": table[:, :4]})


def test_label_smoothing_by_hand() -> None:
    """Sum of t (log t - log p), one number at a time."""
    torch.manual_seed(4)
    log_probs = torch.randn(4, 5, dtype=torch.float64).log_softmax(-1)
    target, pad, s = [1, 3, 2, 4], 3, 0.3
    total = 0.0
    for row, wanted in zip(log_probs.tolist(), target, strict=True):
        if wanted == pad:
            continue
        for token, log_p in enumerate(row):
            t = 1 - s if token == wanted else 0.0 if token == pad else s / 3
            total += t * (math.log(t) - log_p) if t else 0.0
    assert float(LabelSmoothing(5, pad, s)(log_probs, torch.tensor(target))) == pytest.approx(total, abs=1e-12)


def test_a_vocabulary_of_two() -> None:
    """The printed code divides by zero here; there is nobody to smooth towards."""
    with pytest.raises(ConfigError, match="at least 3"):
        LabelSmoothing(2, 0, 0.1)
    dist = LabelSmoothing(2, 0, 0.0).targets(torch.tensor([1, 0]))
    assert dist.tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_noam_at_step_zero_and_at_its_peak() -> None:
    """The printed code raises 0 to a negative power at step 0."""
    rate = {step: noam(step, factor=2.0, d_model=64, warmup_steps=10) for step in range(30)}
    assert rate[0] == rate[1] == pytest.approx(2.0 / 8 * 10**-1.5)
    assert max(rate, key=rate.__getitem__) == 10
    assert rate[20] == pytest.approx(2.0 / 8 * 20**-0.5)


def test_mistakes_are_named() -> None:
    one = wrapper()
    ids = torch.tensor([[1, 2]])
    with pytest.raises(ConfigError, match="tgt_vocab"):
        LOADER.from_peer({"model": {"src_vocab": 3}}, {})
    with pytest.raises(ConfigError, match="smoothing"):
        LOADER.from_peer({"V": 5, "pad": 0}, {})
    with pytest.raises(ModelFileError, match="w is unknown"):
        LOADER.from_peer({"V": 5, "pad": 0, "smoothing": 0.1}, {"w": torch.zeros(1)})
    with pytest.raises(RequestError, match=r"in\.src is missing"):
        one.run({"in.tgt": ids})
    with pytest.raises(RequestError, match=r"in\.colour"):
        one.run({"in.src": ids, "in.tgt": ids, "in.colour": ids})
    with pytest.raises(RequestError, match="non-zero = may attend"):
        one.run({"in.src": ids, "in.tgt": ids, "in.src_mask": torch.ones(1, 1, 2)})
    config = one.module.config
    from dataclasses import replace

    from manyheads.catalogue import build_model

    with pytest.raises(ConfigError, match="norm 'layer'"):
        LOADER.to_peer(build_model(replace(config, norm="layer")))
    with pytest.raises(ConfigError, match="num_decoder_layers"):
        LOADER.to_peer(build_model(replace(config, num_decoder_layers=2)))
