"""Relative bias: the scores by the definition, steps of a search, and what it refuses."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError
from manyheads.extras.inspect.heads.names import Head
from manyheads.extras.inspect.heads.pruning import prune
from manyheads.extras.inspect.heads.scores import masked_heads, masks_without
from manyheads.extras.peers.kimiyoung_transformer_xl import OfficialTransformerXL
from manyheads.extras.peers.marian import Marian
from manyheads.extras.peers.transfo_xl import TransfoXL
from manyheads.models.transformer.config import PRESETS
from manyheads.models.transformer_xl.config import PRESETS as XL_PRESETS
from manyheads.nn import Causal, KeyValueCache, Lengths, MultiHeadAttention
from manyheads.nn.attention.relative import RelativeAttention
from manyheads.nn.attention.relative_bias import RelativeBias, local_slopes

REACH = 3


def attention(*, causal: bool, seed: int = 0) -> MultiHeadAttention:
    torch.manual_seed(seed)
    made = MultiHeadAttention(16, 4, relative_bias=RelativeBias(4, REACH, causal=causal))
    torch.nn.init.normal_(made.relative_bias.table, std=0.1)
    return made.double()


def by_definition(module: MultiHeadAttention, x: torch.Tensor, *, causal: bool, lengths: list[int]) -> torch.Tensor:
    """One query, head and key after the other."""
    q, k, v = (proj(x).view(*x.shape[:2], 4, 4) for proj in (module.q_proj, module.k_proj, module.v_proj))
    numbers = module.relative_bias.numbers()
    heads = torch.zeros(*x.shape[:2], 4, 4, dtype=x.dtype)
    for row, length in enumerate(lengths):
        for head in range(4):
            for i in range(x.shape[1]):
                keys = [j for j in range(length) if j <= i or not causal]
                distances = [max(-REACH, min(REACH, j - i)) for j in keys]
                scores = [
                    q[row, i, head] @ k[row, j, head] / math.sqrt(4) + numbers[head, distance + REACH]
                    for j, distance in zip(keys, distances, strict=True)
                ]
                weights = torch.softmax(torch.stack(scores), 0)
                heads[row, i, head] = sum(w * v[row, j, head] for w, j in zip(weights, keys, strict=True))
    return module.out_proj(heads.flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("causal", [True, False])
def test_scores_are_products_plus_the_number_of_the_distance(causal: bool) -> None:
    module, x = attention(causal=causal), torch.randn(2, 9, 16, dtype=torch.float64)
    lengths = [9, 5]
    mask = (Causal() if causal else None, Lengths(torch.tensor(lengths)))
    ours = module(x, mask=mask[1] if mask[0] is None else mask[0] & mask[1])[0]
    wanted = by_definition(module, x, causal=causal, lengths=lengths)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    weights = module(x, mask=mask[1], need_weights=True)[2]
    assert weights[1, :, :, 5:].abs().max() == 0


def test_weights_and_gradients_are_those_of_the_open_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast implementations, which `policy` selects by size, and the one that returns weights."""
    from manyheads.nn.kernels import policy

    module, x = attention(causal=True), torch.randn(2, 9, 16, dtype=torch.float64)
    module.weights_hook = lambda weights: None
    wanted = module(x, mask=Causal())[0]
    gradients = torch.autograd.grad(wanted.square().sum(), list(module.parameters()))
    module.weights_hook = None
    for path in ("products", "sdpa", "sums", "rounded products"):
        monkeypatch.setattr(policy, "attention_path", lambda *_, path=path: path)
        ours = module(x, mask=Causal())[0]
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6 if path == "sums" else 1e-12)
        again = torch.autograd.grad(ours.square().sum(), list(module.parameters()))
        for one, other in zip(again, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4 if path == "sums" else 1e-10)


def test_token_by_token_is_the_same_as_all_at_once() -> None:
    module, x = attention(causal=True).eval(), torch.randn(2, 9, 16, dtype=torch.float64)
    whole = module(x, mask=Causal())[0]
    state = KeyValueCache.empty(2, 4, 4, like=x)
    for position, token in enumerate(x.split(1, dim=1)):
        step, state = module(token, mask=Causal(), state=state)
        torch.testing.assert_close(step, whole[:, position : position + 1], rtol=0, atol=1e-12)


def test_branches_that_share_keys_see_their_own_distances() -> None:
    """Slots of a group are not in the order of positions: branch 1 sees slots 0, 1 and 3."""
    bias = RelativeBias(4, REACH, causal=True)
    torch.nn.init.normal_(bias.table)
    seen = torch.tensor([[[[1, 1, 1, 0, 1], [1, 1, 0, 1, 1]]]]).bool()
    values = bias.of_slots(seen, length=3).values
    assert values.shape == (1, 4, 2, 5)
    numbers = bias.numbers()
    for branch, slots in enumerate(([0, 1, 2, 4], [0, 1, 3, 4])):
        for position, slot in enumerate(slots):
            assert torch.equal(values[0, :, branch, slot], numbers[:, position - 3 + REACH])


