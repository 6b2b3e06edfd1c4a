"""The names of texts on the Reformer: the original's numbers, reversible layers, mistakes repaired."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.errors import ManyHeadsError
from manyheads.extras.texts import reformer as text


def drawing(monkeypatch: pytest.MonkeyPatch, rotations: Tensor) -> None:
    """The original's rotations in place of a draw."""

    def draw(shape: Any, **_: Any) -> Tensor:
        assert tuple(shape) == tuple(rotations.shape)
        return rotations

    monkeypatch.setattr("manyheads.extras.texts.reformer_attention.torch.randn", draw)


def golden(shared: Path, pattern: str) -> list[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    from safetensors.torch import load_file

    paths = sorted((shared / "fixtures" / "parity").glob(f"{pattern}.json"))
    if not paths:
        pytest.skip("no parity fixtures")
    return [(path.stem, json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))) for path in paths]


def wanted_of(meta: dict[str, Any], tensors: dict[str, Tensor], name: str) -> tuple[Tensor, float]:
    """The original in float64 where its float32 is rounded too coarsely, and the tolerance."""
    tolerance = meta["tolerance"]
    if f"exact.{name}" in tensors:
        return tensors[f"exact.{name}"], tolerance["atol_exact"]
    return tensors[f"out.{name}"], tolerance.get("atol_out_vs_exact", tolerance["atol"])


def test_hashed_attention_has_the_originals_numbers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    for name, meta, tensors in golden(shared, "reformer_pytorch_lsh_*"):
        opts = meta["config"]["opts"]
        across = opts["n_hashes"] > 1 and opts.get("attend_across_buckets", True)
        if across and not opts.get("allow_duplicate_attention", True):
            continue  # a mistake of the original: pairs across two rounds are not corrected
        drawing(monkeypatch, tensors["rot.0"] if "rot.0" in tensors else tensors["in.rotations"])
        masks = {key: tensors[f"in.{key}"] for key in ("input_mask", "input_attn_mask") if f"in.{key}" in tensors}
        for return_attn in (False, True):
            attention = text.LSHAttention(**{**opts, "return_attn": return_attn}).eval()
            out, attn, buckets = attention(
                tensors["in.qk"], tensors["in.v"], query_len=meta["config"].get("query_len"), **masks
            )
            real = masks.get("input_mask", torch.ones(tensors["in.qk"].shape[:2])).bool()[:, : out.shape[1]]
            for ours, key in ((out, "out"), (attn, "attn")):
                if key == "out" or return_attn:
                    theirs, atol = wanted_of(meta, tensors, key)
                    torch.testing.assert_close(
                        ours[real], theirs[real], atol=atol, rtol=1e-5, msg=lambda m, n=f"{name} {key}": f"{n}: {m}"
                    )
            assert torch.equal(buckets, tensors["out.buckets"])
            compared += 1
    assert compared > 20


