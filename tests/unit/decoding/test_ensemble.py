"""Several translation models as one: the search against averages by hand, over whole forward passes in float64."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from naive_search import naive_beam_search
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.data.batch import PairBatch
from manyheads.decoding.model_runner import inference
from manyheads.decoding.search import search_all
from manyheads.decoding.search_problem import BeamRules
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, RequestError
from manyheads.evaluation.likelihood import evaluate_likelihood
from manyheads.extras.documents.placing import align
from manyheads.extras.inspect.attending import translation_views
from manyheads.extras.parsing.parser import Parser
from manyheads.models.composites import Seq2Seq
from manyheads.models.ensemble import Ensemble, mean_log_probs
from manyheads.models.pretrained import save_pretrained
from manyheads.models.protocols import PreparesSteps, Restrictable, Scorable, Searchable
from manyheads.tasks.translation.score import likelihood_of
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

SPECIAL: dict[str, Any] = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
VOCAB = 7
SOURCES = [[5, 4, 6, 2], [3, 2], [6, 6, 3, 2], [4, 5, 3, 4, 6, 2]]


def model_of(name: str = "transformer", seed: int = 0, vocab: int = VOCAB, **changes: Any) -> Seq2Seq:
    """A model of debug size in float64, sure enough of itself that models disagree."""
    torch.manual_seed(seed)
    config = ARCHITECTURES[name].presets["debug"]
    changes = {"source_vocab_size": vocab, "target_vocab_size": vocab, "tie_embeddings": "none", **changes}
    config = replace(cast(Any, config), **changes)
    model = cast(Seq2Seq, build_model(config)).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return model


def three_unlike() -> list[Seq2Seq]:
    """Of two architectures and three sizes."""
    return [model_of(seed=1), model_of(seed=2, num_decoder_layers=1, d_ff=24), model_of("reformer-seq2seq", seed=3)]


def by_hand(models: list[Seq2Seq], source: list[int]) -> Callable[[list[int]], list[float]]:
    """Averages probabilities number by number, after a forward pass of each model over the whole prefix."""

    @torch.no_grad()
    def compute(target: list[int]) -> list[float]:
        lengths = torch.tensor([len(source)])
        rows = [model.log_probs(torch.tensor([source]), lengths, torch.tensor([target]))[0, -1] for model in models]
        assert all(row.dtype == torch.float64 for row in rows)
        columns = zip(*(row.tolist() for row in rows), strict=True)
        return [math.log(sum(map(math.exp, column)) / len(models)) for column in columns]

    return compute


def searched(model: Any, sources: list[list[int]], **options: Any) -> Any:
    with torch.inference_mode():
        return search_all(model, sources, DecodingSettings(**options), **SPECIAL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 3}], ids=str)
def test_searches_are_those_of_averages_by_hand(options: dict[str, Any]) -> None:
    models = three_unlike()
    found = searched(Ensemble(models), SOURCES, max_new_tokens=7, **options)
    settings = DecodingSettings(max_new_tokens=7, **options)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        wanted = naive_beam_search(by_hand(models, source), settings, limit=7, **SPECIAL)
        assert [one.ids for one in hypotheses] == [one.ids for one in wanted]
        for one, other in zip(hypotheses, wanted, strict=True):
            assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-6)
            assert one.score == pytest.approx(other.score, abs=1e-5)
    alone = [searched(model, SOURCES, max_new_tokens=7, **options) for model in models]
    assert all([one[0].ids for one in found] != [one[0].ids for one in other] for other in alone)


def test_a_beam_of_everything_finds_the_best_of_all_outputs() -> None:
    """Three words, at most three of them and EOS: all 40 outputs are scored by hand."""
    models, limit = [model_of(seed=4, vocab=6), model_of("reformer-seq2seq", seed=5, vocab=6)], 4
    settings = DecodingSettings(num_beams=120, num_return_sequences=40, max_new_tokens=limit)
    source = [4, 3, 5, 2]
    scores: dict[tuple[int, ...], float] = {}
    next_log_probs = by_hand(models, source)
    for length in range(limit):
        for ids in itertools.product((3, 4, 5), repeat=length):
            total = sum(
                next_log_probs([1, *ids[:place]])[token] for place, token in enumerate((*ids, SPECIAL["eos_id"]))
            )
            scores[ids] = total / BeamRules(settings).penalty(length + 1)
    [found] = searched(Ensemble(models), [source], **vars(settings))
    assert len(found) == len(scores) == 40
    ranked = sorted(scores, key=lambda ids: -scores[ids])
    assert [tuple(one.ids) for one in found] == ranked
    assert [one.score for one in found] == pytest.approx([scores[ids] for ids in ranked], abs=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["transformer", "reformer-seq2seq"])
@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 4}, {"num_beams": 1, "do_sample": True}], ids=str)
def test_a_model_twice_is_the_model(name: str, options: dict[str, Any]) -> None:
    """Also in float32, where its numbers are equal bit for bit."""
    for model in (model_of(name), model_of(name).float()):
        found = searched(Ensemble([model, model]), SOURCES, **options)
        assert found == searched(model, SOURCES, **options)


def test_the_mean_is_exact_where_values_are_equal_or_infinite() -> None:
    values = torch.randn(3, 50) * 30
    assert torch.equal(mean_log_probs([values] * 3), values)
    none = torch.full((4,), -torch.inf)
    assert torch.equal(mean_log_probs([none, none]), none)
    half = mean_log_probs([torch.zeros(4), none])
    torch.testing.assert_close(half, torch.full((4,), -math.log(2)))
    far = mean_log_probs([torch.tensor([-1e4, -2e4]), torch.tensor([-1.1e4, -2e4])])  # every exp of these is 0
    torch.testing.assert_close(far, torch.tensor([-1e4 - math.log(2), -2e4]))
    assert mean_log_probs([torch.tensor([math.nan]), torch.zeros(1)]).isnan().all()


def test_what_it_is_and_its_limit() -> None:
    plain = Ensemble([model_of(), model_of(seed=1)])
    for protocol in (Searchable, Scorable, Restrictable, PreparesSteps):
        assert isinstance(plain, protocol)
    assert plain.prepares_steps
    assert not Ensemble(three_unlike()).prepares_steps
    assert plain.max_len is None
    learned = [model_of(positions="learned", max_len=count) for count in (30, 20)]
    assert Ensemble([model_of(), *learned]).max_len == 20
    with pytest.raises(ConfigError, match="at least one model"):
        Ensemble([])
    with pytest.raises(ConfigError, match="model 2 of the ensemble has 9 source and 9 target ids, but model 1 has 7"):
        Ensemble([model_of(), model_of(vocab=9)])


def test_the_state_is_a_pytree_that_branches() -> None:
    model = Ensemble(three_unlike())
    source, lengths = torch.tensor([SOURCES[0], [3, 2, 0, 0]]), torch.tensor([4, 2])
    with torch.no_grad():
        _, state = model.step(torch.tensor([[1], [1]]), model.start(source, lengths))
        leaves, spec = pytree.tree_flatten(state)
        assert leaves
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        branch, again = state.clone(), pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        tokens = torch.tensor([[4], [5]])
        first, _ = model.step(tokens, state)
        assert torch.equal(first, model.step(tokens, branch)[0])
        assert torch.equal(first, model.step(tokens, again)[0])


def test_a_clone_without_padding_is_a_branch() -> None:
    model = Ensemble(three_unlike())
    with torch.no_grad():
        _, state = model.step(torch.tensor([[1]]), model.start(torch.tensor([SOURCES[0]]), torch.tensor([4])))
        branch = state.clone()
        first, _ = model.step(torch.tensor([[4]]), state)
        assert torch.equal(first, model.step(torch.tensor([[4]]), branch)[0])


def batch_of() -> PairBatch:
    targets = torch.tensor([[1, 4, 5, 3, 2], [1, 6, 2, 0, 0]])
    return PairBatch(
        source=torch.tensor([[5, 4, 6, 2], [3, 2, 0, 0]]),
        source_lengths=torch.tensor([4, 2]),
        target=targets,
        target_lengths=torch.tensor([5, 3]),
        sample_ids=torch.arange(2),
    )


def test_the_likelihood_is_that_of_the_averages() -> None:
    models, batch = three_unlike(), batch_of()
    total = 0.0
    for source, target in (([5, 4, 6, 2], [4, 5, 3, 2]), ([3, 2], [6, 2])):
        next_log_probs = by_hand(models, source)
        total -= sum(next_log_probs([1, *target[:place]])[token] for place, token in enumerate(target))
    likelihood = evaluate_likelihood(Ensemble(models), [batch])
    assert likelihood.num_tokens == 6
    assert likelihood.nll_sum == pytest.approx(total, abs=1e-6)


def test_restricted_models_are_averaged() -> None:
    """Each is normalised over the candidates, so the average is, too."""
    models, ids = three_unlike(), torch.tensor([0, 1, 2, 4, 6])
    source, lengths = torch.tensor([SOURCES[0]]), torch.tensor([4])
    ensemble = Ensemble(models).restricted(ids)
    with torch.no_grad():
        found, _ = ensemble.step(torch.tensor([[1, 3]]), ensemble.start(source, lengths))  # 3 stands for 4
        each = [model.log_probs(source, lengths, torch.tensor([[1, 4]]))[0, -1, ids].exp() for model in models]
    wanted = torch.stack([one / one.sum() for one in each]).mean(0)
    torch.testing.assert_close(found[0].exp(), wanted, atol=1e-9, rtol=0)
    assert ensemble.max_len == Ensemble(models).max_len


# Model folders with a tokenizer.

TEXTS = ["the cat sees a dog", "a dog", "", "the dog sees you and you"]
WORDS = ["the cat sees a dog and you"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(WORDS, TokenizerSettings(kind="word", vocab_size=11))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> list[Path]:
    made = []
    for seed, name in enumerate(("transformer", "transformer", "reformer-seq2seq")):
        folder = tmp_path_factory.mktemp("ensemble") / f"{name}-{seed}"
        model = model_of(name, seed, tokenizer.vocab_size).float()
        settings = DecodingSettings(max_new_tokens=6 + seed, min_new_tokens=1, banned_ids=(tokenizer.unk_id,))
        save_pretrained(model, folder, tokenizer=tokenizer, generation=settings, languages=[("en", "de")])
        made.append(folder)
    return made


def test_loaded_from_folders(folders: list[Path]) -> None:
    translator = Translator.from_pretrained(folders, "cpu")
    singles = [Translator.from_pretrained(folder, "cpu") for folder in folders]
    assert isinstance(translator.model, Ensemble)
    assert translator.settings == singles[0].settings
    assert translator.languages == (("en", "de"),)
    assert repr(translator) == "Translator(Ensemble, en to de, 11 ids, cpu, fp32)"
    made = Translator(
        Ensemble([cast(Seq2Seq, one.model) for one in singles]), translator.tokenizer, translator.settings, "cpu"
    )
    assert translator.translate_nbest(TEXTS) == made.translate_nbest(TEXTS)
    assert translator.translate(TEXTS) != singles[0].translate(TEXTS)
    for one in (folders[:1], [folders[0], folders[0]]):
        assert Translator.from_pretrained(one, "cpu").translate_nbest(TEXTS) == singles[0].translate_nbest(TEXTS)
    assert not isinstance(Translator.from_pretrained(folders[:1], "cpu").model, Ensemble)


def test_scores_agree_with_the_search(folders: list[Path]) -> None:
    translator = Translator.from_pretrained(folders, "cpu")
    best = translator.translate_nbest("the cat sees a dog")[0]
    [scored] = translator.score(["the cat sees a dog"], [best.text])
    count = len(best.tokens)
    assert scored.token_log_probs[:count] == pytest.approx(best.token_log_probs, abs=1e-5)
    likelihood = likelihood_of(translator, [("the cat sees a dog", best.text)], translator.settings)
    assert likelihood.nll_sum == pytest.approx(-scored.sum_log_prob, abs=1e-5)


def test_folders_that_cannot_be_averaged(folders: list[Path], tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = Tokenizer.train(["cats and dogs see the cat you a"], TokenizerSettings(kind="word", vocab_size=11))
    save_pretrained(model_of(vocab=11).float(), tmp_path / "other", tokenizer=other)
    languages = [("de", "en")]
    save_pretrained(model_of(vocab=11).float(), tmp_path / "back", tokenizer=tokenizer, languages=languages)
    save_pretrained(model_of(vocab=11).float(), tmp_path / "unknown", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"other has another vocabulary \([0-9a-f]{12}\) than .*train the models"):
        Translator.from_pretrained([folders[0], tmp_path / "other"], "cpu")
    with pytest.raises(ConfigError, match=r"back translates de to en, but .* en to de"):
        Translator.from_pretrained([folders[0], tmp_path / "back"], "cpu")
    Translator.from_pretrained([folders[0], tmp_path / "unknown"], "cpu")
    with pytest.raises(ConfigError, match="list of paths is empty"):
        Translator.from_pretrained([], "cpu")
    for engine in ("ctranslate2", "auto"):
        with pytest.raises(RequestError, match=f"engine {engine} searches one model, but 2 are given"):
            Translator.from_pretrained(folders[:2], "cpu", engine=cast(Any, engine))
    with pytest.raises(RequestError, match="steps of this Ensemble cannot be compiled"):
        Translator.from_pretrained(folders, "cpu", compile_steps=True)
    with pytest.raises(RequestError, match="cannot parse"):
        Parser.from_pretrained(folders[:2], "cpu")


def test_what_looks_into_one_model(folders: list[Path], tmp_path: Path) -> None:
    translator = Translator.from_pretrained(folders[:2], "cpu")
    with pytest.raises(RequestError, match="save each of its models"):
        translator.save_pretrained(tmp_path / "saved")
    with pytest.raises(RequestError, match="attention of several models"):
        translation_views(translator, "a dog")
    single = Translator.from_pretrained(folders[0], "cpu")
    views = [translation_views(single, "the cat", target) for target in ("a dog", "a\ndog\r\n")]
    assert views[0][2].query_tokens == views[1][2].query_tokens  # a line break is a space
    assert align(translator, "the cat", "a dog") == align(single, "the cat", "a dog") != []


def test_a_wrong_precision_is_found_before_weights_are_read(folders, monkeypatch):
    monkeypatch.setattr("manyheads.decoding.translation_model.load", lambda *_, **__: pytest.fail("weights were read"))
    for given in (folders[0], folders):
        with pytest.raises(RequestError, match="precision is 'fp8'"):
            Translator.from_pretrained(given, "cpu", cast(Any, "fp8"))


def test_bf16_and_moving(folders: list[Path]) -> None:
    translator = Translator.from_pretrained(folders[:2], "cpu", "bf16").to("cpu")
    exact = Translator.from_pretrained(folders[:2], "cpu")
    model = cast(Ensemble, translator.model)
    assert {parameter.dtype for parameter in model.models[1].head.parameters()} == {torch.bfloat16}
    with inference(translator.device, "bf16"):
        lengths = torch.tensor([4])
        log_probs, _ = model.step(torch.tensor([[1]]), model.start(torch.tensor([SOURCES[0]]), lengths))
    assert log_probs.dtype == torch.float32
    near = exact.score(["a dog"], ["the cat"])[0].sum_log_prob
    assert translator.score(["a dog"], ["the cat"])[0].sum_log_prob == pytest.approx(near, rel=0.1)
