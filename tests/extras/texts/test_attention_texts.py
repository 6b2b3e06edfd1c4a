"""d2l, labml and the fused tutorial under their own names: numbers, printed forms, checkpoints, and mistakes.

The texts' computations are written out here from their formulas.
"""

import copy
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from manyheads.errors import ManyHeadsError
from manyheads.extras.peers import PEERS
from manyheads.extras.texts import d2l, fused_qkv, labml
from manyheads.nn import Causal

B, Q, K, D, H = 2, 3, 5, 12, 4
LENS = {"none": None, "1d": torch.tensor([0, 4]), "2d": torch.tensor([[0, 1, 5], [2, 9, 3]])}
TYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def filled(module: nn.Module, dtype: torch.dtype) -> Any:
    """Weights that are the same in every test, and large enough to matter; biases too."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.to(dtype)


def same(found: list[Tensor], wanted: list[Tensor], sources: list[Tensor], tolerance: float) -> None:
    """Numbers, and gradients of all sources."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    grads = [torch.autograd.grad(answer[0].square().sum(), sources, retain_graph=True) for answer in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance * 10, rtol=tolerance * 10)


def d2l_softmax(scores: Tensor, lens: Tensor | None) -> Tensor:
    if lens is not None:
        each = lens[:, None].expand(-1, scores.shape[1]) if lens.dim() == 1 else lens
        scores = scores.masked_fill(torch.arange(scores.shape[2]) >= each[:, :, None], -1e6)
    return torch.softmax(scores, dim=-1)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES, ids=str)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize("edition", ["Chinese", "English"])
def test_attention_of_d2l(edition: str, lens: Tensor | None, dtype: torch.dtype, tolerance: float) -> None:
    chinese = edition == "Chinese"
    x = [torch.randn(B, length, width, dtype=dtype) for length, width in ((Q, 9), (K, 6), (K, 7))]
    q, k, v = (one.requires_grad_() for one in x)

    many = d2l.MultiHeadAttention(*([6, 9, 7] if chinese else []), D, H, 0.5, True).to(dtype).eval()
    many(q, k, v, lens)  # layers of the English edition learn their widths
    filled(many, dtype)
    heads = [one.unflatten(2, (H, 3)).transpose(1, 2).flatten(0, 1) for one in (many.W_q(q), many.W_k(k), many.W_v(v))]
    weights = d2l_softmax(heads[0] @ heads[1].mT / math.sqrt(3), None if lens is None else lens.repeat_interleave(H, 0))
    merged = (weights @ heads[2]).view(B, H, Q, 3).transpose(1, 2).flatten(2)
    found = [many(q, k, v, valid_lens=lens), many.attention.attention_weights]
    same(found, [many.W_o(merged), weights], [q, k, v, *many.parameters()], tolerance)
    assert found[1].shape == (B * H, Q, K)
    assert many.attention_weights is many.attention.attention_weights

    additive = d2l.AdditiveAttention(*([6, 9] if chinese else []), num_hiddens=8, dropout=0.1).to(dtype).eval()
    additive(q, k, v, lens)
    filled(additive, dtype)
    weights = d2l_softmax(
        (torch.tanh(additive.W_q(q)[:, :, None] + additive.W_k(k)[:, None]) @ additive.w_v.weight[0]), lens
    )
    found = [additive(q, k, v, lens), additive.attention_weights]
    same(found, [weights @ v, weights], [q, k, v, *additive.parameters()], tolerance)

    dot, narrow = d2l.DotProductAttention(0.5).eval(), k.detach().repeat(1, 1, 2)[..., :9].requires_grad_()
    weights = d2l_softmax(q @ narrow.mT / 3, lens)
    same([dot(q, narrow, v, lens), dot.attention_weights], [weights @ v, weights], [q, narrow, v], tolerance)
    scores = torch.randn(B, Q, K, dtype=dtype)
    before = scores.clone()
    assert torch.equal(d2l.masked_softmax(scores, lens), d2l_softmax(scores, lens))
    assert torch.equal(scores, before)


