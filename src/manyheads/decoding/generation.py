"""The generation of one batch of continuations, a step at a time, and the states after earlier prompts.

A long prompt is not read twice: a state is a function of the tokens that were read, in parts of equal length, and of
the context settings. It is stored at the end of each full part, under a hash of all tokens so far.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from manyheads.decoding.greedy_and_sampling import Repetition, draw
from manyheads.decoding.inputs_and_results import Stop, check_finite, check_stop, padded
from manyheads.decoding.settings import GenerationSettings, drawing_options, pattern_grammar
from manyheads.errors import RequestError
from manyheads.nn.kernels import policy
from manyheads.seeding import derive_seed

if TYPE_CHECKING:
    from manyheads.decoding.model_runner import ModelRunner
    from manyheads.models.composites import LanguageModel
    from manyheads.models.ensemble import LanguageEnsemble
    from manyheads.text.vocabulary import Vocabulary


class PrefixCache:
    """The most recently used states, up to a size.

    Args:
        max_bytes: size of all states together.
        part_len: tokens of a part; prompts are always read in such parts from their beginning.
    """

    def __init__(self, max_bytes: int, part_len: int) -> None:
        self.max_bytes = max_bytes
        self.part_len = part_len
        self._states: OrderedDict[tuple[str, bytes], tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of the stored states."""
        return self._bytes

    def longest(self, ids: Sequence[int], context: str) -> int:
        """Return how many tokens at the beginning of a prompt need not be read. The last token must always be read.

        Args: context: of the model's context settings, for example their representation.
        """
        return max((end for end, key in self._keys(ids, context) if key in self._states), default=0)

    def take(self, ids: Sequence[int], context: str) -> tuple[int, Any]:
        """Return the number of tokens of the longest stored beginning, and a copy of its state; (0, None): none.

        Args: as for `longest`.
        """
        for end, key in reversed(list(self._keys(ids, context))):
            with self._lock:
                found = self._states.get(key)
                if found is not None:
                    self._states.move_to_end(key)
                    return end, found[0].clone()
        return 0, None

    def put(self, ids: Sequence[int], context: str, state: Any) -> None:
        """Store a copy of the state after these tokens, whose number is a multiple of `part_len`.

        A state that is larger than the cache is not stored; otherwise the least recently used states are deleted to
        make space.
        """
        size = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        key = (context, hashlib.sha256(array("q", ids).tobytes()).digest())
        with self._lock:
            if size > self.max_bytes or key in self._states:
                return
            self._states[key] = state.clone(), size
            self._bytes += size
            while self._bytes > self.max_bytes:
                _, (_, dropped) = self._states.popitem(last=False)
                self._bytes -= dropped

    def _keys(self, ids: Sequence[int], context: str) -> Iterator[tuple[int, tuple[str, bytes]]]:
        """Yield the end and the key of each full part that leaves at least one token to read."""
        digest = hashlib.sha256()
        for end in range(self.part_len, len(ids), self.part_len):
            digest.update(array("q", ids[end - self.part_len : end]).tobytes())
            yield end, (context, digest.digest())


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
    `Continuation`. top: the most probable (id, log-probability) at this position, best first, if asked for. ended: the
    whole continuation, if this is its last token.
    """

    prompt: int
    path: int
    text: str
    id: int
    log_prob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    ended: Continuation | None = None


TextSteps = Generator[list[NewToken], Collection[int] | None, None]
"""A generation, a step at a time: it yields the new tokens of each step, none while prompts are read.

