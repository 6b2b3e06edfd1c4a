"""Many shards in one stream: jsonl, jsonl.gz, jsonl.zst and Parquet, in a folder or at an address of fsspec."""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from extras.sources.test_sources import DE, EN, LANGUAGES, refused, text

from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.lines import limited_input
from manyheads.data.translation.preparing import PairList, prepare_corpus
from manyheads.errors import DataError
from manyheads.extras.sources import shards
from manyheads.extras.sources.names import fetch_shard, listed_at
from manyheads.text.settings import TokenizerSettings, VocabularySettings

Run = Callable[..., int]
VALID = ("--valid-count", "2")


def zst(content: bytes) -> bytes:
    """A zstd file of two frames, as some programs write them."""
    found = b""
    for part in (content[: len(content) // 2], content[len(content) // 2 :]):
        buffer = pyarrow.BufferOutputStream()
        file = pyarrow.CompressedOutputStream(buffer, "zstd")
        file.write(part)
        file.close()
        found += buffer.getvalue().to_pybytes()
    return found


def write_shards(folder: Path, records: Sequence[dict[str, object]]) -> list[Path]:
    """Write records into a file of each form, in the order of the names, with an empty one."""
    folder.mkdir(parents=True)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    third = len(records) // 4
    (folder / "a.jsonl").write_bytes(text(lines[:third])[:-1])  # without a last line break
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text(lines[third : 2 * third])))
    (folder / "c.jsonl.zst").write_bytes(zst(text(lines[2 * third : 3 * third])))
    (folder / "d.jsonl").write_bytes(b"")
    table = pyarrow.Table.from_pylist(records[3 * third :])
    pyarrow.parquet.write_table(table, folder / "e.parquet", row_group_size=3)
    return sorted(folder.iterdir())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a few lines, and a cache of the test's own."""
    monkeypatch.setattr(shards, "BLOCK_BYTES", 100)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    monkeypatch.setattr("manyheads.data.lines.CHUNK_BYTES", 64)
    monkeypatch.setenv("MANYHEADS_SOURCES", str(tmp_path / "cache"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.bin")} | {
        name: (folder / name).read_bytes() for name in ("tokenizer.json",)
    }


@pytest.mark.one_in(3, "shards in processes")
def test_shards_of_pairs_are_one_stream_with_any_number_of_processes(prepare, tmp_path, monkeypatch):
    pairs = [(f"{en} {number}", f"{de} {number}") for number in range(4) for en, de in zip(EN, DE, strict=True)]
    write_shards(tmp_path / "shards", [{"translation": {"en": en, "de": de}} for en, de in pairs])
    (tmp_path / "one.tsv").write_bytes(text([f"{en}\t{de}" for en, de in pairs]))
    made = []
    for source, processes in ((tmp_path / "one.tsv", 1), (tmp_path / "shards", 1), (tmp_path / "shards", 2)):
        assert prepare("--from", source, *VALID, *LANGUAGES, "--processes", processes) == 0
        made.append(files(tmp_path / "data"))
        shutil.rmtree(tmp_path / "data")
    assert made[0] == made[1] == made[2]


def test_the_keys_are_those_of_the_first_record_also_if_the_first_shards_are_empty(prepare, tmp_path, capsys):
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = [json.dumps({"translation": {"en": en, "de": de}}) for en, de in zip(EN, DE, strict=True)]
    (folder / "a.jsonl").write_bytes(b"")
    pyarrow.parquet.write_table(pyarrow.table({"translation": pyarrow.array([], pyarrow.null())}), folder / "b.parquet")
    (folder / "c.jsonl").write_bytes(text(["", *rows]))
    assert prepare("--from", folder, *VALID, *LANGUAGES) == 0, capsys.readouterr().err


@pytest.mark.one_in(3, "shards in processes")
def test_encoding_in_several_processes_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.data.language.preparing.PART_BYTES", 40)
    monkeypatch.setattr("manyheads.data.translation.preparing.PART_ROWS", 4)
    pieces = {"vocab_size": 300}
    made: dict[str, list[dict[str, bytes]]] = {}
    for processes in (1, 3):
        share: dict[str, Any] = {"in_order": partial(shards.in_order, processes=processes)}
        for documents in ("none", "lines"):
            settings = VocabularySettings(level="bpe", documents=documents, **pieces)  # type: ignore[arg-type]
            folder = tmp_path / f"{documents}{processes}"
            prepare_text(folder, train=TextBlock("x", text([*EN, "", *DE])), vocabulary=settings, **share)
            made.setdefault(documents, []).append(files(folder))
        pairs = PairList("x", [*zip(EN, DE, strict=True)])
        prepare_corpus(tmp_path / f"{processes}", train=pairs, tokenizer=TokenizerSettings(**pieces), **share)
        made.setdefault("pairs", []).append(files(tmp_path / f"{processes}"))
    for one, three in made.values():
        assert one == three


def test_an_error_of_another_process_is_raised_in_this_one() -> None:
    for work, error in ((int, ValueError), (len, TypeError)):  # not errors of ours, so they are told with their place
        with pytest.raises(RuntimeError, match=error.__name__):
            list(shards.in_order(work, ["a", 1], processes=2))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="fewer --processes"):
        list(shards.in_order(os._exit, [1, 1], processes=2))  # type: ignore[arg-type]


