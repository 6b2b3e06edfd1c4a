"""The routes of our own protocol."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from manyheads.extras.serving.api.answers import STREAMED, whole_or_events
from manyheads.extras.serving.api.native.attention import answer_attention
from manyheads.extras.serving.api.native.bodies import AttentionBody, GenerateBody, ScoreBody, TranslateBody
from manyheads.extras.serving.api.native.generation import GenerateJob
from manyheads.extras.serving.api.native.scoring import answer_score
from manyheads.extras.serving.api.native.translation import TranslateJob
from manyheads.extras.serving.service import Service

__all__ = ["router"]


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/v1", tags=["native"])

    @routes.post("/translate", summary="Translate texts.", responses=STREAMED)
    async def translate(request: Request, body: TranslateBody) -> Response:
        job = await TranslateJob.prepare(service, request, body)
        return await whole_or_events(job, body.stream)

    @routes.post("/generate", summary="Continue texts.", responses=STREAMED)
    async def generate(request: Request, body: GenerateBody) -> Response:
        job = await GenerateJob.prepare(service, request, body)
        return await whole_or_events(job, body.stream)

    @routes.post("/score", summary="Log-probabilities of given translations or texts.")
    async def score(request: Request, body: ScoreBody) -> Response:
        return await answer_score(service, request, body)

    @routes.post("/attention", summary="Attention weights of a translation.")
    async def attention(request: Request, body: AttentionBody) -> Response:
        return await answer_attention(service, request, body)

    return routes
