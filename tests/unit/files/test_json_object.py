"""JSON files of possibly external origin that hold one object."""

import json
from pathlib import Path

import pytest

from manyheads.errors import ModelFileError
from manyheads.files.verify import json_text, read_object


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"a": [1, null]}', encoding="utf-8")
    assert read_object(tmp_path / "one.json") == {"a": [1, None]}
    (tmp_path / "pair.json").write_bytes(rb'{"a": "\ud83d\ude00"}')
    assert read_object(tmp_path / "pair.json") == {"a": "\U0001f600"}
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff{}", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (rb'{"a": ["\ud83d"]}', "half a surrogate pair, U+D83D"),
        (rb'{"\uDC00": 1}', "half a surrogate pair, U+DC00"),
        (b"[1]", "must hold one JSON object, not a list"),
        (b"{}" + b" " * (16 << 20), "at most 16,777,216 bytes are read"),
    ],
)
def test_anything_else_is_refused_by_name(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"file\.json") as caught:
        read_object(file)
    assert reason in str(caught.value)


def test_what_json_does_not_have_becomes_null() -> None:
    record = {"a": float("inf"), "b": [1.5, float("nan"), {"c": (-float("inf"), "ü")}]}
    assert json_text(record) == '{"a": null, "b": [1.5, null, {"c": [null, "ü"]}]}'
    assert json.loads(json_text(record, indent=2)) == json.loads(json_text(record))
