"""Embeddings from co-occurrence, against loops over tokens and on pairs whose dictionary is known."""

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from manyheads.data.store import PairStore
from manyheads.extras.cooccurrence import embeddings as module
from manyheads.extras.cooccurrence.embeddings import (
    cooccurrence_embeddings,
    count_contexts,
    count_neighbours,
    neighbour_embeddings,
)

Pairs = list[tuple[list[int], list[int]]]


def store(pairs: Pairs, vocab_size: int) -> PairStore:
    return PairStore.from_lists(pairs, vocab_size)


def random_pairs(count: int, vocab_size: int) -> Pairs:
    draw = random.Random(3)
    return [
        (draw.choices(range(vocab_size), k=draw.randint(0, 5)), draw.choices(range(vocab_size), k=draw.randint(1, 6)))
        for _ in range(count)
    ]


def plain_counts(pairs: Pairs, contexts: list[int], vocab_size: int, max_links: int) -> list[list[float]]:
    counts = [[0.0] * len(contexts) for _ in range(vocab_size)]
    links = 0
    for source, target in sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1])):
        tokens = source + target
        links += len(tokens) ** 2
        if links > max_links:
            break
        for token in tokens:
            for other in tokens:
                if other in contexts:
                    counts[token][contexts.index(other)] += 1
    return counts


@pytest.mark.parametrize("max_links", [1 << 20, 300, 0])
def test_counts_are_those_of_loops(max_links: int) -> None:
    pairs, contexts = random_pairs(40, 9), [4, 0, 7]
    found = count_contexts(store(pairs, 9), np.array(contexts), max_links)
    assert found.tolist() == plain_counts(pairs, contexts, 9, max_links)


def naive_embeddings(pairs: Pairs, width: int, contexts: list[int], vocab_size: int) -> NDArray[np.float64]:
    """The formulas with a whole singular value decomposition in float64."""
    counts = np.array(plain_counts(pairs, contexts, vocab_size, 1 << 20))
    smoothed = counts.sum(0) ** 0.75
    probability = smoothed / smoothed.sum()
    information = np.zeros_like(counts)
    for token, context in zip(*np.nonzero(counts), strict=True):
        pointwise = np.log(counts[token, context] / counts[token].sum() / probability[context])
        information[token, context] = max(0.0, pointwise)
    left, values, _ = np.linalg.svd(information, full_matrices=False)
    table = left[:, :width] * values[:width] ** 0.5
    occurs = [any(token in source + target for source, target in pairs) for token in range(vocab_size)]
    table -= table[occurs].mean(0)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    table[~np.array(occurs)] = 0
    return table


def test_similarities_are_those_of_the_formulas() -> None:
    pairs = random_pairs(60, 12)
    found = cooccurrence_embeddings(store(pairs, 13), 3).double().numpy()  # id 12 does not occur
    counts = np.bincount([token for source, target in pairs for token in source + target], minlength=13)
    expected = naive_embeddings(pairs, 3, np.argsort(-counts, kind="stable").tolist(), 13)
    # The direction of a singular vector is arbitrary; the products of rows are not.
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)
    assert not found[12].any()


def test_a_word_is_nearest_to_its_translation() -> None:
    draw, pairs = random.Random(5), []
    for _ in range(400):
        words = draw.sample(range(20), k=draw.randint(2, 5))
        pairs.append((words, [word + 20 for word in reversed(words)]))
    table = cooccurrence_embeddings(store(pairs, 40), 20)
    nearest = (table @ table.T).fill_diagonal_(-1).argmax(1)
    assert nearest.tolist() == [*range(20, 40), *range(20)]


def test_vectors_have_length_one_and_few_contexts_leave_columns_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_CONTEXTS", 4)
    table = cooccurrence_embeddings(store(random_pairs(60, 12), 12), 10)
    assert table.shape == (12, 10)
    torch.testing.assert_close(table.norm(dim=1), torch.ones(12))
    assert not table[:, 4:].any()


@pytest.mark.parametrize("pairs", [[], [([], [])], [([1], [])], [([1], [2])], [([1, 1], [1])]])
def test_data_that_says_nothing_gives_finite_vectors(pairs: Pairs) -> None:
    table = cooccurrence_embeddings(store(pairs, 5), 3)
    assert table.shape == (5, 3)
    assert table.isfinite().all()
    assert not table[[0, 3, 4]].any()


@pytest.mark.parametrize("window", [1, 3, 8])
def test_neighbours_are_those_of_loops(window: int) -> None:
    ids, contexts = np.array(random.Random(7).choices(range(6), k=7)), [5, 0, 2]
    expected = np.zeros((2, 6, 3))
    for place, token in enumerate(ids):
        for other, neighbour in enumerate(ids):
            if other != place and abs(other - place) <= window and neighbour in contexts:
                side = int(other > place)
                expected[side, token, contexts.index(neighbour)] += 1 / abs(other - place)
    found = count_neighbours(ids, 6, np.array(contexts), window)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_tokens_beside_the_same_tokens_are_near() -> None:
    """Sentences of an article, a noun and a verb: ids 0 to 2, 3 to 8 and 9 to 14."""
    draw, ids = random.Random(5), []
    for _ in range(3000):
        ids += [draw.randrange(3), draw.randrange(3, 9), draw.randrange(9, 15)]
    table = neighbour_embeddings(np.array(ids), 16, 8)
    kind = np.array([0] * 3 + [1] * 6 + [2] * 6)
    nearest = (table[:15] @ table[:15].T).fill_diagonal_(-1).argmax(1).numpy()
    assert (kind[nearest] == kind).all()
    torch.testing.assert_close(table[:15].norm(dim=1), torch.ones(15))
    assert not table[15].any()


def test_a_large_vocabulary_has_fewer_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_COUNTS", 12 * 4)
    ids = np.array(random.Random(7).choices(range(12), k=200))
    table = neighbour_embeddings(ids, 12, 10)
    assert table[:, :4].any(0).all()
    assert not table[:, 4:].any()


def test_only_the_beginning_of_a_long_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.array([*random.Random(7).choices(range(5), k=50), 5, 5])
    expected = neighbour_embeddings(ids[:50], 6, 3)
    monkeypatch.setattr(module, "_MOST_TOKENS", 50)
    assert torch.equal(neighbour_embeddings(ids, 6, 3), expected)


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 1, 1, 1, 1, 1]])
def test_texts_that_say_nothing_give_finite_vectors(ids: list[int]) -> None:
    table = neighbour_embeddings(np.array(ids, np.int64), 5, 3)
    assert table.shape == (5, 3)
    assert table.isfinite().all()
    assert not table[[0, 3, 4]].any()
