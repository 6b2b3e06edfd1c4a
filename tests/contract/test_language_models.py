"""What every language model must hold: causality, memory, padding, loss, gradients, generation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from segment_batches import VOCAB, batch_of, ids, ids_are_a_batch
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.models.transformer_xl.config import Attending

FORMS = pytest.mark.parametrize("projected", [False, True], ids=["hidden states", "keys and values"])


def looking(subject: Any, memory_len: int, **changes: Any) -> Attending:
    """As the subject looks back, with another memory."""
    config = subject.config
    given = {"clamp_len": config.clamp_len, "same_length": config.same_length, **changes}
    return Attending(memory_len=memory_len, **given)


def read(model: Any, tokens: Tensor, sizes: list[int], state: Any) -> Tensor:
    """Log-probabilities of segments in a row."""
    said = []
    for segment in tokens.split(sizes, dim=1):
        log_probs, state = model.read(segment, None, state)
        said.append(log_probs)
    return torch.cat(said, dim=1)


def test_shapes(language_model: Any, precision: Any) -> None:
    model, batch = language_model.build(), batch_of(ids(3, 8), [7, 4, 0])
    with precision.on():
        log_probs = model.log_probs(batch.tokens, batch.lengths)
        output = model(batch)
        losses, _ = model.token_losses(batch)
    assert log_probs.shape == (3, 7, VOCAB)
    assert log_probs.dtype == output.loss_sum.dtype == output.nll_sum.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 7), atol=1e-4, rtol=0.0)
    assert output.num_tokens == batch.num_target_tokens() == 11
    assert output.loss_sum.requires_grad
    assert not output.nll_sum.requires_grad
    assert losses.shape == (3, 7)


def test_tensors_in_place_of_a_batch(language_model: Any) -> None:
    ids_are_a_batch(language_model.build())


def test_no_leak_from_the_future(language_model: Any, precision: Any) -> None:
    """Whatever follows position t, what is said up to t stays as it is, to the bit; with a memory before it, too."""
    model, tokens, past = language_model.build(), ids(2, 7), ids(2, 5, seed=1)

    def say(tokens: Tensor) -> Tensor:
        _, state = model.read(past, None, model.start(2, looking(language_model, 4), projected=False))
        return model.read(tokens, None, state)[0]  # type: ignore[no-any-return]

    with torch.no_grad(), precision.on():
        before = say(tokens)
        for t in range(6):
            changed = tokens.clone()
            changed[:, t + 1 :] = (changed[:, t + 1 :] + 5) % VOCAB
            after = say(changed)
            assert torch.equal(after[:, : t + 1], before[:, : t + 1])
            assert not torch.allclose(after[:, t + 1 :], before[:, t + 1 :], atol=1e-3)


@FORMS
@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 8, 2, 1]], ids=str)
def test_segments_with_memory_are_one_pass(language_model, precision, projected, sizes):
    """A memory that covers the past: where a text is cut makes no difference."""
    model, tokens = language_model.build(), ids(2, 12)
    attending = looking(language_model, 12)

    def whole(m: Any) -> Tensor:
        return m.read(tokens, None, m.start(2, attending, projected=False))[0]  # type: ignore[no-any-return]

    def cut(m: Any) -> Tensor:
        return read(m, tokens, sizes, m.start(2, attending, projected=projected))

    precision.assert_same(model, whole, cut)


@pytest.mark.parametrize("memory_len", [0, 1, 5])
def test_both_forms_of_memory_say_the_same(language_model: Any, precision: Any, memory_len: int) -> None:
    """Also where the memory is short and has rolled many times."""
    model, tokens = language_model.build(), ids(2, 40)
    attending = looking(language_model, memory_len)
    sizes = [1, 5, 2, 1, 1, 1, 7, 1, 1, 10, 1, 1, 1, 1, 1, 5]

    def as_hidden(m: Any) -> Tensor:
        return read(m, tokens, sizes, m.start(2, attending, projected=False))

    def as_keys(m: Any) -> Tensor:
        return read(m, tokens, sizes, m.start(2, attending))

    precision.assert_same(model, as_hidden, as_keys)


@FORMS
def test_tokens_one_at_a_time_are_the_segment(language_model: Any, precision: Any, projected: bool) -> None:
    """`step` with one token and with several; each returns what follows its last token."""
    model, tokens = language_model.build(), ids(3, 12)
    attending = looking(language_model, 12)

    def whole(m: Any) -> Tensor:
        return m.read(tokens, None, m.start(3, attending, projected=False))[0][:, [4, *range(5, 12)]]  # type: ignore[no-any-return]

    def stepwise(m: Any) -> Tensor:
        said, state = m.step(tokens[:, :5], m.start(3, attending, projected=projected))
        found = [said]
        for t in range(5, 12):
            said, state = m.step(tokens[:, t : t + 1], state)
            assert said.dtype in (torch.float32, torch.float64)
            found.append(said)
        return torch.stack(found, dim=1)

    precision.assert_same(model, whole, stepwise)


@FORMS
def test_context_read_again_is_no_other_than_memory(language_model: Any, precision: Any, projected: bool) -> None:
    """With ext_len, the end of a segment is the beginning of the next, and memory ends before it."""
    model, tokens = language_model.build(), ids(2, 13)
    plain, extended = looking(language_model, 13), looking(language_model, 13, ext_len=3)

    def whole(m: Any) -> Tensor:
        return m.read(tokens, None, m.start(2, plain, projected=False))[0]  # type: ignore[no-any-return]

    def cut(m: Any) -> Tensor:
        state, said = m.start(2, extended, projected=projected), []
        for first, last in ((0, 5), (5, 9), (9, 13)):
            begin = max(0, first - 3)
            log_probs, state = m.read(tokens[:, begin:last], None, state)
            assert state.columns == last - 3
            said.append(log_probs[:, first - begin :])
        return torch.cat(said, dim=1)

    precision.assert_same(model, whole, cut)


@pytest.mark.parametrize(
    ("side", "projected"), [("right", False), ("right", True), ("left", True), ("anywhere", False)]
)
def test_padding_changes_nothing(language_model: Any, precision: Any, projected: bool, side: str) -> None:
    """Rows of unlike lengths, segment after segment, each as if it were alone; a row may have nothing new at all."""
    model = language_model.build()
    lengths = [[5, 2, 0, 4], [1, 6, 3, 0], [4, 4, 4, 4], [0, 1, 6, 2]]
    attending = looking(language_model, 5)
    rows = [ids(1, sum(step[row] for step in lengths), seed=row)[0] for row in range(4)]
    counts = [[sum(step[row] for step in lengths[:i]) for row in range(4)] for i in range(len(lengths) + 1)]

    def placed(index: int) -> tuple[Tensor, Tensor]:
        width = max(lengths[index]) + 1
        tokens, mask = torch.full((4, width), 17), torch.zeros(4, width, dtype=torch.int64)
        for row, length in enumerate(lengths[index]):
            part = rows[row][counts[index][row] : counts[index + 1][row]]
            places = torch.arange(length) if side == "right" else torch.arange(width - length, width)
            if side == "anywhere":
                places = torch.randperm(width, generator=torch.Generator().manual_seed(row))[:length].sort().values
            tokens[row, places], mask[row, places] = part, 1
        return tokens, mask

    def together(m: Any) -> Tensor:
        state: Any = m.start(4, attending, projected=projected)
        found: list[list[Tensor]] = [[] for _ in range(4)]
        for index in range(len(lengths)):
            tokens, mask = placed(index)
            if side == "right":
                log_probs, state = m.read(tokens, torch.tensor(lengths[index]), state)
            else:
                log_probs, state = m.read(tokens, None, state, attention_mask=mask)
            for row in range(4):
                found[row].append(log_probs[row][mask[row].bool()])
        return torch.cat([torch.cat(one) for one in found])

    def alone(m: Any) -> Tensor:
        found = []
        for row in range(4):
            state = m.start(1, attending, projected=False)
            for index in range(len(lengths)):
                part = rows[row][counts[index][row] : counts[index + 1][row]]
                log_probs, state = m.read(part[None], None, state)
                found.append(log_probs[0])
        return torch.cat(found)

    precision.assert_same(model, alone, together)


@FORMS
def test_prompts_of_unlike_lengths_step_together(language_model: Any, precision: Any, projected: bool) -> None:
    """What a search and a generator do: a batch of prompts, then a token each."""
    model, attending = language_model.build(), looking(language_model, 9)
    prompts, lengths, more = ids(3, 6), [6, 1, 4], ids(3, 3, seed=5)

    def together(m: Any) -> Tensor:
        said, state = m.step(prompts, m.start(3, attending, projected=projected), torch.tensor(lengths))
        found = [said]
        for t in range(3):
            said, state = m.step(more[:, t : t + 1], state)
            found.append(said)
        return torch.stack(found, dim=1)

    def alone(m: Any) -> Tensor:
        rows = []
        for row, length in enumerate(lengths):
            said, state = m.step(prompts[row : row + 1, :length], m.start(1, attending, projected=False))
            found = [said]
            for t in range(3):
                said, state = m.step(more[row : row + 1, t : t + 1], state)
                found.append(said)
            rows.append(torch.stack(found, dim=1))
        return torch.cat(rows)

    precision.assert_same(model, alone, together)


@FORMS
def test_reset_forgets_one_lane_alone(language_model: Any, precision: Any, projected: bool) -> None:
    """A masked memory is an empty one: not a bit of what was forgotten is left."""
    model, past, tokens = language_model.build(), ids(3, 6), ids(3, 5, seed=1)
    attending = looking(language_model, 6)

    def reset(m: Any, harm: float = 0.0) -> Tensor:
        _, state = m.read(past, None, m.start(3, attending, projected=projected))
        state = state.reset(torch.tensor([False, True, False]))
        if harm:
            for leaf in pytree.tree_leaves(state):
                if leaf.is_floating_point() and leaf.shape[0] == 3:
                    leaf[1] += harm
        said, state = m.read(tokens[:, :2], None, state)
        return torch.cat([said, m.read(tokens[:, 2:], None, state)[0]], dim=1)

    def apart(m: Any) -> Tensor:
        kept, fresh = (m.start(rows, attending, projected=False) for rows in (2, 1))
        _, kept = m.read(past[[0, 2]], None, kept)
        found = []
        for segment in (tokens[:, :2], tokens[:, 2:]):
            two, kept = m.read(segment[[0, 2]], None, kept)
            one, fresh = m.read(segment[[1]], None, fresh)
            found.append(torch.stack([two[0], one[0], two[1]]))
        return torch.cat(found, dim=1)

    precision.assert_same(model, apart, reset)
    with torch.no_grad(), precision.on():
        assert torch.equal(reset(model, harm=3.0), reset(model))


def test_resets_of_a_batch_are_heeded(language_model: Any) -> None:
    model, past, tokens = language_model.build(), ids(2, 7), ids(2, 6, seed=1)
    resets = torch.tensor([True, False])
    with torch.no_grad():
        _, state = model.token_losses(batch_of(past), model.start(2, projected=False))
        with_memory, _ = model.token_losses(batch_of(tokens), state)
        without, _ = model.token_losses(batch_of(tokens))
        mixed, _ = model.token_losses(batch_of(tokens, resets=resets), state)
    torch.testing.assert_close(mixed[0], without[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[1], with_memory[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(with_memory, without, atol=1e-3)


@FORMS
def test_reorder_follows_the_rows(language_model: Any, precision: Any, projected: bool) -> None:
    model, tokens = language_model.build(), ids(3, 5)
    attending, rows, more = looking(language_model, 4), torch.tensor([[2, 0], [0, 1]]), ids(4, 2, seed=2)

    def reordered(m: Any) -> Tensor:
        _, state = m.read(tokens, None, m.start(3, attending, projected=projected))
        return m.read(more, None, state.reorder(rows))[0]  # type: ignore[no-any-return]

    def straight(m: Any) -> Tensor:
        _, state = m.read(tokens[rows.flatten()], None, m.start(4, attending, projected=False))
        return m.read(more, None, state)[0]  # type: ignore[no-any-return]

    precision.assert_same(model, straight, reordered)


@FORMS
def test_a_clone_is_a_branch(language_model: Any, projected: bool) -> None:
    """Both branches go on as if the other were not there."""
    model, tokens = language_model.build(), ids(2, 5)
    attending, left, right = looking(language_model, 6), ids(2, 3, seed=3), ids(2, 3, seed=4)
    with torch.no_grad():
        _, state = model.read(tokens, None, model.start(2, attending, projected=projected))
        branch = state.clone()
        said_left, on_left = model.read(left, None, state)
        said_right, on_right = model.read(right, None, branch)
        left_right, _ = model.read(right, None, on_left)
        right_left, _ = model.read(left, None, on_right)
        for parts, said in (
            *(([left], said_left), ([right], said_right)),
            *(([left, right], left_right), ([right, left], right_left)),
        ):
            fresh: Any = model.start(2, attending, projected=False)
            for part in (tokens, *parts):
                wanted, fresh = model.read(part, None, fresh)
            torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)


@FORMS
def test_the_state_is_a_pytree_of_tensors(language_model: Any, projected: bool) -> None:
    """Taken apart and put together it goes on the same; modules remember nothing."""
    model, tokens = language_model.build(), ids(2, 5)
    names = {name for name, _ in model.named_buffers()}
    attending = looking(language_model, 4, ext_len=1)
    with torch.no_grad():
        _, state = model.read(tokens, None, model.start(2, attending, projected=projected))
        leaves, spec = pytree.tree_flatten(state)
        assert leaves
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        again = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        assert type(again) is type(state)
        assert again.attending == attending
        assert torch.equal(model.read(tokens, None, state)[0], model.read(tokens, None, again)[0])
    assert {name for name, _ in model.named_buffers()} == names


def test_gradients_do_not_cross_segments(language_model: Any, precision: Any) -> None:
    """What came before is a constant: nothing of its graph is kept, and its hidden states get no gradient."""
    model, tokens = language_model.build().train(), ids(2, 10)
    with precision.on():
        hidden, state = model.body(tokens[:, :5], None, model.start(2, looking(language_model, 5), projected=False))
        assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(state))
        output = model(batch_of(tokens[:, 5:]), state)
    (grad,) = torch.autograd.grad(output.loss_sum, hidden, allow_unused=True, retain_graph=True)
    assert grad is None
    grads = torch.autograd.grad(output.loss_sum, list(model.parameters()))
    assert all(bool(grad.isfinite().all()) for grad in grads)


def test_the_memory_is_read(language_model: Any) -> None:
    """Every remembered token, its place, and its lane."""
    model, past, tokens = language_model.build(), ids(1, 4), ids(1, 3, seed=1)

    def say(past: Tensor) -> Tensor:
        attending = looking(language_model, 4, same_length=False)
        _, state = model.read(past, None, model.start(1, attending, projected=False))
        return model.read(tokens, None, state)[0]  # type: ignore[no-any-return]

    with torch.no_grad():
        before = say(past)
        for i in range(4):
            changed = past.clone()
            changed[0, i] = (changed[0, i] + 3) % VOCAB
            assert ((say(changed) - before).abs().amax(-1) > 1e-6).all()
        assert not torch.allclose(say(past[:, [1, 0, 2, 3]]), before, atol=1e-4)


@FORMS
@pytest.mark.parametrize("memory_len", [1, 3])
def test_a_changed_token_reaches_layers_times_memory_and_no_farther(language_model, projected, memory_len):
    """Token by token, each layer looks memory_len back: the reach that the paper claims (sec. 3.2)."""
    model = language_model.build(num_layers=3)
    reach = 3 * memory_len
    tokens = ids(1, reach + 4)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 3) % VOCAB
    attending = looking(language_model, memory_len, same_length=False)
    with torch.no_grad():
        one, other = (
            read(model, some, [1] * tokens.shape[1], model.start(1, attending, projected=projected))
            for some in (tokens, changed)
        )
    differs = (one != other).any(dim=-1)[0].tolist()
    assert differs == [True] * (reach + 1) + [False] * 3


@pytest.mark.parametrize("memory_len", [0, 1, 4])
def test_same_length_sees_as_far_from_every_place(language_model: Any, memory_len: int) -> None:
    """A query sees memory_len positions with itself, wherever in the segment it stands; itself, with no memory."""
    model = language_model.build(num_layers=1)
    past, tokens, window = ids(1, 5), ids(1, 4, seed=1), max(1, memory_len)

    def say(seen: Tensor, memory_len: int = memory_len) -> Tensor:
        attending = looking(language_model, memory_len, same_length=True)
        _, state = model.read(seen[:, :5], None, model.start(1, attending, projected=False))
        return model.read(seen[:, 5:], None, state)[0]  # type: ignore[no-any-return]

    whole = torch.cat([past, tokens], dim=1)
    with torch.no_grad():
        before = say(whole)
        assert before.isfinite().all()
        torch.testing.assert_close(before, say(whole, window), atol=1e-5, rtol=1e-5)
        for place in range(9):
            changed = whole.clone()
            changed[0, place] = (changed[0, place] + 3) % VOCAB
            differs = ((say(changed) - before).abs() > 1e-6).any(dim=-1)[0].tolist()
            assert differs == [place <= query < place + window for query in range(5, 9)]


@pytest.mark.parametrize("num_context", [0, 2])
def test_the_loss_is_cross_entropy_over_what_counts(language_model: Any, precision: Any, num_context: int) -> None:
    model = language_model.build()
    batch = batch_of(ids(3, 8), [7, 4, 1], num_context=num_context)
    steps = torch.arange(7)[None]
    counts = (steps < batch.lengths[:, None]) & (steps >= num_context)

    def plain(m: Any) -> Tensor:
        log_probs = m.log_probs(batch.tokens, batch.lengths)
        return F.nll_loss(log_probs[counts], batch.targets[counts], reduction="none")

    def ours(m: Any) -> Tensor:
        losses, _ = m.token_losses(batch)
        assert (losses[~counts] == 0).all()
        output = m(batch)
        torch.testing.assert_close(losses.sum(), output.nll_sum, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(output.loss_sum.detach(), output.nll_sum)
        assert output.num_tokens == counts.sum() == batch.num_target_tokens()
        return losses[counts]

    precision.assert_same(model, plain, ours)


def test_chunked_loss_has_the_gradients_of_the_whole(language_model: Any, precision: Any) -> None:
    """Through body and memory, against autograd's own gradient of the plain formula in one piece."""
    model, past = language_model.build(), ids(2, 6, seed=1)
    batch = batch_of(ids(2, 7), [6, 3])
    counts = torch.arange(6)[None] < batch.lengths[:, None]

    def grads(m: Any, chunk: int | None, low: bool) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            with torch.no_grad():
                _, state = m.body(past, None, m.start(2, looking(language_model, 4), projected=False))
            if chunk is None:
                log_probs = m.log_probs(batch.tokens, batch.lengths, state)[counts]
                loss = F.nll_loss(log_probs, batch.targets[counts], reduction="sum")
            else:
                loss = m(batch, state, chunk_tokens=chunk).loss_sum
        return [g.double() for g in torch.autograd.grad(loss, list(m.parameters()))]

    exact = grads(copy.deepcopy(model).double(), None, low=False)
    plain = grads(model, None, low=precision.name == "bf16")
    allowed = 1e-5 * max(g.abs().max().item() for g in exact)
    if precision.name == "bf16":
        allowed = 2 * max((p - e).abs().max().item() for p, e in zip(plain, exact, strict=True))
    for chunk_tokens in (1, 3, 100):
        ours = grads(model, chunk_tokens, low=precision.name == "bf16")
        assert max((o - e).abs().max().item() for o, e in zip(ours, exact, strict=True)) <= allowed, chunk_tokens


