"""A model that is ready for inference: on a device, in a precision, which are chosen here, with or without compiled
steps.

A step of a search has about a hundred small operations, and for most of them the call takes longer than the
computation. The compiled program has a third as many and no Python between them. Decisions (the slots of keys, the
order of hypotheses, the end of a sentence) stay outside, so one program serves all batches, lengths and beams.
Compiling takes half a minute; loading the program from torch's cache on disk takes some seconds. See
docs/decisions/016.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS, ModelTask
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.models.protocols import PreparesSteps
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.linear import Packed, Packs, define_packed_linear
from manyheads.nn.kernels.modes import compiling_a_step
from manyheads.nn.kernels.precision import FixedPrecision, measure_precision
from manyheads.text.pipeline import has_tokenizer

Precision = Literal["auto", "fp32", "bf16", "tf32"]


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """Return the device with that name; `auto` is CUDA if available, then MPS, then the CPU.

    Raises: RequestError: this machine has no such device.
    """
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise RequestError(f"device {name!r} is unknown; use auto, cpu, cuda, cuda:0 ... or mps.") from None
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(has_mps)}.get(device.type)
    if count is None:  # another kind of accelerator, or none at all, such as torch's `meta`
        accelerator = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count() if accelerator and accelerator.type == device.type else 0
    if (device.index or 0) >= count:
        raise RequestError(f"device {name} was requested, but this machine has {count} such devices; use auto or cpu.")
    return device


def choose_precision(name: str, device: torch.device) -> FixedPrecision:
    """Return the precision itself, or for `auto` the faster one of fp32 and bf16 (see `kernels.precision`).

    Raises: RequestError: the precision is unknown or another engine's, or the device has no such products.
    """
    if name == "fp32":
        return "fp32"
    if name == "int8":
        raise RequestError(
            "precision is int8, in which only the engine ctranslate2 computes: for translators that are loaded from a"
            " folder; use fp32, bf16 or auto."
        )
    if name not in get_args(Precision):
        raise RequestError(f"precision is {name!r}; use {', '.join(get_args(Precision))}.")
    if name == "tf32":
        if lack := policy.tf32_lack(device):
            raise RequestError(f"precision is tf32, {lack}.")
        return "tf32"
    measured = measure_precision(device)
    if name == "auto":
        return measured.choice
    if not measured.has_bf16:
        raise RequestError(f"precision is bf16, and {device} has no bf16 matrix products; use fp32 or auto.")
    return "bf16"


def warn_of_slow_bf16(device: torch.device) -> None:
    """Warn on standard error if bf16 products are slower than fp32 ones on this device."""
    factor = measure_precision(device).bf16_factor
    if factor is not None and factor < 1:
        sys.stderr.write(
            f"warning: on this machine ({device}) bf16 matrix products run at {factor:.2g} times the rate of fp32 ones;"
            " --precision fp32 or auto is faster.\n"
        )


def narrow(model: nn.Module, precision: FixedPrecision) -> None:
    """For `bf16`, cast the weights of a model's linear layers in place once, instead of in every call under autocast.

    The results are identical bit for bit. Embeddings are not cast, so a head that is tied to one gets a copy. Use this
    only for inference: the rounded weights cannot be trained, and `save_pretrained` refuses them.
    """
    if precision != "bf16":
        return
    for module in model.modules():
        is_map = isinstance(module, Packs) and module in module.packed_maps()
        if is_map or isinstance(module, nn.Linear):
            for name in ("weight", "bias"):
                wide = getattr(module, name)
                if wide is not None:
                    setattr(module, name, nn.Parameter(wide.detach().to(torch.bfloat16), requires_grad=False))


def pack(model: nn.Module) -> None:
    """Keep a second copy of the weights of linear layers where products with it are faster: see `kernels.linear`.

    Use this only for inference, after `narrow`. If weights change later, the new values are used; but a change through
    `weight.data` is not detected: call this function again.
    """
    with modes.fast():
        for module in model.modules():
            if isinstance(module, Packs):
                maps = module.packed_maps()
                module.packed = Packed(*maps) if Packed.is_worthwhile(*maps) else None


def on_cpu_by_default() -> AbstractContextManager[Any]:
    """Within the block, make tensors whose device is not named on the CPU, whatever `torch.set_default_device` says."""
    try:
        is_cpu = torch.get_default_device().type == "cpu"
    except (AssertionError, RuntimeError):  # a default device that this machine lacks
        is_cpu = False
    return nullcontext() if is_cpu else torch.device("cpu")


@contextmanager
def inference(device: torch.device, precision: FixedPrecision, *, plain: bool = False) -> Iterator[None]:
    """Disable gradients, and compute in the precision. A tensor whose device is not named is made on the CPU.

    Args: plain: compute with torch's own operations alone; see `kernels.fast`.
    """
    casting = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    multiplying = modes.tf32_products(precision == "tf32")
    with on_cpu_by_default(), torch.inference_mode(), modes.fast(not plain), casting, multiplying:
        yield


@dataclass(frozen=True)
class _State:
    """The state of a model, its number of sentences or lanes, and whether the search began with one."""

    inner: Any
    sentences: int
    began_alone: bool

    def reorder(self, rows: Tensor) -> _State:
        began_alone = self.began_alone and len(rows) == 1  # several continuations of one prompt are several rows
        return _State(self.inner.reorder(rows), len(rows), began_alone)

    def clone(self) -> _State:
        return replace(self, inner=self.inner.clone())


class CompiledSteps:
    """A searchable model that wraps the given one and compiles its steps; everything else is unchanged.

    The weights must not change after the first step; create another object if they do. Not safe for several threads
    before the end of the first search.

    Args: model: in evaluation mode, after `device.narrow` and `device.pack`.

    Raises: RequestError: the steps of the model cannot be compiled, or this machine has no C++ compiler.
    """

    def __init__(self, model: object) -> None:
        if not (isinstance(model, PreparesSteps) and isinstance(model, nn.Module) and model.prepares_steps):
            name = getattr(getattr(model, "config", None), "architecture", type(model).__name__)
            raise RequestError(
                f"steps of this {name} cannot be compiled, because they depend on values; leave out --compile."
            )
        _check_compiler(next(model.parameters()).device)
        define_packed_linear()
        self._model: Any = model
        self._kinds: set[Any] = set()
        self._packed: list[Any] = []
        self._hooks = [one for part in model.modules() for one in (part._forward_pre_hooks, part._forward_hooks)]

    @cached_property
    def _compute(self) -> Callable[[Any, bool], Tensor]:
        """The compiled step. It is made in the first step, so that weights can be packed before."""
        # The program contains the numbers of packed weights, so these must not be reused while it exists.
        self._packed = [module.packed for module in self._model.modules() if isinstance(module, Packs)]
        return _compiled(self._model)

    @property
    def max_len(self) -> int | None:
        return cast("int | None", self._model.max_len)

    def start(self, given: Any, *more: Any) -> _State:
        """See `protocols.Searchable.start`; of a language model, see `LanguageModel.start`."""
        sentences = given if isinstance(given, int) else len(given)
        return _State(self._model.start(given, *more), sentences, sentences == 1)

    def step(
        self, tokens: Tensor, state: Any, lengths: Tensor | None = None, *, logits: bool = False
    ) -> tuple[Tensor, _State]:
        """See `protocols.Searchable.step`. lengths: of the prompts of a language model, see `LanguageModel.step`.

        Raises: RequestError: the compiler failed.
        """
        if lengths is not None:
            scores, inner = self._model.step(tokens, state.inner, lengths, logits=logits)
            return scores, replace(state, inner=inner)
        prepared, inner = self._model.prepare_step(tokens, state.inner)
        after = replace(state, inner=inner)
        # A size of one needs a separate program, which does not pay for a batch that has shrunk to one sentence. The
        # program does not see hooks that come and go.
        if not (prepared.can_compile and (state.sentences > 1 or state.began_alone)) or any(self._hooks):
            return self._model.compute_step(prepared, logits), after
        prepared = prepared.for_compiler()
        kind = (prepared.kind, logits)
        if kind in self._kinds:
            return self._compute(prepared, logits), after
        with _compiling():
            scores = self._compute(prepared, logits)
        self._kinds.add(kind)
        return scores, after


def _compiled(model: PreparesSteps) -> Callable[[Any, bool], Tensor]:
    def compute(prepared: Any, logits: bool) -> Tensor:
        return model.compute_step(prepared, logits)

    # The compiler stores programs with the code object of a function. All functions made here would share it, and one
    # model would use the program of another, because guards on the model are removed.
    compute.__code__ = compute.__code__.replace(co_name=f"compute_{next(_NUMBERS)}")
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "guard_filter_fn": _of_what_is_given,
        # Checks of the sizes and alignment of intermediate tensors would take longer than some operations.
        "size_asserts": False,
        "alignment_asserts": False,
    }  # a new dict for each call, because the compiler removes entries
    return torch.compile(compute, dynamic=True, fullgraph=True, options=options)


def _of_what_is_given(guards: Sequence[Any]) -> list[bool]:
    """Return which guards to check in every step: those on its argument, not those on the model.

    The model has about a thousand guards, which took a fifth of a step.
    """
    return [not (guard.is_global or guard.name.startswith("model")) for guard in guards]


_NUMBERS = itertools.count()


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile with our settings within the block, and turn failures of the compiler into errors.

    Raises: RequestError: the compiler failed.
    """
    from torch._dynamo import config as reading
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental import _config as sizes

    # Sizes that are equal in the first batch can differ in the next; floats such as the epsilon of a norm do not.
    with compiling_a_step(), cast(Any, sizes).patch(use_duck_shape=False), reading.patch(specialize_float=True):
        try:
            yield
        except TorchDynamoException as error:
            first = str(error).strip().splitlines()[0].rstrip(".:")
            raise RequestError(f"torch could not compile the model's step: {first}. Leave out --compile.") from error


