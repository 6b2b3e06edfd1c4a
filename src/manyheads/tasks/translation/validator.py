"""Validation loss, and BLEU and chrF with the same search that `translate` uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from manyheads.data.translation.batches import eval_batches
from manyheads.decoding.text_ids import SearchStopped, source_limit
from manyheads.decoding.translator import Translator
from manyheads.errors import DataError
from manyheads.evaluation.bleu import corpus_bleu, corpus_chrf
from manyheads.training.record.report import Sample, ValidationReport

if TYPE_CHECKING:
    from manyheads.data.translation.prepared import PreparedData
    from manyheads.models.composites import Seq2Seq
    from manyheads.tasks.translation.settings import TrainConfig
    from manyheads.training.run.clock import StopFlag
    from manyheads.training.run.objective import Translate

SPECIAL_TOKENS = {"source": 1, "target": 2}  # EOS; BOS and EOS


def build_translate(model: Seq2Seq, data: PreparedData, config: TrainConfig, device: torch.device) -> Translate:
    """The search that `translate` uses, with the model's weights at the time of each call.

    Raises: RequestError: the model or its tokenizer cannot do what `decoding` asks for.
    """
    translator = Translator(model, data.tokenizer, config.decoding, device=device, precision=config.precision)
    translator.options()  # its errors come now, and not at the first validation
    return lambda texts, stop: translator.translate(texts, stop=stop)


@dataclass(frozen=True)
class Validator:
    """Validates a model on held-out pairs.

    Args:
        model: forward gives an `Output`.
        data: its validation pairs and texts.
        config: budgets, precision, what to translate.
        device: where the model is.
        translate: source lines to target lines; None leaves out BLEU and chrF.
        stop: looked at between batches.

    Attributes: scores: the possible values of `validation.best_by`. verb: what is done with the source texts.

    Raises: DataError: a validation pair is too long; this is reported now, not hours later at the first validation.
    """

    model: nn.Module
    data: PreparedData
    config: TrainConfig
    device: torch.device
    translate: Translate | None
    stop: StopFlag
    scores: ClassVar[tuple[str, ...]] = ("loss", "bleu")
    verb: ClassVar[str] = "translates"

    def __post_init__(self) -> None:
        if self:
            self._refuse_too_long()

    def __bool__(self) -> bool:
        """Whether there is anything to validate on."""
        return self.data.valid is not None and len(self.data.valid) > 0

    @property
    def of_the_first(self) -> int | None:
        """Number of pairs that are translated; None: all."""
        count, found = self.config.validation.bleu_sentences, len(self.data.valid_text)
        return count if self.translate is not None and 0 < count < found else None

    def _refuse_too_long(self) -> None:
        """Check that all held-out text fits.

        It is scored whole: nothing is truncated or left out unless this is requested.
        """
        store, config = self.data.valid, self.config
        assert store is not None
        max_len = getattr(self.model, "max_len", None)
        budget = config.data.max_tokens if max_len is None else min(config.data.max_tokens, max_len)
        why = "data.max_tokens" if budget == config.data.max_tokens else "the model's positions"
        sides = [(side, getattr(store, f"{side}_lengths") + more, budget, why) for side, more in SPECIAL_TOKENS.items()]
        count = config.validation.bleu_sentences
        if self.translate is not None and config.decoding.too_long == "fail" and count:
            searched = store.source_lengths[: count if count > 0 else None] + 1
            sides.insert(0, ("source", searched, *source_limit(config.decoding, max_len)))
        for side, lengths, limit, why in sides:
            if len(lengths) and lengths.max() > limit:
                raise DataError(
                    f"Validation pair {int(lengths.argmax()) + 1} of {self.data.path} has {lengths.max()} {side}"
                    f" tokens, but at most {limit} fit ({why}); shorten it, leave it out, or raise that limit."
                )

    def run(self, step: int) -> ValidationReport | None:
        """Loss and scores now; None if the stop flag was raised meanwhile."""
        self.model.eval()
        loss = self._loss()
        if loss is None:
            return None
        texts = self.data.valid_text
        count = self.config.validation.bleu_sentences
        texts = texts if count < 0 else texts[:count]
        plain = ValidationReport(step=step, loss=loss, of_the_first=self.of_the_first)
        if not texts or self.translate is None:
            return plain
        try:
            outputs = self.translate([source for source, _ in texts], lambda: bool(self.stop))
        except SearchStopped:
            return None
        return replace(plain, **self.judged(texts, outputs))

    def judged(self, texts: list[tuple[str, str]], outputs: list[str]) -> dict[str, Any]:
        """Return fields of the report. texts: sources and references; outputs: of the model, for each source."""
        references = [reference for _, reference in texts]
        bleu = corpus_bleu(outputs, references, tokenize=self.config.validation.bleu_tokenize)
        chrf = corpus_chrf(outputs, references)
        shown = zip(texts, outputs, strict=True)
        samples = [Sample(source=src, reference=ref, text=out) for (src, ref), out in shown]
        return {
            "bleu": bleu.value,
            "chrf": chrf.value,
            "bleu_signature": bleu.signature,
            "chrf_signature": chrf.signature,
            "samples": tuple(samples[: self.config.validation.num_samples]),
        }

    @torch.no_grad()
    def _loss(self) -> float | None:
        """Mean negative log-likelihood in nats a target token, without label smoothing."""
        tokenizer, store = self.data.tokenizer, self.data.valid
        assert store is not None
        nll, num_tokens = 0.0, 0
        ids = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
        for batch in eval_batches(store, self.config.data.max_tokens, **ids):
            if self.stop:
                return None
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                output = self.model(batch.to(self.device), chunk_tokens=self.config.training.chunk_tokens)
            nll += float(output.nll_sum)
            num_tokens += int(output.num_tokens)
        return nll / max(num_tokens, 1)
