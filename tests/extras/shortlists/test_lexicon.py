"""IBM model 1 over ids, against a plain implementation and on pairs whose dictionary is known."""

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from manyheads.extras.shortlists import shortlist as module
from manyheads.extras.shortlists.shortlist import Lexicon, learn_lexicon

Pairs = list[tuple[list[int], list[int]]]


def candidates(found: Lexicon, source: int) -> list[int]:
    ids: list[int] = found.candidates[found.offsets[source] : found.offsets[source + 1]].tolist()
    return ids


def dictionary_pairs(count: int) -> Pairs:
    """Word w is translated by 29 - w; 1 stands in every target, without a source. Words in another order."""
    draw, pairs = random.Random(5), []
    for _ in range(count):
        words = draw.choices(range(10, 20), k=draw.randint(1, 6))
        target = [29 - word for word in words] + [1]
        draw.shuffle(target)
        pairs.append((words, target))
    return pairs


def plain(pairs: Pairs, num_target: int) -> dict[tuple[int, int], float]:
    """The same estimate with loops."""
    counts = Counter(word for _, target in pairs for word in target)
    alone = {word: counts[word] / sum(counts.values()) for word in range(num_target)}

    def normalised(weights: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        sums: dict[int, float] = defaultdict(float)
        for (word, _), weight in weights.items():
            sums[word] += weight
        return {key: weight / sums[key[0]] for key, weight in weights.items()}

    weights: dict[tuple[int, int], float] = defaultdict(float)
    for source, target in pairs:
        for word in source:
            for other in target:
                weights[word, other] += 1
    found = normalised(weights)
    for _ in range(module._ITERATIONS):
        weights = defaultdict(float)
        for source, target in pairs:
            for other in target:
                total = sum(found[word, other] for word in source) + alone[other]
                for word in source:
                    weights[word, other] += found[word, other] / total
        found = normalised(weights)
    return found


@pytest.mark.parametrize("links_at_once", [1, 40, 1 << 21])
def test_equals_a_plain_implementation(monkeypatch: pytest.MonkeyPatch, links_at_once: int) -> None:
    monkeypatch.setattr(module, "_LINKS_AT_ONCE", links_at_once)
    pairs = [*dictionary_pairs(60), ([], [3]), ([12], []), ([], [])]
    found, expected = learn_lexicon(pairs, 25, 30), plain(pairs, 30)
    for source in range(25):
        ranked = sorted((key[1] for key in expected if key[0] == source), key=lambda word: -expected[source, word])
        kept = [word for word in ranked if expected[source, word] >= module._LEAST_PROBABILITY]
        values = [expected[source, word] for word in candidates(found, source)]
        assert sorted(candidates(found, source)) == sorted(kept)
        assert values == pytest.approx(sorted(values, reverse=True))


def test_finds_the_dictionary() -> None:
    found = learn_lexicon(dictionary_pairs(300), 25, 30)
    assert [candidates(found, word)[0] for word in range(10, 20)] == [29 - word for word in range(10, 20)]
    assert candidates(found, 3) == []
    assert found.num_pairs == 300
    assert found.frequent[0] == 1
    assert sorted(found.frequent.tolist()) == list(range(30))


def test_the_table_is_bounded_and_loses_the_rarest(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: Pairs = [([1], [2])] * 5 + [([1], [3])] * 3 + [([1], [word]) for word in range(4, 20)]
    monkeypatch.setattr(module, "_MOST_ENTRIES", 2)
    assert candidates(learn_lexicon(pairs, 2, 20), 1) == [2, 3]


def test_no_more_candidates_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CANDIDATES", 3)
    pairs: Pairs = [([1], [word]) for word in range(2, 12) for _ in range(word)]
    found = learn_lexicon(pairs, 2, 12)
    assert candidates(found, 1) == [11, 10, 9]
    assert found.offsets.tolist() == [0, 0, 3]


def test_no_words_at_all() -> None:
    found = learn_lexicon([([], [])], 3, 4)
    assert found.offsets.tolist() == [0, 0, 0, 0]
    assert np.array_equal(found.frequent, np.arange(4))
