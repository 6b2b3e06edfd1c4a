"""Refusals of requests: an HTTP status, a message, and the form in which each protocol expects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from manyheads.errors import ManyHeadsError, MissingExtraError

if TYPE_CHECKING:
    from manyheads.extras.serving.settings import ServingSettings

PROTOCOLS = {
    "/v2/": "deepl",
    "/v3/": "deepl",
    "/translate": "libretranslate",
    "/detect": "libretranslate",
    "/languages": "libretranslate",
    "/frontend/settings": "libretranslate",
}
"""Beginning of a path -> protocol; all other paths answer errors in the form of OpenAI."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_MOST_NAMES = 1_000
_NEVER_RETRY = {"x-should-retry": "false"}


class Refusal(Exception):  # noqa: N818  (an answer, not a fault)
    """The server answers with an error.

    Args:
        status: HTTP status.
        message: names the value, the limit and the remedy; never contains a text of the request.
        code: a short word for programs.
        field: name of the request's field that the message is about.
        retry_after: seconds after which the same request can succeed; None: this is unknown.
        close: whether the connection is closed after the answer, because the rest of the request was not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        field: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        self.retry_after = retry_after
        self.close = close

    def headers(self) -> dict[str, str]:
        """Return the headers that go with the status.

        `x-should-retry: false` tells the clients of OpenAI not to repeat a request that would fail again.
        """
        found = dict(_NEVER_RETRY) if self.status in (413, 504) else {}
        if self.retry_after is not None:
            found["retry-after"] = str(self.retry_after)
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.close:
            found["connection"] = "close"
        return found


def told(error: Refusal | ManyHeadsError) -> str:
    """Return the message of an error without what only a command, or the owner of the server, can do."""
    if isinstance(error, MissingExtraError) and error.why:
        return f"{error.why}, which this server does not have; leave it out, or ask the owner of the server to add it."
    return str(error)


def invalid(field: str, reason: str) -> Refusal:
    """Return the refusal of a value that cannot be used. reason: the rest of the message, with the remedy."""
    return Refusal(422, f"{field}: {reason}", code="invalid", field=field)


def refuse_unsupported(body: object, *fields: str) -> None:
    """Raises: Refusal: one of these fields of a foreign protocol is given."""
    for field in fields:
        if getattr(body, field):
            message = f"{field}: this server does not support it; leave it out."
            raise Refusal(400, message, code="unsupported", field=field)


def too_long(field: str, what: str, found: int, limit: int, remedy: str) -> Refusal:
    """Return the refusal of a value above its limit."""
    return Refusal(
        422, f"{field}: {what} is {found:,}; the limit is {limit:,}. {remedy}", code="over_limit", field=field
    )


def check_shape(body: bytes, settings: ServingSettings) -> None:
    """Count what a body in JSON holds outside its texts, before it is read: reading it keeps the interpreter's lock.

    Raises: Refusal: it has more values, lists or names than any valid request.
    """
    if sum(map(body.count, (b",", b":", b"[", b"{"))) < _MOST_NAMES:
        return
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(parts[::2])
    commas = outside.count(b",")  # of deep lists without any the reader finds out quickly
    for what, found, limit in (
        ("values", commas, max(settings.max_waiting_tokens, _MOST_NAMES)),
        ("texts", len(parts) // 2, settings.max_texts + 2 * _MOST_NAMES),
        ("names", outside.count(b":"), _MOST_NAMES),
        ("lists", min(commas, outside.count(b"[") + outside.count(b"{")), settings.max_texts + _MOST_NAMES),
    ):
        if found > limit:
            raise too_long("body", f"the number of {what}", found, limit, "Send less at once.")


def protocol_of(path: str) -> str:
    """Return the protocol of a path: `deepl`, `libretranslate` or `openai`."""
    for beginning, protocol in PROTOCOLS.items():
        if path == beginning.rstrip("/") or path.startswith(beginning if beginning.endswith("/") else beginning + "/"):
            return protocol
    return "openai"


def status_of(path: str, refusal: Refusal) -> int:
    """Return the status with which clients of this path expect a refusal: those of LibreTranslate and DeepL know 400
    for every request that cannot be served, and not 422.
    """
    return 400 if refusal.status == 422 and protocol_of(path) != "openai" else refusal.status


def error_body(path: str, refusal: Refusal) -> Mapping[str, Any]:
    """Return the JSON of an error in the form that clients of this path expect."""
    protocol = protocol_of(path)
    if protocol == "libretranslate":
        return {"error": str(refusal)}
    if protocol == "deepl":
        return {"message": str(refusal), "detail": refusal.code}
    return openai_error(refusal)


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Return the error as an object of OpenAI's protocol, which our own API uses as well."""
    kind = _TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.field, "code": refusal.code}}
