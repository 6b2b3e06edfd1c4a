"""Steps of a search on a GPU, counted on `meta`, and computed on the CPU by the operations that they take there."""

from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from bare_models import BareDecoder, BareReformer, BareSeq2Seq, BareXL
from launches import Launches, as_on_cuda, reads

from manyheads.catalogue import build_model
from manyheads.decoding.greedy_and_sampling import Repetition
from manyheads.decoding.model_runner import pack
from manyheads.decoding.search import search_steps
from manyheads.decoding.search_problem import SearchProblem, run_to_end
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ShapeError
from manyheads.models.reformer.config import SEQ2SEQ_PRESETS as SEQ2SEQ_REFORMERS
from manyheads.models.transformer.config import PRESETS, TransformerConfig
from manyheads.nn import Lengths, MultiHeadAttention
from manyheads.nn.attention.cache import DecoderState, KeyValueCache, source_mask
from manyheads.nn.kernels import modes, policy
from manyheads.nn.positions import AxialPositions, LearnedPositions

IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of a GPU on the CPU."""
    monkeypatch.setattr(policy, "saves_launches", lambda device: modes.is_fast())


# A bare model has 15 operations in each of 6 layers: q, k and v; a copy to the cache; attention; its output; sum and
# norm; the query of the source; attention; its output; sum and norm; inner layer with ReLU; outer layer; sum and norm.
# Embedding, factor and positions; logits, softmax and maximum make 96. The rest are the path's score, length and end.
# With beams the rest are the candidates, the kept hypotheses and the table of each beam's past; the bare model adds the
# sums, takes the best, and moves the caches. A Reformer's decoder has two norms in place of none at its end.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("preset", "beams", "bar", "floor"),
    [(PRESETS["base"], 1, 105, 96), (PRESETS["base"], 4, 150, 100), (SEQ2SEQ_REFORMERS["wmt-base"], 1, 108, 96)],
    ids=["greedy", "beams", "Reformer"],
)
def test_launches_of_a_step_of_decoding(
    preset: Any, beams: int, bar: int, floor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean of eight steps without growth of the cache, in one of which the host reads who is finished."""
    config = replace(preset, source_vocab_size=32_000, target_vocab_size=32_000)
    with torch.device("meta"):
        model = build_model(config).eval()
        source, lengths = torch.ones(64, 30, dtype=torch.int64), torch.ones(64, dtype=torch.int64)
    monkeypatch.setattr(SearchProblem, "range_of", staticmethod(lambda limits: (100, 100)))
    pack(model)
    with torch.inference_mode(), as_on_cuda(), reads(0, size=4), modes.fast():
        steps = search_steps(model, source, lengths, DecodingSettings(num_beams=beams), **IDS)
        for _ in range(6):
            next(steps)
        with Launches() as launches:
            for _ in range(8):
                next(steps)
    assert launches.count <= 8 * bar, launches.by_name.most_common()
    assert launches.by_name["stack"] == 1  # the only tensor that the host reads
    assert (
        _least(replace(PRESETS["base"], source_vocab_size=32_000, target_vocab_size=32_000), 64, beams) == floor <= bar
    )


def _least(config: Any, sentences: int, beams: int) -> int:
    """The operations of a bare step of these sentences, and of the choice of their next tokens."""
    rows = sentences * beams
    with torch.device("meta"):
        bare = BareSeq2Seq(config).eval()
        tokens, sums = torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, 1)
        bias = torch.zeros(rows, 1, 1, 32)
    caches, sources = bare.caches(rows, 64), bare.caches(rows, 32)
    with torch.inference_mode(), as_on_cuda(), Launches() as least:
        log_probs = bare.step(tokens, caches, 6, sources, bias)
        if beams == 1:
            log_probs.max(dim=-1)
        else:
            places = (log_probs + sums).view(sentences, -1).topk(beams).indices
            parents = places // config.target_vocab_size
            places % config.target_vocab_size
            caches.index_select(2, parents.flatten())
    return least.count