def test_a_process_is_started_only_for_several_items() -> None:
    for processes, items in ((1, ["a", "b"]), (2, ["a"]), (2, [])):
        found = list(shards.in_order(lambda item: [item, os.getpid()], items, processes=processes))
        assert found == [each for item in items for each in (item, os.getpid())]


@pytest.mark.one_in(3, "shards in processes")
def test_shards_of_texts_at_an_address(manyheads: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_shards(tmp_path / "shards", [{"text": f"{line}\n{line}"} for line in (*EN, *DE)])
    memory = fsspec.filesystem("memory")
    for path in paths:
        memory.pipe_file(f"/bucket/train/{path.name}", path.read_bytes())
    memory.pipe_file("/bucket/dev/x.jsonl", text([json.dumps({"text": "held out"})]))
    try:
        made = []
        command = ("prepare", "--task", "lm", "--level", "words", "--output", tmp_path / "data", "--replace")
        named = [word for path in paths for word in ("--from", path)]
        for source in (
            (*named, "--valid-from", "memory://bucket/dev/x.jsonl"),
            ("--from", f"file://{tmp_path}/shards", "--valid-from", "memory://bucket/dev/*"),
            ("--from", "memory://bucket", "--valid-from", "memory://bucket"),
            ("--from", "memory://bucket/train/*", "--valid-from", "memory://bucket/dev", "--processes", "2"),
        ):
            assert manyheads(*command, *source) == 0, capsys.readouterr().err
            made.append(files(tmp_path / "data"))
            assert TextData.open(tmp_path / "data").manifest["counts"]["train"]["lines"] == 40
        assert made == made[:1] * 4
        recorded = json.loads((tmp_path / "sources.lock").read_text("utf-8"))["files"]
        assert "memory:///bucket/train/c.jsonl.zst" in recorded
        assert not any(name.startswith("file:") for name in recorded)
        memory.pipe_file("/bucket/train/a.jsonl", b'{"text": "another"}\n')
        shutil.rmtree(tmp_path / "data")
        refused(manyheads(*command, *source), capsys, tmp_path, "has changed", "--update")
        assert manyheads(*command, *source, "--update") == 0
    finally:
        memory.rm("/bucket", recursive=True)


HALF = b'{"text": "half \\ud800"}\n'
BAD = {
    "plain http": ("http://example.org/a.jsonl", ["only https"]),
    "https without its kind": ("https://example.org/a.jsonl", ["url:https"]),
    "ftp": ("ftp://example.org/a.jsonl", ["not encrypted"]),
    "a chain": ("simplecache::memory://a.jsonl", ["addresses inside addresses"]),
    "an unknown scheme": ("memry://a.jsonl", ["knows no scheme 'memry'", "memory"]),
    "a scheme without its package": ("oss://bucket/a.jsonl", ["ossfs"]),
    "nothing there": ("memory://nothing/a.jsonl", ["there is no file"]),
    "no folder of this disk": ("file:///nothing/there", ["there is no file"]),
    "too large": ("memory://bad/a.jsonl", ["at most 10 bytes", "--most-bytes"]),
    "not a zstd file": ("memory://bad/a.jsonl.zst", ["not an intact zstd file"]),
    "a cut zstd file": ("memory://bad/cut.jsonl.zst", ["not an intact zstd file", "Truncated"]),
    "no Parquet file": ("memory://bad/a.parquet", ["not an intact Parquet file"]),
    "no JSON": ("memory://bad/b.jsonl", ["line 6 "]),
    "not UTF-8": ("memory://bad/c.jsonl", ["line 5 is not UTF-8", "byte offset 168"]),
    "half a surrogate pair": ("memory://bad/e.jsonl", ["line 2 holds half a surrogate pair", "--on-bad-utf8"]),
    "a text that is null": ("memory://bad/f.jsonl", ["line 1: the value of 'text' is not text: 'None'"]),
    "a column that is not UTF-8": ("memory://bad/f.parquet", ["not an intact Parquet file", "utf-8"]),
    "no text in it": ("memory://bad/d.jsonl", ["line 1 has no text under", '"title"']),
    "other columns": ("memory://bad/d.parquet", ["has no text under", '"title"']),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_shards(kind: str, manyheads: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = text([json.dumps({"text": "a line of thirty characters."})])
    table = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"title": ["x"]}), table)
    bad = pyarrow.BufferOutputStream()
    letters = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": letters}), bad)
    memory = fsspec.filesystem("memory")
    for name, content in {
        "a.jsonl": line, "a.jsonl.zst": line, "cut.jsonl.zst": zst(line * 9)[:-5], "a.parquet": line,
        "b.jsonl": line * 5 + b"{\n", "c.jsonl": line * 4 + line[:4] + b"\xff\n", "d.jsonl": b'{"title": "x"}\n',
        "d.parquet": table.getvalue().to_pybytes(), "e.jsonl": line + HALF, "f.jsonl": b'{"text": null}\n',
        "f.parquet": bad.getvalue().to_pybytes(),
    }.items():  # fmt: skip
        memory.pipe_file(f"/bad/{name}", content)
    try:
        source, words = BAD[kind]
        most = ("--most-bytes", "10") if kind == "too large" else ()
        code = manyheads(
            "prepare", "--task", "lm", "--from", source, "--valid-bytes", "9", "-o", tmp_path / "data", *most
        )
        refused(code, capsys, tmp_path, *words)
        assert not list((tmp_path / "cache").rglob("*.part"))
    finally:
        memory.rm("/bad", recursive=True)


