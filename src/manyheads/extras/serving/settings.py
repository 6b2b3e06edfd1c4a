"""Settings of the server, from the command line or from variables of the environment."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from manyheads.config.build import build, convert
from manyheads.config.checks import Range, at_least, between, check, set_tuples
from manyheads.decoding.inputs_and_results import engine_named
from manyheads.errors import ConfigError
from manyheads.files.safe_open import read_stream

ENVIRONMENT_PREFIX = "MANYHEADS_"
ENGINES = ("torch", "ctranslate2")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+/?|null", re.IGNORECASE)
_SECONDS = Range(0, 86_400, "above 0 and at most 86,400 seconds", excluded=0)
_RANGES = {
    "max_requests": between(1, 100_000),
    "max_body_bytes": between(1, 2**31),
    "max_waiting_tokens": at_least(1),
    "max_batch_tokens": at_least(1),
    "max_batch_rows": between(1, 100_000),
    "max_batches": between(1, 64),
    "max_texts": between(1, 100_000),
    "max_document_bytes": between(1, 1 << 26),
    "max_documents_bytes": between(1, 1 << 40),
    "prefix_cache_mb": between(0, 1 << 20),
    "deadline_seconds": _SECONDS,
    "read_seconds": _SECONDS,
    "write_seconds": _SECONDS,
    "max_connections": between(1, 1_000_000),
    "max_connections_per_address": between(1, 1_000_000),
    "drain_delay_seconds": Range(0, 3_600, "between 0 and 3,600 seconds"),
    "debug_delay_seconds": Range(0, 60, "between 0 and 60 seconds"),
}


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Settings of the server. Each can be set as `MANYHEADS_` and its name in capitals; see `from_environment`.

    Args:
        models: a model folder, a run folder or `owner/name` on the Hugging Face hub, each optionally as `NAME=MODEL`.
        source_lang: language code of the sources of translation models that record none.
        target_lang: the same for the targets.
        device: `auto`, `cpu`, `cuda`, ...
        precision: `fp32`, `tf32`, `bf16`, `auto`, or for translators `int8`.
        engine: what searches translations: `torch`, or `ctranslate2` on the CPU in fp32 or int8; None: ctranslate2 for
            int8, otherwise torch. Scores, attention, and options that ctranslate2 does not support stay with torch, in
            fp32.
        api_key_file: a file with one key per line; a request must then present one of them. Empty: no keys.
        glossaries: a folder for the glossaries of clients, which then need keys. Empty: none are kept.
        allowed_hosts: permitted values of the Host header, without port; `*` permits all.
        allowed_origins: permitted values of the Origin header besides the server's own address, such as
            `https://example.org`. Browsers let these pages read the answers.
        max_requests: requests that are read, waiting or running at the same time; further ones get 429. An eighth is
            kept for clients that have none.
        max_body_bytes: largest body of a request; a larger one gets 413.
        max_waiting_tokens: tokens of all rows that wait; a request above this gets 429. See `jobs.Row.cost`. An eighth
            is kept for clients that have none.
        max_batch_tokens: rows x longest row of a batch, in tokens; no single row may be larger (422).
        max_batch_rows: rows of a batch; each beam and each sample is a row.
        max_batches: batches that run at the same time; they take steps in turn. If others wait, some pause; running and
            paused ones hold at most twice the tokens of this number of full batches.
        max_texts: texts of one request.
        max_document_bytes: largest document that is uploaded; a larger one gets 413.
        max_documents_bytes: of all documents that are kept on the disk until they are downloaded; a further one gets
            429. An eighth is kept for clients that have none.
        prefix_cache_mb: memory for states after the beginnings of prompts, in MiB for each language model; 0: none.
        deadline_seconds: from the arrival of a request to the end of its answer; afterwards 504.
        read_seconds: for the header, and again for the body, of a request; afterwards 408, or the connection is closed.
        write_seconds: for a client that does not read its answer; afterwards the connection is closed.
        max_connections: open connections.
        max_connections_per_address: open connections of one client address.
        drain_delay_seconds: after SIGTERM, requests are accepted for this time while `/readyz` says 503.
        debug_delay_seconds: an artificial delay of each step of a batch, for load tests.
        json_logs: log as JSON, one object per line.

    Raises: ConfigError: a value is out of range.
    """

    models: tuple[str, ...] = ()
    source_lang: str = ""
    target_lang: str = ""
    device: str = "auto"
    precision: str = "fp32"
    engine: Literal["torch", "ctranslate2"] | None = None
    api_key_file: str = ""
    glossaries: str = ""
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    allowed_origins: tuple[str, ...] = ()
    max_requests: int = 256
    max_body_bytes: int = 1 << 20
    max_waiting_tokens: int = 1 << 18
    max_batch_tokens: int = 1 << 14
    max_batch_rows: int = 256
    max_batches: int = 3
    max_texts: int = 256
    max_document_bytes: int = 1 << 22
    max_documents_bytes: int = 1 << 28
    prefix_cache_mb: int = 256
    deadline_seconds: float = 60.0
    read_seconds: float = 5.0
    write_seconds: float = 10.0
    max_connections: int = 1024
    max_connections_per_address: int = 256
    drain_delay_seconds: float = 0.0
    debug_delay_seconds: float = 0.0
    json_logs: bool = False

    def __post_init__(self) -> None:
        set_tuples(self)
        for name, allowed in _RANGES.items():
            check(self, "", allowed, name)
        for host in self.allowed_hosts:
            if "/" in host or not host.strip() or (host.count(":") > 1 and "[" not in host):
                raise ConfigError(
                    f"allowed_hosts has {host!r}; give the name alone, such as models.example or [::1], or * for all.",
                    fields=("allowed_hosts",),
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin.strip()):
                raise ConfigError(
                    f"allowed_origins has {origin!r}, which no browser sends; give each origin with its scheme and"
                    " without a path, such as https://example.org.",
                    fields=("allowed_origins",),
                )
        if self.glossaries and not self.api_key_file:
            raise ConfigError(
                "glossaries belong to the keys of clients, but there are none; give --api-key-file FILE, or leave out"
                " --glossaries.",
                fields=("glossaries",),
            )
        if self.engine not in (None, *ENGINES):
            raise ConfigError(f"engine is {self.engine!r}; it must be one of {', '.join(ENGINES)}.", fields=("engine",))
        engine_named(self.engine, self.precision)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ServingSettings:
        """Read `MANYHEADS_MODELS`, `MANYHEADS_DEADLINE_SECONDS` and so on; lists are separated by commas.

        An empty variable counts as one that is not set.

        Raises: ConfigError: a value has the wrong type or is out of range.
        """
        variables = os.environ if environment is None else environment
        types = get_type_hints(cls)
        values: dict[str, Any] = {}
        for name, kind in types.items():
            variable = ENVIRONMENT_PREFIX + name.upper()
            if text := variables.get(variable):
                parts = tuple(part.strip() for part in text.split(",") if part.strip())
                values[name] = parts if get_origin(kind) is tuple else convert(kind, text, variable)
        return build(cls, values, f"variables {ENVIRONMENT_PREFIX}...")


