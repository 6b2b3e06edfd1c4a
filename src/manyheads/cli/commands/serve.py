"""`manyheads serve MODEL [MODEL ...]`: an HTTP server for trained models."""

from __future__ import annotations

import logging
import sys

from manyheads.cli.command_line.command import command
from manyheads.cli.command_line.serve_options import PAGE, ServeOptions
from manyheads.cli.machine import set_up_machine
from manyheads.errors import MissingExtraError

__all__ = ["PAGE", "run"]


@command(PAGE, "serve")
def run(options: ServeOptions) -> int:
    """Serve until a signal arrives. Returns: the exit code."""
    set_up_machine()
    try:
        from manyheads.serving.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "h11"):
            raise
        raise MissingExtraError("serve needs more packages: pip install 'manyheads[serve]'.") from None
    from manyheads.serving.names import names_of_models

    settings = options.settings()
    names = ", ".join(names_of_models(options.models))
    _set_up_log(options)
    return serve(settings, options.host, options.port, lambda address: _tell(f"serving {names} at {address}"))


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
