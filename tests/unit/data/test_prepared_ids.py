"""Prepared data of what is no text: ids come back from binary files and pictures; what cannot be right is refused."""

import builtins
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads.data.language.prepared import TextData
from manyheads.data.language.preparing import prepare_ids
from manyheads.data.language.segments import SegmentStream, eval_segments
from manyheads.data.language.texts import Pictures, RawFiles
from manyheads.data.preparing import Holdout
from manyheads.data.settings import SegmentSettings
from manyheads.errors import ConfigError, DataError, MissingExtraError
from manyheads.installation import install_command
from manyheads.text.of_folder import vocabulary_from_json
from manyheads.text.settings import IdSettings
from manyheads.text.vocabulary import IdVocabulary

Image = pytest.importorskip("PIL.Image")


def ids_of(data: TextData, split: str = "train") -> list[int]:
    return [int(index) for index in getattr(data, split).ids]


def prepared(folder: Path, train: Any, settings: IdSettings, **options: Any) -> TextData:
    prepare_ids(folder, train=train, settings=settings, **options)
    assert [path.name for path in folder.iterdir() if path.suffix == ".copy"] == []
    return TextData.open(folder)


def draw_pictures(folder: Path, count: int, size: int, mode: str = "RGB") -> list[np.ndarray[Any, Any]]:
    """Generated pictures: coloured gradients and a square, other ones for each number."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for number in range(count):
        rows, columns = np.mgrid[0:size, 0:size]
        pixels = np.stack([rows * 9 + number * 40, columns * 7, (rows + columns) * 5 + number], 2).astype(np.uint8)
        pixels[number % size : number % size + 2, :3] = (255, 0, number)
        Image.fromarray(pixels).convert(mode).save(folder / f"picture-{number:03}.png")
        drawn.append(pixels)
    return drawn


@pytest.mark.parametrize("form", ["bytes", "u16"])
@pytest.mark.parametrize("documents", ["none", "files"])
def test_ids_come_back(tmp_path: Path, form: str, documents: str) -> None:
    dtype = np.dtype("u1" if form == "bytes" else "<u2")
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 200 if form == "bytes" else 60_000, count).astype(dtype) for count in (700, 1, 301)]
    parts[0][:2] = (0x1F, 0x8B)  # what a gzip file begins with is data here
    for number, part in enumerate(parts):
        part.tofile(tmp_path / f"{number}.bin")
    source = RawFiles(paths=[tmp_path / f"{number}.bin" for number in range(3)], form=form)
    data = prepared(tmp_path / "data", source, IdSettings(form=form, documents=documents))  # type: ignore[arg-type]
    vocabulary = data.vocabulary
    assert isinstance(vocabulary, IdVocabulary)
    largest = max(int(part.max()) for part in parts)
    assert vocabulary.num_ids == largest + 1
    end = [vocabulary.end_id] if documents == "files" else []
    assert ids_of(data) == [index for part in parts for index in [*part.tolist(), *end]]
    assert vocabulary.decode_bytes(ids_of(data)) == b"".join(part.tobytes() for part in parts)
    counts = data.counts("train")
    assert (counts["bytes"], counts["documents"]) == (1002 * dtype.itemsize, 3 if end else 0)
    assert vocabulary_from_json(vocabulary.to_json()).digest == vocabulary.digest
    assert not vocabulary.is_text
    assert "words" not in data.describe()


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    np.arange(300, dtype="<u2").tofile(tmp_path / "good.u16")
    (tmp_path / "odd.u16").write_bytes(b"abc")
    for paths, settings, message in (
        (["odd.u16"], IdSettings(form="u16"), r"odd\.u16 has 3 bytes, which is not a multiple of 2"),
        (["good.u16"], IdSettings(form="u16", vocab_size=256), r"good\.u16 \(train\) holds the id 256, .* 256 ids"),
        (["good.u16"], IdSettings(form="u16", document_len=7), "is not a multiple of the document length 7"),
        (["none.u16"], IdSettings(form="u16"), "Cannot read"),
        ([""], IdSettings(), "is a directory"),
    ):
        source = RawFiles(paths=[tmp_path / name for name in paths], form=settings.form)
        with pytest.raises(DataError, match=message):
            prepare_ids(tmp_path / "data", train=source, settings=settings)
        assert not (tmp_path / "data").exists()
    with pytest.raises(ConfigError, match=r"packed.gz is packed"):
        RawFiles(paths=["packed.gz"])
    for bad in ({"vocab_size": 257}, {"document_len": 3, "documents": "files"}, {"image_size": 8, "document_len": 9}):
        with pytest.raises(ConfigError):
            IdSettings(**bad)  # type: ignore[arg-type]


def test_a_part_is_held_back_and_named(tmp_path: Path) -> None:
    ids = np.arange(100, dtype=np.uint8)
    ids.tofile(tmp_path / "a")
    source, cut = RawFiles(paths=[tmp_path / "a"]), Holdout(valid=25, test=10)
    data = prepared(tmp_path / "plain", source, IdSettings(), holdout=cut)
    assert (ids_of(data), ids_of(data, "valid"), ids_of(data, "test")) == (
        list(range(65)),
        list(range(65, 90)),
        list(range(90, 100)),
    )
    # With documents of one length, whole ones only: 25 bytes hold two of 10.
    data = prepared(tmp_path / "fixed", source, IdSettings(document_len=10), holdout=cut)
    assert (len(ids_of(data)), len(ids_of(data, "valid")), len(ids_of(data, "test"))) == (70, 20, 10)
    with pytest.raises(DataError, match="less than one document of 50 bytes"):
        prepare_ids(tmp_path / "no", train=source, settings=IdSettings(document_len=50), holdout=cut)
    with pytest.raises(DataError, match="none is left to train on"):
        prepare_ids(tmp_path / "no", train=source, settings=IdSettings(), holdout=Holdout(valid=100))


def test_pictures_are_documents_of_raster_bytes(tmp_path: Path) -> None:
    drawn = draw_pictures(tmp_path / "in" / "deep", 4, 8)
    data = prepared(tmp_path / "data", Pictures(paths=[tmp_path / "in"], size=8), IdSettings(image_size=8))
    vocabulary = data.vocabulary
    assert isinstance(vocabulary, IdVocabulary)
    assert (vocabulary.vocab_size, vocabulary.begin_id, vocabulary.end_id) == (257, 256, None)
    assert data.counts("train")["documents"] == 4
    # By loops: row by row, pixel by pixel, red, green, blue.
    expected = [int(p[row, col, ch]) for p in drawn for row in range(8) for col in range(8) for ch in range(3)]
    assert ids_of(data) == expected
    assert np.array_equal(vocabulary.picture(data.train.documents[2].tolist()), drawn[2])
    assert not vocabulary.picture([1, 2, 3])[1:].any()
    with pytest.raises(DataError, match="are not an image"):
        vocabulary.picture([0] * 193)


def test_pictures_of_other_sizes_are_refused_or_scaled(tmp_path: Path) -> None:
    [drawn] = draw_pictures(tmp_path / "in", 1, 16)
    with pytest.raises(
        DataError, match=r"picture-000\.png is a picture of 16 x 16 pixels, but --image-size is 8; .* --resize"
    ):
        list(Pictures(paths=[tmp_path / "in"], size=8).read())
    [(_, content, ends)] = Pictures(paths=[tmp_path / "in"], size=8, resize=True).read()
    means = drawn.reshape(8, 2, 8, 2, 3).astype(np.float64).mean((1, 3))
    assert ends
    assert np.abs(np.frombuffer(content, np.uint8).reshape(8, 8, 3) - means).max() <= 1
    draw_pictures(tmp_path / "cameras", 2, 8)
    (tmp_path / "cameras/picture-000.png").rename(tmp_path / "cameras/A.PNG")
    assert len(list(Pictures(paths=[tmp_path / "cameras"], size=8).read())) == 2
    draw_pictures(tmp_path / "grey", 1, 8, "L")
    [(_, content, _)] = Pictures(paths=[tmp_path / "grey"], size=8).read()
    assert len(content) == 192
    (tmp_path / "deep").mkdir()
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(deep).save(tmp_path / "deep/a.png")
    [(_, content, _)] = Pictures(paths=[tmp_path / "deep"], size=8).read()
    assert np.array_equal(np.frombuffer(content, np.uint8).reshape(8, 8, 3), np.repeat(deep[:, :, None] >> 8, 3, 2))
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nand no more")
    # Pillow ends an empty colour profile after the pixels with an IndexError.
    content = (tmp_path / "deep/a.png").read_bytes()
    profile = b"\0\0\0\0iCCP" + zlib.crc32(b"iCCP").to_bytes(4, "big")
    (tmp_path / "profile.png").write_bytes(content[:-12] + profile + content[-12:])
    is_bad = "cannot be read as a PNG"
    for name, message in (("bad.png", is_bad), ("profile.png", is_bad), ("no", "There is no file")):
        with pytest.raises(DataError, match=message):
            list(Pictures(paths=[tmp_path / name], size=8).read())


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("images"))):
        list(Pictures(paths=[tmp_path], size=8).read())


def test_documents_of_one_length_are_read_whole_from_their_beginning(tmp_path: Path) -> None:
    """Each picture is one segment: what is read is the beginning and all bytes but the last, what is predicted all."""
    draw_pictures(tmp_path / "in", 5, 4)
    data = prepared(tmp_path / "data", Pictures(paths=[tmp_path / "in"], size=4), IdSettings(image_size=4))
    documents = [data.train.documents[number].tolist() for number in range(5)]
    for order in ("text", "shuffled"):
        settings = SegmentSettings(lanes=2, segment_len=48, documents="separate", order=order)
        stream = SegmentStream(data.train, settings, 1, end_id=None, begin_id=data.vocabulary.begin_id)
        seen = []
        for row in range(stream.rows(0)):
            batch = stream.whole(0, row)
            for lane, length in enumerate(batch.lengths.tolist()):
                if length:
                    assert length == 48
                    assert batch.resets[lane]
                    assert batch.tokens[lane].tolist() == [256, *batch.targets[lane, :-1].tolist()]
                    seen.append(batch.targets[lane].tolist())
        assert sorted(seen) == sorted(documents)
    batches = eval_segments(
        data.train, lanes=3, segment_len=20, end_id=None, documents="separate", begin_id=data.vocabulary.begin_id
    )
    firsts = [int(b.tokens[i, 0]) for b in batches for i in range(len(b.lengths)) if b.resets[i]]
    assert firsts == [256] * 5
