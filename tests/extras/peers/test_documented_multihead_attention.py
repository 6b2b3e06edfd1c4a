"""TorchMultiheadAttention does what the documentation of torch.nn.MultiheadAttention says of each argument.

One test for each documented argument, then every combination of small options against torch itself.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from slices import drawn
from torch import Tensor, nn

from manyheads.extras.peers.torch_compatible import TorchMultiheadAttention

pytestmark = pytest.mark.usefixtures("fast_and_seeded")

EMBED, HEADS, BATCH, QUERIES, KEYS = 6, 2, 3, 4, 5


def made(**options: Any) -> TorchMultiheadAttention:
    """A module with random weights, biases included."""
    torch.manual_seed(0)
    module = TorchMultiheadAttention(EMBED, HEADS, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def torchs(ours: TorchMultiheadAttention, **options: Any) -> nn.MultiheadAttention:
    """Torch's module with the same weights."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options)
    theirs.load_state_dict(ours.state_dict())
    return theirs.eval()


def inputs(kdim: int = EMBED, vdim: int = EMBED) -> tuple[Tensor, Tensor, Tensor]:
    """Query (L, N, E), key (S, N, kdim) and value (S, N, vdim)."""
    torch.manual_seed(1)
    return torch.randn(QUERIES, BATCH, EMBED), torch.randn(KEYS, BATCH, kdim), torch.randn(KEYS, BATCH, vdim)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_every_argument_has_the_documented_name_order_and_default() -> None:
    for method in ("__init__", "forward"):
        ours = inspect.signature(getattr(TorchMultiheadAttention, method)).parameters
        theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters
        assert list(ours) == list(theirs)
        assert [one.default for one in ours.values()] == [one.default for one in theirs.values()]


