"""The decoding options of `translate` and `evaluate`: named as in transformers, with the names NMT people type."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from manyheads.cli.machine import keep_compiled
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.nn.kernels.policy import FixedPrecision
    from manyheads.text.sides import TranslationTokenizer

__all__ = ["DecodingOptions", "DeviceOptions", "SearchDeviceOptions"]

_MODELS = "(default: the model's)"
_NUMBER = arg(metavar="N", help_behavior_hint=_MODELS)
_FLAG = arg(help_behavior_hint="")
_REAL = arg(metavar="X", help_behavior_hint=_MODELS)
_SAME_NAME = (
    "num_beams",
    "length_penalty",
    "length_penalty_kind",
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "max_tokens",
    "too_long",
    "seed",
    "rules",
)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where the model runs."""

    device: Annotated[str, arg(metavar="NAME")] = "auto"
    """auto, cpu, cuda, cuda:0 ... or mps."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """bf16 computes in mixed precision; auto takes it where this device is faster in it."""

    def fixed_precision(self) -> FixedPrecision:
        """fp32 or bf16: what `auto` means here. Warns if bf16 is asked for where it is slower.

        Raises: RequestError: the device has no bf16 products. ConfigError: `auto` with several processes.
        """
        if self.precision == "fp32":
            return "fp32"
        from manyheads.cli.sharding import local_device
        from manyheads.decoding.device import choose_device, choose_precision
        from manyheads.distributed.launch import find_place
        from manyheads.nn.kernels.policy import measure_precision

        place = find_place()
        if self.precision == "auto" and place.world > 1:
            raise ConfigError(
                "--precision auto is measured by each process, and several must agree; give fp32 or bf16."
            )
        device = choose_device(local_device(self.device))
        chosen = choose_precision(self.precision, device)
        factor = measure_precision(device).bf16_factor
        if chosen == "bf16" and factor is not None and factor < 1 and place.is_main:
            print(
                f"warning: on this machine ({device}) bf16 matrix products run at {factor:.2g} times the rate of fp32"
                " ones; --precision fp32 or auto is faster.",
                file=sys.stderr,
            )
        return chosen


@dataclass(frozen=True, kw_only=True)
class SearchDeviceOptions(DeviceOptions):
    """Where and how the model is searched."""

    compile: Annotated[bool, _FLAG] = False
    """Compile the steps of the search: half a minute once, some seconds from the cache, then faster. Needs a C++
    compiler."""

    def announce(self) -> None:
        """If something is to be compiled, say that it takes its time, and see to it that it is kept."""
        if self.compile:
            keep_compiled()
            print("Compiling: half a minute the first time, some seconds from the cache.", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """What is not given comes from the model's generation_config.json."""

    num_beams: Annotated[int | None, arg(aliases=["--beam"], metavar="N", help_behavior_hint=_MODELS)] = None
    """Beam width; 1 is greedy search."""
    length_penalty: Annotated[float | None, _REAL] = None
    """Exponent of the length penalty; 0 turns it off."""
    length_penalty_kind: Annotated[
        Literal["gnmt", "power", "none"] | None, arg(metavar="{gnmt,power,none}", help_behavior_hint=_MODELS)
    ] = None
    """gnmt: ((5 + length) / 6) ** penalty; power: length ** penalty."""
    lenpen: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None
    """fairseq's: --length-penalty X with --length-penalty-kind power."""
    early_stopping: Annotated[bool, _FLAG] = False
    """Stop a sentence as soon as num_beams hypotheses have ended."""
    no_early_stopping: Annotated[bool, _FLAG] = False
    """Go on until no hypothesis can become better, whatever the model's settings say."""
    max_new_tokens: Annotated[int | None, _NUMBER] = None
    """Most tokens of a translation; 0: in proportion to the source."""
    min_new_tokens: Annotated[int | None, _NUMBER] = None
    """Fewest tokens of a translation."""
    do_sample: Annotated[bool, _FLAG] = False
    """Draw tokens at random instead of searching."""
    no_do_sample: Annotated[bool, _FLAG] = False
    """Search, whatever the model's settings say."""
    temperature: Annotated[float | None, _REAL] = None
    """Of sampling; below 1 keeps to likely tokens, above 1 gives unlikely ones a chance."""
    top_k: Annotated[int | None, _NUMBER] = None
    """Draw among the N likeliest tokens; 0: all."""
    top_p: Annotated[float | None, _REAL] = None
    """Draw among the likeliest tokens that hold this much probability."""
    repetition_penalty: Annotated[float | None, _REAL] = None
    """Above 1: tokens produced before become less likely."""
    no_repeat_ngram_size: Annotated[int | None, _NUMBER] = None
    """No n-gram of this size occurs twice; 0 is off."""
    forced_prefix: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Every translation begins with this text."""
    banned_ids: Annotated[tuple[int, ...], arg(metavar="ID ...", help_behavior_hint="")] = ()
    """Token ids that are never produced."""
    rules: Annotated[
        Literal["manyheads", "marian", "marian-5"] | None,
        arg(metavar="{manyheads,marian,marian-5}", help_behavior_hint=_MODELS),
    ] = None
    """How beams are scored and stopped: ours, or as Marian models in transformers 4 or 5."""
    no_well_formed: Annotated[bool, _FLAG] = False
    """Of parsers: let the model write what is no tree over the words; it is mended afterwards."""
    seed: Annotated[int | None, _NUMBER] = None
    """Of sampling; the same seed gives the same translations."""
    max_tokens: Annotated[int | None, _NUMBER] = None
    """A batch's budget: rows x beams x longest source."""
    too_long: Annotated[
        Literal["fail", "truncate"] | None, arg(metavar="{fail,truncate}", help_behavior_hint=_MODELS)
    ] = None
    """A source that does not fit: stop and name its line, or cut it and say how many were cut."""

    def overrides(self, tokenizer: TranslationTokenizer) -> dict[str, Any]:
        """The fields of `DecodingSettings` that were given, for `Translator`.

        Raises: ConfigError: two options contradict each other.
        """
        values = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        if self.lenpen is not None:
            if "length_penalty" in values or "length_penalty_kind" in values:
                raise ConfigError(
                    f"--lenpen {self.lenpen} means --length-penalty {self.lenpen} --length-penalty-kind power;"
                    " give one or the other."
                )
            values |= {"length_penalty": self.lenpen, "length_penalty_kind": "power"}
        for name in ("early_stopping", "do_sample"):
            yes, no = getattr(self, name), getattr(self, f"no_{name}")
            if yes and no:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} and --no-{option} contradict each other; give one of them.")
            if yes or no:
                values[name] = yes
        if self.no_well_formed:
            values["well_formed"] = False
        if self.banned_ids:
            values["banned_ids"] = self.banned_ids
        if self.forced_prefix is not None:
            values["forced_prefix_ids"] = tuple(tokenizer.target.encode(self.forced_prefix))
        return values