def test_the_attention_module_has_the_originals_numbers(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, meta, tensors in golden(shared, "reformer_pytorch_selfattn*"):
        attention = text.LSHSelfAttention(**meta["config"]["opts"]).eval()
        attention.load_state_dict({key[6:]: one for key, one in tensors.items() if key.startswith("param.")})
        if "in.rotations" in tensors:
            drawing(monkeypatch, tensors["in.rotations"])
        out = attention(tensors["in.x"])
        wanted, atol = wanted_of(meta, tensors, "out")
        torch.testing.assert_close(out, wanted, atol=atol, rtol=1e-5)


def test_one_bucket_is_exact_attention() -> None:
    """If a chunk holds everything, both kinds agree; also with masks, more keys, heads in parts, and any length."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim": 12, "heads": 2, "bucket_size": 40, "n_hashes": 2, "full_attn_thres": 0}
    for causal in (False, True):
        hashed = text.LSHSelfAttention(**options, causal=causal, attn_chunks=2)
        exact = text.LSHSelfAttention(**options, causal=causal, use_full_attn=True)
        exact.load_state_dict(hashed.state_dict())
        x, keys, mask = torch.randn(3, 9, 12), torch.randn(3, 4, 12), torch.arange(9) < torch.tensor([[9], [5], [7]])
        for given in ({}, {"input_mask": mask}, {"keys": keys}, {"keys": keys, "context_mask": mask[:, 5:]}):
            ours, theirs = hashed(x, **given), exact(x, **given)
            real = mask if "input_mask" in given else mask | True
            torch.testing.assert_close(ours[real], theirs[real])


def test_reversible_layers_equal_ordinary_ones_with_their_hashes_and_dropout() -> None:
    torch.manual_seed(0)
    model = text.Reformer(12, 3, heads=2, bucket_size=4, n_hashes=2, ff_chunks=2, causal=True, ff_dropout=0.2).double()
    x = torch.randn(2, 32, 12, dtype=torch.float64)
    found = []
    for limit in (0, 1000):
        model.layers.reverse_thres = limit
        model.zero_grad()
        torch.manual_seed(1)
        out = model(x)
        out.square().sum().backward()
        found.append((out.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    (out, grads), (plain_out, plain_grads) = found
    assert torch.equal(out, plain_out)
    for one, other in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_reversible_layer_by_its_equations() -> None:
    f, g = nn.Linear(3, 3), nn.Linear(3, 3)
    x1, x2 = torch.randn(2, 1, 4, 3).unbind()
    for layers in (text.ReversibleBlock(f, g), text.ReversibleSequence([(f, g)])):
        y1, y2 = layers(torch.cat([x1, x2], dim=-1)).chunk(2, dim=-1)
        torch.testing.assert_close(y1, x1 + f(x2))
        torch.testing.assert_close(y2, x2 + g(y1))


def test_a_block_goes_back_from_its_outputs() -> None:
    """The inputs and all gradients are those of ordinary backpropagation, dropout and hashes included."""
    torch.manual_seed(0)
    f = text.LSHSelfAttention(4, heads=2, bucket_size=2, n_hashes=2, dropout=0.2)
    block = text.ReversibleBlock(f, text.FeedForward(4, dropout=0.5)).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    y, dy = block(x), torch.randn(2, 6, 8, dtype=torch.float64)
    wanted = torch.autograd.grad(y, [x, *block.parameters()], dy)
    back, dx = block.backward_pass(y.detach(), dy)
    torch.testing.assert_close(back, x.detach())
    torch.testing.assert_close(dx, wanted[0])
    for parameter, gradient in zip(block.parameters(), wanted[1:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_readme_of_the_original_runs_and_learns() -> None:
    torch.manual_seed(0)
    model = text.ReformerLM(
        num_tokens=20, dim=16, depth=2, max_seq_len=32, heads=2, dim_head=8, bucket_size=4, n_hashes=2, ff_chunks=1,
        causal=True,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = torch.randint(1, 20, (4, 16))
    ids, losses = torch.cat([first, first], dim=1), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    for options in ({"absolute_position_emb": True, "emb_dim": 8}, {"fixed_position_emb": True, "depth": 1}):
        small = text.ReformerLM(**{"num_tokens": 20, "dim": 16, "depth": 2, "max_seq_len": 32, "heads": 2, **options},
                                dim_head=8, bucket_size=4, weight_tie_embedding=True)  # fmt: skip
        assert small(ids).shape == (4, 32, 20)


def test_the_wrapper_for_training_and_samples() -> None:
    """The loss of real ids alone; samples among the allowed ids only, up to the end."""
    torch.manual_seed(0)
    model = text.ReformerLM(num_tokens=20, dim=16, depth=1, max_seq_len=8, heads=2, dim_head=8, causal=True)
    wrapper = text.TrainingWrapper(model, ignore_index=0, pad_value=0)
    assert next(iter(wrapper.state_dict())) == "net.net.token_emb.weight"
    rows = [torch.tensor([1, 5, 6, 7]), torch.tensor([1, 8])]
    logits = wrapper(rows)
    assert logits.shape == (2, 4, 20)
    each = [nn.functional.cross_entropy(logits[row, place], rows[row][place + 1]) for row, place in
            ((0, 0), (0, 1), (0, 2), (1, 0))]  # fmt: skip
    torch.testing.assert_close(wrapper(rows, return_loss=True), torch.stack(each).mean())
    torch.testing.assert_close(wrapper(rows[0][None], return_loss=True), torch.stack(each[:3]).mean())
    best = wrapper.generate(torch.tensor([1, 5]), 3, filter_thres=1.0)
    assert best[0] == model(torch.tensor([[1, 5]]))[0, -1].argmax()
    assert wrapper.generate(torch.ones(2, 3).long(), 12, filter_logits_fn=text.top_p).shape == (2, 12)
    assert wrapper.training
    assert len(wrapper.generate(torch.tensor([1, 5]), 9, int(best[0]), filter_thres=1.0)) == 1
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    assert text.top_k(scores, 0.5).isfinite().tolist() == [[True, False, True, False]]
    assert text.top_p(scores, 0.3).isfinite().tolist() == [[True, False, True, False]]
    assert text.top_p(scores, 1.0).isfinite().tolist() == [[True, False, False, False]]


def test_the_language_models_options_stand_in_the_originals_order() -> None:
    """A reader's positional call means the same; the language model swaps two options of `Reformer`."""
    wanted = (
        "num_tokens dim depth max_seq_len heads dim_head bucket_size n_hashes ff_chunks attn_chunks causal weight_tie"
        " lsh_dropout ff_dropout ff_mult ff_activation ff_glu post_attn_dropout layer_dropout random_rotations_per_head"
        " use_scale_norm use_rezero use_full_attn full_attn_thres reverse_thres num_mem_kv one_value_head emb_dim"
        " return_embeddings weight_tie_embedding fixed_position_emb absolute_position_emb axial_position_emb"
        " axial_position_shape n_local_attn_heads pkm_layers pkm_num_keys"
    )
    found = [one.name for one in inspect.signature(text.ReformerLM).parameters.values() if one.kind != one.VAR_KEYWORD]
    assert found == wanted.split()
    by_place = text.ReformerLM(20, 16, 1, 32, 2, 8, 4, 2, 1, 1, True, False, 0.1, 0.2, 3, nn.ReLU, True)
    attention, feed_forward = (
        part.net.fn for part in (by_place.reformer.layers.blocks[0].f, by_place.reformer.layers.blocks[0].g)
    )
    assert attention.full_attn.causal
    assert attention.lsh_attn.dropout.p == 0.1
    assert (feed_forward.fn.w1.out_features, type(feed_forward.fn.act), feed_forward.fn.glu) == (96, nn.ReLU, True)
    assert feed_forward.fn.dropout.p == 0.2


def test_scaled_norms_and_parts_that_begin_at_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    norm = text.ScaleNorm(8)
    norm.g.data.fill_(3.0)
    torch.testing.assert_close(norm(x), 3 * x / (x**2).sum(-1, keepdim=True).sqrt())
    torch.testing.assert_close(norm(torch.zeros(8)), torch.zeros(8))
    model = text.Reformer(8, 2, heads=2, bucket_size=4, use_rezero=True)
    torch.testing.assert_close(model(x), x)  # g is 0 at first, so a layer adds nothing
    model(x).sum().backward()
    assert all(one.grad is not None for name, one in model.named_parameters() if name.endswith("f.net.g"))
    names = text.Reformer(8, 1, heads=2, use_scale_norm=True).state_dict()
    assert names["layers.blocks.0.f.net.norm.g"].shape == (1,)


def test_trained_keys_and_one_value_head_by_what_they_stand_for() -> None:
    """Trained keys are keys of every row; one value head is the same matrix for all heads."""
    torch.manual_seed(0)
    x, keys, real = torch.randn(3, 6, 12), torch.randn(3, 4, 12), torch.rand(3, 4) < 0.5
    for causal in (False, True):
        options: dict[str, Any] = {"dim": 12, "heads": 3, "causal": causal, "use_full_attn": True}
        plain, trained = text.LSHSelfAttention(**options), text.LSHSelfAttention(**options, num_mem_kv=2)
        trained.load_state_dict({**plain.state_dict(), "mem_kv": torch.randn(1, 2, 12)})
        all_keys = torch.cat([trained.mem_kv.expand(3, 2, 12), keys], dim=1)
        wanted = plain(x, keys=all_keys, context_mask=torch.cat([torch.ones(3, 2).bool(), real], dim=1))
        torch.testing.assert_close(trained(x, keys=keys, context_mask=real), wanted)
        shared = text.LSHSelfAttention(**options, one_value_head=True)
        plain.load_state_dict({**shared.state_dict(), "tov.weight": shared.tov.weight.repeat(3, 1)})
        torch.testing.assert_close(shared(x), plain(x))
    hashed = text.LSHSelfAttention(12, 3, bucket_size=4, num_mem_kv=2, one_value_head=True, full_attn_thres=0)
    assert hashed(x, keys=keys).shape == x.shape


def test_padding_sees_everything_in_exact_attention() -> None:
    """All scores of a query that is padding are equal, as in the original."""
    _, weights, _ = text.FullQKAttention(causal=True)(
        torch.randn(1, 4, 2), torch.randn(1, 4, 2), input_mask=torch.tensor([[True, True, False, True]])
    )
    torch.testing.assert_close(weights[0, 2], torch.full((4,), 0.25))
    assert weights[0, 3, 2] == 0


def test_axial_positions_by_rows_and_columns() -> None:
    summed, joined = text.AxialPositionalEmbedding(6, (3, 4)), text.AxialPositionalEmbedding(6, (3, 4), (2, 4))
    x = torch.zeros(2, 11, 6)
    for position in range(11):
        row, column = divmod(position, 4)
        parts = [weight.data[0, row if axis == 0 else 0, column if axis == 1 else 0]
                 for axis, weight in enumerate(summed.weights)]  # fmt: skip
        torch.testing.assert_close(summed(x)[0, position], parts[0] + parts[1])
        parts = [weight.data[0, row if axis == 0 else 0, column if axis == 1 else 0]
                 for axis, weight in enumerate(joined.weights)]  # fmt: skip
        torch.testing.assert_close(joined(x)[0, position], torch.cat(parts))
    model = text.ReformerLM(20, 8, 1, 10, heads=2, dim_head=4, bucket_size=4, axial_position_emb=True)
    assert model.state_dict()["pos_emb.weights.0"].shape == (1, 3, 1, 8)  # 10 positions in rows of one bucket
    assert model(torch.ones(1, 10).long()).shape == (1, 10, 20)


def test_the_encoder_decoder_reads_the_encoders_outputs_as_keys() -> None:
    torch.manual_seed(0)
    options = {"num_tokens": 20, "depth": 1, "max_seq_len": 16, "heads": 2, "dim_head": 4, "use_full_attn": True}
    both = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in options.items()}
    model = text.ReformerEncDec(dim=8, **both)
    source, target = torch.randint(1, 20, (2, 7)), torch.randint(1, 20, (2, 5))
    real = torch.arange(7) < torch.tensor([[7], [4]])
    keys = model.enc.net.net(source, input_mask=real)
    wanted = model.dec.net.net(target, keys=keys, context_mask=real)
    torch.testing.assert_close(model(source, target, enc_input_mask=real), wanted)
    other = source.masked_fill(~real, 19)
    torch.testing.assert_close(model(other, target, enc_input_mask=real), wanted)
    found = []
    for stored in (0, 99):  # the gradient of the keys by reversible layers equals that of ordinary ones
        model.dec.net.net.reformer.layers.reverse_thres = stored
        model.zero_grad()
        model(source, target, return_loss=True, enc_input_mask=real).backward()
        found.append(model.enc.net.net.token_emb.weight.grad.clone())
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(*found)
    best = model.generate(source, target[:, :1], 3, filter_thres=1.0)
    assert best[:, 0].tolist() == model(source, target[:, :1])[:, -1].argmax(-1).tolist()
    names = model.state_dict()
    assert {"enc.net.net.norm.weight", "dec.net.net.out.1.weight"} <= set(names)
    assert "enc.net.net.out.1.weight" not in names


