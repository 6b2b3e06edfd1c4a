"""Options of the commands that run a model: where it runs, and in which precision."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from manyheads.config.checks import at_least, check
from manyheads.config.options import option
from manyheads.data.progress import Progress
from manyheads.distributed.process import local_device, this_process
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.decoding.device import InferencePrecision

__all__ = [
    "DeviceOptions",
    "InspectionDeviceOptions",
    "SearchDeviceOptions",
    "TranslationDeviceOptions",
]

L = TypeVar("L")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where the model runs."""

    device: str = option("auto, cpu, cuda, cuda:0 ... or mps.", default="auto", metavar="NAME")
    precision: Literal["auto", "fp32", "bf16", "int8"] = option(
        "bf16 computes in mixed precision; auto chooses it if it is faster on this device. int8 rounds weights and "
        "inputs of large linear layers to 8 bits; for CPUs.",
        default="fp32",
    )

    def announce(self) -> None:
        """Announce on standard error work that takes long before the first output; nothing here."""

    def load(self, from_pretrained: Callable[..., L], model: str | list[str], show: Progress | None = None) -> L:
        """Load a model, or an ensemble, on the device. from_pretrained: of `Translator`, `Generator` or the like."""
        if show is not None:
            show("loading the model", 0, 0)
        return from_pretrained(model, local_device(self.device), self.fixed_precision(), **self.more())

    def more(self) -> dict[str, Any]:
        """Other arguments of `from_pretrained`."""
        return {}

    def fixed_precision(self) -> InferencePrecision:
        """The precision, which for `auto` is fp32 or bf16. Warns if bf16 is asked for where it is slower.

        Raises: RequestError: the device has no bf16 products, or int8 is not faster on it. ConfigError: `auto` with
            several processes.
        """
        if self.precision == "fp32":
            return "fp32"
        from manyheads.decoding.device import choose_device, choose_precision, warn_of_slow_bf16

        process = this_process()
        if self.precision == "auto" and process.world > 1:
            raise ConfigError(
                "with several processes, --precision auto could give each another result; give fp32 or bf16."
            )
        device = choose_device(local_device(self.device))
        chosen = choose_precision(self.precision, device)
        if chosen == "bf16" and process.is_main:
            warn_of_slow_bf16(device)
        return chosen


@dataclass(frozen=True, kw_only=True)
class InspectionDeviceOptions(DeviceOptions):
    """Device and precision of a model that is inspected: without int8, which only approximates the model."""

    precision: Literal["auto", "fp32", "bf16"] = option(
        "bf16 computes in mixed precision; auto chooses it if it is faster on this device.", default="fp32"
    )


@dataclass(frozen=True, kw_only=True)
class SearchDeviceOptions(DeviceOptions):
    """Device and precision."""

    compile: bool = option(
        "Compile the steps of the search: half a minute once, some seconds from the cache, then faster. Needs"
        " a C++ compiler.",
        default=False,
    )

    def more(self) -> dict[str, Any]:
        """See `DeviceOptions.more`."""
        return {"compile_steps": self.compile}

    def announce(self) -> None:
        """If steps are to be compiled, announce that this takes long."""
        if self.compile:
            sys.stderr.write("Compiling: half a minute the first time, some seconds from the cache.\n")


@dataclass(frozen=True, kw_only=True)
class TranslationDeviceOptions(SearchDeviceOptions):
    """Device, precision and shortlist."""

    shortlist: int | None = option(
        "Search only among likely words: the N most frequent ones, and N translations of each word in a batch. "
        "`manyheads shortlist` learns them.",
        metavar="N",
        default_is="the whole vocabulary",
    )

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "shortlist", hint=". To search the whole vocabulary, leave it out")
        if self.shortlist is not None and self.compile:
            raise ConfigError(
                "--shortlist changes the vocabulary of every batch, so steps with it cannot be compiled; leave out"
                " --compile or --shortlist."
            )

    def more(self) -> dict[str, Any]:
        """See `DeviceOptions.more`."""
        return {**super().more(), "shortlist": self.shortlist}
