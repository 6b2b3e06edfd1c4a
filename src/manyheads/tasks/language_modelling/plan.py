"""Training steps of a language model at any size, without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from manyheads.data.language.segments import SegmentBatch
from manyheads.errors import ConfigError
from manyheads.tasks.data_sets import vocabulary_size
from manyheads.tasks.language_modelling.objective import begin_hashing
from manyheads.training.run.objective import LARGEST, SizeSetting

if TYPE_CHECKING:
    from manyheads.tasks.language_modelling.settings import TextConfig

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
