"""DeepL's calls for documents: upload, status, download."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from pathlib import PurePath
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from manyheads.errors import ConfigError, DataError
from manyheads.extras.documents.formats import FORMATS, decode, format_of
from manyheads.extras.serving.api.deepl import find_model
from manyheads.extras.serving.api.glossaries import glossary_ids, terms_for
from manyheads.extras.serving.api.shared import LooseBody, Text, form_schema, read_body, translator_for
from manyheads.extras.serving.glossaries import NOTE
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.service import Service
from manyheads.extras.serving.uploads import Task, Upload, Uploads

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
            model, _ = find_model(service, form.source_lang, form.target_lang)
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