@pytest.mark.parametrize("memory_len", [0, 3])
@FORMS
def test_degenerate_segments_stay_finite(language_model: Any, precision: Any, projected: bool, memory_len: int) -> None:
    """Nothing but padding, single tokens, forgotten memories: finite values and gradients, again and again."""
    model = language_model.build()
    state = model.start(2, looking(language_model, memory_len, same_length=True), projected=projected)
    for index, lengths in enumerate([[0, 0], [1, 0], [0, 0], [1, 1], [3, 0], [0, 3]]):
        batch = batch_of(ids(2, 2 if max(lengths) == 1 else 4), lengths)
        with precision.on(), torch.set_grad_enabled(not projected):
            output = model(batch, state)
            state = output.state.reset(torch.tensor([index == 3, index != 3]))
            log_probs, _ = model.read(batch.tokens, batch.lengths, state.clone())
        assert log_probs.isfinite().all()
        assert output.loss_sum.isfinite()
        assert output.num_tokens == sum(lengths)
        if not projected:
            grads = torch.autograd.grad(output.loss_sum, list(model.parameters()), allow_unused=True)
            assert all(grad is None or bool(grad.isfinite().all()) for grad in grads)


@FORMS
def test_no_tokens_and_no_lanes(language_model: Any, precision: Any, projected: bool) -> None:
    """An empty segment leaves the memory as it was; an empty batch is one."""
    model, tokens = language_model.build(), ids(2, 4)
    with torch.no_grad(), precision.on():
        _, state = model.read(tokens, None, model.start(2, looking(language_model, 3), projected=projected))
        before = model.read(tokens, None, state.clone())[0]
        said, state = model.read(tokens[:, :0], None, state)
        assert said.shape == (2, 0, VOCAB)
        assert torch.equal(model.read(tokens, None, state)[0], before)
        said, state = model.read(tokens[:0], None, model.start(0, looking(language_model, 3), projected=projected))
        assert said.shape == (0, 4, VOCAB)
        assert len(state.lengths) == 0


