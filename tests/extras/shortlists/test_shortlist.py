"""A search over the candidates of a batch, and the searches of a model with 8 bits, on a model that learned a task."""

import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hash_model import HashModel
from safetensors.torch import load, save
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES
from manyheads.data.batch import PairBatch
from manyheads.decoding.inputs_and_results import Hypothesis
from manyheads.decoding.model_runner import inference, pack
from manyheads.decoding.search import search_all, search_steps
from manyheads.decoding.search_problem import Grammar, run_to_end
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ModelFileError, RequestError
from manyheads.extras.shortlists.shortlist import SHORTLIST, Shortlist
from manyheads.nn.kernels import policy

VOCAB = 40
SPECIAL: dict[str, Any] = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
CPU = torch.device("cpu")


def translated(word: Any) -> Any:
    """The task: word w of 3 to 39 is translated by 42 - w."""
    return 42 - word


def shortlist_of(count: int, **changes: Any) -> Shortlist:
    """The dictionary of the task, with its words as the second candidates of others."""
    words = [[], [], [], *([translated(word), 3 + (word + 5) % 37] for word in range(3, VOCAB))]
    ends = torch.tensor([0, *(len(one) for one in words)]).cumsum(0)
    values: dict[str, Any] = {
        "frequent": torch.arange(VOCAB, dtype=torch.int32),
        "offsets": ends,
        "candidates": torch.tensor([word for one in words for word in one], dtype=torch.int32),
        "is_shared": False,
        "vocabulary": "ab" * 32,
        "count": count,
    }
    return Shortlist(**{**values, **changes})


def sources(count: int, seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (count,), generator=random).tolist()
    return [[*torch.randint(3, VOCAB, (length,), generator=random).tolist(), 2] for length in lengths]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    tensors = [torch.tensor(row) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), lengths


def built(architecture: str) -> Any:
    config = replace(ARCHITECTURES[architecture].presets["debug"], source_vocab_size=VOCAB, target_vocab_size=VOCAB)
    torch.manual_seed(0)
    return ARCHITECTURES[architecture].build(config)


@pytest.fixture(scope="module", params=["transformer", "reformer-seq2seq"])
def model(request: pytest.FixtureRequest) -> Any:
    """An untrained model, whose outputs depend on the source; random biases make it prefer some words."""
    return built(request.param).eval()


LEARNED = sources(12, seed=99)


@pytest.fixture(scope="module")
def trained() -> Any:
    """A Transformer that learned the translations of a few sources."""
    made = built("transformer").train()
    optimiser = torch.optim.Adam(made.parameters(), lr=4e-3)
    source, lengths = padded(LEARNED)
    target, target_lengths = padded([[1, *map(translated, row[:-1]), 2] for row in LEARNED])
    for _ in range(80):
        output = made(PairBatch(source, lengths, target, target_lengths, torch.arange(len(LEARNED))))
        optimiser.zero_grad()
        (output.loss_sum / output.num_tokens).backward()
        optimiser.step()
    return made.eval()


def found_by(model: Any, shortlist: Shortlist | None, **settings: Any) -> list[list[Hypothesis]]:
    options = DecodingSettings(**{"num_beams": 1, "max_len_offset": 3, **settings})
    with inference(CPU, "fp32"):
        return search_all(model, LEARNED, options, **SPECIAL, shortlist=shortlist)


def ids_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[one.ids for one in hypotheses] for hypotheses in found]


SEARCHES = [
    {},
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 3, "banned_ids": (5, 9), "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    {"do_sample": True, "temperature": 3.0, "num_return_sequences": 3, "seed": 4},
    {"num_beams": 2, "forced_prefix_ids": (7, 30), "max_new_tokens": 5},
]


@pytest.mark.parametrize("options", SEARCHES)
def test_with_everything_on_the_list_it_is_the_full_search(model: Any, options: dict[str, Any]) -> None:
    full, listed = found_by(model, None, **options), found_by(model, shortlist_of(VOCAB), **options)
    assert ids_of(full) == ids_of(listed)
    for one, other in zip(chain.from_iterable(full), chain.from_iterable(listed), strict=True):
        assert one.ended == other.ended
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)


