"""The search for translations of texts: text to ids, an engine that searches, hypotheses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyheads.decoding.constraints import pattern_grammar
from manyheads.decoding.engines import SearchEngine
from manyheads.decoding.hypothesis import Hypothesis, Stop
from manyheads.decoding.model_runner import ModelRunner
from manyheads.decoding.reranking import Reranker
from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.shortlist import Shortlist
from manyheads.decoding.text_ids import OnProgress, encode_texts, with_end
from manyheads.decoding.truncation import fit, source_limit
from manyheads.errors import RequestError
from manyheads.models.protocols import Searchable
from manyheads.text.sides import TranslationTokenizer


@dataclass(frozen=True)
class TextSearch:
    """The search of a translator: this package's own, or that of another engine where there is one.

    Args:
        runner: runs the model.
        tokenizer: of both sides.
        shortlist: search only candidates for each batch and not the whole vocabulary; not with compiled steps.
        engine: another runtime with the same model.
        reranker: ranks all hypotheses of the beam before the best ones are returned.

    Raises: RequestError: the shortlist cannot be used with this tokenizer, or with compiled steps.
    """

    runner: ModelRunner[Searchable]
    tokenizer: TranslationTokenizer
    shortlist: Shortlist | None = None
    engine: SearchEngine | None = None
    reranker: Reranker | None = None

    def __post_init__(self) -> None:
        if self.shortlist is None:
            return
        if self.runner.is_compiled:
            raise RequestError(
                "a shortlist changes the vocabulary of every batch, so steps with it cannot be compiled;"
                " leave out --compile or --shortlist."
            )
        if (kind := self.tokenizer.model_kind) != "translator":
            raise RequestError(f"shortlists are for translators; this model is a {kind}, so leave out --shortlist.")
        if self.shortlist.vocabulary != self.tokenizer.digest:
            raise RequestError(
                f"the shortlist was learned with another vocabulary ({self.shortlist.vocabulary[:12]}) than the model's"
                f" ({self.tokenizer.digest[:12]}); learn it again: manyheads shortlist."
            )

    def engine_for(self, settings: DecodingSettings, longest: int = 0) -> SearchEngine | None:
        """Return the engine that does a search with these settings instead of torch, if there is one.

        Unlike `hypotheses`, it returns None for options that the engine does not support, whether or not the engine was
        asked for by name.

        Args: longest: tokens of the longest source.
        """
        if self.engine is None or longest > self.engine.longest_source:
            return None
        try:
            return self.engine if self._engine_takes(settings) else None
        except RequestError:
            return None

    def choose_engine(self, settings: DecodingSettings) -> str:
        """Decide which engine searches with these settings, and return a sentence that names it and the reason.

        With `auto` the first call measures both. `hypotheses` makes the same decision itself, so this method only
        reports it.

        Raises: RequestError: the engine that was asked for has no such option.
        """
        self._engine_takes(self._keeping_all(settings))
        return "engine torch" if self.engine is None else self.engine.choice

    def _engine_takes(self, settings: DecodingSettings) -> bool:
        return self.engine is not None and self.engine.takes(settings, self._by_torch)

    def runs_as(self) -> str:
        """Return "" if the model computes in float32 on the CPU, uncompiled; otherwise a description of how it runs."""
        if self.runner.device.type != "cpu":
            return f"is on {self.runner.device}"
        if self.runner.precision != "fp32":
            return f"has precision {self.runner.precision}"
        if self.shortlist is not None:
            return "has a shortlist"
        return "has compiled steps" if self.runner.is_compiled else ""

    def hypotheses(
        self,
        texts: Sequence[str],
        settings: DecodingSettings,
        stop: Stop | None,
        first: int = 0,
        on_progress: OnProgress | None = None,
        numbers: Sequence[int] | None = None,
        draws: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each text; an empty list for an empty text.

        Args:
            first: number of earlier texts.
            numbers: of the texts in messages; None: first + 1, first + 2, ...
            draws: of the texts for sampling; None: first, first + 1, ...

        Raises: see `Translator.translate`.
        """
        reader = self.tokenizer.source
        encoded = encode_texts(texts, reader)
        full = [place for place, ids in enumerate(encoded) if ids and texts[place].strip()]
        sources = [with_end(encoded[place], reader) for place in full]
        named = [first + place + 1 if numbers is None else numbers[place] for place in full]
        limit, reason = source_limit(settings, self.runner.model.max_len)
        sources = fit(sources, named, limit, reason, too_long=settings.too_long)
        results: list[list[Hypothesis]] = [[] for _ in texts]
        all_of_beam = self._keeping_all(settings)
        if self.engine is not None and self._engine_takes(all_of_beam):
            found = self.engine.search(sources, all_of_beam, stop=stop, on_progress=on_progress)
        else:
            indices = [first + place if draws is None else draws[place] for place in full]
            found = self._by_torch(sources, all_of_beam, indices, stop, on_progress)
        if self.reranker is not None:
            found = self._reranked([texts[place] for place in full], found, settings, named, stop)
        for place, hypotheses in zip(full, found, strict=True):
            results[place] = hypotheses
        return results

    def _keeping_all(self, settings: DecodingSettings) -> DecodingSettings:
        """Return the settings of the search itself, which returns the whole beam if it is ranked again."""
        return settings if self.reranker is None else replace(settings, num_return_sequences=settings.num_beams)

    def _reranked(
        self,
        texts: Sequence[str],
        found: list[list[Hypothesis]],
        settings: DecodingSettings,
        numbers: Sequence[int],
        stop: Stop | None,
    ) -> list[list[Hypothesis]]:
        assert self.reranker is not None
        writer = self.tokenizer.target
        outputs = [writer.decode_batch([one.ids for one in hypotheses]) for hypotheses in found]
        ranked = self.reranker.rerank(texts, found, outputs, settings, numbers=numbers, stop=stop)
        return [hypotheses[: settings.num_return_sequences] for hypotheses in ranked]

    def _by_torch(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        indices: Sequence[int] | None = None,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[list[Hypothesis]]:
        """Search with our own search. indices: see `search_all`."""
        writer = self.tokenizer.target
        with self.runner.inference():
            return search_all(
                self.runner.steps,
                sources,
                settings,
                pad_id=writer.pad_id,
                bos_id=writer.bos_id,
                eos_id=writer.eos_id,
                device=self.runner.device,
                indices=indices,
                grammar=pattern_grammar(settings, self.tokenizer) or self.tokenizer.grammar(settings),
                stop=stop,
                on_progress=on_progress,
                shortlist=self.shortlist,
            )
