"""Another default device than the model's, as `torch.set_default_device` sets it for whole programs.

The meta device stands for a GPU: what is created there by mistake has no numbers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.catalogue import build_model
from manyheads.extras.classification.settings import REFORMERS as CLASSIFIER_PRESETS
from manyheads.models.reformer import config as reformer_presets
from manyheads.models.transformer.config import PRESETS as TRANSFORMER_PRESETS
from manyheads.models.transformer_xl.config import PRESETS as XL_PRESETS
from manyheads.nn.kernels.topk import highest, top_k

VOCAB = 20
TOKENS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([9, 4])
ROWS = torch.tensor([[0], [1]])
RATES = {"dropout": 0.3, "attention_dropout": 0.3}
BOTH = {"source_vocab_size": VOCAB, "target_vocab_size": VOCAB}
CONFIGS: dict[str, Any] = {
    "transformer": replace(TRANSFORMER_PRESETS["debug"], **BOTH, **RATES),
    "transformer-xl": replace(XL_PRESETS["debug"], vocab_size=VOCAB, **RATES),
    "reformer": replace(reformer_presets.PRESETS["debug"], vocab_size=VOCAB, **RATES),
    "reformer-seq2seq": replace(reformer_presets.SEQ2SEQ_PRESETS["debug"], **BOTH, **RATES),
    "reformer-classifier": replace(CLASSIFIER_PRESETS["debug"], vocab_size=VOCAB, **RATES),
}


def computed(model: Any) -> list[Tensor]:
    """The gradients of a pass in training, and what three steps of a search say."""
    task = model.config.task
    inputs = (TOKENS, LENGTHS, TOKENS) if task == "translation" else (TOKENS, LENGTHS)
    torch.manual_seed(3)
    model.train().zero_grad()
    model.log_probs(*inputs)[0].sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if task == "classification":
        return found
    with torch.no_grad():
        state = model.eval().start(TOKENS, LENGTHS) if task == "translation" else model.eval().start(2)
        for tokens in TOKENS[:, :6].split([3, 2, 1], dim=1):
            log_probs, state = model.step(tokens, state)
            found.append(log_probs)
            state = state.reorder(ROWS)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_created_on_the_default_device(name: str) -> None:
    model = build_model(CONFIGS[name])
    wanted = computed(model)
    with torch.device("meta"):
        found = computed(model)
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_best_of_many_on_another_default_device() -> None:
    values = torch.rand(2, 40_007, generator=torch.Generator().manual_seed(0))
    wanted = (*top_k(values, 3), *highest(values))
    with torch.device("meta"):
        found = (*top_k(values, 3), *highest(values))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
