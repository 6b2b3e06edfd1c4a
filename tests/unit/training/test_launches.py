"""A training step of a GPU, counted on `meta`, and computed on the CPU by the operations that it takes there."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from bare_models import BareDecoder, BareReformer, BareSeq2Seq, BareXL
from launches import Launches, as_on_cuda, reads
from torch import Tensor, nn
from torch.optim import AdamW

from manyheads.catalogue import build_model
from manyheads.data.batch import PackedBatch, PairBatch, SegmentBatch
from manyheads.errors import RequestError
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.models.reformer.config import SEQ2SEQ_PRESETS as SEQ2SEQ_REFORMERS
from manyheads.models.transformer.config import PRESETS, TransformerConfig
from manyheads.models.transformer_xl.state import LayerInputs
from manyheads.nn import Bias, Causal, Lengths, LinearHead, MultiHeadAttention
from manyheads.nn.attention.lsh import LSHSelfAttention, LSHSettings
from manyheads.nn.attention.masks import KeyPadding
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.relative import relative_attention
from manyheads.nn.layers import FeedForward
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.optim.optimiser import MovingAverage, build_optimiser
from manyheads.training.run import step
from manyheads.training.run.step import NarrowWeights, TrainStep, total_of
from manyheads.training.settings import OptimiserSettings, TrainingSettings

SMALL = TransformerConfig(
    source_vocab_size=50, target_vocab_size=50, d_model=16, num_heads=2, d_ff=32, num_encoder_layers=2,
    num_decoder_layers=2, dropout=0.0,
)  # fmt: skip


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operations of a GPU on the CPU."""
    monkeypatch.setattr(policy, "saves_launches", lambda device: modes.is_fast())
    with modes.fast():
        yield


def _batch(config: TransformerConfig, rows: int, length: int, device: str = "cpu") -> PairBatch:
    def ids(size: int) -> Tensor:
        return torch.randint(4, config.source_vocab_size, (rows, size)).to(device)

    lengths = torch.full((rows,), length) - (torch.arange(rows) % 3 if device == "cpu" else 0)
    sizes = lengths.to(device)
    return PairBatch(ids(length), sizes, ids(length + 1), sizes + 1, torch.arange(rows))


def _train_step(
    model: Any, config: TransformerConfig, precision: Any, device: str, smoothing: float = 0.1, **more: Any
) -> TrainStep:
    settings = TrainConfig(
        precision=precision, optimiser=OptimiserSettings(clip_norm=1.0, **more),
        training=TrainingSettings(label_smoothing=smoothing),
    )  # fmt: skip
    return TrainStep(model, build_optimiser(model, settings.optimiser), settings, torch.device(device))


