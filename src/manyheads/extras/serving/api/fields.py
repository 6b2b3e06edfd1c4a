"""Types of fields that several protocols use."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from manyheads.config.merge import field_types
from manyheads.decoding.settings import facts_of

__all__ = ["Body", "Ids", "ListsOfIds", "LooseBody", "Number", "Text", "Texts", "body_of", "finite", "given"]


def _check_text(text: str) -> str:
    """Raises: ValueError: the text has an unpaired surrogate, which no encoding can represent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"a text of {len(text):,} characters has an unpaired surrogate; send valid Unicode") from None
    return text


_MOST_ID = 2**31


def _all(kind: type, what: str) -> BeforeValidator:
    """Return a check of a list's items that ends at the first wrong one; pydantic makes an error of each."""

    def check(value: Any) -> Any:
        if isinstance(value, list):
            if not set(map(type, value)) <= {kind}:
                raise ValueError(f"Input should be a list of {what}")
            if kind is int and value and not 0 <= min(value) <= max(value) <= _MOST_ID:
                raise ValueError(f"ids are 0 to {_MOST_ID:,}")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_check_text)]
Texts = Annotated[list[Text], _all(str, "texts")]
Number = Annotated[float, Field(allow_inf_nan=False)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=_MOST_ID)]], _all(int, "ids")]
ListsOfIds = Annotated[list[Ids], _all(list, "lists of ids")]


class Body(BaseModel):
    """A body in which unknown fields are errors, and values are not converted between types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LooseBody(BaseModel):
    """A body of a foreign protocol: fields that we do not know are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


def body_of(settings: type, protocol: str, base: type[BaseModel]) -> type[BaseModel]:
    """Return a body with the options of a protocol: of those that are not given, the model's hold."""
    kinds = {float: Number, tuple[int, ...]: Ids, tuple[str, ...]: Texts}
    types, names = field_types(settings), option_names(settings, protocol)
    made: dict[str, Any] = {name: (kinds.get(types[name], types[name]) | None, None) for name in names}
    return create_model(settings.__name__, __base__=base, **made)


def option_names(settings: type, protocol: str) -> list[str]:
    """The options that a protocol has."""
    return [name for name, facts in facts_of(settings).items() if protocol in facts.http]


def given(body: BaseModel, settings: type, protocol: str) -> dict[str, Any]:
    """Return the options of a protocol that the client sent with a value other than null."""
    sent = {name: getattr(body, name) for name in option_names(settings, protocol)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in sent.items() if value is not None
    }


def finite(value: float) -> float | None:
    """Return a number for JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None