def test_the_recorder_keeps_weights_and_buckets_of_each_call() -> None:
    torch.manual_seed(0)
    model = text.Reformer(dim=12, depth=2, max_seq_len=16, heads=2, bucket_size=4, n_hashes=3, causal=True).eval()
    recorder, x = text.Recorder(model), torch.randn(2, 16, 12)
    recorder(x)
    recorder(x)
    assert {call: len(layers) for call, layers in recorder.recordings.items()} == {0: 2, 1: 2}
    layer = recorder.recordings[1][0]
    assert (layer["attn"].shape, layer["buckets"].shape) == ((2, 2, 16, 16), (2, 2, 48))
    torch.testing.assert_close(layer["attn"].sum(-1), torch.ones(2, 2, 16))
    assert not layer["attn"].triu(1).any()
    recorder.turn_off()
    recorder(x)
    assert sorted(recorder.recordings) == [0, 1]
    recorder.clear()
    recorder.turn_on()
    recorder(x)
    assert sorted(recorder.recordings) == [0]
    assert recorder.eject() is model
    assert model.layers.blocks[0].f.net.fn.callback is None
    with pytest.raises(AssertionError, match=r"make a new one: Recorder\(net\)"):
        recorder(x)


def test_sums_in_parts() -> None:
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(text.chunked_sum(x, 5), x.sum(-1))
    assert text.chunked_sum(torch.ones(5)).shape == ()


