"""The Transformer-XL text's own names: the original's numbers, its statements, its mistakes repaired."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyheads.errors import ManyHeadsError
from manyheads.extras.peers import PEERS
from manyheads.extras.texts import transformer_xl as text
from manyheads.extras.texts.transformer_xl import MemTransformerLM

SIZES: dict[str, Any] = {
    **{"n_token": 43, "n_layer": 2, "n_head": 2, "d_model": 16, "d_head": 8, "d_inner": 29},
    **{"dropout": 0, "dropatt": 0},
}
LENGTHS = {"tgt_len": 5, "ext_len": 0, "mem_len": 7}

# Of files with a mistake of the original: the segments before it shows, and the outputs that it does not reach.
REPAIRED = {
    "attn0_ext_len": (1, ("hidden", "loss")),
    "attn2": (1, ("hidden", "loss")),
    "attn2_clamp_prelnorm": (0, ()),
    "attn3": (1, ("hidden", "loss")),
    "attn3_same_ext": (1, ("hidden", "loss")),
}


def random_model(seed: int = 0, **options: Any) -> MemTransformerLM:
    torch.manual_seed(seed)
    model = MemTransformerLM(**{**SIZES, **LENGTHS, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def golden(shared: Path) -> list[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    from safetensors.torch import load_file

    paths = sorted((shared / "fixtures" / "parity").glob("txl_official_attn*.json"))
    if not paths:
        pytest.skip("no parity fixtures")
    named = [(path.stem.removeprefix("txl_official_"), path) for path in paths]
    return [(name, json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))) for name, path in named]


def close(ours: Tensor, theirs: Tensor, tolerance: dict[str, float], kind: str = "") -> bool:
    return torch.allclose(ours, theirs, atol=tolerance[f"{kind}atol"], rtol=tolerance[f"{kind}rtol"])


def test_the_originals_numbers(shared: Path) -> None:
    """Losses, hidden states, memories and gradients, with its checkpoint in `load_state_dict`."""
    compared = 0
    for name, meta, tensors in golden(shared):
        options = {"dropout": 0.0, "dropatt": 0.0, **meta["config"]["model"]}
        model = MemTransformerLM(**options)
        weights = {key.removeprefix("param."): one for key, one in tensors.items() if key.startswith("param.")}
        kept = model.state_dict().keys() - weights.keys()
        assert kept <= {"pos_emb.inv_freq"}
        model.load_state_dict(weights, strict=False)
        count, outputs = REPAIRED.get(name, (meta["config"]["segments"], ("hidden", "loss", "mems")))
        mems: list[Tensor] = []
        for segment in range(count):
            data, target = tensors[f"in.data.{segment}"], tensors[f"in.target.{segment}"]
            hidden, _ = model._forward(data, mems or model.init_mems())
            loss, *mems = model(data, target, *mems)
            assert close(hidden, tensors[f"out.hidden.{segment}"], meta["tolerance"]), name
            assert close(loss, tensors[f"out.loss_in_token_order.{segment}"], meta["tolerance"]), name
            if "mems" in outputs:
                theirs = [tensors[f"out.mems.{segment}.{layer}"] for layer in range(len(mems))]
                assert all(close(one, other, meta["tolerance"]) for one, other in zip(mems, theirs, strict=True))
            compared += 1
        if meta["config"]["grads"]:
            loss.mean().backward()
            for parameter_name, parameter in model.named_parameters():
                assert close(parameter.grad, tensors[f"grad.{parameter_name}"], meta["tolerance"], "grad_"), name
        if count and meta["config"]["model"]["cutoffs"]:
            model.crit.keep_order = False
            first = model(tensors["in.data.0"], tensors["in.target.0"])[0]
            assert close(first, tensors["out.loss.0"], meta["tolerance"])
    assert compared > 30


@pytest.mark.parametrize("attn_type", [0, 2])
def test_the_random_numbers_of_dropout(attn_type: int) -> None:
    """In the original's order: of the words, with their positions in type 2, of encoded distances, of the layers."""
    model = random_model(attn_type=attn_type, dropout=0.5, mem_len=0)
    ids = torch.randint(43, (5, 3))
    torch.manual_seed(1)
    hidden = model._forward(ids)[0]
    torch.manual_seed(1)
    words, distances = model.word_emb(ids), model.pos_emb(torch.arange(4, -1, -1.0))
    x = model.drop(words if attn_type == 0 else words + distances)
    given = (model.drop(distances), model.r_w_bias, model.r_r_bias) if attn_type == 0 else ()
    blocked = torch.ones(5, 5).triu(1)[:, :, None]
    for layer in model.layers:
        x = layer(x, *given, dec_attn_mask=blocked)
    torch.testing.assert_close(hidden, model.drop(x))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("attn_type", [0, 1, 2, 3])
