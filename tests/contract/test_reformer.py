"""What every Reformer must hold: exact causality whatever the hashes, any length, caches, reversible gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from manyheads.architectures.reformer.layers import AttentionSublayer
from manyheads.architectures.table import ARCHITECTURES, build_model
from manyheads.data.segments import SegmentBatch
from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.nn.attention import lsh
from manyheads.nn.kernels import lsh as lsh_kernel

VOCAB = 23
CHUNK = 4
"""Of the debug preset."""
HASHES = pytest.mark.parametrize("num_hashes", [0, 1, 2, 5])


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


def encoder(subject: Any, **changes: Any) -> Any:
    """The subject's sizes in a model that looks both ways."""
    sight = {"causal": False, "visible": "chunk", "chunks_after": 1, "local_chunks_after": 1}
    return subject.build(**{**sight, **changes})


def test_shapes(reformer: Any, precision: Any) -> None:
    model, batch = reformer.build(), batch_of(ids(3, 8), [7, 4, 0])
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


@HASHES
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_no_leak_from_the_future(reformer: Any, num_hashes: int, training: bool) -> None:
    """Whatever follows position t, what is said up to t stays as it is. Later tokens move others about in the sorted
    order, but never into or out of sight."""
    model = reformer.build(num_hashes=num_hashes, dropout=0.0).double().train(training)
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


@pytest.mark.parametrize("length", range(1, 3 * CHUNK + 2))
def test_any_length(reformer: Any, length: int) -> None:
    """From one token to three chunks and one more: a prefix says what the whole says of it, and it trains."""
    model, tokens = reformer.build(dropout=0.0), ids(2, 3 * CHUNK + 2)
    with torch.no_grad():
        for training in (False, True):
            model.train(training)
            whole = model.log_probs(tokens)[:, :length]
            torch.testing.assert_close(model.log_probs(tokens[:, :length]), whole, atol=1e-5, rtol=1e-5)
    output = model(batch_of(tokens[:, : length + 1]))
    output.loss_sum.backward()
    assert output.loss_sum.isfinite()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    assert float(model.head.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("side", ["right", "left", "anywhere"])
@pytest.mark.parametrize("looks", ["back", "both ways"])
def test_padding_changes_nothing(reformer: Any, precision: Any, side: str, looks: str) -> None:
    """Rows of unlike lengths, each as if it were alone; a row may have nothing at all."""
    model = reformer.build() if looks == "back" else encoder(reformer, exact_len=0)
    lengths, width = [9, 1, 0, 13, 4], 14
    rows = [ids(1, length, seed=row)[0] for row, length in enumerate(lengths)]
    tokens, mask = torch.full((5, width), 17), torch.zeros(5, width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        places = torch.arange(length) if side == "right" else torch.arange(width - length, width)
        if side == "anywhere":
            places = torch.randperm(width, generator=torch.Generator().manual_seed(row))[:length].sort().values
        tokens[row, places], mask[row, places] = rows[row], 1

    def together(m: Any) -> Tensor:
        if side == "right":
            return m.log_probs(tokens, torch.tensor(lengths))[mask.bool()]  # type: ignore[no-any-return]
        return m.log_probs(tokens, attention_mask=mask)[mask.bool()]  # type: ignore[no-any-return]

    def alone(m: Any) -> Tensor:
        return torch.cat([m.log_probs(row[None])[0] for row in rows if len(row)])

    precision.assert_same(model, alone, together)


@pytest.mark.parametrize("sizes", [[19], [1] * 19, [7, 1, 1, 6, 1, 3], [1, 9, 9], [0, 5, 0, 14]], ids=str)
def test_cached_is_full(reformer: Any, precision: Any, sizes: list[int]) -> None:
    """Wherever a text is cut: the same hashes, the same sight, to the last bucket."""
    model, tokens = reformer.build(), ids(3, 19)

    def whole(m: Any) -> Tensor:
        return m.log_probs(tokens)  # type: ignore[no-any-return]

    def cut(m: Any) -> Tensor:
        state, said = m.start(3), []
        for part in tokens.split(sizes, dim=1):
            log_probs, state = m.read(part, None, state)
            said.append(log_probs)
        return torch.cat(said, dim=1)

    precision.assert_same(model, whole, cut)


def test_prompts_of_unlike_lengths_step_together(reformer: Any, precision: Any) -> None:
    """What a search and a generator do: a batch of prompts, then a token each; rows swap places, one is forgotten."""
    model = reformer.build()
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


def test_a_clone_is_a_branch(reformer: Any) -> None:
    model, tokens, left, right = reformer.build(), ids(2, 9), ids(2, 5, seed=3), ids(2, 5, seed=4)
    with torch.no_grad():
        _, state = model.read(tokens, None, model.start(2))
        branch = state.clone()
        for part, one in ((left, state), (right, branch)):
            said, _ = model.read(part, None, one)
            wanted = model.log_probs(torch.cat([tokens, part], dim=1))[:, 9:]
            torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("projected", [False, True])
def test_the_state_is_a_pytree_of_tensors(reformer: Any, projected: bool) -> None:
    """Taken apart and put together it goes on the same; modules remember nothing."""
    model, tokens = reformer.build(), ids(2, 6)
    names = {name for name, _ in model.named_buffers()}
    with torch.no_grad():
        _, state = model.read(tokens, None, model.start(2, projected=projected))
        leaves, spec = pytree.tree_flatten(state)
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        again = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
        assert torch.equal(model.read(tokens, None, state)[0], model.read(tokens, None, again)[0])
    assert {name for name, _ in model.named_buffers()} == names


@pytest.mark.parametrize("chunk", [0, 3])
def test_reversible_gradients_are_plain_ones(reformer: Any, chunk: int) -> None:
    """In float64, with dropout everywhere, ragged rows, and another chunking of the feed-forward layers."""
    changes = {"dropout": 0.2, "attention_dropout": 0.3, "ff_chunk_len": chunk}
    found = []
    for reversible in (True, False):
        model = reformer.build(reversible=reversible, **changes).double().train()
        torch.manual_seed(8)
        output = model(batch_of(ids(3, 15), [14, 9, 2]), model.start(3, projected=False, hash_seed=5))
        torch.manual_seed(9)
        grads = torch.autograd.grad(output.loss_sum, list(model.parameters()), allow_unused=True)
        found.append((output.loss_sum.detach(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-10, rtol=1e-10)
    for mine, plain in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-9, rtol=1e-9)


def test_gradients_are_those_of_float64_in_both_precisions(reformer: Any, precision: Any) -> None:
    """Through hashing, sorting, caches of nothing and reversible layers, under autocast too."""
    model = reformer.build(reversible=True)
    batch = batch_of(ids(2, 13), [12, 7])

    def grads(m: Any, low: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = m(batch).loss_sum
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(m.parameters()))])

    exact = grads(copy.deepcopy(model).double(), low=False)
    low = precision.name == "bf16"
    plain = reformer.build(reversible=False)
    allowed = 2 * (grads(plain, low) - exact).abs().max() if low else 1e-5 * exact.abs().max()
    assert (grads(model, low) - exact).abs().max() <= allowed


def recorded_orders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor]]:
    """What attention sorts by, in the order of the calls; before it `hashed` where it was worked out anew."""
    seen: list[tuple[str, Tensor]] = []
    hashing, attending = lsh.hash_vectors, lsh.chunked_attention

    def noted(qk: Tensor, v: Tensor, order: Tensor, *rest: Any) -> Tensor:
        seen.append(("used", order))
        return attending(qk, v, order, *rest)  # type: ignore[no-any-return]

    def hashed(*given: Any) -> Tensor:
        found = hashing(*given)
        seen.append(("hashed", found))
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(lsh, "chunked_attention", noted)
    monkeypatch.setattr(lsh, "hash_vectors", hashed)
    return seen