@FORMS
def test_attention_is_recorded_on_request(language_model: Any, projected: bool) -> None:
    """Over memory and segment; recording changes nothing."""
    from manyheads.nn.attention.observing import observe

    model, past, tokens = language_model.build(), ids(2, 4), ids(2, 3, seed=1)
    attending = looking(language_model, 4, same_length=False)
    with torch.no_grad():
        _, state = model.read(past, None, model.start(2, attending, projected=projected))
        plainly, _ = model.read(tokens, None, state.clone())
        with observe(model) as weights:
            recorded, _ = model.read(tokens, None, state)
    torch.testing.assert_close(recorded, plainly, atol=1e-5, rtol=1e-5)
    assert len(weights) == language_model.config.num_layers
    for layers in weights.values():
        assert layers[0].shape == (2, language_model.config.num_heads, 3, 7)
        torch.testing.assert_close(layers[0].sum(-1), torch.ones(2, language_model.config.num_heads, 3))
        assert (layers[0].triu(5) == 0).all()


def test_evaluation_is_deterministic_and_training_is_not(language_model: Any) -> None:
    model, batch = language_model.build(), batch_of(ids(2, 7))
    assert torch.equal(model(batch).loss_sum, model(batch).loss_sum)
    model.train()
    assert not torch.equal(model(batch).loss_sum, model(batch).loss_sum)