@pytest.mark.parametrize("pre_lnorm", [False, True])
@pytest.mark.parametrize(("ext_len", "same_length", "clamp_len"), [(0, False, -1), (2, True, 4), (0, True, -1)])
def test_the_models_of_this_package(attn_type, pre_lnorm, ext_len, same_length, clamp_len):
    """Over segments, with memory, as the model to which a checkpoint converts: also where the original is wrong."""
    if attn_type == 3:
        clamp_len = -1
    options = {"ext_len": ext_len, "same_length": same_length, "clamp_len": clamp_len, "pre_lnorm": pre_lnorm}
    options |= {"attn_type": attn_type, "cutoffs": [10, 20], "div_val": 2, "tie_projs": [False, True, True]}
    model = random_model(**options).eval()
    weights = {name: one for name, one in model.state_dict().items() if "inv_freq" not in name}
    ours = PEERS["kimiyoung/TransformerXL"].from_peer({"model": {**SIZES, **LENGTHS, **options}}, weights).module.eval()
    state, mems = ours.body.start(3, projected=False), []
    torch.manual_seed(1)
    for length in (3, 5, 1, 4, 6):
        ids, target = torch.randint(43, (length, 3)), torch.randint(43, (length, 3))
        loss, *mems = model(ids, target, *mems)
        hidden, state = ours.body(ids.t(), None, state)
        wanted = ours.head.token_losses(hidden.flatten(0, 1), target.t().flatten()).view(3, length).t()
        torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
        for ours_of_layer, mem in zip(state.memory.layers, mems, strict=False):
            torch.testing.assert_close(ours_of_layer.transpose(0, 1), mem, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_attention_by_the_formula(pre_lnorm: bool) -> None:
    """Each pair of query and key by itself, in float64, with a memory; and gradients of every input."""
    torch.manual_seed(0)
    qlen, mlen, bsz, heads, width, d_model = 3, 4, 2, 2, 5, 6
    klen, scale = qlen + mlen, width**-0.5
    for kind in ("MultiHeadAttn", "RelPartialLearnableMultiHeadAttn", "RelLearnableMultiHeadAttn"):
        module = getattr(text, kind)(heads, d_model, width, 0.0, pre_lnorm=pre_lnorm).double()
        u, v = torch.randn(2, heads, width, dtype=torch.float64, requires_grad=True).unbind()
        w, mems = torch.randn(qlen, bsz, d_model, dtype=torch.float64), torch.randn(mlen, bsz, d_model).double()
        w.requires_grad_()
        r = torch.randn(klen, 1, d_model, dtype=torch.float64)
        r_emb, r_bias = torch.randn(klen, heads, width).double(), torch.randn(klen, heads).double()
        blocked = torch.ones(qlen, klen).triu(1 + mlen)[:, :, None]
        given = {"MultiHeadAttn": (), "RelPartialLearnableMultiHeadAttn": (r, u, v)}.get(kind, (r_emb, u, r_bias))
        out = module(w, *given, attn_mask=blocked.byte(), mems=mems)
        both = torch.cat([mems, w])
        read = module.layer_norm(both) if pre_lnorm else both
        if kind == "MultiHeadAttn":
            q, (k, value) = module.q_net(read), module.kv_net(read).chunk(2, -1)
        else:
            q, k, value = module.qkv_net(read).chunk(3, -1)
        q, k, value = (part.view(klen, bsz, heads, width) for part in (q, k, value))
        rows = []
        for i in range(qlen):
            scores = []
            for j in range(mlen + i + 1):
                one, place = q[mlen + i], klen - 1 - (mlen + i - j)  # the row of distance mlen + i - j
                if kind == "MultiHeadAttn":
                    scores.append((one * k[j]).sum(-1))
                elif kind == "RelLearnableMultiHeadAttn":
                    scores.append(((one + u) * k[j] + one * r_emb[place]).sum(-1) + r_bias[place])
                else:
                    distance = module.r_net(r[place]).view(heads, width)
                    scores.append(((one + u) * k[j] + (one + v) * distance).sum(-1))
            weights = (torch.stack(scores) * scale).softmax(0)
            rows.append((weights[..., None] * value[: mlen + i + 1]).sum(0).flatten(1))
        wanted = w + module.o_net(torch.stack(rows))
        wanted = wanted if pre_lnorm else module.layer_norm(wanted)
        torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)
        inputs = [w, *module.parameters()]
        ours, theirs = (torch.autograd.grad(x.square().sum(), inputs, allow_unused=True) for x in (out, wanted))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


