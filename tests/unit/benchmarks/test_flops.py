"""The formulas of benchmarks/flops.py against what torch counts while small models run."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import manyheads.nn.attention.relative as relative_module
from manyheads.catalogue import build_model
from manyheads.data.batch import PairBatch
from manyheads.data.language.segments import SegmentBatch
from manyheads.decoding.search import search_steps
from manyheads.decoding.search_problem import run_to_end
from manyheads.decoding.settings import DecodingSettings
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import Attending, TransformerXLConfig
from manyheads.nn.attention.settings import AdditiveAttentionConfig
from manyheads.nn.kernels.modes import fast
from manyheads.nn.kernels.relative import relative_weights

PAIRS = TransformerConfig(
    source_vocab_size=80, target_vocab_size=96, d_model=32, num_heads=4, d_ff=48, decoder_d_ff=72, dropout=0.0,
    num_encoder_layers=3, num_decoder_layers=2, tie_embeddings="none",
)  # fmt: skip
XL = TransformerXLConfig(
    vocab_size=70, d_model=32, num_heads=4, head_dim=12, d_ff=48, num_layers=3, dropout=0.0, memory_len=20
)
HASHED = ReformerConfig(
    vocab_size=40, d_model=32, num_heads=2, d_ff=48, num_layers=3, dropout=0.0, max_len=256, chunk_len=16, num_hashes=3,
    positions="sinusoidal",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("by_products")


def added_product(into: Any, left: Any, right: Any, **_: Any) -> int:
    """Of shapes: a batch of products that is added to what is there, which the counter does not know by itself."""
    batch, rows, inner = left
    return int(2 * batch * rows * inner * right[2])


def counted(run: Callable[[], Any]) -> int:
    with fast(), FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: added_product}) as counter:
        run()
    return int(counter.get_total_flops())


@torch.no_grad()
def counted_forward(run: Callable[[], Any]) -> int:
    """Without gradients, or the head would make the logits' own already here, a chunk at a time."""
    return counted(run)


def segment(lanes: int, length: int, vocab_size: int) -> SegmentBatch:
    ids = torch.randint(0, vocab_size, (lanes, length + 1))
    none = torch.zeros(lanes, dtype=torch.bool)
    return SegmentBatch(ids[:, :-1], ids[:, 1:], torch.full((lanes,), length), none, torch.arange(lanes))


@pytest.fixture
def flops(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("flops")


def test_transformer(flops: ModuleType) -> None:
    """Forward and training, with sides of different lengths, widths, depths and vocabularies."""
    model = build_model(PAIRS).train()
    source, target = torch.randint(4, 80, (8, 13)), torch.randint(4, 80, (8, 9))  # 64 labels: the head adds none
    batch = PairBatch(source, torch.full((8,), 13), target, torch.full((8,), 9), torch.arange(8))
    work = flops.transformer(PAIRS, 8, 13, 8)
    assert counted_forward(lambda: model(batch)) == pytest.approx(work.forward, rel=0.01)
    assert counted(lambda: model(batch).loss_sum.backward()) == pytest.approx(work.training, rel=0.01)
    assert work.training == 3 * work.forward


@pytest.mark.parametrize("beams", [1, 4])
def test_decoding(flops: ModuleType, beams: int) -> None:
    model = build_model(PAIRS).eval()
    settings = DecodingSettings(num_beams=beams, max_new_tokens=12, min_new_tokens=12)
    source = torch.randint(4, 80, (3, 11))

    def run() -> None:
        found = run_to_end(search_steps(model, source, torch.full((3,), 11), settings, pad_id=0, bos_id=1, eos_id=2))
        assert {len(rows[0].ids) for rows in found} == {12}

    with torch.no_grad():
        found, work = counted(run), flops.decoding(PAIRS, 3, 11, 12, beams)
    # Hypotheses of a sentence ask one another's keys too, which is no work that had to be done.
    others = 3 * beams * (beams - 1) * PAIRS.num_decoder_layers * 4 * PAIRS.d_model * sum(range(2, 13))
    assert 0.99 * work <= found <= 1.01 * work + others
    assert beams > 1 or found == pytest.approx(work, rel=0.01)


def test_transformer_xl(flops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with a full memory, by the oracle's plain autograd, which computes nothing twice."""

    def plainly(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        *parts, mask, _rate, causal, _fused = rest
        return torch.matmul(relative_weights(query, key, *parts, mask, causal), value)

    monkeypatch.setattr(relative_module, "relative_attention", plainly)
    model = build_model(XL).train()
    state = model(segment(8, 20, 70)).state
    work = flops.transformer_xl(XL, 8, 8, 20)
    assert counted_forward(lambda: model(segment(8, 8, 70), state)) == pytest.approx(work.forward, rel=0.01)
    state = model(segment(8, 20, 70)).state
    found = counted(lambda: model(segment(8, 8, 70), state).loss_sum.backward())
    # The gradient of the memory, which nobody needs, is computed with that of the segment, in one product.
    memory_gradient = XL.num_layers * 8 * 4 * 20 * XL.d_model * XL.num_heads * 12
    assert found == pytest.approx(work.training + memory_gradient, rel=0.01)


def test_transformer_xl_in_evaluation(flops: ModuleType) -> None:
    """With keys and values of a full memory."""
    model = build_model(XL).eval()
    with torch.no_grad():
        state = model.start(8, Attending(memory_len=24))
        for _ in range(6):  # full, and distances projected as far as is ever needed
            state = model(segment(8, 8, 70), state).state
    found = counted_forward(lambda: model(segment(8, 8, 70), state))
    assert found == pytest.approx(flops.transformer_xl_cached(XL, 8, 8, 24), rel=0.01)


@pytest.mark.parametrize("changes", [{}, {"num_hashes": 0}, {"layers": ("lsh", "local", "full"), "local_chunk_len": 8}])
def test_reformer(flops: ModuleType, changes: dict[str, Any]) -> None:
    """Hashed, exact, and one of each kind; training without recomputation where attention is exact."""
    config = replace(HASHED, **changes)
    model = build_model(config).train()
    work = flops.reformer(config, 2, 256)
    assert counted_forward(lambda: model(segment(2, 256, 40))) == pytest.approx(work.forward, rel=0.01)
    if config.num_hashes == 0:
        plain = build_model(replace(config, reversible=False)).train()
        found = counted(lambda: plain(segment(2, 256, 40)).loss_sum.backward())
        assert found == pytest.approx(work.training, rel=0.01)
    else:
        assert 2 * work.forward < work.training < 3 * work.forward


def test_what_is_no_product_is_refused(flops: ModuleType) -> None:
    with pytest.raises(ValueError, match="additive"):
        flops.transformer(replace(PAIRS, attention=AdditiveAttentionConfig()), 1, 1, 1)
    with pytest.raises(ValueError, match="cutoffs"):
        flops.transformer_xl(replace(XL, cutoffs=(10, 20)), 1, 1, 1)
