"""LibreTranslate's protocol: for Mastodon, browser add-ons and many bindings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from manyheads.extras.serving.api.shared import (
    LooseBody,
    Text,
    Texts,
    form_schema,
    large_answer,
    read_body,
    translator_for,
)
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.settings import plain_tag
from manyheads.extras.serving.texts import translate_html, translate_paragraphs

if TYPE_CHECKING:
    from manyheads.extras.serving.service import Service

_MOST_ALTERNATIVES = 16


class TranslateForm(LooseBody):
    """A request for translations."""

    q: Text | Texts
    source: Text
    target: Text
    format: Text = "text"
    alternatives: Annotated[int, Field(ge=0, le=_MOST_ALTERNATIVES)] = 0
    api_key: Text | None = None


class DetectForm(LooseBody):
    """A request for the language of a text."""

    q: Text | Texts
    api_key: Text | None = None


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["LibreTranslate"])

    @routes.post("/translate", summary="Translate (LibreTranslate).", openapi_extra=form_schema(TranslateForm))
    async def translate(request: Request) -> Response:
        body = await read_body(service, request, TranslateForm, lists=("q",), numbers=("alternatives",))
        _check_key(service, request, body.api_key)
        if body.format not in ("text", "html"):
            raise Refusal(400, "format: use text or html.", code="format", field="format")
        if body.format == "html" and body.alternatives:
            raise Refusal(400, "alternatives: there are none in format html; leave it out.", code="format",
                          field="alternatives")  # fmt: skip
        is_auto = body.source == "auto"
        model = translator_for(service, None, None if is_auto else body.source, body.target)
        texts = [body.q] if isinstance(body.q, str) else body.q
        if body.format == "html":
            found = [[one] for one in await translate_html(service, request, model, texts, field="q")]
        else:
            found = await translate_paragraphs(
                service, request, model, texts, num_alternatives=body.alternatives, field="q"
            )
        best: list[Any] = [one[0] for one in found]
        others: list[Any] = [one[1:] for one in found]
        # The language is not looked at: the model has one source language.
        wanted = plain_tag(body.target)
        source = next((source for source, target in model.pairs if plain_tag(target) == wanted), "")
        detected: list[Any] = [{"confidence": 0, "language": source} for _ in texts]
        is_one = isinstance(body.q, str)
        answer: dict[str, Any] = {"translatedText": best[0] if is_one else best}
        if is_auto:
            answer["detectedLanguage"] = detected[0] if is_one else detected
        if body.alternatives:
            answer["alternatives"] = others[0] if is_one else others
        return await large_answer(service, request, lambda: answer, sum(len(one) for row in found for one in row))

    @routes.get("/languages", summary="Languages (LibreTranslate).")
    async def languages() -> Response:
        targets: dict[str, dict[str, None]] = {}
        for model in service.models.values():
            for source, target in model.pairs:
                targets.setdefault(source, {})[target] = None  # several models can have the same pair
                targets.setdefault(target, {})
        return JSONResponse([{"code": code, "name": code, "targets": list(found)} for code, found in targets.items()])

    @routes.post("/detect", summary="The language of a text (LibreTranslate): what the models read.",
                 openapi_extra=form_schema(DetectForm))  # fmt: skip
    async def detect(request: Request) -> Response:
        body = await read_body(service, request, DetectForm, lists=("q",))
        _check_key(service, request, body.api_key)
        sources = {source: None for model in service.models.values() for source, _ in model.pairs}
        return JSONResponse([{"confidence": 0, "language": source} for source in sources])

    @routes.get("/frontend/settings", summary="Limits (LibreTranslate).")
    async def settings() -> Response:
        return JSONResponse(
            {"apiKeys": bool(service.keys), "charLimit": -1, "frontendTimeout": 500, "keyRequired": bool(service.keys),
             "suggestions": False, "supportedFilesFormat": []}
        )  # fmt: skip

    return routes


def _check_key(service: Service, request: Request, key: str | None) -> None:
    """Raises: Refusal: neither the body nor the headers have a valid key."""
    in_headers = service.keys.in_headers(dict(request.headers))
    if not (service.keys.allow(key) or service.keys.allow(in_headers)):
        service.metrics.rejected["key"].inc()
        raise Refusal(403, "Invalid API key", code="key")
    if service.keys and key is not None and service.keys.allow(key):
        request.scope["manyheads.client"] = key
