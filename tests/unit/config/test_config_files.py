"""Settings files: what is refused, where the mistake is, and that what is written is read back."""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.config.build import build
from manyheads.config.files import MAX_BYTES, load_yaml, parse_yaml, to_json, to_yaml
from manyheads.errors import ConfigError
from manyheads.tasks.translation.settings import TrainConfig


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f, line 3: `a` was already set at line 1"),
        ("m:\n  x: 1\n  x: 2\n", "f, line 3: `x` was already set at line 2"),
        ("- 1\n", "contains no settings: .* found a list"),
        ("7\n", "contains no settings: .* found a single value"),
        ("a: [1\n", "f, line 2, column 1: "),
        ("1: 2\n", "a key must be a plain name, not 1"),
        ("? [a]\n: 1\n", "a key must be a plain name, not a list or mapping"),
        ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("a: *b\n", "undefined alias"),
        ("a: 1\n---\nb: 1\n", "f, line 2"),
        ("a: \x07\n", "is not YAML"),
        ("a: " + "9" * 5000 + "\n", "cannot be read"),
        ("a: 2024-13-45\n", "cannot be read"),
        ("a: " + "[" * 20000, "nested too deeply"),
    ],
)
def test_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml(text, "f")
    assert len(str(caught.value)) < 400


def test_aliases_do_not_explode() -> None:
    """Written out these are 2^59 values: a parser that writes them out never ends."""
    layers = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 60)]
    with pytest.raises(ConfigError, match="over 50,000 values after its aliases are expanded"):
        parse_yaml("\n".join(layers), "f")
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: [*a, *a]", "f").values == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": [{"x": 1}] * 2,
    }
    with pytest.raises(ConfigError, match="line 1: an alias refers to a value that contains it"):
        parse_yaml("a: &a\n  b: *a", "f")


@pytest.mark.parametrize("text", ["a\x85b", "\x85", "a\u2028b\u2029", "NO", "010", "=", "``", "a: b", " a", "é 你 😀"])
def test_texts_come_back(text: str) -> None:
    assert parse_yaml(to_yaml({"model": {"labels": [text, "b"]}, text: 1}), "f").values["model"] == {
        "labels": [text, "b"]
    }


def test_a_run_with_as_many_labels_as_there_may_be(tmp_path: Path) -> None:
    settings = {"model": {"labels": [f"a label of some words {number}" for number in range(10_000)]}}
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    assert load_yaml(tmp_path / "config.yaml").values == settings


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load_yaml(tmp_path)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"a: " + b"x" * MAX_BYTES)
    with pytest.raises(ConfigError, match="it has 1,048,579 bytes, and at most 1,048,576 bytes are read"):
        load_yaml(big)
    with pytest.raises(ConfigError, match="is over 1,048,576 bytes"):
        load_yaml(big, may_be_pipe=True)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8: bad byte at offset 3"):
        load_yaml(latin)
    if sys.platform != "win32":
        with pytest.raises(ConfigError, match="null byte"):
            load_yaml("a\0b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_read_only_where_the_user_named_it(tmp_path: Path) -> None:
    """A shell gives the path of a pipe for `<(command)`; one that lies in a folder would be waited for."""
    path = tmp_path / "config.yaml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is a named pipe, not a regular file"):
        load_yaml(path)
    writer = threading.Thread(target=path.write_text, args=("seed: 5\n",))
    writer.start()
    assert load_yaml(path, may_be_pipe=True).values == {"seed": 5}
    writer.join()


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")
def test_a_device_is_not_read_for_ever() -> None:
    with pytest.raises(ConfigError, match="it is a device, not a regular file"):
        load_yaml("/dev/zero")
    with pytest.raises(ConfigError, match="it is a device, which may never end"):
        load_yaml("/dev/zero", may_be_pipe=True)


def test_empty_file_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"")
    assert load_yaml(path).values == {}
    path.write_bytes(b"\xef\xbb\xbfseed: 3\n")
    assert load_yaml(path).values == {"seed": 3}


def test_dump_is_read_back_and_deterministic() -> None:
    config = build(TrainConfig, {"model": {"attention": "additive", "norm_eps": 1e-9}, "decoding": {"banned_ids": [3]}})
    text = to_yaml(config)
    assert to_yaml(config) == text
    assert build(TrainConfig, parse_yaml(text, "f").values) == config
    assert build(TrainConfig, json.loads(to_json(config))) == config
    assert text.startswith("run_dir: runs/run\nseed: 1\n")


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        build(TrainConfig, parse_yaml(text, "f").values)


@pytest.mark.parametrize("value", ["!!timestamp 1", "!!bool x", '!!int ""', "!!omap 1", "!!set 1"])
def test_a_value_that_does_not_fit_its_tag(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^file(, line 1.*|: a value does not fit its tag, .* leave out the tag\.)$"):
        parse_yaml(f"seed: {value}\n", "file")


@pytest.mark.parametrize(
    ("text", "read"), [("190:20:30", "685,230"), ("1:30", "90"), ("010", "8"), ("-0_17", "-15"), ("1:30.5", "90.5")]
)
def test_numbers_to_the_base_60_or_8_are_refused(text: str, read: str) -> None:
    with pytest.raises(ConfigError, match=rf"f, line 2: {text} would be read as {read} "):
        parse_yaml(f"a:\n  b: {text}\n", "f")
    assert parse_yaml(f"a: '{text}'\nb: [0, 10, 0.5, 0x1F, 1e-3, -1]\n", "f").values["a"] == text


def test_surrogates_are_joined_or_refused() -> None:
    """JSON writes a character beyond 16 bits as a pair."""
    assert parse_yaml('"\\ud83d\\ude00": "\\ud83d\\ude00"', "file").values == {"\U0001f600": "\U0001f600"}
    for text in ('run_dir: "\\ud800"', '"\\udc00": 1', 'a: ["\\ude00\\ud83d"]'):
        with pytest.raises(ConfigError, match=r"file, line 1: .* has half of a surrogate pair"):
            parse_yaml(text, "file")
