"""The Annotated Transformer's names: recorded values of its code, our model's numbers, both editions, bad input."""

import copy
import json
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from manyheads.errors import ManyHeadsError
from manyheads.extras.peers import PEERS
from manyheads.extras.peers.peer import decode, encode
from manyheads.extras.texts import annotated_transformer as text
from manyheads.nn import sinusoidal_table

SMALL = {"N": 2, "d_model": 16, "d_ff": 36, "h": 4}


def recorded(shared: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = shared / "fixtures" / "parity"
    return json.loads((folder / f"{name}.json").read_text("utf-8")), load_file(folder / f"{name}.safetensors")


def padded(rows: int, length: int, vocab: int, *lens: int) -> torch.Tensor:
    """Random ids from 1 on, and 0 as padding from a length on."""
    ids = torch.randint(1, vocab, (rows, length))
    for row, end in enumerate(lens):
        ids[row, end:] = 0
    return ids


def test_the_recorded_values_of_the_texts_model(shared: Path) -> None:
    meta, tensors = recorded(shared, "annotated_transformer")
    given = meta["config"]["model"]
    model = text.make_model(**given).eval()
    weights = {name.removeprefix("param."): t for name, t in tensors.items() if name.startswith("param.")}
    assert model.load_state_dict(weights, strict=False).missing_keys == ["src_embed.1.pe", "tgt_embed.1.pe"]
    batch = text.Batch(tensors["in.src"], tensors["in.tgt_full"], meta["config"]["pad"])
    assert torch.equal(batch.src_mask, tensors["in.src_mask"])
    assert torch.equal(batch.tgt_mask, tensors["in.tgt_mask"])
    out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    criterion = text.LabelSmoothing(given["tgt_vocab"], meta["config"]["pad"], meta["config"]["smoothing"])
    loss = text.SimpleLossCompute(model.generator, criterion)(out, batch.tgt_y, batch.ntokens)
    ids = text.greedy_decode(model, batch.src[:1], batch.src_mask[:1], meta["config"]["greedy_len"], 1)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(model.src_embed[1].pe[0, :64], tensors["buffer.pe[:64]"], atol=0, rtol=0)
    torch.testing.assert_close(model.encode(batch.src, batch.src_mask), tensors["out.memory"], **close)
    torch.testing.assert_close(out, tensors["out.decoder"], **close)
    torch.testing.assert_close(model.generator(out), tensors["out.logprobs"], **close)
    torch.testing.assert_close(loss[1], tensors["out.smoothed_loss_per_token"], **close)
    assert torch.equal(ids, tensors["out.greedy_ids"])


@pytest.mark.parametrize("name", ["annotated_label_smoothing", "annotated_label_smoothing_zero"])
def test_the_recorded_values_of_label_smoothing_and_rates(shared: Path, name: str) -> None:
    meta, tensors = recorded(shared, name)
    config = meta["config"]
    log_probs = tensors["in.log_probs"].clone().requires_grad_()
    criterion = text.LabelSmoothing(config["V"], config["pad"], config["smoothing"])
    loss = criterion(log_probs, tensors["in.target"])
    loss.backward()
    for found, wanted in (
        (loss, tensors["out.loss"]),
        (criterion.true_dist, tensors["out.true_dist"]),
        (log_probs.grad, tensors["grad.log_probs"]),
    ):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    rates = [
        [text.NoamOpt(d_model, factor, warmup, None).rate(step) for step in config["noam_steps"]]
        for d_model, factor, warmup in config["noam"]
    ]
    torch.testing.assert_close(torch.tensor(rates), tensors["out.noam_rate"])


@pytest.mark.parametrize("seed", range(4))
def test_the_numbers_of_our_model(seed: int) -> None:
    """In float64, with rows that may attend to nothing. Our table of positions is float32, the text's is not."""
    torch.manual_seed(seed)
    model = text.make_model(11, 13, N=1 + seed % 2, d_model=12, d_ff=20, h=(1, 2, 3, 4)[seed], dropout=0.0).double()
    ours: Any = PEERS["annotated-transformer"]
    arguments = {"src_vocab": 11, "tgt_vocab": 13, "N": 1 + seed % 2, "d_model": 12, "d_ff": 20, "h": 1 + seed}
    ours = ours.from_peer({"model": {**arguments, "dropout": 0.0}}, model.state_dict()).module.double()
    for side in (model.src_embed, model.tgt_embed):
        side[1].pe[0, :20] = sinusoidal_table(torch.arange(20.0), 12).double()
    batch = text.Batch(padded(3, 7, 11, 7, 4, 0), padded(3, 6, 13, 6, 3, 5), 0)
    out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    memory = encode(ours, batch.src, batch.src_mask[:, None])
    wanted = decode(ours, batch.tgt, memory, batch.tgt_mask[:, None], batch.src_mask[:, None])
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)
    model.generator(out).square().sum().backward()
    ours.head.log_probs(wanted).square().sum().backward()
    gradients = dict(ours.named_parameters())
    pairs = {
        "encoder.layers.0.self_attn.linears.1.weight": "body.encoder.layers.0.self_attn.k_proj.weight",
        "decoder.layers.0.src_attn.linears.3.bias": "body.decoder.layers.0.cross_attn.out_proj.bias",
        "decoder.layers.0.sublayer.1.norm.a_2": "body.decoder.layers.0.cross_attn_residual.norm.weight",
        "src_embed.0.lut.weight": "body.source_embedding.weight",
        "generator.proj.weight": "head.weight",
    }
    named = dict(model.named_parameters())
    assert len(named) == len(gradients)
    for theirs, name in pairs.items():
        torch.testing.assert_close(named[theirs].grad, gradients[name].grad, atol=1e-11, rtol=1e-11)