def _check_compiler(device: torch.device) -> None:
    """Raises: RequestError: the device is a CPU, and this machine has no C++ compiler."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise RequestError(
            "torch needs a C++ compiler for --compile and found none; install g++ or clang++, name one in the variable"
            " CXX, or leave out --compile."
        ) from None


M = TypeVar("M")


class ModelRunner(Generic[M]):
    """A model in evaluation mode. Translators into several languages share one, so that they move together.

    Args:
        model: a `Searchable` or a `LanguageModel`; a module is moved to the device.
        device: `auto` chooses one.
        precision: see `device.choose_precision`.
        compile_steps: compile the steps of a search.
        plain: compute with torch's own operations alone; see `kernels.fast`.

    Attributes: steps: the model, or `CompiledSteps` of it.

    Raises: RequestError: no such device or precision, or the steps cannot be compiled on this machine.
    """

    def __init__(
        self,
        model: M,
        device: str | torch.device,
        precision: Precision,
        *,
        compile_steps: bool = False,
        plain: bool = False,
    ) -> None:
        self.device = choose_device(device)
        self.precision = choose_precision(precision, self.device)
        self.plain = plain
        if plain and compile_steps:
            raise RequestError(
                "plain computes with torch's own operations alone, not with compile_steps; leave one out."
            )
        self.model = model
        if isinstance(model, nn.Module):
            model.to(self.device).eval()
        self.steps: Any = CompiledSteps(model) if compile_steps else model

    def prepare_weights(self) -> None:
        """Cast the weights to the precision and pack them, of a model that was loaded only to run here.

        With bf16 the model cannot be trained or saved afterwards; see `device.narrow` and `device.pack`.
        """
        assert isinstance(self.model, nn.Module)
        with on_cpu_by_default():
            narrow(self.model, self.precision)
            if not self.plain:
                pack(self.model)

    @property
    def is_compiled(self) -> bool:
        return isinstance(self.steps, CompiledSteps)

    def to(self, device: str | torch.device) -> None:
        """Move the model. Raises: RequestError: there is no such device, or it has no products in this precision."""
        chosen = choose_device(device)
        choose_precision(self.precision, chosen)
        if isinstance(self.model, nn.Module):
            self.model.to(chosen)
            if not self.plain:
                with on_cpu_by_default():
                    pack(self.model)  # the copies of weights in a faster layout belong to a device
        self.device = chosen
        if self.is_compiled:
            self.steps = CompiledSteps(self.model)

    def inference(self) -> AbstractContextManager[None]:
        """Disable gradients and compute in the precision within the block."""
        return inference(self.device, self.precision, plain=self.plain)


class RunsModel(Generic[M]):
    """The common part of `Translator`, `Generator` and `RunsEncoder`: an object with a model that runs."""

    runner: ModelRunner[M]

    @property
    def model(self) -> M:
        return self.runner.model

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def precision(self) -> str:
        return self.runner.precision

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device. Returns: this object. Raises: RequestError: see `ModelRunner.to`."""
        self.runner.to(device)
        return self