def test_numbers_begin_as_slopes_and_are_divided_by_ten_in_the_table() -> None:
    bias = RelativeBias(4, 2, causal=False)
    distances = torch.tensor([2, 1, 0, 1, 2])
    assert torch.allclose(bias.numbers(), -local_slopes(4)[:, None] * distances)
    assert torch.allclose(bias.table * 10, bias.numbers())
    assert RelativeBias(4, 2, causal=True).numbers().shape == (4, 3)


def test_layers_share_the_numbers_unless_heads_are_pruned() -> None:
    config = replace(PRESETS["debug"], source_vocab_size=9, target_vocab_size=9, relative_bias=2)
    shared = build_model(config)
    names = [name for name, _ in shared.named_parameters() if "relative_bias" in name]
    assert names == [f"body.{stack}.layers.0.self_attn.relative_bias.table" for stack in ("encoder", "decoder")]
    heads = (config.num_heads - 1, *(config.num_heads,) * (config.num_encoder_layers - 1))
    own = build_model(replace(config, encoder_heads=heads))
    tables = [p.shape[0] for name, p in own.named_parameters() if "encoder" in name and "relative_bias" in name]
    assert tables == list(heads)
    copied = copy.deepcopy(shared)
    layers = copied.body.encoder.layers
    assert layers[0].self_attn.relative_bias is layers[1].self_attn.relative_bias


def test_a_pruned_model_keeps_the_numbers_of_the_heads_that_are_left() -> None:
    torch.manual_seed(0)
    config = replace(PRESETS["debug"], source_vocab_size=9, target_vocab_size=9, relative_bias=2, positions="none")
    model = build_model(config).eval()
    for name, parameter in model.named_parameters():
        if "relative_bias" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    removed = {Head("encoder", 0, 0), Head("decoder", 1, 1)}
    source, lengths, target = torch.randint(3, 9, (2, 6)), torch.tensor([6, 4]), torch.randint(3, 9, (2, 5))
    with masked_heads(model, masks_without(model, removed)):
        wanted = model.body(source, lengths, target)
    found = prune(model, removed).body(source, lengths, target)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


XL = replace(XL_PRESETS["debug"], vocab_size=9, relative_bias=3)


def test_a_pruned_transformer_xl_keeps_the_numbers_of_the_heads_that_are_left() -> None:
    torch.manual_seed(0)
    model = build_model(replace(XL, share_biases=False)).eval()
    for name, parameter in model.named_parameters():
        if "relative_bias" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(3, 9, (2, 7))
    for removed in ({Head("decoder", 0, 1)}, {Head("decoder", 1, 0)}):
        smaller = prune(model, removed)
        with masked_heads(model, masks_without(model, removed)):
            first, state = model.body(tokens)
            second, _ = model.body(tokens, state=state)
        found, own = smaller.body(tokens)
        torch.testing.assert_close(found, first, rtol=0, atol=1e-5)
        torch.testing.assert_close(smaller.body(tokens, state=own)[0], second, rtol=0, atol=1e-5)
        with torch.no_grad():  # stored keys
            state = smaller.body.start(2)
            for piece in tokens.split(1, dim=1):
                last, state = smaller.body(piece, state=state)
        torch.testing.assert_close(last[:, 0], found[:, -1], rtol=0, atol=1e-5)


def test_a_relative_bias_of_the_transformer_xl_is_refused_where_nothing_holds_it() -> None:
    for attention in ("relative_learned", "absolute"):
        with pytest.raises(ConfigError, match=rf"relative_bias is 3, but model.attention is {attention}"):
            replace(XL, attention=attention)
    model = build_model(XL)
    for peer in (OfficialTransformerXL, TransfoXL):
        with pytest.raises(ConfigError, match="cannot hold a model with relative_bias 3"):
            peer.describe(model)


def test_the_classes_of_transformers_are_refused() -> None:
    config = replace(PRESETS["debug"], source_vocab_size=9, target_vocab_size=9, relative_bias=2)
    with pytest.raises(ConfigError, match="cannot hold a model with relative_bias 2"):
        Marian.describe(build_model(config))


@pytest.mark.parametrize(("heads", "reach"), [(0, 3), (4, 0)])
def test_sizes_below_one_are_refused(heads: int, reach: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        RelativeBias(heads, reach, causal=True)


@pytest.mark.parametrize("kind", [MultiHeadAttention, RelativeAttention])
def test_numbers_for_other_heads_are_refused(kind: type[MultiHeadAttention] | type[RelativeAttention]) -> None:
    """One head's numbers would be added to all heads without an error."""
    with pytest.raises(ConfigError, match="for 1 heads, but the attention has 4; make it with RelativeBias\\(4"):
        kind(16, 4, relative_bias=RelativeBias(1, REACH, causal=True))


def test_no_positions_need_a_relative_bias() -> None:
    with pytest.raises(ConfigError, match="does not know the order of the tokens; set"):
        replace(PRESETS["debug"], positions="none")
