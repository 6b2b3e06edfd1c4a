"""Adam, AdamW and Muon, and a moving average of the weights, which is used for validation and the model folder.

They are fused if the device supports it; weight decay is for matrices only; moments are saved by parameter name.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") is for the matrices of linear
layers. The momentum of each matrix is orthogonalised before the update, so that its small directions have the same
weight as its large ones. Differs from `torch.optim.Muon` only in speed: matrices of one shape are processed together
(28 of 256 x 256 and 12 of 1024 x 256 on two cores: 23 ms instead of 54).

With sharded matrices, momenta are sharded too. The iteration needs whole matrices, so each is gathered, and every rank
processes all of them, as with replicated matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from manyheads.distributed.wrap import part_of, whole
from manyheads.errors import CheckpointError

if TYPE_CHECKING:
    from manyheads.training.settings import OptimiserSettings


class MovingAverage:
    """Exponential moving average of parameters: average <- d * average + (1 - d) * parameter.

    d = min(decay, (1 + step) / (10 + step)), so that even in a short run the random initial weights have little
    influence.

    Args:
        named: the parameters, by name.
        decay: in (0, 1).
    """

    def __init__(self, named: Mapping[str, nn.Parameter], decay: float) -> None:
        self._named = dict(named)
        self._decay = decay
        self.tensors: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in named.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after optimiser step `step` (counted from 1)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), list(self._named.values()), 1 - decay)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved averages.

        Raises: CheckpointError: names or shapes differ from the model's.
        """
        if tensors.keys() != self.tensors.keys():
            odd = sorted(tensors.keys() ^ self.tensors.keys())[0]
            raise CheckpointError(
                f"The averaged weights of the checkpoint do not match the model: only one of them has {odd!r}."
            )
        for name, tensor in tensors.items():
            if tensor.shape != self.tensors[name].shape:
                raise CheckpointError(
                    f"The averaged weight {name!r} has shape {tuple(tensor.shape)},"
                    f" the model's {tuple(self.tensors[name].shape)}."
                )
            self.tensors[name].copy_(tensor)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block, then restore the trained weights bit for bit."""
        trained = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        self._assign(self.tensors)
        try:
            yield
        finally:
            self._assign(trained)

    @torch.no_grad()
    def _assign(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named.items():
            parameter.copy_(tensors[name])


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial that moves all singular values towards 1
_STEPS = 5


def orthogonalise(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the nearest matrices with all singular values near 1 (between about 0.7 and 1.2), by Newton-Schulz.

    Args: dtype: type of the iteration and its result; None: that of the matrices. bfloat16 is precise enough, and
        faster if the device has such products.
    Shape: (count, rows, columns) -> the same.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = (x if dtype is None else x.to(dtype)).contiguous()
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for some matrices and an Adam optimiser for the rest, with one list of groups and one state.

    Args:
        matrices: two-dimensional parameters, for Muon.
        rest: an optimiser over the other parameters.
        rate_scale: Muon's learning rate as a multiple of the schedule's; stored in its groups.
        momentum: decay of the momentum; the update uses Nesterov's form.
        weight_decay: weight decay of `matrices`.
        without_decay: more two-dimensional parameters for Muon, without weight decay.
        dtype: type of the orthogonalisation; None: that of the matrices.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: torch.optim.Optimizer,
        *,
        rate_scale: float,
        momentum: float,
        weight_decay: float,
        without_decay: Iterable[nn.Parameter] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        alike: dict[tuple[torch.Size, float], list[nn.Parameter]] = {}
        for parameters, decay in ((matrices, weight_decay), (without_decay, 0.0)):
            for matrix in parameters:
                alike.setdefault((matrix.shape, decay), []).append(matrix)
        common = {"rate_scale": rate_scale, "momentum": momentum, "lr": rate_scale}
        self._rest = rest
        self._dtype = dtype
        self._muon_groups: list[dict[str, Any]] = [
            {"params": same, "weight_decay": decay, **common} for (_, decay), same in alike.items()
        ]
        groups = [*self._muon_groups, *rest.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups  # shares the dicts of `rest`, so that a rate set here applies there
        rest.state = self.state
        self.matrices = frozenset(id(matrix) for same in alike.values() for matrix in same)

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """Update both. Raises: TypeError: a closure is given, which is not supported."""
        if closure is not None:
            raise TypeError("MuonWithAdam takes no closure.")
        for group in self._muon_groups:
            self._step_together(group)
        self._rest.step()

    def _step_together(self, group: dict[str, Any]) -> None:
        """Apply Muon's update to all matrices of one shape."""
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        if not matrices:
            return
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients: list[Tensor] = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta: list[Tensor] = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        updates = orthogonalise(torch.stack([whole(one) for one in ahead]), self._dtype)
        # A kernel for many tensors needs the strides of the matrices.
        updates = updates.to(matrices[0].dtype).contiguous()
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        parts = [part_of(update, matrix) for matrix, update in zip(matrices, updates.unbind(), strict=True)]
        torch._foreach_add_(matrices, parts, alpha=-rate)


_ADAM_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "step"})
_MUON_MOMENTS = frozenset({"momentum_buffer"})


