"""A Reformer with another number of hash rounds than in training, or with exact attention."""

from __future__ import annotations

import torch

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import load_portable_state, portable_state
from manyheads.architectures.reformer.config import HashRounds
from manyheads.catalogue import build_model
from manyheads.errors import RequestError

__all__ = ["with_hashes"]


def with_hashes(model: LanguageModel, rounds: HashRounds) -> LanguageModel:
    """Return the model with another number of hash rounds (see `ReformerConfig.with_hash_rounds`) and the same weights.

    Args: model: a Reformer; it is not changed.

    Returns: a model in evaluation mode with its own tensors.
    Raises: RequestError: the model has no hash rounds.
    """
    config = model.config
    if config.hash_rounds is None:
        raise RequestError(f"a {config.architecture} has no hash rounds; --num-hashes needs a Reformer, leave it out.")
    state = torch.random.get_rng_state()
    made: LanguageModel = build_model(config.with_hash_rounds(rounds))
    torch.random.set_rng_state(state)  # building the model drew weights that are not used
    load_portable_state(made, portable_state(model))
    return made.to(next(model.parameters()).device).eval()
