"""Filters of sampling against those of transformers, id by id."""

import math
from typing import Any

import pytest
import torch

from manyheads.decoding.greedy_and_sampling import filtered

generation = pytest.importorskip("transformers", reason="transformers is not installed")

CASES: list[dict[str, Any]] = [
    *({"min_p": value} for value in (0.001, 0.05, 0.4, 0.999)),
    *({"typical_p": value} for value in (0.01, 0.2, 0.9, 0.9999)),
    *({"eta_cutoff": value} for value in (1e-6, 0.0003, 0.004, 0.2, 0.99)),
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8, "eta_cutoff": 0.01},
    {"temperature": 2.5, "min_p": 0.01, "typical_p": 0.5},
    {"top_p": 0.95, "min_p": 0.1},
    {"top_k": 300, "eta_cutoff": 0.002},
]


def rows(vocab_size: int) -> torch.Tensor:
    """Flat and peaked rows, with ties, forbidden tokens and a single allowed one."""
    scores = torch.randn(48, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(vocab_size))
    scores *= torch.logspace(-2, 1, 48, dtype=torch.float64)[:, None]
    scores[::5] = scores[::5].round()
    scores[1::7, ::2] = -math.inf
    scores[3, 1:] = -math.inf
    scores[6] = 0.0
    return scores.log_softmax(-1)


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 500])
def test_what_is_kept(options: dict[str, Any], vocab_size: int) -> None:
    log_probs = rows(vocab_size)
    warpers = {
        "temperature": generation.TemperatureLogitsWarper,
        "top_k": generation.TopKLogitsWarper,
        "top_p": generation.TopPLogitsWarper,
        "min_p": generation.MinPLogitsWarper,
        "typical_p": generation.TypicalLogitsWarper,
        "eta_cutoff": generation.EtaLogitsWarper,
    }
    if vocab_size == 7 and "top_k" in options:
        options = options | {"top_k": 3}
    expected = log_probs
    for name, warper in warpers.items():
        if name in options:
            expected = warper(options[name])(None, expected)
    if len(options) > 1:  # which of several equal tokens top-k and top-p take is not said
        has_ties = torch.tensor([len(set(row)) < len(row) for row in log_probs.tolist()])
        log_probs, expected = log_probs[~has_ties], expected[~has_ties]
    probs, ids = filtered(log_probs, **options)
    found = probs if ids is None else torch.zeros_like(expected).scatter(1, ids, probs)
    found = found / found.sum(-1, keepdim=True)
    assert torch.equal(found > 0, expected > -math.inf)
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-9, atol=1e-12)
    assert len(found) > 20


def test_a_flat_row_keeps_something_in_spite_of_rounding() -> None:
    for size in range(2, 300):
        probs, _ = filtered(torch.zeros(1, size).log_softmax(-1), eta_cutoff=1 - 1e-12)
        assert probs.sum() > 0.9, size