def test_small_functions_of_d2l() -> None:
    x = torch.randn(3, 4, 2)
    found = d2l.sequence_mask(x, torch.tensor([1, 0, 4]), value=-1)
    assert torch.equal(
        found, torch.stack([torch.cat([row[:n], -torch.ones(4 - n, 2)]) for row, n in zip(x, (1, 0, 4), strict=True)])
    )
    assert d2l.sequence_mask(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1, 2])).tolist() == [
        [1, 0, 0],
        [4, 5, 0],
    ]
    heads = d2l.transpose_qkv(torch.arange(24.0).view(1, 4, 6), 2)
    assert heads.shape == (2, 4, 3)
    assert heads[1, 0].tolist() == [3, 4, 5]
    assert torch.equal(d2l.transpose_output(heads, 2), torch.arange(24.0).view(1, 4, 6))
    positions = d2l.PositionalEncoding(7, 0.0, max_len=60)
    angle = torch.arange(60.0, dtype=torch.float64) / 10_000 ** (2 / 7)
    torch.testing.assert_close(positions.P[0, :, 2].double(), angle.sin(), atol=1e-5, rtol=0)
    torch.testing.assert_close(positions.P[0, :, 3].double(), angle.cos(), atol=1e-5, rtol=0)
    assert torch.equal(positions(x.new_zeros(2, 9, 7))[1], positions.P[0, :9])
    assert positions.state_dict() == {}
    d2l.check_shape(x, (3, 4, 2))


def encoder(edition: str) -> d2l.TransformerEncoder:
    return d2l.TransformerEncoder(
        *((23, *[D] * 4, [D], D, 20, H, 2, 0.0) if edition == "Chinese" else (23, D, 20, H, 2, 0.0))
    )


def decoder(edition: str) -> d2l.TransformerDecoder:
    return d2l.TransformerDecoder(
        *((23, *[D] * 4, [D], D, 20, H, 2, 0.0) if edition == "Chinese" else (23, D, 20, H, 2, 0.0))
    )


@pytest.mark.parametrize("edition", ["Chinese", "English"])
def test_the_transformer_chapter(edition: str) -> None:
    """The encoder's blocks are the peer's; the decoder sees no later token, and gives the same token by token."""
    ids, target, lens = torch.randint(23, (B, K)), torch.randint(23, (B, Q)), torch.tensor([5, 2])
    net = d2l.EncoderDecoder(encoder(edition), decoder(edition))
    net(ids, target, lens)
    filled(net, torch.float64)
    memory = net.encoder(ids, lens)
    x = net.encoder.pos_encoding(net.encoder.embedding(ids) * math.sqrt(D))
    for block in net.encoder.blks:
        sizes = {"num_hiddens": D, "ffn_num_hiddens": 20, "num_heads": H}
        peer = PEERS["d2l/TransformerEncoderBlock"].from_peer({"model": sizes}, block.state_dict())
        peer.module.double()
        x = peer.run({"in.X": x, "in.valid_lens": lens})["out.output"]
    torch.testing.assert_close(memory, x, atol=1e-12, rtol=1e-12)
    assert [one.shape for one in net.encoder.attention_weights] == [(B * H, K, K)] * 2

    logits, state = net(ids, target, lens)
    changed = target.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 23
    torch.testing.assert_close(net(ids, changed, lens)[0][:, :-1], logits[:, :-1], atol=1e-12, rtol=0)
    assert not torch.allclose(net(ids, changed, lens)[0][:, -1], logits[:, -1])
    assert [[one.shape for one in kind] for kind in net.decoder.attention_weights] == [
        [(B * H, Q, Q)] * 2,
        [(B * H, Q, K)] * 2,
    ]
    net.eval()
    state, steps = net.decoder.init_state(memory, lens), []
    for token in target.split(1, dim=1):
        step, state = net.decoder(token, state)
        steps.append(step)
    first = net.train()(ids, target[:, :1], lens)[0]
    torch.testing.assert_close(steps[0], first, atol=1e-12, rtol=0)
    # Every step is at position 0 in the text's code, so only the first equals a pass over the whole.
    assert [seen.shape for seen in state[2]] == [(B, Q, D)] * 2
    prefix = "EncoderBlock" if edition == "Chinese" else "TransformerEncoderBlock"
    assert type(net.encoder.blks.block0).__name__ == prefix
    shorter = d2l.EncoderDecoder(net.encoder, net.decoder, tgt_pad=0, lr=0.1)
    assert torch.equal(shorter(ids, target, lens), net(ids, target, lens)[0])


def labml_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Tensor]:
    q, k, v = (part(x) for part, x in ((module.query, q), (module.key, k), (module.value, v)))
    scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / math.sqrt(module.d_k)
    if mask is not None:
        scores = scores.masked_fill(mask[..., None] == 0, -math.inf)
    attn = torch.softmax(scores, dim=1)
    return [module.output(torch.einsum("ijbh,jbhd->ibhd", attn, v).flatten(2)), attn]


