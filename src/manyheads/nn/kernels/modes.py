"""Settings that a caller changes within a block, for one thread or for the whole process. `policy` reads them.

Outside `fast()` the modules compute with torch's own operations. The other blocks are for the runners of whole models,
tests and benchmarks. What is computed by hand within `fast()` has first derivatives only (`first_derivative_only`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from manyheads.errors import RequestError

RelativePath = Literal["products", "tiles", "sums", "sdpa"]


class _Asked(threading.local):
    """Of each thread, so that a server does not change what another thread computes. A compiler guards it."""

    is_fast = False
    saves_launches = False
    times_longer = 1.0
    asks_triton = False


asked = _Asked()
_compiles = False
_measures = True
_relative_path: RelativePath | None = None


class fast(AbstractContextManager[None]):  # noqa: N801 - used like a function
    """Within the block, this thread computes with the fastest implementations, which have a first derivative only.

    The backward pass of what is computed within it uses them, too, also outside the block and in another thread. Not
    for the body of a generator, whose caller would run in the same mode.

    >>> with fast():
    ...     is_fast()
    True

    Args: enabled: False: the plain implementations, within a block of fast ones.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(asked.is_fast)
        asked.is_fast = self._enabled

    def __exit__(self, *error: object) -> None:
        asked.is_fast = self._before.pop()


def is_fast() -> bool:
    """Return whether the fastest implementations are used: within `fast()`, but not under a transform."""
    return asked.is_fast and not is_transformed()


def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, or forward-mode differentiation, runs this code.

    They differentiate torch's own operations only, so the formulas are computed.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_compiled() -> bool:
    """Return whether a compiler is tracing this code. Sizes that depend on values are then symbols, not numbers."""
    return torch.compiler.is_compiling()


@contextmanager
def _asking(name: str, value: Any) -> Iterator[None]:
    before = getattr(asked, name)
    setattr(asked, name, value)
    try:
        yield
    finally:
        setattr(asked, name, before)


def saving_launches() -> AbstractContextManager[None]:
    """Within the block, this thread takes fewer and larger operations also on a card that has not been tried."""
    return _asking("saves_launches", True)


def using_triton(enabled: bool = True) -> AbstractContextManager[None]:
    """Within the block, this thread uses the Triton kernels by name: what they cannot compute is refused.

    Args: enabled: False: not by name, within a block that does.
    """
    return _asking("asks_triton", enabled)


def asks_triton() -> bool:
    """Return whether this thread is within `using_triton()`."""
    return asked.asks_triton


def as_if_longer(times: float) -> AbstractContextManager[None]:
    """Within the block, as few rows are processed at once as of sequences `times` as long, to predict their memory."""
    return _asking("times_longer", times)


_tf32_lock = threading.Lock()
_tf32_blocks, _before_tf32 = 0, ("highest", "none", "none")


@contextmanager
def tf32_products(enabled: bool = True) -> Iterator[None]:
    """Within the block, a GPU multiplies float32 matrices in TF32: factors of 10 bits, sums in float32.

    torch's setting is that of the process, so other threads compute so too until the last block ends.
    """
    global _tf32_blocks, _before_tf32
    if not enabled:
        yield
        return
    with _tf32_lock:
        if not _tf32_blocks:
            _before_tf32 = _product_settings()
            torch.set_float32_matmul_precision("high")  # sets the settings of the libraries, too
        _tf32_blocks += 1
    try:
        yield
    finally:
        with _tf32_lock:
            _tf32_blocks -= 1
            if not _tf32_blocks:
                whole, *each = _before_tf32
                torch.set_float32_matmul_precision(whole)
                for library, precision in zip(_product_libraries(), each, strict=True):
                    library.fp32_precision = precision


def _product_libraries() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _product_settings() -> tuple[str, str, str]:
    """Return torch's precision of products, the older setting and those of the libraries that took its place.

    torch refuses to read the older one where a library computes in TF32 and it says "highest".
    """
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:
        whole = "highest"
    of_all = torch.backends.fp32_precision  # type: ignore[attr-defined]
    # A library without a setting of its own shows that of all; "none" keeps it so.
    cuda, mkldnn = (found if (found := one.fp32_precision) != of_all else "none" for one in _product_libraries())
    return whole, cuda, mkldnn


@contextmanager
def by_fixed_rules() -> Iterator[None]:
    """Within the block, no measurement of speed selects an implementation, so two processes compute alike. Not safe for
    several threads.
    """
    global _measures
    before, _measures = _measures, False
    try:
        yield
    finally:
        _measures = before


def measures() -> bool:
    """Return whether a measurement of speed may select an implementation: not within `by_fixed_rules()`."""
    return _measures


@contextmanager
def compiling_a_step() -> Iterator[None]:
    """Declare that what is compiled within the block is a step of a search. Not safe for several threads."""
    global _compiles
    before, _compiles = _compiles, True
    try:
        yield
    finally:
        _compiles = before


def compiles_a_step() -> bool:
    """Return whether a compiler is tracing one step of a search (`decoding.model_runner`), and not something else."""
    return torch.compiler.is_compiling() and _compiles


@contextmanager
def using_relative_path(path: RelativePath) -> Iterator[None]:
    """Use this implementation of relative attention within the block, to measure or test it.

    Not safe for several threads.
    """
    global _relative_path
    before, _relative_path = _relative_path, path
    try:
        yield
    finally:
        _relative_path = before


def asked_relative_path() -> RelativePath | None:
    """Return the implementation that `using_relative_path` asks for; None: `policy` chooses."""
    return _relative_path


def first_derivative_only(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Change an autograd function so that to differentiate its gradients raises an error.

    They depend on the function's inputs and on the gradient that comes in, but autograd does not know it, so a second
    derivative would be too small by this part. `torch.autograd.function.once_differentiable` raises an error only if
    the gradient that comes in can be differentiated, which that of a loss or a sum cannot.
    """
    forward, backward = function.forward, function.backward

    @functools.wraps(forward)
    def computed(ctx: Any, *arguments: Any) -> Any:
        if not is_compiled():
            ctx.is_fast = is_fast()
            with torch.enable_grad():
                ctx.inputs = _Joined.apply(*_differentiable(arguments))  # type: ignore[no-untyped-call]
        return forward(ctx, *arguments)

    @functools.wraps(backward)
    def differentiated(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if is_compiled() or not hasattr(ctx, "is_fast"):  # the forward pass was compiled
            return backward(ctx, *grads)  # type: ignore[no-any-return]
        with torch.no_grad(), fast(ctx.is_fast):  # in the mode of the forward pass
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no `create_graph=True`
            return found  # type: ignore[no-any-return]
        reasons = (ctx.inputs, *_differentiable(grads))
        return tuple(None if one is None else _Refusing.apply(one, *reasons) for one in found)  # type: ignore[no-untyped-call]

    function.forward, function.backward = staticmethod(computed), staticmethod(differentiated)  # type: ignore[method-assign]
    return function


def _differentiable(values: tuple[Any, ...]) -> list[Tensor]:
    return [one for one in values if isinstance(one, Tensor) and one.requires_grad]


class _Joined(torch.autograd.Function):
    """An empty tensor that depends on tensors, as far as autograd knows, and keeps none of them in memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise AssertionError("only _Refusing, which raises an error, depends on this")


class _Refusing(torch.autograd.Function):
    """The first of its inputs, without a derivative in any of them."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RequestError(
            "these gradients cannot be differentiated again, because a fast implementation or a reversible layer"
            " computed them. For second derivatives compute outside of kernels.fast(), and with reversible=False."
        )
