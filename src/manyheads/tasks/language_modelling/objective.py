"""Learning to predict the next token of a text: lanes of segments with memory, validated by likelihood and by
samples. `SyntheticRun` takes training steps at any size, without the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manyheads.catalogue import HOOKS, load
from manyheads.data.language.prepared import TextData, open_text
from manyheads.data.language.segments import SegmentBatch, SegmentStream
from manyheads.data.store import count_ids
from manyheads.decoding.generator import Generator
from manyheads.decoding.inputs_and_results import SearchStopped
from manyheads.errors import ConfigError, RequestError
from manyheads.evaluation.likelihood import Likelihood, bits_per, evaluate_text, segments_of
from manyheads.seeding import derive_seed
from manyheads.tasks.data_sets import begin_embeddings, digest_of_sets, known_sets, open_sets, vocabulary_size
from manyheads.tasks.held_out import chosen_split
from manyheads.text.vocabulary import IdVocabulary
from manyheads.training.record.report import Sample, ValidationReport
from manyheads.training.run.objective import LARGEST, PlainObjective, SizeSetting, Translate

if TYPE_CHECKING:
    from manyheads.data.lines import Progress
    from manyheads.data.mixing import MixedSegments
    from manyheads.data.settings import SegmentSettings
    from manyheads.distributed.group import Group
    from manyheads.models.composites import LanguageModel
    from manyheads.tasks.language_modelling.settings import TextConfig
    from manyheads.training.run.clock import StopFlag


NO_TEXT = "(no text: the model writes ids; `manyheads generate RUN --output FILE` writes a file of them)"


class LanguageObjective(PlainObjective):
    """A text for a language model.

    Args:
        config: of the run.
        data_dir: where an embedded text is prepared, and found again by a resumed run.
        progress: called with the progress of this.

    Raises: DataError, ConfigError, SaveError: the data cannot be used.
    """

    def __init__(self, config: TextConfig, data_dir: Path, progress: Progress | None = None) -> None:
        self.sets, self.shares = open_sets(
            config.data, lambda settings: open_text(settings, config.vocabulary, data_dir, progress=progress)
        )
        self.data = self.sets[config.data.path]
        self.digest = digest_of_sets(self.sets.values())
        vocabulary = self.data.vocabulary
        is_too_small = 0 < config.model.vocab_size < vocabulary.vocab_size
        if is_too_small and not config.initial.model:  # otherwise the model grows, see `training.run.resume`
            raise ConfigError(
                f"model.vocab_size is {config.model.vocab_size}, but the vocabulary of {self.data.path} has"
                f" {vocabulary.vocab_size} ids; set it to 0, which uses them all."
            )
        size = vocabulary.vocab_size if is_too_small else config.model.vocab_size or vocabulary.vocab_size
        self.config = replace(config, model=replace(config.model, vocab_size=size))
        self.model_config, self.generation = self.config.model, self.config.generation
        self.task = "text" if vocabulary.is_text else "ids"
        self.next_command = "generate {run}" if vocabulary.is_text else "generate {run} --output FILE"
        self.stream = self._mixed_stream() if self.shares else self._stream(self.data, config.data)

    def _stream(self, data: TextData, settings: SegmentSettings) -> SegmentStream:
        return SegmentStream(
            data.train,
            settings,
            self.config.seed,
            end_id=data.vocabulary.end_id,
            begin_id=data.vocabulary.begin_id,
            ext_len=getattr(self.config.model, "ext_len", 0),
            placed=self.config.model.positions_from_start,
        )

    def _mixed_stream(self) -> MixedSegments:
        """Raises: ConfigError: segments have context from before."""
        from manyheads.data.mixing import MixedSegments, lanes_of

        settings, names = self.config.data, list(self.sets)
        if ext_len := getattr(self.config.model, "ext_len", 0):
            raise ConfigError(f"model.ext_len is {ext_len}, which a mix of texts cannot have; set it to 0.")

        lanes = lanes_of([self.shares[name] for name in names], settings.lanes)
        streams = [
            self._stream(self.sets[name], replace(settings, mix=(), path=name, lanes=count, accumulate=1))
            for name, count in zip(names, lanes, strict=True)
        ]
        return MixedSegments(streams, names, names.index(settings.path), settings.accumulate)

    def describe(self) -> str:
        lines = [*(one.describe() for one in self.sets.values()), self.stream.describe()]
        count, valid = self.config.reading.max_tokens, self.data.valid
        if valid is not None and 0 < count < len(valid):
            lines.append(
                f"validation reads the first {count:,} of {len(valid):,} tokens, because reading.max_tokens is {count};"
                " 0 reads all"
            )
        return "\n".join(lines)

    def prepare_weights(self, model: LanguageModel, group: Group) -> Sequence[str]:
        if self.config.initial.embeddings == "random":
            return ()
        rows = self.model_config.vocab_size
        ids = np.concatenate([one.train.ids for one in self.sets.values()]) if self.shares else self.data.train.ids
        occurrences = count_ids(ids, rows)
        learn = partial(load(HOOKS["embeddings of a text"]), ids, rows, occurrences=occurrences)
        begin_embeddings(_token_tables(model), rows, learn, derive_seed(self.config.seed, "embeddings"), group)
        model.head.begin_at(torch.from_numpy(occurrences).float())
        return ("embeddings begin as the neighbours of the tokens in the training text suggest",)

    def first_state(self, model: LanguageModel) -> Any:
        return model.start(1, projected=False)

    def begin(self, model: LanguageModel, lanes: int, seed: int) -> Any:
        return begin_hashing(self.config, model, lanes, seed)

    def judge(
        self, model: LanguageModel, device: torch.device, stop: StopFlag, translate: Translate | None
    ) -> TextJudge:
        write = translate or build_write(model, self.data, self.config, device)
        return TextJudge(model, self.data, self.config, device, write, stop)

    def judge_sets(self, model: LanguageModel, device: torch.device, stop: StopFlag) -> dict[str, TextJudge]:
        found = {}
        for name, data in known_sets(self.config.initial.data, self.sets, TextData.open).items():
            split = chosen_split({"test": data.test, "valid": data.valid}, None)
            if split == "test":
                counts = data.manifest["counts"]
                manifest = {**data.manifest, "counts": {**counts, "valid": counts["test"]}}
                data = replace(data, valid=data.test, manifest=manifest)
            if split is not None:
                found[f"{name} {split}"] = TextJudge(model, data, self.config, device, None, stop)
        return found

    def lighter(self) -> str:
        data, model = self.config.data, self.config.model
        more = min(2 * data.accumulate, data.lanes)
        sizes = {"data.lanes": data.lanes, "data.segment_len": data.segment_len}
        sizes |= {f"model.{name}": size for name, size in model.context_settings.items()}
        named = ", ".join(f"{name} {size}" for name, size in sizes.items())
        return (
            f"({named}, data.accumulate {data.accumulate}): lower one of the first"
            f" {'three' if len(sizes) == 3 else 'two'}, or raise accumulate to {more}, which"
            " splits each step into smaller parts; either makes it a new run."
        )


open_objective = LanguageObjective


def _token_tables(model: LanguageModel) -> list[Tensor]:
    """The embeddings, and the weights of the output if they are as wide."""
    modules: Iterable[Any] = model.modules()
    tables = [module.token_table for module in modules if hasattr(module, "token_table")]
    return [one for one in tables if one.shape[1] == tables[0].shape[1]]


def begin_hashing(config: TextConfig, model: LanguageModel, lanes: int, seed: int) -> Any:
    """A state that holds the seed of the first hashes of an epoch, for models that hash; None for others.

    The seed is a part of the state, so it is passed from call to call and stored in checkpoints.
    """
    return model.start(lanes, projected=False, hash_seed=seed) if config.model.draws_hashes else None


def build_write(model: LanguageModel, data: TextData, config: TextConfig, device: torch.device) -> Translate:
    """The search that `generate` uses, over the model as it is at the time of each call.

    Raises: RequestError: the model cannot do what `generation` asks for, the prompt of the samples is too long, or
        samples are wanted of a model that cannot generate token by token.
    """
    changes: Any = {"max_new_tokens": config.validation.sample_tokens, "min_new_tokens": 0, "num_return_sequences": 1}
    generator = Generator(model, data.vocabulary, replace(config.generation, **changes), device, config.precision)
    settings = generator.options()  # its errors come now, not at the first validation or when the model is used
    if config.validation.num_samples and data.vocabulary.is_text:
        generator.steps(generator.encode_prompts([config.validation.prompt]), settings)
        try:
            model.start(1)
        except RequestError as error:
            raise RequestError(f"{error} To train without samples, set validation.num_samples to 0.") from None
    return lambda prompts, stop: generator.generate(prompts, stop_asked=stop)


@dataclass(frozen=True)
class TextJudge:
    """Validates a language model on held-out text.

    Args:
        model: a composite.
        data: its validation text.
        config: how it is read, what is written.
        device: where the model is.
        write: prompts to continuations; None leaves out samples.
        stop: looked at between segments.

    Raises: DataError: the validation text has no token to score; better now than at the first validation.
    """

    model: LanguageModel
    data: TextData
    config: TextConfig
    device: torch.device
    write: Translate | None
    stop: StopFlag

    def __post_init__(self) -> None:
        valid, vocabulary = self.data.valid, self.data.vocabulary
        if valid is not None and self:
            segments_of(valid, self.config.reading, vocabulary.end_id, vocabulary.begin_id)

    def __bool__(self) -> bool:
        """Whether there is anything to validate on."""
        return self.data.valid is not None and len(self.data.valid) > 0

    def run(self, step: int) -> ValidationReport | None:
        valid, vocabulary = self.data.valid, self.data.vocabulary
        assert valid is not None
        self.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            found = evaluate_text(
                self.model,
                valid,
                self.config.reading,
                vocabulary,
                device=self.device,
                stop=lambda: bool(self.stop),
            )
        if found is None:
            return None
        prompts = [self.config.validation.prompt] * (self.config.validation.num_samples if self.write else 0)
        if prompts and not vocabulary.is_text:
            return self._report(step, found, (Sample(source="", text=NO_TEXT),))
        try:
            texts = self.write(prompts, lambda: bool(self.stop)) if self.write and prompts else []
        except SearchStopped:
            return None
        samples = tuple(Sample(source=prompt, text=text) for prompt, text in zip(prompts, texts, strict=True))
        return self._report(step, found, samples)

    def _report(self, step: int, found: Likelihood, samples: tuple[Sample, ...]) -> ValidationReport:
        bits = self._bits_per_byte(found)
        return ValidationReport(
            step=step,
            loss=found.nats_per_token,
            bits_per_byte=bits,
            of_the_first=self.of_the_first,
            samples=samples,
        )

    @property
    def of_the_first(self) -> int | None:
        """Number of tokens that are read; None: all."""
        count, valid = self.config.reading.max_tokens, self.data.valid
        return count if valid is not None and 0 < count < len(valid) else None

    def _bits_per_byte(self, found: Likelihood) -> float | None:
        """Of the whole text; of a part only where every token is a byte, since the bytes of a part are not counted."""
        vocabulary = self.data.vocabulary
        if isinstance(vocabulary, IdVocabulary) and vocabulary.form != "bytes":
            # An id has two bytes in the file whatever it stands for, so bits per byte would have no meaning.
            return None
        if not self.config.reading.max_tokens:
            return bits_per(found.nll_sum, self.data.counts("valid")["bytes"])
        are_bytes = vocabulary.kind in ("bytes", "ids") and vocabulary.end_id is None
        return bits_per(found.nll_sum, found.num_tokens) if are_bytes else None


_VOCABULARY_SIZES = {"bytes": 257, "bpe": 8000}
"""Assumed size of a vocabulary that does not exist yet."""

_BEYOND_CUTOFFS = 4 / 3
"""Of a vocabulary of words that does not exist yet, beside the last cutoff, as in the papers' corpora."""

