"""One optimiser step: accumulate, check, clip, update.

Dropout draws from torch's global generator, which is seeded before every micro-batch from (seed, step, micro-batch). So
no generator state is saved, and a resumed step drops the same units. On a CPU the mask of a row also depends on its
number in the micro-batch, so several ranks drop the same units as one.

Every rank computes a contiguous part of each micro-batch. Losses are divided by the target tokens of all parts of all
micro-batches before the backward pass, so the sum of the ranks' gradients is the gradient of the mean.

Location of a NaN or infinity: samples, module and parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.distributed.wrap import local, whole
from manyheads.nn.kernels import policy
from manyheads.nn.kernels.dropout import numbered_rows
from manyheads.nn.kernels.linear import Packs, autocast_dtype, is_readable, narrowed
from manyheads.seeding import derive_seed
from manyheads.training.run.state import Memory, ParallelModel, RankBatch, rank_batch

if TYPE_CHECKING:
    from manyheads.models.protocols import Output
    from manyheads.training.run.objective import Batch
    from manyheads.training.settings import RunConfig


_SHOWN = 12


@dataclass(frozen=True)
class Fault:
    """The known facts about a step with a non-finite loss, gradient, weight or moment."""

    step: int
    what: str
    micro_batch: int | None
    sample_ids: list[int]
    module: str | None
    bad_parameters: list[str] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)
    bad_moments: list[str] = field(default_factory=list)
    rank: int | None = None

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.sample_ids[:_SHOWN]))
        more = f", ... ({len(self.sample_ids)} in all)" if len(self.sample_ids) > _SHOWN else ""
        where = f" of micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        where += f" on rank {self.rank}" if self.rank is not None else ""
        parts = [f"Step {self.step}: {self.what}, found before the update; sample ids{where}: {shown}{more}."]
        if self.module is not None:
            parts.append(f"First bad module: {self.module}.")
        else:
            parts.append("Running the step again did not show it: suspect the hardware.")
        bad = {"parameters": self.bad_parameters, "gradients": self.bad_gradients, "moments": self.bad_moments}
        for kind, names in bad.items():
            if names:
                rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
                parts.append(f"NaN or infinity in the {kind} of {', '.join(names[:3])}{rest}.")
        return " ".join(parts)


@torch.no_grad()
def total_of(parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer) -> Tensor:
    """Return a number, (), that is not finite if any weight or moment is not, whether the step uses it or not.

    For sharded tensors it covers this rank's shards. A plain sum is the cheapest operation that reads all values (a
    fifth of the time of a norm), and non-finite values cannot cancel.
    """
    kept = [local(parameter) for parameter in parameters]
    for parameter in parameters:
        values = optimiser.state.get(parameter, {}).values()
        kept += [local(value) for value in values if value.shape == parameter.shape]
    if policy.saves_launches(kept[0].device):
        # Not the Euclidean norm, which is infinite for finite numbers such as 1e20.
        return torch.stack(torch._foreach_norm(kept, torch.inf)).amax()
    # Sum all vectors together: a call for each would take longer than the computation.
    vectors = [value for value in kept if value.dim() == 1]
    sums = [value.sum() for value in kept if value.dim() != 1]
    return torch.stack([*sums, *([torch.cat(vectors).sum()] if vectors else [])]).sum()


def moments_of(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the optimiser's tensors of each parameter, as (`name (moment)`, tensor). A collective operation if
    sharded.
    """
    return [
        (f"{name} ({key})", whole(value))
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    ]


def locate_in_state(
    model: nn.Module, kept: Sequence[tuple[str, Tensor]], step: int, sample_ids: Sequence[Sequence[int]]
) -> Fault | None:
    """Return the non-finite weights and moments of a step with finite loss and gradients; None if only their sum
    overflowed.

    Args: kept: see `moments_of`.
    """
    named = dict(model.named_parameters())
    parameters = [name for name, parameter in named.items() if not _finite(parameter)]
    moments = [name for name, value in kept if not _finite(value)]
    if not parameters and not moments:
        return None
    model.zero_grad(set_to_none=True)
    first = (parameters or moments)[0].partition(" ")[0]
    what = "a weight is not finite" if parameters else "a moment of the optimiser is not finite"
    everything = [number for ids in sample_ids for number in ids]
    return Fault(step, what, None, everything, first.rpartition(".")[0], parameters, [], moments)