def test_the_shift_by_a_view_and_by_a_mask() -> None:
    attention = text.RelMultiHeadAttn(1, 4, 4, 0.0)
    x = torch.randn(3, 5, 2, 1)
    shifted = attention._rel_shift(x, zero_triu=True)
    for i in range(3):
        assert torch.equal(shifted[i, : 5 - 2 + i], x[i, 2 - i :])
        assert not shifted[i, 5 - 2 + i :].any()
    one = torch.arange(5.0).view(1, 5, 1, 1)
    by_mask = attention._shift(one, 3, 5, attention._parallelogram_mask(3, 7))
    assert by_mask[:, :, 0, 0].tolist() == [[2, 3, 4, 0, 0], [1, 2, 3, 4, 0], [0, 1, 2, 3, 4]]
    assert attention._parallelogram_mask(3, 2, left=True).int().tolist() == [[1, 1], [0, 0], [1, 1]]


def test_the_texts_loop_trains_with_its_own_initial_values() -> None:
    """`weights_init` of the training script finds every class and parameter by its name."""
    from torch import nn

    names: set[str] = set()

    def weights_init(module: nn.Module) -> None:
        names.add(type(module).__name__)
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name and not name.startswith("r_"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, float("LayerNorm" in type(module).__name__), 0.02)

    for attn_type in range(4):
        torch.manual_seed(0)
        model = random_model(attn_type=attn_type, cutoffs=[10], div_val=2, tie_projs=[False, True], dropout=0.1)
        model.apply(weights_init)
        optimizer, mems, losses = torch.optim.Adam(model.parameters(), lr=0.01), tuple[Tensor, ...](), []
        data = torch.randint(43, (6, 2))
        for _ in range(12):
            model.zero_grad()
            ret = model(data[:-1], data[1:], *mems)
            loss, mems = ret[0], ret[1:]
            loss = loss.float().mean().type_as(loss)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.3
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert {"AdaptiveEmbedding", "ProjectedAdaptiveLogSoftmax", "MemTransformerLM"} <= names


def test_lanes_in_order() -> None:
    """Each lane is a stretch of the text; a segment's target follows it, and ext_len positions are read again."""
    lanes = text.LMOrderedIterator(torch.arange(23), 2, 4, ext_len=2)  # the last id fills no lane
    segments = [(data[:, 1].tolist(), target[:, 1].tolist(), length) for data, target, length in lanes]
    assert segments == [
        ([11, 12, 13, 14], [12, 13, 14, 15], 4),
        ([13, 14, 15, 16, 17, 18], [16, 17, 18, 19], 4),
        ([17, 18, 19, 20], [20, 21], 2),
    ]
    assert (lanes.n_step, lanes.n_batch) == (11, 3)
    np.random.seed(0)  # noqa: NPY002 (the original's numbers)
    long = text.LMOrderedIterator(torch.arange(2000), 2, 20)
    varied = list(long.get_varlen_iter())
    assert [length for *_, length in varied][:4] == [23, 27, 15, 29]
    assert torch.cat([target for _, target, _ in varied])[:, 0].tolist() == list(range(1, 1000))


