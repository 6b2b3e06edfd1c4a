"""Pages of other origins that may use the server: the headers with which browsers permit it (CORS)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Origins"]

Headers = list[tuple[bytes, bytes]]


class Origins:
    """The origins that are allowed besides the server's own.

    Args: allowed: such as `https://example.org`; upper case and a slash at the end do not matter.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(one.strip().rstrip("/").lower() for one in allowed)

    def allow(self, origin: str) -> bool:
        """Return whether an Origin header is one of them."""
        return origin.lower() in self._allowed

    def headers(self, headers: Mapping[str, str]) -> Headers:
        """Return what an answer needs, so that the browser shows it to the page that asked."""
        origin = headers.get("origin", "")
        if not self.allow(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"retry-after, x-request-id"),
            (b"vary", b"origin"),
        ]

    def preflight(self, method: str, headers: Mapping[str, str]) -> Headers | None:
        """Return the headers of the answer to a preflight request of a browser; None: it is no preflight request.

        A preflight request has no key; the request after it has.
        """
        if method != "OPTIONS" or "access-control-request-method" not in headers or not self.headers(headers):
            return None
        asked = headers.get("access-control-request-headers", "")
        return [
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", asked.encode("latin-1")),
            (b"access-control-max-age", b"600"),
        ]
