"""Contracts of language models that hash: exact causality whatever the hashes, replayed hashes, seeds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from segment_batches import VOCAB, PaddedRows, batch_of, ids
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.models.reformer.model import AttentionSublayer
from manyheads.nn.attention import lsh
from manyheads.nn.kernels import lsh as lsh_kernel

CHUNK = 4
"""Of the debug preset."""
HASHES = pytest.mark.parametrize("num_hashes", [0, 1, 2, 5])


def encoder(subject: Any, **changes: Any) -> Any:
    """The subject's sizes in a model that looks both ways."""
    sight = {"causal": False, "visible": "chunk", "chunks_after": 1, "local_chunks_after": 1}
    return subject.build(**{**sight, **changes})


@HASHES
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_no_leak_from_the_future_by_hashes(hashing: Any, num_hashes: int, training: bool) -> None:
    """Whatever follows position t, what is said up to t stays as it is. Later tokens move others about in the sorted
    order, but never into or out of sight."""
    model = hashing.build(num_hashes=num_hashes, dropout=0.0).double().train(training)
    tokens = ids(2, 3 * CHUNK + 2)
    cases = [(t, shift) for t in range(tokens.shape[1] - 1) for shift in (3, 11)]
    changed = tokens.repeat(len(cases), 1, 1)
    for one, (t, shift) in zip(changed, cases, strict=True):
        one[:, t + 1 :] = (one[:, t + 1 :] + shift) % VOCAB
    with torch.no_grad():
        before = model.log_probs(tokens)
        said = model.log_probs(changed.flatten(0, 1)).unflatten(0, (len(cases), 2))
    for after, (t, _) in zip(said, cases, strict=True):
        torch.testing.assert_close(after[:, : t + 1], before[:, : t + 1], atol=1e-12, rtol=0.0)
        assert not torch.allclose(after[:, t + 1 :], before[:, t + 1 :], atol=1e-3)


@pytest.mark.parametrize("side", ["right", "left", "anywhere"])
def test_padding_changes_nothing_for_an_encoder(hashing: Any, precision: Any, side: Any) -> None:
    """Rows of unlike lengths, each as if it were alone; a row may have nothing at all."""
    model = encoder(hashing, exact_len=0)
    rows = PaddedRows(side)
    precision.assert_same(model, rows.alone, rows.together)


def recorded_orders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor]]:
    """What attention sorts by, in the order of the calls; before it `hashed` where it was worked out anew."""
    seen: list[tuple[str, Tensor]] = []
    hashing, attending = lsh_kernel.hash_vectors, lsh.chunked_attention

    def noted(qk: Tensor, v: Tensor, order: Tensor, *rest: Any) -> Tensor:
        seen.append(("used", order))
        return attending(qk, v, order, *rest)  # type: ignore[no-any-return]

    def hashed(*given: Any) -> Tensor:
        found = hashing(*given)
        seen.append(("hashed", found))
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(lsh, "chunked_attention", noted)
    monkeypatch.setattr(lsh_kernel, "hash_vectors", hashed)
    return seen