def test_finds_what_the_full_search_finds_among_few_candidates(trained: Any) -> None:
    full, listed = found_by(trained, None), found_by(trained, shortlist_of(1))
    assert ids_of(full) == [[[translated(word) for word in row[:-1]]] for row in LEARNED]
    assert ids_of(full) == ids_of(listed)
    better = [b[0].score - a[0].score for a, b in zip(full, listed, strict=True)]
    assert min(better) > -1e-5, "log-probabilities are normalised over fewer words"
    assert max(better) > 1e-4


def test_the_candidates_of_a_packed_model_are_packed(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "packs", lambda *weights: True)
    monkeypatch.setattr(policy, "_LEAST_PACKED_WORK", 0)
    if not policy.has_packing():
        pytest.skip("this build of torch has no packed weights")
    plain = found_by(trained, shortlist_of(2), num_beams=3)
    made = copy.deepcopy(trained)
    pack(made)
    with inference(CPU, "fp32"):
        head = made.head.restricted(torch.tensor([2, 5, 7]))
        hidden = torch.randn(4, head.weight.shape[1])
        assert head.packed.serves(hidden, head)
        torch.testing.assert_close(head.logits(hidden), made.head.logits(hidden)[:, [2, 5, 7]], atol=1e-5, rtol=1e-5)
    listed = found_by(made, shortlist_of(2), num_beams=3)
    assert ids_of(plain) == ids_of(listed)


