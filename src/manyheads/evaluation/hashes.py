"""A Reformer with other hash rounds than it was trained with, or none: no parameter depends on their number."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import load_portable_state, portable_state
from manyheads.architectures.reformer.config import LayerKind, ReformerConfig
from manyheads.architectures.table import build_model
from manyheads.errors import RequestError

__all__ = ["Hashes", "hashes_of", "with_hashes"]

Hashes = int | Literal["full"]


def hashes_of(config: ReformerConfig) -> Hashes:
    """By how many rounds a model attends where it hashes; `full` if it never does."""
    return config.num_hashes if "lsh" in config.kinds else "full"


def with_hashes(model: LanguageModel, num_hashes: Hashes) -> LanguageModel:
    """The same weights, attending by so many hash rounds, or exactly.

    Paper: Kitaev et al. 2020, sec. 5.1, table 2: trained by some rounds, evaluated by others.
    Args:
        model: a Reformer; it is left as it is.
        num_hashes: rounds of every layer that hashes; of a model trained with exact attention alone, its exact layers
            hash. `full`: the layers that hash attend exactly, by shared queries and keys.

    Returns: a model in evaluation mode with tensors of its own.
    Raises: RequestError: the model is no Reformer, or has local layers alone.
    """
    config = model.config
    if not isinstance(config, ReformerConfig):
        raise RequestError(f"a {config.architecture} has no hash rounds; --num-hashes is of a Reformer, leave it out.")
    hashing = "lsh" in config.kinds
    if not hashing and "full" not in config.kinds:
        raise RequestError("all layers of this Reformer are local, so there are no hash rounds to be changed.")
    kinds: tuple[LayerKind, ...]
    if num_hashes == "full":
        kinds = tuple("full" if kind == "lsh" else kind for kind in config.layers)
        changed = replace(config, layers=kinds)
    else:
        kinds = config.layers if hashing else tuple("lsh" if kind == "full" else kind for kind in config.layers)
        # Short sequences would be attended exactly, whatever was asked for.
        changed = replace(config, layers=kinds, num_hashes=num_hashes, exact_len=0)
    state = torch.random.get_rng_state()
    made = build_model(changed)
    torch.random.set_rng_state(state)  # its first weights are drawn, and thrown away
    load_portable_state(made, portable_state(model))
    return made.to(next(model.parameters()).device).eval()
