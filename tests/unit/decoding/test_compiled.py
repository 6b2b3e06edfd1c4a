"""Steps of a search that are compiled: the same searches as without, from one program."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.decoding import model_runner
from manyheads.decoding.generator import Generator
from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.decoding.model_runner import CompiledSteps, inference, narrow, pack
from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.errors import RequestError
from manyheads.models.composites import Seq2Seq
from manyheads.models.ensemble import Ensemble, LanguageEnsemble
from manyheads.models.reformer.config import ReformerSeq2SeqConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.attention.settings import AdditiveAttentionConfig
from manyheads.text.vocabulary import ByteVocabulary

VOCAB = 37
CONFIG = TransformerConfig(
    source_vocab_size=VOCAB,
    target_vocab_size=VOCAB,
    d_model=16,
    num_heads=2,
    d_ff=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.0,
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole compiler, or without its last part: compiling kernels in C++ takes three quarters of a test's time."""
    if request.param != "inductor":
        whole = torch.compile

        def in_part(function: Any, *, options: Any, **named: Any) -> Any:
            known = {name: options[name] for name in ("guard_filter_fn",)}
            return whole(function, backend=request.param, options=known, **named)

        monkeypatch.setattr(torch, "compile", in_part)


def model_of(config: Any = CONFIG, seed: int = 0, sharpness: float = 3.0) -> Seq2Seq:
    torch.manual_seed(seed)
    model = cast(Seq2Seq, build_model(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(sharpness)  # surer of itself, so that rounding decides nothing
    return model


def sources(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [[*torch.randint(3, VOCAB, (length - 1,), generator=generator).tolist(), 2] for length in lengths]


LENGTHS = [9, 9, 8, 7, 7, 7, 5, 5, 4, 3]


def found(model: Any, lengths: list[int], precision: Any = "fp32", **options: Any) -> list[list[Hypothesis]]:
    """As many batches as max_tokens makes, of outputs that end at different lengths, past the caches' first buffers."""
    settings = DecodingSettings(**{"max_len_ratio": 2.5, "max_len_offset": 5, "max_tokens": 80, **options})
    with inference(CPU, precision):
        return search_all(model, sources(lengths), settings, pad_id=0, bos_id=1, eos_id=2)


def assert_same(mine: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    for ours, others in zip(mine, theirs, strict=True):
        assert [one.ids for one in ours] == [one.ids for one in others]
        for one, other in zip(ours, others, strict=True):
            assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-4)


class Counted(CompiledSteps):
    """Counts the steps that the program took."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.taken, compute = 0, self._compute

        def counting(what: Any, logits: bool) -> Tensor:
            self.taken += 1
            return compute(what, logits)

        self._compute = counting


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.unhooked
@pytest.mark.compiles
def test_the_whole_compiler() -> None:
    """In `make test` one program alone is compiled to the end; it takes as long as all that the other tests do."""
    model = model_of()
    expected, steps = found(model, [6, 5, 3], num_beams=1), Counted(model)
    assert_same(found(steps, [6, 5, 3], num_beams=1), expected)
    assert steps.taken > 10


@pytest.mark.one_in(2, "compiled searches")
@pytest.mark.usefixtures("compiler")
@pytest.mark.unhooked
@pytest.mark.compiles
def test_greedy_search_is_the_same_from_one_program() -> None:
    """Batches of other sizes, with padding and without, sentences that leave, buffers that grow: all of it.

    One sentence alone has a program of its own, and one that is left of several has none.
    """
    model = model_of()
    batches: list[tuple[list[int], dict[str, Any]]] = [(LENGTHS, {}), ([6, 6, 6], {}), ([6, 3], {"max_tokens": 12})]
    expected = [found(model, lengths, num_beams=1, **options) for lengths, options in batches]
    alone = found(model, [6], num_beams=1)
    pack(model)
    steps, before = Counted(model), graphs()
    for (lengths, options), one in zip(batches, expected, strict=True):
        assert_same(found(steps, lengths, num_beams=1, **options), one)
    assert graphs() - before == 1
    assert steps.taken > 40
    assert_same(found(steps, [6], num_beams=1), alone)
    assert graphs() - before == 2


@pytest.mark.one_in(2, "compiled searches")
@pytest.mark.parametrize("compiler", ["aot_eager"], indirect=True)
@pytest.mark.usefixtures("compiler")
@pytest.mark.unhooked
@pytest.mark.compiles
def test_a_pruned_model_is_compiled() -> None:
    """Layers differ in their number of heads. One batch: another would take another program, and twice the time."""
    model = model_of(
        replace(CONFIG, num_decoder_layers=2, encoder_heads=(1,), decoder_heads=(1, 2), cross_heads=(2, 1))
    )
    steps = Counted(model)
    assert_same(found(steps, LENGTHS[:4], num_beams=2, max_tokens=140), found(model, LENGTHS[:4], num_beams=2))
    assert steps.taken > 10


@pytest.mark.one_in(2, "compiled searches")
@pytest.mark.usefixtures("compiler")
@pytest.mark.unhooked
@pytest.mark.compiles
def test_beams_are_the_same() -> None:
    model = model_of(replace(CONFIG, norm_position="pre", positions="learned", max_len=64))
    steps, before = Counted(model), graphs()
    for options in ({"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 2}):
        options["max_tokens"] = 140  # no batch has one sentence
        assert_same(found(steps, LENGTHS, **options), found(model, LENGTHS, **options))
    assert graphs() - before == 1
    assert steps.taken > 40


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.compiles
def test_in_bf16_it_is_near() -> None:
    model = model_of(sharpness=1.0)
    exact = found(model, LENGTHS, num_beams=1)
    narrow(model, "bf16")
    pack(model)
    steps = Counted(model)
    rounded = found(steps, LENGTHS, "bf16", num_beams=1)
    assert steps.taken
    pairs = [(one[0], other[0]) for one, other in zip(rounded, exact, strict=True)]
    alike = [(one.token_log_probs[0], other.token_log_probs[0]) for one, other in pairs if one.ids[:1] == other.ids[:1]]
    assert len(alike) > len(pairs) // 2
    for one, other in alike:
        assert one == pytest.approx(other, abs=0.1)


@pytest.mark.one_in(2, "compiled searches")
@pytest.mark.usefixtures("compiler")
@pytest.mark.unhooked
@pytest.mark.compiles
def test_each_model_has_its_own_program() -> None:
    """They run the same code with other weights, and no step looks at which model it is."""
    models = [model_of(seed=seed) for seed in (0, 1)]
    for model in models:
        pack(model)
    steps = [Counted(model) for model in models]
    for model, one in zip(models, steps, strict=True):
        assert_same(found(one, LENGTHS[:4], num_beams=1), found(model, LENGTHS[:4], num_beams=1))
        assert one.taken
    assert found(steps[0], LENGTHS[:4], num_beams=1)[0][0].ids != found(steps[1], LENGTHS[:4], num_beams=1)[0][0].ids


@pytest.mark.slow  # two models in one program: as long as any two of the others
@pytest.mark.usefixtures("compiler")
@pytest.mark.unhooked
@pytest.mark.compiles
def test_the_models_of_an_ensemble_share_a_program():
    # Wider than any batch has rows: maps of one input are joined where there are more rows, in a program of their own.
    configs = [replace(CONFIG, d_model=32), replace(CONFIG, d_model=48, norm_position="pre")]
    model = Ensemble([model_of(config, seed=seed) for seed, config in enumerate(configs)])
    pack(model)
    steps, before = Counted(model), graphs()
    for options in ({"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 2}):
        options["max_tokens"] = 140  # no batch has one sentence
        assert_same(found(steps, LENGTHS, **options), found(model, LENGTHS, **options))
    assert graphs() - before == 1
    assert steps.taken > 40


@pytest.mark.unhooked
@pytest.mark.compiles
def test_who_looks_at_the_weights_sees_them() -> None:
    """A step whose attention weights must be there is not compiled, nor one with scores of another kind."""
    model = model_of()
    steps, seen = Counted(model), []
    model.body.decoder.layers[0].self_attn.weights_hook = lambda weights: seen.append(weights.shape)
    found(steps, [5, 5], num_beams=1)
    assert not steps.taken
    assert len(seen) > 5
    additive = Counted(model_of(replace(CONFIG, attention=AdditiveAttentionConfig(hidden_dim=8))))
    found(additive, [5, 5], num_beams=2)
    assert not additive.taken


XL = TransformerXLConfig(
    vocab_size=256, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=12, clamp_len=9, dropout=0.0
)
PROMPTS = ["It is a truth", "a", "x" * 20, ""]


def generator_of(config: Any = XL, compile_steps: bool = False, precision: Any = "fp32") -> Generator:
    torch.manual_seed(3)
    model = build_model(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data * 6 if parameter.any() else torch.randn_like(parameter)  # biases begin at zero
    narrow(model, precision)
    pack(model)
    settings = GenerationSettings(max_new_tokens=50, do_sample=False)
    generator = Generator(model, ByteVocabulary(), settings, "cpu", precision, compile_steps=compile_steps)
    if compile_steps:
        generator.runner.steps = Counted(model)
    return generator


def assert_written_alike(mine: Generator, plain: Generator, prompts: list[str], **options: Any) -> None:
    pairs = zip(mine.continuations(prompts, **options), plain.continuations(prompts, **options), strict=True)
    for ours, theirs in ((a, b) for one, other in pairs for a, b in zip(one, other, strict=True)):
        assert ours.ids == theirs.ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


@pytest.mark.one_in(2, "compiled searches")
@pytest.mark.usefixtures("compiler")
@pytest.mark.unhooked
@pytest.mark.compiles
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"attention": "relative_learned", "max_len": 16, "same_length": True}, marks=pytest.mark.slow)],
)
def test_a_language_model_writes_the_same_from_one_program(changes: dict[str, Any]) -> None:
    """Prompts of all lengths, memories that fill up, rows that leave, several ways to go on from a prompt.

    One prompt alone has a program of its own, and one row that is left of several has none.
    """
    config = replace(XL, **changes)
    plain, mine, before = generator_of(config), generator_of(config, compile_steps=True), graphs()
    assert_written_alike(mine, plain, PROMPTS)
    several: dict[str, Any] = {
        "do_sample": True, "temperature": 2.0, "top_k": 20, "num_return_sequences": 3, "memory_len": 30
    }  # fmt: skip
    *others, last = [one.text for one in plain.continuations(PROMPTS[:1], **several)[0]]
    several["stop"] = tuple(next(sign for sign in text if sign not in last) for text in others)
    assert_written_alike(mine, plain, PROMPTS[:1], **several)
    *lengths, longest = [len(one.ids) for one in plain.continuations(PROMPTS[:1], **several)[0]]
    assert max(lengths) < longest - 5  # one row alone at the end
    assert graphs() - before == 1
    taken = mine.runner.steps.taken
    assert taken > 40
    assert_written_alike(mine, plain, PROMPTS[2:3])
    assert "".join(mine.stream(PROMPTS[2])) == plain.generate(PROMPTS[2])
    assert graphs() - before == 2
    assert mine.runner.steps.taken > taken + 90


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.unhooked
@pytest.mark.compiles
def test_the_language_models_of_an_ensemble_share_a_program() -> None:
    configs = [XL, replace(XL, d_model=24, num_layers=1, memory_len=20)]
    model = LanguageEnsemble([generator_of(config).single_model for config in configs])
    settings = GenerationSettings(max_new_tokens=50, do_sample=False)
    plain, mine = (Generator(model, ByteVocabulary(), settings, "cpu") for _ in range(2))
    mine.runner.steps, before = Counted(model), graphs()
    assert_written_alike(mine, plain, PROMPTS)
    assert_written_alike(mine, plain, PROMPTS[:3], do_sample=True, temperature=2.0)
    assert graphs() - before == 1
    assert mine.runner.steps.taken > 40


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.compiles
def test_a_language_model_in_bf16_is_near() -> None:
    mine = generator_of(compile_steps=True, precision="bf16")
    [exact], [rounded] = (one.continuations(PROMPTS[:1], max_new_tokens=12) for one in (generator_of(), mine))
    assert mine.runner.steps.taken
    assert rounded[0].ids[:3] == exact[0].ids[:3]
    assert rounded[0].log_probs[:3] == pytest.approx(exact[0].log_probs[:3], abs=0.2)


@pytest.mark.parametrize("changes", [{"attention": "absolute"}, {"cutoffs": (10, 20), "div_value": 2}])
def test_language_models_that_look_at_numbers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"steps of this transformer-xl cannot be compiled.*--compile"):
        generator_of(replace(XL, **changes), compile_steps=True)


def test_a_reformer_is_refused() -> None:
    config = ReformerSeq2SeqConfig(
        source_vocab_size=VOCAB, target_vocab_size=VOCAB, d_model=16, num_heads=2, d_ff=32, max_len=64
    )
    with pytest.raises(RequestError, match=r"steps of this reformer.* cannot be compiled.*--compile"):
        CompiledSteps(build_model(config))  # type: ignore[arg-type]


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(RequestError, match=r"needs a C\+\+ compiler.*CXX.*--compile"):
        CompiledSteps(model_of())


@pytest.mark.unhooked
@pytest.mark.compiles
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Seq2Seq.compute_step

    def fails(self: Seq2Seq, prepared: Any, logits: bool) -> Tensor:
        torch._dynamo.graph_break()  # does nothing where nothing is compiled
        return compute(self, prepared)

    monkeypatch.setattr(Seq2Seq, "compute_step", fails)
    with pytest.raises(RequestError, match=r"could not compile the model's step: .*\. Leave out --compile"):
        found(CompiledSteps(model_of()), [5, 5], num_beams=1)


def test_guards_of_what_is_given_are_kept() -> None:
    from types import SimpleNamespace as Guard

    guards = [
        Guard(is_global=False, name="prepared.x"),
        Guard(is_global=False, name=""),
        Guard(is_global=True, name="G['model']"),
        Guard(is_global=False, name="model._modules['body']"),
    ]
    assert model_runner._of_what_is_given(guards) == [True, True, False, False]
