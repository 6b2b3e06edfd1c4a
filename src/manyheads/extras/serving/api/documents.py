"""DeepL's calls for documents: upload, status, download. A document is translated while it waits on the disk, and is
downloaded once.

A document lies in a file without a name, which the system deletes when the server closes it or ends, also by a crash.
Its work is that of a request of its client: it holds a slot, has a deadline from its arrival, and shares the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from functools import partial
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from manyheads.errors import ConfigError, DataError, ManyHeadsError
from manyheads.extras.documents.formats import FORMATS, decode, format_of, read_document
from manyheads.extras.documents.translating import UnitTranslator
from manyheads.extras.serving.api.glossaries import glossary_ids, terms_for
from manyheads.extras.serving.api.shared import (
    LooseBody,
    Text,
    form_schema,
    nearest_translator,
    read_body,
    translator_for,
)
from manyheads.extras.serving.engine import SHARE_KEPT
from manyheads.extras.serving.glossaries import NOTE
from manyheads.extras.serving.refusals import Refusal, told
from manyheads.extras.serving.texts import sentences_of, translate_units

if TYPE_CHECKING:
    from manyheads.extras.documents.terms import Terms
    from manyheads.extras.serving.served import ServedTranslator
    from manyheads.extras.serving.service import Service

_log = logging.getLogger(__name__)

KEPT_SECONDS = 3_600.0
"""From the upload to the deletion of a document that nobody downloads."""
_MOST_DOCUMENTS = 1_000
_MOST_AT_ONCE = 4
"""Documents that are held in memory: an analysed one needs ten times its size."""
_MOST_OF_A_CLIENT = 2
_UNITS_AT_ONCE = 64
T = TypeVar("T")
State = Literal["queued", "translating", "done", "downloaded", "error"]


@dataclass(frozen=True)
class Task:
    """What is to be done with a document. name: of the file. format_name, columns: see `read_document`."""

    name: str
    format_name: str
    columns: tuple[str, ...]
    model: ServedTranslator
    terms: Terms


@dataclass(eq=False)
class Upload:
    """A document that is kept.

    Args:
        key: a secret of the client that uploaded it. owner: its key on this server, if the server has keys.
        file: its content, before or after the translation; None: there is none any more.
        size: bytes of the file. characters: of the source. reason: why there is no translation.
        done, total: numbers of sentences.
    """

    id: str
    key: str
    owner: Any
    client: Any
    name: str
    file: IO[bytes] | None
    size: int
    state: State = "queued"
    characters: int = 0
    reason: str = ""
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.monotonic)
    timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Delete the content."""
        if self.file is not None:
            self.file.close()
        self.file, self.size = None, 0

    def left_seconds(self) -> int | None:
        """Return how long the translation is likely to take still; None: unknown."""
        passed = time.monotonic() - self.began
        return None if not self.done else max(1, round(passed / self.done * (self.total - self.done)))


