"""The web page, and the page about the interface: a fixed list of files of this package."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from manyheads.extras.serving.service import Service

__all__ = ["FILES", "router"]

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/static/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
}
"""Path -> (name in the package, type). Nothing else is ever read."""


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(include_in_schema=False)
    folder = resources.files("manyheads.extras.serving") / "page"
    for path, (name, kind) in FILES.items():
        _add(routes, path, (folder / name).read_bytes(), kind)
    return routes


def _add(routes: APIRouter, path: str, content: bytes, kind: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}

    @routes.api_route(path, methods=["GET", "HEAD"])
    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)