MASKS = {
    "none": None,
    "causal": (torch.arange(Q)[:, None] + 2 >= torch.arange(K))[:, :, None],
    "numbers": (torch.arange(Q * K * B).view(Q, K, B) % 3 > 0).long(),
    "one query": torch.tensor([1.0, 1, 0, 1, 0]).view(1, K, 1),
}


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("bias", [True, False])
def test_labml(mask: Tensor | None, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    module = filled(labml.MultiHeadAttention(H, D, 0.5, bias), dtype).eval()
    q, k, v = (torch.randn(length, B, D, dtype=dtype, requires_grad=True) for length in (Q, K, K))
    wanted = labml_attention(module, q, k, v, mask)
    same([module(query=q, key=k, value=v, mask=mask)], wanted[:1], [q, k, v, *module.parameters()], tolerance)
    torch.testing.assert_close(module.attn, wanted[1], atol=tolerance, rtol=tolerance)
    assert torch.equal(labml.tracker.last["attn"], module.attn)
    assert not module.attn.requires_grad


def test_habits_of_labml() -> None:
    module = labml.MultiHeadAttention(H, D, dropout_prob=0.5)
    x = torch.randn(Q, B, D, requires_grad=True)
    nothing = torch.ones(Q, Q, B)
    nothing[1] = 0
    out = module(query=x, key=x, value=x, mask=nothing)
    out.sum().backward()
    assert (module.attn[1] == 0).all()
    assert x.grad.isfinite().all()
    assert (module.attn != labml.tracker.last["attn"]).any()  # after dropout, and before
    module.eval()
    assert module.query(x[0]).shape == (B, H, D // H)  # (batch, d_model)
    assert torch.equal(module(x[0], x[0], x[0]), module(x[:1], x[:1], x[:1])[0])

    class Sharper(labml.MultiHeadAttention):
        def get_scores(self, query: Tensor, key: Tensor) -> Tensor:
            return 2 * super().get_scores(query, key)

    sharper = Sharper(H, D).eval()
    sharper.load_state_dict(module.state_dict())
    sharper.scale /= 2
    torch.testing.assert_close(sharper(query=x, key=x, value=x), module(query=x, key=x, value=x))


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES, ids=str)
@pytest.mark.parametrize("shape", [None, (K, K), (B, K, K), (B, 1, 1, K), (B, H, K, K)], ids=str)
@pytest.mark.parametrize("input_dim", [D, 7])
def test_fused(shape: Any, input_dim: int, dtype: torch.dtype, tolerance: float) -> None:
    module = filled(fused_qkv.MultiheadAttention(input_dim, D, H), dtype)
    x = torch.randn(B, K, input_dim, dtype=dtype, requires_grad=True)
    mask = None if shape is None else (torch.arange(math.prod(shape)).view(shape) % 3 > 0).long()
    if mask is not None:
        mask[..., 0, :] = 0  # the first query may attend to nothing: to all keys equally
    rows = module.qkv_proj(x).view(B, K, H, 3, D // H).permute(3, 0, 2, 1, 4)
    scores = rows[0] @ rows[1].mT / math.sqrt(D // H)
    if mask is not None:
        scores = scores.masked_fill((mask[:, None] if mask.dim() == 3 else mask) == 0, -9e15)
    weights = scores.softmax(-1)
    wanted = module.o_proj((weights @ rows[2]).transpose(1, 2).flatten(2))
    out, attention = module(x, mask=mask, return_attention=True)
    same([out, attention], [wanted, weights], [x, *module.parameters()], tolerance)
    assert torch.equal(module(x, mask), out)


def test_small_functions_of_the_fused_text() -> None:
    torch.manual_seed(0)
    big = fused_qkv.MultiheadAttention(512, 512, 8)
    assert round(big.qkv_proj.weight.std().item(), 3) == 0.031  # over the stacked matrix; 0.044 for three of them
    assert round(big.o_proj.weight.std().item(), 3) == 0.044
    assert not big.qkv_proj.bias.any()
    table = fused_qkv.position_encoding(seq_len=4, d_model=4)
    assert [round(value, 4) for value in table[3].tolist()] == [0.1411, -0.99, 0.03, 0.9996]
    assert fused_qkv.position_encoding(4, 5).shape == (4, 5)
    for names in ({"max_len": 4, "d_model": 4}, {"seq_len": 4, "d": 4, "n": 10_000.0}):  # copies of the text
        assert torch.equal(fused_qkv.position_encoding(**names), table)
    assert fused_qkv.position_encoding(4, 4, 100)[1, 2] == math.sin(0.1)
    assert fused_qkv.expand_mask(torch.ones(2, 3, 3)).shape == (2, 1, 3, 3)
    heads = fused_qkv.MultiheadAttention(D, D, 3)  # a mask for each head, where it cannot be one for each sentence
    mask = torch.ones(3, K, K).tril()
    x = torch.randn(B, K, D)
    assert torch.equal(heads(x, mask), heads(x, mask[None]))


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 6), (1, 5)])
def test_relative_attention_of_labml(queries: int, keys: int) -> None:
    module = filled(labml.RelativeMultiHeadAttention(H, D), torch.float64).eval()
    q, k, v = (torch.randn(length, B, D, dtype=torch.float64) for length in (queries, keys, keys))
    peer = PEERS["labml/RelativeMultiHeadAttention"].from_peer(
        {"model": {"heads": H, "d_model": D}}, module.state_dict()
    )
    peer.module.double()
    wanted = peer.run({"in.query": q, "in.key": k, "in.value": v})
    torch.testing.assert_close(module(query=q, key=k, value=v), wanted["out.output"], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(module.attn, wanted["out.attn"], atol=1e-12, rtol=1e-12)
    rows = torch.arange(1, 6)[None, :, None, None].repeat(3, 1, 1, 1)  # the text's own example
    assert labml.shift_right(rows)[:, :, 0, 0].tolist() == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [5, 0, 1, 2, 3]]