def first_bad(tensors: Mapping[str, Mapping[str, Tensor]]) -> str | None:
    """Return the first non-finite tensor of a checkpoint, as `file: name`."""
    bad = (
        f"{stem}: {name}" for stem, group in tensors.items() for name, tensor in group.items() if not _finite(tensor)
    )
    return next(bad, None)


def locate(
    model: nn.Module,
    step: int,
    what: str,
    sample_ids: Sequence[Sequence[int]],
    run_micro_batch: Callable[[int], Tensor],
) -> Fault:
    """Compute each micro-batch of a failed step again and check every module until one shows the fault.

    Args:
        model: its gradients are those of the failed step; they are deleted.
        step: number of the step.
        what: "the loss is nan" or similar.
        sample_ids: of every micro-batch.
        run_micro_batch: computes the forward pass of one micro-batch with the same dropout as before; returns the loss.
    """
    named = dict(model.named_parameters())
    parameters = [name for name, parameter in named.items() if not _finite(parameter)]
    gradients = [
        name for name, parameter in named.items() if parameter.grad is not None and not _finite(parameter.grad)
    ]
    for index, ids in enumerate(sample_ids):
        if not ids:
            continue
        model.zero_grad(set_to_none=True)
        module, loss = _watch(model, lambda number=index: run_micro_batch(number))  # type: ignore[misc]
        if module is None and not _finite(loss):
            module = "the head (every module before it is finite)"
        if module is None:
            loss.backward()  # type: ignore[no-untyped-call]
            module = _first_in_backward(named)
        if module is not None:
            model.zero_grad(set_to_none=True)
            return Fault(step, what, index, list(ids), module, parameters, gradients)
    model.zero_grad(set_to_none=True)
    everything = [number for ids in sample_ids for number in ids]
    return Fault(step, what, None, everything, None, parameters, gradients)


def _watch(model: nn.Module, run: Callable[[], Tensor]) -> tuple[str | None, Tensor]:
    """Return the first module that ends with a non-finite value: the innermost, since hooks run when modules end."""
    found: list[str] = []

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(map(_finite, _tensors(output))):
                found.append(f"{name} ({type(module).__name__})")

        return hook

    handles = [module.register_forward_hook(hook_for(name)) for name, module in model.named_modules() if name]
    try:
        loss = run()
    finally:
        for handle in handles:
            handle.remove()
    return (found[0] if found else None), loss


def _first_in_backward(named: Mapping[str, nn.Parameter]) -> str | None:
    """Return the last parameter in forward order with a non-finite gradient: the first in the backward pass."""
    bad = [name for name, parameter in named.items() if parameter.grad is not None and not _finite(parameter.grad)]
    return f"{bad[-1].rpartition('.')[0] or bad[-1]} (in the backward pass)" if bad else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _finite(tensor: Tensor) -> bool:
    # The sum of finite numbers may overflow; it takes a fifth of the time.
    return not tensor.is_floating_point() or bool(tensor.sum().isfinite()) or bool(torch.isfinite(tensor).all())


@dataclass(frozen=True)
class StepResult:
    """Sums over the step's target tokens. fault: the reason why there was no update, or None."""

    loss_sum: float
    nll_sum: float
    num_tokens: int
    grad_norm: float
    fault: Fault | None = None


class NarrowWeights:
    """Copies of a model's weights in one buffer, which its modules have as parameters within `applied`.

    One operation casts all of them, and one casts their gradients. Maps of one input lie side by side, so that
    `kernels.linear.linears` computes them as one product without a copy. Tables of tokens and positions stay wide, as
    under autocast, which does not cast what is looked up, and so do modules that a model names in `reads_float32`.

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
        # Layer norm takes weights of its input's type.
        wide = {id(getattr(one, name)) for one in self._model.modules() for name in getattr(one, "reads_float32", ())}
        for module in self._model.modules():
            is_table = hasattr(module, "token_table") or hasattr(module, "rows") or isinstance(module, nn.Embedding)
            if is_table or id(module) in wide:
                continue
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
    """Add gradients to those of their parameters, in the parameters' type. pairs: (gradient, parameter)."""
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


