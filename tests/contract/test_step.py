"""Token by token with a state, against the whole prefix at once."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree


def full(batch: Any) -> Any:
    return lambda model: model.log_probs(batch.source, batch.source_lengths, batch.target_input)


@pytest.mark.parametrize("sizes", [[1] * 7, [3, 4], [7], [2, 1, 4]], ids=str)
def test_cached_steps_are_the_full_forward(subject: Any, precision: Any, make_batch: Any, sizes: list[int]) -> None:
    """Steps of one token and of several; each returns what follows its last token."""
    model, batch = subject.build(), make_batch([5, 2, 8], [8, 8, 8])
    ends = torch.tensor(sizes).cumsum(0) - 1

    def stepwise(m: Any) -> torch.Tensor:
        state = m.start(batch.source, batch.source_lengths)
        said = []
        for tokens in batch.target_input.split(sizes, dim=1):
            log_probs, state = m.step(tokens, state)
            assert log_probs.dtype in (torch.float32, torch.float64)
            said.append(log_probs)
        return torch.stack(said, dim=1)

    precision.assert_same(model, lambda m: full(batch)(m)[:, ends], stepwise)


def test_reorder_follows_the_rows(subject: Any, precision: Any, make_batch: Any) -> None:
    """One row a sentence, spread over three beams, shuffled, one sentence ended, then narrowed again."""
    model, batch = subject.build(), make_batch([5, 2, 8], [3, 3, 3])
    generator = torch.Generator().manual_seed(3)
    choices = [
        torch.tensor([[0, 0, 0], [1, 1, 1], [2, 2, 2]]),  # 1 beam -> 3
        torch.tensor([[2, 0, 0], [3, 5, 4], [7, 8, 6]]),  # shuffled within each sentence
        torch.tensor([[1, 0, 1], [8, 6, 6]]),  # the second sentence has ended
        torch.tensor([[2, 0], [5, 3]]),  # 3 beams -> 2
    ]
    tokens = [torch.randint(4, 23, (rows, 1), generator=generator) for rows in (3, 9, 9, 6, 4)]
    sentences, histories = [0, 1, 2], [[int(t)] for t in tokens[0]]
    for rows, new in zip(choices, tokens[1:], strict=True):
        flat = rows.flatten().tolist()
        sentences = [sentences[r] for r in flat]
        histories = [[*histories[r], int(t)] for r, t in zip(flat, new, strict=True)]

    def whole(m: Any) -> torch.Tensor:
        return m.log_probs(batch.source[sentences], batch.source_lengths[sentences], torch.tensor(histories))[:, -1]

    def stepwise(m: Any) -> torch.Tensor:
        said, state = m.step(tokens[0], m.start(batch.source, batch.source_lengths))
        for rows, new in zip(choices, tokens[1:], strict=True):
            said, state = m.step(new, state.reorder(rows))
        return said

    precision.assert_same(model, whole, stepwise)


def test_a_clone_is_a_branch(subject: Any, make_batch: Any) -> None:
    """Both branches go on as if the other were not there."""
    model, batch = subject.build(), make_batch([5, 2], [4, 4])
    left, right = torch.tensor([[7], [8]]), torch.tensor([[9], [10]])
    with torch.no_grad():
        _, state = model.step(batch.target_input, model.start(batch.source, batch.source_lengths))
        branch = state.clone()
        said_left, _ = model.step(left, state)
        said_right, after = model.step(right, branch)
        again, _ = model.step(left, after)
        for tokens, said in (([left], said_left), ([right], said_right), ([right, left], again)):
            prefix = torch.cat([batch.target_input, *tokens], dim=1)
            whole = model.log_probs(batch.source, batch.source_lengths, prefix)[:, -1]
            torch.testing.assert_close(said, whole, atol=1e-5, rtol=1e-5)


def test_the_state_is_a_pytree_of_tensors(subject: Any, make_batch: Any) -> None:
    """Taken apart and put together it goes on the same; modules remember nothing."""
    model, batch = subject.build(), make_batch([5, 2], [4, 4])
    with torch.no_grad():
        _, state = model.step(batch.target_input, model.start(batch.source, batch.source_lengths))
        leaves, spec = pytree.tree_flatten(state)
        assert leaves
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        again = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        assert type(again) is type(state)
        names = {name for name, _ in model.named_buffers()}
        new = torch.tensor([[7], [8]])
        assert torch.equal(model.step(new, state)[0], model.step(new, again)[0])
    assert {name for name, _ in model.named_buffers()} == names


def test_a_finished_sentence_leaves_the_others_alone(subject: Any, make_batch: Any) -> None:
    model, batch = subject.build(), make_batch([5, 2, 7], [4, 4, 4])
    with torch.no_grad():
        _, state = model.step(batch.target_input, model.start(batch.source, batch.source_lengths))
        said, _ = model.step(torch.tensor([[7], [8]]), state.reorder(torch.tensor([[0], [2]])))
        prefix = torch.cat([batch.target_input[[0, 2]], torch.tensor([[7], [8]])], dim=1)
        whole = model.log_probs(batch.source[[0, 2]], batch.source_lengths[[0, 2]], prefix)[:, -1]
    torch.testing.assert_close(said, whole, atol=1e-5, rtol=1e-5)