def test_reset_length_for_evaluation() -> None:
    """More memory in evaluation: pieces of a text then give the losses of one pass."""
    model = random_model(tgt_len=4, mem_len=4).eval()
    ids = torch.randint(43, (13, 2))
    model.reset_length(4, 0, 12)
    whole, *_ = model(ids[:-1], ids[1:])
    parts, mems = [], []
    for first in range(0, 12, 4):
        loss, *mems = model(ids[first : first + 4], ids[first + 1 : first + 5], *mems)
        parts.append(loss)
    torch.testing.assert_close(torch.cat(parts), whole)
    model.reset_length(12, 0, 0)
    [again] = model(ids[:-1], ids[1:])
    assert torch.equal(again, whole)
    assert model.init_mems() is None


def test_same_length_without_memory() -> None:
    """All keys are masked in the original, which gives NaN; here a query sees itself."""
    model = random_model(same_length=True, mem_len=0)
    losses = model(torch.randint(43, (5, 2)), torch.randint(43, (5, 2)))[0]
    assert losses.isfinite().all()


def test_sampled_softmax() -> None:
    """The original cannot make it. Its expected gradient is near that of the full softmax; evaluation is exact."""
    model = random_model(sample_softmax=40)
    assert model.out_layer.weight is model.word_emb.emb_layers[0].weight
    data, target = torch.randint(43, (5, 2)), torch.randint(43, (5, 2))
    losses = model(data, target)[0]
    losses.mean().backward()
    assert losses.shape == (5, 2)
    assert model.out_layer.bias.grad.abs().sum() > 0
    hidden, _ = model.eval()._forward(data)
    wanted = torch.nn.functional.cross_entropy(
        model.out_layer(hidden).flatten(0, 1), target.flatten(), reduction="none"
    )
    torch.testing.assert_close(model(data, target)[0].flatten(), wanted)
    model.train().backward_compatible()
    torch.testing.assert_close(model(data, target)[0].flatten(), wanted)


def test_the_samplers_numbers(shared: Path) -> None:
    from safetensors.torch import load_file

    path = shared / "fixtures" / "parity" / "txl_official_sample_logits.safetensors"
    if not path.is_file():
        pytest.skip("no parity fixtures")
    tensors = load_file(path)
    sampler = text.LogUniformSampler(60, 10)
    torch.testing.assert_close(sampler.dist, tensors["out.dist"])
    torch.testing.assert_close(sampler.log_q, tensors["out.log_q"], atol=5e-5, rtol=1e-5)
    labels, drawn = tensors["in.labels"], tensors["in.neg_samples"]
    sampler.sample = lambda labels: (sampler.log_q[labels], sampler.log_q[drawn], drawn)  # type: ignore[method-assign]
    table = torch.nn.Embedding.from_pretrained(tensors["param.emb.weight"])
    logits = text.sample_logits(table, tensors["param.bias"], labels, tensors["in.hidden"], sampler)
    torch.testing.assert_close(logits, tensors["out.logits"], atol=5e-5, rtol=1e-5)


def test_half_precision_keeps_distances_apart() -> None:
    encoding = text.PositionalEmbedding(16)
    wanted = encoding(torch.arange(600.0, -1, -1))
    assert wanted.shape == (601, 1, 16)
    assert encoding(torch.arange(3), bsz=2).shape == (3, 2, 16)
    torch.testing.assert_close(encoding.bfloat16()(torch.arange(600.0, -1, -1)), wanted)
    model = random_model().bfloat16()
    assert model(torch.randint(43, (5, 2)), torch.randint(43, (5, 2)))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("attn_type", [0, 1, 2, 3])
def test_transforms_of_functions(attn_type: int) -> None:
    """`vmap` over texts, also with clusters of several widths, and gradients by `torch.func`."""
    torch.manual_seed(0)
    model = random_model(attn_type=attn_type, cutoffs=[10, 20], div_val=2, tie_projs=[False, True, True], dropout=0.0)
    texts, weights = torch.stack([ids(5, 2) for _ in range(3)]), dict(model.named_parameters())
    together = torch.func.vmap(lambda one: torch.func.functional_call(model, weights, (one, one))[0])(texts)
    torch.testing.assert_close(together, torch.stack([model(one, one)[0] for one in texts]))
    loss = model(texts[0], texts[0])[0].mean()
    found = torch.func.grad(lambda w: torch.func.functional_call(model, w, (texts[0], texts[0]))[0].mean())(weights)
    for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
        torch.testing.assert_close(found[name], gradient)


