"""Imports what a run imports on its way, so that processes which are forked from this one need not."""

import gc
import importlib
import pkgutil

__all__ = ["preload", "read_settings"]

PACKAGES = ("data", "decoding", "distributed", "evaluation", "models", "nn", "tasks", "text", "training")


def preload() -> None:
    """Import torch's compiler, which the optimiser asks for, sacreBLEU, and all modules that a run may need."""
    for name in ("torch._dynamo", "sacrebleu"):
        importlib.import_module(name)
    for name in PACKAGES:
        package = importlib.import_module(f"manyheads.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".triton." not in module.name:  # for GPUs; the package triton is seldom installed elsewhere
                importlib.import_module(module.name)
    read_settings()
    gc.freeze()  # they stay: the garbage collector of each fork passes over them, and copies no page of theirs


def read_settings() -> None:
    """Build settings once: the package that checks their types takes a tenth of a second, and the checks are kept."""
    importlib.import_module("pydantic.dataclasses")  # which it imports late
    from manyheads.catalogue import PRESETS
    from manyheads.config.build import build
    from manyheads.config.files import to_plain

    for name in ("debug", "xl-debug", "reformer-debug"):
        settings = PRESETS[name]()
        build(type(settings), to_plain(settings))