`send` takes prompts that are no longer needed: their rows are removed from the batch before the next step.
"""


class Ending:
    """Receives the bytes of a continuation and stops it at a stop text.

    Args: stops: texts that end the continuation; if several occur, the first in the text counts.

    Attributes:
        stopped: whether a stop text was found.
        text: the text before it so far, without an incomplete character at the end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode("utf-8") for stop in stops]
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, more: bytes, *, may_stop: bool = True) -> str:
        """Add bytes.

        Args: may_stop: whether a stop text that ends in these bytes counts; it may have begun before them.

        Returns: the text to show now, without incomplete characters and without a possible start of a stop text.
        """
        if self.stopped:
            return ""
        before = len(self._held)
        self._held += more
        begins = (self._held.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
        if may_stop and (places := [place for place in begins if place >= 0]):
            self.stopped = True
            return self._show(self._held[: min(places)], final=True)
        kept = max((self._begun(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._show(shown)

    def finish(self) -> str:
        """End the continuation. Returns: the remaining text; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        held, self._held = self._held, b""
        return self._show(held, final=True)

    def _begun(self, stop: bytes) -> int:
        """Return how many of the last bytes are a prefix of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0

    def _show(self, content: bytes, final: bool = False) -> str:
        text = self._decoder.decode(content, final)
        self._parts.append(text)
        return text


READ_AT_ONCE = 512
"""Tokens of a prompt that are read in one call."""

_MEMORY_OF_NONE = 512
_DRAWN = 64
"""Steps for which random numbers are drawn at once, because a GPU waits for each copy from the host."""

_Top = list[tuple[int, float]]


@dataclass
class _Row:
    """One continuation during generation.

    prompt, path: its place in the batch. random: its random stream. last: the last tokens, from which the text of the
    next token is computed. most: maximum number of tokens. ends: the value of
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


class Generation:
    """The continuations of one batch of prompts, `num_return_sequences` of each.

    Args:
        runner: runs the model.
        vocabulary: the model's.
        prompts: ids, as of `Generator.encode_prompts`; at least one.
        settings: options of the batch.
        numbers: of the prompts, for sampling; default 0, 1, 2 ...
        each: settings of each prompt, of which only max_new_tokens, stop and seed are read; default `settings`.
        num_top: number of alternatives of each token.
        cache: of parts of READ_AT_ONCE tokens; only a single prompt is looked up and stored.
        stop_asked: called before each step; if it returns true, SearchStopped is raised.

    Raises: RequestError: a prompt is too long.
    """

    def __init__(
        self,
        runner: ModelRunner[LanguageModel | LanguageEnsemble],
        vocabulary: Vocabulary,
        prompts: Sequence[list[int]],
        settings: GenerationSettings,
        *,
        numbers: Sequence[int] | None,
        each: Sequence[GenerationSettings] | None,
        num_top: int,
        cache: PrefixCache | None,
        stop_asked: Stop | None,
    ) -> None:
        self._runner, self._vocabulary = runner, vocabulary
        self._context = context_settings(runner.model, settings)
        self._settings = settings
        self._filters = {name: getattr(settings, name) for name in drawing_options(GenerationSettings)}
        grammar = pattern_grammar(settings, vocabulary)
        self._grammar = None if grammar is None else grammar.after(prompts, vocabulary)
        self._end_id = vocabulary.line_id if grammar and vocabulary.end_id is None else vocabulary.end_id
        # A space at the end of a prompt is the border of its last word: the next token has a space of its own.
        spaces, self._word_ids = vocabulary.spaced_ids()
        self._at_border = [ids[-1] in spaces and grammar is None for ids in prompts]
        prompts = [ids[:-1] if cut else ids for ids, cut in zip(prompts, self._at_border, strict=True)]
        self._prompts = prompts
        self._wanted = {"logits": True} if settings.repetition_penalty != 1 else {}  # the penalty acts on logits
        self._num_top, self._stop_asked = num_top, stop_asked
        self._cache = cache if len(prompts) == 1 else None
        self._dropped: set[int] = set()
        self._banned: tuple[list[int], Tensor] = [], torch.empty(0)
        self._drawn = torch.empty(0)  # uniform numbers of each row
        self._rows = [
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
        self._repetition = Repetition(
            [prompts[row.prompt][1:] for row in self._rows],  # without the token before the text
            runner.model.config.vocab_size,
            penalty=settings.repetition_penalty,
            ngram_size=settings.no_repeat_ngram_size,
            device=runner.device,
        )

    def _row(self, number: int, prompt: int, path: int, ids: list[int], settings: GenerationSettings) -> _Row:
        """Raises: RequestError: the prompt leaves no space for a token."""
        model, vocabulary = self._runner.model, self._vocabulary
        most, ends = token_limit(model, vocabulary, len(ids), settings)
        if most < 1:
            document_len, max_len = vocabulary.document_len, model.max_len
            limit = f"documents have {document_len:,}" if ends == "end" else f"the model has {max_len:,} positions"
            raise RequestError(
                f"prompt {number + 1} has {len(ids):,} tokens with its beginning, but {limit}; shorten it."
            )
        random = np.random.default_rng(derive_seed(settings.seed, "sample", number, path))
        return _Row(prompt, path, Ending(settings.stop), random, ids, [], [], most, ends)

    def steps(self) -> TextSteps:
        """Return the steps; see `TextSteps`."""
        scores, state = yield from self._read()
        paths = self._settings.num_return_sequences
        with self._runner.inference():
            if paths > 1:
                each = torch.arange(len(self._prompts), device=self._runner.device).repeat_interleave(paths)
                scores, state = scores[each], state.reorder(each)
            scores, state = self._of_unfinished(scores, state)
        step = 0
        while self._rows:
            check_stop(self._stop_asked)
            log_probs = scores.log_softmax(-1) if self._wanted else scores
            chosen = self._choose(scores, step)
            read = self._reading(chosen, log_probs)
            # The next step begins before the tokens are read, unless one of them must be the last of its row.
            late = policy.reads_late(chosen.device) and all(step + 1 < row.most for row in self._rows)
            if late:
                with self._runner.inference():
                    scores, state = self._runner.steps.step(chosen[:, None], state, **self._wanted)
            ids, gained, tops = read()
            check_finite(any(map(math.isnan, gained)), step + 1)
            self._repetition.add(chosen, ids)
            new = [self._append(*one) for one in zip(self._rows, ids, gained, tops, strict=True)]
            step += 1
            self._dropped.update((yield new) or ())
            with self._runner.inference():
                if late:
                    scores, state = self._of_unfinished(scores, state)
                    continue
                chosen, state = self._of_unfinished(chosen, state)
                if self._rows:
                    scores, state = self._runner.steps.step(chosen[:, None], state, **self._wanted)

    def _reading(self, chosen: Tensor, log_probs: Tensor) -> Callable[[], tuple[list[int], list[float], list[_Top]]]:
        """Begin to copy the tokens of a step to the host.

        Returns: a function that waits for the copy, not for later work, and returns each row's token, its
            log-probability and the most probable ones.
        """
        gained, count = log_probs.gather(1, chosen[:, None])[:, 0], self._num_top
        known = log_probs[:, : self._vocabulary.vocab_size]
        best = known.topk(min(count, known.shape[1])) if count else ()
        copies = [x.to("cpu", non_blocking=True) for x in (chosen, gained, *best)]
        wait = policy.waiting_for(chosen.device)

        def read() -> tuple[list[int], list[float], list[_Top]]:
            wait()
            ids, log_probs, *rest = (copy.tolist() for copy in copies)
            tops = [list(zip(*row, strict=True)) for row in zip(*rest[::-1], strict=True)] if rest else [[]] * len(ids)
            return ids, log_probs, tops

        return read

    def _of_unfinished(self, values: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Remove rows that ended, or whose prompt is no longer needed, from the batch.

        Returns: the lines of `values` and the state of the others.
        """
        unfinished = [
            place for place, row in enumerate(self._rows) if row.ended_by is None and row.prompt not in self._dropped
        ]
        if len(unfinished) == len(self._rows):
            return values, state
        self._rows = [self._rows[place] for place in unfinished]
        self._repetition.select(unfinished)
        which = torch.tensor(unfinished, device=self._runner.device, dtype=torch.int64)
        self._drawn = self._drawn[which] if len(self._drawn) else self._drawn
        return values[which], state.reorder(which) if unfinished else None

    def _read(self) -> Generator[list[NewToken], Collection[int] | None, tuple[Tensor, Any]]:
        """Return the log-probabilities, or logits, of the token after each prompt, and the state.

        Long prompts are read in parts, with a step after each but the last.
        """
        ids, lengths = padded(self._prompts)
        device, context = self._runner.device, repr(self._context)
        first = 0
        with self._runner.inference():
            if self._cache is not None:
                first, state = self._cache.take(self._prompts[0], context)
            if not first:
                state = self._runner.steps.start(len(self._prompts), self._context)
        scores: Tensor | None = None
        for begin in range(first, ids.shape[1], READ_AT_ONCE):
            check_stop(self._stop_asked)
            part = ids[:, begin : begin + READ_AT_ONCE].to(device)
            real = (lengths - begin).clamp(min=0, max=part.shape[1])
            whole = bool((real == part.shape[1]).all())
            with self._runner.inference():
                real_on_device = None if whole else real.to(device)
                found, state = self._runner.steps.step(part, state, real_on_device, **self._wanted)
                ends_here = ((real > 0) & (lengths <= begin + part.shape[1])).to(device)
                scores = found if scores is None else torch.where(ends_here[:, None], found, scores)
                if self._cache is not None and part.shape[1] == READ_AT_ONCE:
                    self._cache.put(self._prompts[0][: begin + READ_AT_ONCE], context, state)
            if begin + READ_AT_ONCE < ids.shape[1]:
                self._dropped.update((yield []) or ())
        assert scores is not None  # because no prompt is empty
        return scores, state

    def _choose(self, scores: Tensor, step: int) -> Tensor:
        """Return the next token of each row. scores: logits or log-probabilities."""
        settings, vocabulary = self._settings, self._vocabulary
        if scores.shape[1] > vocabulary.vocab_size:
            scores = scores.clone()
            scores[:, vocabulary.vocab_size :] = -torch.inf
        banned = list(settings.banned_ids)
        if step < settings.min_new_tokens and vocabulary.end_id is not None:
            banned.append(vocabulary.end_id)
        if vocabulary.begin_id not in (None, vocabulary.end_id):
            banned.append(vocabulary.begin_id)  # the model only reads this token
        if banned:
            if banned != self._banned[0]:
                self._banned = banned, torch.tensor(banned, device=scores.device)
            scores = scores.index_fill(1, self._banned[1], -torch.inf)
        if not step and any(self._at_border):
            scores = self._begin_words(scores)
        if self._grammar is not None:
            scores = self._matching(scores, step)
        scores = self._repetition.apply(scores)
        if not settings.do_sample:
            return scores.argmax(-1)
        if step % _DRAWN == 0:
            drawn = np.stack([row.random.random(_DRAWN) for row in self._rows])
            self._drawn = policy.sent(torch.from_numpy(drawn.astype(np.float32)), scores.device)
        return draw(scores, self._drawn[:, step % _DRAWN], **self._filters)

    def _matching(self, scores: Tensor, step: int) -> Tensor:
        """Allow only the tokens that the grammar permits."""
        history = torch.tensor([row.ids for row in self._rows]).view(len(self._rows), step)
        prompts, room = torch.tensor([[row.prompt, row.most - step] for row in self._rows]).unbind(1)
        assert self._grammar is not None
        allowed = policy.sent(self._grammar.allowed(history.long(), prompts, room), scores.device)
        scores = scores.clone()
        scores[:, : allowed.size(1)].masked_fill_(~allowed, -torch.inf)
        return scores

    def _begin_words(self, scores: Tensor) -> Tensor:
        """Allow only the beginning of a word, or the end of a line or document, where the prompt ended in a space."""
        ends = {self._vocabulary.end_id, self._vocabulary.line_id} - {None}
        inside = torch.ones_like(scores[0], dtype=torch.bool)
        inside[[*self._word_ids, *ends]] = False
        at_border = torch.tensor([self._at_border[row.prompt] for row in self._rows], device=scores.device)
        return scores.masked_fill(at_border[:, None] & inside, -torch.inf)

    def _append(self, row: _Row, token: int, log_prob: float, top: list[tuple[int, float]]) -> NewToken:
        """Append a token to a row."""
        row.ids.append(token)
        row.log_probs.append(log_prob)
        if token == self._end_id:
            row.ended_by = "end"
            text = row.ending.finish()
        else:
            may_stop = len(row.ids) > self._settings.min_new_tokens
            new = self._vocabulary.continuation(row.last, [token])
            if len(row.ids) == 1 and self._at_border[row.prompt]:
                new = new.removeprefix(b" ")  # the prompt has it
            text = row.ending.add(new, may_stop=may_stop)
            # The text of a token without bytes depends on the tokens before it, so these are kept.
            row.last = [token] if self._vocabulary.decode_bytes([token]) else [*row.last, token]
            if row.ending.stopped:
                row.ended_by = "stop"
            elif len(row.ids) >= row.most:
                row.ended_by = row.ends
                text += row.ending.finish()
        ended = None
        if row.ended_by is not None:
            ended = Continuation(row.ending.text, row.ids, row.log_probs, row.ended_by)
        return NewToken(row.prompt, row.path, text, token, log_prob, top, ended)


def token_limit(
    model: LanguageModel | LanguageEnsemble, vocabulary: Vocabulary, prompt_len: int, settings: GenerationSettings
) -> tuple[int, Literal["end", "length"]]:
    """Return the maximum number of tokens after a prompt, and the value of `ended_by` there.

    The number is less than 1 if the prompt is too long.
    """
    most, document_len = settings.max_new_tokens, vocabulary.document_len
    if model.max_len is not None:  # the last generated token is not read again
        most = min(most, model.max_len - prompt_len + 1)
    if document_len and document_len - prompt_len + 1 <= most:
        return document_len - prompt_len + 1, "end"
    return most, "length"


def context_settings(model: LanguageModel | LanguageEnsemble, settings: GenerationSettings) -> Any:
    """Return the context settings of a model during generation or scoring; None: it attends to all it has read.

    Of an ensemble, they are a tuple of those of each model.

    Raises: RequestError: memory_len is set for a model without memory.
    """
    each = getattr(model.config, "each", None)
    return _context_of(model.config, settings) if each is None else tuple(_context_of(one, settings) for one in each)


def _context_of(config: Any, settings: GenerationSettings) -> Any:
    own = getattr(config, "attending", None)
    if own is None:
        if settings.memory_len is not None:
            raise RequestError(
                f"memory_len is {settings.memory_len}, but a {config.architecture} sees all that it has"
                " read; leave it out."
            )
        return None
    memory_len = settings.memory_len or own.memory_len or _MEMORY_OF_NONE
    return replace(own, memory_len=memory_len, ext_len=0)