# A bare model of torch's operations with the same layers, without padding, in the same step of a run with AdamW, has
# the last number. For the Reformer, whose layers are computed again in the backward pass, none was written.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("preset", "packed", "micro", "smoothing", "options", "most", "floor"),
    [
        (PRESETS["base"], False, 1, 0.1, {}, 650, 594),
        (PRESETS["base"], True, 1, 0.1, {}, 655, 648),
        (PRESETS["base"], False, 2, 0.1, {}, 1275, 1168),  # 18 operations of a step are once a step
        (PRESETS["base"], False, 1, 0.0, {}, 645, 581),
        (PRESETS["base"], False, 1, 0.1, {"name": "muon"}, 720, 594),
        (SEQ2SEQ_REFORMERS["wmt-base"], False, 1, 0.1, {}, 1559, None),
    ],
    ids=["padded", "packed", "two micro-batches", "without smoothing", "Muon", "Reformer"],
)
def test_launches_of_a_step_of_base(preset, packed, micro, smoothing, options, most, floor, monkeypatch):
    """`nn.Transformer` has 1,470 in bf16.

    Packed attention has no mask, but torch makes zeros in each call: one forwards, and two as gradients of what nobody
    asks for. A moving average adds one operation.
    """
    config = replace(preset, source_vocab_size=32_000, target_vocab_size=32_000)
    monkeypatch.setattr(PairBatch, "num_target_tokens", lambda batch: 128 * 64)

    def of_step(make: Callable[[Any], nn.Module], **options: Any) -> Launches:
        with torch.device("meta"):
            model = make(config).train()
        average = MovingAverage(dict(model.named_parameters()), 0.9)
        with as_on_cuda(), modes.fast(), reads(1) as waits:  # the step's only wait, after the backward pass
            train_step = _train_step(model, config, "bf16", "meta", smoothing, **options)
            rows = 128 // micro
            batch = PackedBatch.of(_batch(config, rows, 64)).to("meta") if packed else _batch(config, rows, 64, "meta")
            train_step.run([batch] * micro, 1, 1e-4)
            with Launches() as launches:
                train_step.run([batch] * micro, 2, 1e-4)
            before = launches.by_name.copy()
            with launches:
                average.update(2)
            assert launches.by_name["_foreach_lerp_"] == before["_foreach_lerp_"] + 1
        launches.by_name = before
        assert (waits["tolist"], waits["int"]) == (2, 0)
        assert before["_varlen_attn"] == before["_varlen_attn_backward"] == (18 if packed else 0)
        return launches

    ours = of_step(build_model, **options)
    assert ours.count <= most, ours.by_name.most_common()
    if floor is not None:
        theirs = of_step(partial(BareSeq2Seq, packed=packed))
        assert theirs.count == floor <= most, theirs.by_name.most_common()


@pytest.mark.unhooked
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 computes, and meta cannot")
def test_launches_of_a_packed_step_with_a_relative_bias_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was counted at 878, with padded batches at 969; three kernels in each of 12 self-attentions."""
    jit = pytest.importorskip("triton.runtime.jit", reason="the package triton is not installed")
    run: list[str] = []
    monkeypatch.setattr(policy, "triton_lack", lambda *given: None)
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *given, **more: run.append(kernel.__name__))
    monkeypatch.setattr(PairBatch, "num_target_tokens", lambda batch: 128 * 64)
    config = replace(PRESETS["base"], source_vocab_size=32_000, target_vocab_size=32_000, relative_bias=32)
    with torch.device("meta"):
        model = build_model(config).train()
    with as_on_cuda(), modes.fast(), reads(1) as waits:
        train_step = _train_step(model, config, "bf16", "meta")
        batch = PackedBatch.of(_batch(config, 128, 64)).to("meta")
        train_step.run([batch], 1, 1e-4)
        with Launches() as launches:
            train_step.run([batch], 2, 1e-4)
    assert (waits["tolist"], waits["int"]) == (2, 0)
    assert launches.by_name["_varlen_attn"] == 6
    assert len(run) // 2 == 36, run
    assert launches.count + 36 <= 878, launches.by_name.most_common()


# A bare model of torch's operations with the same layers, in the same step of a run, has the second number.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "preset", "sizes", "rows", "length", "bare", "bar", "floor"),
    [
        ("decoder", "gpt2", {"vocab_size": 32_000}, 8, 512, BareDecoder, 471, 457),
        ("transformer_xl", "enwik8-base", {"vocab_size": 204}, 22, 512, BareXL, 784, 694),
        ("reformer", "small", {"vocab_size": 256, "max_len": 4096}, 1, 4096, BareReformer, 1719, 785),
    ],
)
def test_launches_of_a_step_of_a_language_model(name, preset, sizes, rows, length, bare, bar, floor, monkeypatch):
    config = replace(import_module(f"manyheads.models.{name}.config").PRESETS[preset], **sizes)
    ours, theirs = (_launches_of(make, config, rows, length, monkeypatch) for make in (build_model, bare))
    assert ours.count <= bar, ours.by_name.most_common()
    assert theirs.count == floor <= bar, theirs.by_name.most_common()


def _launches_of(
    make: Callable[[Any], nn.Module], config: Any, rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> Launches:
    monkeypatch.setattr(SegmentBatch, "num_target_tokens", lambda batch: rows * length)
    with torch.device("meta"):
        model: Any = make(config).train()
        ids = torch.zeros(rows, length + 1, dtype=torch.int64)
        full, resets = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
    batch = SegmentBatch(ids[:, :-1], ids[:, 1:], full, resets, torch.arange(rows))
    with as_on_cuda(), modes.fast(), reads(1) as waits:
        train_step = _train_step(model, config, "bf16", "meta")
        train_step.run([batch], 1, 1e-4)
        train_step.run([batch], 2, 1e-4)  # with a memory
        with Launches() as launches:
            train_step.run([batch], 3, 1e-4)
    assert (waits["tolist"], waits["int"]) == (3, 0)
    return launches


@pytest.mark.unhooked
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 computes, and meta cannot")
@pytest.mark.parametrize(("kind", "bar", "own"), [("lsh", 342, 33), ("local", 306, 17)])
def test_launches_of_a_reformer_by_triton(kind: str, bar: int, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was counted at 342 (1,719 without), of local layers alone at 306 (719); `own` of them are Triton kernels."""
    jit = pytest.importorskip("triton.runtime.jit", reason="the package triton is not installed")
    run: list[str] = []
    monkeypatch.setattr(policy, "triton_lack", lambda *given: None)
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *given, **more: run.append(kernel.__name__))
    config = replace(REFORMERS["small"], vocab_size=256, max_len=4096, layers=(kind,))
    with modes.using_triton():
        launches = _launches_of(build_model, config, 1, 4096, monkeypatch)
    assert len(run) // 3 == own, run  # of each of three steps
    assert launches.count + own <= bar, launches.by_name.most_common()


