"""Weights in bfloat16 for one step: in place of autocast, which casts each weight in each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.nn.kernels.linear import Packs, is_readable, narrowed


class NarrowWeights:
    """Copies of a model's weights in one buffer, which its modules have as parameters within `applied`.

    One operation casts all of them, and one casts their gradients. Maps of one input lie side by side, so that
    `kernels.linear.linears` computes them as one product without a copy. Tables of tokens and positions stay wide, as
    under autocast, which does not cast what is looked up.

    Args: model: its parameters stay what they are; the copies take half their memory, and so do their gradients.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self._model = model
        groups = [list(_beside(module)) for module in model.modules() if isinstance(module, Packs)]
        order = [parameter for group in groups for parameter in group]
        order += [parameter for _, _, parameter in self._held()]
        self._wide: list[Tensor] = list({id(one): one for one in order}.values())
        sizes = [parameter.numel() for parameter in self._wide]
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=self._wide[0].device)
        self._first = dict(zip(map(id, self._wide), (sum(sizes[:place]) for place in range(len(sizes))), strict=True))
        parts = torch.split(self._flat, sizes)
        self._narrow: list[Tensor] = [
            nn.Parameter(part.view(wide.shape), requires_grad=wide.requires_grad)
            for part, wide in zip(parts, self._wide, strict=True)
        ]
        self._joined: dict[tuple[int, ...], Tensor | None] = {}
        self._numbers: dict[int, int] = {}

    def _held(self) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
        """Yield each use of a parameter that is cast: the dict and the name by which a module has it."""
        for module in self._model.modules():
            if hasattr(module, "token_table") or hasattr(module, "rows") or isinstance(module, nn.Embedding):
                continue  # tables
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dtype is torch.float32:
                    yield module._parameters, name, parameter

    @torch.no_grad()
    def cast(self) -> None:
        """Copy the weights, once a step."""
        torch._foreach_copy_(self._narrow, self._wide)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, the model computes with the copies; for a forward and its backward pass.

        The gradients of the copies are then added to those of the parameters.
        """
        narrow_of = dict(zip(map(id, self._wide), self._narrow, strict=True))
        held = list(self._held())
        self._numbers = {id(narrow): id(wide) for wide, narrow in zip(self._wide, self._narrow, strict=True)}
        for owner, name, wide in held:
            owner[name] = narrow_of[id(wide)]
        try:
            with narrowed(self._flat.dtype, self._beside):
                yield
        finally:
            for owner, name, wide in held:
                owner[name] = wide
        self._add_gradients()

    def _beside(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Return parameters, one below the other, as one tensor with a gradient; None: they do not lie so."""
        key = tuple(self._numbers.get(id(one), 0) for one in parameters)
        if key not in self._joined:
            place = first = self._first.get(key[0])
            for number, one in zip(key, parameters, strict=True):
                if place is None or self._first.get(number) != place:
                    place = None
                    break
                place += one.numel()
            joined = None
            if place is not None:
                joined = self._flat[first:place].view(-1, *parameters[0].shape[1:]).detach()
                joined.requires_grad_(any(one.requires_grad for one in parameters))
            self._joined[key] = joined
        return self._joined[key]

    @torch.no_grad()
    def _add_gradients(self) -> None:
        wide_of = dict(zip(self._first, self._wide, strict=True))
        sources = [(narrow.grad, wide) for narrow, wide in zip(self._narrow, self._wide, strict=True)]
        for key, joined in self._joined.items():
            if joined is not None and joined.grad is not None:
                parts = [wide_of[number] for number in key]
                grads = torch.split(joined.grad, [len(part) for part in parts])
                sources += zip(grads, parts, strict=True)
                joined.grad = None
        found = [(grad, wide) for grad, wide in sources if grad is not None and wide.requires_grad]
        for narrow in self._narrow:
            narrow.grad = None
        while found:  # a parameter that was used in two ways has two gradients
            now = {id(wide): (grad, wide) for grad, wide in reversed(found)}
            _add(now.values())
            taken = {id(grad) for grad, _ in now.values()}
            found = [(grad, wide) for grad, wide in found if id(grad) not in taken]


def _add(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    pairs = list(pairs)
    flat = torch.empty(sum(grad.numel() for grad, _ in pairs), device=pairs[0][0].device)
    parts = torch.split(flat, [grad.numel() for grad, _ in pairs])
    wide = [part.view(grad.shape) for part, (grad, _) in zip(parts, pairs, strict=True)]
    torch._foreach_copy_(wide, [grad for grad, _ in pairs])
    fresh = [(one, parameter) for one, (_, parameter) in zip(wide, pairs, strict=True) if parameter.grad is None]
    rest = [(one, parameter) for one, (_, parameter) in zip(wide, pairs, strict=True) if parameter.grad is not None]
    for one, parameter in fresh:
        parameter.grad = one
    if rest:
        sums: Any = [parameter.grad for _, parameter in rest]
        torch._foreach_add_(sums, [one for one, _ in rest])


def _beside(module: Packs) -> Iterator[nn.Parameter]:
    """Yield the weights of maps of one input, then their biases."""
    maps = module.packed_maps()
    if len(maps) > 1 and all(is_readable(one) for one in maps):
        for name in ("weight", "bias"):
            yield from (one._parameters[name] for one in maps if one._parameters[name] is not None)  # type: ignore[misc]