def model_folder(path: str | Path, task: ModelTask, revision: str | None = None) -> Path:
    """Return the folder of a model for this task, with its tokenizer.

    Args:
        path: a model folder, a run folder, or `owner/name` on the Hugging Face hub.
        task: as in `ARCHITECTURES`.

    Raises: ModelFileError: there is no such folder, the model is for another task, or it has no tokenizer.
    """
    folder = resolve_model_path(path, revision=revision)
    architecture = read_config(folder).architecture
    if (its_task := ARCHITECTURES[architecture].task) != task:
        raise ModelFileError(f"{folder} holds a {architecture}, which {MODEL_TASKS[its_task].use}.")
    if not has_tokenizer(folder):
        raise ModelFileError(
            f"{folder} has no tokenizer.json, so it cannot read or write text; save the model with it."
        )
    return folder


def check_same_vocabulary(first: Path, vocabulary: str, other: Path, others: str) -> None:
    """Compare the vocabularies of two models of an ensemble. vocabulary, others: digests of theirs.

    Raises: ConfigError: they differ.
    """
    if others != vocabulary:
        raise ConfigError(
            f"{other} has another vocabulary ({others[:12]}) than {first} ({vocabulary[:12]}), so their probabilities"
            " cannot be averaged; train the models of an ensemble on data with the same tokenizer."
        )
