"""Contracts of language models that read one segment at a time: causality, any length, padding, cached steps."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from segment_batches import VOCAB, PaddedRows, batch_of, ids, ids_are_a_batch
from torch import Tensor
from torch.utils import _pytree as pytree

CHUNK = 4
"""Of the Reformer's debug preset."""


def test_shapes(memoryless: Any, precision: Any) -> None:
    model, batch = memoryless.build(), batch_of(ids(3, 8), [7, 4, 0])
    with precision.on():
        log_probs = model.log_probs(batch.tokens, batch.lengths)
        output = model(batch)
        losses, _ = model.token_losses(batch)
    assert log_probs.shape == (3, 7, VOCAB)
    assert log_probs.dtype == output.loss_sum.dtype == losses.dtype == torch.float32
    assert output.num_tokens == 11
    torch.testing.assert_close(losses.sum(), output.nll_sum, atol=2e-2, rtol=1e-2)
    counts = torch.arange(7) < batch.lengths[:, None]
    wanted = F.nll_loss(log_probs[counts], batch.targets[counts], reduction="none")
    torch.testing.assert_close(losses[counts], wanted, atol=2e-2 if precision.name == "bf16" else 1e-5, rtol=1e-5)


def test_tensors_in_place_of_a_batch(memoryless: Any) -> None:
    ids_are_a_batch(memoryless.build())


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_no_leak_from_the_future(memoryless: Any, training: bool) -> None:
    """Whatever follows position t, what is said up to t stays as it is."""
    model = memoryless.without_dropout().double().train(training)
    tokens = ids(2, 3 * CHUNK + 2)
    with torch.no_grad():
        before = model.log_probs(tokens)
        for t in range(tokens.shape[1] - 1):
            for shift in (3, 11):
                changed = tokens.clone()
                changed[:, t + 1 :] = (changed[:, t + 1 :] + shift) % VOCAB
                after = model.log_probs(changed)
                torch.testing.assert_close(after[:, : t + 1], before[:, : t + 1], atol=1e-12, rtol=0.0)
                assert not torch.allclose(after[:, t + 1 :], before[:, t + 1 :], atol=1e-3)


