"""The application: `create_app` builds it from settings; uvicorn, Ray Serve and others run it.

Its own paths are for operators (health, readiness, metrics), the web page, and the page about the interface.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from manyheads import __version__
from manyheads.catalogue import Table
from manyheads.errors import ConfigError, DataError, ManyHeadsError, MissingExtraError, RequestError
from manyheads.extras.serving.api.native.translation import TranslateBody, TranslateJob
from manyheads.extras.serving.guard import Guard
from manyheads.extras.serving.refusals import Refusal, error_body, status_of, told
from manyheads.extras.serving.service import Service
from manyheads.extras.serving.settings import ApiKeys, ServingSettings

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/static/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
}
"""Path -> (name in the package, type). Nothing else is ever read."""
_API = "manyheads.extras.serving.api"
PROTOCOLS: Table[Callable[[Service], APIRouter]] = Table(
    "protocol",
    {
        "native": f"{_API}.native.routes:router",
        "openai": f"{_API}.openai:router",
        "libretranslate": f"{_API}.libretranslate:router",
        "deepl": f"{_API}.deepl:router",
        "glossaries": f"{_API}.glossaries:router",
        "documents": f"{_API}.documents:router",
    },
)
"""The protocols of clients by name: a function from the service to its routes. Plug-ins can add entries."""


def operations(service: Service) -> APIRouter:
    """Return the routes for operators (health, readiness, metrics), and those of the pages."""
    routes = APIRouter(tags=["operation"])

    @routes.head("/healthz", include_in_schema=False)  # many monitors ask with HEAD
    @routes.get("/healthz", summary="Whether the process works; answered under any load.")
    async def healthz() -> Response:
        is_well = service.engine.is_alive
        return JSONResponse({"status": "ok" if is_well else "the engine has stopped"}, 200 if is_well else 503)

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", summary="As /healthz, for clients of vLLM and LibreTranslate.")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}, 200 if service.engine.is_alive else 503)

    @routes.head("/readyz", include_in_schema=False)
    @routes.get("/readyz", summary="Whether requests should be sent here: 503 while loading and draining.")
    async def readyz() -> Response:
        is_ready = service.state.is_ready and not service.state.is_draining and service.engine.is_alive
        reason = "draining" if service.state.is_draining else "loading"
        return JSONResponse({"status": "ready" if is_ready else reason}, 200 if is_ready else 503)

    @routes.get("/metrics", summary="Counters for Prometheus.", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    folder = resources.files("manyheads.extras.serving") / "page"
    for path, (name, kind) in FILES.items():
        _add(routes, path, (folder / name).read_bytes(), kind)
    return routes


def _add(routes: APIRouter, path: str, content: bytes, kind: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}

    @routes.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)


_PATH = "/v1/translate"

Answering = Callable[[Request, Exception], Awaitable[Response]]


class Direct:
    """Answers translations without FastAPI's layers, which take a fifth of the event loop's time for a short request.

    The application handles everything else: other paths, streams, and all invalid bodies, so that only one place
    produces error messages.

    Args:
        app: the application.
        service: see `Service`.
        errors: kind of an error -> what answers it, as in the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        service: Service,
        errors: Mapping[type[Exception], Answering],
    ) -> None:
        self._app = app
        self._service = service
        self._route = Route(_PATH, self.__call__)  # for the log
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI says."""
        body = _body(scope)
        if body is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = self._route
        request = Request(scope, receive)
        try:
            job = await TranslateJob.prepare(self._service, request, body)
            answer = await job.answer()
        except tuple(self._errors) as error:
            answer = await self._answering(error)(request, error)
        await answer(scope, receive, send)

    def _answering(self, error: Exception) -> Answering:
        return next(self._errors[kind] for kind in type(error).__mro__ if kind in self._errors)


def _body(scope: Scope) -> TranslateBody | None:
    """Return the body of a request that can be answered here. It was read by the guard."""
    if scope["type"] != "http" or scope["path"] != _PATH or scope["method"] != "POST":
        return None
    if dict(scope["headers"]).get(b"content-type") != b"application/json":
        return None
    try:
        body = TranslateBody.model_validate(json.loads(scope["manyheads.body"]))
    except (ValueError, RecursionError):  # a ValidationError is a ValueError
        return None
    return None if body.stream else body


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "Not JSON, or an option that is not supported."},
    401: {"description": "No valid key."},
    403: {"description": "No valid key, or a page of another origin."},
    404: {"description": "No such model."},
    408: {"description": "The body came too slowly."},
    413: {"description": "The body is too large."},
    415: {"description": "The type of the body is not supported."},
    421: {"description": "The Host header does not name this server."},
    422: {"description": "A field is invalid; the message names it and the limit."},
    429: {"description": "Too many requests; see Retry-After."},
    431: {"description": "Too many headers."},
    500: {"description": "A fault of the server or the model."},
    503: {"description": "The server starts or stops, or has too little free memory."},
    504: {"description": "The deadline has passed."},
}
_MOST_FIELD = 60
_MOST_MISTAKES = 5


def create_app() -> FastAPI:
    """Return the application with the settings of the environment (`MANYHEADS_MODELS` and so on).

        MANYHEADS_MODELS=runs/demo uvicorn --factory manyheads.extras.serving.app:create_app

    The models are loaded when the application starts, not in this call.

    Raises: ConfigError: a variable is invalid.
    """
    return build_app(ServingSettings.from_environment())


def build_app(settings: ServingSettings, *, loads: bool = True) -> FastAPI:
    """Return the application with these settings. `app.state.service` is its `Service`.

    Args: loads: load the models at the start of the application, which fails if they cannot be loaded. Otherwise the
        server calls `Service.load`; until then requests for work get 503.

    Raises: ConfigError: the key file or the protocol of a plug-in cannot be used.
    """
    keys = ApiKeys.read(settings.api_key_file) if settings.api_key_file else ApiKeys([])
    service = Service(settings, keys)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            if loads:
                await service.load()
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="manyheads",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        description="Translation, text generation and scoring with trained models.",
    )
    app.state.service = service
    app.include_router(operations(service), responses=_ERRORS)
    for name in [*PROTOCOLS, *PROTOCOLS.refused]:  # a plug-in's that is refused raises its error
        app.include_router(PROTOCOLS[name](service), responses=_ERRORS)
    errors = {Refusal: _refused, RequestError: _unusable, ConfigError: _unusable, DataError: _unusable,
              MissingExtraError: _unusable}  # fmt: skip
    app.add_middleware(Direct, service=service, errors=errors)  # within the guard
    app.add_middleware(Guard, settings=settings, state=service.state, keys=keys, metrics=service.metrics)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    for kind, answer in errors.items():
        app.add_exception_handler(kind, answer)
    return app


def _answer(request: Request, refusal: Refusal) -> JSONResponse:
    path = request.url.path
    return JSONResponse(error_body(path, refusal), status_of(path, refusal), refusal.headers())


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return _answer(request, error)


async def _unusable(request: Request, error: Exception) -> JSONResponse:
    """The decoding options or texts are invalid. The messages name options and numbers, never a text."""
    assert isinstance(error, ManyHeadsError)
    fields = getattr(error, "fields", ())
    field = fields[0] if fields else None
    return _answer(request, Refusal(422, told(error), code="invalid", field=field))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    allowed = _methods(request, (error.headers or {}).get("Allow", ""))
    texts = {
        400: "The body cannot be read as JSON: a number has too many digits, or it is nested too deeply.",
        404: "There is no such path here; GET /docs lists the paths.",
        405: f"This path does not accept this method{f'; use {allowed}' if allowed else ''}.",
    }
    if error.status_code == 404 and request.url.path.endswith("/chat/completions"):
        texts[404] = "The models here continue a text and do not chat; use POST /v1/completions."
    refusal = Refusal(error.status_code, texts.get(error.status_code, "The request is invalid."), code="http")
    answer = _answer(request, refusal)
    answer.headers.update(error.headers or {})
    if allowed:
        answer.headers["allow"] = allowed
    return answer


def _methods(request: Request, first: str) -> str:
    """Return the methods of a path. first: those of its first route, which Starlette names for a wrong method."""
    found = {one.strip() for one in first.split(",")} if first else set()
    paths = request.app.openapi()["paths"] if found else {}
    for path, methods in paths.items():
        if compile_path(path)[0].match(request.url.path):
            found |= {method.upper() for method in methods}
    return ", ".join(sorted(found))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The body does not fit the schema: name the fields and what they must be, never what was sent."""
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    if any(one["type"] == "json_invalid" for one in mistakes):
        return _answer(request, Refusal(400, "The body is not valid JSON.", code="json"))
    kind = request.headers.get("content-type", "")
    if tuple(mistakes[0]["loc"]) == ("body",) and "json" not in kind:  # as curl -d sends it without a header
        told = "The body is not marked as JSON; send it with the header Content-Type: application/json."
        return _answer(request, Refusal(422, told, code="invalid", field="body"))
    lines = [f"{_field(one['loc'])}: {_wanted(one)}" for one in mistakes[:_MOST_MISTAKES]]
    if len(mistakes) > _MOST_MISTAKES:
        lines.append(f"and {len(mistakes) - _MOST_MISTAKES} more")
    return _answer(request, Refusal(422, "; ".join(lines) + ".", code="invalid", field=_field(mistakes[0]["loc"])))


def _field(place: tuple[Any, ...]) -> str:
    """Return the path of a field.

    Names that clients invented are shown only if they are short and plain. Pydantic's names for the types of a field,
    such as `list[int]`, are left out.
    """
    parts = [str(part) for part in place[1:] if "[" not in str(part)] or ["body"]
    plain = [part if part.replace("_", "a").isalnum() and part.isascii() and len(part) <= _MOST_FIELD else "..."
             for part in parts]  # fmt: skip
    return ".".join(plain)


def _wanted(mistake: dict[str, Any]) -> str:
    if mistake["type"] == "extra_forbidden":
        return "there is no such field"
    return str(mistake["msg"]).removeprefix("Value error, ")[:300]
