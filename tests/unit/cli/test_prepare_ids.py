"""`manyheads prepare --task lm` of what is no text: ids in binary files, and pictures."""

import json

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")


def test_the_command_prepares_ids_and_pictures(manyheads, printed, tmp_path, capsys):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "events.bin")
    common = ["prepare", "--task", "lm", "--valid-bytes", "200"]
    given = ["--format", "u16", "--corpus", tmp_path / "events.bin", "-o", tmp_path / "events"]
    assert manyheads(*common, *given, "--vocab-size", "1024") == 0
    captured = capsys.readouterr()
    assert "train: 900 tokens from ids 0 to 900" in captured.out
    assert "vocabulary  ids, 1,024 ids" in captured.out
    (tmp_path / "in").mkdir()
    for number in range(3):
        pixels = np.full((8, 8, 3), number * 50, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "in" / f"{number}.png")
    assert manyheads(*common, "--layout", "images", "--image-size", "8", "--corpus", tmp_path / "in", "-o",
                     tmp_path / "pictures") == 0  # fmt: skip
    capsys.readouterr()
    record = json.loads(printed("info", tmp_path / "pictures", "--json"))
    assert (record["counts"]["train"]["documents"], record["counts"]["valid"]["documents"]) == (2, 1)
    assert record["tokenizer"]["image_size"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "images"], "needs --image-size"),
        (
            ["--layout", "images", "--image-size", "8", "--format", "bytes"],
            "--format cannot be used with --layout images: pictures are bytes",
        ),
        (
            ["--format", "bytes", "--level", "bytes"],
            "--level cannot be used with --format bytes: the files hold ids, not text",
        ),
        (["--format", "bytes", "--resize"], "--resize cannot be used without --layout images"),
        (
            ["--format", "u16", "--layout", "enwik8"],
            "--layout cannot be used with --format u16: the files hold ids, not text",
        ),
        (["--image-size", "8"], "--image-size cannot be used without --layout images"),
        (["--format", "bytes", "--documents", "lines"], "documents is 'lines'; choose one of: none, files"),
        (
            ["--format", "bytes", "--lowercase"],
            "--lowercase cannot be used with --format bytes: the files hold ids, not text",
        ),
    ],
)
def test_options_that_contradict_each_other(refused, tmp_path, arguments, message):
    (tmp_path / "a").write_bytes(b"abc")
    given = ["--corpus", tmp_path / "a", "--valid-bytes", "0", "-o", tmp_path / "data"]
    assert message in " ".join(refused("prepare", "--task", "lm", *given, *arguments).split())
