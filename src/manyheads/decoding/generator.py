"""Text generation with a language model: model, vocabulary and options in one object."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Generator as Steps
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.language_model import LanguageModel
from manyheads.architectures.pretrained import load, save_pretrained
from manyheads.config.build import build
from manyheads.decoding.batching import cut_rows, padded
from manyheads.decoding.compiled import CompiledSteps
from manyheads.decoding.device import Precision, choose_device, choose_precision, inference, narrow, pack
from manyheads.decoding.ending import Ending
from manyheads.decoding.generation_config import read_settings
from manyheads.decoding.generation_settings import GenerationOverrides, GenerationSettings
from manyheads.decoding.hypothesis import check_finite, check_stop
from manyheads.decoding.prefix_cache import PrefixCache
from manyheads.decoding.repetition import Repetition
from manyheads.decoding.sampling import draw
from manyheads.errors import ModelFileError, RequestError
from manyheads.seeding import derive_seed
from manyheads.text.sides import has_tokenizer
from manyheads.text.vocabularies import load_vocabulary
from manyheads.text.vocabulary import Vocabulary

__all__ = ["READ_AT_ONCE", "Continuation", "Generator", "NewToken", "TextSteps"]

READ_AT_ONCE = 512
"""Tokens of a prompt that are read in one call."""
MEMORY_OF_NONE = 512


@dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt.

    text: without the stop text and without the prompt. ids: all generated tokens, including the end of a document or
    of a stop text. log_probs: the model's log-probability of each token in nats, before temperature and penalties.
    ended_by: `end` of a document, `stop` text, or `length` limit.
    """

    text: str
    ids: list[int]
    log_probs: list[float]
    ended_by: Literal["end", "stop", "length"]


@dataclass(frozen=True)
class NewToken:
    """A token that was just generated.

    prompt, path: the row of the batch that it belongs to. text: the characters that can be shown now. id, log_prob: see
    `Continuation`. top: the most probable (id, log-probability) at this place, best first, if asked for. ended: the
    whole continuation, if this is its last token.
    """

    prompt: int
    path: int
    text: str
    id: int
    log_prob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    ended: Continuation | None = None


TextSteps = Steps[list[NewToken], Collection[int] | None, None]
"""A generation, a step at a time: it yields the new tokens of each step, none while prompts are read. `send` takes the
prompts that nobody wants any more: their rows leave the batch before the next step."""


@dataclass
class _Row:
    """One continuation during generation.

    prompt, path: its place in the batch. random: its random stream. most: maximum number of tokens. ends: the value of
    `ended_by` at that limit.
    """

    prompt: int
    path: int
    ending: Ending
    random: np.random.Generator
    last: list[int]
    ids: list[int]
    log_probs: list[float]
    most: int
    ends: Literal["end", "length"]
    ended_by: Literal["end", "stop", "length"] | None = None

    def continuation(self) -> Continuation:
        """Return the result, after the last token."""
        return Continuation(self.ending.text, self.ids, self.log_probs, self.ended_by or self.ends)