# The second number is that of a bare model of torch's operations, with the projected keys and distances in one buffer.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "preset", "sizes", "bare", "bar", "floor"),
    [
        ("decoder", "gpt2", {"vocab_size": 32_000}, BareDecoder, 141, 137),
        ("transformer_xl", "enwik8-base", {"vocab_size": 204}, BareXL, 162, 159),
        ("reformer", "small", {"vocab_size": 256, "max_len": 4096}, BareReformer, 294, 150),
    ],
)
def test_launches_of_a_step_of_a_language_model(name, preset, sizes, bare, bar, floor):
    """Log-probabilities of the next token of 32 rows; nothing waits for the device."""
    config = replace(import_module(f"manyheads.models.{name}.config").PRESETS[preset], **sizes)
    with torch.device("meta"):
        model, other = build_model(config).eval(), bare(config).eval()
        one, prompt = torch.zeros(32, 1, dtype=torch.int64), torch.zeros(32, 64, dtype=torch.int64)
    pack(model)
    with torch.inference_mode(), as_on_cuda(), modes.fast():
        state = model.start(32)
        for tokens in (prompt, one, one):
            _, state = model.step(tokens, state)
        with Launches() as launches:
            for _ in range(4):
                _, state = model.step(one, state)
        with Launches() as least:
            other.step(one, other.caches(32, 128), 66)
    assert launches.count <= 4 * bar, launches.by_name.most_common()
    assert least.count == floor <= bar, least.by_name.most_common()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("decoder", {"positions": "learned"}),
        ("decoder", {"positions": "sinusoidal"}),
        ("decoder", {"positions": "rotary"}),
        ("transformer_xl", {}),
        ("reformer", {"positions": "axial"}),
        ("reformer", {"positions": "learned", "layers": ("local", "full")}),
    ],
)
def test_unequal_prompts_need_no_wait(name: str, sizes: dict[str, Any]) -> None:
    """The host knows an upper bound of the positions, and reads them only where it is over the model's limit."""
    config = replace(import_module(f"manyheads.models.{name}.config").PRESETS["debug"], vocab_size=50, **sizes)
    with torch.device("meta"):
        model = build_model(config).eval()
        one, prompt = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 6, dtype=torch.int64)
        lengths = torch.zeros(3, dtype=torch.int64)
    with torch.inference_mode(), as_on_cuda(), modes.fast(), reads(1) as waits:
        state = model.step(prompt, model.start(3), lengths)[1]
        for _ in range(3):
            with Launches():
                _, state = model.step(one, state)
    assert not any(waits.values()), waits


@pytest.mark.parametrize("kind", ["learned", "axial"])
def test_a_loose_bound_of_positions_refuses_nothing(kind: str) -> None:
    """As where the longest row of a batch has ended."""
    positions = LearnedPositions(4, max_len=8) if kind == "learned" else AxialPositions((2, 4), (1, 3))
    first, x = torch.tensor([1, 5]), torch.randn(2, 2, 4)
    for most in (6, 7, 100):
        torch.testing.assert_close(positions(x, first, most), positions(x, first))
    with pytest.raises(ShapeError, match="a sequence of 9 tokens is longer"):
        positions(x, first + 2, 7)


def test_forbidden_tokens_are_sent_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from ordinary memory would wait for all that was launched."""
    pinned: list[torch.Size] = []
    monkeypatch.setattr(policy, "pinning", lambda device: nullcontext() if device.type == "meta" else None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x.shape) or x)
    device = torch.device("meta")
    history = [[5, 6, 5], [6, 7, 8]]
    repetition = Repetition(history, 10, penalty=1.0, ngram_size=2, device=device)
    with Launches() as launches:
        repetition.apply(torch.zeros(2, 10, device=device))
    assert pinned == [(1, 2)]
    assert launches.by_name["_to_copy"] == 1, launches.by_name


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize("relative", [0, 4])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_search_with_few_launches_finds_the_same(options: dict[str, Any], relative: int) -> None:
    torch.manual_seed(3)
    config = TransformerConfig(
        source_vocab_size=30, target_vocab_size=30, d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1,
        num_decoder_layers=2, relative_bias=relative, positions="none" if relative else "sinusoidal",
    )  # fmt: skip
    model = build_model(config).double().eval()
    source, lengths = torch.randint(3, 30, (9, 7)), torch.tensor([7, 3, 0, 1, 6, 7, 2, 4, 5])
    settings = DecodingSettings(**{"num_beams": 1, **options}, max_len_ratio=3.0, max_len_offset=6)

    def found() -> list[Any]:
        hypotheses = run_to_end(search_steps(model, source, lengths, settings, **IDS))
        return [(one.ids, pytest.approx(one.score)) for sentence in hypotheses for one in sentence]

    wanted = found()
    assert len({len(ids) for ids, _ in wanted}) > 1, "all end at once"
    pack(model)
    with torch.inference_mode(), modes.fast(), Launches():
        assert found() == wanted


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize("fast", [False, True])
def test_a_source_without_tokens_gives_zeros(fast: bool) -> None:
    attention, lengths = MultiHeadAttention(8, 2).eval(), torch.tensor([0, 2])
    x, memory = torch.randn(2, 1, 8), torch.randn(2, 3, 8)
    wanted = attention(x, key=memory, mask=Lengths(lengths))[0]
    source = attention.project_memory(memory)
    state = DecoderState.begin([], [source], source_mask(lengths, 3))
    with torch.inference_mode(), modes.fast(fast):
        out = attention.step_across(x, state.source.keys[0], state.source.values[0], state.memory_mask)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(out[0, 0], attention.out_proj.bias)


@pytest.mark.usefixtures("saving")
def test_keys_and_values_are_written_by_one_copy() -> None:
    attention = MultiHeadAttention(8, 2).eval()
    x = torch.randn(3, 4, 8)
    wanted = attention(x, state=attention.empty_cache(3, x))[0]
    pack(attention)
    cache = KeyValueCache.empty(3, 2, 4, x)
    with torch.inference_mode(), modes.fast():
        for place in range(4):
            (step,), cache = cache.prepare(1)
            out = attention.step(x[:, place : place + 1], step)
            cache = cache.after(1)
        assert step.key.untyped_storage().data_ptr() == step.value.untyped_storage().data_ptr()
        for mine, other in zip(cache.filled(), attention.project_memory(x), strict=True):
            torch.testing.assert_close(mine, other)
    torch.testing.assert_close(out[:, 0], wanted[:, -1])
