"""For tests of parts: reproducible numbers, and the masks that every kind of attention must bear."""

from collections.abc import Callable, Iterator

import pytest
import torch

from manyheads.nn.attention.masks import Causal, Dense, KeyPadding, Lengths, Mask, Window
from manyheads.nn.kernels import modes, policy

torch.set_num_threads(1)  # tensors this small only wait for one another


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    """The fast implementations, which these tests compare with formulas; other modules of tests override this."""
    with modes.fast():
        yield


@pytest.fixture(params=["products", "sdpa"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute dot-product attention, whatever the length (an empty product never reaches SDPA)."""
    monkeypatch.setattr(policy, "attention_path", lambda *_: request.param)
    return str(request.param)


@pytest.fixture(params=["products", "sdpa", "sums"])
def any_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Those, and the one that a compiled step of a search takes, which knows no dropout."""
    monkeypatch.setattr(policy, "attention_path", lambda *_: request.param)
    return str(request.param)


MASKS: dict[str, Callable[[int, int, int], Mask | None]] = {
    "all": lambda batch, q_len, k_len: None,
    "causal": lambda batch, q_len, k_len: Causal(),
    "lengths": lambda batch, q_len, k_len: Lengths(torch.arange(batch) + k_len - batch + 1),
    "lengths with an empty row": lambda batch, q_len, k_len: Lengths(torch.arange(batch)),
    "causal and lengths": lambda batch, q_len, k_len: Causal() & Lengths(torch.arange(batch) + 1),
    "window": lambda batch, q_len, k_len: Window(left=1, right=0),
    "padding on the left": lambda batch, q_len, k_len: (
        Causal() & KeyPadding(torch.arange(k_len).expand(batch, -1) >= 2)
    ),
    "dense": lambda batch, q_len, k_len: Dense(torch.arange(batch * q_len * k_len).view(batch, q_len, k_len) % 3 == 0),
    "nothing": lambda batch, q_len, k_len: Dense(torch.zeros(q_len, k_len, dtype=torch.bool)),
}


@pytest.fixture(params=MASKS.values(), ids=MASKS.keys())
def make_mask(request: pytest.FixtureRequest) -> Callable[[int, int, int], Mask | None]:
    """(batch, q_len, k_len) -> mask"""
    return request.param  # type: ignore[no-any-return]
