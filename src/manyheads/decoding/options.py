"""Options of the commands that run a model: where it runs, with which others, and how it searches or generates."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_origin

from manyheads.catalogue import HOOKS, load
from manyheads.config.checks import at_least, check
from manyheads.config.files import field_types
from manyheads.config.options import option
from manyheads.data.lines import Progress
from manyheads.decoding.settings import DecodingSettings, GenerationSettings, drawing_options
from manyheads.distributed.process import local_device, this_process
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator
    from manyheads.nn.kernels.precision import FixedPrecision
    from manyheads.text.sides import TranslationTokenizer

L = TypeVar("L")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where the model runs."""

    device: str = option("auto, cpu, cuda, cuda:0 ... or mps.", default="auto", metavar="NAME")
    precision: Literal["auto", "fp32", "bf16", "tf32"] = option(
        "bf16 computes in mixed precision; auto chooses it if it is faster on this device. tf32 is fp32 with factors "
        "of 10 bits in products, on NVIDIA GPUs.",
        default="fp32",
    )

    def announce(self) -> None:
        """Announce on standard error work that takes long before the first output; nothing here."""

    def load(self, from_pretrained: Callable[..., L], model: str | list[str], progress: Progress | None = None) -> L:
        """Load a model, or an ensemble, on the device. from_pretrained: of `Translator`, `Generator` or the like."""
        if progress is not None:
            progress("loading the model", 0, 0)
        return from_pretrained(model, local_device(self.device), self.fixed_precision(), **self.more())

    def more(self) -> dict[str, Any]:
        """Other arguments of `from_pretrained`."""
        return {}

    def fixed_precision(self) -> FixedPrecision:
        """The precision, which for `auto` is fp32 or bf16. Warns if bf16 is asked for where it is slower.

        Raises: RequestError: the device has no such products. ConfigError: `auto` with several processes.
        """
        if self.precision == "fp32":
            return "fp32"
        from manyheads.decoding.model_runner import choose_device, choose_precision, warn_of_slow_bf16

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
class SearchDeviceOptions(DeviceOptions):
    """Device and precision."""

    compile: bool = option(
        "Compile the steps of the search: half a minute once, some seconds from the cache, then faster. Needs"
        " a C++ compiler.",
        default=False,
    )

    def more(self) -> dict[str, Any]:
        return {"compile_steps": self.compile}

    def announce(self) -> None:
        """If steps are to be compiled, announce that this takes long."""
        if self.compile:
            sys.stderr.write("Compiling: half a minute the first time, some seconds from the cache.\n")


@dataclass(frozen=True, kw_only=True)
class TranslationDeviceOptions(SearchDeviceOptions):
    """Device, precision and shortlist."""

    precision: Literal["auto", "fp32", "bf16", "tf32", "int8"] = option(  # type: ignore[assignment]
        "bf16 computes in mixed precision; auto chooses it if it is faster on this device. tf32 is fp32 with factors "
        "of 10 bits in products, on NVIDIA GPUs. int8 searches with CTranslate2, with weights and their inputs in 8 "
        "bits; for CPUs (needs the extra ct2).",
        default="fp32",
    )
    shortlist: int | None = option(
        "Search only among likely words: the N most frequent ones, and N translations of each word in a batch. "
        "`manyheads shortlist` learns them.",
        metavar="N",
        default_is="the whole vocabulary",
    )

    def fixed_precision(self) -> Any:
        """See `DeviceOptions.fixed_precision`; int8 is the engine's."""
        return "int8" if self.precision == "int8" else super().fixed_precision()

    def __post_init__(self) -> None:
        check(self, "--", at_least(1), "shortlist", hint=". To search the whole vocabulary, leave it out")
        if self.shortlist is not None and self.compile:
            raise ConfigError(
                "--shortlist changes the vocabulary of every batch, so steps with it cannot be compiled; leave out"
                " --compile or --shortlist."
            )

    def more(self) -> dict[str, Any]:
        return {**super().more(), "shortlist": self.shortlist}


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Other models."""

    ensemble: tuple[str, ...] = option(
        "Other models of the same vocabulary and task; the probabilities of all models are averaged.",
        default=(),
        metavar="MODEL ...",
    )

    def all(self, model: str) -> str | list[str]:
        """Return the argument of `from_pretrained`: the model, or all models of the ensemble."""
        return [model, *self.ensemble] if self.ensemble else model

    def record(self) -> dict[str, Any]:
        """The entries about the other models in a protocol; empty without them."""
        return {"ensemble": list(self.ensemble)} if self.ensemble else {}

    def identity(self) -> dict[str, Any]:
        """The same as `record`, with digests of the models instead of their names; see `model_identity`."""
        return {"ensemble": [model_identity(name) for name in self.ensemble]} if self.ensemble else {}


@dataclass(frozen=True, kw_only=True)
class RerankingOptions(EnsembleOptions):
    """Other models."""

    rerank: str | None = option(
        "A model of the reverse direction. The translations of a beam are ranked also by the probability with which it "
        "translates them back to the source.",
        default=None,
        metavar="MODEL",
    )
    rerank_weight: float = option("With --rerank: the weight of the reverse model's score.", default=1.0, metavar="X")

    def __post_init__(self) -> None:
        check(self, "--", at_least(0), "rerank_weight")
        if self.rerank is None and self.rerank_weight != type(self).rerank_weight:
            raise ConfigError("--rerank-weight is the weight of a reverse model; name one by --rerank MODEL.")

    def reranked(self, translator: Translator) -> Translator:
        """Return the translator, which ranks beams again if a reverse model is named.

        Raises: ConfigError: see `TranslationModel.reranked_by`; and as `Translator.from_pretrained`.
        """
        if self.rerank is None:
            return translator
        from manyheads.decoding.translator import Translator

        reverse = Translator.from_pretrained(self.rerank, translator.device, translator.runner.precision)
        return translator.reranked_by(reverse, self.rerank_weight)

    def record(self) -> dict[str, Any]:
        reverse = {"rerank": self.rerank, "rerank_weight": self.rerank_weight}
        return {**super().record(), **(reverse if self.rerank is not None else {})}

    def identity(self) -> dict[str, Any]:
        if self.rerank is None:
            return super().identity()
        reverse = {"rerank": model_identity(self.rerank), "rerank_weight": self.rerank_weight}
        return {**super().identity(), **reverse}


class _SearchOptions:
    """Options made from the fields of `settings`; those that are not given keep the model's values."""

    settings: ClassVar[type]

    def given(self) -> dict[str, Any]:
        """The fields of the settings that were given. Raises: ConfigError: a flag is turned on and off."""
        values: dict[str, Any] = {}
        for item in fields(self.settings):
            value, off = getattr(self, item.name, None), item.metadata["facts"].off
            if isinstance(item.default, bool):
                is_off = off is not None and getattr(self, off[0])
                if value and is_off:
                    yes, no = (name.replace("_", "-") for name in (item.name, off[0]))
                    raise ConfigError(f"--{yes} and --{no} contradict each other; give one of them.")
                value = False if is_off else value or None
            if value not in (None, ()):
                values[item.name] = load(HOOKS["schema"])(value) if item.name == "json_schema" else value
        return values


