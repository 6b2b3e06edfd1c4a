"""Search with phrases that the output must contain, against all outputs of a tiny model."""

from itertools import product
from typing import Any

import pytest
import torch

from manyheads.decoding.inputs_and_results import SearchStopped
from manyheads.decoding.search_problem import BeamRules, SearchProblem
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.extras.constrained.forced import forced_search, translate_forced
from manyheads.text.settings import TokenizerSettings
from manyheads.text.sides import can_force
from manyheads.text.tokenizer import Tokenizer

PAD, BOS, EOS = 0, 1, 2
Phrases = list[tuple[int, ...]]


def problem_of(model: Any, sources: list[list[int]], limit: int, **changes: Any) -> SearchProblem:
    settings = DecodingSettings(**{"num_beams": 24, "length_penalty_kind": "none", **changes})
    lengths = torch.tensor([len(source) for source in sources])
    padded = torch.full((len(sources), int(lengths.max())), PAD)
    for row, source in enumerate(sources):
        padded[row, : len(source)] = torch.tensor(source)
    return SearchProblem(
        model=model,
        source=padded,
        source_lengths=lengths,
        limits=torch.full((len(sources),), limit),
        indices=range(len(sources)),
        settings=settings,
        pad_id=PAD,
        bos_id=BOS,
        eos_id=EOS,
        rules=BeamRules(settings),
    )


def contains(ids: list[int], phrase: tuple[int, ...]) -> bool:
    return any(tuple(ids[place : place + len(phrase)]) == phrase for place in range(len(ids)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("phrases", [[(4,)], [(5, 3)], [(3,), (4, 4)], [(6, 5, 4)], []])
def test_the_best_output_with_the_phrases_is_found(hash_model: Any, phrases: Phrases) -> None:
    model, limit = hash_model(seed=3), 5
    source = [3, 4, EOS]
    next_log_probs = model.next_log_probs(source)

    def log_prob(ids: tuple[int, ...]) -> float:
        return sum(next_log_probs([BOS, *ids[:place]])[token] for place, token in enumerate(ids))

    outputs = [(*ids, EOS) for length in range(limit) for ids in product(range(3, 7), repeat=length)]
    best = max((ids for ids in outputs if all(contains(list(ids), one) for one in phrases)), key=log_prob)
    [(found, met)] = forced_search(problem_of(model, [source], limit), [phrases])
    assert met == frozenset(range(len(phrases)))
    assert (*found.ids, EOS) == best
    assert found.ended
    assert found.score == pytest.approx(log_prob(best), abs=1e-4)
    assert found.sum_log_prob == pytest.approx(log_prob(best), abs=1e-4)


@pytest.mark.parametrize("phrases", [[(4, 4, 5)], [(4, 5), (4, 6)]])
def test_tokens_of_a_phrase_that_is_not_completed_can_begin_another(hash_model: Any, phrases: Phrases) -> None:
    class OneOutput(hash_model):  # type: ignore[misc]
        """Prefers one output to all others by far."""

        place = 0
        output = (4, *phrases[-1], *(one for phrase in phrases[:-1] for one in phrase), EOS)

        def step(self, tokens: torch.Tensor, state: Any, *, logits: bool = False) -> tuple[torch.Tensor, Any]:
            log_probs, state = super().step(tokens, state)
            place, self.place = self.place, self.place + 1
            log_probs[:, self.output[min(place, len(self.output) - 1)]] += 20
            return log_probs.log_softmax(-1), state

    model = OneOutput()
    [(found, met)] = forced_search(problem_of(model, [[3, EOS]], 12), [phrases])
    assert (*found.ids, EOS) == model.output
    assert met == frozenset(range(len(phrases)))


@pytest.mark.parametrize(
    ("phrases", "preferred", "wanted"),
    [
        # 6 is not among the most probable tokens after 4, but more probable than 5.
        ([(4, 5), (4, 6)], [{4: 9}, {3: 9, 7: 8, 8: 7, 6: 5, 5: 1}, {4: 9}, {5: 9}, {EOS: 9}], [4, 6, 4, 5]),
        ([(4,), (4, 5)], [{4: 9}, {5: 9}, {4: 9}, {EOS: 9}], [4, 5, 4]),
        ([(4, 5), (4,)], [{4: 9}, {5: 9}, {4: 9}, {EOS: 9}], [4, 5, 4]),
    ],
)
def test_phrases_that_begin_alike(hash_model, phrases, preferred, wanted):
    class Prefers(hash_model):  # type: ignore[misc]
        """Gives tokens of each place more probability."""

        place = 0

        def step(self, tokens: torch.Tensor, state: Any, *, logits: bool = False) -> tuple[torch.Tensor, Any]:
            log_probs, state = super().step(tokens, state)
            place, self.place = self.place, self.place + 1
            for token, more in preferred[min(place, len(preferred) - 1)].items():
                log_probs[:, token] += 10 * more
            return log_probs.log_softmax(-1), state

    [(found, met)] = forced_search(problem_of(Prefers(vocab_size=12), [[3, EOS]], 8, num_beams=1), [phrases])
    assert found.ids == wanted
    assert met == {0, 1}


def test_a_phrase_that_begins_another_one_is_in_an_output_that_was_cut(hash_model: Any) -> None:
    [(found, met)] = forced_search(problem_of(hash_model(), [[3, EOS]], 1), [[(4, 5), (4,)]])
    assert found.ids == [4]
    assert met == {1}


def test_sentences_of_a_batch_do_not_change_one_another(hash_model: Any) -> None:
    sources = [[3, 4, EOS], [5, EOS], [6, 6, 6, EOS]]
    phrases: list[Phrases] = [[(4, 4)], [], [(3,), (5,)]]
    together = forced_search(problem_of(hash_model(seed=1), sources, 8), phrases)
    alone = [
        forced_search(problem_of(hash_model(seed=1), [source], 8), [each])[0]
        for source, each in zip(sources, phrases, strict=True)
    ]
    assert [one.ids for one, _ in together] == [one.ids for one, _ in alone]


def test_a_limit_that_is_too_short_gives_the_most(hash_model: Any) -> None:
    [(found, met)] = forced_search(problem_of(hash_model(), [[3, EOS]], 2), [[(4, 5, 6)]])
    assert met == frozenset()
    assert found.ids == [4, 5]
    assert not found.ended


def test_stop_is_asked(hash_model: Any) -> None:
    problem = problem_of(hash_model(), [[3, EOS]], 5)
    with pytest.raises(SearchStopped):
        forced_search(SearchProblem(**{**vars(problem), "stop": lambda: True}), [[(4,)]])


def test_texts(hash_model: Any) -> None:
    tokenizer = Tokenizer.train(["the cat sees a dog and you"], TokenizerSettings(kind="word", vocab_size=11))
    settings = DecodingSettings(max_new_tokens=8, banned_ids=(tokenizer.unk_id,))
    translator = Translator(hash_model(vocab_size=tokenizer.vocab_size, seed=7), tokenizer, settings, device="cpu")
    texts = ["the cat sees you", "a dog"]
    one, two = translate_forced(
        translator.runner, translator.tokenizer, texts, [["a dog", "and"], ["the bird"]], translator.settings
    )
    assert "a dog" in one.text
    assert "and" in one.text.split()
    assert one.missing == ()
    assert two.missing == ("the bird",)
    assert can_force(tokenizer, "a dog")
    assert not can_force(tokenizer, "the bird")
    assert not can_force(tokenizer, " ")