def test_any_length(memoryless: Any) -> None:
    """From one token to three chunks and one more: a prefix says what the whole says of it, and it trains."""
    model, tokens = memoryless.without_dropout(), ids(2, 3 * CHUNK + 2)
    lengths = range(1, 3 * CHUNK + 2)
    with torch.no_grad():
        for training in (False, True):
            model.train(training)
            whole = model.log_probs(tokens)
            for length in lengths:
                said = model.log_probs(tokens[:, :length])
                torch.testing.assert_close(said, whole[:, :length], atol=1e-5, rtol=1e-5)
    for length in lengths:
        model.zero_grad()
        output = model(batch_of(tokens[:, : length + 1]))
        output.loss_sum.backward()
        assert output.loss_sum.isfinite()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
        assert float(model.head.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("side", ["right", "left", "anywhere"])
def test_padding_changes_nothing(memoryless: Any, precision: Any, side: Any) -> None:
    """Rows of unlike lengths, each as if it were alone; a row may have nothing at all."""
    model = memoryless.build()
    rows = PaddedRows(side)
    precision.assert_same(model, rows.alone, rows.together)


def test_cached_is_full(memoryless: Any, precision: Any) -> None:
    """Wherever a text is cut."""
    model, tokens = memoryless.build(), ids(3, 19)

    def whole(m: Any) -> Tensor:
        return m.log_probs(tokens)  # type: ignore[no-any-return]

    def cut(sizes: list[int], m: Any) -> Tensor:
        state, said = m.start(3), []
        for part in tokens.split(sizes, dim=1):
            log_probs, state = m.read(part, None, state)
            said.append(log_probs)
        return torch.cat(said, dim=1)

    cuts = ([19], [1] * 19, [7, 1, 1, 6, 1, 3], [1, 9, 9], [0, 5, 0, 14])
    precision.assert_same(model, whole, *(partial(cut, sizes) for sizes in cuts))


def test_prompts_of_unlike_lengths_step_together(memoryless: Any, precision: Any) -> None:
    """What a search and a generator do: a batch of prompts, then a token each; rows swap places, one is forgotten."""
    model = memoryless.build()
    prompts, lengths, more = ids(4, 11), [11, 1, 6, 4], ids(4, 4, seed=5)
    order = torch.tensor([[2], [0], [2], [3]])

    def together(m: Any) -> Tensor:
        said, state = m.step(prompts, m.start(4), torch.tensor(lengths))
        found = [said[order.flatten()]]
        state = state.reorder(order)
        for t in range(2):
            said, state = m.step(more[:, t : t + 1], state)
            found.append(said)
        state = state.reset(torch.tensor([False, True, False, False]))
        for t in range(2, 4):
            said, state = m.step(more[:, t : t + 1], state)
            found.append(said)
        return torch.stack(found, dim=1)

    def alone(m: Any) -> Tensor:
        rows = []
        for row, old in enumerate(order.flatten().tolist()):
            tokens, found = prompts[old, : lengths[old]], []
            for t in range(5):
                found.append(m.log_probs(tokens[None])[0, -1])
                tokens = tokens[:0] if row == 1 and t == 2 else tokens
                tokens = torch.cat([tokens, more[row, t : t + 1]]) if t < 4 else tokens
            rows.append(torch.stack(found))
        return torch.stack(rows)

    precision.assert_same(model, alone, together)


def test_a_clone_is_a_branch(memoryless: Any) -> None:
    model, tokens, left, right = memoryless.build(), ids(2, 9), ids(2, 5, seed=3), ids(2, 5, seed=4)
    with torch.no_grad():
        _, state = model.read(tokens, None, model.start(2))
        branch = state.clone()
        for part, one in ((left, state), (right, branch)):
            said, _ = model.read(part, None, one)
            wanted = model.log_probs(torch.cat([tokens, part], dim=1))[:, 9:]
            torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("projected", [False, True])
def test_the_state_is_a_pytree_of_tensors(memoryless: Any, projected: bool) -> None:
    """Taken apart and put together it goes on the same; modules remember nothing."""
    model, tokens = memoryless.build(), ids(2, 6)
    names = {name for name, _ in model.named_buffers()}
    with torch.no_grad():
        _, state = model.read(tokens, None, model.start(2, projected=projected))
        leaves, spec = pytree.tree_flatten(state)
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        again = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        assert torch.equal(model.read(tokens, None, state)[0], model.read(tokens, None, again)[0])
    assert {name for name, _ in model.named_buffers()} == names


def test_degenerate_rows_stay_finite(memoryless: Any, precision: Any) -> None:
    """Nothing but padding, single tokens: finite values and gradients, with and without a cache."""
    model = memoryless.build().train()
    for lengths in ([0, 0], [1, 0], [5, 0], [1, 6]):
        with precision.on():
            output = model(batch_of(ids(2, 7), lengths))
        output.loss_sum.backward()
        assert output.loss_sum.isfinite()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    state = model.start(2)
    for lengths in ([0, 0], [1, 0], [0, 0], [3, 0], [0, 2]):
        with torch.no_grad(), precision.on():
            said, state = model.read(ids(2, 3), torch.tensor(lengths), state)
        assert said.isfinite().all()


def test_no_tokens_and_no_lanes(memoryless: Any) -> None:
    model = memoryless.build()
    assert model.log_probs(ids(2, 0)).shape == (2, 0, VOCAB)
    with torch.no_grad():
        assert model.log_probs(ids(0, 3)).shape == (0, 3, VOCAB)


@pytest.mark.one_in(2, "learned by heart")
@pytest.mark.first_variant
def test_one_batch_is_learned_by_heart(memoryless: Any, precision: Any) -> None:
    """And written again from the cache. A model that hashes has other hashes at every step."""
    model, tokens = memoryless.without_dropout().train(), ids(2, 13)
    tokens[:, 0] = torch.tensor([3, 4])
    batch, state = batch_of(tokens), model.start(2, projected=False)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    num_steps = 100
    for step in range(num_steps):
        for group in optimiser.param_groups:  # hashes change with every step, so that only small steps settle
            group["lr"] = 5e-3 * (1 - step / num_steps)
        optimiser.zero_grad()
        with precision.on():
            output = model(batch, state)
        state = output.state
        (output.loss_sum / output.num_tokens).backward()
        optimiser.step()
    model.eval()
    with torch.no_grad(), precision.on():
        # Rotations change with every step, and evaluation's were not among them: a few tokens may stay unsure.
        assert model(batch).nll_sum / 24 < 0.5
        cache, said = model.start(2), []
        for token in tokens[:, :-1].split(1, dim=1):
            log_probs, cache = model.step(token, cache)
            said.append(log_probs.argmax(-1))
    assert (torch.stack(said, dim=1) == tokens[:, 1:]).sum() >= 21