def test_rates_of_dropout_reach_every_part(language_model: Any) -> None:
    model = language_model.build(dropout=0.25, attention_dropout=0.5)
    attention = [layer.attention.dropout_rate for layer in model.body.layers]
    assert set(attention) == {0.5}
    rates = {m.rate for m in model.modules() if type(m).__name__ == "Dropout"}
    assert rates == {0.25}


@pytest.mark.one_in(2, "learned by heart")
@pytest.mark.first_variant
def test_one_batch_is_learned_by_heart(language_model: Any, precision: Any) -> None:
    """And said again token by token from kept keys: what was learned is what is generated."""
    model, tokens = language_model.build(memory_len=12).train(), ids(2, 9)
    tokens[:, 0] = torch.tensor([3, 4])
    batch = batch_of(tokens)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    nll = torch.inf
    for step in range(600):  # how long it takes depends on dropout's luck
        optimiser.zero_grad()
        with precision.on():
            output = model(batch)
        loss = output.loss_sum / output.num_tokens
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimiser.step()
        if step % 25 == 24:
            with torch.no_grad(), precision.on():
                nll = float(model.eval()(batch).nll_sum / 16)
            model.train()
            if nll < 0.05:
                break
    assert nll < 0.05
    model.eval()
    with torch.no_grad(), precision.on():
        if language_model.config.attention.startswith("absolute"):
            return  # a token's position changes as it ages, so that generating is another task than reading
        state, token, said = model.start(2), tokens[:, :1], []
        for _ in range(8):
            log_probs, state = model.step(token, state)
            token = log_probs.argmax(-1, keepdim=True)
            said.append(token)
    assert torch.equal(torch.cat(said, dim=1), tokens[:, 1:])


