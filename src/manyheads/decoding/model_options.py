"""Options of commands that run several models together: an ensemble, and a reverse model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyheads.config.checks import at_least, check
from manyheads.config.options import option
from manyheads.distributed.sharded_lines import model_identity
from manyheads.errors import ConfigError

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator

__all__ = ["EnsembleOptions", "RerankingOptions"]


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Other models."""

    ensemble: tuple[str, ...] = option(
        "Other models of the same vocabulary and task; the probabilities of all models are averaged.",
        default=(),
        metavar="MODEL ...",
    )

    def all(self, model: str) -> str | list[str]:
        """Return the argument of `from_pretrained`: the model, or all models of the ensemble."""
        return [model, *self.ensemble] if self.ensemble else model

    def record(self) -> dict[str, Any]:
        """The entries about the other models in a protocol; empty without them."""
        return {"ensemble": list(self.ensemble)} if self.ensemble else {}

    def identity(self) -> dict[str, Any]:
        """The same as `record`, with digests of the models instead of their names; see `model_identity`."""
        return {"ensemble": [model_identity(name) for name in self.ensemble]} if self.ensemble else {}


@dataclass(frozen=True, kw_only=True)
class RerankingOptions(EnsembleOptions):
    """Other models."""

    rerank: str | None = option(
        "A model of the reverse direction. The translations of a beam are ranked also by the probability with which it "
        "translates them back to the source.",
        default=None,
        metavar="MODEL",
    )
    rerank_weight: float = option("With --rerank: the weight of the reverse model's score.", default=1.0, metavar="X")

    def __post_init__(self) -> None:
        check(self, "--", at_least(0), "rerank_weight")
        if self.rerank is None and self.rerank_weight != type(self).rerank_weight:
            raise ConfigError("--rerank-weight is the weight of a reverse model; name one by --rerank MODEL.")

    def reranked(self, translator: Translator) -> Translator:
        """Return the translator, which ranks beams again if a reverse model is named.

        Raises: ConfigError: see `TranslationModel.reranked_by`; and as `Translator.from_pretrained`.
        """
        if self.rerank is None:
            return translator
        from manyheads.decoding.translator import Translator

        reverse = Translator.from_pretrained(self.rerank, translator.device, translator.precision)
        return translator.reranked_by(reverse, self.rerank_weight)

    def record(self) -> dict[str, Any]:
        """See `EnsembleOptions.record`."""
        reverse = {"rerank": self.rerank, "rerank_weight": self.rerank_weight}
        return {**super().record(), **(reverse if self.rerank is not None else {})}

    def identity(self) -> dict[str, Any]:
        """See `EnsembleOptions.identity`."""
        if self.rerank is None:
            return super().identity()
        reverse = {"rerank": model_identity(self.rerank), "rerank_weight": self.rerank_weight}
        return {**super().identity(), **reverse}
