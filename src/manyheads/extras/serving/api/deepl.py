"""DeepL's protocol, version 2: for its clients and for tools for translators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from manyheads.extras.serving.api.glossaries import glossary_ids, terms_for
from manyheads.extras.serving.api.shared import (
    LooseBody,
    Text,
    Texts,
    form_schema,
    large_answer,
    nearest_translator,
    read_body,
)
from manyheads.extras.serving.glossaries import NOTE
from manyheads.extras.serving.refusals import Refusal, refuse_unsupported
from manyheads.extras.serving.settings import plain_tag
from manyheads.extras.serving.texts import translate_html, translate_paragraphs

if TYPE_CHECKING:
    from manyheads.extras.serving.service import Service

# DeepL's clients refuse these targets without a region.
_REGIONS = {"en": ("EN-GB", "EN-US"), "pt": ("PT-PT", "PT-BR")}


class TranslateForm(LooseBody):
    """A request for translations. Options that change only the style are ignored.

    tag_handling: `html`, or nothing; the other options of markup are refused, because they change what is translated.
    """

    text: Text | Texts
    target_lang: Text
    source_lang: Text | None = None
    split_sentences: Text | bool | int | None = None
    tag_handling: Text | None = None
    glossary_id: Text | None = None
    glossary_ids: Text | Texts | None = None
    ignore_tags: Any = None
    splitting_tags: Any = None
    non_splitting_tags: Any = None


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/v2", tags=["DeepL"])

    @routes.post("/translate", summary="Translate (DeepL).", openapi_extra=form_schema(TranslateForm))
    async def translate(request: Request) -> Response:
        body = await read_body(service, request, TranslateForm, lists=("text", "glossary_ids"))
        is_html = body.tag_handling == "html"
        if body.tag_handling and not is_html:
            raise Refusal(400, "tag_handling: this server supports html only.", code="unsupported",
                          field="tag_handling")  # fmt: skip
        refuse_unsupported(body, "ignore_tags", "splitting_tags", "non_splitting_tags")
        texts = [body.text] if isinstance(body.text, str) else body.text
        model, source = nearest_translator(service, body.source_lang, body.target_lang)
        at_ends = str(body.split_sentences).lower() not in ("0", "false", "off")
        ids = glossary_ids(body.glossary_id, body.glossary_ids)
        terms = await terms_for(service, request, ids, body.source_lang, body.target_lang)
        options: dict[str, Any] = {"at_sentence_ends": at_ends, "field": "text", "terms": terms}
        if is_html:
            best = await translate_html(service, request, model, texts, **options)
        else:
            options["at_line_ends"] = body.split_sentences != "nonewlines"  # lines that were wrapped
            best = [one[0] for one in await translate_paragraphs(service, request, model, texts, **options)]
        translations = [
            {"detected_source_language": _code(source), "text": one, "billed_characters": len(text)}
            for text, one in zip(texts, best, strict=True)
        ]
        answer: dict[str, Any] = {"translations": translations, **({"note": NOTE} if ids else {})}
        return await large_answer(service, request, lambda: answer, sum(map(len, best)))

    @routes.get("/languages", summary="Languages (DeepL).")
    async def languages(request: Request) -> Response:
        # DeepL's client sends the type as a form in the body of a GET.
        form = (await request.body()).decode("latin-1")
        wants_targets = "type=target" in form or request.query_params.get("type") == "target"
        codes: dict[str, None] = {}
        for model in service.models.values():
            for source, target in model.pairs:
                if wants_targets:
                    codes |= dict.fromkeys(_REGIONS.get(target.lower(), (_code(target),)))
                else:
                    codes[_code(source)] = None
        return JSONResponse([{"language": code, "name": code, "supports_formality": False} for code in codes])

    @routes.get("/usage", summary="Usage (DeepL): not limited.")
    async def usage() -> Response:
        return JSONResponse({"character_count": 0, "character_limit": 1_000_000_000_000})

    return routes


def _code(language: str) -> str:
    """Return a language as DeepL writes it: `pt_BR` is `PT-BR`."""
    return plain_tag(language).upper()
