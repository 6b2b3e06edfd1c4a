"""BPE dropout: against the paper's algorithm written plainly; limits, budget and order hold as without it."""

import json

import numpy as np
import pytest
import torch

from manyheads.data.corpora import load_tatoeba
from manyheads.data.sampler import mix
from manyheads.data.settings import DataSettings
from manyheads.data.store import PairStore
from manyheads.data.translation.batches import TrainingStream
from manyheads.errors import ConfigError
from manyheads.extras.bpe_dropout.segmenting import ROUND, BpeDropout
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
TENSORS = ("source", "source_lengths", "target", "target_lengths", "sample_ids")
ODD = [
    ("", "x"),
    ("日本語 ok", "</s> <pad> <0x41>  two  spaces "),
    ("it's 12345 ½", "ﬁ\u200dx\tA\u0301"),
    ("!?..,", "a"),
]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return load_tatoeba("train")[:300] + ODD


@pytest.fixture(scope="module")
def tokenizer(pairs: list[tuple[str, str]]) -> Tokenizer:
    return Tokenizer.train([text for pair in pairs for text in pair], TokenizerSettings(vocab_size=700))


@pytest.fixture(scope="module")
def store(pairs: list[tuple[str, str]], tokenizer: Tokenizer) -> PairStore:
    sides = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in range(2)]
    return PairStore.from_lists(list(zip(*sides, strict=True)), tokenizer.vocab_size)


def drawn(store: PairStore, tokenizer: Tokenizer, probability: float, limit: int = 1000, epoch: int = 0) -> PairStore:
    dropout = BpeDropout(tokenizer, probability, 1)
    return dropout.pairs(store, np.arange(len(store)), epoch, (limit, limit))


def lists(store: PairStore) -> list[list[list[int]]]:
    return [[side.tolist() for side in store[index]] for index in range(len(store))]


def plain(tokenizer: Tokenizer, word: list[int], state: int, probability: float) -> list[int]:
    """Algorithm 1 of the paper; the numbers of chance are those of the fast one."""
    model = json.loads(tokenizer.to_json())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    names = tokenizer.pieces
    pieces = [(place, names[index]) for place, index in enumerate(word)]
    turn = 0
    while True:
        merges = []
        for number in range(len(pieces) - 1):
            (place, left), (_, right) = pieces[number : number + 2]
            chance = int(mix(np.array([state + int(ROUND) * turn + place], np.uint64))[0])
            if (left, right) in ranks and chance >= int(probability * 2**64):
                merges.append((ranks[left, right], number))
        if not merges:
            return [model["vocab"][piece] for _, piece in pieces]
        _, number = min(merges)
        pieces[number : number + 2] = [(pieces[number][0], pieces[number][1] + pieces[number + 1][1])]
        turn += 1


def test_without_a_merge_left_out_it_is_the_tokenizer(store: PairStore, tokenizer: Tokenizer) -> None:
    assert lists(drawn(store, tokenizer, 0.0)) == lists(store)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_words_are_segmented_as_in_the_paper(tokenizer: Tokenizer, probability: float) -> None:
    texts = [" Versprechen", " understanding", ",", " 日本", " ungewöhnlich", " a", "'s"]
    names = {piece: index for index, piece in enumerate(tokenizer.pieces)}
    words = [
        [
            index
            for char in text
            for index in ([names[char]] if char in names else [names[f"<0x{byte:02X}>"] for byte in char.encode()])
        ]
        for text in texts * 20
    ]
    states = mix(np.arange(len(words), dtype=np.uint64))
    sizes = np.array([len(word) for word in words])
    ids, lengths = BpeDropout(tokenizer, probability, 1).segment_words(np.concatenate(words), sizes, states)
    found = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    assert found == [
        plain(tokenizer, word, int(state), probability) for word, state in zip(words, states.tolist(), strict=True)
    ]
    assert len({tuple(one) for one in found[:: len(texts)]}) > 10 * probability  # one word, many segmentations


def test_the_text_stays_and_each_epoch_differs(store: PairStore, tokenizer: Tokenizer) -> None:
    one, other = drawn(store, tokenizer, 0.1), drawn(store, tokenizer, 0.1, epoch=1)
    for side in ("source", "target"):
        usual = tokenizer.decode_batch([ids.tolist() for ids in map(getattr(store, side).__getitem__, range(304))])
        for new in (one, other):
            assert tokenizer.decode_batch([getattr(new, side)[index].tolist() for index in range(304)]) == usual
    assert lists(one) != lists(other)
    assert 1.1 < len(one.source.ids) / len(store.source.ids) < 1.5
    dropout = BpeDropout(tokenizer, 0.1, 1)  # some sentences alone: chance depends on places, not on the block
    some = dropout.pairs(store, np.arange(5), 0, (1000, 1000))
    assert lists(some) == lists(one)[:5]
    twice = dropout.pairs(store, np.array([9] * 20), 0, (1000, 1000))
    assert len({str(pair) for pair in lists(twice)}) > 3  # a pair that a mix repeats in an epoch


