"""The repetition penalty acts on logits, as in transformers and vLLM; in a beam on log-probabilities, as there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.decoding.generator import Generator
from manyheads.decoding.greedy_and_sampling import Repetition
from manyheads.decoding.search import search_all
from manyheads.decoding.search_problem import Constraints
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.models.composites import LanguageModel, Seq2Seq
from manyheads.models.ensemble import Ensemble, LanguageEnsemble
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.vocabulary import ByteVocabulary

IDS: Any = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
SOURCES = [[3, 9, 4, 2], [7, 7, 2], [5, 11, 6, 3, 8, 2]]
PENALTIES = (0.7, 1.2, 2.0, 50.0)


def oracle(penalty: float) -> Any:
    processors = pytest.importorskip("transformers.generation.logits_process")
    return processors.RepetitionPenaltyLogitsProcessor(penalty)


def sharp(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    return model.eval()


def language_model(seed: int = 3, **changes: Any) -> LanguageModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_layers": 1, "memory_len": 64}
    model: LanguageModel = sharp(build_model(TransformerXLConfig(**{**sizes, **changes})))
    return model


def translation_model(seed: int = 3) -> Seq2Seq:
    torch.manual_seed(seed)
    sizes = {"source_vocab_size": 13, "target_vocab_size": 13, "d_model": 16, "num_heads": 2, "d_ff": 32}
    model: Seq2Seq = sharp(build_model(TransformerConfig(**sizes, num_encoder_layers=1, num_decoder_layers=1)))
    return model


@pytest.mark.parametrize(("penalty", "expected"), [(1.2, 0.954), (2.0, 0.122), (50.0, 0.0001)])
def test_a_sure_token_becomes_less_probable(penalty: float, expected: float) -> None:
    repetition = Repetition([[0]], 4, penalty=penalty, ngram_size=0, device=torch.device("cpu"))
    probs = repetition.apply(torch.tensor([[15.0, 9.0, 8.5, 1.0]])).softmax(-1)
    assert float(probs[0, 0]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_logits_change_as_in_transformers(penalty: float) -> None:
    torch.manual_seed(1)
    logits, history = 5 * torch.randn(4, 30), torch.randint(3, 30, (4, 9))
    expected = oracle(penalty)(history, logits.clone())
    repetition = Repetition(history.tolist(), 30, penalty=penalty, ngram_size=0, device=torch.device("cpu"))
    torch.testing.assert_close(repetition.apply(logits), expected)
    normaliser = logits.logsumexp(-1, keepdim=True)
    settings = DecodingSettings(num_beams=1, repetition_penalty=penalty)
    constraints = Constraints(settings, **IDS, device=torch.device("cpu"))
    assert constraints.wants_logits
    found = constraints.apply(logits - normaliser, history, 9, None, normaliser) + normaliser
    torch.testing.assert_close(found[:, 2:], expected[:, 2:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_log_probabilities_of_beams_change_as_in_transformers(penalty: float) -> None:
    torch.manual_seed(1)
    log_probs, history = (5 * torch.randn(4, 30)).log_softmax(-1), torch.randint(3, 30, (4, 9))
    expected = oracle(penalty)(history, log_probs.clone())
    constraints = Constraints(DecodingSettings(repetition_penalty=penalty), **IDS, device=torch.device("cpu"))
    assert not constraints.wants_logits
    torch.testing.assert_close(constraints.apply(log_probs, history, 9)[:, 2:], expected[:, 2:])


def greedy_by_hand(next_logits: Any, ids: list[int], count: int, penalty: float, num_read: int = 0) -> list[int]:
    """The tokens after `ids`, computed from nothing for each. num_read: first tokens that are not penalised."""
    process, ids = oracle(penalty), list(ids)
    for _ in range(count):
        logits = next_logits(torch.tensor([ids]))
        ids.append(int(process(torch.tensor([ids[num_read:]]), logits)[0].argmax()))
    return ids


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"cutoffs": (40, 90), "div_value": 2}])
@pytest.mark.parametrize("penalty", [3.0, 6.0])
def test_greedy_continuations_are_those_of_transformers(penalty: float, changes: dict[str, Any]) -> None:
    model = language_model(**changes)
    generator = Generator(model, ByteVocabulary(), GenerationSettings(do_sample=False, max_new_tokens=20), "cpu")

    def next_logits(ids: Tensor) -> Tensor:
        return model.head.logits(model.body(ids, None, model.start(1, None))[0][:, -1])

    [[plain]] = generator.continuations(["aab"])
    [[found]] = generator.continuations(["aab"], repetition_penalty=penalty)
    expected = greedy_by_hand(next_logits, [10, *b"aab"], 20, penalty, num_read=1)
    assert [10, *b"aab", *found.ids] == expected
    assert found.ids != plain.ids
    read = torch.tensor([expected])
    log_probs = model.log_probs(read, None, model.start(1, None))[0, 3:-1].gather(1, read[0, 4:, None])[:, 0]
    assert found.log_probs == pytest.approx(log_probs.tolist(), abs=1e-3)  # the model's own, before the penalty
    twice = Generator(LanguageEnsemble([model, model]), ByteVocabulary(), generator.settings, "cpu")
    assert twice.continuations(["aab"], repetition_penalty=penalty)[0][0].ids == found.ids


@torch.no_grad()
@pytest.mark.parametrize("penalty", [3.0, 6.0])
def test_greedy_translations_are_those_of_transformers(penalty: float) -> None:
    model = translation_model()
    settings = DecodingSettings(num_beams=1, max_new_tokens=8, repetition_penalty=penalty, min_new_tokens=8)
    found = search_all(model, SOURCES, settings, **IDS)
    for source, [hypothesis] in zip(SOURCES, found, strict=True):

        def next_logits(ids: Tensor, source: list[int] = source) -> Tensor:
            logits = model.head.logits(model.body(torch.tensor([source]), torch.tensor([len(source)]), ids)[:, -1])
            logits[:, :3] = -1e9  # padding, BOS, and EOS before the minimum
            return logits

        assert [1, *hypothesis.ids] == greedy_by_hand(next_logits, [1], len(hypothesis.ids), penalty)
    twice = search_all(Ensemble([model, model]), SOURCES, settings, **IDS)
    assert [row[0].ids for row in twice] == [row[0].ids for row in found]
    plain = search_all(model, SOURCES, DecodingSettings(num_beams=1, max_new_tokens=8, min_new_tokens=8), **IDS)
    assert [row[0].ids for row in plain] != [row[0].ids for row in found]


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"cutoffs": (40, 90)}, {"cutoffs": (40, 90), "div_value": 2}])
def test_logits_have_the_probabilities_as_softmax(changes: dict[str, Any]) -> None:
    models = [language_model(seed, **changes) for seed in (1, 2)]
    tokens = torch.tensor([[5, 7, 9], [8, 8, 1]])
    for model in (models[0], LanguageEnsemble(models)):
        log_probs, _ = model.step(tokens, model.start(2))
        logits, _ = model.step(tokens, model.start(2), logits=True)
        torch.testing.assert_close(logits.log_softmax(-1), log_probs, atol=1e-4, rtol=1e-4)
        assert (logits.logsumexp(-1).abs() > 0.1).all(), "they are not normalised"
