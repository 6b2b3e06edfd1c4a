"""The Reformer as an encoder, and the classifier made of it.

Paper: Kitaev et al. 2020, arXiv:2001.04451. Differs: its queries attend to later tokens, too, as in the encoder of
sec. 5's translation model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.architectures.reformer.model import Reformer
from manyheads.extras.classification.model import SequenceClassifier, build_classifier_of
from manyheads.extras.classification.reformer_config import ReformerClassifierConfig
from manyheads.nn.shapes import Float, Int

__all__ = ["ReformerEncoder", "build_classifier"]


class ReformerEncoder(nn.Module):
    """Token ids to hidden states of width 2 d_model, both streams of the reversible layers side by side.

    In training the hash seed of a call comes from torch's generator, as dropout does; evaluation uses the config's.

    Args: config: sizes and choices; the vocabulary size must be set.
    """

    def __init__(self, config: ReformerClassifierConfig) -> None:
        super().__init__()
        self.reformer = Reformer(config)

    def forward(
        self, tokens: Int[Tensor, "batch len"], lengths: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch len width"]:
        """Return the states. Rows are padded on the right; states at padding are undefined."""
        seed = int(torch.randint(1 << 62, (), device="cpu")) if self.training else None
        state = self.reformer.start(len(tokens), projected=False, hash_seed=seed)
        hidden, _ = self.reformer(tokens, lengths, state)
        return hidden  # type: ignore[no-any-return]


def build_classifier(config: ReformerClassifierConfig) -> SequenceClassifier:
    """See `build_classifier_of`."""
    return build_classifier_of(ReformerEncoder, config, 2 * config.d_model)
