"""Which of the served models translates between two languages."""

from __future__ import annotations

from manyheads.extras.serving.names import plain_tag
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.served import ServedTranslator, find_model
from manyheads.extras.serving.service import Service

__all__ = ["translator_for"]


def translator_for(
    service: Service, name: str | None, source_lang: str | None, target_lang: str | None
) -> ServedTranslator:
    """Return the named model, or the first one for these languages; with neither, the first that translates.

    Raises: Refusal: no served model has this name or these languages, or the named one is known to have others.
    """
    if name is None and (source_lang or target_lang):
        wanted = [plain_tag(one) if one else None for one in (source_lang, target_lang)]
        for model in service.models.values():
            for source, target in model.pairs:
                if wanted[0] in (None, plain_tag(source)) and wanted[1] in (None, plain_tag(target)):
                    assert isinstance(model, ServedTranslator)
                    return model.into(target_lang or target)
        raise Refusal(
            422, "target_lang: no model here translates between these languages; GET /languages lists them.",
            code="language", field="target_lang",
        )  # fmt: skip
    model = find_model(service.models, name, ServedTranslator)
    chosen = model.into(target_lang)
    targets = (*model.reader.tokenizer.target_languages, *(target for _, target in model.pairs))
    if model.pairs and not (
        _has(source_lang, [source for source, _ in model.pairs]) and _has(target_lang, list(targets))
    ):
        raise Refusal(
            422, "target_lang: the named model does not translate between these languages; GET /v1/models lists them.",
            code="language", field="target_lang",
        )  # fmt: skip
    return chosen


def _has(wanted: str | None, languages: list[str]) -> bool:
    """Return whether a language is one of these, ignoring its region. True if no language is named."""
    return not wanted or plain_tag(wanted).partition("-")[0] in {plain_tag(one).partition("-")[0] for one in languages}
