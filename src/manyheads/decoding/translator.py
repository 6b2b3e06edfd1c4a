"""Translation of text: texts in, texts or log-probabilities out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Unpack, overload

import torch

from manyheads.catalogue import HOOKS, load, shown_as
from manyheads.decoding.inputs_and_results import (
    Candidate,
    OnProgress,
    Scored,
    Stop,
    Translation,
    check_stop,
    check_texts,
    cut_batches,
    encode_texts,
    fit,
    map_batches,
    one_line,
    padded,
    scored_limit,
    with_end,
)
from manyheads.decoding.translation_model import TranslationModel
from manyheads.errors import RequestError, refuse_nan
from manyheads.models.protocols import Scorable, Searchable
from manyheads.nn.kernels.policy import lines_together

if TYPE_CHECKING:
    from torch import Tensor

    from manyheads.decoding.model_runner import ModelRunner
    from manyheads.decoding.settings import DecodingOverrides, DecodingSettings
    from manyheads.text.sides import TranslationTokenizer

__all__ = ["Scored", "Translation", "Translator"]


_LINE_BREAK = re.compile("\r?\n")
_MAX_BATCH_VALUES = 2**25
"""Maximum size of a batch's table of log-probabilities: 128 MiB in float32."""


class Translator(TranslationModel):
    """A model that translates text.

        translator = Translator.from_pretrained("runs/demo")
        translator("I am hungry.")  # a text for a text, a list for a list; the same as `translate`
        translator(["I am hungry.", "Thank you."], num_beams=8)

    Args:
        model: searchable; `score` also needs it to be `Scorable`. It is put into evaluation mode.
        tokenizer: of both sides: a `Tokenizer` for both languages, or another toolkit's.
        settings: default decoding options of all calls; default `DecodingSettings()`.
        device: the device of the model; `auto` chooses one.
        precision: `fp32`; `bf16` by autocast; `auto`: the faster one of these on the device; `tf32` on NVIDIA
            GPUs. (`from_pretrained` also takes `int8`.)
        compile_steps: compile a step of the search (see `compiled.CompiledSteps`); the first batch is slow.
        shortlist: search only candidates for each batch and not the whole vocabulary; not with compile_steps.
        plain: compute with torch's own operations alone, for example to compare; see `kernels.fast`.

    Attributes: languages: source and target of each direction that the model folder records; empty if unknown.
        target_lang: the target language, of a translator made by `into`.

    Raises: RequestError: no such device or precision; an option contains ids outside the vocabulary; the model's steps
        cannot be compiled, or there is no compiler.
    """

    _repr_mimebundle_ = shown_as("model")

    @overload
    def translate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        texts: str,
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> str: ...
    @overload
    def translate(
        self,
        texts: Sequence[str],
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[str]: ...
    def translate(
        self,
        texts: str | Sequence[str],
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> str | list[str]:
        """Return the best translation of each text, in order; a string for a string. An empty text gives an empty text.

        The lines of a text are translated one by one, and the line breaks are kept. (For a parser, a line break stands
        between two words, as a space does.)

        Args:
            texts: one text or several.
            stop: called before each step; if it returns true, SearchStopped is raised.
            on_progress: called after each batch with the number of finished lines (empty lines are not counted).
            overrides: any field of `DecodingSettings`, for this call.

        Raises: RequestError: a text is too long or not a string. ConfigError: a bad option. DataError: a text is not
            valid Unicode.
        """
        if isinstance(texts, str):
            return self.translate([texts], stop=stop, on_progress=on_progress, **overrides)[0]
        check_texts(texts)
        settings = self.options(**overrides)
        lines = [_LINE_BREAK.split(text) if self.tokenizer.splits_lines else [text] for text in texts]
        numbers = [number for number, of_text in enumerate(lines, 1) for _ in of_text]
        flat = [line for of_text in lines for line in of_text]
        found = iter(_best_texts(self._candidates(flat, settings, stop, on_progress=on_progress, numbers=numbers)))
        return [
            _joined(list(islice(found, len(of_text))), _LINE_BREAK.findall(text))
            for text, of_text in zip(texts, lines, strict=True)
        ]

    __call__ = translate

    @overload
    def translate_nbest(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        texts: str,
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        first_number: int = 1,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[Translation]: ...
    @overload
    def translate_nbest(
        self,
        texts: Sequence[str],
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        first_number: int = 1,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[list[Translation]]: ...
    def translate_nbest(
        self,
        texts: str | Sequence[str],
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        first_number: int = 1,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[Translation] | list[list[Translation]]:
        """Return up to num_return_sequences translations of each text, best first; one list for a string.

        Other arguments and errors are those of `translate`. A text is one sentence here: a line break in it counts as a
        space. An empty text gives one empty translation with score 0 and no tokens.

        Args: first_number: number of the first text in messages and for sampling, if the texts are one block of many.
        """
        if isinstance(texts, str):
            return self.translate_nbest(
                [texts], stop=stop, on_progress=on_progress, first_number=first_number, **overrides
            )[0]
        check_texts(texts)
        found = self._candidates(texts, self.options(**overrides), stop, first_number - 1, on_progress)
        empty = Translation("", 0.0, [], [])
        return [[self._translation(candidate) for candidate in candidates] or [empty] for candidates in found]

    def translate_ids(
        self,
        sources: Sequence[Sequence[int]] | Tensor,
        *,
        stop: Stop | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> list[list[int]]:
        """Return the ids of the best translation of each source, without those of its beginning and end.

        Args: sources: ids as the model reads them, with the marks of beginning and end that it was trained with; a
            tensor, too.
        Raises: as `translate`; see `by_ids`. RequestError: sources is one source. DataError: an id is outside the
            model's vocabulary.
        """
        translator = self.by_ids()
        try:
            texts = [" ".join(map(str, ids.tolist() if hasattr(ids, "tolist") else ids)) for ids in sources]
        except TypeError:
            raise RequestError("translate_ids takes several sources, each a list of ids: [[5, 6, 2]].") from None
        found = translator._candidates(texts, translator.options(**overrides), stop)
        return [candidates[0].hypothesis.ids if candidates else [] for candidates in found]

    def translate_lines(
        self,
        lines: Iterable[str],
        *,
        lines_at_once: int | None = None,
        stop: Stop | None = None,
        **overrides: Unpack[DecodingOverrides],
    ) -> Iterator[str]:
        """Translate a stream: read `lines_at_once` lines, yield their translations in order, and repeat.

        By default it reads 256 lines, on CUDA 4,096.

        One line gives one line: a line break in the model's output becomes a space. Options are checked before the
        first line is read.

        Raises: as `translate`; texts are numbered over the whole stream. RequestError: the lines are one string.
        """
        if isinstance(lines, str):
            raise RequestError(
                "translate_lines takes lines, such as a list or an open file; use translate for a string."
            )
        return self._stream(iter(lines), lines_at_once or lines_together(self.device), self.options(**overrides), stop)

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        sources: str,
        references: str,
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        first_number: int = 1,
    ) -> Scored: ...
    @overload
    def score(
        self,
        sources: Sequence[str],
        references: Sequence[str],
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        first_number: int = 1,
    ) -> list[Scored]: ...
    def score(
        self,
        sources: str | Sequence[str],
        references: str | Sequence[str],
        *,
        stop: Stop | None = None,
        on_progress: OnProgress | None = None,
        first_number: int = 1,
    ) -> Scored | list[Scored]:
        """Return the token log-probabilities of each reference given its source; one result for two strings.

        An empty reference consists of EOS only. A text that is too long for the model or for max_tokens is refused or
        truncated, as `too_long` says.

        Args:
            on_progress: called after each batch with the number of finished pairs.
            first_number: number of the first pair in messages, if the pairs are one block of many.

        Raises: RequestError: unequal counts, a text that is too long, or a model that cannot score.
        """
        if isinstance(sources, str) and isinstance(references, str):
            return self.score([sources], [references], stop=stop, on_progress=on_progress, first_number=first_number)[0]
        return score_pairs(
            self.runner,
            self.tokenizer,
            sources,
            references,
            self.settings,
            stop=stop,
            on_progress=on_progress,
            first_number=first_number,
        )

    def _stream(self, lines: Iterator[str], count: int, settings: DecodingSettings, stop: Stop | None) -> Iterator[str]:
        first = 0
        while texts := list(islice(lines, count)):
            check_texts(texts)
            yield from map(one_line, _best_texts(self._candidates(texts, settings, stop, first)))
            first += len(texts)

    def _candidates(
        self,
        texts: Sequence[str],
        settings: DecodingSettings,
        stop: Stop | None,
        first: int = 0,
        on_progress: OnProgress | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[list[Candidate]]:
        """Return the translations of each text. Args: see `TextSearch.hypotheses`."""
        if not self._keeps_words(settings):
            found = self.search.hypotheses(texts, settings, stop, first, on_progress, numbers)
            decode = self.tokenizer.target.decode
            return [[Candidate(decode(one.ids), one) for one in each] for each in found]
        kept = self.kept(texts, settings)
        found = self.search.hypotheses(
            kept.rows,
            settings,
            stop,
            on_progress=None if on_progress is None else lambda count: on_progress(min(count, len(texts))),
            numbers=[first + owner + 1 if numbers is None else numbers[owner] for owner in kept.owners],
            draws=[first + owner for owner in kept.owners],
        )
        lacking = kept.lacking(found)
        if not lacking:
            return kept.candidates(found)
        rows, phrases = [kept.rows[row] for row in lacking], list(lacking.values())
        forced = load(HOOKS["forced phrases"])(self.runner, self.tokenizer, rows, phrases, settings, stop=stop)
        return kept.candidates(found, {row: one.hypothesis for row, one in zip(lacking, forced, strict=True)})

    def _translation(self, candidate: Candidate) -> Translation:
        writer, hypothesis = self.tokenizer.target, candidate.hypothesis
        ids = [*hypothesis.ids, writer.eos_id] if hypothesis.ended else hypothesis.ids
        return Translation(candidate.text, hypothesis.score, writer.tokens(ids), hypothesis.token_log_probs)


def _best_texts(found: list[list[Candidate]]) -> list[str]:
    return [candidates[0].text if candidates else "" for candidates in found]


def _joined(lines: list[str], breaks: list[str]) -> str:
    """Return the translations of a text's lines as one text with its line breaks."""
    if len(lines) == 1:
        return lines[0]
    return "".join(one_line(line) + end for line, end in zip(lines, [*breaks, ""], strict=True))


def score_pairs(
    runner: ModelRunner[Searchable],
    tokenizer: TranslationTokenizer,
    sources: Sequence[str],
    references: Sequence[str],
    settings: DecodingSettings,
    *,
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
    first_number: int = 1,
) -> list[Scored]:
    """Do what `Translator.score` does for two lists. settings: `max_tokens` and `too_long` are read.

    Raises: RequestError: see `Translator.score`.
    """
    for texts, what in ((sources, "source"), (references, "reference")):
        check_texts([texts] if isinstance(texts, str) else texts, what)
    _check_scorable(runner.model)
    if isinstance(sources, str) or isinstance(references, str):
        raise RequestError(
            "one of sources and references is a string, the other is not; give two lists or two strings."
        )
    if len(sources) != len(references):
        raise RequestError(f"{len(sources)} sources but {len(references)} references; give two lists of equal length.")
    reader, writer = tokenizer.source, tokenizer.target
    source_ids = [with_end(ids, reader) for ids in encode_texts(sources, reader)]
    labels = [[*ids, writer.eos_id] for ids in encode_texts(references, writer)]
    numbers = range(first_number, first_number + len(labels))
    limit, reason = scored_limit(settings, runner.model.max_len)
    source_ids, labels = (
        fit(rows, numbers, limit, reason, too_long=settings.too_long, what=what)
        for what, rows in (("source", source_ids), ("reference", labels))
    )
    found = score_ids(runner, tokenizer, source_ids, labels, settings.max_tokens, stop=stop, on_progress=on_progress)
    return [Scored(writer.tokens(ids), row) for ids, row in zip(labels, found, strict=True)]


def score_ids(
    runner: ModelRunner[Searchable],
    tokenizer: TranslationTokenizer,
    sources: Sequence[list[int]],
    labels: Sequence[list[int]],
    max_tokens: int,
    *,
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
) -> list[list[float]]:
    """Return the model's log-probability of each label, in nats.

    Args: sources, labels: ids of each pair, EOS last. max_tokens: of a batch, on either side.

    Raises: NonFiniteError: the model gives NaN. RequestError: it cannot score. SearchStopped: `stop` returned true.
    """
    model, writer = _check_scorable(runner.model), tokenizer.target
    with runner.inference():
        return _token_log_probs(
            model,
            sources,
            [[writer.bos_id, *ids] for ids in labels],
            pad_id=writer.pad_id,
            max_tokens=max_tokens,
            vocab_size=writer.vocab_size,
            device=runner.device,
            stop=stop,
            on_progress=on_progress,
        )


def _check_scorable(model: Searchable) -> Scorable:
    """Raises: RequestError: the model cannot score."""
    if not isinstance(model, Scorable):
        raise RequestError(f"a {type(model).__name__} gives no log-probabilities of whole targets.")
    return model


@torch.no_grad()
def _token_log_probs(
    model: Scorable,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    pad_id: int,
    max_tokens: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
) -> list[list[float]]:
    """Return the model's log-probability of each target token except the first, in nats.

    Args:
        model: computes log-probabilities; it should be in evaluation mode.
        sources: ids of each source, EOS included.
        targets: ids of each target from BOS to EOS.
        max_tokens: maximum number of tokens of a batch on either side; batches are smaller for a large vocabulary.
        stop: called before each batch.
        on_progress: called after each batch with the number of finished pairs.

    Returns: for each pair one number per token after BOS.
    Raises: SearchStopped: `stop` returned true.
    """
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    budget = max(1, min(max_tokens, _MAX_BATCH_VALUES // vocab_size))

    def score(batch: list[int]) -> list[list[float]]:
        check_stop(stop)
        source, source_lengths = padded([sources[place] for place in batch], pad_id, device)
        target, target_lengths = padded([targets[place] for place in batch], pad_id, device)
        log_probs = model.log_probs(source, source_lengths, target[:, :-1])
        found = log_probs.gather(2, target[:, 1:, None])[:, :, 0].float().tolist()
        rows = [row[: length - 1] for row, length in zip(found, target_lengths.tolist(), strict=True)]
        refuse_nan(any(value != value for row in rows for value in row))
        return rows

    return map_batches(score, cut_batches(lengths, budget), on_progress)