class TrainStep:
    """Computes optimiser steps with `model`.

    Args:
        model: the whole model; `forward(batch, state, label_smoothing=..., chunk_tokens=...)` returns an `Output`.
        optimiser: its groups' `lr` is set at each step.
        config: seed, precision (resolved, not `auto`), clipping, smoothing.
        device: the model's device.
        memory: the model's states between steps; a skipped step deletes them.
        begin: (rows, seed) -> the initial state of a micro-batch without memory; None: no state.
        parallel_model: the distribution of the model over ranks; None: a single rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        config: RunConfig,
        device: torch.device,
        memory: Memory | None = None,
        begin: Callable[[int, int], Any] | None = None,
        parallel_model: ParallelModel | None = None,
    ) -> None:
        assert config.precision != "auto", "resolve_precision comes first"
        self._parallel_model = ParallelModel.alone(model) if parallel_model is None else parallel_model
        self._model = self._parallel_model.called
        self._group = self._parallel_model.group
        self._optimiser = optimiser
        self._config = config
        self._device = device
        self._memory = Memory() if memory is None else memory
        self._begin = begin
        self._narrow: NarrowWeights | None = None
        self._parameters = [
            parameter for parameter in self._parallel_model.trained.parameters() if parameter.requires_grad
        ]

    def _narrow_weights(self) -> NarrowWeights | None:
        """Return the weights of this step in bfloat16, where they replace autocast's; see `NarrowWeights`."""
        replaces = self._config.precision == "bf16" and self._group.is_alone and policy.saves_launches(self._device)
        if replaces and self._narrow is None:
            self._narrow = NarrowWeights(self._parallel_model.trained)
        if not replaces or self._narrow is None:
            return None
        self._narrow.cast()
        return self._narrow

    def autocast(self) -> AbstractContextManager[object]:
        """Use bf16 products over float32 weights if the config says so."""
        if self._config.precision != "bf16" or autocast_dtype(self._parameters[0]) is not None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def run(self, batches: Sequence[Batch], step: int, learning_rate: float) -> StepResult:
        """Update the model on all micro-batches of a step, unless loss, gradients, weights or moments are not finite.

        The loss of every micro-batch is divided by the target tokens of all of them, so the split has no effect on the
        result.
        """
        if not self._parallel_model.trained.training:  # a validation does not change the mode of what wraps the model
            self._model.train()
        self._optimiser.zero_grad(set_to_none=True)
        num_tokens = max(sum(batch.num_target_tokens() for batch in batches), 1)
        losses, nlls = [], []
        states = {}
        rank_batches = {
            micro: rank_batch(batch, self._group) for micro, batch in enumerate(batches) if len(batch.sample_ids)
        }
        narrow = self._narrow_weights()
        for micro, part in rank_batches.items():
            with (
                self._within(part, is_last=micro == max(rank_batches)),
                nullcontext() if narrow is None else narrow.applied(),
            ):
                output = self.forward(part, step, micro)
                self._shared_loss(output, part, num_tokens).backward()  # type: ignore[no-untyped-call]
            if part.counts:
                losses.append(output.loss_sum.detach())
                nlls.append(output.nll_sum.detach())
                states[micro] = output.state
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        state = total_of(self._parameters, self._optimiser)
        losses_and_state = self._totals(losses, nlls)
        totals = self._group.sum(torch.cat([losses_and_state, state[None].to(losses_and_state)]))
        sums = torch.cat([totals, norm[None].to(totals)]).tolist()  # a single wait for the device
        loss_sum, nll_sum, _, grad_norm = sums
        fault = None if all(map(math.isfinite, sums)) else self._find_fault(rank_batches, step, loss_sum, grad_norm)
        if fault is None:
            self.update(norm, learning_rate)
            self._memory.keep(states, {micro: part.total for micro, part in rank_batches.items()})
        else:
            self._memory.forget()
        return StepResult(loss_sum, nll_sum, num_tokens, grad_norm, fault)

    def _within(self, part: RankBatch, *, is_last: bool) -> AbstractContextManager[Any]:
        """Set the row numbers of a micro-batch for dropout, and whether its gradients are reduced."""
        if self._group.is_alone:
            return nullcontext()
        from manyheads.distributed.wrap import accumulating

        stack = ExitStack()
        stack.enter_context(numbered_rows(part.first, len(part.batch.sample_ids), part.total))
        if not is_last:
            stack.enter_context(accumulating(self._model))
        return stack

    def _shared_loss(self, output: Output, part: RankBatch, num_tokens: int) -> Tensor:
        """Return this part's contribution to the mean loss per token, times the number of ranks, because gradients are
        averaged.
        """
        if self._group.is_alone:
            return output.loss_sum / num_tokens
        return output.loss_sum * (self._group.world * part.counts / num_tokens)

    def _totals(self, losses: list[Tensor], nlls: list[Tensor]) -> Tensor:
        """Return the sums of this rank's losses with and without label smoothing. (2,)"""
        if not losses:
            dtype = torch.promote_types(self._parameters[0].dtype, torch.float32)
            return torch.zeros(2, device=self._device, dtype=dtype)
        return torch.stack([*losses, *nlls]).view(2, -1).sum(1)

    def forward(self, part: RankBatch, step: int, micro: int, model: nn.Module | None = None) -> Output:
        """Return the loss of one micro-batch. model: in place of the wrapped one."""
        batch = part.batch
        state = self._memory.of(micro, part.total) if part.counts else None
        if state is None and self._begin is not None:
            state = self._begin(len(batch.sample_ids), derive_seed(self._config.seed, "hashes", step, micro))
        # If rows are not numbered (see `nn.layers`), each rank draws its own masks.
        own = () if self._device.type == "cpu" or self._group.is_alone else (self._group.rank,)
        seed = derive_seed(self._config.seed, "dropout", step, micro, *own)
        if self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # faster than seeding all kinds of devices
        else:
            torch.manual_seed(seed)
        settings = self._config.training
        # Not every model has these, so they are given only where they are set.
        given: dict[str, Any] = {"num_sampled": settings.num_sampled}
        if settings.smoothing_kind != "all":
            given["smoothing_kind"] = settings.smoothing_kind
        options = {name: value for name, value in given.items() if value}
        with self.autocast():
            output: Output = (self._model if model is None else model)(
                batch.to(self._device),
                state,
                label_smoothing=settings.label_smoothing,
                chunk_tokens=settings.chunk_tokens,
                **options,
            )
        return output

    def update(self, norm: Tensor, learning_rate: float) -> None:
        """Clip the gradients, whose norm is given, and change the weights."""
        if self._config.optimiser.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.optimiser.clip_norm, norm)
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate * group.get("rate_scale", 1.0)
        self._optimiser.step()

    def _find_fault(
        self, rank_batches: Mapping[int, RankBatch], step: int, loss_sum: float, grad_norm: float
    ) -> Fault | None:
        """Return the fault as reported by the first rank that can locate it; the same on all ranks."""
        model = self._parallel_model.gather(gradients=True)
        mine = self._locate(model, rank_batches, step, loss_sum, grad_norm)
        if self._group.is_alone:
            return mine
        found = self._group.exchange(None if mine is None else asdict(mine))
        faults = [Fault(**{**one, "rank": rank}) for rank, one in enumerate(found) if one is not None]
        return next((fault for fault in faults if fault.module is not None), faults[0] if faults else None)

    def _locate(
        self, model: nn.Module, rank_batches: Mapping[int, RankBatch], step: int, loss_sum: float, grad_norm: float
    ) -> Fault | None:
        sample_ids = [part.batch.sample_ids.tolist() if part.counts else [] for part in rank_batches.values()]
        numbers = list(rank_batches)
        if math.isfinite(loss_sum) and math.isfinite(grad_norm):
            moments = moments_of(self._parallel_model.trained, self._optimiser)
            return locate_in_state(model, moments, step, sample_ids)
        if math.isfinite(loss_sum):
            what = f"the gradient's norm is {grad_norm}"
        else:
            what = f"the loss is {loss_sum}"

        def loss_of(index: int) -> Tensor:
            micro = numbers[index]
            part = rank_batches[micro]
            with numbered_rows(part.first, len(part.batch.sample_ids), part.total):
                return self.forward(part, step, micro, model).loss_sum

        return locate(model, step, what, sample_ids, loss_of)