def test_what_would_be_too_long_keeps_its_usual_segmentation(store: PairStore, tokenizer: Tokenizer) -> None:
    usual, free, found = lists(store), lists(drawn(store, tokenizer, 0.5)), lists(drawn(store, tokenizer, 0.5, 12))
    kinds = set()
    for pair in range(len(usual)):
        for side in range(2):
            fits = len(free[pair][side]) <= 12 and len(usual[pair][side]) <= 12
            assert found[pair][side] == (free if fits else usual)[pair][side]
            kinds.add((fits, len(usual[pair][side]) <= 12))
    assert kinds == {(True, True), (False, True), (False, False)}


def test_the_tag_of_a_language_stays_in_front() -> None:
    texts = ["the word is good"] * 9
    tokenizer = Tokenizer.train(texts, TokenizerSettings(vocab_size=320), languages=["de", "fr"])
    sources = tokenizer.source.encode_batch([f">>{code}<< {texts[0]}" for code in ("de", "fr")])
    store = PairStore.from_lists(list(zip(sources, tokenizer.encode_batch(texts), strict=False)), tokenizer.vocab_size)
    assert lists(drawn(store, tokenizer, 0.0)) == lists(store)
    found = lists(drawn(store, tokenizer, 0.5))
    assert [source[0] for source, _ in found] == [ids[0] for ids in sources]
    assert len(found[0][0]) > len(sources[0])


def stream(store: PairStore, tokenizer: Tokenizer, **options: object) -> TrainingStream:
    known = {"max_tokens": 200, "max_source_len": 24, "max_target_len": 24, "accumulate": 2, **options}
    settings = DataSettings(bpe_dropout=0.3, **known)  # type: ignore[arg-type]
    return TrainingStream(store, settings, 1, **IDS, dropout=BpeDropout(tokenizer, settings.bpe_dropout, 1))


def test_batches_keep_limits_and_budget(store: PairStore, tokenizer: Tokenizer) -> None:
    feed = stream(store, tokenizer)
    longer = 0
    for epoch in range(2):
        seen = []
        for row in range(feed.rows(epoch)):
            step = feed.at(epoch, row)
            rows = sum(len(batch.source) for batch in step)
            longest = max(max(batch.source.shape[1], batch.target.shape[1]) for batch in step)
            assert rows * longest <= 200
            assert longest <= 24
            for batch in step:
                for place, sample in enumerate(batch.sample_ids.tolist()):
                    ids = batch.source[place, : batch.source_lengths[place] - 1].tolist()
                    assert tokenizer.decode(ids) == tokenizer.decode(store[sample][0].tolist())
                    longer += len(ids) > len(store[sample][0])
                    seen.append(sample)
        usual = TrainingStream(store, feed.settings, 1, **IDS)
        assert sorted(seen) == sorted(
            sample for row in range(usual.rows(epoch)) for part in usual.sample_ids(epoch, row) for sample in part
        )
    assert longer > 200


def test_a_position_gives_the_same_batch_to_a_stream_made_anew(store: PairStore, tokenizer: Tokenizer) -> None:
    one, other = stream(store, tokenizer), stream(store, tokenizer)
    for epoch in range(3):
        one.at(epoch, one.rows(epoch) - 1)
    for epoch, row in ((2, 5), (0, 0)):
        for batch, again in zip(one.at(epoch, row), other.at(epoch, row), strict=True):
            assert all(torch.equal(getattr(batch, name), getattr(again, name)) for name in TENSORS)


@pytest.mark.parametrize(("kind", "symbols"), [("unigram", []), ("word", []), ("bpe", ["(S"])])
def test_other_tokenizers_are_refused(kind: str, symbols: list[str]) -> None:
    settings = TokenizerSettings(kind=kind, vocab_size=320)  # type: ignore[arg-type]
    tokenizer = Tokenizer.train(["some words"] * 3, settings, symbols=symbols)
    with pytest.raises(ConfigError, match=r"data\.bpe_dropout is 0\.1, but the tokenizer of the data is .*'bpe'"):
        BpeDropout(tokenizer, 0.1, 1)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_it_is_a_probability(value: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.bpe_dropout is"):
        DataSettings(bpe_dropout=value)