def test_the_encoder_of_the_fused_text() -> None:
    """A layer is torch's, without dropout; the maps are those of a masked pass."""
    sizes = {"input_dim": D, "num_heads": H, "dim_feedforward": 20}
    encoder = filled(fused_qkv.TransformerEncoder(num_layers=2, **sizes), torch.float64)
    x, mask = torch.randn(B, K, D, dtype=torch.float64), torch.ones(K, K).tril()
    y = x
    maps = []
    for layer in encoder.layers:
        peer = nn.TransformerEncoderLayer(D, H, 20, 0.0, batch_first=True).double()
        stacked = layer.self_attn.qkv_proj.weight.view(H, 3, D // H, D).transpose(0, 1).flatten(0, 2)
        bias = layer.self_attn.qkv_proj.bias.view(H, 3, D // H).transpose(0, 1).flatten()
        parts = {"self_attn.out_proj": layer.self_attn.o_proj, "linear1": layer.linear_net[0]}
        parts |= {"linear2": layer.linear_net[3], "norm1": layer.norm1, "norm2": layer.norm2}
        weights = {f"{to}.{name}": value for to, part in parts.items() for name, value in part.state_dict().items()}
        peer.load_state_dict({"self_attn.in_proj_weight": stacked, "self_attn.in_proj_bias": bias, **weights})
        maps.append(peer.self_attn(y, y, y, attn_mask=mask == 0, average_attn_weights=False)[1])
        y = peer(y, src_mask=mask == 0)
    torch.testing.assert_close(encoder(x, mask=mask), y, atol=1e-12, rtol=1e-12)
    for found, wanted in zip(encoder.get_attention_maps(x, mask), maps, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    assert not encoder.get_attention_maps(x)[0].requires_grad
    positions = fused_qkv.PositionalEncoding(d_model=48, max_len=96)
    torch.testing.assert_close(positions.pe[0], fused_qkv.position_encoding(96, 48), atol=1e-5, rtol=0)
    assert torch.equal(positions(torch.zeros(B, K, 48))[1], positions.pe[0, :K])
    assert not positions.state_dict()


def test_rates_of_the_fused_text() -> None:
    parameter = nn.Parameter(torch.empty(4, 4))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    schedule = fused_qkv.CosineWarmupScheduler(optimizer=optimizer, warmup=100, max_iters=2000)
    factors = [schedule.get_lr_factor(step) for step in (0, 50, 100, 1000, 2000)]
    assert factors == pytest.approx([0, 0.5 * 0.998459, 0.993844, 0.5, 0], abs=1e-6)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5, rel=1e-5)
    assert fused_qkv.CosineWarmupScheduler(optimizer, 0, 10).get_lr_factor(0) == 1


@pytest.mark.parametrize(
    "name", ["d2l_attention", "d2l_attention_bias", "labml_mha", "labml_mha_cross", "fused_qkv_mha"]
)
def test_recorded_values(name: str, shared: Path) -> None:
    """What the texts' own code computed, with its checkpoints."""
    folder = shared / "fixtures" / "parity"
    held = load_file(folder / f"{name}.safetensors")
    heads = json.loads((folder / f"{name}.json").read_text("utf-8"))["config"]["heads"]

    def loaded(module: nn.Module, part: str) -> Any:
        start = f"param.{part}"
        module.load_state_dict({k.removeprefix(start): v for k, v in held.items() if k.startswith(start)})
        return module.eval()

    found: dict[str, Tensor] = {}
    masks = {key.removeprefix("in."): one for key, one in held.items() if key.startswith(("in.mask", "in.valid"))}
    if name.startswith("d2l"):
        q, k, v, x = (held[f"in.{one}"] for one in ("queries", "keys", "values", "block_x"))
        add, mha = held["param.add.w_v.weight"].shape[1], held["param.mha.W_o.weight"].shape[0]
        has_bias = "param.mha.W_q.bias" in held
        additive = loaded(d2l.AdditiveAttention(k.shape[2], q.shape[2], add, 0.1), "add.")
        many = loaded(d2l.MultiHeadAttention(k.shape[2], q.shape[2], v.shape[2], mha, heads, 0.1, has_bias), "mha.")
        width, inner = x.shape[2], held["param.blk.ffn.dense1.weight"].shape[0]
        in_block = "param.blk.attention.W_q.bias" in held
        block = loaded(
            d2l.EncoderBlock(width, width, width, width, [width], width, inner, heads, 0.1, in_block), "blk."
        )
        for kind, lens in {
            "none": None,
            **{one.removeprefix("valid_lens_"): lens for one, lens in masks.items()},
        }.items():
            found[f"masked_softmax_{kind}"] = d2l.masked_softmax(held["in.scores"], lens)
            found[f"mha_{kind}"], found[f"additive_{kind}"] = many(q, k, v, lens), additive(q, k, v, lens)
            found[f"mha_weights_{kind}"] = many.attention.attention_weights
            if kind != "2d":
                found[f"block_{kind}"] = block(x, lens)
        found["positions"] = d2l.PositionalEncoding(mha, 0).P[0, :40]
    elif name.startswith("labml"):
        d_model, bias = held["param.mha.output.bias"].shape[0], "param.mha.query.linear.bias" in held
        module = loaded(labml.MultiHeadAttention(heads, d_model, 0.1, bias), "mha.")
        for kind, mask in {"none": None, **masks}.items():
            found[f"mha_{kind}"] = module(**{n: held[f"in.{n}"] for n in ("query", "key", "value")}, mask=mask)
            found[f"attn_{kind}"] = module.attn
    else:
        fused = loaded(fused_qkv.MultiheadAttention(12, 12, heads), "")
        for kind, mask in {"none": None, **masks}.items():
            found[f"out_{kind}"], found[f"attn_{kind}"] = fused(held["in.x"], mask, return_attention=True)
        given = (held[f"in.{one}"] for one in "qkv")
        found["sdp_values"], found["sdp_attn"] = fused_qkv.scaled_dot_product(*given)
    assert len(found) > 5
    for key, value in found.items():
        torch.testing.assert_close(value.reshape(held[f"out.{key}"].shape), held[f"out.{key}"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (
            d2l.MultiHeadAttention(100, 100, 100, 100, 5, 0.5),
            "MultiHeadAttention(\n  (attention): DotProductAttention(\n"
            "    (dropout): Dropout(p=0.5, inplace=False)\n  )\n"
            + "".join(f"  (W_{n}): Linear(in_features=100, out_features=100, bias=False)\n" for n in "qkvo")
            + ")",
        ),
        (
            d2l.AdditiveAttention(num_hiddens=8, dropout=0.1),
            "AdditiveAttention(\n  (W_k): LazyLinear(in_features=0, out_features=8, bias=False)\n"
            "  (W_q): LazyLinear(in_features=0, out_features=8, bias=False)\n"
            "  (w_v): LazyLinear(in_features=0, out_features=1, bias=False)\n"
            "  (dropout): Dropout(p=0.1, inplace=False)\n)",
        ),
        (
            labml.MultiHeadAttention(heads=8, d_model=512, bias=False),
            "MultiHeadAttention(\n"
            + "".join(
                f"  ({n}): PrepareForMultiHeadAttention(\n"
                f"    (linear): Linear(in_features=512, out_features=512, bias={n == 'value'})\n  )\n"
                for n in ("query", "key", "value")
            )
            + "  (softmax): Softmax(dim=1)\n  (output): Linear(in_features=512, out_features=512, bias=True)\n"
            "  (dropout): Dropout(p=0.1, inplace=False)\n)",
        ),
        (
            fused_qkv.MultiheadAttention(8, 4, 2),
            "MultiheadAttention(\n  (qkv_proj): Linear(in_features=8, out_features=12, bias=True)\n"
            "  (o_proj): Linear(in_features=4, out_features=4, bias=True)\n)",
        ),
    ],
    ids=["d2l", "lazy", "labml", "fused"],
)
def test_printed_forms(module: nn.Module, shown: str) -> None:
    assert repr(module) == shown


X3 = torch.randn(B, Q, D)
CALLS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "d2l": (lambda: d2l.MultiHeadAttention(D, D, D, D, H, 0.5), (X3, X3, X3, torch.tensor([1, 2]))),
    "d2l additive": (lambda: d2l.AdditiveAttention(D, D, 8, 0.5), (X3, X3, X3, None)),
    "d2l encoder": (lambda: encoder("Chinese"), (torch.ones(B, Q).long(), None)),
    "d2l decoder": (lambda: decoder("English"), (torch.ones(B, Q).long(), [X3, None, [None, None]])),
    "labml": (lambda: labml.MultiHeadAttention(H, D), (X3, X3, X3)),
    "labml relative": (lambda: labml.RelativeMultiHeadAttention(H, D), (X3, X3, X3)),
    "fused": (lambda: fused_qkv.MultiheadAttention(D, D, H), (X3,)),
    "fused encoder": (
        lambda: fused_qkv.TransformerEncoder(2, input_dim=D, num_heads=H, dim_feedforward=20),
        (X3, torch.ones(Q, Q).tril()),
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_they_are_plain_modules(kind: str) -> None:
    """Hooks of every part run, and copies of a module that has just been trained compute the same."""
    make, inputs = CALLS[kind]
    module, seen = make(), set[str]()
    fresh = lambda: copy.deepcopy(inputs)  # noqa: E731  # a decoder writes into its state
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: seen.add(name))
    first = module(*fresh())
    (first[0] if isinstance(first, tuple) else first).sum().backward()
    containers = {name for name, part in module.named_modules() if isinstance(part, nn.Sequential | nn.ModuleList)}
    assert seen | containers == {name for name, _ in module.named_modules()}
    assert all(parameter.grad is not None for parameter in module.parameters())
    for part in module.modules():
        part._forward_hooks.clear()
    module.eval()
    wanted = module(*fresh())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        again = other(*fresh())
        assert torch.equal(*(one[0] if isinstance(one, tuple) else one for one in (again, wanted)))
    other = make()
    other(*fresh())
    other.load_state_dict(module.state_dict())
    exact = {type(part) for part in module.modules() if isinstance(part, nn.Linear)}
    assert exact <= {nn.Linear}  # the texts ask type(layer) == nn.Linear


MHA, SEEN = d2l.MultiHeadAttention(D, D, D, D, H, 0.5), torch.randn(B, K, D)
LABML, FUSED = labml.MultiHeadAttention(H, D), fused_qkv.MultiheadAttention(D, D, H)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: d2l.MultiHeadAttention(100, 100, 100, 100, 7, 0.5), RuntimeError, "num_hiddens 100 .* num_heads 7"),
        (lambda: d2l.MultiHeadAttention(100, 100, 100, 100, 0.5, 5), ValueError, r"num_heads 0\.5"),
        (lambda: d2l.MultiHeadAttention(100, 0, 0.5), RuntimeError, "num_heads 0"),
        (lambda: d2l.MultiHeadAttention(100, 5, 1.5), ValueError, r"dropout is 1\.5; .* 0 to 1"),
        (lambda: d2l.MultiHeadAttention(100, 100, 5, 0.5, True), TypeError, r"fits no edition .*key_size, .* or Multi"),
        (lambda: d2l.AdditiveAttention(key_size=2, num_hiddens=8, dropout=0.1), TypeError, "query_size"),
        (lambda: MHA(X3, SEEN, SEEN, torch.tensor([3, 2, 1])), IndexError, r"\(3,\).*queries of shape \(2, 3, 12\)"),
        (lambda: MHA(X3, SEEN, SEEN, torch.ones(2, 5).long()), IndexError, r"\(2, 5\).*here \(2, 3\)"),
        (lambda: MHA(X3, SEEN, SEEN, [3, 2]), TypeError, r"valid_lens is list; .*torch.as_tensor\(valid_lens\)"),
        (lambda: d2l.PositionWiseFFN(D, D, D)([[1.0]]), TypeError, r"X is list; .*torch.as_tensor\(X\)"),
        (lambda: d2l.AddNorm([D], 0.1)(X3, X3.numpy()), TypeError, "Y is ndarray"),
        (lambda: d2l.masked_softmax(X3, [3, 2]), AttributeError, "valid_lens is list"),
        (lambda: MHA(X3, X3, X3, torch.ones(2, 3) > 0), IndexError, "mask of True and False; .*number of valid keys"),
        (
            lambda: MHA(X3.mT.reshape(Q, B, D), X3.view(Q, B, D), X3.view(Q, B, D), torch.tensor([1, 2])),
            IndexError,
            "transpose",
        ),
        (lambda: MHA(X3, SEEN[:1], SEEN[:1]), RuntimeError, "one batch size"),
        (lambda: MHA(X3, SEEN, SEEN[:, :2]), RuntimeError, "5 keys and 2 values"),
        (
            lambda: MHA(X3[0], SEEN[0], SEEN[0]),
            RuntimeError,
            r"queries has shape \(3, 12\), 2 axes; .*queries\.unsqueeze\(0\)",
        ),
        (lambda: MHA(X3[..., :5], SEEN, SEEN), RuntimeError, "width of 5, .* 12; .* query_size"),
        (lambda: d2l.DotProductAttention(0)(X3, SEEN[..., :2], SEEN), RuntimeError, "differ in width"),
        (lambda: d2l.masked_softmax(torch.rand(2, 4), torch.tensor([1, 2])), IndexError, r"X has shape \(2, 4\)"),
        (lambda: d2l.sequence_mask(torch.rand(3, 4), torch.tensor([1, 2])), IndexError, "3 rows"),
        (lambda: d2l.transpose_qkv(X3, 5), RuntimeError, "width 12 .* num_heads 5"),
        (lambda: d2l.transpose_output(X3, 5), RuntimeError, "batch x heads 2 .* 5"),
        (lambda: d2l.PositionalEncoding(D, 0, max_len=2)(X3), RuntimeError, "2 positions of width 12"),
        (lambda: d2l.AddNorm(D, 0)(X3, SEEN), RuntimeError, "equal shapes"),
        (lambda: d2l.check_shape(X3, (1, 2)), AssertionError, r"\(2, 3, 12\), not \(1, 2\)"),
        (lambda: labml.MultiHeadAttention(8, 100), RuntimeError, "d_model 100 .* heads 8"),
        (lambda: labml.MultiHeadAttention(0, 100), ZeroDivisionError, "heads 0"),
        (
            lambda: LABML(query=X3, key=X3, value=X3, mask=torch.ones(2, 2)),
            IndexError,
            r"2 axes; .*queries, keys, batch.*mask\.unsqueeze\(2\)",
        ),
        (
            lambda: LABML(query=X3, key=X3, value=X3, mask=torch.ones(3, 2, 2)),
            AssertionError,
            r"\(batch, queries, keys\): .*permute",
        ),
        (
            lambda: LABML(query=X3, key=X3, value=X3, mask=torch.ones(3, 3, 2)),
            AssertionError,
            r"query seems .*transpose",
        ),
        (lambda: LABML(query=X3, key=X3, value=X3, mask=torch.ones(2, 5, 3)), AssertionError, r"here \(2, 2, 3\)"),
        (lambda: LABML(query=X3, key=X3, value=X3, mask=torch.full((2, 2, 3), -9.0)), ValueError, "mask == 0"),
        (lambda: LABML(query=X3, key=X3, value=X3, mask=Causal()), AttributeError, "mask is Causal"),
        (lambda: LABML(query=X3, key=SEEN, value=SEEN), RuntimeError, "one batch size, the second axis"),
        (lambda: LABML(query=X3[..., :5], key=X3, value=X3), RuntimeError, "d_model 12"),
        (lambda: fused_qkv.MultiheadAttention(10, 10, 3), AssertionError, "embed_dim 10 .* num_heads 3"),
        (lambda: fused_qkv.MultiheadAttention(10, 10, 0), ZeroDivisionError, "num_heads 0"),
        (lambda: FUSED(X3[0]), ValueError, r"x has shape \(3, 12\); .*x\[None\]"),
        (lambda: FUSED(X3[..., :5]), RuntimeError, "width of 5, but input_dim is 12"),
        (lambda: FUSED(X3, torch.ones(4, 4)), RuntimeError, r"\(4, 4\), which does not fit .*\(2, 4, 3, 3\)"),
        (lambda: FUSED(X3, torch.tensor([3, 2, 1]).view(3, 1) / 2), ValueError, "other than 0 and 1"),
        (
            lambda: FUSED(torch.randn(H, Q, D), torch.ones(H, Q, Q)),
            ValueError,
            r"4 sentences and 4 heads; .*mask\[:, None\]",
        ),
        (lambda: fused_qkv.scaled_dot_product(X3, SEEN, X3), RuntimeError, "one length"),
        (lambda: fused_qkv.scaled_dot_product(*[torch.randn(4)] * 3), RuntimeError, "two axes or more"),
        (
            lambda: fused_qkv.scaled_dot_product(X3, SEEN.expand(2, K, D)[[0, 1, 0]], SEEN),
            RuntimeError,
            "must be equal",
        ),
        (lambda: fused_qkv.position_encoding(4, 0), RuntimeError, "d_model 0"),
        (lambda: FUSED([1]), AttributeError, "x is list; give a tensor"),
        (lambda: fused_qkv.scaled_dot_product(X3, [1], X3), TypeError, "k is list"),
        (lambda: LABML(query=[1], key=X3, value=X3), AttributeError, "query is list"),
        (lambda: LABML(query=X3, key=[1], value=X3), AttributeError, "key is list"),
        (lambda: labml.PrepareForMultiHeadAttention(8, 0, 4, True), RuntimeError, "heads is 0"),
        (lambda: fused_qkv.position_encoding(4), TypeError, r"fits no edition .*seq_len, d_model, n=10000"),
        (
            lambda: fused_qkv.TransformerEncoder(2, input_dim=D, heads=H),
            TypeError,
            "fits no edition .*num_heads, dim_feedforward",
        ),
        (lambda: fused_qkv.EncoderBlock(10, 3, 20), AssertionError, "embed_dim 10 .* num_heads 3"),
        (lambda: fused_qkv.PositionalEncoding(D, max_len=2)(X3), RuntimeError, "3 positions, .* only 2; .*max_len"),
        (lambda: fused_qkv.PositionalEncoding(8)(X3), RuntimeError, r"\(2, 3, 12\); it must be \(batch, length, 8\)"),
        (lambda: fused_qkv.CosineWarmupScheduler(None, 10, 0), ValueError, "max_iters is 0"),
        (
            lambda: labml.RelativeMultiHeadAttention(1, 2)(*[torch.zeros(4097, 1, 2)] * 3),
            RuntimeError,
            "4097 keys, but vectors for 4096",
        ),
        (lambda: labml.shift_right(torch.zeros(3)), IndexError, r"\(3,\); .*two axes"),
        (lambda: LABML.get_scores(X3, X3), ValueError, "query has shape .*queries, batch, heads, d_k"),
    ],
)
def test_mistakes(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    """Our sentence, as an error of ours that is also of the type that the text's code or torch raises."""
    with pytest.raises(kind, match=re.compile(said, re.DOTALL)) as caught:
        call()
    assert isinstance(caught.value, ManyHeadsError)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_pictures() -> None:
    figure = d2l.show_heatmaps(torch.rand(1, 2, 3, 4), xlabel="Keys", ylabel="Queries", titles=["a", "b"])
    panels = figure.axes[:2]
    assert [panel.get_title() for panel in panels] == ["a", "b"]
    assert panels[0].get_ylabel() == "Queries"
    assert panels[0].images[0].get_array().shape == (3, 4)
    positions = d2l.PositionalEncoding(32, 0).P[0, :60, 4:8]
    drawn = d2l.plot(torch.arange(60), positions.T, xlabel="Row (position)", legend=[f"Col {n}" for n in range(4, 8)])
    assert [len(line.get_ydata()) for line in drawn.axes[0].lines] == [60] * 4
    assert drawn.axes[0].lines[1].get_ydata()[0] == 1.0  # column 5 is a cosine
    again = d2l.plot([1, 10], [[1, 2], [3, 4]], xlim=[1, 10], xscale="log", fmts=("m--",), axes=drawn.axes[0])
    assert again is drawn
    assert (drawn.axes[0].get_xscale(), drawn.axes[0].get_xlim()) == ("log", (1, 10))
    assert [line.get_linestyle() for line in drawn.axes[0].lines[-2:]] == ["--", "--"]
