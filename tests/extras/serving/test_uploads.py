"""Documents by DeepL's calls: upload, status, download, limits, and what is left of them."""

import ast
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents import markdown
from manyheads.extras.documents.formats import FORMATS, decode, read_document
from manyheads.extras.documents.sentence_ends import split_sentences
from manyheads.extras.documents.terms import Terms
from manyheads.extras.documents.translating import DocumentTranslation, UnitTranslator
from manyheads.extras.serving.api import documents as module
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.settings import ServingSettings

DOCUMENTS = {
    "page.md": ("markdown", "# I am **hungry**\n\n- Where is the station?\n- `code`\n", ""),
    "page.html": ("html", "<p>I am <b>hungry</b>.</p>\n<script>a < b</script>", ""),
    "film.srt": ("srt", "1\r\n00:00:01,000 --> 00:00:02,000\r\nI am hungry.\r\n", ""),
    "letter.txt": ("text", "\ufeffI am hungry.\n\nWhere is the station?\n", ""),
    "table.csv": ("csv", "id,text\n1,I am hungry.\n", "text"),
    "rows.jsonl": ("jsonl", '{"id": 1, "a": {"text": "I am hungry."}}\n', "a.text"),
}


class Server:
    """A running server, and DeepL's three calls."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.state: Any = client.app.state.service.state  # type: ignore[attr-defined]

    def upload(self, name: str, data: bytes, **fields: str) -> Any:
        return self.client.post("/v2/document", files={"file": (name, data)}, data={"target_lang": "DE", **fields})

    def ask(self, handle: dict[str, str], what: str = "", **headers: str) -> Any:
        key = {"document_key": handle["document_key"]}
        return self.client.post(f"/v2/document/{handle['document_id']}{what}", json=key, headers=headers)

    def wait(self, handle: dict[str, str]) -> dict[str, Any]:
        while (found := self.ask(handle).json())["status"] in ("queued", "translating"):
            time.sleep(0.02)
        return dict(found)


@pytest.fixture(scope="module")
def server(client: TestClient) -> Server:
    return Server(client)


@pytest.fixture
def small(settings: ServingSettings) -> Iterator[Server]:
    """A server with small limits."""
    limited = replace(settings, max_document_bytes=2_000, max_documents_bytes=3_000, deadline_seconds=5)
    with TestClient(build_app(limited)) as running:
        yield Server(running)


@pytest.fixture(autouse=True, scope="module")
def others() -> None:
    """The files without a name that are not ours: of pytest."""
    OTHERS.extend(nameless())


OTHERS: list[str] = []


def open_files() -> set[str]:
    """The documents that the server has on the disk."""
    return set(nameless()) - set(OTHERS)


def nameless() -> list[str]:
    """The open files of this process in the folder of temporary files that have no name any more."""
    handles = Path("/proc/self/fd")
    found = []
    for handle in handles.iterdir() if handles.is_dir() else ():  # other systems do not list them
        try:
            found.append(os.readlink(handle))  # noqa: PTH115  (a path would be resolved)
        except OSError:
            continue
    return [name for name in found if name.startswith(tempfile.gettempdir()) and name.endswith("(deleted)")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_the_one_of_the_command(server: Server, translator_folder: Path, name: str) -> None:
    kind, text, column = DOCUMENTS[name]
    translator = Translator.from_pretrained(translator_folder, "cpu")
    units = UnitTranslator(translator, Terms(), {})
    document = read_document(text, name, kind, (column,) if column else ())
    pieces = DocumentTranslation(document, lambda one: split_sentences(one, language="en"), units.fits)
    expected, _ = pieces.finish(units.translate(pieces.units))
    handle = server.upload(name, text.encode(), **({"column": column} if column else {})).json()
    assert (len(handle["document_id"]), len(handle["document_key"])) == (32, 64)
    status = server.wait(handle)
    assert len(open_files()) == Path("/proc/self/fd").is_dir()
    assert (status["status"], status["billed_characters"]) == ("done", len(text))
    answer = server.ask(handle, "/result")
    assert answer.content.decode() == expected != text
    assert answer.headers["content-disposition"].endswith(f"''{name}")
    assert server.ask(handle).json()["status"] == "downloaded"
    again = server.ask(handle, "/result")
    assert (again.status_code, "was downloaded" in again.json()["message"]) == (404, True)
    assert not open_files()
    assert server.state.num_requests == 0
    assert not server.state.clients


def test_terms_and_a_model_by_name(server: Server) -> None:
    fields = {"model": "en-de", "terms": "hungry\tBahnhof"}
    handle = server.upload("a.md", b"I am *hungry*.", **fields).json()
    assert "not inflected" in handle["note"]
    server.wait(handle)
    assert "Bahnhof" in server.ask(handle, "/result").text


@pytest.mark.parametrize(
    ("name", "data", "fields", "status", "told"),
    [
        ("a.docx", b"PK", {}, 415, "not read"),
        ("a", b"text", {}, 415, "not read"),
        ("a.md.gz", b"text", {}, 415, "not read"),
        ("a.md", b"caf\xe9", {}, 400, "not UTF-8"),
        ("a.md", b" \n", {}, 400, "empty"),
        ("a.csv", b"a,b\n", {}, 400, "column"),
        ("a.md", b"a", {"column": "text"}, 400, "column"),
        ("a.md", b"a", {"target_lang": "FR"}, 400, "not supported"),
        ("a.md", b"a", {"output_format": "docx"}, 400, "output_format"),
        ("a.md", b"a", {"glossary_id": "x"}, 400, "--glossaries"),
        ("a.md", b"a", {"terms": "x"}, 400, "line 1"),
        ("a.md", b"a" * 2_001, {}, 413, "2,000"),
        ("a.md", b"a" * (1 << 22), {}, 413, "a document is 2,000"),
    ],
)
def test_bad_uploads(small: Server, name: str, data: bytes, fields: dict[str, str], status: int, told: str) -> None:
    answer = small.upload(name, data, **fields)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["message"]
    assert not open_files()


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data; boundary=x", b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nHell', 400),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n\r\n" * 200 + b"--x--", 400),
        ("multipart/form-data", b"a", 415),
        ("application/json", b"{}", 415),
    ],
)
def test_forms_that_are_cut_off_or_of_another_type(server: Server, kind: str, body: bytes, status: int) -> None:
    answer = server.client.post("/v2/document", content=body, headers={"content-type": kind})
    assert (answer.status_code, set(answer.json())) == (status, {"message", "detail"})


def test_a_damaged_document_has_a_reason(server: Server) -> None:
    handle = server.upload("a.srt", b"no subtitles").json()
    status = server.wait(handle)
    assert status["status"] == "error"
    assert status["error_message"].startswith("a.srt: ")
    assert server.ask(handle, "/result").status_code == 400
    assert not open_files()


DAMAGED = [
    ("text", "a.txt", b"caf\xe9", ""),
    ("markdown", "a.md", b"caf\xe9", ""),
    ("html", "a.html", b"caf\xe9", ""),
    ("srt", "a.srt", b"no subtitles", ""),
    ("vtt", "a.vtt", b"WEBVTT\n\nno subtitles\n", ""),
    ("csv", "a.csv", b"id,text\n1,a\n", "other"),
    ("csv", "a.csv", b"id,text\n1,a\n", ""),
    ("csv", "a.csv", b"id,text\n1,a\n", "7"),
    ("csv", "a.csv", b'id,text\n1,"a\n', "text"),
    ("csv", "a.csv", b"id,text\n1,a,b,c\n", "text"),
    ("tsv", "a.tsv", b"id\ttext\n1\ta\n", "other"),
    ("jsonl", "a.jsonl", b'{"a": "b"}\n', "text"),
    ("jsonl", "a.jsonl", b"a\n", "text"),
    ("jsonl", "a.jsonl", b'{"text": 1}\n', "text"),
    ("jsonl", "a.jsonl", b'{"text": "\\ud800"}\n', "text"),
]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@pytest.mark.parametrize(("kind", "name", "data", "column"), DAMAGED)
def test_messages_name_no_options_of_commands(server: Server, kind: str, name: str, data: bytes, column: str) -> None:
    answer = server.upload(name, data, **({"column": column} if column else {}))
    said = answer.json().get("message") or server.wait(answer.json())["error_message"]
    assert said
    assert not OPTION.search(said)
    with pytest.raises((ConfigError, DataError)) as raised:
        read_document(decode(data, name), name, kind, (column,) if column else ())
    assert not OPTION.search(str(raised.value))


def test_all_formats_are_damaged_once() -> None:
    assert {kind for kind, *_ in DAMAGED} == {*FORMATS}


def test_only_commands_add_the_options_of_commands() -> None:
    """What requests can reach raises no error with an option in its message; `in_command` is for that."""
    package = Path(module.__file__).parents[3]
    reached = [*package.glob("extras/documents/*.py"), *package.glob("extras/constrained/*.py"),
               *package.glob("extras/serving/api/**/*.py"), *package.glob("text/*.py"),
               package / "extras/tables/cells.py", package / "decoding/settings.py"]  # fmt: skip
    not_reached = {"files.py"}  # of commands alone
    found = []
    for path in reached:
        if path.name in not_reached:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = [one.value for given in node.exc.args for one in ast.walk(given)
                         if isinstance(one, ast.Constant) and isinstance(one.value, str)]  # fmt: skip
                found += [(path.name, text) for text in texts if OPTION.search(text)]
    assert not found


def test_a_package_that_the_server_lacks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    markdown._parser.cache_clear()
    said = server.wait(server.upload("a.md", b"Hello").json())["error_message"]
    assert "which this server does not have" in said
    assert "pip" not in said


def test_ids_and_keys_are_secrets(server: Server) -> None:
    handle = server.upload("a.md", b"Hello").json()
    wrong = ({**handle, "document_key": "A" * 64}, {**handle, "document_id": "A" * 32})
    for one in wrong:
        for what in ("", "/result"):
            assert server.ask(one, what).status_code == 404
    server.wait(handle)
    assert server.ask(handle, "/result").status_code == 200


def test_a_document_is_its_keys_own(settings: ServingSettings, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("own-key-12345\nother-key-12345\n", encoding="utf-8")
    keys.chmod(0o600)
    with TestClient(build_app(replace(settings, api_key_file=str(keys)))) as running:
        running.headers["authorization"] = "DeepL-Auth-Key own-key-12345"
        server = Server(running)
        handle = server.upload("a.md", b"Hello").json()
        server.wait(handle)
        assert server.ask(handle, "/result", authorization="DeepL-Auth-Key other-key-12345").status_code == 404
        assert server.ask(handle, "/result", authorization="").status_code == 403
        assert server.ask(handle, "/result").status_code == 200


def test_documents_are_bounded_and_deleted_in_time(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_SECONDS", 0.5)
    handle = small.upload("a.md", b"Hello. " * 200).json()
    full = small.upload("b.md", b"Hello. " * 200)  # an eighth is kept for other clients
    assert (full.status_code, full.headers["retry-after"]) == (429, "60")
    while small.ask(handle).status_code != 404:
        time.sleep(0.05)
    assert not open_files()
    assert small.upload("b.md", b"Hello. " * 200).status_code == 200


def test_a_disk_that_fills(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tempfile.TemporaryFile
    made: list[Any] = []

    class Full:
        def __init__(self, **given: Any) -> None:
            self.file = real(**given)

        def write(self, data: bytes) -> None:
            self.file.write(data[:1])

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.file.close()
            self.flush()  # a real one does it, too

    def second_is_full(**given: Any) -> Any:
        made.append(given)
        return real(**given) if len(made) < 2 else Full(**given)

    monkeypatch.setattr(module.tempfile, "TemporaryFile", Full)
    answer = server.upload("a.md", b"Hello")
    assert (answer.status_code, "disk" in answer.json()["message"]) == (507, True)
    assert not open_files()
    monkeypatch.setattr(module.tempfile, "TemporaryFile", second_is_full)  # when the translation is stored
    handle = server.upload("a.md", b"Hello").json()
    assert "disk" in server.wait(handle)["error_message"]
    assert server.ask(handle, "/result").status_code == 400
    assert not open_files()


def test_the_deadline_and_the_end_of_the_server(settings: ServingSettings) -> None:
    with TestClient(build_app(replace(settings, deadline_seconds=1, debug_delay_seconds=0.2))) as running:
        server = Server(running)
        status = server.wait(server.upload("a.md", b"I am hungry. Where is the station? " * 3).json())
        assert status["status"] == "error"
        assert "longer than 1 s" in status["error_message"]
        assert not server.state.clients
        server.upload("a.md", b"I am hungry.")
    assert not open_files()
