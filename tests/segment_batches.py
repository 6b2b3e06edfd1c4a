"""Batches of segments for tests of language models."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.data.language.segments import SegmentBatch
from manyheads.errors import ShapeError

VOCAB = 23


def ids(lanes: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (lanes, length), generator=torch.Generator().manual_seed(seed))


def batch_of(tokens: Tensor, lengths: list[int] | None = None, **changes: Any) -> SegmentBatch:
    """tokens (lanes, len + 1): the last column is only a target."""
    lanes, length = tokens.shape[0], tokens.shape[1] - 1
    given = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "lengths": torch.tensor(lengths or [length] * lanes),
        "resets": torch.zeros(lanes, dtype=torch.bool),
        "sample_ids": torch.arange(lanes),
    }
    return SegmentBatch(**{**given, **changes})


def ids_are_a_batch(model: Any) -> None:
    """`model(ids, state)` is the Output of the batch of these ids."""
    tokens = ids(3, 9)
    states: list[Any] = [None, None]
    for part in tokens.split([5, 4], dim=1):
        outputs = [model(batch_of(part), states[0]), model(part, states[1])]
        for wanted, found in zip(*outputs, strict=True):
            torch.testing.assert_close(*(pytree.tree_leaves(one) for one in (found, wanted)), rtol=0, atol=0)
        states = [output.state for output in outputs]
    for wrong in (tokens[:, :1], tokens.float(), tokens[0]):
        with pytest.raises(ShapeError, match=r"ids are whole numbers, \(rows, at least 2\)"):
            model(wrong)


class PaddedRows:
    """Rows of unlike lengths, one of them empty, in one batch with padding.

    Args: side: where the padding stands: `right`, `left`, or `anywhere`.
    """

    def __init__(self, side: Literal["right", "left", "anywhere"]) -> None:
        self._side, self._lengths, width = side, [9, 1, 0, 13, 4], 14
        self._rows = [ids(1, length, seed=row)[0] for row, length in enumerate(self._lengths)]
        self._tokens, self._mask = torch.full((5, width), 17), torch.zeros(5, width, dtype=torch.int64)
        for row, length in enumerate(self._lengths):
            places = torch.arange(length) if side == "right" else torch.arange(width - length, width)
            if side == "anywhere":
                places = torch.randperm(width, generator=torch.Generator().manual_seed(row))[:length].sort().values
            self._tokens[row, places], self._mask[row, places] = self._rows[row], 1

    def together(self, model: Any) -> Tensor:
        """Log-probabilities at the real tokens, of the whole batch."""
        given = {"lengths": torch.tensor(self._lengths)} if self._side == "right" else {"attention_mask": self._mask}
        return model.log_probs(self._tokens, **given)[self._mask.bool()]  # type: ignore[no-any-return]

    def alone(self, model: Any) -> Tensor:
        """The same, row by row without padding."""
        return torch.cat([model.log_probs(row[None])[0] for row in self._rows if len(row)])
