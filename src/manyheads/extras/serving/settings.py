"""Settings of the server, from the command line or from variables of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from manyheads.config.build import build, convert
from manyheads.config.checks import Range, at_least, between, check, set_tuples
from manyheads.errors import ConfigError

__all__ = ["ENVIRONMENT_PREFIX", "ServingSettings"]

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
        precision: `fp32`, `bf16`, `auto` or `int8`.
        engine: what searches translations: `torch`, or `ctranslate2` on the CPU in fp32. Scores, attention, and options
            that ctranslate2 does not support stay with torch.
        api_key_file: a file with one key per line; a request must then present one of them. Empty: no keys.
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
    engine: str = "torch"
    api_key_file: str = ""
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    allowed_origins: tuple[str, ...] = ()
    max_requests: int = 256
    max_body_bytes: int = 1 << 20
    max_waiting_tokens: int = 1 << 18
    max_batch_tokens: int = 1 << 14
    max_batch_rows: int = 256
    max_batches: int = 3
    max_texts: int = 256
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
        if self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; it must be one of {', '.join(ENGINES)}.", fields=("engine",))

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