_MOST_NAME = 96


def plain_tag(language: str) -> str:
    """Return a language tag in the spelling in which tags are compared: `pt_BR` is `pt-br`."""
    return language.replace("_", "-").lower()


def names_of_models(given: Sequence[str]) -> dict[str, str]:
    """Return name -> path.

    The name is given as `NAME=PATH`; otherwise it is the name of the folder, or of the run if the path is `run/model`.

    Raises: ConfigError: no model, a bad name, or two models of one name.
    """
    if not given:
        raise ConfigError("no model is given; name at least one model folder, run folder or owner/name on the hub.")
    found: dict[str, str] = {}
    for text in given:
        name, is_named, path = text.partition("=")
        if not is_named:
            path = text
            folder = Path(text).resolve() if Path(text).is_dir() else Path(text)
            name = folder.parent.name if folder.name == "model" else folder.name
        if not path or not 0 < len(name) <= _MOST_NAME or not name.isprintable() or "/" in name:
            raise ConfigError(
                f"the model {text!r} has no usable name; give NAME=PATH with a name of 1 to {_MOST_NAME} printable"
                " characters without a slash."
            )
        if name in found:
            raise ConfigError(
                f"two models have the name {name!r}: {found[name]} and {path}; name one of them as OTHER={path}."
            )
        found[name] = path
    return found


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
