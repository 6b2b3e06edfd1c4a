"""Prepared data of language models: the text comes back, splits are where they should be, counts are those of the text,
and a folder is whole and its own or refused."""

import gzip
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import manyheads.data.preparing as data_manifest
from manyheads.data.corpora import NOVEL_DIGEST, load_novel
from manyheads.data.language.prepared import NOVEL, TextData, open_text
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import LAYOUTS, TextBlock, TextFiles, find_layout
from manyheads.data.lines import ReadReport
from manyheads.data.prepared_folder import prepared_task
from manyheads.data.preparing import Holdout
from manyheads.data.settings import SegmentSettings
from manyheads.data.store import TokenStore
from manyheads.data.translation.prepared import PreparedData
from manyheads.data.translation.preparing import PairList, prepare_corpus
from manyheads.errors import ConfigError, DataError, SaveError
from manyheads.text.of_folder import learn_vocabulary
from manyheads.text.settings import TokenizerSettings, VocabularySettings

TEXT = "The cat sees the dog.\n\n The dog, übermäßig  müde, sees the cat ; \nIt is 1234 !\n"
RAW = b"\xff\xfe\x00\r\n\n a\xc3\xa4 \x80b\n\nlast"
STORE = ("manifest.json", "tokens.ids.bin", "tokens.offsets.bin")
BYTES = VocabularySettings()
WORDS = VocabularySettings(level="words")
PIECES = VocabularySettings(level="bpe", vocab_size=300)


def prepared(folder: Path, vocabulary: Any = BYTES, **options: Any) -> TextData:
    options.setdefault("train", TextBlock("text", TEXT.encode()))
    prepare_text(folder, vocabulary=vocabulary, **options)
    assert sorted(path.name for path in folder.parent.iterdir() if "tmp-" in path.name) == []
    return TextData.open(folder)


def text_of(data: TextData, store: TokenStore | None) -> bytes:
    return data.vocabulary.decode_bytes(store.ids.tolist())


@pytest.mark.parametrize("vocabulary", [BYTES, WORDS, PIECES], ids=lambda options: options.level)
@pytest.mark.parametrize("documents", ["none", "files", "lines"])
def test_the_text_comes_back(tmp_path: Path, vocabulary: VocabularySettings, documents: str) -> None:
    options = VocabularySettings(**{**vars(vocabulary), "documents": documents})
    (tmp_path / "a").write_bytes(TEXT.encode())
    (tmp_path / "b").write_bytes(gzip.compress(b"second file\n"))
    data = prepared(tmp_path / "data", options, train=TextFiles(paths=[tmp_path / "a", tmp_path / "b"]))
    expected = TEXT + "second file\n"
    if documents == "lines":
        expected = expected.replace("\n\n", "\n")
        assert data.counts("train")["empty_dropped"] == 1
    if options.level == "words":
        expected = "\n".join(" ".join(line.split()) for line in expected.split("\n"))
    assert text_of(data, data.train).decode() == expected
    found = [data.vocabulary.decode(data.train.documents[index].tolist()) for index in range(data.train.num_documents)]
    cuts = {"none": [expected], "files": [expected[:-12], expected[-12:]], "lines": expected.splitlines(keepends=True)}
    assert found == cuts[documents]
    if documents != "none":
        ends = [data.train.documents[index][-1] for index in range(data.train.num_documents)]
        assert set(ends) == {data.vocabulary.end_id}
    counts = data.counts("train")
    assert counts["documents"] == (0 if documents == "none" else len(found))
    assert counts["tokens"] == len(data.train)