_LEAST_PROBE = 64


@dataclass(frozen=True)
class SyntheticRun:
    """Segments of random ids; see `training.run.objective.SyntheticRun`."""

    config: TextConfig
    vocabulary: str = ""

    @property
    def longest(self) -> int:
        return self.config.data.segment_len

    @property
    def rows(self) -> int:
        return -(-self.config.data.lanes // self.config.data.accumulate)

    def at(self, length: int) -> SyntheticRun:
        config, model, longest = self.config, self.config.model, self.config.model.longest_input
        if longest is not None and length > longest:
            raise ConfigError(
                f"--length {length:,} is above model.max_len {longest:,}, the number of positions of the model; raise"
                " it (and axial_shape with it), or give a smaller length."
            )
        size, told = vocabulary_size(model.vocab_size, config.data.path, *self._usual_size())
        if not size:
            raise ConfigError(
                f"The size of the vocabulary is not known: {config.data.path} is no folder of prepared data, and words"
                f" are not counted yet. Make it (manyheads prepare --task lm ... --output {config.data.path}), or set"
                " model.vocab_size."
            )
        model = replace(model, vocab_size=size)
        data = replace(config.data, segment_len=length, segment_lengths="fixed", length_schedule=())
        reading = replace(config.reading, segment_len=min(config.reading.segment_len, length))
        return SyntheticRun(replace(config, model=model, data=data, reading=reading), told)

    def _usual_size(self) -> tuple[int, str]:
        """The size of a vocabulary that is not there, or 0, and where the number is from."""
        settings, cutoffs = self.config.vocabulary, getattr(self.config.model, "cutoffs", ())
        if settings.vocab_size:
            return settings.vocab_size, "from vocabulary.vocab_size"
        if cutoffs:
            return round(_BEYOND_CUTOFFS * cutoffs[-1]), "a third more than the last of model.cutoffs"
        return _VOCABULARY_SIZES.get(settings.level, 0), f"as usual for {settings.level}"

    def batch(self, length: int, rows: int) -> SegmentBatch:
        ids = torch.randint(self.config.model.vocab_size, (rows, length + 1))
        return SegmentBatch(
            tokens=ids[:, :-1],
            targets=ids[:, 1:],
            lengths=torch.full((rows,), length),
            resets=torch.zeros(rows, dtype=torch.bool),
            sample_ids=torch.arange(rows),
        )

    def begin(self, model: Any, lanes: int, seed: int) -> Any:
        return begin_hashing(self.config, model, lanes, seed)

    def size_settings(self) -> list[SizeSetting]:
        """Lanes and length of a segment; see `SyntheticRun.knobs`."""
        data, model = self.config.data, self.config.model
        now, most = data.segment_len, model.longest_input or LARGEST
        longest = min(max(now, _LEAST_PROBE), most)
        probes = {max(1, longest // part) for part in ((2, 1) if model.memory_degree == 1 else (4, 2, 1))}
        given = f"segment_len {now:,}" + (f", accumulate {data.accumulate}" if data.accumulate > 1 else "")
        return [
            SizeSetting(
                "data.lanes", data.lanes, given, {rows: (now, rows) for rows in (1, 4)}, accumulate=data.accumulate
            ),
            SizeSetting(
                "data.segment_len",
                now,
                f"lanes {data.lanes:,}",
                {probe: (probe, self.rows) for probe in sorted(probes)},
                most=most,
            ),
        ]
