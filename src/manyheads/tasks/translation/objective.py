"""Learning to translate or to parse: pairs of sentences, validated by likelihood and by translations.

BLEU and chrF are of the same search that `translate` uses. `SyntheticRun` takes training steps at any size,
without the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from manyheads.catalogue import HOOKS, TASKS, load
from manyheads.data.batch import PackedBatch, PairBatch
from manyheads.data.corpora import NUM_TRAIN
from manyheads.data.translation.batches import Segmenting, TrainingStream, eval_batches
from manyheads.data.translation.prepared import TATOEBA, PreparedData, open_data
from manyheads.decoding.inputs_and_results import SearchStopped, source_limit
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, DataError, MissingExtraError
from manyheads.evaluation.bleu import (
    AUTO,
    TokenizerChoice,
    choose_tokenizer,
    corpus_bleu,
    corpus_chrf,
    instead_of,
    text_hints,
)
from manyheads.evaluation.reading import BleuTokenizer
from manyheads.nn.kernels.policy import has_segments_kernel, segments_lack
from manyheads.seeding import derive_seed
from manyheads.tasks.data_sets import (
    begin_embeddings,
    digest_of_sets,
    fewer_tokens,
    known_sets,
    open_sets,
    vocabulary_size,
)
from manyheads.tasks.held_out import chosen_split
from manyheads.training.record.report import Sample, ValidationReport
from manyheads.training.run.objective import PlainObjective, SyntheticTokenRun, Translate

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.distributed.group import Group
    from manyheads.models.composites import Seq2Seq
    from manyheads.tasks.translation.settings import TrainConfig
    from manyheads.training.run.clock import StopFlag


class TranslationObjective(PlainObjective):
    """Sentence pairs for an encoder-decoder.

    Args:
        config: of the run.
        data_dir: where an embedded corpus is prepared, and found again by a resumed run.
        progress: told how far that is.

    Raises: DataError, ConfigError, SaveError: the data cannot be used.
    """

    def __init__(self, config: TrainConfig, data_dir: Path, progress: Progress | None = None) -> None:
        self.sets, self.shares = open_sets(
            config.data,
            lambda settings: open_data(settings, config.tokenizer, config.seed, data_dir, progress=progress),
        )
        self.data = self.sets[config.data.path]
        self.digest = digest_of_sets(self.sets.values())
        self._asked, self._choice = config, _tokenizer(config, self.data)
        self.config = _with_tokenizer(_resolve(config, self.data), self._choice)
        self.model_config, self.generation = self.config.model, self.config.decoding
        self.task = self.data.task
        self.languages = self.data.languages
        into = f" --target-lang {self.languages[0][1]}" if len(self.languages) > 1 else ""
        self.next_command = f"translate {{run}}{into}"
        tokenizer = self.data.tokenizer
        ids = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
        dropout = _dropout(config, self.data)
        if self.shares:
            from manyheads.data.mixing import join_pairs

            stores = {name: one.train for name, one in self.sets.items()}
            mix = [(name, len(store), self.shares[name]) for name, store in stores.items()]
            joined = join_pairs(list(stores.values()))
            self.stream = TrainingStream(joined, config.data, config.seed, **ids, mix=mix, dropout=dropout)
            return
        available = NUM_TRAIN if config.data.path == TATOEBA else len(self.data.train)
        self.stream = TrainingStream(
            self.data.train, config.data, config.seed, **ids, available=available, dropout=dropout
        )

    def describe(self) -> str:
        lines = [*(one.describe() for one in self.sets.values()), self.stream.describe()]
        count, found = self.config.validation.bleu_sentences, len(self.data.valid_text)
        kind = _validator(self.data)
        verb = kind.verb
        if 0 <= count < found:
            lines.append(
                f"validation {verb} the first {count} of {found} pairs, because validation.bleu_sentences is {count};"
                f" -1 {verb} all. The validation loss covers all pairs"
            )
        if "bleu" in kind.scores and count:
            references, option = [reference for _, reference in self.data.valid_text], "validation.bleu_tokenize"
            hints = [self._choice.warning, *text_hints([], [references], self._choice.name, option)]
            lines += [f"warning: {hint}" for hint in hints if hint]
        return "\n".join(lines)

    def prepare_weights(self, model: Seq2Seq, group: Group) -> Sequence[str]:
        if self.config.initial.embeddings == "random":
            return ()
        pairs = self.stream.store.first(self.stream.report.total)
        tables = (model.body.source_embedding.weight, model.body.target_embedding.weight, model.head.weight)
        learn = partial(load(HOOKS["embeddings of pairs"]), pairs)
        begin_embeddings(tables, pairs.vocab_size, learn, derive_seed(self.config.seed, "embeddings"), group)
        return ("embeddings begin as co-occurrence in the training pairs suggests",)

    def check_device(self, device: torch.device) -> Sequence[str]:
        config, data = self.config, self.config.data
        by_kernel = has_segments_kernel(device)
        if data.batching == "padded":
            return ("batches are padded, as data.batching says",) if by_kernel else ()
        if not by_kernel:
            return ("attention over packed batches is computed one sentence after the other, which is slow",)
        model: Any = config.model  # that can be packed
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        for stack in ("encoder", "decoder"):
            widths = model.head_dim_of(stack), model.value_dim_of(stack)
            lack = segments_lack(device, dtype, *widths, model.relative_bias > 0)
            if lack is not None:
                raise ConfigError(f"data.batching is packed. Attention over packed sequences {lack}")
        by = "torch's kernel for sequences of several lengths"
        by += ", and with the relative bias by the Triton kernel of relative attention" * (model.relative_bias > 0)
        return (f"attention over packed batches is computed by {by}",)

    def first_state(self, model: Seq2Seq) -> None:
        """See `Objective.first_state`."""

    def begin(self, model: Seq2Seq, lanes: int, seed: int) -> None:
        """See `Objective.begin`."""

    def judge(self, model: Seq2Seq, device: torch.device, stop: StopFlag, translate: Translate | None) -> Validator:
        return self._judge_on(self.data, model, device, stop, translate)

    def judge_sets(self, model: Seq2Seq, device: torch.device, stop: StopFlag) -> dict[str, Validator]:
        found = {}
        for name, data in known_sets(self.config.initial.data, self.sets, PreparedData.open).items():
            split = chosen_split({"test": data.test, "valid": data.valid}, None)
            if split == "test":
                data = replace(data, valid=data.test, valid_text=data.test_text)
            if data.tokenizer.vocab_size < self.data.tokenizer.vocab_size:  # the old data of a model that has grown
                data = replace(data, tokenizer=self.data.tokenizer)
            if split is not None:
                found[f"{name} {split}"] = self._judge_on(data, model, device, stop)
        return found

    def _judge_on(
        self,
        data: PreparedData,
        model: Seq2Seq,
        device: torch.device,
        stop: StopFlag,
        translate: Translate | None = None,
    ) -> Validator:
        if translate is None:
            # Also where nothing is translated its errors come now: the model is saved with these settings.
            search = build_translate(model, data, self.config, device)
            translate = search if self.config.validation.bleu_sentences else None
        # Other data may have another target language than the run's.
        config = _with_tokenizer(self.config, _tokenizer(self._asked, data))
        return _validator(data)(model, data, config, device, translate, stop)

    def lighter(self) -> str:
        return fewer_tokens(self.config.data)


open_objective = TranslationObjective


def _validator(data: PreparedData) -> type[Validator]:
    """The validator for the task of the data."""
    kind: type[Validator] = load(TASKS[data.task].validator)
    return kind


def _dropout(config: TrainConfig, data: PreparedData) -> Segmenting | None:
    """Raises: ConfigError: the tokenizer of the data has no merges to leave out."""
    probability = config.data.bpe_dropout
    return load(HOOKS["bpe dropout"])(data.tokenizer, probability, config.seed) if probability else None


def _tokenizer(config: TrainConfig, data: PreparedData) -> TokenizerChoice:
    """BLEU's tokenizer for the data. A missing package does not end a run, which may have begun elsewhere."""
    asked = config.validation.bleu_tokenize
    if "bleu" not in _validator(data).scores:
        return TokenizerChoice("13a" if asked == AUTO else asked, "")
    references = [reference for _, reference in data.valid_text]
    languages = list(dict.fromkeys(target for _, target in data.languages))
    try:
        return choose_tokenizer(asked, languages, references, "validation.bleu_tokenize")
    except MissingExtraError as error:
        return instead_of(asked, error)