def test_embed_dim_and_num_heads() -> None:
    """Each head has dimension embed_dim // num_heads."""
    module = made()
    assert (module.embed_dim, module.num_heads, module.head_dim) == (EMBED, HEADS, EMBED // HEADS)
    with pytest.raises(AssertionError, match="divisible"):
        TorchMultiheadAttention(EMBED, 4)


def test_dropout_is_on_the_weights_in_training_only() -> None:
    assert TorchMultiheadAttention(EMBED, HEADS).dropout == 0.0
    module = made(dropout=0.5)
    close(module(*inputs())[0], made()(*inputs())[0])
    _, weights = module.train()(*inputs(), average_attn_weights=False)
    assert (weights == 0).any()
    close(made(dropout=0.0).train()(*inputs())[0], made()(*inputs())[0])


def test_bias_adds_to_input_and_output_projections() -> None:
    assert made().in_proj_bias is not None
    without = made(bias=False)
    assert without.in_proj_bias is None
    assert without.out_proj.bias is None
    close(without(*inputs())[0], torchs(without, bias=False)(*inputs())[0])


def test_add_bias_kv_appends_one_learned_key() -> None:
    module = made(add_bias_kv=True)
    out, weights = module(*inputs())
    assert weights.shape == (BATCH, QUERIES, KEYS + 1)
    close(out, torchs(module, add_bias_kv=True)(*inputs())[0])
    assert module.bias_k.shape == module.bias_v.shape == (1, 1, EMBED)


def test_add_zero_attn_appends_a_key_and_value_of_zeros() -> None:
    module = made(add_zero_attn=True)
    out, weights = module(*inputs(), average_attn_weights=False)
    assert weights.shape == (BATCH, HEADS, QUERIES, KEYS + 1)
    close(out, torchs(module, add_zero_attn=True)(*inputs())[0])
    hidden = torch.ones(BATCH, KEYS, dtype=torch.bool)
    close(module(*inputs(), key_padding_mask=hidden)[1][..., -1], torch.ones(BATCH, QUERIES))


def test_kdim_and_vdim() -> None:
    """Sizes of key and value; None is embed_dim."""
    assert (made().kdim, made().vdim) == (EMBED, EMBED)
    for options in ({"kdim": 3}, {"vdim": 4}, {"kdim": 3, "vdim": 4}):
        module = made(**options)
        close(module(*inputs(**options))[0], torchs(module, **options)(*inputs(**options))[0])


def test_batch_first_is_the_layout_of_inputs_and_output() -> None:
    wanted = made()(*inputs())[0]
    found = made(batch_first=True)(*(x.transpose(0, 1) for x in inputs()))[0]
    close(found.transpose(0, 1), wanted)


@pytest.mark.parametrize("batch_first", [True, False])
def test_batch_first_is_ignored_for_unbatched_inputs(batch_first: bool) -> None:
    query, key, value = (x[:, 0] for x in inputs())
    out, weights = made(batch_first=batch_first)(query, key, value)
    assert (out.shape, weights.shape) == ((QUERIES, EMBED), (QUERIES, KEYS))
    whole, whole_weights = made()(*inputs())
    close(out, whole[:, 0])
    close(weights, whole_weights[0])


def test_device_and_dtype() -> None:
    assert all(p.is_meta for p in TorchMultiheadAttention(EMBED, HEADS, device="meta").parameters())
    module = TorchMultiheadAttention(EMBED, HEADS, dtype=torch.float64, add_bias_kv=True)
    assert all(p.dtype == torch.float64 for p in module.parameters())
    assert module(*(x.double() for x in inputs()))[0].dtype == torch.float64


def test_key_padding_mask_true_is_ignored() -> None:
    query, key, value = inputs()
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[:, 3:] = True
    close(made()(query, key, value, key_padding_mask=padding)[0], made()(query, key[:3], value[:3])[0])
    one = made()(query[:, 0], key[:, 0], value[:, 0], key_padding_mask=padding[0])[0]
    close(one, made()(query[:, 0], key[:3, 0], value[:3, 0])[0])


def test_a_float_key_padding_mask_is_added_to_the_scores() -> None:
    padding = torch.randn(BATCH, KEYS)
    as_mask = padding[:, None, None].expand(BATCH, HEADS, QUERIES, KEYS).reshape(-1, QUERIES, KEYS)
    close(made()(*inputs(), key_padding_mask=padding)[0], made()(*inputs(), attn_mask=as_mask)[0])


def test_need_weights_returns_weights_or_none() -> None:
    out, weights = made()(*inputs())
    close(weights.sum(-1), torch.ones(BATCH, QUERIES))
    bare, nothing = made()(*inputs(), need_weights=False)
    assert nothing is None
    close(bare, out)


def test_attn_mask_of_two_and_of_three_dimensions() -> None:
    """Two are for all entries of the batch; three are one for each entry and head, N * num_heads of them."""
    mask = torch.rand(QUERIES, KEYS) < 0.4
    mask[:, 0] = False
    wanted = made()(*inputs(), attn_mask=mask)
    found = made()(*inputs(), attn_mask=mask.expand(BATCH * HEADS, -1, -1))
    close(found[0], wanted[0])
    assert (wanted[1][:, mask] == 0).all()
    own = torch.zeros(BATCH * HEADS, QUERIES, KEYS, dtype=torch.bool)
    own[1 * HEADS + 1, :, 2] = True  # of entry 1, head 1
    _, weights = made()(*inputs(), attn_mask=own, average_attn_weights=False)
    blocked = torch.zeros_like(weights, dtype=torch.bool)
    blocked[1, 1, :, 2] = True
    assert torch.equal(weights == 0, blocked)


def test_a_float_attn_mask_is_added_to_the_scores() -> None:
    mask = torch.rand(QUERIES, KEYS) < 0.4
    mask[:, 0] = False
    added = torch.zeros(QUERIES, KEYS).masked_fill(mask, -torch.inf)
    close(made()(*inputs(), attn_mask=added)[0], made()(*inputs(), attn_mask=mask)[0])
    added = torch.randn(QUERIES, KEYS)
    close(made()(*inputs(), attn_mask=added)[0], torchs(made())(*inputs(), attn_mask=added)[0])


def test_average_attn_weights_is_a_mean_over_heads() -> None:
    mean, each = (made()(*inputs(), average_attn_weights=asked)[1] for asked in (True, False))
    assert each.shape == (BATCH, HEADS, QUERIES, KEYS)
    close(mean, each.mean(1))
    one = made()(*(x[:, 0] for x in inputs()), average_attn_weights=False)[1]
    assert one.shape == (HEADS, QUERIES, KEYS)
    assert made()(*inputs(), need_weights=False, average_attn_weights=False)[1] is None


def test_is_causal_is_a_hint_for_a_causal_mask() -> None:
    query, _, _ = inputs()
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES)
    wanted = made()(query, query, query, attn_mask=causal)
    for need_weights in (True, False):
        found = made()(query, query, query, attn_mask=causal, is_causal=True, need_weights=need_weights)
        close(found[0], wanted[0])
    assert (wanted[1][:, torch.ones(QUERIES, QUERIES).triu(1).bool()] == 0).all()


MASKS = {
    "none": None,
    "bool": torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(2),
    "float": torch.linspace(-2, 2, QUERIES * KEYS).view(QUERIES, KEYS),
    "of each head": torch.linspace(-1, 1, BATCH * HEADS * QUERIES * KEYS).view(BATCH * HEADS, QUERIES, KEYS),
}
PADDINGS = {
    "none": None,
    "bool": torch.arange(KEYS) >= torch.tensor([[5], [3], [4]]),
    "float": torch.linspace(-1, 1, BATCH * KEYS).view(BATCH, KEYS),
}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 3, "vdim": 4}], ids=str)
def test_every_combination(sizes: dict[str, int], batch_first: bool) -> None:
    given = [x.transpose(0, 1) if batch_first else x for x in inputs(**sizes)]
    """A fifth of the calls, another one each time; all of them without xdist."""
    calls = list(itertools.product(MASKS.values(), PADDINGS.values(), (True, False)))
    flags = itertools.product((True, False), repeat=3)
    for number, (bias, add_bias_kv, add_zero_attn) in enumerate(flags):
        options = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, **sizes}
        ours = made(batch_first=batch_first, **options)
        theirs = torchs(ours, batch_first=batch_first, **options)
        for place in drawn(len(calls), 5, f"calls {number} {sizes} {batch_first}"):
            mask, padding, average = calls[place]
            asked = {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": average}
            wanted, wanted_weights = theirs(*given, **asked)
            found, weights = ours(*given, **asked)
            close(found, wanted)
            close(weights, wanted_weights)
            close(ours(*given, need_weights=False, **asked)[0], wanted)
