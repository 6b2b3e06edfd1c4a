"""Input whose size its file does not show is limited: packed files, and streams that are read to their end."""

import gzip
import os
import threading
from pathlib import Path

import pytest

from manyheads.cli.main import main
from manyheads.data.lines import MAX_INPUT_BYTES, limited_input, opened, read_chunks, read_lines
from manyheads.errors import ConfigError, DataError


def packed(path: Path, members: int) -> Path:
    """A gzip file of so many members, a thousand bytes each."""
    path.write_bytes(gzip.compress(b"nine byte" + b"\n" * 991) * members)
    return path


def test_members_are_counted_together(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.gz", 20)
    with limited_input(20_000):
        assert len(list(read_lines(path))) == 20 * 991
        assert sum(map(len, read_chunks(path))) == 20_000
    with limited_input(19_999):
        for read in (read_lines, read_chunks):
            with pytest.raises(DataError, match=r"a\.gz unpacks to more than 19,999 bytes.*--max-input-bytes N"):
                list(read(path))
    assert len(list(read_lines(path))) == 20 * 991, "the limit ends with its block"
    assert MAX_INPUT_BYTES == 8 << 30


def test_a_plain_file_has_the_size_that_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x\n" * 1000)
    with limited_input(10):
        assert len(list(read_lines(path))) == 1000
        assert sum(map(len, read_chunks(path))) == 2000


def test_lines_of_a_pipe_may_come_for_ever_but_bytes_that_are_kept_may_not(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("wb", buffering=0) as file:
            file.write(b"x\n" * 1000)

    for reading, is_limited in ((read_lines, False), (read_chunks, True)):
        writer = threading.Thread(target=write)
        writer.start()
        with limited_input(10):
            if is_limited:
                with pytest.raises(DataError, match="pipe has more than 10 bytes"):
                    list(reading(pipe))
            else:
                assert len(list(reading(pipe))) == 1000
        writer.join()


def test_devices_are_no_input() -> None:
    with (
        pytest.raises(DataError, match="Cannot read /dev/zero: it is a device, which may never end"),
        opened("/dev/zero"),
    ):
        pass
    assert list(read_lines(os.devnull)) == []


@pytest.mark.parametrize("form", ["{0} {1}", "{0}={1}", "--max_input_bytes {1}"])
def test_the_option_of_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    path = str(packed(tmp_path / "a.gz", 20))
    command = ["prepare", "--source", path, "--target", path, "--valid-count", "0", "-o", str(tmp_path / "out")]
    option = form.format("--max-input-bytes", 19_999).split(" ")
    assert main([command[0], *option, *command[1:]]) == 2
    assert "unpacks to more than 19,999 bytes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["", "x", "-1", "1e9"])
def test_values_of_the_option(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main(["info", f"--max-input-bytes={value}", "."]) == 2
    assert f"--max-input-bytes is {value!r}; give a number of bytes" in capsys.readouterr().err


def test_zero_is_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--max-input-bytes", "0", "."]) == 2
    assert "--max-input-bytes is 0; it must be at least 1" in capsys.readouterr().err
    with pytest.raises(ConfigError), limited_input(0):
        pass