@pytest.mark.usefixtures("saving")
def test_hashing_in_one_operation_finds_the_same_buckets() -> None:
    settings = LSHSettings(num_hashes=2, chunk_len=4)
    attention = LSHSelfAttention(8, 2, settings=settings, max_len=64).double()
    x = torch.randn(2, 40, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for fast in (True, False):
        with modes.fast(fast):
            buckets = attention.buckets_of(x, seed=3)
            out = attention(x, seed=3)
            found.append([buckets, out, *torch.autograd.grad(out.square().sum(), [x, *attention.parameters()])])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.usefixtures("saving")
def test_layers_of_relative_attention_share_a_mask() -> None:
    attention = RelativeAttention(8, 2).double()
    x, memory = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    keep = torch.tensor([[True] * 7, [False] * 4 + [True] * 3])
    mask = KeyPadding(keep)
    with modes.using_relative_path("sdpa"):
        for step in range(2):
            first, second = attention(x, memory, mask=mask), attention(x + 1, memory, mask=mask)
            with modes.fast(False), modes.using_relative_path("products"):
                torch.testing.assert_close(first, attention(x, memory, mask=mask))
                torch.testing.assert_close(second, attention(x + 1, memory, mask=mask))
            keep[0, 1 + step] = False  # a mask that changes is computed again


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scores_of_distances_by_head(q_len: int, has_bias: bool) -> None:
    """One product for each head gives the output, and the gradients, of the formula; with and without gradients."""
    shapes = [(3, 2, q_len, 8), (3, 2, 7, 8), (3, 2, 7, 8), (2, 7, 8), (2, 8), (2, 8), (2, 7)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    given = inputs if has_bias else [*inputs[:-1], None]
    asked = [one for one in given if one is not None]
    found = []
    for path, fast in (("products", False), ("sdpa", True)):
        with modes.using_relative_path(path), modes.fast(fast):  # type: ignore[arg-type]
            out = relative_attention(*given)  # type: ignore[arg-type]
            grads = torch.autograd.grad(out.square().sum(), asked)
            with torch.inference_mode():
                found.append([out, relative_attention(*given), *grads])  # type: ignore[arg-type]
    torch.testing.assert_close(found[1], found[0])


def test_memories_of_layers_are_kept_together() -> None:
    old, new = (tuple(torch.randn(3, size, 4) for _ in range(2)) for size in (5, 4))
    memory = LayerInputs(old, torch.tensor([5, 0, 3]))
    lengths = torch.tensor([4, 2, 0])
    wanted = memory.after(new, 4, lengths, 6)
    with modes.fast(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "saves_launches", lambda device: True)
        found = memory.after(new, 4, lengths, 6)
    torch.testing.assert_close(found.layers, wanted.layers)
    assert torch.equal(found.lengths, wanted.lengths)


def test_the_counter_counts_as_by_hand() -> None:
    with torch.device("meta"):
        layer, attention = FeedForward(8, 16), MultiHeadAttention(8, 2)
        x = torch.zeros(3, 5, 8, requires_grad=True)
    with Launches() as launches:
        out = layer(x)
        assert launches.count == 3  # two products with bias, ReLU
        out.sum().backward()
    assert launches.count == 3 + 2 + 2 * 3 + 1  # a sum, its ones; two products and a sum of each map; ReLU
    with as_on_cuda(), Launches() as launches, torch.no_grad():
        attention(x)
    assert launches.by_name["_scaled_dot_product_flash_attention"] == 1
    with pytest.raises(AssertionError, match="nonzero waits"), Launches():
        x.nonzero()
    for waits in (lambda y: y[0, 0, 0].item(), lambda y: y.masked_select(y > 0), lambda y: bool((y > 0).all())):
        with pytest.raises(AssertionError, match="waits for the device"), Launches():
            waits(x)
    with pytest.raises(NotImplementedError, match="nonzero"), Launches():  # meta has no index of bools at all
        x[x > 0]
    with as_on_cuda(), Launches() as launches:  # what torch does at once for many tensors on CUDA, and not on meta
        parameters = list(layer.parameters())
        torch.nn.functional.dropout(x, 0.1)
        torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        AdamW(parameters, fused=True).step()
    assert launches.by_name["native_dropout"] == launches.by_name["_foreach_norm"] == 1, launches.by_name
    assert launches.by_name["_fused_adamw_"] == 1, launches.by_name
    with Launches() as launches, torch.inference_mode():
        wide = torch.zeros(2, 3, 1, 8, device="meta") @ torch.zeros(3, 8, 5, device="meta")
    assert launches.by_name["clone"] == 1, launches.by_name  # of the second, once for each row of the first
    assert launches.by_name["bmm"] == 1
    assert launches.by_name["matmul"] == 0
    with Launches() as launches, torch.no_grad():
        torch.add(wide, wide, out=torch.empty_like(wide))
    assert launches.count == 1
    with Launches() as launches:
        torch.ones(3).nonzero()  # nobody waits for the CPU
    assert launches.count == 0


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize("kind", ["all", "others", "without_padding"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows_at_once", [3, 1000])
def test_loss_of_kept_rows(kind: Any, bias: bool, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "logit_rows_of_a_gpu", lambda *sizes: rows_at_once)
    head = LinearHead(6, 11, bias=bias).double()
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    targets, keep = torch.randint(1, 11, (2, 5)), torch.tensor([[True] * 5, [True, True, False, False, True]])
    inputs = [hidden, *head.parameters()]
    found = []
    for plain in (True, False):
        with modes.fast(not plain):
            for smoothing in (0.0, 0.1):
                loss, nll = head.loss(hidden, targets, keep, label_smoothing=smoothing, smoothing_kind=kind)
                found.append([loss, nll, *torch.autograd.grad(loss / 7, inputs)])
    for wanted, mine in zip(found[:2], found[2:], strict=True):
        for one, other in zip(wanted, mine, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    (first,) = torch.autograd.grad(head.loss(hidden, targets, keep)[0], hidden, create_graph=True)
    with pytest.raises(RequestError, match="derivative"):
        first.sum().backward()


@pytest.mark.usefixtures("saving")
def test_layers_share_a_mask() -> None:
    attention = MultiHeadAttention(8, 2).double().eval()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    lengths = torch.tensor([4, 0, 2])
    slope = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    for mask in (Lengths(lengths), Causal() & Lengths(lengths), Causal() & Bias(slope)):
        first, second = attention(x, mask=mask)[0], attention(x + 1, mask=mask)[0]
        with modes.fast(False):
            torch.testing.assert_close(first, attention(x, mask=mask)[0])
            torch.testing.assert_close(second, attention(x + 1, mask=mask)[0])
    mask = Lengths(lengths)
    attention(x, mask=mask)
    lengths[1] = 3  # a mask that changes is computed again
    with modes.fast(False):
        wanted = attention(x, mask=mask)[0]
    torch.testing.assert_close(attention(x, mask=mask)[0], wanted)


def _gradients(fast: bool, precision: Any, batches: list[PairBatch]) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    model = build_model(SMALL)
    train_step = _train_step(model, SMALL, precision, "cpu")
    before = {name: (id(one), one.detach().clone()) for name, one in model.named_parameters()}
    train_step.update = lambda *given: None  # type: ignore[method-assign]
    with modes.fast(fast):
        result = train_step.run(batches, 1, 1e-4)
    for name, parameter in model.named_parameters():
        assert (id(parameter), True) == (before[name][0], torch.equal(parameter, before[name][1])), name
        assert parameter.grad is not None, name
        assert parameter.grad.dtype is torch.float32, name
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, result.loss_sum


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_give_the_gradients_of_autocast(count, dtype, monkeypatch):
    batches = [_batch(SMALL, 6, 9) for _ in range(count)]
    exact, exact_loss = _gradients(False, "fp32", batches)
    cast, cast_loss = _gradients(True, "bf16", batches)
    monkeypatch.setattr(policy, "saves_launches", lambda device: modes.is_fast())
    monkeypatch.setattr(step, "NarrowWeights", partial(NarrowWeights, dtype=dtype))
    mine, loss = _gradients(True, "bf16", batches)
    if dtype is torch.float32:  # the same sums in another order
        assert loss == pytest.approx(exact_loss, rel=1e-6)
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-6)
        return
    assert abs(loss - exact_loss) <= 2 * abs(cast_loss - exact_loss) + 1e-3 * exact_loss

    def error(found: dict[str, Tensor]) -> Tensor:
        return torch.cat([(found[name] - exact[name]).flatten() for name in exact]).norm()

    assert error(mine) <= 1.5 * error(cast)


def test_maps_of_one_input_lie_side_by_side() -> None:
    attention = MultiHeadAttention(16, 4, bias=True)
    attention.k_proj.weight.requires_grad_(False)
    x = torch.randn(8, 16, 16)
    wanted = torch.autograd.grad(attention(x)[0].sum(), attention.v_proj.weight)[0]
    narrow = NarrowWeights(attention, torch.float32)
    narrow.cast()
    with Launches() as launches, modes.fast(), narrow.applied():
        attention(x)[0].sum().backward()
    assert launches.by_name["cat"] == 0
    assert attention.v_proj.weight.grad is not None
    torch.testing.assert_close(attention.v_proj.weight.grad, wanted)
    assert attention.k_proj.weight.grad is None


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize(("value", "is_finite"), [(1e20, True), (float("nan"), False), (float("-inf"), False)])
def test_state_check_in_few_operations(value: float, is_finite: bool) -> None:
    model = torch.nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    parameters = list(model.parameters())
    assert total_of(parameters, optimiser).isfinite()
    optimiser.state[model.bias]["exp_avg"][1] = value
    assert bool(total_of(parameters, optimiser).isfinite()) is is_finite