def test_hooks_and_prints() -> None:
    model = random_model(n_layer=1)
    seen: list[str] = []
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(torch.randint(43, (5, 2)), torch.randint(43, (5, 2)))
    wanted = {name for name, module in model.named_modules() if not list(module.children())}
    # A linear map of the softmax is read by its parameters, as in the original.
    assert wanted - {*seen} == {"word_emb.emb_projs", "crit.out_layers.0", "crit.out_projs"}
    assert repr(model.layers[0]) == (
        "RelPartialLearnableDecoderLayer(\n"
        "  (dec_attn): RelPartialLearnableMultiHeadAttn(\n"
        "    (qkv_net): Linear(in_features=16, out_features=48, bias=False)\n"
        "    (drop): Dropout(p=0, inplace=False)\n"
        "    (dropatt): Dropout(p=0, inplace=False)\n"
        "    (o_net): Linear(in_features=16, out_features=16, bias=False)\n"
        f"    (layer_norm): {torch.nn.LayerNorm(16)}\n"
        "    (r_net): Linear(in_features=16, out_features=16, bias=False)\n"
        "  )\n"
        "  (pos_ff): PositionwiseFF(\n"
        "    (CoreNet): Sequential(\n"
        "      (0): Linear(in_features=16, out_features=29, bias=True)\n"
        "      (1): ReLU(inplace=True)\n"
        "      (2): Dropout(p=0, inplace=False)\n"
        "      (3): Linear(in_features=29, out_features=16, bias=True)\n"
        "      (4): Dropout(p=0, inplace=False)\n"
        "    )\n"
        f"    (layer_norm): {torch.nn.LayerNorm(16)}\n"
        "  )\n"
        ")"
    )


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def attend(**changes: Any) -> Tensor:
    attention = text.RelPartialLearnableMultiHeadAttn(2, 6, 3, 0.0)
    given = {"w": torch.zeros(4, 2, 6), "r": torch.zeros(4, 1, 6), "u": torch.zeros(2, 3), "v": torch.zeros(2, 3)}
    given = {**given, "attn_mask": None, "mems": None, **changes}
    return attention(given["w"], given["r"], given["u"], given["v"], given["attn_mask"], given["mems"])


