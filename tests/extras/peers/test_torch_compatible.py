"""TorchMultiheadAttention against torch.nn.MultiheadAttention: a thousand random configurations, then each fault."""

import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.errors import ConfigError, ManyHeadsError, RequestError, ShapeError
from manyheads.extras.peers.torch_compatible import TorchMultiheadAttention

pytestmark = pytest.mark.usefixtures("fast_and_seeded")

COUNTS = [300, pytest.param(1000, marks=pytest.mark.slow)]


@dataclass
class Case:
    """One random configuration. asked: what the call is given besides query, key and value."""

    options: dict[str, Any]
    given: tuple[Tensor, Tensor, Tensor]
    asked: dict[str, Any] = field(default_factory=dict)

    def modules(self) -> tuple[TorchMultiheadAttention, nn.MultiheadAttention]:
        """Ours and theirs, of the same weights."""
        theirs = nn.MultiheadAttention(**self.options)
        for parameter in theirs.parameters():  # zero biases would hide mistakes
            nn.init.normal_(parameter, std=0.3)
        ours = TorchMultiheadAttention(**self.options)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        return ours.eval(), theirs.eval()


def random_case(seed: int) -> Case:
    """Sizes, options, layout and masks drawn at random; fully masked rows are among them."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def maybe(chance: float = 0.5) -> bool:
        return draw.random() < chance

    heads = draw.choice([1, 2, 3, 4])
    width = heads * draw.choice([1, 2, 4, 5])
    options: dict[str, Any] = {"embed_dim": width, "num_heads": heads, "bias": maybe(), "batch_first": maybe()}
    options |= {"add_bias_kv": maybe(0.25), "add_zero_attn": maybe(0.25), "dropout": draw.choice([0.0, 0.3])}
    options |= {"kdim": draw.choice([None, None, width, 7]), "vdim": draw.choice([None, None, width, 5])}
    batch, q_len, k_len = draw.choice([1, 2, 3]), draw.randint(1, 7), draw.randint(1, 7)
    batched = maybe(0.8)
    own = options["kdim"] in (None, width) and options["vdim"] in (None, width) and maybe(0.4)
    k_len = q_len if own else k_len

    def vectors(length: int, size: int | None) -> Tensor:
        x = torch.randn(batch, length, size or width)
        return x[0] if not batched else x if options["batch_first"] else x.transpose(0, 1)

    query = vectors(q_len, width)
    key, value = (query, query) if own else (vectors(k_len, options["kdim"]), vectors(k_len, options["vdim"]))
    if not batched:
        batch = 1

    def mask(*shape: int) -> Tensor:
        blocked = torch.rand(shape) < draw.choice([0.1, 0.4, 0.8])
        if maybe(0.6):
            return blocked
        return torch.randn(shape).masked_fill(blocked, -torch.inf) if maybe(0.7) else torch.randn(shape)

    asked: dict[str, Any] = {"average_attn_weights": maybe()}
    if maybe(0.25):  # a causal mask that is said to be one, as torch wants it
        square = torch.ones(q_len, k_len, dtype=torch.bool).triu(1)
        asked |= {"attn_mask": square, "is_causal": True}
    elif maybe(0.6):
        asked["attn_mask"] = mask(q_len, k_len) if maybe() else mask(batch * heads, q_len, k_len)
    if maybe(0.4):
        asked["key_padding_mask"] = mask(batch, k_len) if batched else mask(k_len)
    return Case(options, (query, key, value), asked)


def compare(case: Case) -> int:
    """Outputs, weights, and gradients of the inputs; returns the number of rows where torch has NaN."""
    ours, theirs = case.modules()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of masks of unlike types
        wanted, wanted_weights = theirs(*case.given, need_weights=True, **case.asked)
    out, weights = ours(*case.given, need_weights=True, **case.asked)
    bare, none = ours(*case.given, need_weights=False, **case.asked)
    assert none is None
    nan = wanted.isnan().any(-1, keepdim=True)
    for given in (out, bare):
        assert given.shape == wanted.shape
        torch.testing.assert_close(given.where(~nan, 0.0), wanted.where(~nan, 0.0), atol=1e-5, rtol=1e-5)
        if case.options["num_heads"] == 1:  # with more, one head alone may be without keys
            empty = given[nan.squeeze(-1)]
            bias = torch.zeros(1) if ours.out_proj.bias is None else ours.out_proj.bias
            assert torch.equal(empty, bias.expand_as(empty))
        assert given.isfinite().all()
    known = ~wanted_weights.isnan()
    assert weights.shape == wanted_weights.shape
    torch.testing.assert_close(weights.where(known, 0.0), wanted_weights.where(known, 0.0), atol=1e-5, rtol=1e-5)
    assert weights.isfinite().all()
    torch.testing.assert_close(out, bare, atol=1e-5, rtol=1e-5)
    return int(nan.sum())


@pytest.mark.parametrize("count", COUNTS)
def test_random_configurations(count: int) -> None:
    """Equal to 1e-5 except where torch gives NaN."""
    nan_rows = cases_with_nan = 0
    for seed in range(count):
        try:
            rows = compare(random_case(seed))
        except Exception as error:
            raise AssertionError(f"random_case({seed}): {random_case(seed)}") from error
        nan_rows, cases_with_nan = nan_rows + rows, cases_with_nan + bool(rows)
    assert cases_with_nan > count // 20  # the faults are among what was tried
    assert cases_with_nan < count // 2
    assert nan_rows > cases_with_nan


@pytest.mark.parametrize("seed", range(40))
def test_gradients(seed: int) -> None:
    """Of inputs and parameters, with weights and without, where torch has no NaN."""
    case = random_case(10_000 + seed)
    case.asked.pop("key_padding_mask", None)
    if case.asked.get("attn_mask") is not None and not case.asked.get("is_causal"):
        shape = case.asked["attn_mask"].shape
        case.asked["attn_mask"] = torch.randn(shape)
    ours, theirs = case.modules()
    found = []
    for module, need_weights in ((theirs, True), (ours, True), (ours, False)):
        given = [x.clone().requires_grad_() for x in case.given]
        out, _ = module(*given, need_weights=need_weights, **case.asked)
        found.append(
            torch.autograd.grad(
                (out * torch.arange(out.numel()).view_as(out).cos()).sum(), [*given, *module.parameters()]
            )
        )
    for one in found[1:]:
        for mine, other in zip(one, found[0], strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


X = torch.linspace(-2, 2, 2 * 5 * 8).view(2, 5, 8).sin()


def pair(**options: Any) -> tuple[TorchMultiheadAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    return Case({"embed_dim": 8, "num_heads": 2, "batch_first": True, **options}, (X, X, X)).modules()


def test_fully_masked_rows() -> None:
    """NaN there; here zeros before the output map, with weights and without, and finite gradients."""
    ours, theirs = pair()
    padding = torch.tensor([[False] * 5, [True] * 5])
    assert theirs(X, X, X, key_padding_mask=padding)[0][1].isnan().all()
    x = X.clone().requires_grad_()
    for need_weights in (True, False):
        out, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        assert torch.equal(out[1], ours.out_proj.bias.expand(5, 8))
        assert weights is None or (weights[1] == 0).all()
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_results_do_not_depend_on_need_weights(options: dict[str, Any]) -> None:
    """torch drops attn_mask for a hint, and then hides the keys that options append."""
    ours, theirs = pair(**options)
    window = torch.ones(5, 5, dtype=torch.bool).triu(1) | torch.ones(5, 5, dtype=torch.bool).tril(-2)
    asked = {"attn_mask": window, "is_causal": True}  # the hint is wrong: it is narrower than causal
    with_weights = theirs(X, X, X, **asked)[0]
    assert not torch.allclose(with_weights, theirs(X, X, X, need_weights=False, **asked)[0], atol=1e-3)
    for need_weights in (True, False):
        out = ours(X, X, X, need_weights=need_weights, **asked)[0]
        torch.testing.assert_close(out, with_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_causal_without_a_mask(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for need_weights in (True, False):
        out = ours(X, X, X, is_causal=True, need_weights=need_weights)[0]
        torch.testing.assert_close(out, theirs(X, X, X, attn_mask=causal)[0], atol=1e-5, rtol=1e-5)


def test_in_training_weights_are_those_that_were_used() -> None:
    """After dropout, as in torch: their mean over many draws is the weights."""
    ours, _ = pair(dropout=0.5)
    torch.manual_seed(0)
    _, weights = ours.train()(X, X, X)
    assert (weights == 0).any()
    rows = X[:1].expand(3000, 5, 8)
    _, exact = ours.eval()(X[:1], X[:1], X[:1])
    torch.testing.assert_close(ours.train()(rows, rows, rows)[1].mean(0), exact[0], atol=0.03, rtol=0.1)
    out = ours(rows, rows, rows, need_weights=False)[0].mean(0)
    torch.testing.assert_close(out, ours.eval()(X[:1], X[:1], X[:1])[0][0], atol=0.05, rtol=0.1)


def test_it_is_one_of_torchs() -> None:
    """isinstance, constructor by position, and the layers of torch that look into it."""
    ours = TorchMultiheadAttention(8, 2, 0.0, True, False, False, None, None, True)
    assert isinstance(ours, nn.MultiheadAttention)
    assert ours.batch_first
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    wanted = layer(X)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(X), wanted, atol=1e-5, rtol=1e-5)
    assert not layer(X, src_key_padding_mask=torch.ones(2, 5, dtype=torch.bool)).isnan().any()


def test_bfloat16_and_float64() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        ours, theirs = (module.to(dtype) for module in pair(add_bias_kv=True))
        x = X.to(dtype)
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-9
        out, weights = ours(x, x, x, attn_mask=torch.randn(5, 5).to(dtype) * 0)
        assert out.dtype == weights.dtype == dtype
        torch.testing.assert_close(out, theirs(x, x, x)[0], atol=tolerance, rtol=tolerance)
    ours, _ = pair(add_bias_kv=True, add_zero_attn=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(X, X, X, attn_mask=torch.zeros(5, 5))[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": torch.zeros(5, 8)}, "two"),
        ({"key": torch.zeros(2, 5, 7)}, "kdim"),
        ({"key": torch.zeros(2, 4, 8)}, "as many keys as values"),
        ({"key": torch.zeros(3, 5, 8), "value": torch.zeros(3, 5, 8)}, "batch_first is True"),
        ({"attn_mask": torch.zeros(5, 4)}, "q_len, k_len"),
        ({"attn_mask": torch.zeros(2, 5, 5)}, r"batch x heads, q_len, k_len\), here \(4, 5, 5\)"),
        ({"attn_mask": torch.zeros(5, 5, dtype=torch.int64)}, "int64"),
        ({"key_padding_mask": torch.zeros(5, 2)}, "batch, k_len"),
    ],
    ids=str,
)
def test_mistakes_are_named(change: dict[str, Tensor], named: str) -> None:
    ours, _ = pair()
    with pytest.raises(ShapeError, match=named) as caught:
        ours(**{"query": X, "key": X, "value": X, **change})
    assert isinstance(caught.value, ManyHeadsError)


def test_sizes_that_do_not_fit() -> None:
    for sizes in ((10, 4), (0, 1), (4, 0)):
        with pytest.raises(ConfigError, match="divisible"):
            TorchMultiheadAttention(*sizes)
    ours, _ = pair()
    nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)])
    with pytest.raises(ShapeError, match="key_padding_mask"):
        ours(nested, nested.clone(), nested)


def test_mistakes_can_be_caught_as_those_of_torch() -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="divisible"):
            TorchMultiheadAttention(9, 2)
        with pytest.raises(kind, match="batch size"):
            pair()[0](X, X, X[:, :3])


class Block(nn.Module):
    """A module with the attention inside, for what looks at modules from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = TorchMultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x, x)[0]
        out: Tensor = self.out(attended)
        return out


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("replaced", ["in the layer", "in the encoder"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
def test_in_evaluation_torchs_encoder_calls_it(batch_first: bool, replaced: str) -> None:
    """Torch's fused path gives NaN for a row of padding; an encoder may pass nested tensors on."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
    if replaced == "in the layer":
        layer.self_attn = TorchMultiheadAttention(8, 2, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2)
    if replaced == "in the encoder":
        for own in encoder.layers:
            own.self_attn = TorchMultiheadAttention(8, 2, batch_first=batch_first)
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [True] * 5])
    wanted = encoder(x, src_key_padding_mask=padding)  # in training: torch has no other path there
    with torch.no_grad():
        found = encoder.eval()(x, src_key_padding_mask=padding)
        assert not encoder.layers[0](x, src_key_padding_mask=padding).isnan().any()
    real = ~padding if batch_first else ~padding.T
    torch.testing.assert_close(found[real], wanted[real])
    assert not found.isnan().any()


def test_nested_self_attention_is_that_of_each_sequence() -> None:
    ours = TorchMultiheadAttention(8, 2, batch_first=True)
    sequences = [torch.randn(2, 8), torch.randn(5, 8)]
    nested = torch.nested.as_nested_tensor(sequences)
    out, weights = ours(nested, nested, nested)
    assert weights.shape == (2, 5, 5)
    for found, x in zip(out.unbind(), sequences, strict=True):
        torch.testing.assert_close(found, ours(x, x, x)[0])


def test_fx_keeps_it_as_one_node() -> None:
    block = Block()
    traced = torch.fx.symbolic_trace(block)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["attention", "out"]
    assert torch.equal(traced(X), block(X))
    with pytest.raises(RequestError, match="a module that contains this attention"):
        torch.fx.symbolic_trace(block.attention)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_gives_the_same() -> None:
    block = Block()
    assert torch.equal(torch.jit.script(block)(X), block(X))


def test_skip_init_makes_it_without_initialisation() -> None:
    made = nn.utils.skip_init(TorchMultiheadAttention, 8, 2, kdim=6, vdim=4)
    assert made.k_proj_weight.shape == (8, 6)
    assert TorchMultiheadAttention(8, 2, device="meta").in_proj_weight.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_two_masks_of_lowest_numbers_combine_as_in_torch(dtype: torch.dtype, need_weights: bool) -> None:
    """Their sum is -inf, so a key that both hide gets nothing, beside keys that one of them hides."""
    lowest = torch.finfo(dtype).min
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).to(dtype)
    ours = TorchMultiheadAttention(8, 2, batch_first=True).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 8).to(dtype)
    attn_mask = torch.tensor([[lowest, lowest, 0]] * 3).to(dtype)
    padding = torch.tensor([[lowest, 0, lowest]]).to(dtype)
    expected, weights = theirs(x, x, x, padding, attn_mask=attn_mask)
    assert (weights[..., 0] == 0).all()
    found, own_weights = ours(x, x, x, padding, attn_mask=attn_mask, need_weights=need_weights)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    if need_weights:
        torch.testing.assert_close(own_weights, weights, rtol=2e-2, atol=2e-2)