@pytest.mark.parametrize(("way", "lines", "count"), [("replace", 11, "replaced"), ("skip", 10, "skipped")])
def test_half_a_surrogate_pair_in_a_text_is_replaced_or_skipped(way, lines, count, manyheads, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(text([json.dumps({"text": line}) for line in EN]) + HALF)
    command = ("prepare", "--task", "lm", "--level", "words", "--from", tmp_path / "a.jsonl", "--valid-bytes", "25")
    assert manyheads(*command, "--on-bad-utf8", way, "-o", tmp_path / "data") == 0
    counts = TextData.open(tmp_path / "data").manifest["counts"]
    assert counts["train"]["lines"] + counts["valid"]["lines"] == lines
    assert counts["train"][f"bad_utf8_{count}"] == 1


def test_a_shard_that_vanished_after_it_was_listed(manyheads, tmp_path, monkeypatch, capsys):
    memory = fsspec.filesystem("memory")
    line = text([json.dumps({"text": "a line"})] * 9)
    for name in ("a", "b"):
        memory.pipe_file(f"/gone/{name}.jsonl", line)

    def fetched_and_removed(*given: object) -> object:
        found = fetch_shard(*given)  # type: ignore[arg-type]
        if memory.exists("/gone/b.jsonl"):
            memory.rm("/gone/b.jsonl")
        return found

    monkeypatch.setattr("manyheads.extras.sources.finding.fetch_shard", fetched_and_removed)
    command = ("prepare", "--task", "lm", "--from", "memory://gone", "--valid-bytes", "9", "-o", tmp_path / "data")
    try:
        refused(manyheads(*command), capsys, tmp_path, "b.jsonl has vanished")
        assert [path.name for path in (tmp_path / "cache").rglob("*.jsonl")] == ["a.jsonl"]
        memory.pipe_file("/gone/b.jsonl", line)
        monkeypatch.setattr("manyheads.extras.sources.finding.fetch_shard", fetch_shard)
        assert manyheads(*command) == 0
    finally:
        memory.rm("/gone", recursive=True)
    local = listed_at(f"file://{tmp_path}/cache", "--from", 100)
    with pytest.raises(Exception, match="has vanished"):
        fetch_shard(local, str(tmp_path / "other"), None)  # type: ignore[arg-type]


def test_a_zstd_file_is_limited(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zst(b'{"text": "x"}\n' * 1000))
    with limited_input(1000), pytest.raises(Exception, match="more than 1,000 bytes"):
        list(shards.blocks_of_shard(tmp_path / "a.jsonl.zst"))


def test_blocks_are_whole_lines(tmp_path: Path) -> None:
    content = b"".join(b"x" * (number % 150) + b"\n" for number in range(300))
    (tmp_path / "a.jsonl").write_bytes(content)
    *blocks, _ = shards.blocks_of_shard(tmp_path / "a.jsonl")
    assert b"".join(block.content for block in blocks) == content  # type: ignore[union-attr]
    for block, after in pairwise(blocks):
        assert isinstance(block, shards.Lines)
        assert isinstance(after, shards.Lines)
        assert block.content.endswith(b"\n")
        assert (after.first, after.offset) == (
            block.first + block.content.count(b"\n"),
            block.offset + len(block.content),
        )


def vanish(path: Path) -> None:
    path.unlink()


def change(path: Path) -> None:
    path.write_bytes(b'{"text": "another"}\n')


@pytest.mark.parametrize(("damage", "word"), [(vanish, "vanished"), (change, "changed")])
def test_a_shard_that_is_another_after_a_kill(
    damage: Callable[[Path], None], word: str, manyheads: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    first, *_ = write_shards(tmp_path / "shards", [{"text": line} for line in (*EN, *DE)])
    content = first.read_bytes(), first.stat()
    command = ("prepare", "--task", "lm", "--from", tmp_path / "shards", "--valid-bytes", "9", "-o", tmp_path / "data")
    with monkeypatch.context() as killed:
        killed.setattr("manyheads.data.language.preparing.TokenSource.encode", interrupted)
        assert manyheads(*command) == 130
    capsys.readouterr()
    damage(first)
    refused(manyheads(*command), capsys, tmp_path, f"{first} has {word} since", f"remove {tmp_path}/data.preparing")
    other = write_shards(tmp_path / "other", [{"text": line} for line in EN])[0].parent
    assert manyheads(*command[:4], other, *command[5:], "--replace") == 0  # of another source nothing is known
    first.write_bytes(content[0])
    os.utime(first, ns=(content[1].st_atime_ns, content[1].st_mtime_ns))
    assert manyheads(*command, "--replace") == 0
    assert not (tmp_path / "data.preparing").exists()


def test_a_shard_that_is_a_link_to_nothing(manyheads: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_shards(tmp_path / "shards", [{"text": line} for line in EN])[0].parent
    (folder / "f.jsonl").symlink_to(tmp_path / "gone")
    command = ("prepare", "--task", "lm", "--from", folder, "--valid-bytes", "9", "-o", tmp_path / "data")
    refused(manyheads(*command), capsys, tmp_path, "f.jsonl has vanished", "link to nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_error_in_a_shard_leaves_nothing_and_can_be_mended(manyheads, tmp_path, capsys):
    paths = write_shards(tmp_path / "shards", [{"text": line} for line in EN])
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[:-3])
    command = ("prepare", "--task", "lm", "--from", tmp_path / "shards", "--valid-bytes", "9", "-o", tmp_path / "data")
    refused(manyheads(*command), capsys, tmp_path, f"{paths[0]}: line 2 ", "not valid JSON")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards"]
    paths[0].write_bytes(whole)
    assert manyheads(*command) == 0


def test_other_files_beside_shards_are_named(manyheads, tmp_path, capsys):
    folder = write_shards(tmp_path / "shards", [{"text": line} for line in EN])[0].parent
    (folder / "README.md").write_text("about these data\n")
    (folder / "a.json").write_text("{}")
    (folder / "z.txt").write_bytes(text(DE))
    command = ("prepare", "--task", "lm", "--level", "words", "--from", folder, "--valid-bytes", "60")
    assert manyheads(*command, "-o", tmp_path / "data") == 0
    assert "not read, because beside shards they are no text: README.md, a.json" in capsys.readouterr().out
    counts = TextData.open(tmp_path / "data").manifest["counts"]
    assert counts["train"]["lines"] + counts["valid"]["lines"] == 20