def test_names_of_parameters_and_prints() -> None:
    model = text.ReformerLM(num_tokens=20, dim=16, depth=1, max_seq_len=32, heads=2, bucket_size=4)
    names = set(model.state_dict())
    for block, inner in (("blocks.0.{}.net", "fn.toqk.weight"), ("irrev_blocks.0.{}", "fn.toqk.weight")):
        assert f"reformer.layers.{block.format('f')}.{inner}" in names
        assert f"reformer.layers.{block.format('g')}.fn.fn.w1.weight" in names
    assert {"token_emb.weight", "layer_pos_emb.inv_freq", "norm.weight", "out.1.bias"} <= names
    assert repr(text.FeedForward(4)) == (
        "FeedForward(\n  (w1): Linear(in_features=4, out_features=16, bias=True)\n  (act): GELU(approximate='none')\n"
        "  (dropout): Dropout(p=0.0, inplace=False)\n  (w2): Linear(in_features=16, out_features=4, bias=True)\n)"
    )


def test_helpers() -> None:
    keys, values = text.sort_key_val(torch.tensor([[3, 1, 2]]), torch.tensor([[0, 1, 2]]))
    assert (keys.tolist(), values.tolist()) == ([[1, 2, 3]], [[1, 2, 0]])
    rows = text.batched_index_select(torch.arange(6.0).view(1, 3, 2), torch.tensor([[2, 0]]))
    assert rows.tolist() == [[[4.0, 5.0], [0.0, 1.0]]]
    encoding = text.FixedPositionalEmbedding(4)(torch.zeros(1, 5, 4))
    turned = text.apply_rotary_pos_emb(torch.randn(2, 5, 4), encoding)
    vectors = torch.randn(1, 1, 4).expand(1, 5, 4)
    scores = (lambda x: x[0] @ x[0].t())(text.apply_rotary_pos_emb(vectors, encoding))
    assert turned.shape == (2, 5, 4)
    torch.testing.assert_close(scores.diagonal(1), scores[0, 1].expand(4))  # only differences of positions matter


