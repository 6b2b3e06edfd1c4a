"""One module opens files for reading. Every other call that opens one by its name is listed here, with a reason."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyheads.errors import DataError
from manyheads.files.safe_open import RefusedFileError, open_regular, open_stream, read_stream

SOURCES = Path(__file__).resolve().parents[3] / "src" / "manyheads"

METHODS = {"read_text", "read_bytes"}
LIBRARIES = {"memmap", "fromfile", "genfromtxt", "loadtxt", "safe_open", "load_file", "open_code"}
"""Names of calls that open files for reading, besides `open`."""
NO_FILES = {
    "Image",
    "PreparedData",
    "TextData",
    "LabelledData",
    "LabelledStore",
    "SpanData",
    "SpanStore",
    "options",
    "one",
    "TokenStore",
    "PairStore",
    "kind",
    "store",
    "builder",
    "_FORMAT",
    "_TEXT_FORMAT",
    "archive",
}
"""Whose method `open` opens no file by its name."""

EXCEPTIONS = {
    "files/safe_open.py": "the module itself",
    "files/commit.py": "folders, to sync them, and new files, which `x` never writes through a link",
    "data/corpora/__init__.py": "the package's own texts",
    "extras/sample_model/sample_data.py": "compares with what it wrote, after its kind and size",
    "extras/exports/web.py": "the package's own page",
    "extras/serving/app.py": "the package's own page",
    "extras/inspect/drawings/pages.py": "the package's own page",
    "data/language/preparing.py": "a temporary folder that it wrote itself",
    "extras/peers/legacy_pickle.py": "a temporary folder that its child wrote",
    "nn/kernels/policy.py": "/proc",
    "training/run/device.py": "/proc and /sys",
    "extras/planning/planner.py": "/proc and the null device",
    "cli/process.py": "/proc and the null device",
    "cli/lines/output.py": "the file that the user named for the output, and the null device",
    "api.py": "data that was prepared",
    "extras/loggers/services.py": "the run of a logger",
    "extras/sources/names.py": "files of an address, which are not files of this disk",
    "extras/sources/fetching.py": "tarfile reads what `open_regular` has opened",
    "data/store.py": "numpy maps files that `verify` has checked by kind, size and checksum",
    "extras/peers/tensorflow.py": "numpy maps a file after `check_regular`",
    "models/pretrained.py": "safetensors opens by name, after its kind is checked",
    "extras/push/upload.py": "safetensors opens by name, after its kind is checked",
    "tasks/averaging.py": "safetensors opens by name, after its kind is checked",
    "checkpoint/format.py": "safetensors opens by name, after its kind is checked",
    "extras/shortlists/shortlist.py": "safetensors opens by name, after its kind is checked",
    "cli/records.py": "safetensors opens by name, after its kind is checked",
    "extras/sample_model/making.py": "the run folder's model, which `verify` has checked",
    "extras/sample_model/command.py": "the package's own model",
    "installation.py": "the package's own metadata",
    "extras/exports/transformers.py": "a folder that it wrote itself",
    "extras/peers/convert.py": "safetensors opens by name, after its kind is checked",
}


def openings(tree: ast.Module) -> list[str]:
    """Calls that open a file by its name for reading, as text."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        owner = getattr(getattr(function, "value", None), "id", "")
        words = [
            one.value for one in (*node.args, *(word.value for word in node.keywords)) if isinstance(one, ast.Constant)
        ]
        writes = any(isinstance(word, str) and set("wax") & set(word) and len(word) <= 3 for word in words)
        reads = name in METHODS and isinstance(function, ast.Attribute)
        if (name == "open" and owner not in NO_FILES and not writes) or name in LIBRARIES or reads:
            found.append(ast.unparse(node))
    return found


def test_openings_are_found() -> None:
    text = "open(a); os.open(b, 0); Path(c).open('rb'); Path(d).open('wb'); PreparedData.open(e); f.read_text()"
    assert openings(ast.parse(text)) == ["open(a)", "os.open(b, 0)", "Path(c).open('rb')", "f.read_text()"]


def test_no_other_module_opens_files() -> None:
    found = {
        path.relative_to(SOURCES).as_posix(): calls
        for path in sorted(SOURCES.rglob("*.py"))
        if any(word in (text := path.read_text(encoding="utf-8")) for word in ("open", *METHODS, *LIBRARIES))
        and (calls := openings(ast.parse(text)))
    }
    assert {name: calls for name, calls in found.items() if name not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) - set(found) == set(), "these open nothing any more"


def test_a_regular_file_and_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        for function in (open_regular, open_stream):
            with function(tmp_path / name) as file:
                assert file.read() == b"text"


def test_a_pipe_is_waited_for_only_as_a_stream(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RefusedFileError, match="a named pipe"):
        open_regular(pipe)
    writer = subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'w').write('text')"])
    with open_stream(pipe) as file:
        assert file.read() == b"text"
    assert writer.wait() == 0


def test_devices() -> None:
    with pytest.raises(RefusedFileError, match="which may never end; name a file or a pipe"):
        open_stream(Path("/dev/zero"))
    with open_stream(Path(os.devnull)) as file:
        assert file.read() == b""


def test_a_pipe_that_nobody_writes_is_waited_for_shortly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.files.safe_open.WRITER_SECONDS", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RefusedFileError, match="nobody writes into this pipe; name a file"):
        read_stream(pipe, 100)


def test_a_pipe_that_is_written_later(tmp_path: Path) -> None:
    """Its writer may come a little later, and may write in pieces."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    late = "import sys, time; time.sleep(0.2); f = open(sys.argv[1], 'w', 1)"
    code = f"{late}; f.write('a\\n'); time.sleep(0.2); f.write('b\\n')"
    writer = subprocess.Popen([sys.executable, "-c", code, str(pipe)])
    assert read_stream(pipe, 100) == b"a\nb\n"
    assert writer.wait() == 0


def test_no_more_than_one_byte_above_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert len(read_stream(tmp_path / "file", 10)) == 11
    with pytest.raises(RefusedFileError, match="may never end"):
        read_stream(Path("/dev/zero"), 10)


def test_pictures_that_are_no_files(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from manyheads.data.language.texts import Pictures

    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(DataError, match="a named pipe, not a regular file"):
        list(Pictures(paths=[tmp_path], size=4).read())
