"""Several language models as one: against averages by hand, over whole forward passes of each model in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.catalogue import build_model
from manyheads.data.store import TokenStore
from manyheads.decoding.generation import PrefixCache
from manyheads.decoding.generator import Generator
from manyheads.decoding.model_runner import inference
from manyheads.decoding.settings import GenerationSettings
from manyheads.errors import ConfigError, RequestError
from manyheads.evaluation.likelihood import EnsembleReading, evaluate_text, token_losses
from manyheads.evaluation.reading import Reading
from manyheads.extras.inspect.attending import shapes_of, text_views
from manyheads.models.composites import LanguageModel
from manyheads.models.ensemble import NO_MEMORY, LanguageEnsemble
from manyheads.models.pretrained import save_pretrained
from manyheads.models.protocols import PreparesSteps
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.seeding import derive_seed
from manyheads.tasks.language_modelling.score import score_texts
from manyheads.text.of_folder import learn_vocabulary
from manyheads.text.settings import VocabularySettings
from manyheads.text.vocabulary import ByteVocabulary

XL = TransformerXLConfig(vocab_size=256, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=60, dropout=0.0)
PROMPTS = ["", "a", "It is a truth", "x" * 9]
TEXT = b"It is a truth universally acknowledged"


def model_of(config: Any = XL, seed: int = 0, **changes: Any) -> LanguageModel:
    """A model in float64, sure enough of itself that models disagree."""
    torch.manual_seed(seed)
    model = cast(LanguageModel, build_model(replace(config, **changes))).double().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data * 6 if parameter.any() else torch.randn_like(parameter)  # biases begin at zero
    return model


def reformer_of(seed: int = 0, **changes: Any) -> LanguageModel:
    config: ReformerConfig = replace(REFORMERS["debug"], vocab_size=256, dropout=0.0, attention_dropout=0.0)
    return model_of(config, seed, **changes)


def unlike() -> list[LanguageModel]:
    """Relative attention in two sizes, one with an adaptive softmax; absolute positions without memory; a Reformer."""
    small = model_of(seed=2, d_model=12, num_layers=1, memory_len=55, cutoffs=(40, 90), div_value=2)
    return [model_of(seed=1), small, model_of(seed=3, attention="absolute", memory_len=0), reformer_of(4)]


@torch.no_grad()
def next_probabilities(model: LanguageModel, ids: Sequence[int]) -> list[float]:
    """Of one model, after a pass over all ids without any state."""
    log_probs = model.log_probs(torch.tensor([list(ids)]))[0, -1]
    assert log_probs.dtype == torch.float64
    return log_probs.exp().tolist()


def by_hand(models: Sequence[LanguageModel], ids: Sequence[int]) -> list[float]:
    """The means, number by number."""
    columns = zip(*(next_probabilities(model, ids) for model in models), strict=True)
    return [sum(column) / len(models) for column in columns]


def written_by_hand(models: Sequence[LanguageModel], prompt: list[int], count: int, random: Any) -> Any:
    """Ids and log-probabilities. random: draws at temperature 0.8; None: the most probable token."""
    ids, log_probs = list(prompt), []
    for _ in range(count):
        means = by_hand(models, ids)
        token = max(range(len(means)), key=means.__getitem__)
        if random is not None:
            weights = [mean ** (1 / 0.8) for mean in means]
            reached, wanted = 0.0, float(np.float32(random.random())) * sum(weights)
            token = next(index for index, weight in enumerate(weights) if (reached := reached + weight) > wanted)
        ids.append(token)
        log_probs.append(math.log(means[token]))
    return ids[len(prompt) :], log_probs


def generator_of(models: Sequence[LanguageModel], documents: Any = "none") -> Generator:
    settings = GenerationSettings(max_new_tokens=7, temperature=0.8, seed=5)
    return Generator(LanguageEnsemble(models), ByteVocabulary(documents), settings, "cpu")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at_once", [512, 4])
@pytest.mark.parametrize("do_sample", [False, True])
def test_generation_is_that_of_averages_by_hand(do_sample: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.decoding.generation.READ_AT_ONCE", at_once)
    models = unlike()
    generator, paths = generator_of(models), 2 if do_sample else 1
    found = generator.continuations(PROMPTS, do_sample=do_sample, num_return_sequences=paths)
    for number, (prompt, rows) in enumerate(zip(generator.encode_prompts(PROMPTS), found, strict=True)):
        for path, row in enumerate(rows):
            random = np.random.default_rng(derive_seed(5, "sample", number, path)) if do_sample else None
            ids, log_probs = written_by_hand(models, prompt, 7, random)
            assert row.ids == ids
            assert row.log_probs == pytest.approx(log_probs, abs=1e-6)
    for model in models:
        alone = Generator(model, ByteVocabulary(), generator.settings, "cpu")
        alone_found = alone.continuations(PROMPTS, do_sample=do_sample, num_return_sequences=paths)
        assert [row.ids for rows in alone_found for row in rows] != [row.ids for rows in found for row in rows]


@torch.no_grad()
def probabilities(model: LanguageModel, ids: Sequence[int]) -> list[float]:
    """Of each id but the first, of one model that reads all of them at once."""
    log_probs = model.log_probs(torch.tensor([list(ids[:-1])]))[0]
    return log_probs.exp().gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist()


def mean_log(each: Sequence[Sequence[float]]) -> list[float]:
    return [math.log(sum(column) / len(each)) for column in zip(*each, strict=True)]


@pytest.mark.parametrize("at_once", [512, 5])
def test_texts_are_scored_by_averages_by_hand(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.tasks.language_modelling.score.READ_AT_ONCE", at_once)
    models, texts = unlike(), ["It is a truth", "", "a", "Zürich, ein Anfang"]
    if at_once == 5:
        del models[2]  # its positions count from the last token that is read with others
    generator = generator_of(models)
    for text, scored in zip(texts, score_texts(generator, texts), strict=True):
        ids = [generator.vocabulary.start_id, *text.encode()]
        wanted = mean_log([probabilities(model, ids) for model in models]) if text else []
        assert scored.token_log_probs == pytest.approx(wanted, abs=1e-5)


def test_a_text_is_evaluated_by_averages_by_hand() -> None:
    """A memory over everything is the whole text read at once; models without memory see the segment only.

    The second memory has its own length. If it stayed empty, the figure would be another one.
    """
    models, segment_len = unlike(), 6
    others = (Reading(), Reading(memory_len=0), Reading())
    reading = EnsembleReading(segment_len=segment_len, lanes=1, others=others)
    model, store = LanguageEnsemble(models), TokenStore.from_lists([list(TEXT)], 256)
    segments = [TEXT[begin : begin + segment_len + 1] for begin in range(0, len(TEXT) - 1, segment_len)]
    whole = [probabilities(one, TEXT) for one in models]
    parts = [[value for part in segments for value in probabilities(one, part)] for one in models]
    found = evaluate_text(model, store, reading, ByteVocabulary())
    assert found.num_tokens == len(TEXT) - 1
    wanted = -sum(mean_log([whole[0], whole[1], parts[2], parts[3]]))
    assert found.nll_sum == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted + sum(mean_log([whole[0], parts[1], parts[2], parts[3]]))) > 1e-3
    assert np.nansum(token_losses(model, store, reading, ByteVocabulary())) == pytest.approx(wanted, abs=1e-6)


@torch.no_grad()
def read_alone(model: LanguageModel, rows: Tensor, segment_len: int, attending: Any) -> Tensor:
    """Probabilities of each next token of one model with its own memory."""
    state, found = model.start(len(rows), attending), []
    for segment in rows[:, :-1].split(segment_len, dim=1):
        log_probs, state = model.read(segment, None, state)
        found.append(log_probs.exp())
    return torch.cat(found, dim=1).gather(2, rows[:, 1:, None])[:, :, 0]


def test_every_model_has_its_own_memory_in_every_lane() -> None:
    """Of unlike lengths, which are shorter than the text."""
    models = [model_of(seed=1, memory_len=5), model_of(seed=2, memory_len=9, clamp_len=4), model_of(seed=3)]
    rows = torch.tensor([list(TEXT[:19]), list(TEXT[18:37])])
    reading = EnsembleReading(segment_len=4, lanes=2, others=(Reading(), Reading(memory_len=2, same_length=True)))
    own = [replace(cast(Any, models[2]).config.attending, memory_len=2, same_length=True)]
    settings = [model.config.attending for model in models[:2]] + own
    each = [read_alone(model, rows, 4, one) for model, one in zip(models, settings, strict=True)]
    wanted = -torch.stack(each).mean(0).log().sum().item()
    store = TokenStore.from_lists([list(TEXT[:37])], 256)
    found = evaluate_text(LanguageEnsemble(models), store, reading, ByteVocabulary())
    assert found.num_tokens == 36
    assert found.nll_sum == pytest.approx(wanted, abs=1e-6)


def test_memories_end_with_documents() -> None:
    vocabulary, documents = ByteVocabulary("files"), [[*b"It is a truth", 256], [*b"universally", 256]]
    models = [model_of(seed=1, vocab_size=257), model_of(seed=2, vocab_size=257, memory_len=20)]
    reading = EnsembleReading(segment_len=4, lanes=1, documents="separate", others=(Reading(),))
    store = TokenStore.from_lists(documents, 257)
    found = evaluate_text(LanguageEnsemble(models), store, reading, vocabulary)
    wanted = 0.0
    for document in documents:
        wanted -= sum(mean_log([probabilities(model, [256, *document]) for model in models]))
    assert found.num_tokens == sum(map(len, documents))
    assert found.nll_sum == pytest.approx(wanted, abs=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [model_of, reformer_of])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_twice_is_the_model(make: Any, dtype: torch.dtype) -> None:
    """What it writes and how it scores is equal bit for bit."""
    model = make().to(dtype)
    alone, twice = Generator(model, ByteVocabulary(), device="cpu"), generator_of([model, model])
    for options in ({"do_sample": False}, {"num_return_sequences": 3}):
        written = alone.continuations(PROMPTS, max_new_tokens=12, **cast(Any, options))
        assert written == twice.continuations(PROMPTS, max_new_tokens=12, temperature=1.0, seed=0, **cast(Any, options))
    assert score_texts(alone, PROMPTS) == score_texts(twice, PROMPTS)
    store, reading = TokenStore.from_lists([list(TEXT)], 256), Reading(segment_len=5, lanes=2)
    single = evaluate_text(model, store, reading, ByteVocabulary())
    both = EnsembleReading(segment_len=5, lanes=2, others=(reading,))
    double = evaluate_text(twice.model, store, both, ByteVocabulary())
    assert double.num_tokens == single.num_tokens
    assert double.nll_sum == pytest.approx(single.nll_sum, rel=1e-6)


def test_what_it_is_and_its_limits() -> None:
    plain = LanguageEnsemble([model_of(), model_of(seed=1)])
    assert isinstance(plain, PreparesSteps)
    assert plain.prepares_steps
    assert plain.max_len is None
    mixed = LanguageEnsemble([model_of(), reformer_of(), reformer_of(max_len=32)])
    assert mixed.max_len == 32
    assert not mixed.prepares_steps
    assert (mixed.config.vocab_size, mixed.config.architecture) == (256, "ensemble")
    assert Generator(mixed, ByteVocabulary(), device="cpu").most_new_tokens(30, GenerationSettings()) == 3
    with pytest.raises(ConfigError, match="at least one model"):
        LanguageEnsemble([])
    with pytest.raises(ConfigError, match="model 2 of the ensemble has 300 ids, but model 1 has 256"):
        LanguageEnsemble([model_of(), model_of(vocab_size=300)])


def test_the_state_is_a_pytree_that_branches() -> None:
    model = LanguageEnsemble(unlike())
    with torch.no_grad():
        attending = tuple(getattr(config, "attending", None) for config in model.config.each)
        _, state = model.step(torch.tensor([[1, 2], [3, 4]]), model.start(2, attending))
        leaves, spec = pytree.tree_flatten(state)
        assert leaves
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        branch, again = state.clone(), pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        exchanged = state.clone().reorder(torch.tensor([1, 0]))
        first, _ = model.step(torch.tensor([[4], [5]]), state)
        assert torch.equal(first, model.step(torch.tensor([[4], [5]]), branch)[0])
        assert torch.equal(first, model.step(torch.tensor([[4], [5]]), again)[0])
        torch.testing.assert_close(first.flip(0), model.step(torch.tensor([[5], [4]]), exchanged)[0])


def test_states_of_training_and_none() -> None:
    """Without a state every model begins empty and gives its next one, except one that is to have no memory."""
    models = [model_of(seed=1), model_of(seed=2)]
    model, tokens = LanguageEnsemble(models), torch.tensor([list(TEXT[:12])])
    with torch.no_grad():
        whole = model.log_probs(tokens)
        _, state = model.read(tokens[:, :5])
        torch.testing.assert_close(model.read(tokens[:, 5:], None, state)[0], whole[:, 5:])
        started = model.start(1, (models[0].config.attending, NO_MEMORY))
        _, state = model.read(tokens[:, :5], None, started)
        assert state.each[1] is None
        found, state = model.read(tokens[:, 5:], None, state)
        assert state.each[1] is None
        each = [models[0].log_probs(tokens)[:, 5:], models[1].log_probs(tokens[:, 5:])]
    torch.testing.assert_close(found.exp(), torch.stack(each).exp().mean(0))


def test_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.decoding.generation.READ_AT_ONCE", 4)
    generator, cache = generator_of(unlike()), PrefixCache(1 << 24, 4)
    settings, [prompt] = generator.options(), generator.encode_prompts(["It is a truth"])
    runs = [list(generator.steps([prompt], settings, cache=cache)) for _ in range(2)]
    ended = [tokens[-1].ended for new in runs if (tokens := new[-1])]
    assert cache.num_bytes
    assert len(runs[1]) < len(runs[0])  # parts of the prompt were not read again
    assert ended[0].ids == ended[1].ids == generator.continuations(["It is a truth"])[0][0].ids
    assert ended[0].log_probs == pytest.approx(ended[1].log_probs, abs=1e-9)


# Model folders with a vocabulary.


def save(folder: Path, vocabulary: Any, model: LanguageModel) -> Path:
    settings = GenerationSettings(max_new_tokens=6)
    save_pretrained(model.float(), folder, tokenizer=vocabulary, generation=settings)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("ensemble")
    models = [model_of(seed=1), model_of(seed=2, d_model=12, memory_len=9), reformer_of(3)]
    return [save(root / str(number), ByteVocabulary(), model) for number, model in enumerate(models)]


def test_loaded_from_folders(folders: list[Path]) -> None:
    generator = Generator.from_pretrained(folders, "cpu")
    singles = [Generator.from_pretrained(folder, "cpu") for folder in folders]
    assert isinstance(generator.model, LanguageEnsemble)
    assert generator.settings == singles[0].settings
    assert repr(generator) == "Generator(ensemble, bytes, 256 ids, cpu, fp32)"
    made = Generator(
        LanguageEnsemble([one.single_model for one in singles]), generator.vocabulary, generator.settings, "cpu"
    )
    assert generator.continuations(PROMPTS) == made.continuations(PROMPTS)
    assert generator.generate(PROMPTS) != singles[0].generate(PROMPTS)
    assert "".join(generator.stream("It is")) == generator.generate("It is")
    assert generator.continue_ids([b"It is"]) == generator.continuations(["It is"])
    for paths in (folders[:1], [folders[0], folders[0]]):
        assert Generator.from_pretrained(paths, "cpu").continuations(PROMPTS) == singles[0].continuations(PROMPTS)
    assert isinstance(Generator.from_pretrained(folders[:1], "cpu").model, LanguageModel)


def test_folders_that_cannot_be_averaged(folders: list[Path], tmp_path: Path) -> None:
    settings = [VocabularySettings(level="words", lowercase=lowercase) for lowercase in (False, True)]
    words, lower = (learn_vocabulary(["the cat sees the dog"], one) for one in settings)
    unlike_words = learn_vocabulary(["the cow sees the dog"], settings[0])
    pieces = learn_vocabulary(["the cat sees the dog"] * 3, VocabularySettings(level="bpe", vocab_size=300))
    more = learn_vocabulary(["the cat sees the big dog"], settings[0])
    others = {
        "documents": (ByteVocabulary("files"), "has documents files, but that of .* has documents none, so their"),
        "pieces": (pieces, "has level bpe, but that of .* has level bytes"),
    }
    for name, (vocabulary, message) in others.items():
        other = save(tmp_path / name, vocabulary, model_of(vocab_size=vocabulary.vocab_size))
        with pytest.raises(ConfigError, match=f"{name} {message}"):
            Generator.from_pretrained([folders[0], other], "cpu")
    first = save(tmp_path / "words", words, model_of(vocab_size=words.vocab_size))
    named = {
        "more": (more, f"has {more.vocab_size} ids, but that of .*words has {words.vocab_size}, so"),
        "cow": (unlike_words, "has 'c.w' as id [0-9]+, but that of .*words has 'cat'"),
        "lower": (lower, r"has other settings \([0-9a-f]{12}\), but that of .*words has the settings [0-9a-f]{12}"),
    }
    for name, (vocabulary, message) in named.items():
        other = save(tmp_path / name, vocabulary, model_of(vocab_size=vocabulary.vocab_size))
        with pytest.raises(ConfigError, match=message):
            Generator.from_pretrained([first, other], "cpu")
    padded = save(tmp_path / "padded", ByteVocabulary(), model_of(vocab_size=260))
    with pytest.raises(ConfigError, match="model 2 of the ensemble has 260 ids, but model 1 has 256"):
        Generator.from_pretrained([folders[0], padded], "cpu")
    with pytest.raises(ConfigError, match="list of paths is empty"):
        Generator.from_pretrained([], "cpu")


def test_what_an_ensemble_cannot_do(folders: list[Path], tmp_path: Path) -> None:
    generator = Generator.from_pretrained(folders, "cpu")
    for call in (
        lambda: generator.save_pretrained(tmp_path / "saved"),
        lambda: text_views(generator, "It is"),
        lambda: shapes_of(generator, "It is"),
    ):
        with pytest.raises(RequestError, match="this needs one model, but 3 are averaged; load one of them"):
            call()
    with pytest.raises(RequestError, match="steps of this ensemble cannot be compiled"):
        Generator.from_pretrained(folders, "cpu", compile_steps=True)
    for call in (lambda: generator("It is", memory_len=8), lambda: generator("It is" * 30)):
        with pytest.raises(RequestError, match=r"but a reformer sees all that it has read|the model has 64 positions"):
            call()
    store, reading = TokenStore.from_lists([list(TEXT)], 256), EnsembleReading(ext_len=3, others=(Reading(),) * 2)
    with pytest.raises(ConfigError, match="ext_len is 3, but a reformer has no memory"):
        evaluate_text(generator.model, store, reading, generator.vocabulary)
    assert Generator.from_pretrained(folders[:2], "cpu")("It is", memory_len=8)


def test_a_wrong_precision_is_found_before_weights_are_read(folders, monkeypatch):
    monkeypatch.setattr("manyheads.decoding.generator.load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(RequestError, match="precision is 'fp8'"):
        Generator.from_pretrained(folders[0], "cpu", cast(Any, "fp8"))
    with pytest.raises(RequestError, match="device 'gpu' is unknown"):
        Generator.from_pretrained(folders[0], "gpu")


def test_bf16_and_moving(folders: list[Path]) -> None:
    generator = Generator.from_pretrained(folders, "cpu", "bf16").to("cpu")
    model = cast(LanguageEnsemble, generator.model)
    assert {parameter.dtype for parameter in cast(Any, model.models[1]).head.parameters()} == {torch.bfloat16}
    with inference(generator.device, "bf16"):
        log_probs, _ = model.step(torch.tensor([[65, 66]]), model.start(1))
    assert log_probs.dtype == torch.float32
    [near], [exact] = (score_texts(one, ["It is"]) for one in (generator, Generator.from_pretrained(folders, "cpu")))
    assert near.sum_log_prob == pytest.approx(exact.sum_log_prob, rel=0.1)