def test_mistakes_are_named(language_model: Any) -> None:
    model, tokens = language_model.build(), ids(2, 4)
    with pytest.raises(ShapeError, match="2 rows of tokens do not fit a memory of 3 lanes"):
        model.read(tokens, None, model.start(3, projected=False))
    with pytest.raises(ShapeError, match="marks do not fit 3 lanes"):
        model.start(3).reset(torch.tensor([True, False]))
    with pytest.raises(ShapeError, match="either lengths, or an attention_mask"):
        model.read(tokens, torch.tensor([4, 4]), attention_mask=torch.ones(2, 4))
    if language_model.config.attention.startswith("relative"):
        with pytest.raises(RequestError, match="has no gradient"):
            model.read(tokens, None, model.start(2))
        with torch.no_grad(), pytest.raises(RequestError, match="serves evaluation"):
            model.train().read(tokens, None, model.start(2))


CONFIG_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"d_model": 30, "num_heads": 4}, "not divisible"),
    ({"dropout": 1.0}, r"must be in \[0, 1\)"),
    ({"norm_eps": -1.0}, "norm_eps"),
    ({"d_ff": 0}, "from 1 to 16,777,216"),
    ({"d_embed": -1}, "must be from 0 to 16,777,216"),
    ({"memory_len": -1}, "memory_len is -1"),
    ({"clamp_len": -1}, "null has no limit"),
    ({"cutoffs": (5, 5)}, "must increase"),
    ({"cutoffs": (5, 9), "vocab_size": 9}, "must increase"),
    ({"cutoffs": (0, 9)}, "must increase"),
    ({"cutoffs": (5, 9), "div_value": 30}, "leaves no width"),
    ({"cutoffs": (5, 9), "div_value": 2, "tie_projections": (True,)}, "1 entries for 3 clusters"),
    ({"cutoffs": (5, 9), "tie_projections": (False, True, True)}, "there are none"),
]


