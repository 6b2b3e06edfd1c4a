"""Prepared folders, and the names by which a setting calls for data."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from manyheads.data.settings import CopyTaskSettings, DataSettings
from manyheads.data.translation.prepared import PreparedData, copy_pairs, open_data, prepare_corpus
from manyheads.data.translation.preparing import PairList, Rest
from manyheads.data.translation.readers import PairFiles
from manyheads.errors import ConfigError, DataError
from manyheads.files.commit import remove_stale, temporary_name
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

SETTINGS = TokenizerSettings(vocab_size=320)
TRAIN = [("the cat sat", "die Katze saß"), ("", "leer"), ("a dog", "ein Hund"), ("empty", " ")] * 10
VALID = [("the dog", "der Hund"), ("", "nichts"), ("line\u2028break", "Zeile")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare_corpus(
        tmp_path / "data", train=PairList("made up", TRAIN), valid=PairList("made up", VALID), tokenizer=SETTINGS
    )
    return tmp_path / "data"


def test_what_is_prepared_can_be_opened(folder: Path) -> None:
    data = PreparedData.open(folder)
    assert [(data.tokenizer.decode(source), data.tokenizer.decode(target)) for source, target in data.train] == [
        pair for pair in TRAIN if pair[0].strip() and pair[1].strip()
    ]
    assert data.valid is not None
    assert len(data.valid) == 3
    assert data.valid_text == VALID
    assert data.test is None
    assert data.test_text == []
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "tokenizer.json", "train", "valid", "valid.source.txt", "valid.target.txt"
    ]  # fmt: skip


def test_odd_ends_of_lines_come_back(tmp_path: Path) -> None:
    """The raw text is a file of ours: what a reader takes from the files of others belongs to the text in it."""
    pairs = [("\ufeffmark", "a\r"), ("b\r\r", "\ufeff\ufeffx"), ("a\0b\0c\0d\0", "c")]
    prepare_corpus(
        tmp_path / "data", train=PairList("made up", pairs), valid=PairList("made up", pairs), tokenizer=SETTINGS
    )
    data = PreparedData.open(tmp_path / "data")
    assert data.valid_text == pairs
    decode = data.tokenizer.decode
    assert [(decode(source.tolist()), decode(target.tolist())) for source, target in data.train] == pairs


def test_a_side_without_anything_visible_is_empty(tmp_path: Path) -> None:
    pairs = [("a", "b"), ("\u200b", "c"), ("d", "\ufeff\u00ad \u2060"), ("e", "f")]
    rest = Rest(PairList("made up", pairs), 1)
    prepare_corpus(tmp_path / "data", train=rest, valid=rest.holdout, tokenizer=SETTINGS)
    data = PreparedData.open(tmp_path / "data")
    assert (data.manifest["counts"]["train"]["empty_dropped"], len(data.train), data.valid_text) == (2, 1, [("e", "f")])


def test_everything_is_counted(folder: Path) -> None:
    data = PreparedData.open(folder)
    counts = data.manifest["counts"]
    assert counts["train"]["lines"] == 40
    assert counts["train"]["empty_dropped"] == 20
    assert counts["train"]["pairs"] == 20
    assert counts["train"]["source_tokens"] == len(data.train.source.ids)
    assert counts["valid"]["empty_kept"] == 1
    assert "train: 20 pairs" in data.describe()
    assert "20 empty dropped" in data.describe()


def test_the_same_text_gives_the_same_bytes_from_any_kind_of_file(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "t.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in TRAIN))
    (tmp_path / "v.jsonl").write_text(
        "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in VALID)
    )
    prepare_corpus(
        tmp_path / "again",
        train=PairFiles(tsv=tmp_path / "t.tsv"),
        valid=PairFiles(jsonl=tmp_path / "v.jsonl"),
        tokenizer=SETTINGS,
    )
    first, second = PreparedData.open(folder), PreparedData.open(tmp_path / "again")
    assert first.digest == second.digest
    assert first.train.digest == second.train.digest


def test_a_tokenizer_can_be_given(tmp_path: Path, folder: Path) -> None:
    known = Tokenizer.load(folder / "tokenizer.json")
    prepare_corpus(tmp_path / "b", train=PairList("x", [("new words", "neue Wörter")]), tokenizer=known)
    assert PreparedData.open(tmp_path / "b").tokenizer.digest == known.digest


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    prepare_corpus(
        tmp_path / "b",
        train=PairList("x", TRAIN),
        tokenizer=SETTINGS,
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert [what.partition(" from ")[0] for what in dict.fromkeys(what for what, _, _ in told)] == [
        "read train", "count words", "hand words to the trainer", "learn pieces", "encode train"
    ]  # fmt: skip
    assert {what: (done, total) for what, done, total in told}["encode train"] == (20, 20)


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "encode train":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(tmp_path / "b", train=PairList("x", TRAIN), tokenizer=SETTINGS, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_cleared_away(tmp_path: Path) -> None:
    """SIGKILL leaves a half-made folder behind; the next one of that name clears it, and nothing else."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    spared = ["data.tmp-mine", "data.tmp-", "data.old-7", "other.tmp-1", f"data.tmp-{dead.pid}", "data.tmp-1x"]
    own = temporary_name(Path("data")).name
    spared.append(own.replace(f"-{os.getpid()}-", f"-{os.getppid()}-"))
    stale = own.replace(f"-{os.getpid()}-", f"-{dead.pid}-")
    for name in (stale, stale.replace("data", "data.old"), own, *spared):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    remove_stale(tmp_path, "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["data", *spared])


def test_a_folder_put_aside_by_a_killed_process_comes_back(folder: Path) -> None:
    """Killed between two renames of --replace, it leaves no folder under the name, but the older one beside it."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    aside = temporary_name(folder.with_name("data.old"))
    folder.rename(aside.with_name(aside.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-")))
    with pytest.raises(DataError, match="exists already"):
        prepare_corpus(folder, train=PairList("new", TRAIN[:4]), tokenizer=SETTINGS)
    assert PreparedData.open(folder).valid_text == VALID
    assert [path.name for path in folder.parent.iterdir()] == ["data"]


def test_replacing_is_asked_for(folder: Path) -> None:
    with pytest.raises(DataError, match="exists already"):
        prepare_corpus(folder, train=PairList("x", TRAIN[:1]), tokenizer=SETTINGS)
    prepare_corpus(folder, train=PairList("x", TRAIN[:1]), tokenizer=SETTINGS, replace=True)
    assert len(PreparedData.open(folder).train) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["data"]


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 were read and 2 of them have an empty side"):
        prepare_corpus(tmp_path / "b", train=PairList("x", [("", "a"), ("b", "")]), tokenizer=SETTINGS)


def test_large_corpora_teach_the_tokenizer_by_every_nth_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.text.learning.MAX_SAMPLE", 8)
    taught: list[str] = []
    train = Tokenizer.train
    monkeypatch.setattr(
        Tokenizer, "train", lambda texts, asked, **more: train(taught.extend(texts) or taught, asked, **more)
    )
    pairs = [(f"s{number}", f"t{number}") for number in range(30)]
    prepare_corpus(tmp_path / "b", train=PairList("x", pairs), tokenizer=SETTINGS)
    assert taught[::2] == [f"s{number}" for number in range(0, 30, 4)]


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "valid.source.txt", "valid.target.txt", "train/source.ids.bin", "valid/manifest.json"]
)
def test_damage_anywhere_is_noticed(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match="Prepare the data again"):
        PreparedData.open(folder)
    (folder / name).unlink()
    with pytest.raises(DataError):
        PreparedData.open(folder, verify=False)


def test_a_foreign_tokenizer_is_noticed(folder: Path) -> None:
    Tokenizer.train(["other text, other pieces"], TokenizerSettings(vocab_size=300)).save(folder / "tokenizer.json")
    with pytest.raises(DataError):
        PreparedData.open(folder, verify=False)


def test_open_data_of_a_folder(folder: Path, tmp_path: Path) -> None:
    data = open_data(DataSettings(path=str(folder)), TokenizerSettings(), 1, tmp_path / "cache")
    assert data.digest == PreparedData.open(folder).digest
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("copy_task", DataError, "did you mean copy-task"),
        ("nowhere/at/all", DataError, "manyheads prepare"),
        ("embedded:wmt14", ConfigError, "the embedded one is embedded:tatoeba-en-de"),
    ],
)
def test_names_that_mean_nothing(tmp_path: Path, path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_data(DataSettings(path=path), TokenizerSettings(), 1, tmp_path)


def test_embedded_data_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DataSettings(num_train_pairs=300)
    data = open_data(settings, TokenizerSettings(vocab_size=500), 1, tmp_path)
    assert (len(data.train), len(data.valid or []), len(data.test or [])) == (300, 500, 1000)
    assert len(data.test_text) == 1000
    with monkeypatch.context() as patched:
        patched.setattr("manyheads.data.translation.prepared.prepare_corpus", None)
        again = open_data(settings, TokenizerSettings(vocab_size=500), 2, tmp_path)
    assert again.digest == data.digest
    other = open_data(settings, TokenizerSettings(vocab_size=501), 1, tmp_path)
    assert other.path != data.path
    (data.path / "tokenizer.json").write_text("damaged")
    assert open_data(settings, TokenizerSettings(vocab_size=500), 1, tmp_path).digest == data.digest
    with pytest.raises(ConfigError, match="has 60000 training pairs"):
        open_data(DataSettings(num_train_pairs=60_001), TokenizerSettings(vocab_size=500), 1, tmp_path)


def test_the_copy_task(tmp_path: Path) -> None:
    data = open_data(DataSettings(path="copy-task", num_train_pairs=50), TokenizerSettings(kind="word"), 1, tmp_path)
    assert (len(data.train), len(data.valid_text), len(data.test_text)) == (50, 200, 500)
    assert all(source.tolist() == target.tolist() for source, target in data.train)
    assert data.manifest["counts"]["test"]["source_unknown"] == 0
    other = open_data(DataSettings(path="copy-task", num_train_pairs=50), TokenizerSettings(kind="word"), 2, tmp_path)
    assert other.digest != data.digest


def test_copied_sequences_are_unseen_and_reproducible() -> None:
    splits = copy_pairs(7)
    texts = [source for pairs in splits.values() for source, _ in pairs]
    assert len(set(texts)) == len(texts) == 20_700
    assert {len(text.split()) for text in texts} == set(range(4, 11))
    assert len({word for text in texts for word in text.split()}) == 16
    assert copy_pairs(7, 30)["test"] == splits["test"]
    assert copy_pairs(7, 30)["train"] == splits["train"][:30]
    assert copy_pairs(8, 30) != copy_pairs(7, 30)
    with pytest.raises(ConfigError, match="at most 10000000"):
        copy_pairs(1, 10**9)


def test_words_and_lengths_of_the_copy_task(tmp_path: Path) -> None:
    task = CopyTaskSettings(num_symbols=5, shortest=7, longest=8)
    texts = [source for pairs in copy_pairs(7, 30, task).values() for source, _ in pairs]
    assert {len(text.split()) for text in texts} == {7, 8}
    assert {word for text in texts for word in text.split()} == {f"w{n}" for n in range(1, 6)}
    given = {"path": "copy-task", "num_train_pairs": 30}
    words = TokenizerSettings(kind="word")
    own = open_data(DataSettings(**given, copy_task=task), words, 7, tmp_path)
    assert own.test_text == copy_pairs(7, 30, task)["test"]
    assert own.digest != open_data(DataSettings(**given), words, 7, tmp_path).digest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_symbols": 0}, "num_symbols is 0; it must be from 1"),
        ({"shortest": 11}, "longest is 10, below shortest 11"),
        ({"longest": 513}, "from 1 to 512"),
    ],
)
def test_wrong_copy_tasks(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CopyTaskSettings(**settings)


def test_too_few_different_texts_to_copy() -> None:
    with pytest.raises(ConfigError, match=r"has 120 different texts.*1,460 are needed"):
        copy_pairs(1, 30, CopyTaskSettings(num_symbols=2, shortest=3, longest=6))
