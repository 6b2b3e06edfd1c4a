"""Restriction of a parser's outputs to trees over exactly the words of the sentence.

Papers: with their amounts of training data none needs it (Vinyals et al. 2015, sec. 3.2, found 1.5% malformed trees). A
parser trained on a few thousand sentences produces malformed trees for most sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.extras.parsing.trees import MAX_DEPTH

if TYPE_CHECKING:
    from manyheads.decoding.search_problem import SentenceGrammar
    from manyheads.extras.parsing.trees import ParsingSettings
    from manyheads.text.tokenizer import Tokenizer

_PIECE, _OPEN, _CLOSE, _PLACE = range(4)


class TreeGrammar:
    """Outputs are trees with one root constituent, no empty brackets and matching labels, over exactly all words.

    If words are generated, the tokens after a word's tag are those of the word. Such an output is well-formed for
    `bracketing.restore`, unless the length limit does not even allow one constituent over all words. Otherwise no
    bracket is opened that could not be closed within the limit.

    Args:
        tokenizer: the parser's tokenizer.
        settings: the parts of a tree in its targets.
        begins_word: for each id whether it is the first piece of a word in a sentence.
    """

    def __init__(self, tokenizer: Tokenizer, settings: ParsingSettings, begins_word: Sequence[bool]) -> None:
        vocab_size = tokenizer.vocab_size
        kinds = torch.full((vocab_size,), _PIECE)
        closes = torch.full((vocab_size,), -1)
        outermost = torch.zeros(vocab_size, dtype=torch.bool)
        symbols = dict(zip(tokenizer.symbols, tokenizer.symbol_ids, strict=True))
        for symbol, index in symbols.items():
            if symbol.startswith("("):
                closing = symbols.get(f"){symbol[1:]}")
                outermost[index] = closing is not None and (symbol != "(" or settings.root is None)
                kinds[index], closes[index] = _OPEN, -1 if closing is None else closing
            else:
                kinds[index] = _CLOSE if symbol.startswith(")") else _PLACE
        inner = outermost.clone()
        if "(" in symbols:
            inner[symbols["("]] = False
        self._kinds, self._closes, self._openings = kinds, closes, torch.stack([outermost, inner])
        self._begins = torch.tensor(begins_word)
        self._writes_words = settings.words == "write"
        self._eos_id = tokenizer.eos_id

    def of(self, source: Tensor, source_lengths: Tensor) -> SentenceGrammar:
        device = source.device
        inside = torch.arange(source.size(1), device=device) < source_lengths[:, None] - 1
        begins = self._begins.to(device)[source] & inside
        return _TreeSentences(
            kinds=self._kinds.to(device),
            closes=self._closes.to(device),
            openings=self._openings.to(device),
            source=source,
            num_words=begins.sum(1),
            # After k words, the first piece of word k is next; after all words, EOS.
            ends=_first_pieces(begins, source_lengths - 1) if self._writes_words else None,
            eos_id=self._eos_id,
        )


def _first_pieces(begins: Tensor, num_pieces: Tensor) -> Tensor:
    """Return the index of the first piece of each word, and the number of pieces after the last. (sentences, source_len
    + 1)
    """
    places = torch.arange(begins.size(1), device=begins.device).expand_as(begins)
    found = torch.where(begins, places, num_pieces[:, None]).sort(1).values
    return torch.cat([found, num_pieces[:, None]], 1)


@dataclass(frozen=True, kw_only=True)
class _TreeSentences:
    """Shape: kinds, closes (vocab_size,), openings (2, vocab_size): of the outermost bracket and of others; source
    (sentences, source_len), num_words (sentences,), ends (sentences, source_len + 1) or None."""

    kinds: Tensor
    closes: Tensor
    openings: Tensor
    source: Tensor
    num_words: Tensor
    ends: Tensor | None
    eos_id: int

    def allowed(self, history: Tensor, sentence: Tensor, room: Tensor) -> Tensor:
        rows, length = history.shape
        kinds = self.kinds[history]
        steps = (kinds == _OPEN).long() - (kinds == _CLOSE).long()
        depths = steps.cumsum(1)
        depth = depths[:, -1] if length else sentence.new_zeros(rows)
        words_done = (kinds == _PLACE).sum(1)
        words_left = self.num_words[sentence] - words_done
        least = words_left + depth + 1  # remaining words, closing brackets, EOS
        allowed = torch.zeros(rows, self.kinds.numel(), dtype=torch.bool, device=history.device)
        within = torch.zeros_like(depth, dtype=torch.bool)
        if self.ends is not None:
            ends = self.ends[sentence]
            pieces_done = (kinds == _PIECE).sum(1)
            within = pieces_done < ends.gather(1, words_done.clamp(max=ends.size(1) - 1)[:, None])[:, 0]
            least = least + ends[:, -1] - pieces_done
            next_piece = self.source[sentence].gather(1, pieces_done.clamp(max=self.source.size(1) - 1)[:, None])
            allowed.scatter_(1, next_piece, within[:, None])
        begun = depth > 0
        top = length == 0
        may_open = ~within & (words_left > 0) & (begun | top) & (depth < MAX_DEPTH) & ((room >= least + 2) | top)
        allowed |= may_open[:, None] & self.openings[begun.long()]
        may_place = ~within & (words_left > 0) & begun
        allowed |= may_place[:, None] & (self.kinds == _PLACE)
        if top:
            return allowed
        opened = (steps > 0) & (depths == depth[:, None])
        innermost = (opened * torch.arange(1, length + 1, device=history.device)).argmax(1, keepdim=True)
        closing = self.closes[history.gather(1, innermost)]  # (rows, 1)
        may_close = ~within & begun & (kinds[:, -1] != _OPEN) & ((depth > 1) | (words_left == 0))
        is_closing = torch.arange(self.kinds.numel(), device=history.device) == closing
        allowed |= may_close[:, None] & is_closing
        allowed[:, self.eos_id] = ~within & (depth == 0)
        return allowed
