"""TorchMultiheadAttention does what the documentation of torch.nn.MultiheadAttention says of its arguments.

What torch itself does not decide, then every combination of small options against torch.
"""

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


def test_add_zero_attn_appends_a_key_and_value_of_zeros() -> None:
    module = made(add_zero_attn=True)
    out, weights = module(*inputs(), average_attn_weights=False)
    assert weights.shape == (BATCH, HEADS, QUERIES, KEYS + 1)
    close(out, torchs(module, add_zero_attn=True)(*inputs())[0])
    hidden = torch.ones(BATCH, KEYS, dtype=torch.bool)
    close(module(*inputs(), key_padding_mask=hidden)[1][..., -1], torch.ones(BATCH, QUERIES))


def test_device_and_dtype() -> None:
    assert all(p.is_meta for p in TorchMultiheadAttention(EMBED, HEADS, device="meta").parameters())
    module = TorchMultiheadAttention(EMBED, HEADS, dtype=torch.float64, add_bias_kv=True)
    assert all(p.dtype == torch.float64 for p in module.parameters())
    assert module(*(x.double() for x in inputs()))[0].dtype == torch.float64


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
