"""The common part of the composites that read a whole text at once and predict something about it, and of ensembles of
them.

Ensembles of translators: see `ensemble`; of language models: see `language_ensemble`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from manyheads.errors import ConfigError
from manyheads.models.ensemble import shortest_limit


class EncoderWithHead(nn.Module):
    """An encoder and its head, the object that is trained, saved, loaded and evaluated."""

    def __init__(self, body: nn.Module, head: nn.Module, config: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.config = config

    def tie_weights(self) -> None:
        """Do nothing: no parameters are shared."""

    def card_text(self) -> str:
        return ""

    @property
    def models(self) -> Sequence[EncoderWithHead]:
        """This model; of an ensemble: its models."""
        return [self]

    @property
    def max_len(self) -> int | None:
        """Maximum length of a text; see the config's `longest_input`."""
        longest: int | None = self.config.longest_input
        return longest


class EncoderEnsemble(nn.Module):
    """Several such models as one: their probabilities are averaged.

    Args: models: at least one; the same model twice counts twice. Sizes and architectures may differ.

    Attributes: config: the first model's. names: fields of a config that are equal in all models.

    Raises: ConfigError: there is no model, or the models do not predict the same names.
    Cost: time and memory are the sums of those of the models.
    """

    names: tuple[str, ...]
    models: Any

    def __init__(self, models: Sequence[EncoderWithHead]) -> None:
        super().__init__()
        if not models:
            raise ConfigError("an ensemble needs at least one model, but none was given.")
        self.config: Any = models[0].config
        for number, model in enumerate(models, 1):
            for name in self.names:
                its, mine = getattr(model.config, name), getattr(self.config, name)
                if its != mine:
                    raise ConfigError(
                        f"model {number} of the ensemble has {_difference(name, its, mine)}, but model 1 has"
                        f" {_difference(name, mine, its)}; only models that predict the same can be averaged."
                    )
        self.models = nn.ModuleList(models)

    @property
    def max_len(self) -> int | None:
        """Maximum length of a text: the smallest limit of the models; None: there is no limit."""
        return shortest_limit(self.models)


def _difference(name: str, its: Any, other: Any) -> str:
    """A field for a message: what one has and the other does not."""
    if isinstance(its, str):
        return f"{name} {its!r}"
    alone = [value for value in its if value not in other]
    if alone:
        return f"the {name} {', '.join(map(repr, alone[:3]))}{' ...' if len(alone) > 3 else ''}"
    return f"{len(its)} {name}" if len(its) != len(other) else f"the {name} in another order"
