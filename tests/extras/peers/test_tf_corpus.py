"""The vocabulary and the test text of a published Transformer-XL, from its cache.pkl."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
from numpy import array

from manyheads.cli.main import main
from manyheads.data.store import TokenStore
from manyheads.errors import ModelFileError
from manyheads.evaluation.likelihood import evaluate_text
from manyheads.evaluation.reading import Reading
from manyheads.extras.peers.legacy_pickle import read_corpus
from manyheads.extras.peers.legacy_pickle_child import read_corpus as read_in_child
from manyheads.extras.peers.legacy_pickle_machine import RefusedError
from manyheads.extras.peers.tf_transformer_xl import read_corpus_files
from manyheads.models.pretrained import load
from manyheads.text.of_folder import load_vocabulary

CORPORA = ("text8", "wt103", "lm1b")


@pytest.fixture
def published(fixtures: Path, tmp_path: Path) -> Path:
    """A folder of the published form: a trained checkpoint with its config, and the cache.pkl that Python 2 wrote."""
    folder = tmp_path / "tf_text8"
    shutil.copytree(fixtures / "text8_trained", folder / "model")
    (folder / "data").mkdir()
    for name in ("corpus-info.json", "cache.pkl"):
        shutil.copy(fixtures / "corpora" / "text8" / name, folder / "data")
    recorded = json.loads((fixtures / "text8_trained.json").read_text())
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    return folder


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("file", ["cache.pkl", "cache-python3.pkl"])
def test_words_and_splits_are_those_of_the_original(fixtures: Path, name: str, file: str) -> None:
    cache = fixtures / "corpora" / name / file
    wanted = json.loads((cache.parent / "expected.json").read_text())[file]
    corpus = read_corpus(cache)
    assert corpus.symbols == wanted["vocab"]["idx2sym"]
    assert (corpus.dataset, corpus.lower_case) == (wanted["dataset"], wanted["vocab"]["lower_case"])
    assert (corpus.valid, corpus.test) == (wanted["valid"], wanted["test"])
    assert corpus.unk_idx == wanted["vocab"].get("unk_idx")


@pytest.mark.parametrize("name", CORPORA)
def test_the_test_text_has_the_ids_of_the_original(fixtures: Path, name: str) -> None:
    cache = fixtures / "corpora" / name / "cache.pkl"
    corpus = read_corpus(cache)
    files = read_corpus_files(cache, len(corpus.symbols))
    assert files.test is not None
    assert files.vocabulary.encode_content(files.test) == corpus.test


def test_bytes_of_enwik8(tmp_path: Path) -> None:
    cache = _write(tmp_path, dataset="enwik8", symbols=["32", "101", "195", "169"], test=[1, 0, 2])
    files = read_corpus_files(cache, 4)
    assert files.test == b"e \xc3"  # the split begins or ends within a character
    assert files.vocabulary.encode_content(b"e \n\xc3\xa9") == [1, 0, 2, 3]
    assert "Line breaks in a text are left out" in files.notes[0]


def test_a_published_folder_can_be_used_and_gives_the_loss_of_the_original(published, fixtures, tmp_path, capsys):
    ours = tmp_path / "ours"
    assert main(["convert", str(published), "--from-pickle", "--output", str(ours)]) == 0
    shown = capsys.readouterr().out
    command = f"manyheads evaluate {ours} --text {ours / 'test.txt'} --segment-len 8 --lanes 2"
    assert f"next: {command}" in shown
    recorded = json.loads((fixtures / "text8_trained.json").read_text())["evaluation"]
    vocabulary = load_vocabulary(ours)
    ids = vocabulary.encode_content((ours / "test.txt").read_bytes())
    length, sums = len(ids) // 2, []
    for row in (ids[:length], ids[length : 2 * length]):  # the original predicts no first token of a row
        found = evaluate_text(load(ours), TokenStore.from_lists([row], 23), Reading(segment_len=8, lanes=1), vocabulary)
        assert found is not None
        sums.append(found)
    assert sum(one.num_tokens for one in sums) == recorded["tokens"]
    assert sum(one.nll_sum for one in sums) / recorded["tokens"] == pytest.approx(recorded["loss"], abs=1e-5)

    assert main([*command.split()[1:], "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["results"][0]
    assert record["nats_per_token"] == pytest.approx(recorded["loss"], abs=0.01)  # one token more is scored
    assert main([*command.split()[1:], "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "348 tokens, 22 segments of 8 in 2 lanes, memory 20" in shown
    assert "seconds a segment" in shown
    assert "GiB" in shown
    assert main(["generate", str(ours), "the river", "--max-new-tokens", "4"]) == 0
    (tmp_path / "texts").write_text("the river\n")
    assert main(["score", str(ours), "--text", str(tmp_path / "texts")]) == 0
    assert "\t9\t" in capsys.readouterr().out


def test_a_pickle_is_read_only_if_asked_for(published, tmp_path, capsys):
    assert main(["convert", str(published), "--output", str(tmp_path / "ours")]) == 0
    assert "cache.pkl holds its vocabulary, and is a pickle; --from-pickle reads it" in capsys.readouterr().err
    assert not (tmp_path / "ours" / "tokenizer.json").exists()


def test_a_cache_of_another_model(published: Path, fixtures: Path, tmp_path: Path) -> None:
    shutil.copy(fixtures / "corpora" / "lm1b" / "cache.pkl", published / "data")
    assert main(["convert", str(published), "--from-pickle", "--output", str(tmp_path / "ours")]) == 2
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dataset": 7}, "a name or a word in it is a int"),
        ({"symbols": ["a", 1]}, "a name or a word in it is a int"),
        ({"symbols": []}, "its idx2sym is not a list of 1 to"),
        ({"test": [5]}, "its test has an id outside the vocabulary of 2 words"),
    ],
)
def test_a_cache_with_wrong_contents(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    cache = _write(tmp_path, **{"dataset": "text8", "symbols": ["_", "a"], "test": [0], **changes})
    with pytest.raises(ModelFileError, match=reason):
        read_corpus(cache)


def test_a_cache_that_wants_to_run_code(tmp_path: Path) -> None:
    cache = tmp_path / "cache.pkl"
    cache.write_bytes(b"\x80\x02cposix\nsystem\nq\x00U\x04trueq\x01\x85q\x02Rq\x03.")
    with pytest.raises(ModelFileError, match=r"the global posix\.system"):
        read_corpus(cache)


def test_every_seventh_cut_of_a_cache_is_refused(fixtures: Path, tmp_path: Path) -> None:
    content = (fixtures / "corpora" / "lm1b" / "cache.pkl").read_bytes()
    for end in range(0, len(content), 7):
        with pytest.raises((RefusedError, ValueError, IndexError, KeyError)):
            read_in_child(_Bytes(content[:end]))  # type: ignore[arg-type]


class _Bytes:
    """Bytes with the methods of a memory map that the machine uses."""

    def __init__(self, content: bytes) -> None:
        self._content, self._file = content, io.BytesIO(content)
        self.read, self.readline, self.tell = self._file.read, self._file.readline, self._file.tell

    def __getitem__(self, place: slice) -> bytes:
        return self._content[place]

    def __len__(self) -> int:
        return len(self._content)


class Corpus:
    """What Python 3 pickles under the name of the original's class."""


class Vocab:
    """The same."""


def _write(folder: Path, *, dataset: object, symbols: object, test: list[int]) -> Path:
    corpus, vocabulary = Corpus(), Vocab()
    vocabulary.__dict__.update(idx2sym=symbols, lower_case=False)
    corpus.__dict__.update(dataset=dataset, vocab=vocabulary, test=array(test))
    content = pickle.dumps(corpus, protocol=2)
    for name, known in ((b"Corpus", b"__main__"), (b"Vocab", b"vocabulary")):
        content = content.replace(__name__.encode() + b"\n" + name, known + b"\n" + name)
    (folder / "cache.pkl").write_bytes(content)
    return folder / "cache.pkl"
