"""A search whose steps are compiled: torch's compiler makes one program of all that a step of one token computes.

A step of a search is some hundred small operations, most of which take less time than being called. Compiled, it is a
third of them, without Python in between. What a step decides (where keys go, whose they are, what leaves the batch)
stays outside, so one program serves all batches, lengths and beams. Making it takes half a minute; torch keeps what it
made on disk, from where it takes some seconds. See docs/decisions/016.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.protocols import PlansSteps, Searchable
from manyheads.errors import RequestError
from manyheads.nn.attention.multi_head import MultiHeadAttention
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels.linear import define_packed_linear
from manyheads.nn.kernels.policy import compiling_a_step
from manyheads.nn.linear import Linear

__all__ = ["CompiledSteps"]


@dataclass(frozen=True)
class _State:
    """A model's state, of how many sentences or lanes it is, and whether they began as one."""

    inner: Any
    sentences: int
    began_alone: bool

    def reorder(self, rows: Tensor) -> _State:
        began_alone = self.began_alone and len(rows) == 1  # a prompt that is gone on from in several ways is several
        return _State(self.inner.reorder(rows), len(rows), began_alone)

    def clone(self) -> _State:
        return replace(self, inner=self.inner.clone())


class CompiledSteps:
    """A searchable model, to be searched in place of the one given: its steps are compiled, all else is as it was.

    Weights must stay as they are from the first step on; make another one if they change. Not for several threads
    until a first search is through.

    Args: model: in evaluation mode, after `device.narrow` and `device.pack`.

    Raises: RequestError: its steps cannot be compiled, or this machine has no C++ compiler.
    """

    def __init__(self, model: Searchable | LanguageModel) -> None:
        if not (isinstance(model, PlansSteps) and isinstance(model, nn.Module) and model.plans_steps):
            name = getattr(getattr(model, "config", None), "architecture", type(model).__name__)
            raise RequestError(f"steps of this {name} cannot be compiled: they look at numbers; leave out --compile.")
        _check_compiler(next(model.parameters()).device)
        define_packed_linear()
        self._model: Any = model
        self._compute = _compiled(model)
        self._kinds: set[Any] = set()
        # The program knows packed weights by their numbers: as long as it lives, nothing else may be given those.
        self._packed = [
            module.packed
            for module in model.modules()
            if isinstance(module, MultiHeadAttention | RelativeAttention | Linear | LinearHead)
        ]

    @property
    def max_len(self) -> int | None:
        """See `protocols.Searchable.max_len`."""
        return cast("int | None", self._model.max_len)

    def start(self, given: Any, *more: Any) -> _State:
        """See `protocols.Searchable.start`; of a language model, see `LanguageModel.start`."""
        sentences = given if isinstance(given, int) else len(given)
        return _State(self._model.start(given, *more), sentences, sentences == 1)

    def step(self, tokens: Tensor, state: Any, lengths: Tensor | None = None) -> tuple[Tensor, _State]:
        """See `protocols.Searchable.step`. lengths: of a language model's prompts, see `LanguageModel.step`.

        Raises: RequestError: the compiler failed.
        """
        if lengths is not None:
            log_probs, inner = self._model.step(tokens, state.inner, lengths)
            return log_probs, replace(state, inner=inner)
        planned, inner = self._model.plan(tokens, state.inner)
        after = replace(state, inner=inner)
        # Sizes of one need a program of their own: not for a batch that has come down to one sentence.
        if not (planned.can_compile and (state.sentences > 1 or state.began_alone)):
            return self._model.compute(planned), after
        planned = planned.for_compiler()
        if planned.kind in self._kinds:
            return self._compute(planned), after
        with _compiling():
            log_probs = self._compute(planned)
        self._kinds.add(planned.kind)
        return log_probs, after


def _compiled(model: PlansSteps) -> Callable[[Any], Tensor]:
    def compute(planned: Any) -> Tensor:
        return model.compute(planned)

    # The compiler keeps programs with a function's code, which all functions made here would share: and so one model
    # would take another's, whose guards were left out.
    compute.__code__ = compute.__code__.replace(co_name=f"compute_{next(_NUMBERS)}")
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "guard_filter_fn": _of_what_is_given,
        # What a program would ask of its own products in every step takes longer than some of them.
        "size_asserts": False,
        "alignment_asserts": False,
    }  # made here: the compiler takes things out of it
    return torch.compile(compute, dynamic=True, fullgraph=True, options=options)


def _of_what_is_given(guards: Sequence[Any]) -> list[bool]:
    """Which guards are looked at in every step: those of its argument; the model is not expected to change.

    There are a thousand others, which took a fifth of a step.
    """
    return [not (guard.is_global or guard.name.startswith("model")) for guard in guards]


_NUMBERS = itertools.count()


@contextmanager
def _compiling() -> Iterator[None]:
    """Within the block, the compiler has our settings, and its failures become errors.

    Raises: RequestError: it failed.
    """
    from torch._dynamo import config as reading
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental import _config as sizes

    # Sizes that happen to be equal in the first batch are not the same in the next; numbers like a norm's epsilon are.
    with compiling_a_step(), cast(Any, sizes).patch(use_duck_shape=False), reading.patch(specialize_float=True):
        try:
            yield
        except TorchDynamoException as error:
            first = str(error).strip().splitlines()[0].rstrip(".:")
            raise RequestError(f"torch could not compile the model's step: {first}. Leave out --compile.") from error


def _check_compiler(device: torch.device) -> None:
    """Raises: RequestError: there is nothing here that turns C++ into programs."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise RequestError(
            "to compile, torch needs a C++ compiler, and finds none; install g++ or clang++, name one in CXX, or leave"
            " out --compile."
        ) from None