def _options_of(settings: type) -> type[_SearchOptions]:
    """Return a dataclass with an option for each field of the settings that commands have; of a flag, those that turn
    it on and off.
    """
    made: list[tuple[str, Any, Any]] = []
    own = inspect.get_annotations(settings)
    for item in sorted(fields(settings), key=lambda item: item.name not in own):  # those of both commands last
        text, facts, kind = item.metadata["text"], item.metadata["facts"], field_types(settings)[item.name]
        if not facts.command:
            continue
        shown: dict[str, Any] = {"metavar": facts.metavar, "aliases": facts.aliases}
        if isinstance(item.default, bool):
            if not item.default:
                made.append((item.name, bool, option(text, default=False, **shown)))
            if facts.off is not None:
                made.append((facts.off[0], bool, option(facts.off[1], default=False)))
        elif get_origin(kind) is tuple:
            made.append((item.name, kind, option(text, default=(), **shown)))
        else:
            shown["metavar"] = facts.metavar or {"int": "N", "float": "X"}.get(str(item.type).partition(" ")[0], "")
            made.append((item.name, kind | None, option(text, default_is="the model's", **shown)))
    kinds = {"bases": (_SearchOptions,), "namespace": {"settings": settings}, "frozen": True, "kw_only": True}
    return make_dataclass(settings.__name__, made, **kinds)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(_options_of(GenerationSettings)):  # type: ignore[misc]
    """Generation; the defaults come from the model's generation_config.json."""

    num_return_sequences: int = option(
        "Number of continuations of each prompt; a line of three dashes separates them.",
        default=1,
        metavar="N",
        aliases=("--count",),
    )

    def overrides(self) -> dict[str, Any]:
        """The fields of `GenerationSettings` that were given, for `Generator`.

        Raises: ConfigError: options contradict each other.
        """
        values: dict[str, Any] = self.given()
        drawing = [name for name in drawing_options(GenerationSettings) if name in values]
        if self.greedy and (idle := [*drawing, *(["seed"] if "seed" in values else [])]):
            name = idle[0].replace("_", "-")
            raise ConfigError(
                f"--greedy takes the most probable token, so --{name} has no effect; leave out one of them."
            )
        if drawing:
            values["do_sample"] = True  # also where the model's settings take the likeliest token
        if self.stop:
            values["stop"] = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop)
        return values


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(_options_of(DecodingSettings)):  # type: ignore[misc]
    """Search; the defaults come from the model's generation_config.json."""

    lenpen: float | None = option(
        "fairseq's: --length-penalty X with --length-penalty-kind power.", default=None, metavar="X"
    )
    forced_prefix: str | None = option("Every translation begins with this text.", default=None, metavar="TEXT")

    def overrides(self, tokenizer: TranslationTokenizer | None) -> dict[str, Any]:
        """The fields of `DecodingSettings` that were given, for `Translator`.

        Args: tokenizer: of the forced prefix, which must be None without it.

        Raises: ConfigError: two options contradict each other.
        """
        values: dict[str, Any] = self.given()
        if self.lenpen is not None:
            if "length_penalty" in values or "length_penalty_kind" in values:
                raise ConfigError(
                    f"--lenpen {self.lenpen} means --length-penalty {self.lenpen} --length-penalty-kind power;"
                    " give one or the other."
                )
            values |= {"length_penalty": self.lenpen, "length_penalty_kind": "power"}
        if self.forced_prefix is not None and tokenizer is not None:
            from manyheads.decoding.inputs_and_results import prefix_ids

            values["forced_prefix_ids"] = prefix_ids(self.forced_prefix, tokenizer.target)
        return values