def test_same_seed_same_order_forward_and_backward(reformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputation sorts by the forward pass's order and hashes nothing; another seed gives others; the global
    generator is left alone."""
    model = reformer.build(reversible=True, dropout=0.0).train()
    batch, seen = batch_of(ids(2, 14)), recorded_orders(monkeypatch)
    hashing = model.config.kinds.count("lsh")
    state = torch.get_rng_state()
    runs = []
    for seed in (3, 3, 4):
        seen.clear()
        output = model(batch, model.start(2, projected=False, hash_seed=seed))
        forward = [order for kind, order in seen if kind == "used"]
        assert len(forward) == len([1 for kind, _ in seen if kind == "hashed"]) == hashing
        output.loss_sum.backward()
        assert [kind for kind, _ in seen].count("hashed") == hashing
        backward = [order for kind, order in seen if kind == "used"][hashing:]
        assert len(backward) == hashing
        assert all(torch.equal(one, other) for one, other in zip(forward, reversed(backward), strict=True))
        runs.append(forward)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1], strict=True))
    assert not hashing or not all(torch.equal(one, other) for one, other in zip(runs[0], runs[2], strict=True))


def test_the_seed_moves_in_training_alone(reformer: Any) -> None:
    model, batch = reformer.build(hash_seed=7), batch_of(ids(2, 14))
    states = [model.start(2, projected=False), model.start(2, projected=False, hash_seed=40)]
    assert [int(state.hash_seed) for state in states] == [7, 40]
    model.train()
    assert [int(model(batch, state).state.hash_seed) for state in states] == [8, 41]
    assert int(model.start(2, projected=False, hash_seed=2**63 - 1).with_next_seed().hash_seed) == 0
    model.eval()
    outputs = [model(batch, state) for state in states]
    assert [int(output.state.hash_seed) for output in outputs] == [7, 40]
    assert torch.equal(outputs[0].loss_sum, outputs[1].loss_sum)


def test_layers_hash_differently(reformer: Any) -> None:
    model = reformer.build(layers=("lsh",))
    first, second = (layer.attention.self_attn for layer in model.body.layers)
    from manyheads.architectures.reformer.layers import Call

    call = Call(None, 3)
    assert not torch.equal(first.draw(call.seed_of(0)), second.draw(call.seed_of(1)))


@pytest.mark.parametrize("num_hashes", [1, 3])
def test_one_bucket_is_exact_attention(reformer: Any, num_hashes: int) -> None:
    """Rotations of nothing put all into one bucket, and a chunk that holds all hides nobody; a pair that meets in every
    round is still one pair under the softmax."""
    model = reformer.build(layers=("lsh",), chunk_len=32, num_hashes=num_hashes, exact_len=0).double()
    tokens, lengths = ids(2, 13), torch.tensor([13, 8])
    attention = model.body.layers[0].attention.self_attn
    nothing = {index: torch.zeros_like(attention.draw(0)) for index in range(2)}
    real = torch.arange(13) < lengths[:, None]
    with torch.no_grad():
        hashed, _ = model.body(tokens, lengths, rotations=nothing)
        exact, _ = model.body(tokens, lengths, num_hashes=0)
    torch.testing.assert_close(hashed[real], exact[real], atol=1e-12, rtol=1e-12)


def test_degenerate_rows_stay_finite(reformer: Any, precision: Any) -> None:
    """Nothing but padding, single tokens: finite values and gradients, with and without a cache."""
    model = reformer.build().train()
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


def test_no_tokens_and_no_lanes(reformer: Any) -> None:
    model = reformer.build()
    assert model.log_probs(ids(2, 0)).shape == (2, 0, VOCAB)
    with torch.no_grad():
        assert model.log_probs(ids(0, 3)).shape == (0, 3, VOCAB)


def test_an_encoder_sees_both_ways(reformer: Any) -> None:
    """Whatever is changed, something before it changes too; it has no cache to give."""
    model, tokens = encoder(reformer), ids(2, 10)
    with torch.no_grad():
        before = model.log_probs(tokens)
        changed = tokens.clone()
        changed[:, 6] = (changed[:, 6] + 3) % VOCAB
        differs = (model.log_probs(changed) - before).abs().amax(-1) > 1e-7
    assert differs[:, :6].any()
    assert differs[:, 7:].any()
    with pytest.raises(RequestError, match="cache"):
        model.start(2)


def test_evaluation_is_deterministic_and_training_is_not(reformer: Any) -> None:
    model, batch = reformer.build(), batch_of(ids(2, 7))
    assert torch.equal(model(batch).loss_sum, model(batch).loss_sum)
    model.train()
    assert not torch.equal(model(batch).loss_sum, model(batch).loss_sum)


def test_rates_of_dropout_reach_every_part(reformer: Any) -> None:
    model = reformer.build(dropout=0.25, attention_dropout=0.5)
    sublayers = [module for module in model.modules() if isinstance(module, AttentionSublayer)]
    assert {sublayer.self_attn.dropout_rate for sublayer in sublayers} == {0.5}
    assert {m.rate for m in model.modules() if type(m).__name__ == "Dropout"} == {0.25}


@pytest.mark.first_variant
def test_one_batch_is_learned_by_heart(reformer: Any, precision: Any) -> None:
    """With other hashes at every step; and said again from the cache."""
    model, tokens = reformer.build(dropout=0.0).train(), ids(2, 13)
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
    assert int(state.hash_seed) == num_steps
    model.eval()
    with torch.no_grad(), precision.on():
        # Rotations change with every step, and evaluation's were not among them: a few tokens may stay unsure.
        assert model(batch).nll_sum / 24 < 0.5
        cache, said = model.start(2), []
        for token in tokens[:, :-1].split(1, dim=1):
            log_probs, cache = model.step(token, cache)
            said.append(log_probs.argmax(-1))
    assert (torch.stack(said, dim=1) == tokens[:, 1:]).sum() >= 21


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_depth(reformer: Any) -> None:
    """Numbers in the graph of a loss, weights and whole numbers (buckets) not counted."""

    def kept(num_layers: int) -> int:
        model, sizes = reformer.build(num_layers=num_layers, reversible=True, keep_attention=False), {}
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            place = tensor.untyped_storage().data_ptr()
            if tensor.is_floating_point() and place not in weights:
                sizes[place] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.train()(batch_of(ids(2, 14)))
        held = sum(sizes.values())
        del output
        return held

    assert kept(2) == kept(8)


def test_mistakes_are_named(reformer: Any) -> None:
    model, tokens = reformer.build(), ids(2, 4)
    with pytest.raises(ShapeError, match="2 rows of tokens do not fit a state of 3 lanes"):
        model.read(tokens, None, model.start(3, projected=False))
    with pytest.raises(ShapeError, match="marks do not fit 3 lanes"):
        model.start(3).reset(torch.tensor([True, False]))
    with pytest.raises(RequestError, match="sight is part of its config"):
        model.start(3, object())
    with pytest.raises(RequestError, match="has no gradient"):
        model.read(tokens, None, model.start(2))
    with torch.no_grad(), pytest.raises(RequestError, match="serves evaluation"):
        model.train().read(tokens, None, model.start(2))
    model.eval()
    if model.config.positions == "sinusoidal":
        assert model.max_len is None
        assert model.log_probs(ids(1, 70)).isfinite().all()
        return
    assert model.max_len == 64
    assert model.log_probs(ids(1, 64)).isfinite().all()
    with pytest.raises(ShapeError, match="a sequence of 65 tokens is longer than the 64"):
        model.log_probs(ids(1, 65))
    with torch.no_grad():
        _, state = model.read(ids(1, 60), None, model.start(1))
        with pytest.raises(ShapeError, match="a sequence of 65 tokens"):
            model.read(ids(1, 5), None, state)


CONFIG_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"d_model": 30, "num_heads": 4}, "not divisible"),
    ({"dropout": 1.0}, r"must be in \[0, 1\)"),
    ({"norm_eps": -1.0}, "norm_eps"),
    ({"d_ff": 0}, "at least 1"),
    ({"hash_seed": -1}, "must be at least 0"),
    ({"layers": ()}, "layers is empty"),
    ({"layers": ("lsh",) * 3, "num_layers": 2}, "names 3 kinds for model.num_layers 2"),
    ({"num_buckets": (3,)}, "num_buckets is 3"),
    ({"num_buckets": (4, 1)}, "num_buckets is"),
    ({"chunk_len": 0}, "chunk_len is 0"),
    ({"causal": False}, "must be 'chunk'"),
    ({"wrap": True}, "is a setting of visible 'chunk'"),
    ({"local_chunks_after": 1}, "does not attend to later tokens"),
    ({"axial_shape": (4, 4), "max_len": 17}, "has 16 positions, fewer than model.max_len 17"),
    ({"axial_shape": (4, 4), "axial_dims": (8, 8), "max_len": 16}, r"summing to model.d_model 1024"),
    ({"positions": "learned", "axial_shape": (4, 4)}, "are for axial positions"),
]


@pytest.mark.parametrize(("changes", "said"), CONFIG_MISTAKES, ids=lambda value: str(value))
def test_mistakes_in_a_config_are_named(changes: dict[str, Any], said: str) -> None:
    config: Callable[..., Any] = ARCHITECTURES["reformer"].config
    with pytest.raises(ConfigError, match=said):
        config(**changes)


def test_a_vocabulary_is_needed() -> None:
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        build_model(ARCHITECTURES["reformer"].config())


@pytest.mark.parametrize("preset", sorted(ARCHITECTURES["reformer"].presets))
def test_presets_can_be_built(preset: str) -> None:
    """On no device: sizes, axes and buckets fit one another."""
    config = replace(ARCHITECTURES["reformer"].presets[preset](), vocab_size=256)
    with torch.device("meta"):
        model = build_model(config)
    assert preset in ("debug", "small", "million") or sum(p.numel() for p in model.parameters()) > 1e7


def test_kept_attention_is_not_computed_again(monkeypatch: pytest.MonkeyPatch, reformer: Any) -> None:
    """One pass over a layer's chunks forwards and one backwards, instead of two and one; and the same gradients."""
    forward, passes = lsh_kernel._forward, []

    def counted(*given: Any) -> Any:
        passes.append(1)
        return forward(*given)

    monkeypatch.setattr(lsh_kernel, "_forward", counted)
    gradients, counts = [], []
    for kept in (False, True):
        model = reformer.build(reversible=True, keep_attention=kept, layers=("lsh",), num_layers=3).double().train()
        passes.clear()
        torch.manual_seed(0)
        loss = model(batch_of(ids(2, 14))).loss_sum
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        counts.append(len(passes))
    assert counts == [6, 3]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-8)