def test_counts_are_those_of_the_text(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", valid=TextBlock("v", b"a b"), test=TextBlock("t", RAW))
    counts = data.counts("train")
    assert (counts["bytes"], counts["characters"]) == (len(TEXT.encode()), len(TEXT))
    assert (counts["words"], counts["lines"]) == (len(TEXT.split()), TEXT.count("\n"))
    assert counts["tokens"] == counts["bytes"]
    assert text_of(data, data.test) == RAW
    assert text_of(data, data.valid) == b"a b"
    assert data.counts("valid")["words"] == 2
    words = prepared(tmp_path / "words", WORDS, valid=TextBlock("v", b"the zebra\nsees <unk> twice"))
    assert words.counts("train")["tokens"] == words.counts("train")["words"] + words.counts("train")["lines"]
    assert words.counts("valid")["unknown"] == 3
    assert words.counts("valid")["lines"] == 2  # a last line gets its line break
    for split in ("train", "valid"):
        assert words.counts(split)["bad_utf8_replaced"] == 0
    with pytest.raises(DataError, match="no test text"):
        words.counts("test")


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(content=st.lists(st.sampled_from([b"a", b" ", b"\n", b"bc", b"\xc3\xa9", b"\t"]), min_size=2, max_size=40))
def test_counts_in_blocks_of_any_size(tmp_path_factory, monkeypatch, content):
    monkeypatch.setattr("manyheads.data.language.preparing.BLOCK_BYTES", 3)
    monkeypatch.setattr("manyheads.data.language.preparing.PART_BYTES", 2)
    text = b"".join(content)
    for documents in ("none", "lines"):
        options = VocabularySettings(documents=documents)  # type: ignore[arg-type]
        folder = tmp_path_factory.mktemp("d") / "data"
        try:
            data = prepared(folder, options, train=TextBlock("t", text))
        except DataError:
            assert not text.strip()
            assert documents == "lines"
            continue
        counts = data.counts("train")
        kept = text
        if documents == "lines":
            kept = b"".join(line for line in text.splitlines(keepends=True) if line.strip())
            assert [data.train.documents[index][:-1].tobytes() for index in range(data.train.num_documents)] == [
                line.astype(data.train.ids.dtype).tobytes() for line in _lines(kept)
            ]
        assert counts["bytes"] == len(kept)
        assert counts["words"] == len(kept.split())
        assert counts["characters"] == len(kept.decode())
        assert counts["lines"] == kept.count(b"\n")


def _lines(text: bytes) -> list[Any]:
    import numpy as np

    return [np.frombuffer(line.rstrip(b"\n"), np.uint8) for line in text.splitlines(keepends=True)]


def test_text_is_held_back_from_the_end(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % number for number in range(10))  # 7 bytes each
    block = TextBlock("t", text)
    data = prepared(tmp_path / "b", train=block, holdout=Holdout(valid=10, test=5))
    assert [text_of(data, store) for store in (data.train, data.valid, data.test)] == [
        text[:-15],
        text[-15:-5],
        text[-5:],
    ]
    assert data.manifest["origin"]["test"] == "bytes 65 to 70 of t"
    for number, options in enumerate((PIECES, VocabularySettings(documents="lines"))):
        data = prepared(tmp_path / f"w{number}", options, train=block, holdout=Holdout(valid=9, test=7))
        parts = [text_of(data, store) for store in (data.train, data.valid, data.test)]
        assert parts == [text[:56], text[56:63], text[63:]]  # moved on to the next line, unless one begins there
        with pytest.raises(DataError, match="no test text in bytes 70 to 70"):
            prepared(tmp_path / "bad", options, train=block, holdout=Holdout(valid=14, test=5))
    words = prepared(tmp_path / "words", WORDS, train=block, holdout=Holdout(valid=9))
    assert text_of(words, words.valid) == b"line <unk>\n"  # what is held back teaches nothing
    made = sorted(str(path.relative_to(words.path)) for path in words.path.rglob("*") if path.is_file())
    stores = [f"{split}/{name}" for split in ("train", "valid") for name in STORE]
    assert made == ["manifest.json", "tokenizer.json", *stores]
    files_of = TextFiles(paths=[_file(tmp_path / "one", text[:28]), _file(tmp_path / "two", text[28:])])
    data = prepared(tmp_path / "f", VocabularySettings(documents="files"), train=files_of, holdout=Holdout(valid=7))
    assert [data.vocabulary.decode_bytes(data.train.documents[i].tolist()) for i in (0, 1)] == [text[:28], text[28:-7]]
    assert data.counts("valid")["documents"] == 1
    for cut, message in (
        (Holdout(valid=65, test=5), "none is left to train on"),
        (Holdout(whole=71), "has 70 bytes, but the corpus of that name has 71"),
    ):
        with pytest.raises(DataError, match=message):
            prepared(tmp_path / "bad", train=block, holdout=cut)
    with pytest.raises(ConfigError, match="there are files for it already"):
        prepared(tmp_path / "bad", train=block, valid=block, holdout=Holdout(valid=1))
    with pytest.raises(ConfigError, match="-1 bytes"):
        Holdout(test=-1)
    assert not (tmp_path / "bad").exists()


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_bad_bytes_are_data_or_named(tmp_path: Path) -> None:
    path = _file(tmp_path / "f", b"good\nb\xe4d\nmore\n")
    assert text_of(*_with_train(prepared(tmp_path / "b", train=TextFiles(paths=[path])))) == path.read_bytes()
    for options in (WORDS, PIECES):
        with pytest.raises(DataError, match=r"f: line 2 is not UTF-8: byte 0xe4 at byte offset 6"):
            prepared(tmp_path / "bad", options, train=TextFiles(paths=[path]))
    data = prepared(tmp_path / "r", WORDS, train=TextFiles(paths=[path], on_bad_utf8="replace"))
    assert text_of(*_with_train(data)) == "good\nb\ufffdd\nmore\n".encode()
    assert data.counts("train")["bad_utf8_replaced"] == 1
    data = prepared(tmp_path / "s", WORDS, train=TextFiles(paths=[path], on_bad_utf8="skip"))
    assert text_of(*_with_train(data)) == b"good\nmore\n"
    assert data.counts("train")["bad_utf8_skipped"] == 1
    assert "1 bad utf8 skipped" in data.describe()


def _with_train(data: TextData) -> tuple[TextData, TokenStore]:
    return data, data.train


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT.encode() * 1000)
    cases: list[tuple[bytes, str]] = [
        (packed[:-20], "cut off or damaged"),
        (b"PK\x03\x04 and more of it", "is a zip file"),
        (b"BZh91AY&SY and more", "is a bzip2 file"),
        (b"PK\x03\x04", "is a zip file"),
        (b"", "There is no train text in"),
    ]
    for content, message in cases:
        with pytest.raises(DataError, match=message):
            prepared(tmp_path / "bad", train=TextFiles(paths=[_file(tmp_path / "f", content)]))
    with pytest.raises(DataError, match="is a directory"):
        prepared(tmp_path / "bad", train=TextFiles(paths=[tmp_path]))
    with pytest.raises(DataError, match="There is no valid text"):
        prepared(tmp_path / "bad", valid=TextFiles(paths=[_file(tmp_path / "f", b"")]))
    with pytest.raises(DataError, match="every line is empty"):
        prepared(tmp_path / "bad", VocabularySettings(documents="lines"), train=TextBlock("t", b"\n \n"))
    for paths, message in (([], "at least one file"), (["-", "-"], "can be read once")):
        with pytest.raises(ConfigError, match=message):
            TextFiles(paths=paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f"]
    short = list(TextFiles(paths=[_file(tmp_path / "f", b"a")]).read(as_bytes=True, report=ReadReport()))
    assert b"".join(block for block, _ in short) == b"a"
    assert TextFiles(paths=["a", "b", "c", "d", "e"]).describe() == "a + b + c and 2 more"


def test_a_vocabulary_can_be_used_again(tmp_path: Path) -> None:
    first = prepared(tmp_path / "a", WORDS)
    again = prepared(tmp_path / "b", first.vocabulary, train=TextBlock("t", b"the zebra\n"))
    assert again.vocabulary.digest == first.vocabulary.digest
    assert again.counts("train")["unknown"] == 1
    assert again.manifest["tokenizer"]["settings"] is None


def test_the_same_text_gives_the_same_folder(tmp_path: Path) -> None:
    digests = {
        options.level: prepared(tmp_path / f"a-{options.level}", options).digest for options in (BYTES, WORDS, PIECES)
    }
    for options in (BYTES, WORDS, PIECES):
        assert prepared(tmp_path / f"b-{options.level}", options).digest == digests[options.level]
    assert len(set(digests.values())) == 3
    described = TextData.open(tmp_path / "a-words", verify=False).describe().split("\n")
    assert described[0] == f"data {digests['words'][:12]} in {tmp_path / 'a-words'}, for a language model"
    assert described[1].startswith("vocabulary words, ")
    assert described[2].startswith(f"train: 21 tokens, {len(TEXT.encode())} bytes, 17 words")


def test_tasks_are_told_apart(tmp_path: Path) -> None:
    text = prepared(tmp_path / "text")
    pairs = PairList("p", [("a b", "c d")])
    prepare_corpus(tmp_path / "pairs", train=pairs, tokenizer=TokenizerSettings(vocab_size=300))
    assert [prepared_task(text.path), prepared_task(tmp_path / "pairs")] == ["language-modelling", "translation"]
    with pytest.raises(DataError, match="holds a text for language models"):
        PreparedData.open(text.path)
    with pytest.raises(DataError, match="holds data for translation"):
        TextData.open(tmp_path / "pairs")
    with pytest.raises(DataError, match="prepare --task lm"):
        TextData.open(tmp_path / "none")
    path = text.path / "manifest.json"
    content = {**json.loads(path.read_text()), "task": ["x"]}
    path.write_bytes(data_manifest._render({**content, "sha256": data_manifest._own_digest(content)}))
    with pytest.raises(DataError, match=r"task is \["):
        TextData.open(text.path)


def test_damage_is_noticed(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", WORDS, valid=TextBlock("v", b"a\n"))
    prepared(tmp_path / "other", WORDS, train=TextBlock("t", b"other words\n"))
    for path in sorted(path for path in data.path.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for changed in (content[:-1], bytes([content[0] ^ 1]) + content[1:]):
            path.write_bytes(changed)
            with pytest.raises(DataError):
                TextData.open(data.path)
        path.write_bytes(content)
    for name in ("tokenizer.json", "train/manifest.json"):
        content = (data.path / name).read_bytes()
        (data.path / name).write_bytes((tmp_path / "other" / name).read_bytes())
        with pytest.raises(DataError):
            TextData.open(data.path)
        (data.path / name).write_bytes(content)
    (data.path / "test.text").touch()
    assert TextData.open(data.path).digest == data.digest  # not of a kind that is read
    (data.path / "more.txt").touch()
    with pytest.raises(DataError, match="does not list"):
        TextData.open(data.path)


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", WORDS)
    learn_vocabulary(["x"], WORDS).save(data.path / "tokenizer.json")
    path = data.path / "manifest.json"
    content = json.loads(path.read_text())
    content["files"]["tokenizer.json"] = data_manifest.file_record(data.path / "tokenizer.json")
    path.write_bytes(data_manifest._render({**content, "sha256": data_manifest._own_digest(content)}))
    with pytest.raises(DataError, match="was made for a vocabulary of"):
        TextData.open(data.path)


def test_nothing_is_left_by_what_fails(tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "encode train":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_text(tmp_path / "d", train=TextBlock("t", TEXT.encode()), vocabulary=WORDS, progress=stop)
    assert list(tmp_path.iterdir()) == []
    prepared(tmp_path / "d")
    with pytest.raises(DataError, match="exists already"):
        prepared(tmp_path / "d")
    old = TextData.open(tmp_path / "d").digest
    with pytest.raises(KeyboardInterrupt):
        prepare_text(tmp_path / "d", train=TextBlock("t", b"a\n"), vocabulary=WORDS, replace=True, progress=stop)
    assert TextData.open(tmp_path / "d").digest == old
    assert prepared(tmp_path / "d", WORDS, replace=True).digest != old


def test_the_embedded_novel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = load_novel()
    whole = b"".join(texts.values())
    assert hashlib.sha256(whole).hexdigest() == NOVEL_DIGEST
    assert [round(len(text) / len(whole), 3) for text in texts.values()] == [0.9, 0.05, 0.05]
    assert texts["train"].endswith(b"\n\n")
    assert texts["valid"].startswith("“Where is the key?".encode())
    options = SegmentSettings(path=NOVEL)
    data = open_text(options, BYTES, tmp_path)
    assert [text_of(data, store) for store in (data.train, data.valid, data.test)] == list(texts.values())
    made = {path: path.stat().st_mtime_ns for path in data.path.rglob("*")}
    again = open_text(options, BYTES, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in again.path.rglob("*")} == made
    assert open_text(options, VocabularySettings(documents="files"), tmp_path).path != data.path
    next(data.path.rglob("tokens.ids.bin")).write_bytes(b"damaged")
    assert open_text(options, BYTES, tmp_path).digest == again.digest
    monkeypatch.setattr("manyheads.data.corpora.NOVEL_DIGEST", "0")
    with pytest.raises(DataError, match="damaged; install manyheads again"):
        load_novel()


def test_the_novel_is_the_public_domain_text(shared: Path) -> None:
    path = shared / "data" / "text" / "crime_and_punishment.body.txt.gz"
    assert gzip.decompress(path.read_bytes()) == b"".join(load_novel().values())
    notice = files("manyheads.data.corpora").joinpath("ATTRIBUTION.txt").read_text(encoding="utf-8")
    assert "crime-and-punishment.txt.gz" in notice
    assert "Constance Garnett" in notice


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "language-models.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(page), "exec"), {})  # noqa: S102
    first, *counts = capsys.readouterr().out.strip().split("\n")
    assert first.startswith("1,043,952 tokens to predict in 16 lanes, 510 steps")
    assert sum(map(int, counts)) == len(load_novel()["valid"]) - 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("embedded:tatoeba-en-de", "is for translation"),
        ("embedded:war-and-peace", "the embedded one is embedded:crime-and-punishment"),
        ("embeded:crime-and-punishment", "did you mean embedded:crime"),
        ("nowhere", "prepare --task lm"),
    ],
)
def test_paths_that_name_no_text(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        open_text(SegmentSettings(path=path), BYTES, tmp_path)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("manyheads.data.preparing.write_manifest", full)
    with pytest.raises(SaveError, match="No space left"):
        prepared(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_layouts_find_their_files(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        _file(tmp_path / f"wiki.{split}.tokens", b"a\n")
    with pytest.raises(DataError, match=r"no wiki.test.tokens or wiki.test.tokens.gz or test.txt or test.txt.gz in it"):
        find_layout("wikitext-103", tmp_path)
    _file(tmp_path / "test.txt.gz", b"a\n")
    found = find_layout("wikitext-2", tmp_path)
    assert [paths[0].name for paths in found.paths.values()] == [
        "wiki.train.tokens",
        "wiki.valid.tokens",
        "test.txt.gz",
    ]
    alone = _file(tmp_path / "anything", b"a")
    assert find_layout("enwik8", alone).paths == {"train": [alone]}
    assert find_layout("text8", _file(tmp_path / "text8", b"a").parent).paths == {"train": [tmp_path / "text8"]}
    billion = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    for name in ("training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"):
        (billion / name).mkdir(parents=True)
    for number in (3, 1, 2):
        _file(billion / "training-monolingual.tokenized.shuffled" / f"news.en-0000{number}-of-00100", b"a\n")
    for number in range(3):
        _file(billion / "heldout-monolingual.tokenized.shuffled" / f"news.en.heldout-0000{number}-of-00050", b"a\n")
    for place in (tmp_path, billion):
        paths = find_layout("lm1b", place).paths
        assert [path.name[8:13] for path in paths["train"]] == ["00001", "00002", "00003"]
        assert paths["valid"] != paths["test"]  # the official script takes one file for both
    (tmp_path / "simple-examples" / "data").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        _file(tmp_path / "simple-examples" / "data" / f"ptb.{split}.txt", b"a\n")
    found = find_layout("ptb", tmp_path / "simple-examples")
    assert [paths[0].name for paths in found.paths.values()] == ["ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"]
    for layout in LAYOUTS.values():
        VocabularySettings(**layout.vocabulary)
