"""Settings of a run that learns to translate or to parse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Union

from manyheads.catalogue import configs_of
from manyheads.config.checks import at_least, check
from manyheads.data.settings import DataSettings
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import BleuTokenizer
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.settings import JudgingSettings, RunConfig, TokenInitialSettings

if TYPE_CHECKING:
    from manyheads.models.protocols import Seq2SeqConfig
else:
    Seq2SeqConfig = Union[configs_of("translation")]  # noqa: UP007  (the classes are in the table)


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(JudgingSettings):
    """Validation of translators and parsers.

    Args:
        bleu_sentences: validation sentences translated (by the `decoding` settings) for BLEU and chrF, or of a parser
            for F1; 0 skips it; -1 is all.
        bleu_tokenize: BLEU's tokenizer: `none` for text that is tokenised already; `auto` is the target language's, or
            without a recorded language that of the script of the references: `13a` for text with spaces.
    """

    bleu_sentences: int = 500
    bleu_tokenize: BleuTokenizer = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "validation.", at_least(-1), "bleu_sentences")
        if self.best_by != "loss" and self.bleu_sentences == 0:
            raise ConfigError(
                f"validation.best_by is {self.best_by!r} but validation.bleu_sentences is 0; translate some, or use"
                " 'loss'.",
                fields=("best_by", "bleu_sentences"),
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The settings of a translator's or parser's run.

    Presets, files and single options fill them in, and `config.yaml` records them.
    """

    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: Seq2SeqConfig = field(default_factory=TransformerConfig)
    initial: TokenInitialSettings = field(default_factory=TokenInitialSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    decoding: DecodingSettings = field(default_factory=DecodingSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.batching == "packed":
            packing_lack = getattr(self.model, "packing_lack", None)
            lack = (
                f"data.batching is packed, but a {self.model.architecture} computes padded batches alone; set it to"
                " padded, or model.architecture to transformer."
            )
            if packing_lack is not None:
                lack = packing_lack(self.data.longest)
            if lack is not None:
                raise ConfigError(lack, fields=("data", "model"))

    @property
    def task(self) -> Literal["translation"]:
        """See `RunConfig.task`. Prepared trees make it parsing, which has the same settings."""
        return "translation"