@pytest.mark.parametrize("options", SEARCHES)
def test_the_probabilities_are_those_of_the_model_over_the_candidates(model: Any, options: dict[str, Any]) -> None:
    options = {**options, "repetition_penalty": 1.0}
    listed = shortlist_of(2, is_shared=True)
    source, lengths = padded(sources(3, seed=5))
    prefix = options.get("forced_prefix_ids", ())
    allowed = listed.of_batch(source, [0, 1, 2, *prefix]).ids
    settings = DecodingSettings(**{"num_beams": 1, "max_len_offset": 3, **options})
    with inference(CPU, "fp32"):
        found = run_to_end(search_steps(model, source, lengths, settings, **SPECIAL, shortlist=listed))
        for row, hypotheses in enumerate(found):
            for one in hypotheses:
                assert set(one.ids) <= set(allowed.tolist())
                ids = [*one.ids, 2] if one.ended else one.ids
                alone = source[row : row + 1, : lengths[row]]
                log_probs = model.log_probs(alone, lengths[row : row + 1], torch.tensor([[1, *ids[:-1]]]))[0]
                among = log_probs - log_probs[:, allowed].logsumexp(-1, keepdim=True)
                expected = among.gather(1, torch.tensor(ids)[:, None])[:, 0]
                expected[: len(prefix)] = 0
                torch.testing.assert_close(torch.tensor(one.token_log_probs), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_the_candidates_of_a_batch(count: int) -> None:
    listed = shortlist_of(count, frequent=torch.arange(VOCAB - 1, -1, -1, dtype=torch.int32))
    source = torch.tensor([[10, 11, 2], [12, 2, 0]])
    expected = {0, 1, 2, 33}  # always
    expected |= {VOCAB - 1 - rank for rank in range(min(count, VOCAB))}
    for word in (10, 11, 12):
        expected |= set([translated(word), 3 + (word + 5) % 37][:count])
    assert listed.of_batch(source, [0, 1, 2, 33]).ids.tolist() == sorted(expected)
    shared = replace(listed, is_shared=True).of_batch(source, [0, 1, 2, 33])
    assert shared.ids.tolist() == sorted(expected | {10, 11, 12})


def test_more_beams_than_candidates(model: Any) -> None:
    found = found_by(model, shortlist_of(1), num_beams=60, max_tokens=100_000, min_new_tokens=1)
    assert all(hypotheses[0].ids for hypotheses in found)


def test_sentences_can_be_dropped_and_reported_early(model: Any) -> None:
    source, lengths = padded(sources(6, seed=3))
    settings = DecodingSettings(num_beams=1, max_len_offset=3)
    with inference(CPU, "fp32"):
        steps = search_steps(
            model, source, lengths, settings, **SPECIAL, report_early=True, shortlist=shortlist_of(VOCAB)
        )
        whole = run_to_end(search_steps(model, source, lengths, settings, **SPECIAL))
        told = dict(next(steps))
        try:
            told |= dict(steps.send([0]))
            while True:
                told |= dict(steps.send(None))
        except StopIteration:
            pass
    assert told.keys() == {1, 2, 3, 4, 5}
    for sentence, hypotheses in told.items():
        assert hypotheses[0].ids == whole[sentence][0].ids


def test_what_cannot_have_a_shortlist(model: Any) -> None:
    source, lengths = padded(sources(2))
    with pytest.raises(RequestError, match="a HashModel cannot be searched with a shortlist"):
        search_steps(HashModel(VOCAB), source, lengths, DecodingSettings(), **SPECIAL, shortlist=shortlist_of(3))

    class Any_(Grammar):  # noqa: N801
        def of(self, source: Tensor, source_lengths: Tensor) -> Any:
            return self

    with pytest.raises(RequestError, match="a grammar needs the whole vocabulary"):
        search_steps(model, source, lengths, DecodingSettings(), **SPECIAL, shortlist=shortlist_of(3), grammar=Any_())
    with pytest.raises(RequestError, match="shortlist is 0; it must be at least 1"):
        shortlist_of(0)


SIZES: dict[str, Any] = {"vocabulary": "ab" * 32, "sizes": (VOCAB, VOCAB)}


def test_a_file_gives_back_the_same(tmp_path: Path) -> None:
    written = shortlist_of(7, is_shared=True)
    (tmp_path / SHORTLIST).write_bytes(written.to_bytes())
    read = Shortlist.load(tmp_path, 7, **SIZES)
    for name in ("frequent", "offsets", "candidates"):
        assert torch.equal(getattr(read, name), getattr(written, name))
    assert (read.is_shared, read.vocabulary, read.count) == (True, "ab" * 32, 7)


def test_files_that_do_not_belong_to_the_model(tmp_path: Path) -> None:
    file = tmp_path / SHORTLIST
    with pytest.raises(RequestError, match=r"has no shortlist\.safetensors; learn one first: manyheads shortlist"):
        Shortlist.load(tmp_path, 5, **SIZES)
    file.write_bytes(shortlist_of(1).to_bytes())
    with pytest.raises(ModelFileError, match=r"another vocabulary \(abababababab\) than the model's \(cdcdcdcdcdcd\)"):
        Shortlist.load(tmp_path, 5, vocabulary="cd" * 32, sizes=(VOCAB, VOCAB))
    with pytest.raises(ModelFileError, match="or of another model: its ids do not fit"):
        Shortlist.load(tmp_path, 5, vocabulary="ab" * 32, sizes=(VOCAB, VOCAB + 1))
    with pytest.raises(RequestError, match="shortlist is -1; it must be at least 1"):
        Shortlist.load(tmp_path, -1, **SIZES)
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with pytest.raises(ModelFileError, match="is not an intact shortlist"):
        Shortlist.load(tmp_path, 5, **SIZES)
    file.write_bytes(save(load(content), metadata={"version": "2"}))
    with pytest.raises(ModelFileError, match="has version '2', this program reads 1"):
        Shortlist.load(tmp_path, 5, **SIZES)


@pytest.mark.parametrize(
    "changes",
    [
        {"candidates": torch.full((74,), VOCAB, dtype=torch.int32)},
        {"candidates": torch.full((74,), -1, dtype=torch.int32)},
        {"candidates": torch.zeros(73, dtype=torch.int32)},
        {"candidates": torch.zeros(74)},
        {"frequent": torch.zeros(VOCAB, dtype=torch.int32)},
        {"offsets": torch.zeros(VOCAB + 1, dtype=torch.int64)},
        {"offsets": torch.tensor([0, *([74, 0] * 20)])[: VOCAB + 1]},
    ],
)
def test_ids_out_of_range_are_refused(tmp_path: Path, changes: dict[str, Tensor]) -> None:
    (tmp_path / SHORTLIST).write_bytes(shortlist_of(1, **changes).to_bytes())
    with pytest.raises(ModelFileError, match="do not fit"):
        Shortlist.load(tmp_path, 5, **SIZES)
