"""`manyheads serve MODEL [MODEL ...]`: an HTTP server for trained models."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal

from manyheads.cli.command_line.parsing import command
from manyheads.cli.process import set_up_machine
from manyheads.config.checks import between, check
from manyheads.config.options import CommandPage, argument, option
from manyheads.errors import ConfigError, MissingExtraError
from manyheads.extras.serving.settings import ServingSettings
from manyheads.installation import install_command

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `manyheads serve`. A field with the name of a field of `ServingSettings` sets it."""

    models: tuple[str, ...] = argument(
        "Model folders, run folders, or owner/name on the Hugging Face hub; NAME=MODEL sets the name.",
        metavar="MODEL",
    )
    host: str = option("Address to listen on.", default="127.0.0.1", metavar="ADDRESS")
    port: int = option("Port to listen on; 0 takes a free one.", default=8000, metavar="N")
    api_key_file: str = option(
        "Accept only requests with a key of this file; one per line.", default="", metavar="FILE"
    )
    glossaries: str = option(
        "Folder in which clients with a key can store glossaries (DeepL's calls).", default="", metavar="FOLDER"
    )
    no_api_key: bool = option("Serve a public address without keys.", default=False)
    allowed_hosts: tuple[str, ...] = option(
        "A host name that clients may use for this server (Host header); * permits all.",
        default=(), metavar="NAME", name="allowed_host",
        default_is="local names; for a public address all",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = option(
        "Origin of a web page that may use this server, such as https://example.org.",
        default=(), metavar="ORIGIN", name="allowed_origin",
    )  # fmt: skip
    source_lang: str = option("Language of the sources, if the model does not record it.", default="", metavar="CODE")
    target_lang: str = option(
        "Language of the translations, if the model does not record it.", default="", metavar="CODE"
    )
    device: str = option("auto, cpu, cuda, cuda:0 ... or mps.", default="auto", metavar="NAME")
    precision: Literal["auto", "fp32", "bf16", "tf32", "int8"] = option(
        "auto chooses the faster one of fp32 and bf16 on this device; int8 searches translations with CTranslate2 in "
        "8 bits, on CPUs; tf32 is fp32 with factors of 10 bits in products, on NVIDIA GPUs.",
        default="fp32",
    )
    engine: Literal["torch", "ctranslate2"] | None = option(
        "Search engine for translations; ctranslate2 runs on the CPU in fp32 or int8, and torch handles "
        "options that it does not support, in fp32.",
        default_is="torch; for --precision int8 ctranslate2",
    )
    deadline_seconds: float = option(
        "Time limit of a request in seconds; after it the answer is 504.", default=60.0, metavar="S", name="deadline"
    )
    max_requests: int = option(
        "Maximum number of requests at the same time; further ones get 429.", default=256, metavar="N"
    )
    max_batch_tokens: int = option(
        "Maximum number of tokens of a batch: rows x longest row.", default=1 << 14, metavar="N"
    )
    max_waiting_tokens: int = option(
        "Maximum number of waiting tokens; further requests get 429.", default=1 << 18, metavar="N"
    )
    prefix_cache_mb: int = option(
        "Memory of each language model for the cached beginnings of long prompts, in MiB; 0: no cache.",
        default=256, metavar="MB", name="prefix_cache",
    )  # fmt: skip
    max_batches: int = option(
        "Maximum number of batches that run at the same time; if requests wait, others pause.", default=3, metavar="N"
    )
    drain_delay_seconds: float = option(
        "For this many seconds after SIGTERM requests are still accepted.", default=0.0, metavar="S", name="drain_delay"
    )
    log_format: Literal["lines", "json"] = option("Form of the log on standard error.", default="lines")
    quiet: bool = option("Log errors only.", default=False)
    debug_delay_seconds: float = option(
        "Delay of each step of a batch in seconds, for load tests.", default=0.0, metavar="S", name="debug_delay"
    )

    def __post_init__(self) -> None:
        check(self, "--", between(0, 65_535), "port")  # a socket would take the port modulo 65,536
        if self.host not in _LOCAL and not (self.api_key_file or self.no_api_key):
            raise ConfigError(
                f"--host {self.host} can be reached by other machines; give --api-key-file FILE, or --no-api-key to"
                " serve everybody."
            )

    def settings(self) -> ServingSettings:
        """The settings of the server. Raises: ConfigError: a value is out of range."""
        named: dict[str, Any] = {
            item.name: getattr(self, item.name) for item in fields(ServingSettings) if hasattr(self, item.name)
        }
        if not self.allowed_hosts:
            named["allowed_hosts"] = ServingSettings.allowed_hosts if self.host in _LOCAL else ("*",)
        return ServingSettings(**named, json_logs=self.log_format == "json")


PAGE = CommandPage(
    ServeOptions,
    """Serve models over HTTP: our own API, and those of OpenAI (completions), LibreTranslate and DeepL,
so that their clients work with these models. See docs/serving.md. SIGTERM finishes accepted requests, then stops.""",
    (
        "manyheads serve runs/demo",
        "manyheads serve en-de=runs/demo novel=runs/novel --port 8080 --api-key-file keys.txt --host 0.0.0.0",
    ),
)


@command(PAGE, "serve")
def run(options: ServeOptions) -> int:
    """Serve until a signal arrives. Returns: the exit code."""
    set_up_machine()
    try:
        from manyheads.extras.serving.app import build_app
        from manyheads.extras.serving.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "h11", "prometheus_client"):
            raise
        raise MissingExtraError(f"serve needs more packages: {install_command('serve')}.") from None
    from manyheads.extras.serving.settings import names_of_models

    settings = options.settings()
    names = ", ".join(names_of_models(options.models))
    _set_up_log(options)
    app = build_app(settings, loads=False)
    return serve(app, settings, options.host, options.port, lambda address: _tell(f"serving {names} at {address}"))


def _tell(text: str) -> None:
    sys.stderr.write(f"manyheads: {text}\n")
    sys.stderr.flush()


def _set_up_log(options: ServeOptions) -> None:
    form = "%(message)s" if options.log_format == "json" else "%(asctime)s %(message)s"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form))
    log = logging.getLogger("manyheads")
    log.addHandler(handler)
    log.setLevel(logging.ERROR if options.quiet else logging.INFO)
