"""DeepL's calls for glossaries: version 2, in which a glossary has one language pair, and version 3 with several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field

from manyheads.extras.serving.api.shared import LooseBody, Text, form_schema, read_body
from manyheads.extras.serving.glossaries import (
    NOTE,
    Glossaries,
    Glossary,
    Head,
    TermList,
    base_language,
    not_found,
    parse_entries,
    parse_terms,
    terms_of,
)
from manyheads.extras.serving.refusals import Refusal

if TYPE_CHECKING:
    from manyheads.extras.documents.terms import Terms
    from manyheads.extras.serving.service import Service

_MOST_IDS = 5
T = TypeVar("T")


class ListForm(LooseBody):
    """Terms of a language pair."""

    source_lang: Text
    target_lang: Text
    entries: Text
    entries_format: Text = "tsv"


class GlossaryForm(ListForm):
    """A glossary of version 2."""

    name: Text


class GlossaryBody(LooseBody):
    """A glossary of version 3."""

    name: Text
    dictionaries: list[ListForm] = Field(min_length=1)


class ChangeBody(LooseBody):
    """A change of a glossary: its name, and terms that are added or replace those of an equal source."""

    name: Text | None = None
    dictionaries: list[ListForm] = Field(default_factory=list)


def router(service: Service) -> APIRouter:
    """Return the routes of both versions."""
    routes = APIRouter(tags=["DeepL"])
    _add_version_2(routes, service)
    _add_version_3(routes, service)

    @routes.get("/v2/glossary-language-pairs", summary="Language pairs of glossaries (DeepL).")
    async def pairs() -> Response:
        found = [{"source_lang": source, "target_lang": target} for source, target in _pairs(service)]
        return JSONResponse({"supported_languages": found})

    return routes


def _add_version_2(routes: APIRouter, service: Service) -> None:
    @routes.post(
        "/v2/glossaries", status_code=201, summary="Store a glossary (DeepL).", openapi_extra=form_schema(GlossaryForm)
    )
    async def create(request: Request) -> Response:
        store, owner = _owned(service, request)
        body = await read_body(service, request, GlossaryForm)
        lists = await asyncio.to_thread(_lists, service, [body])
        return JSONResponse(_version_2(await _call(store.create, owner, body.name, lists)), 201)

    @routes.get("/v2/glossaries", summary="Glossaries of this key (DeepL).")
    async def several(request: Request) -> Response:
        store, owner = _owned(service, request)
        heads = await _call(store.heads, owner)
        return JSONResponse({"glossaries": [_version_2(one) for one in heads if len(one.counts) == 1]})

    @routes.get("/v2/glossaries/{glossary_id}", summary="A glossary (DeepL).")
    async def one(request: Request, glossary_id: str) -> Response:
        return JSONResponse(_version_2(await _single(service, request, glossary_id)))

    @routes.get("/v2/glossaries/{glossary_id}/entries", summary="The terms of a glossary as lines (DeepL).")
    async def entries(request: Request, glossary_id: str) -> Response:
        [terms] = (await _single(service, request, glossary_id)).lists
        return PlainTextResponse(terms.tsv(), media_type="text/tab-separated-values")

    _add_deletion(routes, service, "/v2/glossaries/{glossary_id}")


def _add_version_3(routes: APIRouter, service: Service) -> None:
    @routes.post(
        "/v3/glossaries", status_code=201, summary="Store a glossary of several language pairs (DeepL).",
        openapi_extra=form_schema(GlossaryBody),
    )  # fmt: skip
    async def create(request: Request) -> Response:
        store, owner = _owned(service, request)
        body = await read_body(service, request, GlossaryBody)
        lists = await asyncio.to_thread(_lists, service, body.dictionaries)
        return JSONResponse(_version_3(await _call(store.create, owner, body.name, lists)), 201)

    @routes.get("/v3/glossaries", summary="Glossaries of this key (DeepL).")
    async def several(request: Request) -> Response:
        store, owner = _owned(service, request)
        return JSONResponse({"glossaries": [_version_3(one) for one in await _call(store.heads, owner)]})

    @routes.get("/v3/glossaries/{glossary_id}", summary="A glossary (DeepL).")
    async def one(request: Request, glossary_id: str) -> Response:
        store, owner = _owned(service, request)
        return JSONResponse(_version_3(await _call(store.get, owner, glossary_id)))

    @routes.patch("/v3/glossaries/{glossary_id}", summary="Rename a glossary, or add terms (DeepL).",
                  openapi_extra=form_schema(ChangeBody))  # fmt: skip
    async def change(request: Request, glossary_id: str) -> Response:
        body = await read_body(service, request, ChangeBody)
        lists = await asyncio.to_thread(_lists, service, body.dictionaries)

        def changed(before: Glossary) -> Glossary:
            merged = {one.pair: one for one in before.lists}
            for one in lists:
                merged[one.pair] = merged[one.pair].with_entries(one) if one.pair in merged else one
            name = before.name if body.name is None else body.name
            return Glossary(before.id, name, before.created, tuple(merged.values()))

        return JSONResponse(_version_3(await _changed(service, request, glossary_id, changed)))

    @routes.put("/v3/glossaries/{glossary_id}/dictionaries", summary="Replace the terms of a language pair (DeepL).",
                openapi_extra=form_schema(ListForm))  # fmt: skip
    async def replace(request: Request, glossary_id: str) -> Response:
        body = await read_body(service, request, ListForm)
        lists = await asyncio.to_thread(_lists, service, [body])
        await _changed(service, request, glossary_id, lambda before: before.with_lists(lists))
        return JSONResponse(_count(*lists[0].pair, len(lists[0].entries)))

    @routes.get("/v3/glossaries/{glossary_id}/entries", summary="The terms of a language pair (DeepL).")
    async def entries(request: Request, glossary_id: str, source_lang: str, target_lang: str) -> Response:
        store, owner = _owned(service, request)
        found = _list_of(await _call(store.get, owner, glossary_id), source_lang, target_lang)
        terms = {"source_lang": found.source_lang, "target_lang": found.target_lang, "entries": found.tsv(),
                 "entries_format": "tsv"}  # fmt: skip
        return JSONResponse({"dictionaries": [terms]})

    @routes.delete("/v3/glossaries/{glossary_id}/dictionaries", status_code=204,
                   summary="Delete the terms of a language pair (DeepL).")  # fmt: skip
    async def delete_list(request: Request, glossary_id: str, source_lang: str, target_lang: str) -> Response:
        def changed(before: Glossary) -> Glossary:
            gone = _list_of(before, source_lang, target_lang)
            return Glossary(before.id, before.name, before.created, tuple(x for x in before.lists if x is not gone))

        await _changed(service, request, glossary_id, changed)
        return Response(status_code=204)

    _add_deletion(routes, service, "/v3/glossaries/{glossary_id}")


def _add_deletion(routes: APIRouter, service: Service, path: str) -> None:
    @routes.delete(path, status_code=204, summary="Delete a glossary (DeepL).")
    async def delete(request: Request, glossary_id: str) -> Response:
        store, owner = _owned(service, request)
        await _call(store.delete, owner, glossary_id)
        return Response(status_code=204)


async def terms_for(
    service: Service,
    request: Request,
    ids: Sequence[str],
    source_lang: str | None,
    target_lang: str,
    lines: str | None = None,
) -> Terms:
    """Return the terms of a request; none if it names no glossary.

    Args: ids: of glossaries. lines: more terms, as lines of source and target, which come first.

    Raises: Refusal: there is no such glossary of this key for these languages, or a line is malformed.
    """
    own = parse_terms(lines)
    if not ids:
        return own
    if len(ids) > _MOST_IDS:
        raise Refusal(400, f"glossary_ids: there are {len(ids)}; the limit is {_MOST_IDS}.", code="over_limit",
                      field="glossary_ids")  # fmt: skip
    if service.glossaries is None:
        raise Refusal(400, str(_none_kept()), code="unsupported", field="glossary_id")
    store, owner = _owned(service, request)
    if not source_lang:
        raise Refusal(400, "source_lang: name the language of the texts when a glossary is used.", code="invalid",
                      field="source_lang")  # fmt: skip
    found = await _call(store.terms, owner, list(ids), source_lang, target_lang)
    if not len(own):
        return found
    return terms_of((term.source, term.target) for each in (own, found) for term in each)


def glossary_ids(one: str | None, several: str | Sequence[str] | None) -> list[str]:
    """Return the ids of a request, which a form has in one field, separated by commas."""
    more = several.split(",") if isinstance(several, str) else several or []
    return [found.strip() for found in (one or "", *more) if found.strip()]


def _owned(service: Service, request: Request) -> tuple[Glossaries, str]:
    """Return the store, and the key of the client. Raises: Refusal: this server keeps no glossaries."""
    if service.glossaries is None:
        raise _none_kept()
    return service.glossaries, str(request.scope["manyheads.client"])


def _none_kept() -> Refusal:
    told = (
        "This server keeps no glossaries; give terms in the field terms of POST /v1/translate or /v2/document, or ask"
        " its owner to start it with --glossaries."
    )
    return Refusal(404, told, code="glossaries", field="glossary_id")


async def _call(function: Callable[..., T], *given: Any) -> T:
    """Call a method of the store in a thread, because it waits for the disk."""
    return await asyncio.to_thread(function, *given)


async def _single(service: Service, request: Request, glossary_id: str) -> Glossary:
    """Return a glossary of one language pair. Raises: Refusal: it has several pairs, or the client has no such one."""
    store, owner = _owned(service, request)
    found = await _call(store.get, owner, glossary_id)
    if len(found.lists) != 1:
        raise not_found()
    return found


async def _changed(
    service: Service, request: Request, glossary_id: str, change: Callable[[Glossary], Glossary]
) -> Glossary:
    store, owner = _owned(service, request)

    def work() -> Glossary:
        with store.changing(owner, glossary_id) as versions:
            versions.append(change(versions[-1]))
        return versions[-1]

    return await _call(work)


def _lists(service: Service, forms: Sequence[ListForm]) -> list[TermList]:
    """Return the terms of a request. Raises: Refusal: a line is malformed, or no model translates this pair."""
    lists = []
    for form in forms:
        pair = base_language(form.source_lang), base_language(form.target_lang)
        if pair not in _pairs(service):
            raise Refusal(
                400, "target_lang: no model here translates between these languages; GET /v2/glossary-language-pairs"
                " lists the pairs.", code="language", field="target_lang",
            )  # fmt: skip
        lists.append(TermList(*pair, parse_entries(form.entries, form.entries_format, pair)))
    return lists


def _list_of(glossary: Glossary, source_lang: str, target_lang: str) -> TermList:
    """Return the terms of a pair. Raises: Refusal: the glossary has no such pair."""
    try:
        return glossary.list_of(source_lang, target_lang)
    except Refusal as refusal:
        raise Refusal(404, str(refusal), code=refusal.code, field=refusal.field) from None


def _pairs(service: Service) -> list[tuple[str, str]]:
    """Return the language pairs of all models, without regions."""
    pairs = (pair for model in service.models.values() for pair in model.pairs)
    return list(dict.fromkeys((base_language(source), base_language(target)) for source, target in pairs))


def _version_2(glossary: Glossary | Head) -> dict[str, Any]:
    head = glossary.head if isinstance(glossary, Glossary) else glossary
    [(source, target, count)] = head.counts
    return {"glossary_id": head.id, "name": head.name, "ready": True, "creation_time": head.created,
            **_count(source, target, count), "note": NOTE}  # fmt: skip


def _version_3(glossary: Glossary | Head) -> dict[str, Any]:
    head = glossary.head if isinstance(glossary, Glossary) else glossary
    lists = [_count(*each) for each in head.counts]
    return {"glossary_id": head.id, "name": head.name, "creation_time": head.created, "dictionaries": lists,
            "note": NOTE}  # fmt: skip


def _count(source: str, target: str, count: int) -> dict[str, Any]:
    return {"source_lang": source, "target_lang": target, "entry_count": count}
