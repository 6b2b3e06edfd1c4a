"""The keys that clients present."""

from __future__ import annotations

import hmac
import os
from collections.abc import MutableMapping
from pathlib import Path

from manyheads.errors import ConfigError
from manyheads.files.guarded import read_stream

__all__ = ["ApiKeys"]

MOST_KEYS = 10_000
_MOST_KEY_BYTES = 1 << 20


class ApiKeys:
    """The keys that clients may present; without keys every client is allowed.

    Args: keys: each at least 8 characters.
    """

    def __init__(self, keys: list[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @classmethod
    def read(cls, path: str) -> ApiKeys:
        """Read one key per line; empty lines and lines that begin with # are ignored.

        A file of root may be readable by the group of another user's process.

        Raises: ConfigError: the file cannot be read, other users can read it, or it holds no usable key.
        """
        seen: list[os.stat_result] = []
        try:
            content = read_stream(Path(path), _MOST_KEY_BYTES, seen.append)
            if len(content) > _MOST_KEY_BYTES:
                raise ConfigError(f"the key file {path} has more than {_MOST_KEY_BYTES:,} bytes; give fewer keys.")
            text = content.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"cannot read the key file {path}: {reason}.") from None
        [status] = seen
        if status.st_mode & _forbidden(status.st_uid):
            raise ConfigError(
                f"other users can read or write the key file {path} (mode {status.st_mode & 0o777:03o}); run chmod 600"
                f" {path}. A secret of Kubernetes needs defaultMode 0440, and fsGroup in the pod."
            )
        keys = [line.strip() for line in text.split("\n") if line.strip() and not line.startswith("#")]
        if not keys or len(keys) > MOST_KEYS or min(map(len, keys)) < 8:
            raise ConfigError(
                f"the key file {path} has {len(keys)} keys; give 1 to {MOST_KEYS:,} keys of at least 8 characters."
            )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def allow(self, presented: str | None) -> bool:
        """Return whether this key is one of them. The time does not depend on which key it is or how much matches."""
        if not self._keys:
            return True
        given = (presented or "").encode("utf-8", "surrogatepass")
        return max([hmac.compare_digest(given, key) for key in self._keys])

    def in_headers(self, headers: MutableMapping[str, str]) -> str | None:
        """Return the key of `Authorization: Bearer KEY` or `Authorization: DeepL-Auth-Key KEY`, or of `X-API-Key`."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() in ("bearer", "deepl-auth-key"):
            return key.strip()
        return headers.get("x-api-key")


def _forbidden(owner: int) -> int:
    """Return the permissions that a key file of this owner must not give; none where there are no such permissions.

    A secret that Kubernetes mounts belongs to root, and other users' processes can read it by their group alone.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return 0
    return 0o037 if owner == 0 and os.geteuid() != 0 else 0o077