@pytest.mark.parametrize(("changes", "said"), CONFIG_MISTAKES, ids=lambda value: str(value))
def test_mistakes_in_a_config_are_named(changes: dict[str, Any], said: str) -> None:
    config: Callable[..., Any] = ARCHITECTURES["transformer-xl"].config
    with pytest.raises(ConfigError, match=said):
        config(**{"d_model": 410, **changes})


def test_a_vocabulary_is_needed() -> None:
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        build_model(ARCHITECTURES["transformer-xl"].config())


@pytest.mark.parametrize(
    ("preset", "vocab", "changes", "millions"),
    [
        ("enwik8-base", 204, {}, 41),
        ("enwik8-large", 204, {}, 277),
        ("wikitext103-base", 267_735, {}, 151),
        ("wikitext103-large", 267_735, {}, 285),  # the paper says 257
        ("lm1b-base", 793_471, {}, 358),
        ("lm1b-base", 793_471, {"tie_embeddings": False}, 460),  # what the paper says
    ],
)
def test_presets_have_the_papers_sizes(preset: str, vocab: int, changes: dict[str, Any], millions: int) -> None:
    """Dai et al. 2019, tables 1, 2 and 4; the paper rounds."""
    from dataclasses import replace

    config = replace(ARCHITECTURES["transformer-xl"].presets[preset], vocab_size=vocab, **changes)
    with torch.device("meta"):
        model = build_model(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted / 1e6 == pytest.approx(millions, rel=0.02)