def test_modules_are_plain_modules() -> None:
    torch.manual_seed(0)
    model = text.make_model(9, 9, **SMALL)
    attention = model.encoder.layers[0].self_attn
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    batch = next(text.data_gen(9, 3, 1))
    text.run_epoch([batch], model, text.SimpleLossCompute(model.generator, text.LabelSmoothing(9, 0), None))
    silent = {name for name, module in model.named_modules() if not calls[name]}
    # Lists have no forward; the criterion is no part of the model.
    assert silent == {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    assert attention.attn.shape == (3, 4, 10, 10)
    assert attention.attn.requires_grad
    copied = copy.deepcopy(model)  # a tensor with a graph cannot be copied
    assert torch.equal(copied.encoder.layers[0].self_attn.attn, attention.attn)
    assert not copied.encoder.layers[0].self_attn.attn.requires_grad


def test_parts_of_the_readers_own() -> None:
    """The constructors take any modules: here a mean in place of attention."""

    class Mean(nn.Module):
        def forward(self, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
            return value.mean(dim=1, keepdim=True).expand_as(query)

    torch.manual_seed(0)
    layer = text.EncoderLayer(8, Mean(), text.PositionwiseFeedForward(8, 16), 0.0)
    encoder = text.Encoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    first, second = encoder.layers
    by_hand = x
    for one in (first, second):
        normed = one.sublayer[0].norm(by_hand)
        by_hand = by_hand + normed.mean(1, keepdim=True)
        by_hand = by_hand + one.feed_forward(one.sublayer[1].norm(by_hand))
    torch.testing.assert_close(encoder(x, None), encoder.norm(by_hand))
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}


def train(edition: str, batches: list[Any], opt: Any = None, **more: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    # In float32 the gradients of the keys' biases are noise around 0, of which Adam makes whole steps.
    model = text.make_model(9, 9, **SMALL, dropout=0.0).double()
    criterion = text.LabelSmoothing(9, 0, 0.1)
    adam = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
    if edition == "2018":
        noam = text.NoamOpt(16, 1, 20, adam)
        result = text.run_epoch(batches, model, text.SimpleLossCompute(model.generator, criterion, noam))
    elif edition == "several devices":
        noam = text.NoamOpt(16, 1, 20, adam)
        compute = text.MultiGPULossCompute(model.generator, criterion, ["cpu", "cpu"], noam, chunk_size=4)
        result = text.run_epoch(batches, model, compute)
    else:
        adam.param_groups[0]["lr"] = 1.0
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: text.rate(step + 1, 16, 1, 20))
        compute = text.SimpleLossCompute(model.generator, criterion)
        result = text.run_epoch(batches, model, compute, adam, schedule, **more)
    return model, criterion, result


def test_both_editions_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """The same steps by NoamOpt within the loss function, by LambdaLR in the loop, and in chunks on two devices."""
    torch.manual_seed(1)
    batches = list(text.data_gen(9, 4, 6))
    model, criterion, (loss, state) = train("present", batches)
    assert (state.step, state.accum_step, state.samples, int(state.tokens)) == (6, 6, 24, 216)
    printed = capsys.readouterr().out
    assert re.fullmatch(
        r"Epoch Step:      1 \| Accumulation Step:   2 \| Loss:   \d\.\d\d \| Tokens / Sec: +[\d.]+ "
        r"\| Learning Rate: 8\.4e-03\n",
        printed,
    )
    for edition in ("2018", "several devices"):
        other, _, older_loss = train(edition, batches)
        assert re.fullmatch(r"Epoch Step: 1 Loss: \d\.\d{6} Tokens per Sec: \d+\.\d{6}\n", capsys.readouterr().out)
        torch.testing.assert_close(older_loss, loss)
        for name, parameter in other.named_parameters():
            torch.testing.assert_close(parameter, model.get_parameter(name), atol=1e-5, rtol=1e-4)
    model.eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    evaluating = (text.DummyOptimizer(), text.DummyScheduler(), "eval")
    compute = text.SimpleLossCompute(model.generator, criterion)
    has_graph = []

    def watched(out: Any, labels: Any, norm: Any) -> Any:
        has_graph.append(out.requires_grad)
        return compute(out, labels, norm)

    found, _ = text.run_epoch(batches, model, watched, *evaluating)
    assert has_graph == [False] * len(batches)
    older = text.run_epoch(batches, model, text.SimpleLossCompute(model.generator, criterion, None))
    torch.testing.assert_close(found, older)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_steps_of_several_batches() -> None:
    """As in the text, the first step has one batch, and the next ones `accum_iter`."""
    _, _, (_, state) = train("present", list(text.data_gen(9, 2, 7)), accum_iter=3)
    assert (state.step, state.accum_step) == (7, 3)
    _, _, (_, again) = train("present", list(text.data_gen(9, 2, 7)), train_state=state)
    assert again is state
    assert state.step == 14
    assert text.TrainState().step == 0


def test_a_batch_by_both_names() -> None:
    ids = torch.tensor([[1, 5, 6, 0], [1, 7, 0, 0]])
    batch = text.Batch(ids, trg=ids, pad=0)
    for older, newer in (("trg", "tgt"), ("trg_y", "tgt_y"), ("trg_mask", "tgt_mask")):
        assert getattr(batch, older) is getattr(batch, newer)
    assert batch.src_mask.tolist() == [[[True, True, True, False]], [[True, True, False, False]]]
    assert batch.tgt_mask[1].tolist() == [[True, False, False], [True, True, False], [True, True, False]]
    assert int(batch.ntokens) == 3
    assert torch.equal(text.rebatch(0, SimpleNamespace(src=ids.T, trg=ids.T)).tgt_y, batch.tgt_y)
    assert not hasattr(text.Batch(ids), "tgt")
    assert torch.equal(text.Batch(ids, trg=ids).src_mask, batch.src_mask)  # the padding id of 2018 is 0
    assert text.Batch(ids, ids).src_mask.all()  # that of the present edition is 2
    pair = SimpleNamespace(src=["a"] * 7, trg=["b"] * 3)
    longer = SimpleNamespace(src=["a"] * 2, trg=["b"] * 9)
    assert [text.batch_size_fn(pair, 1, 0), text.batch_size_fn(longer, 2, 7), text.batch_size_fn(pair, 1, 22)] == [
        7,
        22,
        7,
    ]


def test_positions_of_any_length_and_width() -> None:
    module = text.PositionalEncoding(7, 0.0, max_len=10)
    x = torch.zeros(1, 25, 7)
    torch.testing.assert_close(module(x)[0], sinusoidal_table(torch.arange(25.0), 7), atol=1e-5, rtol=0)
    assert module.pe.shape == (1, 10, 7)
    assert torch.equal(module(x)[:, :10], module.pe)


def test_every_row_is_decoded() -> None:
    torch.manual_seed(0)
    model = text.make_model(9, 9, **SMALL).eval()
    src = padded(3, 6, 9, 6, 4, 5)
    mask = (src != 0).unsqueeze(-2)
    ids = text.greedy_decode(model, src, mask, max_len=8, start_symbol=1)
    for row in range(3):
        alone = text.greedy_decode(model, src[row : row + 1], mask[row : row + 1], max_len=8, start_symbol=1)
        assert torch.equal(alone, ids[row : row + 1])


def test_the_dropout_of_a_model_holds_for_attention() -> None:
    model = text.make_model(9, 9, **SMALL, dropout=0.0)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.0}
    assert {m.p for m in text.make_model(9, 9, **SMALL).modules() if isinstance(m, nn.Dropout)} == {0.1}