def split_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return parameters with weight decay (matrices of linear layers) and without (embeddings, positions, norms,
    biases, numbers for distances). Frozen parameters are in neither list.

    A module names its parameters of two axes and more that are no matrices of a linear layer in the attribute
    `without_decay`, or in `muon_without_decay` if they belong to Muon all the same. A matrix that is an embedding
    anywhere has no decay, even if it is also a tied output matrix. Of a tensor with a parametrization the parameters
    behind it count; of weight normalisation the lengths of rows have no decay.
    """
    kept_whole = _marked(model, "without_decay") | _marked(model, "muon_without_decay") | _lengths(model)
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue  # frozen
        decays = parameter.ndim >= 2 and id(parameter) not in kept_whole
        (decayed if decays else spared).append(parameter)
    return decayed, spared


def _marked(model: nn.Module, marker: str) -> set[int]:
    """Return the ids of the parameters that the modules name in an attribute; torch's embeddings have none."""
    found: set[int] = set()
    for module in model.modules():
        usual = ("weight",) if isinstance(module, nn.Embedding) and marker == "without_decay" else ()
        for name in getattr(module, marker, usual):
            behind = parametrize.is_parametrized(module, name)
            value = module.parametrizations[name] if behind else getattr(module, name)  # type: ignore[index]
            found |= {id(one) for one in (value.parameters() if isinstance(value, nn.Module) else (value,))}
    return found


def _lengths(model: nn.Module) -> set[int]:
    """Return the ids of the smaller parameters of tensors that are computed from several, as weight_norm's are."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList) and not module.is_tensor:
            originals = list(module.parameters(recurse=False))
            most = max((one.numel() for one in originals), default=0)
            found |= {id(one) for one in originals if one.numel() < most}
    return found


def build_optimiser(
    model: nn.Module, settings: OptimiserSettings, precision: str = "fp32", peak: float | None = None
) -> torch.optim.Optimizer:
    """Return an optimiser over all parameters of `model` that are not frozen, on their device.

    Args:
        precision: of the run, `fp32` or `bf16`; Muon computes its matrix products in it.
        peak: the highest rate of the schedule, at which Muon has `muon_learning_rate`; None: `learning_rate`.
    """
    decayed, spared = split_by_decay(model)
    if settings.name != "muon":
        return _build_adam(decayed, spared, settings)
    matrices = [parameter for parameter in decayed if parameter.ndim == 2]
    marked = _marked(model, "muon_without_decay")
    tables = [parameter for parameter in spared if id(parameter) in marked]
    taken = {id(parameter) for parameter in matrices + tables}
    others = [parameter for parameter in decayed if id(parameter) not in taken]
    adam = _build_adam(others, [parameter for parameter in spared if id(parameter) not in taken], settings)
    if not taken:
        return adam
    return MuonWithAdam(
        matrices,
        adam,
        without_decay=tables,
        rate_scale=settings.muon_learning_rate / (settings.learning_rate if peak is None else peak),
        momentum=settings.muon_momentum,
        weight_decay=settings.weight_decay,
        dtype=torch.bfloat16 if precision == "bf16" else None,
    )


def _build_adam(
    decayed: list[nn.Parameter], spared: list[nn.Parameter], settings: OptimiserSettings
) -> torch.optim.Optimizer:
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    arguments: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
    }
    groups = [group for group in groups if group["params"]] or groups[:1]  # Muon may have all there are
    try:
        return kind(groups, fused=True, **arguments)
    except RuntimeError:  # this device or build has no fused kernel
        return kind(groups, **arguments)


def _moments_of(optimiser: torch.optim.Optimizer, parameter: nn.Parameter) -> frozenset[str]:
    by_muon = isinstance(optimiser, MuonWithAdam) and id(parameter) in optimiser.matrices
    return _MUON_MOMENTS if by_muon else _ADAM_MOMENTS


def optimiser_tensors(optimiser: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return moments and step counts as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, or `momentum_buffer.NAME`."""
    return {
        f"{key}.{name}": value
        for name, parameter in named.items()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def without_foreign_momenta(
    optimiser: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of `optimiser_tensors` without Muon's momenta of parameters that AdamW trains, and the names
    of these parameters.

    Older versions let Muon train the embeddings of a Transformer-XL and its biases u and v.
    """
    if not isinstance(optimiser, MuonWithAdam):
        return dict(tensors), []
    momenta = {full: full.partition(".")[2] for full in tensors if full.partition(".")[0] in _MUON_MOMENTS}
    foreign = {
        full: name for full, name in momenta.items() if name in named and id(named[name]) not in optimiser.matrices
    }
    return {full: tensor for full, tensor in tensors.items() if full not in foreign}, list(foreign.values())


def load_optimiser_tensors(
    optimiser: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Load the tensors that `optimiser_tensors` returned.

    Raises: CheckpointError: a name or shape does not belong to this model.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition(".")
        if name not in named or key not in _moments_of(optimiser, named[name]):
            raise CheckpointError(f"The optimiser's file has {full_name!r}, which does not belong to this run.")
        parameter = named[name]
        if key != "step" and tensor.shape != parameter.shape:
            raise CheckpointError(
                f"The optimiser's {full_name!r} has shape {tuple(tensor.shape)},"
                f" the parameter {tuple(parameter.shape)}."
            )
        if not tensor.is_floating_point() or (key == "step" and tensor.numel() != 1):
            raise CheckpointError(f"The optimiser's {full_name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}.")
        states.setdefault(name, {})[key] = tensor
    for name, state in states.items():
        parameter = named[name]
        if state.keys() != _moments_of(optimiser, parameter):
            raise CheckpointError(f"The optimiser's file lacks a moment of {name!r}.")
        moved: dict[str, Tensor] = {}
        for key, tensor in state.items():
            if key == "step":
                # A fused or capturable optimiser counts steps on the device, the plain one on the CPU.
                on_device = any(group.get("fused") or group.get("capturable") for group in optimiser.param_groups)
                moved[key] = tensor.to(parameter.device if on_device else "cpu", copy=True)
            else:
                moved[key] = torch.empty_like(parameter, requires_grad=False).copy_(part_of(tensor, parameter))
        optimiser.state[parameter] = moved