class Uploads:
    """All documents of a server. Its methods are called in the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._all: dict[str, Upload] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(_MOST_AT_ONCE)
        self._turns = WeakValueDictionary[Any, asyncio.Semaphore]()
        # Reading a document takes seconds; the tokenizers' thread has to answer short requests in the meantime.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="manyheads-documents")
        service.metrics.gauge("documents", "Documents that are kept.", lambda: len(self._all))
        service.metrics.gauge("documents_bytes", "Size of the documents that are kept.", lambda: self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(one.size for one in list(self._all.values()))

    async def add(self, request: Request, data: bytes, task: Task) -> Upload:
        """Keep a document, and begin its translation.

        Raises: Refusal: it is too large, too many are kept, or the disk is full.
        """
        client = request.scope.get("manyheads.client")
        self.check_room(client, len(data))
        owner = client if self._service.keys else None
        found = Upload(secrets.token_hex(16).upper(), secrets.token_hex(32).upper(), owner, client, task.name, None,
                       len(data))  # fmt: skip
        self._all[found.id] = found  # before the file is written, so that its place is taken
        try:
            found.file = await asyncio.to_thread(_spooled, data)
        except BaseException:
            del self._all[found.id]
            raise
        found.timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, found)
        work = asyncio.create_task(self._translate(found, task, request.scope["manyheads.arrived"]))
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)
        return found

    def check_room(self, client: Any, size: int) -> None:
        """Raises: Refusal: a document of this size is too large, or too many are kept already."""
        limit = self._service.settings.max_document_bytes
        if size > limit:
            raise Refusal(
                413, f"file: the document has {size:,} bytes; the limit is {limit:,}. Divide it.",
                code="document_size", field="file",
            )  # fmt: skip
        most, count = self._service.settings.max_documents_bytes, _MOST_DOCUMENTS
        if any(one.client == client for one in self._all.values()):
            most, count = most - most // SHARE_KEPT, count - count // SHARE_KEPT
        if self.num_bytes + size > most or len(self._all) >= count:
            raise Refusal(
                429, "The server keeps too many documents; download yours, or try again later.",
                code="documents", retry_after=60,
            )  # fmt: skip

    def find(self, request: Request, document_id: str, document_key: str) -> Upload:
        """Return a document. Raises: Refusal: there is none of this client with this id and key."""
        found = self._all.get(document_id)
        is_own = found is not None and (not self._service.keys or found.owner == request.scope.get("manyheads.client"))
        key = found.key if found is not None else ""
        if not hmac.compare_digest(key.encode(), document_key.encode("utf-8", "surrogatepass")) or not is_own:
            raise Refusal(
                404, "document_id: there is no such document; it was deleted an hour after its upload, or the id or the"
                " key is wrong.", code="document", field="document_id",
            )  # fmt: skip
        assert found is not None
        return found

    def take(self, found: Upload) -> bytes:
        """Return a translated document, which cannot be taken a second time unless `give_back` is called.

        Raises: Refusal: it is not ready, has failed, or was downloaded.
        """
        if found.state == "downloaded":
            raise Refusal(404, "The document was downloaded, and is deleted; upload it again.", code="downloaded")
        if found.state == "error":
            raise Refusal(400, f"There is no translation: {found.reason}", code="document_error")
        if found.state != "done" or found.file is None:
            raise Refusal(503, "The document is not translated yet; ask for its status.", code="not_ready",
                          retry_after=5)  # fmt: skip
        found.state = "downloaded"
        found.file.seek(0)
        return found.file.read()

    def give_back(self, found: Upload) -> None:
        """Note that a client did not receive the document that it took."""
        if found.file is not None:
            found.state = "done"

    async def close(self) -> None:
        """Delete all documents."""
        for work in self._tasks:
            work.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in list(self._all.values()):
            self._forget(one)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _forget(self, one: Upload) -> None:
        if one.timer is not None:
            one.timer.cancel()
        one.close()
        self._all.pop(one.id, None)

    async def _translate(self, found: Upload, task: Task, arrived: float) -> None:
        """Translate a document in place of its source. It never raises, but for cancellation."""
        scope = {"type": "http", "manyheads.client": found.client, "manyheads.arrived": arrived, "headers": []}
        request, state = Request(scope), self._service.state
        state.num_requests += 1
        state.clients[found.client] += 1
        try:
            seconds = self._service.end(request) - time.monotonic()
            turn = self._turns.setdefault(found.client, asyncio.Semaphore(_MOST_OF_A_CLIENT))
            async with asyncio.timeout(seconds), turn, self._at_once:
                found.state = "translating"
                await self._replace(found, await self._translated(request, found, task))
        except Exception as error:
            scope["manyheads.is_over"] = True
            self._fail(found, error)
        finally:
            scope["manyheads.is_over"] = True
            state.num_requests -= 1
            state.clients[found.client] -= 1
            state.clients += Counter()  # without clients that have none

    def _fail(self, found: Upload, error: Exception) -> None:
        found.state = "error"
        found.close()
        if isinstance(error, TimeoutError):
            found.reason = str(self._service.too_late())
        elif isinstance(error, Refusal | ManyHeadsError):
            found.reason = told(error)
        else:
            _log.error("document %s failed: %s", found.id[:8], type(error).__name__, exc_info=error)
            found.reason = "The server failed."

    async def _translated(self, request: Request, found: Upload, task: Task) -> bytes:
        service, model = self._service, task.model
        units = UnitTranslator(model.reader, task.terms, {})
        assert found.file is not None
        found.file.seek(0)
        text = decode(found.file.read(), task.name)
        found.characters = len(text)

        def read() -> Any:
            document = read_document(text, task.name, task.format_name, task.columns)
            return sentences_of(service, request, model, units, document, field="file")

        translation = await self._in_thread(read)
        found.total = len(translation.units)
        records: list[str] = []
        while found.done < found.total:  # a block at a time, so that the work of each is within the limits of requests
            block: Sequence[Any] = translation.units[found.done : found.done + _UNITS_AT_ONCE]
            records += await translate_units(service, request, model, units, block, "file")
            found.done = len(records)
        whole, _ = await self._in_thread(partial(translation.finish, records))
        return str(whole).encode()

    async def _replace(self, found: Upload, data: bytes) -> None:
        """Put the translation in the place of the source."""
        found.close()
        found.size = len(data)
        if self.num_bytes > self._service.settings.max_documents_bytes:
            raise Refusal(429, "The server keeps too many documents; download yours, or try again later.",
                          code="documents")  # fmt: skip
        file = await asyncio.to_thread(_spooled, data)
        if found.id not in self._all:  # it was deleted meanwhile
            file.close()
            return
        found.file, found.state = file, "done"

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


def _spooled(data: bytes) -> IO[bytes]:
    """Return a file without a name that holds the data. Raises: Refusal: the disk is full; nothing is left of it."""
    file: IO[bytes] | None = None
    try:
        file = tempfile.TemporaryFile(prefix="manyheads-")  # noqa: SIM115  (closed by `Upload.close`)
        file.write(data)
        file.flush()
    except OSError as error:
        if file is not None:
            with contextlib.suppress(OSError):  # it writes once more what it could not write
                file.close()
        _log.error("a document could not be kept: %s", error.strerror)
        raise Refusal(
            507, "The server cannot keep the document: its disk is full or cannot be written. Try again later.",
            code="disk",
        ) from None  # fmt: skip
    return file


_MOST_PARTS = 100
_MOST_NAME = 255
_PLAIN = (".txt",)


class DocumentForm(LooseBody):
    """The fields of a request beside its document.

    `model`, `column` (several are separated by line ends) and `terms` (lines of source, tab, target) are ours.
    """

    target_lang: Text | None = None
    source_lang: Text | None = None
    filename: Text | None = None
    output_format: Text | None = None
    glossary_id: Text | None = None
    glossary_ids: Text | None = None
    model: Text | None = None
    column: Text | None = None
    terms: Text | None = None


class KeyForm(LooseBody):
    """The key of a document."""

    document_key: Text


class _Download(Response):
    """A document that is deleted when it was sent, and only then."""

    def __init__(self, uploads: Uploads, found: Upload) -> None:
        name = f"attachment; filename*=UTF-8''{quote(found.name, safe='')}"
        super().__init__(uploads.take(found), media_type="application/octet-stream",
                         headers={"content-disposition": name})  # fmt: skip
        self._uploads, self._found = uploads, found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except BaseException:
            self._uploads.give_back(self._found)
            raise
        self._found.close()


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/v2/document", tags=["DeepL"])
    uploads = Uploads(service)
    service.at_end.append(uploads.close)
    schema = DocumentForm.model_json_schema()
    schema["properties"]["file"] = {"type": "string", "format": "binary"}
    schema["required"] = ["file"]
    body = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}

    @routes.post("", summary="Translate a document (DeepL).", openapi_extra=body)
    async def upload(request: Request) -> Response:
        values, name, data = _parts(request.headers.get("content-type", ""), await request.body())
        try:
            form = DocumentForm.model_validate(values)
        except ValidationError:
            raise Refusal(400, "A field of the form is not valid Unicode.", code="form") from None
        uploads.check_room(request.scope.get("manyheads.client"), len(data))
        name = PurePath((form.filename or name).replace("\\", "/")).name[-_MOST_NAME:]
        kind, columns = _format(name, form)
        decode_text(data, name)
        if form.model is not None:
            model = translator_for(service, form.model, form.source_lang, form.target_lang)
        elif form.target_lang is not None:
            model, _ = nearest_translator(service, form.source_lang, form.target_lang)
        else:
            raise Refusal(400, "target_lang: name the language of the translation.", code="invalid",
                          field="target_lang")  # fmt: skip
        ids = glossary_ids(form.glossary_id, form.glossary_ids)
        terms = await terms_for(service, request, ids, form.source_lang, form.target_lang or "", form.terms)
        found = await uploads.add(request, data, Task(name, kind, columns, model, terms))
        answer = {"document_id": found.id, "document_key": found.key}
        return JSONResponse(answer | ({"note": NOTE} if len(terms) else {}))

    @routes.post("/{document_id}", summary="The state of a document (DeepL).", openapi_extra=form_schema(KeyForm))
    async def status(request: Request, document_id: str) -> Response:
        form = await read_body(service, request, KeyForm)
        return JSONResponse(_status(uploads.find(request, document_id, form.document_key)))

    @routes.post("/{document_id}/result", summary="A translated document, once (DeepL).",
                 openapi_extra=form_schema(KeyForm), response_class=Response)  # fmt: skip
    async def result(request: Request, document_id: str) -> Response:
        form = await read_body(service, request, KeyForm)
        return _Download(uploads, uploads.find(request, document_id, form.document_key))

    return routes


def _status(found: Upload) -> dict[str, object]:
    answer: dict[str, object] = {"document_id": found.id, "status": found.state}
    if found.state == "translating" and (left := found.left_seconds()) is not None:
        answer["seconds_remaining"] = left
    if found.state in ("done", "downloaded"):
        answer["billed_characters"] = found.characters
    if found.state == "error":
        answer["error_message"] = answer["message"] = found.reason
    return answer


def _format(name: str, form: DocumentForm) -> tuple[str, tuple[str, ...]]:
    """Return the format of a document, and the columns that are translated.

    Raises: Refusal: it is not read, or columns are missing or given for a format without them.
    """
    suffix = PurePath(name.lower()).suffix
    try:
        found = "text" if suffix in _PLAIN else format_of(name) if suffix != ".gz" else None
    except ConfigError:  # a format that is known and not read
        found = None
    if found is None:
        read = ", ".join((*_PLAIN, *(suffix for one in FORMATS.values() for suffix in one.suffixes)))
        raise Refusal(415, f"file: documents of this type are not read; send one of {read}.", code="document_type",
                      field="file")  # fmt: skip
    if form.output_format and f".{form.output_format.lower().lstrip('.')}" != suffix:
        raise Refusal(400, "output_format: a document keeps its format; leave it out.", code="unsupported",
                      field="output_format")  # fmt: skip
    columns = tuple(one.strip() for one in (form.column or "").split("\n") if one.strip())
    if FORMATS[found].has_columns != bool(columns):
        told = (
            "name the columns, or keys, to translate, one a line" if not columns else "only tables and JSON have them"
        )
        raise Refusal(400, f"column: {told}.", code="invalid", field="column")
    return found, columns


def _parts(kind: str, body: bytes) -> tuple[dict[str, str], str, bytes]:
    """Return the fields of a form, and the name and the content of its file.

    Raises: Refusal: it is no form of several parts, it is cut off, or it has no file or several.
    """
    head = Message()
    head["content-type"] = kind
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise Refusal(415, "Send the document as a form: multipart/form-data with the field file.",
                      code="content_type")  # fmt: skip
    mark = b"--" + boundary.encode("latin-1", "replace")
    parts = (b"\r\n" + body).split(b"\r\n" + mark, _MOST_PARTS + 1)
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise Refusal(400, "The form is cut off, or has too many parts; send it again.", code="form")
    values: dict[str, str] = {}
    files: list[tuple[str, bytes]] = []
    for part in parts[1:-1]:
        described, is_complete, content = part.partition(b"\r\n\r\n")
        headers = HeaderParser().parsestr(described.decode("utf-8", "replace").lstrip("\r\n"))
        name = headers.get_param("name", "", "content-disposition")
        file_name = headers.get_filename()
        if not is_complete or not isinstance(name, str):
            raise Refusal(400, "A part of the form has no name.", code="form")
        if file_name is not None or name == "file":
            files.append((file_name or "", content))
        else:
            values[name] = decode_text(content, name)
    if len(files) != 1 or not files[0][1].strip():
        told = "there is no document, or it is empty" if len(files) < 2 else "send one document at a time"
        raise Refusal(400, f"file: {told}.", code="invalid", field="file")
    return values, *files[0]


def decode_text(data: bytes, name: str) -> str:
    """Return a text. Raises: Refusal: it is not UTF-8."""
    try:
        return decode(data, name)
    except DataError as error:
        raise Refusal(400, f"file: {error}", code="encoding", field="file") from None