@pytest.mark.parametrize(
    ("call", "type_of_torch", "said"),
    [
        (lambda: random_model(attn_type=4), ValueError, r"attn_type is 4; it must be 0 \(relative"),
        (lambda: random_model(attn_type=3, d_head=7), RuntimeError, r"2 x 7 = 14 .* d_model 16; .*d_head=8"),
        (lambda: random_model(attn_type=1, tgt_len=None, mem_len=None), ValueError, "give tgt_len"),
        (lambda: random_model(n_head=0), RuntimeError, "n_head is 0; it must be a whole number of at least 1"),
        (lambda: random_model(d_inner=-1), ValueError, "d_inner is -1"),
        (lambda: random_model(dropout=1.5), ValueError, "dropout is 1.5; it must be a number from 0 to 1"),
        (lambda: random_model(cutoffs=5), TypeError, "cutoffs is 5; it must be a list"),
        (lambda: random_model()(ids(5, 2), ids(5, 2), None, None, None), AttributeError, "a memory is NoneType"),
        (lambda: random_model(cutoffs=[20, 10]), ValueError, r"cutoffs \[20, 10\] must increase"),
        (lambda: random_model(cutoffs=[10, 20], div_val=8), ValueError, "no width for cluster 2"),
        (lambda: random_model(cutoffs=[10], div_val=2, tie_projs=[True] * 3), IndexError, "ties cluster 2"),
        (lambda: random_model(sample_softmax=5, d_embed=8), ValueError, "set tie_weight to False"),
        (lambda: random_model().reset_length(5, 0, -1), ValueError, "mem_len is -1"),
        (lambda: random_model()(ids(5), ids(5)), ValueError, r"data has the shape \(5,\); .*length first"),
        (lambda: random_model()(ids(5, 2), ids(5, 3)), RuntimeError, r"target has the shape \(5, 3\)"),
        (lambda: random_model()(ids(4, 2), ids(5, 2)), RuntimeError, "target has 5 positions, but data only 4"),
        (lambda: random_model()(ids(5, 2) + 43, ids(5, 2)), IndexError, "id 43, but the ids are 0 to 42.*n_token=44"),
        (lambda: random_model()(ids(5, 2) - 1, ids(5, 2)), IndexError, "id -1.*check the vocabulary"),
        (lambda: random_model(cutoffs=[10])(ids(5, 2), ids(5, 2) + 50), IndexError, "target has the id 50"),
        (lambda: random_model()(ids(5, 2).float(), ids(5, 2)), RuntimeError, r"inp has the type .*call inp.long\(\)"),
        (
            lambda: random_model()(ids(5, 2), ids(5, 2), torch.zeros(2, 2, 16)),
            AssertionError,
            "memories is 1, but 2 layers have 3",
        ),
        (lambda: random_model()(ids(5, 2), ids(5, 2), *[torch.zeros(2, 3, 16)] * 3), RuntimeError, "a memory has"),
        (lambda: text.LMOrderedIterator(ids(5), 3, 4), ValueError, "5 ids for 3 lanes; a lane needs two"),
        (lambda: text.LMOrderedIterator(ids(5, 2), 3, 4), RuntimeError, r"data has the shape \(5, 2\)"),
        (lambda: random_model()([[1, 2]], ids(1, 2)), AttributeError, r"data is list; give a tensor \(len, bsz\)"),
        (lambda: random_model(dropout="a"), TypeError, "dropout is 'a'; it must be a number from 0 to 1"),
        (lambda: attend(w=torch.zeros(4, 2, 5)), RuntimeError, r"must be \(qlen, bsz, 6\)"),
        (lambda: attend(r=torch.zeros(3, 1, 6)), RuntimeError, "one distance for each key"),
        (lambda: attend(u=torch.zeros(3, 2)), RuntimeError, r"r_w_bias has the shape \(3, 2\); it must be \(2, 3\)"),
        (lambda: attend(mems=torch.zeros(2, 3, 6)), RuntimeError, "mems has the shape"),
        (lambda: attend(attn_mask=torch.zeros(5, 4)), RuntimeError, "does not fit: give"),
        (lambda: attend(attn_mask=[1]), AttributeError, "attn_mask is list"),
        (lambda: attend(mems=[1]), AttributeError, "mems is list"),
        (
            lambda: text.RelMultiHeadAttn(2, 6, 3, 0.0)._rel_shift(torch.zeros(3)),
            RuntimeError,
            r"\(qlen, klen, \.\.\.\)",
        ),
        (lambda: random_model(sample_softmax="5"), TypeError, "sample_softmax is '5'"),
        (
            lambda: random_model()(ids(5, 2), ids(5, 2), *[torch.tensor(1.0)] * 3),
            RuntimeError,
            "a memory has the shape",
        ),
        (lambda: random_model(tie_projs=True), TypeError, "tie_projs is True; it must be a list"),
        (lambda: attend(w=torch.zeros(4, 4, 6), attn_mask=torch.zeros(4, 4)), RuntimeError, "read in two ways"),
        (lambda: text.RelMultiHeadAttn(2, 6, 3, 0.0)(ids(1)), NotImplementedError, "use RelPartialLearnable"),
    ],
)
def test_bad_input(call: Any, type_of_torch: type[Exception], said: str) -> None:
    """Our sentence, with the value and what to do, in an exception that code for the original's also catches."""
    with pytest.raises(ManyHeadsError, match=said) as caught:
        call()
    assert isinstance(caught.value, type_of_torch)


def test_masks_of_two_axes_mean_what_their_shape_says() -> None:
    """(qlen, klen) as well as the original's (klen, bsz), which read the first as the second."""
    torch.manual_seed(0)
    attention, x = text.MultiHeadAttn(2, 6, 3, 0.0), torch.randn(4, 3, 6)
    causal = torch.ones(4, 4).triu(1)
    assert torch.equal(attention(x, causal), attention(x, causal[:, :, None].bool()))
    padded = torch.zeros(4, 3)
    padded[2:, 1] = 1
    assert torch.allclose(
        attention(x, padded)[:, 1:2], attention(x[:, 1:2], torch.zeros(4, 4).index_fill(1, torch.tensor([2, 3]), 1))
    )