X = torch.zeros(1, 4, 2)


@pytest.mark.parametrize(
    ("call", "type_of_the_original", "said"),
    [
        (lambda: text.LSHSelfAttention(10, heads=4), AssertionError, "dim 10 is not divisible by heads 4; .*dim 12"),
        (
            lambda: text.LSHSelfAttention(8, heads=4, n_local_attn_heads=2),
            ValueError,
            "n_local_attn_heads is 2; .*at 0",
        ),
        (lambda: text.LSHSelfAttention(8, heads=4, num_mem_kv=-1), ValueError, "num_mem_kv is -1; it must be a whole"),
        (lambda: text.LSHAttention(dropout=1.5), ValueError, "dropout is 1.5"),
        (
            lambda: text.LSHAttention(rehash_each_round=False, allow_duplicate_attention=False),
            AssertionError,
            "both False; set one of them",
        ),
        (lambda: text.LSHAttention().hash_vectors(3, torch.zeros(1, 4, 2)), AssertionError, "n_buckets is 3; it must"),
        (lambda: text.LSHAttention()(torch.zeros(1, 4, 2), torch.zeros(1, 5, 2)), RuntimeError, "qk has the shape"),
        (lambda: text.LSHSelfAttention(8)(torch.zeros(2, 4, 9)), RuntimeError, r"must be \(batch, length, 8\)"),
        (lambda: text.ReversibleSequence([])(torch.zeros(1, 2, 3)), RuntimeError, "two streams side by side"),
        (lambda: text.ReversibleSequence([[nn.Identity()]]), ValueError, r"1 modules; give a pair \(f, g\)"),
        (lambda: text.FeedForward(4)([[1.0]]), TypeError, r"x is list; give a tensor \(\.\.\., 4\)"),
        (lambda: text.FeedForward(4)(torch.zeros(1, 5)), RuntimeError, r"\(1, 5\); it must be \(\.\.\., 4\)"),
        (lambda: text.Reformer(8, 1)(torch.zeros(1, 4, 5)), RuntimeError, r"\(batch, length, 8\)"),
        (lambda: text.LSHSelfAttention(8)(torch.zeros(1, 4, 8), [1]), TypeError, "keys is list"),
        (lambda: text.FixedPositionalEmbedding(4)([1]), TypeError, r"torch\.as_tensor\(x\)"),
        (lambda: text.LSHAttention()([1], torch.zeros(1, 4, 2)), TypeError, "qk is list; give a tensor"),
        (lambda: text.LSHSelfAttention(8)([1]), AttributeError, "x is list"),
        (
            lambda: text.LSHSelfAttention(8)(torch.zeros(2, 4, 8), input_mask=torch.ones(2, 5)),
            RuntimeError,
            r"input_mask has the shape \(2, 5\); it must be \(2, 4\): True = may attend",
        ),
        (lambda: text.Reformer(8, 1, pkm_layers=(1,)), ValueError, r"pkm_layers is \(1,\); .*leave it at \(\)"),
        (
            lambda: text.AxialPositionalEmbedding(8, (2, 3), (4, 5)),
            ValueError,
            r"axial_dims are \(4, 5\); .*sum to dim 8",
        ),
        (lambda: text.AxialPositionalEmbedding(8, (2, 0)), ValueError, r"axial_shape\[1\] is 0; it must be a whole"),
        (
            lambda: text.AxialPositionalEmbedding(2, (1, 3))(X),
            AssertionError,
            r"length is 4, but axial_shape \(1, 3\) has 3 positions",
        ),
        (
            lambda: text.Reformer(8, 1, n_hash=4),
            TypeError,
            "n_hash: no option of Reformer, which has dim, depth, heads",
        ),
        (lambda: text.ReformerLM(9, 8, 1, 16, twin_attention=True), ValueError, "twin_attention is True; .*at False"),
        (lambda: text.ReformerEncDec(8, enc_dim=4, heads=2), ValueError, "enc_dim, heads cannot be set here"),
        (lambda: text.chunked_sum(torch.tensor(1.0)), RuntimeError, "tensor is one number"),
        (lambda: text.ScaleNorm(8)([1]), TypeError, "x is list; give a tensor"),
        (lambda: text.LSHAttention().hash_vectors(2, [1]), AttributeError, "vecs is list"),
        (lambda: text.LSHAttention()(X, X, query_len=9), RuntimeError, "query_len is 9; .*from 1 to 4"),
        (
            lambda: text.LSHAttention()(X, X, input_mask=torch.ones(1, 5)),
            RuntimeError,
            r"input_mask has the shape \(1, 5",
        ),
        (lambda: text.FullQKAttention()(X, X, input_attn_mask=[1]), AttributeError, "input_attn_mask is list"),
        (lambda: text.ReversibleSequence([])([1]), AttributeError, "x is list"),
        (lambda: text.Chunk(2, nn.Identity(), along_dim=3)(X), IndexError, "no axis 3 to cut; give along_dim"),
        (lambda: text.PreNorm(nn.LayerNorm, 8, nn.Identity())(X), RuntimeError, r"\(1, 4, 2\); it must be \(\.\.\., 8"),
        (lambda: text.AbsolutePositionalEmbedding(4, 9)(torch.zeros(3)), IndexError, r"\(3,\); its axis 1 must be the"),
        (lambda: text.apply_rotary_pos_emb(X, torch.zeros(1, 4, 3)), RuntimeError, "for vectors of an even width"),
        (
            lambda: text.TrainingWrapper(text.ReformerLM(9, 8, 1, 16)).generate(torch.tensor([1]), 2, temperature=0),
            ValueError,
            "temperature is 0; it must be above 0",
        ),
        (lambda: text.top_k(X, 2), ValueError, "thres is 2"),
        (lambda: text.sort_key_val([1], X), TypeError, "t1 is list; give a tensor"),
        (lambda: text.sort_key_val(X, torch.zeros(3)), RuntimeError, r"t1 has the shape \(1, 4, 2\) and t2 \(3,\)"),
        (lambda: text.sort_key_val(X, X, dim=3), IndexError, "along axis 3"),
        (lambda: text.batched_index_select([1], X), AttributeError, "values is list"),
        (lambda: text.batched_index_select(X, torch.zeros(1, 2)), RuntimeError, r"call indices\.long\(\)"),
        (lambda: text.batched_index_select(X, torch.tensor([[4]])), IndexError, "id 4, .* 0 to 3; give values with 5"),
        (lambda: text.batched_index_select(X, torch.zeros(2, 1).long()), RuntimeError, r"it must be \(1, some\)"),
        (lambda: text.max_neg_value(torch.zeros(1).long()), TypeError, r"int64; .*call \.float\(\)"),
        (
            lambda: text.ReformerLM(9, 8, 1, 16)(torch.zeros(4).long()),
            RuntimeError,
            r"x has the shape \(4,\); .*batch, len",
        ),
        (lambda: text.ReformerLM(9, 8, 1, 16)(torch.full((1, 4), 9)), IndexError, "id 9, but the ids are 0 to 8"),
        (
            lambda: text.ReformerLM(9, 8, 1, 16, absolute_position_emb=True)(torch.zeros(1, 17).long()),
            IndexError,
            "length is 17, but max_seq_len is 16",
        ),
    ],
)
def test_bad_input(call: Any, type_of_the_original: type[Exception], said: str) -> None:
    with pytest.raises(ManyHeadsError, match=said) as caught:
        call()
    assert isinstance(caught.value, type_of_the_original)