def test_same_seed_same_order_forward_and_backward(hashing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputation sorts by the forward pass's order and hashes nothing; another seed gives others; the global
    generator is left alone."""
    model = hashing.build(reversible=True, dropout=0.0).train()
    batch, seen = batch_of(ids(2, 14)), recorded_orders(monkeypatch)
    num_hashing = model.config.kinds.count("lsh")
    state = torch.get_rng_state()
    runs = []
    for seed in (3, 3, 4):
        seen.clear()
        output = model(batch, model.start(2, projected=False, hash_seed=seed))
        forward = [order for kind, order in seen if kind == "used"]
        assert len(forward) == len([1 for kind, _ in seen if kind == "hashed"]) == num_hashing
        output.loss_sum.backward()
        assert [kind for kind, _ in seen].count("hashed") == num_hashing
        backward = [order for kind, order in seen if kind == "used"][num_hashing:]
        assert len(backward) == num_hashing
        assert all(torch.equal(one, other) for one, other in zip(forward, reversed(backward), strict=True))
        runs.append(forward)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1], strict=True))
    assert not num_hashing or not all(torch.equal(one, other) for one, other in zip(runs[0], runs[2], strict=True))


def test_the_seed_moves_in_training_alone(hashing: Any) -> None:
    model, batch = hashing.build(hash_seed=7), batch_of(ids(2, 14))
    states = [model.start(2, projected=False), model.start(2, projected=False, hash_seed=40)]
    assert [int(state.hash_seed) for state in states] == [7, 40]
    model.train()
    assert [int(model(batch, state).state.hash_seed) for state in states] == [8, 41]
    assert int(model.start(2, projected=False, hash_seed=2**63 - 1).with_next_seed().hash_seed) == 0
    model.eval()
    outputs = [model(batch, state) for state in states]
    assert [int(output.state.hash_seed) for output in outputs] == [7, 40]
    assert torch.equal(outputs[0].loss_sum, outputs[1].loss_sum)


def test_layers_hash_differently(hashing: Any) -> None:
    model = hashing.build(layers=("lsh",))
    first, second = (layer.attention.self_attn for layer in model.body.layers)
    from manyheads.models.reformer.model import Call

    call = Call(None, 3)
    assert not torch.equal(first.draw(call.seed_of(0)), second.draw(call.seed_of(1)))


@pytest.mark.parametrize("num_hashes", [1, 3])
def test_one_bucket_is_exact_attention(hashing: Any, num_hashes: int) -> None:
    """Rotations of nothing put all into one bucket, and a chunk that holds all hides nobody; a pair that meets in every
    round is still one pair under the softmax."""
    model = hashing.build(layers=("lsh",), chunk_len=32, num_hashes=num_hashes, exact_len=0).double()
    tokens, lengths = ids(2, 13), torch.tensor([13, 8])
    attention = model.body.layers[0].attention.self_attn
    nothing = {index: torch.zeros_like(attention.draw(0)) for index in range(2)}
    real = torch.arange(13) < lengths[:, None]
    with torch.no_grad():
        hashed, _ = model.body(tokens, lengths, rotations=nothing)
        exact, _ = model.body(tokens, lengths, num_hashes=0)
    torch.testing.assert_close(hashed[real], exact[real], atol=1e-12, rtol=1e-12)


def test_an_encoder_sees_both_ways(hashing: Any) -> None:
    """Whatever is changed, something before it changes too; it has no cache to give."""
    model, tokens = encoder(hashing), ids(2, 10)
    with torch.no_grad():
        before = model.log_probs(tokens)
        changed = tokens.clone()
        changed[:, 6] = (changed[:, 6] + 3) % VOCAB
        differs = (model.log_probs(changed) - before).abs().amax(-1) > 1e-7
    assert differs[:, :6].any()
    assert differs[:, 7:].any()
    with pytest.raises(RequestError, match="cache"):
        model.start(2)


def test_kept_attention_is_not_computed_again(monkeypatch: pytest.MonkeyPatch, hashing: Any) -> None:
    """One pass over a layer's chunks forwards and one backwards, instead of two and one; and the same gradients."""
    sorted_groups, passes = lsh_kernel.sorted_groups, []

    def counted(*given: Any, **options: Any) -> Any:
        passes.append(1)
        return sorted_groups(*given, **options)

    monkeypatch.setattr(lsh_kernel, "sorted_groups", counted)
    gradients, counts = [], []
    for kept in (False, True):
        model = hashing.build(reversible=True, keep_attention=kept, layers=("lsh",), num_layers=3).double().train()
        passes.clear()
        torch.manual_seed(0)
        loss = model(batch_of(ids(2, 14))).loss_sum
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        counts.append(len(passes))
    assert counts == [9, 6]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-8)


def test_evaluation_is_deterministic_and_training_is_not(hashing: Any) -> None:
    model, batch = hashing.build(), batch_of(ids(2, 7))
    assert torch.equal(model(batch).loss_sum, model(batch).loss_sum)
    model.train()
    assert not torch.equal(model(batch).loss_sum, model(batch).loss_sum)


def test_rates_of_dropout_reach_every_part(hashing: Any) -> None:
    model = hashing.build(dropout=0.25, attention_dropout=0.5)
    sublayers = [module for module in model.modules() if isinstance(module, AttentionSublayer)]
    assert {sublayer.self_attn.dropout_rate for sublayer in sublayers} == {0.5}
    assert {m.rate for m in model.modules() if type(m).__name__ == "Dropout"} == {0.25}


def test_mistakes_are_named(hashing: Any) -> None:
    model, tokens = hashing.build(), ids(2, 4)
    with pytest.raises(ShapeError, match="2 rows of tokens do not fit a state of 3 lanes"):
        model.read(tokens, None, model.start(3, projected=False))
    with pytest.raises(ShapeError, match="marks do not fit 3 lanes"):
        model.start(3).reset(torch.tensor([True, False]))
    with pytest.raises(RequestError, match="context length of a Reformer is part of its config"):
        model.start(3, object())
    with pytest.raises(RequestError, match="has no gradient"):
        model.read(tokens, None, model.start(2))
    with torch.no_grad(), pytest.raises(RequestError, match="serves evaluation"):
        model.train().read(tokens, None, model.start(2))
    model.eval()
    if model.config.positions in ("sinusoidal", "none"):
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
    ({"d_ff": 0}, "from 1 to 16,777,216"),
    ({"hash_seed": -1}, "must be from 0 to"),
    ({"layers": ()}, "layers is empty"),
    ({"layers": ("lsh",) * 3, "num_layers": 2}, "names 3 kinds for model.num_layers 2"),
    ({"num_buckets": (3,)}, "num_buckets is 3"),
    ({"num_buckets": (4, 1)}, "num_buckets is"),
    ({"chunk_len": 0}, "chunk_len is 0"),
    ({"causal": False}, "set visible to 'chunk'"),
    ({"wrap": True}, "applies to visible 'chunk' only"),
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
    config = replace(ARCHITECTURES["reformer"].presets[preset], vocab_size=256)
    with torch.device("meta"):
        model = build_model(config)
    assert preset in ("debug", "small", "million") or sum(p.numel() for p in model.parameters()) > 1e7
