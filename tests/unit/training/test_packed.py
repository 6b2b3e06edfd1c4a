"""Runs with packed batches: the numbers of padded ones, ranks, a resume, and what is refused."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.data.batch import PackedBatch, PackedShape, PairBatch
from manyheads.errors import ConfigError, RequestError
from manyheads.models.reformer.config import ReformerSeq2SeqConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.attention.settings import AdditiveAttentionConfig
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.dropout import numbered_rows
from manyheads.tasks.translation.objective import TranslationObjective
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.run.loop import train
from manyheads.training.run.resume import differences
from manyheads.training.run.state import rank_batch

Make = Callable[..., TrainConfig]
SIZES: dict[str, Any] = {
    "source_vocab_size": 30, "target_vocab_size": 30, "d_model": 16, "num_heads": 2, "d_ff": 32,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.0,
}  # fmt: skip
RELATIVE: dict[str, Any] = {"model": {"relative_bias": 3}}
SHAPE = PackedShape(40, 48, 8, longest=8)


def batch() -> PairBatch:
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(4, 30, (2, 5, 8), generator=generator)
    for row, (source_len, target_len) in enumerate([(7, 3), (1, 8), (4, 4), (5, 2), (2, 6)]):
        source[row, source_len:] = 0
        target[row, target_len:] = 0
    return PairBatch.of(source, target)


def model_of(**changes: Any) -> Any:
    torch.manual_seed(0)
    return build_model(TransformerConfig(**{**SIZES, **changes})).double().train()


def results(model: Any, given: Any, **options: Any) -> dict[str, Tensor]:
    """The loss, the number of tokens, and all gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(given, **options)
    output.loss_sum.backward()
    grads = {name: one.grad.clone() for name, one in model.named_parameters()}
    return {"loss": output.loss_sum.detach(), "nll": output.nll_sum, "tokens": output.num_tokens, **grads}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "learned", "max_len": 8, "norm_position": "pre"},
        {"positions": "rotary", "num_kv_heads": 1, "ffn": "swiglu"},
        {"head_dim": 6, "value_dim": 4, "num_decoder_heads": 4, "tie_embeddings": "none"},
        {"relative_bias": 3},
        {"relative_bias": 12, "positions": "none", "num_kv_heads": 1},
    ],
    ids=["paper", "learned", "rotary and grouped", "widths", "relative bias", "relative bias alone"],
)
@pytest.mark.parametrize("fast", [True, False])
def test_packed_is_padded(changes: dict[str, Any], fast: bool) -> None:
    model, options = model_of(**changes), {"label_smoothing": 0.1}
    with modes.fast(fast):
        wanted = results(model, batch(), **options)
        for packed in (PackedBatch.of(batch()), PackedBatch.of(batch(), SHAPE)):
            torch.testing.assert_close(results(model, packed, **options), wanted, rtol=1e-9, atol=1e-12)