def _with_tokenizer(config: TrainConfig, choice: TokenizerChoice) -> TrainConfig:
    return replace(config, validation=replace(config.validation, bleu_tokenize=cast(BleuTokenizer, choice.name)))


def _resolve(config: TrainConfig, data: PreparedData) -> TrainConfig:
    """Fill in vocabulary sizes that are not set.

    A parser's targets need few of its ids; unless all embeddings are one matrix, its decoder has no others.

    Raises: ConfigError: the best checkpoint is to be found by a score that the data's task does not have, or a
        vocabulary size is below the ids that occur in the data.
    """
    best_by = config.validation.best_by
    if best_by not in _validator(data).scores:
        raise ConfigError(f"validation.best_by is {best_by!r}, but {data.path} is prepared for {data.task}.")
    size = data.tokenizer.vocab_size
    model = config.model
    target_size = size if model.tie_embeddings == "all" else data.tokenizer.num_target_ids
    sizes = (model.source_vocab_size or size, model.target_vocab_size or target_size)
    for name, given, least in zip(
        ("source_vocab_size", "target_vocab_size"), sizes, (size, data.tokenizer.num_target_ids), strict=True
    ):
        if given < least and not config.initial.model:  # otherwise the model grows, see `training.run.resume`
            raise ConfigError(
                f"model.{name} is {given:,}, but the tokenizer of {data.path} gives {least:,} ids on that side; set it"
                " to 0, which uses them all."
            )
    needed = (size, target_size)
    sizes = (max(sizes[0], needed[0]), max(sizes[1], needed[1])) if config.initial.model else sizes
    return replace(config, model=replace(model, source_vocab_size=sizes[0], target_vocab_size=sizes[1]))


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


@dataclass(frozen=True)
class SyntheticRun(SyntheticTokenRun):
    """Pairs of random ids; see `training.run.objective.SyntheticTokenRun`."""

    config: TrainConfig
    unit = "sentences"

    @property
    def longest(self) -> int:
        return self.config.data.longest

    def at(self, length: int) -> SyntheticRun:
        model, usual, told = self.config.model, self.config.tokenizer.vocab_size, ""
        sizes = {}
        for name in ("source_vocab_size", "target_vocab_size"):
            sizes[name], told = vocabulary_size(getattr(model, name), self.config.data.path, usual)
        return SyntheticRun(replace(self.config, model=replace(model, **sizes)), told)

    def batch(self, length: int, rows: int) -> PairBatch | PackedBatch:
        lengths = torch.full((rows,), length)
        sizes = (self.config.model.source_vocab_size, self.config.model.target_vocab_size)
        source, target = (torch.randint(size, (rows, length)) for size in sizes)
        pairs = PairBatch(source, lengths, target, lengths, torch.arange(rows))
        return PackedBatch.of(pairs) if self.config.data.batching == "packed" else pairs