def test_smoothing_with_probabilities_of_zero() -> None:
    """The text's picture of the penalty: one row whose padding has the probability 0, by hand."""
    criterion = text.LabelSmoothing(5, 0, 0.1)
    predict = torch.tensor([[0, 7 / 10, 1 / 10, 1 / 10, 1 / 10]])
    by_hand = 0.9 * math.log(0.9 / 0.7) + 3 * (0.1 / 3) * math.log(0.1 / 3 / 0.1)
    assert float(criterion(predict.log(), torch.tensor([1]))) == pytest.approx(by_hand, abs=1e-6)


def test_the_mean_of_models() -> None:
    models = [nn.Linear(3, 2) for _ in range(3)]
    mean = nn.Linear(3, 2)
    text.average(mean, models)
    torch.testing.assert_close(mean.weight, (models[0].weight + models[1].weight + models[2].weight) / 3)


def test_the_texts_optimiser() -> None:
    model = text.make_model(9, 9, **SMALL)
    opt = text.get_std_opt(model)
    assert (opt.model_size, opt.factor, opt.warmup, opt.optimizer.defaults["betas"]) == (16, 2, 4000, (0.9, 0.98))
    opt.step()
    assert opt.optimizer.param_groups[0]["lr"] == opt._rate == text.rate(1, 16, 2, 4000) == opt.rate(0)