class OnlyWritten(torch.autograd.Function):
    """As torch's kernel on a GPU, which writes the rows of the segments and leaves all others as memory was: NaN."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Any, longest: tuple[int, int], causal: bool
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.given = starts, longest, causal
        out = torch.full_like(q, torch.nan)
        for queries, keys in OnlyWritten.segments(*ctx.given[:2]):
            out[queries] = OnlyWritten.formula(q[queries], k[keys], v[keys], causal)
        return out

    @staticmethod
    def segments(starts: Any, longest: tuple[int, int]) -> list[tuple[slice, slice]]:
        bounds = [pairwise(one.tolist()) for one in starts]
        return [
            (slice(start, min(stop, start + longest[0])), slice(first, min(end, first + longest[1])))
            for (start, stop), (first, end) in zip(*bounds, strict=True)
        ]

    @staticmethod
    def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        found = [torch.full_like(x, torch.nan) for x in ctx.saved_tensors]
        starts, longest, causal = ctx.given
        for queries, keys in OnlyWritten.segments(starts, longest):
            some = [
                x[part].detach().requires_grad_()
                for x, part in zip(ctx.saved_tensors, (queries, keys, keys), strict=True)
            ]
            with torch.enable_grad():
                out = OnlyWritten.formula(*some, causal)
            for whole, part, one in zip(
                found, (queries, keys, keys), torch.autograd.grad(out, some, grad[queries]), strict=True
            ):
                whole[part] = one
        return *found, None, None, None


def test_no_row_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, *given: Any, scale: None, window_size: tuple[int, int]) -> Any:
        return OnlyWritten.apply(q, k, v, given[:2], [one - fewer for one in given[2:]], window_size == (-1, 0))

    fewer = 0
    model, packed = model_of(), PackedBatch.of(batch(), SHAPE)
    wanted = results(model, packed)
    monkeypatch.setattr(policy, "segments_path", lambda *given: "varlen")
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    found = results(model, packed)
    assert all(value.isfinite().all() for value in found.values())
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    fewer = 2  # rows beyond the bound, here 6, are not computed, and reach every gradient
    assert not all(value.isfinite().all() for value in results(model, packed).values())


@pytest.mark.parametrize(("world", "relative"), [(2, 0), (3, 3), (7, 0)])
def test_ranks_drop_what_one_process_drops(world: int, relative: int) -> None:
    """Also where there are more ranks than pairs, and the others' results do not count."""
    model = model_of(dropout=0.3, feed_forward_dropout=0.2, relative_bias=relative)
    packed = PackedBatch.of(batch(), SHAPE)
    wanted = results(model, packed)
    sums: dict[str, Tensor] = {}
    for rank in range(world):
        part = rank_batch(packed, SimpleNamespace(is_alone=False, rank=rank, world=world))  # type: ignore[arg-type]
        with numbered_rows(part.first, len(part.batch.sample_ids), part.total):
            found = results(model, part.batch)
        if part.counts:
            sums = {name: value + sums.get(name, 0) for name, value in found.items()}
    torch.testing.assert_close(sums, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("relative", [0, 3])
def test_a_resume_within_an_epoch_is_exact(relative: int, small: Make) -> None:
    """Also with accumulation; the setting is recorded, and another value is refused."""
    data = {"batching": "packed", "accumulate": 2, "max_tokens": 128}
    model = {"dropout": 0.2, "relative_bias": relative}

    def weights(result: Any) -> bytes:
        return (result.checkpoint / "model.safetensors").read_bytes()  # type: ignore[no-any-return]

    whole = train(small(data=data, model=model))
    expected, run = weights(whole), whole.run_dir
    assert whole.epoch == 0
    assert "batching: packed" in (run / "config.yaml").read_text("utf-8")
    log = (run / "train.log").read_text("utf-8")
    assert "batches are packed: 64 source and 64 target slots for up to" in log
    assert "attention over packed batches is computed one sentence after the other" in log
    resumed = small(data=data, model=model)
    half = Path(run, "checkpoints", "step-00000003")
    assert weights(train(resumed, resume=str(half))) == expected
    with pytest.raises(ConfigError, match=r"data\.batching was 'packed', is 'padded'"):
        train(small(data={**data, "batching": "padded"}, model=model))


def test_runs_of_earlier_versions_were_padded(small: Make) -> None:
    assert differences({}, small().data) == differences({"batching": "padded"}, small().data)
    assert ("batching", "batching was 'padded', is 'packed'") in differences(
        {}, small(data={"batching": "packed"}).data
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"attention_dropout": 0.1}, "model.attention_dropout is 0.1, but .* no dropout of weights; set it to 0"),
        ({"attention": AdditiveAttentionConfig()}, "model.attention is additive, but .* set it to dot_product"),
        ({"positions": "learned", "max_len": 12}, "model.max_len is 12, but .* is 16; raise max_len, or lower these"),
        (ReformerSeq2SeqConfig(), "a reformer-seq2seq computes padded batches alone; set it to padded"),
    ],
)
def test_models_that_cannot_be_packed(model: Any, message: str, small: Make) -> None:
    small(model=model)
    with pytest.raises(ConfigError, match=rf"data\.batching is packed.*{message}"):
        small(data={"batching": "packed"}, model=model)


@pytest.mark.parametrize(
    ("sections", "capability", "message"),
    [
        ({}, (9, 0), ""),
        ({"precision": "fp32"}, (9, 0), "bfloat16 or float16 on a GPU, not in float32; train in bf16"),
        ({"model": {"num_heads": 4}}, (9, 0), "a multiple of 8 up to 256, here 4 and 4; change num_heads"),
        ({}, (7, 5), "compute capability 8.0, which cuda is not; use padded batches there"),
        ({"precision": "fp32", "training": {"plain": True}}, (7, 5), "one sentence after the other"),
        (RELATIVE, (9, 0), "with a relative bias needs the package triton.* Padded batches need no kernel"),
        ({**RELATIVE, "has_triton": True}, (9, 0), "several lengths, and with .* Triton kernel of relative attention"),
        ({"data": {"batching": "padded"}}, (9, 0), "batches are padded"),
    ],
)
def test_what_a_gpu_cannot_compute(sections, capability, message, small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sections = dict(sections)
    has_triton = sections.pop("has_triton", False)
    monkeypatch.setattr(policy, "_has_triton", lambda: has_triton)
    monkeypatch.setattr(policy.shutil, "which", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    objective: Any = object.__new__(TranslationObjective)
    objective.config = small(**{"precision": "bf16", "data": {"batching": "packed"}, **sections})
    is_refused = message and not message.endswith(("other", "are padded", "attention"))
    is_fast = modes.fast(not objective.config.training.plain)  # as a run computes
    with is_fast, pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
        (note,) = objective.check_device(torch.device("cuda"))
        assert re.search(message or "torch's kernel", note)


def test_a_body_without_packed_batches() -> None:
    torch.manual_seed(0)
    model = build_model(ReformerSeq2SeqConfig(source_vocab_size=30, target_vocab_size=30))
    with pytest.raises(RequestError, match="cannot compute packed batches; give padded ones"):
        model(PackedBatch.of(batch()))
