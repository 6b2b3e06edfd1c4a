"""Paths for operators (health, readiness, metrics), the web page, and the page about the interface."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from manyheads.extras.serving.service import Service

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/static/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
}
"""Path -> (name in the package, type). Nothing else is ever read."""


def router(service: Service) -> APIRouter:
    """Return the routes."""
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
