"""Paths for operators: health, readiness and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from manyheads.extras.serving.service import Service

__all__ = ["router"]


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

    return routes
