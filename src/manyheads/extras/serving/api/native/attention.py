"""`/v1/attention`: the attention weights of a translation."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response
from torch import Tensor

from manyheads.decoding.text_ids import encode_texts
from manyheads.decoding.truncation import scored_limit
from manyheads.extras.serving.api.answers import large_answer
from manyheads.extras.serving.api.languages import translator_for
from manyheads.extras.serving.api.native import records
from manyheads.extras.serving.api.native.bodies import AttentionBody
from manyheads.extras.serving.refusals import Refusal, invalid, too_long
from manyheads.extras.serving.scoring import MOST_MAPPED, attention_maps, mean_map
from manyheads.extras.serving.service import Service

__all__ = ["answer_attention"]


async def answer_attention(service: Service, request: Request, body: AttentionBody) -> Response:
    """Return the answer. Raises: Refusal: the request is invalid or cannot be served."""
    model = translator_for(service, body.model, body.source_lang, body.target_lang)
    reader, writer = model.reader.tokenizer.source, model.reader.tokenizer.target
    settings = model.settings({})
    [row] = await service.rows(request, model, [body.source], settings, "source")
    if row is None:
        raise invalid("source", "there is no text in it; send at least one word.")
    source = row.content[0]
    if body.target is None:
        [[best, *_]] = await service.run(request, model.begin(settings, [row]), [row], len(source))
        target = [*best.ids, writer.eos_id] if best.ended else best.ids
    else:
        texts = [body.target]
        [ids] = await service.each(request, lambda some: encode_texts(some, writer), texts, len)
        target = [*ids, writer.eos_id]
    limit, reason = scored_limit(settings, model.reader.model.max_len)
    if len(target) > limit:
        raise too_long("target", "its length in tokens", len(target), limit, f"({reason})")
    longest = max(len(source), len(target))
    if longest > MOST_MAPPED:
        raise too_long("source", "the length of the longer side in tokens", longest, MOST_MAPPED, "Send shorter texts.")
    cost = len(source) + len(target)
    maps = await service.call(request, lambda: attention_maps(model.reader, source, target), cost)
    layers: tuple[Tensor, ...] = getattr(maps, body.kind)
    if body.layer is not None and layers:
        if body.layer >= len(layers):
            raise too_long("layer", "its number", body.layer, len(layers) - 1, "Numbers begin at 0.")
        chosen = layers[body.layer : body.layer + 1]
    else:
        chosen = layers
    num_heads = max((len(layer) for layer in chosen), default=0)
    if not num_heads:
        raise Refusal(400, "kind: this model has no such attention weights.", code="model", field="kind")
    if body.head is not None and body.head >= num_heads:
        raise too_long("head", "its number", body.head, num_heads - 1, "Numbers begin at 0.")
    mean = mean_map(chosen, body.head)
    assert mean is not None

    def whole() -> dict[str, Any]:
        read, written = reader.tokens(source), writer.tokens(target)
        keys = {"cross": read, "encoder": read, "decoder": writer.tokens([writer.bos_id, *target[:-1]])}
        return {
            "model": model.name,
            "kind": body.kind,
            "num_layers": len(layers),
            "num_heads": num_heads,
            "query_tokens": read if body.kind == "encoder" else written,
            "key_tokens": keys[body.kind],
            "weights": records.rounded(mean),
        }

    return await large_answer(service, request, whole)