class Generator:
    """A language model that continues text.

        generator = Generator.from_pretrained("runs/xl-demo")
        generator("It was ", temperature=0.7)  # a text for a text, a list for a list; the same as `generate`

    Args:
        model: a composite; it is put into evaluation mode.
        vocabulary: the model's vocabulary.
        settings: default options of all calls; default `GenerationSettings()`.
        device: the device of the model; `auto` chooses one.
        precision: `fp32`; `bf16` by autocast; `auto`: the faster one of these on the device; `int8`: large products
            with weights and rows quantised to 8 bits, on a CPU where that is faster.
        compile_steps: compile a step with torch's compiler (see `decoding.compiled`): slow at first, then faster. The
            model's weights must not change.

    Raises: RequestError: no such device or precision, or this model's steps cannot be compiled on this machine.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocabulary: Vocabulary,
        settings: GenerationSettings | None = None,
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
    ) -> None:
        self.device = choose_device(device)
        self.model = model.to(self.device).eval()
        self.vocabulary = vocabulary
        self.settings = GenerationSettings() if settings is None else settings
        self.precision = choose_precision(precision, self.device)
        if self.precision == "int8":
            pack(self.model, "int8")
        self._stepping: Any = CompiledSteps(self.model) if compile_steps else self.model

    def __repr__(self) -> str:
        config, vocabulary = self.model.config, self.vocabulary
        kind = f"{vocabulary.kind}, {vocabulary.vocab_size:,} ids"
        return f"Generator({config.architecture}, {kind}, {self.device}, {self.precision})"

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "auto",
        precision: Precision = "fp32",
        *,
        compile_steps: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Load a generator from a model folder, a run folder, or `owner/name` on the Hugging Face hub.

        `revision` is a branch, tag or commit of a model on the hub.
        With `bf16` its linear layers are cast permanently (see `device.narrow`): the model cannot be trained or saved.
        On a CPU a second copy of their weights may be kept in a faster layout (see `device.pack`).

        Raises: ModelFileError: a file is missing, damaged or refused, or the model is not a language model.
            ConfigError, DataError: the content of a file is invalid.
        """
        folder = resolve_model_path(path, revision=revision)
        chosen = choose_device(device)
        if not has_tokenizer(folder):
            raise ModelFileError(
                f"{folder} has no tokenizer.json, so it cannot write text; save the model with its vocabulary."
            )
        model = load(folder, device=chosen)
        if not isinstance(model, LanguageModel):
            raise ModelFileError(f"{folder} holds a model that translates; use `translate`, or a Translator.")
        vocabulary = load_vocabulary(folder)
        if vocabulary.vocab_size > model.config.vocab_size:
            raise ModelFileError(
                f"{folder}: the model knows {model.config.vocab_size:,} ids, its vocabulary has"
                f" {vocabulary.vocab_size:,}; they do not fit."
            )
        chosen_precision = choose_precision(precision, chosen)
        narrow(model, chosen_precision)
        pack(model, chosen_precision)
        settings = read_settings(folder, GenerationSettings)
        return cls(model, vocabulary, settings, chosen, chosen_precision, compile_steps=compile_steps)

    def save_pretrained(self, path: str | Path) -> None:
        """Write a model folder that `from_pretrained` reads: weights, vocabulary and settings.

        An existing folder is replaced, at once and completely.

        Raises: SaveError: it could not be written, or its weights were rounded by `precision` bf16.
        """
        save_pretrained(self.model, path, tokenizer=self.vocabulary, generation=self.settings)

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device. Returns: this generator.

        Raises: RequestError: there is no such device, or it has no products in this precision.
        """
        chosen = choose_device(device)
        choose_precision(self.precision, chosen)
        self.model.to(chosen)
        pack(self.model)  # the copies of weights in a faster layout belong to a device
        self.device = chosen
        self._stepping = CompiledSteps(self.model) if isinstance(self._stepping, CompiledSteps) else self.model
        return self

    def options(self, **overrides: Unpack[GenerationOverrides]) -> GenerationSettings:
        """Return the settings of a call.

        Raises: ConfigError: an option is unknown, of the wrong type or out of range. RequestError: an id is not in the
            vocabulary.
        """
        settings = self.settings
        if overrides:
            settings = build(GenerationSettings, {**vars(settings), **overrides}, "the options")
        for token in settings.banned_ids:
            if not 0 <= token < self.vocabulary.vocab_size:
                raise RequestError(
                    f"banned_ids holds {token}; ids of this vocabulary are 0 to {self.vocabulary.vocab_size - 1}."
                )
        return settings

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, prompts: str, *, stop_asked: Callable[[], bool] | None = None, **overrides: Unpack[GenerationOverrides]
    ) -> str: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        stop_asked: Callable[[], bool] | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[str]: ...
    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        stop_asked: Callable[[], bool] | None = None,
        **overrides: Unpack[GenerationOverrides],
    ) -> str | list[str]:
        """Return a continuation of each prompt, in order; a string for a string. An empty prompt begins a text.

        Args:
            prompts: one text or several, of any lengths.
            stop_asked: called before each step; if it returns true, SearchStopped is raised.
            overrides: any field of `GenerationSettings`, for this call.

        Raises: ConfigError, RequestError: a bad option or prompt. DataError: a prompt is not valid Unicode.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], stop_asked=stop_asked, **overrides)[0]
        return [found[0].text for found in self.continuations(prompts, stop_asked=stop_asked, **overrides)]

    __call__ = generate

    @overload
    def continuations(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        prompts: str,
        *,
        stop_asked: Callable[[], bool] | None = None,
        first: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[Continuation]: ...
    @overload
    def continuations(
        self,
        prompts: Sequence[str],
        *,
        stop_asked: Callable[[], bool] | None = None,
        first: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[list[Continuation]]: ...
    def continuations(
        self,
        prompts: str | Sequence[str],
        *,
        stop_asked: Callable[[], bool] | None = None,
        first: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[Continuation] | list[list[Continuation]]:
        """Return `num_return_sequences` continuations of each prompt, with tokens and log-probabilities; one list for a
        string.

        The samples of a prompt depend on its number, the seed and the options, not on its batch (up to rounding).

        Args: first: number of the first prompt; with it, several calls draw the same samples as one call. Others as for
            `generate`.
        """
        if isinstance(prompts, str):
            return self.continuations([prompts], stop_asked=stop_asked, first=first, **overrides)[0]
        settings = self.options(**overrides)
        return self._continue(self.encode_prompts(prompts), settings, first, stop_asked)

    def continue_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stop_asked: Callable[[], bool] | None = None,
        first: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> list[list[Continuation]]:
        """Do the same as `continuations` for prompts given as ids, for models of data that is not text.

        Raises: as `continuations`, and RequestError: an id is outside the vocabulary.
        """
        settings = self.options(**overrides)
        return self._continue(self.begin_ids(prompts), settings, first, stop_asked)

    def _continue(
        self,
        encoded: list[list[int]],
        settings: GenerationSettings,
        first: int,
        stop_asked: Callable[[], bool] | None,
    ) -> list[list[Continuation]]:
        paths = settings.num_return_sequences
        found: list[list[Continuation]] = [[] for _ in encoded]
        for places in cut_rows([len(ids) for ids in encoded], max(1, settings.max_rows // paths)):
            group, numbers = [encoded[place] for place in places], [first + place for place in places]
            written: dict[tuple[int, int], Continuation] = {}
            for new in self.steps(group, settings, numbers=numbers, stop_asked=stop_asked):
                written |= {(token.prompt, token.path): token.ended for token in new if token.ended is not None}
            for number, place in enumerate(places):
                found[place] = [written[number, path] for path in range(paths)]
        return found

    def stream(
        self,
        prompt: str,
        *,
        stop_asked: Callable[[], bool] | None = None,
        number: int = 0,
        **overrides: Unpack[GenerationOverrides],
    ) -> Iterator[str]:
        """Yield the continuation of one prompt during generation, in complete characters.

        Args: number: number of the prompt, for sampling; others as for `generate`.

        Cost: constant per token.
        """
        overrides["num_return_sequences"] = 1
        settings = self.options(**overrides)
        [ids] = self.encode_prompts([prompt])
        for new in self.steps([ids], settings, numbers=[number], stop_asked=stop_asked):
            if shown := "".join(token.text for token in new):
                yield shown

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each prompt, with the token that precedes a document or, if there are no ids, a text.

        Raises: RequestError: a prompt is not a string. DataError: a prompt is not valid Unicode.
        """
        if isinstance(prompts, str):
            raise RequestError("give a list of prompts, not one string.")
        for place, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise RequestError(f"prompt {place + 1} is a {type(prompt).__name__}; prompts are strings.")
        return [self._begun(ids) for ids in self.vocabulary.encode_batch(list(prompts))]

    def begin_ids(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return prompts given as ids as `encode_prompts` does.

        Raises: RequestError: an id is outside the vocabulary.
        """
        for place, prompt in enumerate(prompts):
            wrong = next((index for index in prompt if not 0 <= index < self.vocabulary.vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"prompt {place + 1} holds the id {wrong}; ids are 0 to {self.vocabulary.vocab_size - 1}."
                )
        return [self._begun(list(prompt)) for prompt in prompts]

    def most_new_tokens(self, prompt_len: int, settings: GenerationSettings) -> int:
        """Return how many tokens can follow a prompt of this length; less than 1 if the prompt is too long."""
        return self._limit(prompt_len, settings)[0]

    def steps(
        self,
        prompts: Sequence[list[int]],
        settings: GenerationSettings,
        *,
        numbers: Sequence[int] | None = None,
        each: Sequence[GenerationSettings] | None = None,
        num_top: int = 0,
        cache: PrefixCache | None = None,
        stop_asked: Callable[[], bool] | None = None,
    ) -> TextSteps:
        """Return the generation of one batch of `num_return_sequences` continuations for each prompt; see `TextSteps`.

        Args:
            prompts: ids, as of `encode_prompts`; at least one.
            numbers: of the prompts, for sampling; default 0, 1, 2 ...
            each: settings of each prompt, of which only max_new_tokens, stop and seed are read; default `settings`.
            num_top: number of alternatives of each token.
            cache: of parts of READ_AT_ONCE tokens; only a single prompt is looked up and stored.
            stop_asked: see `generate`.

        Raises: RequestError: a prompt is too long.
        """
        rows = [
            self._row(
                prompt if numbers is None else numbers[prompt],
                prompt,
                path,
                ids,
                settings if each is None else each[prompt],
            )
            for prompt, ids in enumerate(prompts)
            for path in range(settings.num_return_sequences)
        ]
        return self._write(list(prompts), rows, settings, num_top, cache, stop_asked)

    def _begun(self, ids: list[int]) -> list[int]:
        """Return a prompt's ids after the token that precedes a document or, without documents, a text."""
        return [self.vocabulary.start_id, *ids] if self.vocabulary.begin_id is not None or not ids else ids

    def _limit(self, prompt_len: int, settings: GenerationSettings) -> tuple[int, Literal["end", "length"]]:
        """Return the maximum number of tokens after a prompt, and the value of `ended_by` there."""
        most = settings.max_new_tokens
        max_len, document_len = self.model.max_len, self.vocabulary.document_len
        if max_len is not None:  # the last generated token is not read again
            most = min(most, max_len - prompt_len + 1)
        if document_len and document_len - prompt_len + 1 <= most:
            return document_len - prompt_len + 1, "end"
        return most, "length"

    def _row(self, number: int, prompt: int, path: int, ids: list[int], settings: GenerationSettings) -> _Row:
        """Raises: RequestError: the prompt leaves no space for a token."""
        most, ends = self._limit(len(ids), settings)
        max_len, document_len = self.model.max_len, self.vocabulary.document_len
        if most < 1:
            limit = f"documents have {document_len:,}" if ends == "end" else f"the model has {max_len:,} positions"
            raise RequestError(
                f"prompt {number + 1} has {len(ids):,} tokens with its beginning, but {limit}; shorten it."
            )
        random = np.random.default_rng(derive_seed(settings.seed, "sample", number, path))
        return _Row(prompt, path, Ending(settings.stop), random, ids[-1:], [], [], most, ends)

    def _write(
        self,
        prompts: list[list[int]],
        rows: list[_Row],
        settings: GenerationSettings,
        num_top: int,
        cache: PrefixCache | None,
        stop_asked: Callable[[], bool] | None,
    ) -> TextSteps:
        """Generate the rows, several for each prompt."""
        paths = len(rows) // len(prompts)
        dropped: set[int] = set()
        cache = cache if len(prompts) == 1 else None
        log_probs, state = yield from self._read(prompts, settings, cache, stop_asked, dropped)
        with inference(self.device, self.precision):
            if paths > 1:
                each = torch.arange(len(prompts), device=self.device).repeat_interleave(paths)
                log_probs, state = log_probs[each], state.reorder(each)
        repetition = Repetition(
            [prompts[number // paths] for number in range(len(rows))],
            self.model.config.vocab_size,
            penalty=settings.repetition_penalty,
            ngram_size=settings.no_repeat_ngram_size,
            device=self.device,
        )
        active = list(rows)
        longest = max(row.most for row in rows)
        for step in range(longest):
            if dropped:
                on = [place for place, row in enumerate(active) if row.prompt not in dropped]
                dropped.clear()
                if not on:
                    return
                active, state, log_probs = self._select(on, active, state, log_probs, repetition)
            check_stop(stop_asked)
            chosen, gained = self._choose(log_probs, active, repetition, settings, step)
            tops = _top(log_probs, num_top)
            new = []
            for row, token, log_prob, top in zip(active, chosen.tolist(), gained, tops, strict=True):
                text = self._take(row, token, log_prob)
                ended = row.continuation() if row.ended_by is not None else None
                new.append(NewToken(row.prompt, row.path, text, token, log_prob, top, ended))
            dropped.update((yield new) or ())
            on = [place for place, row in enumerate(active) if row.ended_by is None]
            if not on:
                return
            on = [place for place in on if active[place].prompt not in dropped]
            dropped.clear()
            if not on:
                return
            with inference(self.device, self.precision):
                if len(on) < len(active):
                    active, state, chosen = self._select(on, active, state, chosen, repetition)
                log_probs, state = self._stepping.step(chosen[:, None], state)

    def _select(
        self, on: list[int], active: list[_Row], state: Any, values: Tensor, repetition: Repetition
    ) -> tuple[list[_Row], Any, Tensor]:
        """Return rows, state and a tensor with a line per row for those rows that stay in the batch."""
        with inference(self.device, self.precision):
            which = torch.tensor(on, device=self.device)
            repetition.select(on)
            return [active[place] for place in on], state.reorder(which), values[which]

    def _read(
        self,
        prompts: list[list[int]],
        settings: GenerationSettings,
        cache: PrefixCache | None,
        stop_asked: Callable[[], bool] | None,
        dropped: set[int],
    ) -> Steps[list[NewToken], Collection[int] | None, tuple[Tensor, Any]]:
        """Return the log-probabilities of the token after each prompt, and the state.

        Long prompts are read in parts, with a step after each but the last; dropped prompts are added to `dropped`.
        """
        ids, lengths = padded(prompts)
        first, context = 0, repr(self.attending(settings))
        with inference(self.device, self.precision):
            if cache is not None:
                first, state = cache.take(prompts[0], context)
            if not first:
                state = self._stepping.start(len(prompts), self.attending(settings))
        log_probs: Tensor | None = None
        for begin in range(first, ids.shape[1], READ_AT_ONCE):
            check_stop(stop_asked)
            part = ids[:, begin : begin + READ_AT_ONCE].to(self.device)
            real = (lengths - begin).clamp(min=0, max=part.shape[1])
            whole = bool((real == part.shape[1]).all())
            with inference(self.device, self.precision):
                found, state = self._stepping.step(part, state, None if whole else real.to(self.device))
                ends_here = ((real > 0) & (lengths <= begin + part.shape[1])).to(self.device)
                log_probs = found if log_probs is None else torch.where(ends_here[:, None], found, log_probs)
                if cache is not None and part.shape[1] == READ_AT_ONCE:
                    cache.put(prompts[0][: begin + READ_AT_ONCE], context, state)
            if begin + READ_AT_ONCE < ids.shape[1]:
                dropped.update((yield []) or ())
        assert log_probs is not None  # because no prompt is empty
        return log_probs, state

    def attending(self, settings: GenerationSettings) -> Any:
        """Return the context settings of the model during generation or scoring; None: it attends to all it has read.

        Raises: RequestError: memory_len is set for a model without memory.
        """
        own = getattr(self.model.config, "attending", None)
        if own is None:
            if settings.memory_len is not None:
                raise RequestError(
                    f"memory_len is {settings.memory_len}, but a {self.model.config.architecture} sees all that it has"
                    " read; leave it out."
                )
            return None
        memory_len = settings.memory_len or own.memory_len or MEMORY_OF_NONE
        return dataclasses.replace(own, memory_len=memory_len, ext_len=0)

    def _choose(
        self, log_probs: Tensor, rows: list[_Row], repetition: Repetition, settings: GenerationSettings, step: int
    ) -> tuple[Tensor, list[float]]:
        """Return the next token of each row, and the model's log-probability of it."""
        scores = log_probs
        if scores.shape[1] > self.vocabulary.vocab_size:
            scores = scores.clone()
            scores[:, self.vocabulary.vocab_size :] = -torch.inf
        banned = list(settings.banned_ids)
        if step < settings.min_new_tokens and self.vocabulary.end_id is not None:
            banned.append(self.vocabulary.end_id)
        if self.vocabulary.begin_id not in (None, self.vocabulary.end_id):
            banned.append(self.vocabulary.begin_id)  # the model only reads this token
        if banned:
            scores = scores.index_fill(1, torch.tensor(banned, device=scores.device), -torch.inf)
        scores = repetition.apply(scores)
        if settings.do_sample:
            numbers = torch.tensor([float(row.random.random()) for row in rows], device=scores.device)
            chosen = draw(scores, numbers, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        else:
            chosen = scores.argmax(-1)
        repetition.add(chosen)
        gained = log_probs.gather(1, chosen[:, None])[:, 0].tolist()
        check_finite(any(map(math.isnan, gained)), step + 1)
        return chosen, gained

    def _take(self, row: _Row, token: int, log_prob: float) -> str:
        """Append a token to a row. Returns: the new text to show."""
        row.ids.append(token)
        row.log_probs.append(log_prob)
        if token == self.vocabulary.end_id:
            row.ended_by = "end"
            return row.ending.finish()
        shown = row.ending.add(self.vocabulary.continuation(row.last, [token]))
        row.last = [token]
        if row.ending.stopped:
            row.ended_by = "stop"
        elif len(row.ids) >= row.most:
            row.ended_by = row.ends
            shown += row.ending.finish()
        return shown


def _top(log_probs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the most probable (id, log-probability) of each row, best first."""
    if not count:
        return [[]] * len(log_probs)
    values, ids = log_probs.topk(min(count, log_probs.shape[1]))
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
