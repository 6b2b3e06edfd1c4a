"""Every activation against its formula, and the names that a config may hold."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from manyheads.models.size_checks import Activation
from manyheads.nn.layers import ACTIVATIONS

FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "linear": lambda x: x,
}
POINTS = [-7.5, -3.0, -1.2, -0.1, 0.0, 0.3, 1.0, 2.5, 6.5]


def test_the_config_knows_them_all() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    found = ACTIVATIONS[name](torch.tensor(POINTS, dtype=torch.float64)).tolist()
    assert found == pytest.approx([FORMULAS[name](x) for x in POINTS], abs=1e-12)