X = torch.randn(2, 5, 16)
HEADS = text.MultiHeadedAttention(4, 16)
IDS = torch.randint(1, 9, (2, 5))
SEEN = torch.ones(1, 1, 5)
BATCHES = list(text.data_gen(9, 2, 1))


def loop(*more: Any, opt: Any = (), **named: Any) -> Any:
    model = text.make_model(9, 9, **SMALL)
    compute = text.SimpleLossCompute(model.generator, text.LabelSmoothing(9, 0), *opt)
    return text.run_epoch(more[0], model, compute, *more[1:], **named)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: text.MultiHeadedAttention(5, 16), AssertionError, r"16 is not divisible by h, 5 heads.*1, 2, 4, 8"),
        (lambda: text.make_model(0, 9), ValueError, "src_vocab is 0"),
        (lambda: text.make_model(9, 9, N="2"), TypeError, "N is '2'"),
        (lambda: text.make_model(9, 9, N=1, dropout=1.5), ValueError, "dropout is 1.5"),
        (lambda: text.make_model(9, 9, 1, 16, 16, 2)([[1]], None, None, None), AttributeError, "x is list"),
        (
            lambda: text.make_model(9, 9, 1, 16, 16, 2).encode(torch.tensor([1, 2]), None),
            RuntimeError,
            r"\(2, 16\), 2 axes; .*\(batch, length, d_model\)",
        ),
        (lambda: text.Batch(torch.tensor([1, 2]), None, 0), IndexError, r"src has shape \(2,\)"),
        (lambda: text.subsequent_mask(-1), RuntimeError, "size is -1"),
        (lambda: text.rate(1, 512, 1, 0), ZeroDivisionError, "warmup is 0"),
        (lambda: text.make_model(9, 9, d_model=20, h=8), AssertionError, "20 is not divisible by h, 8 heads"),
        (lambda: text.MultiHeadedAttention(0, 16), ZeroDivisionError, "h, 0 heads"),
        (lambda: text.MultiHeadedAttention(2.0, 16), TypeError, "whole number of heads"),
        (lambda: HEADS(X, X, X, [True] * 5), AttributeError, "mask is list"),
        (lambda: text.attention(X, X, X, SEEN.numpy()), TypeError, "mask is ndarray.*torch.as_tensor"),
        (lambda: HEADS(X, X, X, torch.tensor([5, 3])), RuntimeError, r"shape \(2,\).*arange\(k_len\) < lengths"),
        (lambda: HEADS(X, X, X, torch.ones(5, 5).tril()), RuntimeError, r"shape \(5, 5\).*unsqueeze\(0\)"),
        (lambda: HEADS(X, X, X, torch.ones(2, 1, 5, 5)), RuntimeError, r"mask\[:, 0\]"),
        (lambda: HEADS(X, X, X, torch.ones(2, 1, 6)), RuntimeError, "does not fit 5 queries and 5 keys"),
        (lambda: HEADS(X[:1], X[:1], X[:1], torch.ones(2, 1, 5)), RuntimeError, "in a batch of 1"),
        (lambda: HEADS(X, X, X, (SEEN - 1) * 1e9 + 0.5), RuntimeError, "mask > -1e9"),
        (lambda: text.attention(X, X, X, torch.ones(3, 5, 5)), RuntimeError, r"\(3, 5, 5\) does not fit scores"),
        (lambda: text.attention(X, X[..., :8], X), RuntimeError, "one width"),
        (lambda: HEADS(X, X[:1], X[:1]), RuntimeError, "query and key have shapes"),
        (lambda: HEADS(X[..., :8], X, X), RuntimeError, "must have 16 numbers"),
        (lambda: HEADS([1], X, X), AttributeError, "the query of attention is list"),
        (lambda: text.attention(X, [1], X), AttributeError, "key is list; give a tensor"),
        (lambda: text.attention(X, X, torch.ones(5)), RuntimeError, r"value has shape \(5,\); .*two axes"),
        (lambda: text.LayerNorm(16)(X[..., :8]), RuntimeError, r"input of the norm has the shape \(2, 5, 8\)"),
        (lambda: text.LayerNorm(1), ValueError, "features is 1; .*at least 2"),
        (lambda: text.average(HEADS, []), RuntimeError, "models is empty"),
        (lambda: text.Embeddings(16, 9)(IDS + 9), IndexError, "vocabulary has 9, from 0 to 8"),
        (lambda: text.Embeddings(16, 9)(X), RuntimeError, "call .long"),
        (lambda: text.LabelSmoothing(2, 0, 0.1), ZeroDivisionError, "at least 3"),
        (lambda: text.LabelSmoothing(5, 5), IndexError, "an id from 0 to 4"),
        (lambda: text.LabelSmoothing(5, 0, 1.5), ValueError, "from 0 to 1"),
        (lambda: text.LabelSmoothing(5, 0)(X[0], IDS[0]), AssertionError, "vocabulary of 5"),
        (lambda: text.LabelSmoothing(16, 0)(X[0], IDS[0] + 20), RuntimeError, "whole numbers from 0 to 15"),
        (lambda: next(text.data_gen(1, 2, 3)), RuntimeError, "at least 2 symbols"),
        (lambda: next(text.data_gen(9, 2, "3")), TypeError, "nbatches is '3'"),
        (lambda: text.PositionwiseFeedForward(16, 16, 1.5), ValueError, "dropout is 1.5"),
        (lambda: text.MultiHeadedAttention(2, 16.0), TypeError, "d_model is 16.0"),
        (lambda: text.PositionalEncoding(0, 0.1), ZeroDivisionError, "d_model is 0"),
        (lambda: text.attention(X, X, X, dropout=1.5), ValueError, "dropout is 1.5"),
        (lambda: text.attention(X, X, X, dropout="a"), TypeError, "dropout is 'a'"),
        (lambda: text.Batch(IDS, pad="0"), TypeError, "pad is '0'"),
        (lambda: text.Batch(None), AttributeError, "src is NoneType"),
        (lambda: text.average(HEADS, [torch.nn.Linear(1, 1)]), ValueError, "parameters of several shapes"),
        (lambda: text.Encoder(torch.nn.Identity(), 1), AttributeError, "Identity has no size; set self.size"),
        (lambda: text.LabelSmoothing("5", 0), TypeError, "size is '5'"),
        (lambda: loop([]), ZeroDivisionError, "no batch"),
        (lambda: loop(BATCHES, text.DummyOptimizer(), text.DummyScheduler(), "training"), ValueError, "'train', "),
        (lambda: loop(BATCHES, text.DummyOptimizer(), text.DummyScheduler(), accum_iter=0), ValueError, "at least 1"),
        (lambda: loop(BATCHES, text.DummyOptimizer(), None, "eval", opt=(None,)), TypeError, "three arguments"),
    ],
)
def test_mistakes_are_our_sentence_and_of_the_usual_type(call: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(ManyHeadsError, match=said) as caught:
        call()
    assert isinstance(caught.value, kind)


def test_masks_that_the_text_reads_are_read() -> None:
    """Numbers 0 and 1 of any type, one mask for the batch, and two axes that mean one row for all queries."""
    wanted = text.subsequent_mask(5)
    out = HEADS.eval()(X, X, X, wanted)
    for mask in (wanted.float(), wanted.int() * 7, wanted.expand(2, 5, 5)):
        assert torch.equal(HEADS(X, X, X, mask), out)
    assert torch.equal(HEADS(X, X, X, torch.ones(1, 5)), HEADS(X, X, X))
    weights = text.attention(X, X, X, dropout=0.5)[1]  # a rate, as in some copies of the text
    assert 0 < int((weights == 0).sum()) < weights.numel()
