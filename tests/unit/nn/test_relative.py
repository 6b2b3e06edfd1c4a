"""Relative attention: the fast path and the plain one against the loop that looks every distance up, in float64."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from naive_attention import naive_relative_attention
from torch import Tensor

from manyheads.errors import ConfigError, ShapeError
from manyheads.nn.attention.masks import Causal, KeyPadding, Mask, Window, dense_mask
from manyheads.nn.attention.multi_head import merge_heads
from manyheads.nn.attention.relative import DistanceEncoding, LearnedRelativeAttention, RelativeAttention
from manyheads.nn.attention.relative_bias import RelativeBias
from manyheads.nn.kernels import modes, policy, relative
from manyheads.nn.kernels.relative import relative_attention, relative_shift, relative_weights
from manyheads.nn.positions import sinusoidal_table

B, H, D, E = 3, 2, 4, 5
MakeMask = Callable[[int, int, int], Mask | None]
Tiles = Callable[[], Iterator[int]]
SIZES = [(5, 5), (3, 8), (1, 4), (1, 1), (4, 5)]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[int]]:
    """Sets the number of lanes at once to one value after the other; of three lanes, two leave a smaller tile."""

    def sizes() -> Iterator[int]:
        for lanes in (1, 2, B):
            monkeypatch.setattr(policy, "lanes_at_once", lambda *_, lanes=lanes: lanes)
            yield lanes

    return sizes


@pytest.fixture
def ways(tiles: Tiles) -> Callable[[], Iterator[int]]:
    """As `tiles`, and last what GPUs take, SDPA with an additive mask; `tests/gpu` runs it on one."""

    def each() -> Iterator[int]:
        yield from tiles()
        with modes.using_relative_path("sdpa"):
            yield 0

    return each


def inputs(q_len: int, k_len: int, learned: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """query, key, value, positions, u, v, distance bias; strided as projections and memories leave them."""
    query = torch.randn(B, q_len, H, D, dtype=dtype).transpose(1, 2)
    key = torch.randn(B, H, k_len + 3, D, dtype=dtype)[:, :, 1 : k_len + 1]
    value = torch.randn(B, k_len, H, E, dtype=dtype).transpose(1, 2)
    positions = torch.randn(k_len, H, D, dtype=dtype).transpose(0, 1)
    u = torch.randn(H, D)
    return [
        query,
        key,
        value,
        positions,
        u,
        None if learned else torch.randn(H, D),
        torch.randn(H, k_len) if learned else None,
    ]


def slow(given: list[Tensor | None], mask: Mask | None) -> Tensor:
    query, key, value, positions, u, v, bias = given
    assert value is not None
    assert u is not None
    q_len, k_len = query.shape[2], key.shape[2]
    return naive_relative_attention(
        query,
        key,
        value,
        lambda distance: positions[:, k_len - 1 - distance],
        u,
        torch.zeros_like(u) if v is None else v,
        None if bias is None else lambda distance: bias[:, k_len - 1 - distance],
        dense_mask(Causal() & mask, q_len, k_len, query.device, k_len - q_len),
    )


def plain(given: list[Any], mask: Mask | None) -> Tensor:
    query, key, value, *rest = given
    return torch.matmul(relative_weights(query, key, *rest, mask), value)


@pytest.mark.parametrize(("q_len", "k_len"), SIZES)
@pytest.mark.parametrize("learned", [False, True])
def test_against_the_loop(ways: Tiles, make_mask: MakeMask, q_len: int, k_len: int, learned: bool) -> None:
    given: list[Any] = inputs(q_len, k_len, learned)
    mask = make_mask(B, q_len, k_len)
    wanted = slow(given, mask)
    for found in (plain(given, mask), *(relative_attention(*given, mask) for _ in ways())):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("q_len", "k_len"), SIZES)
@pytest.mark.parametrize("learned", [False, True])
def test_gradients_against_the_loop(ways: Tiles, make_mask: MakeMask, q_len: int, k_len: int, learned: bool) -> None:
    given: list[Any] = inputs(q_len, k_len, learned)
    mask = make_mask(B, q_len, k_len)
    factor = torch.randn(B, H, q_len, E)

    def grads(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in given]
        out = attend(leaves, mask)
        wanted = [x for x in leaves if x is not None]
        if not out.requires_grad:
            return [torch.zeros_like(x) for x in wanted]
        found = torch.autograd.grad((out * factor).sum(), wanted, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]

    def fast(leaves: list[Tensor | None], mask: Mask | None) -> Tensor:
        return relative_attention(*leaves, mask)

    exact = grads(slow, torch.float64)
    for found in (grads(plain, torch.float32), *(grads(fast, torch.float32) for _ in ways())):
        for one, wanted in zip(found, exact, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", ["tiles", "sdpa"])
@pytest.mark.parametrize("learned", [False, True])
def test_gradcheck_in_float64(learned: bool, path: Any) -> None:
    given = [x if x is None else x.double().requires_grad_() for x in inputs(3, 5, learned)]
    mask = Window(left=2, right=None)
    with modes.using_relative_path(path):
        assert torch.autograd.gradcheck(lambda *xs: relative_attention(*xs, mask), given, fast_mode=True)


@pytest.mark.parametrize("learned", [False, True])
def test_bf16_within_twice_the_plain_error(ways: Tiles, make_mask: MakeMask, learned: bool) -> None:
    given: list[Any] = inputs(6, 9, learned, torch.bfloat16)
    mask = make_mask(B, 6, 9)
    exact = slow(given, mask)
    error = (plain(given, mask).double() - exact).abs().max().item()
    for _ in ways():
        found = relative_attention(*given, mask)
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).abs().max().item() <= 2 * error + 1e-9


def test_bf16_gradients_within_twice_the_plain_error(tiles: Tiles) -> None:
    given = [x.detach().requires_grad_() if x is not None else None for x in inputs(6, 9, False, torch.bfloat16)]
    wanted = [x for x in given if x is not None]
    factor = torch.randn(B, H, 6, E)
    double = [None if x is None else x.detach().double().requires_grad_() for x in given]
    exact = torch.autograd.grad((slow(double, None) * factor).sum(), [x for x in double if x is not None])
    rough = torch.autograd.grad((plain(given, None) * factor).sum(), wanted)
    for _ in tiles():
        ours = torch.autograd.grad((relative_attention(*given) * factor).sum(), wanted)
        for one, other, true in zip(ours, rough, exact, strict=True):
            error, most = ((grad.double() - true).abs().max().item() for grad in (one, other))
            assert error <= 2 * most + 4e-3 * true.abs().max().item()


def test_under_autocast_everything_may_have_its_own_type() -> None:
    """Projections come in bfloat16, biases and learned tables in float32; so do their gradients."""
    given: list[Any] = inputs(4, 7, True, torch.bfloat16)
    given[3] = given[3].float()
    given = [x if x is None else x.detach().requires_grad_() for x in given]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = relative_attention(*given)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(x.grad.dtype == x.dtype for x in given if x is not None)


def test_the_shift_is_a_lookup() -> None:
    x = torch.randn(2, 4, 6)
    shifted = relative_shift(x)
    for i in range(4):
        for j in range(6):
            distance = 2 + i - j
            if distance >= 0:
                assert torch.equal(shifted[:, i, j], x[:, i, 5 - distance])


@pytest.mark.parametrize(("q_len", "k_len"), SIZES)
def test_the_view_is_the_shift_and_has_its_transpose(q_len: int, k_len: int) -> None:
    x = torch.randn(2, 3, q_len, k_len)  # heads, lanes
    past = torch.ones(q_len, k_len).tril(k_len - q_len)
    assert torch.equal(relative._shifted(x) * past, relative_shift(x).transpose(0, 1) * past)
    y = torch.randn(3, 2, q_len, k_len) * past
    assert ((relative._shifted(x) * y).sum() - (x * relative._unshifted(y)).sum()).abs() < 1e-4


def test_dropout_is_on_the_weights_and_replayed_in_the_backward_pass(tiles: Tiles) -> None:
    """With values that spell the weights out; a gradient check sees the same mask as the forward pass."""
    given: list[Any] = inputs(5, 5, False)
    given[2] = torch.eye(5).expand(B, H, 5, 5)
    weights = relative_weights(*given[:2], *given[3:])

    def seeded(*xs: Any) -> Tensor:
        torch.manual_seed(3)
        return relative_attention(*xs, None, 0.5)

    doubles = [x if x is None else x.double().requires_grad_() for x in inputs(3, 4, False)]
    for _ in tiles():
        dropped = seeded(*given)
        kept = dropped != 0
        assert 0.2 < kept[weights > 0].float().mean() < 0.8
        torch.testing.assert_close(dropped[kept], weights[kept] * 2, atol=1e-5, rtol=1e-5)
        assert torch.autograd.gradcheck(seeded, doubles, fast_mode=True)


def test_dropout_of_sdpa_is_on_the_weights() -> None:
    given: list[Any] = inputs(5, 5, False)
    given[2] = torch.eye(5).expand(B, H, 5, 5)
    weights = relative_weights(*given[:2], *given[3:])
    with modes.using_relative_path("sdpa"):
        dropped = relative_attention(*given, None, 0.5)
    kept = dropped != 0
    assert 0.2 < kept[weights > 0].float().mean() < 0.8
    torch.testing.assert_close(dropped[kept], weights[kept] * 2, atol=1e-5, rtol=1e-5)


def test_which_path_is_taken_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes SDPA in any case."""
    cpu, cuda = torch.zeros(1, 1, 1, 1), SimpleNamespace(device=torch.device("cuda"), shape=torch.Size([1] * 4))
    for causal in (True, False):
        assert policy.relative_path(cuda, causal) == "sdpa"
    assert policy.relative_path(cpu, True) == "tiles"
    assert policy.relative_path(cpu, False) == "products"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert policy.relative_path(cpu, True) == "products"
    with modes.compiling_a_step():
        assert policy.relative_path(cpu, True) == "sums"


def test_without_gradients_no_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane's scores at a time: nothing of (lanes, heads, q_len, k_len) numbers is ever made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(policy, "lanes_at_once", lambda *_: 1)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else [out]:
                if isinstance(one, Tensor) and one.untyped_storage().nbytes() > largest:
                    largest = one.untyped_storage().nbytes()
            return out

    given: list[Any] = [
        *(torch.randn(16, 2, 32, 4), torch.randn(16, 2, 64, 4), torch.randn(16, 2, 64, 4), torch.randn(2, 64, 4)),
        *(torch.randn(2, 4), torch.randn(2, 4)),
    ]
    with torch.no_grad(), Watch():
        relative_attention(*given)
    assert largest < 16 * 2 * 32 * 64 * 4
    assert largest <= max(given[1].nbytes, 2 * 32 * 64 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distances_stay_apart_in_any_type(dtype: torch.dtype) -> None:
    """The official code counts in the activations' type: in bfloat16, 601 distances are 407."""
    encoding = DistanceEncoding(32).to(dtype)
    few = encoding(torch.arange(400), 399)
    torch.testing.assert_close(few, sinusoidal_table(torch.arange(400.0), 32, "halves"), atol=0, rtol=0)
    distances = torch.arange(600, -1, -1)
    found = encoding(distances, 600)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, sinusoidal_table(distances.float(), 32, "halves"), atol=0, rtol=0)
    assert len(found.unique(dim=0)) == 601
    assert distances.to(torch.bfloat16).unique().numel() == 407


def test_a_window_of_memory_length_never_hides_a_query_from_itself() -> None:
    """`same_length` with memory 0 masks everything in the official code."""
    given: list[Any] = inputs(4, 4, False)
    out = relative_attention(*given, Window(left=0, right=None))
    torch.testing.assert_close(out, given[2])


@pytest.mark.parametrize("reach", [0, 3])
def test_the_module_against_the_loop(reach: int) -> None:
    torch.manual_seed(0)
    bias = RelativeBias(2, reach, causal=True) if reach else None
    attention = RelativeAttention(12, 2, 5, relative_bias=bias).eval()
    if bias is not None:
        torch.nn.init.normal_(bias.table)
    x, memory = torch.randn(B, 3, 12), torch.randn(B, 4, 12)
    places = torch.randn(7, 12)
    keep = torch.ones(B, 7, dtype=torch.bool)
    keep[0, :2] = False
    with torch.no_grad():
        found = attention(x, memory, places, KeyPadding(keep))
        seen = torch.cat([memory, x], 1)

        def heads(linear: Any, of: Tensor) -> Tensor:
            return linear(of).view(B, -1, 2, 5).transpose(1, 2)

        r = attention.position_proj(places).view(7, 2, 5)
        wanted = naive_relative_attention(
            heads(attention.q_proj, x),
            heads(attention.k_proj, seen),
            heads(attention.v_proj, seen),
            lambda distance: r[6 - distance],
            attention.content_bias,
            attention.position_bias,
            # The loop divides the sum by sqrt(5); the numbers are added to the quotient.
            None if bias is None else lambda distance: bias.numbers()[:, max(reach - distance, 0)] * 5**0.5,
            allowed=dense_mask(Causal() & KeyPadding(keep), 3, 7, x.device, 4),
        )
        wanted = wanted.transpose(1, 2).reshape(B, 3, 10) @ attention.out_proj.weight.double().t()
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_weights_leave_by_request_alone() -> None:
    attention = RelativeAttention(12, 2, 5).eval()
    x, places = torch.randn(B, 3, 12), torch.randn(3, 12)
    plainly = attention(x, None, places)
    seen: list[Tensor] = []
    attention.weights_hook = seen.append
    torch.testing.assert_close(attention(x, None, places), plainly, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(B, 2, 3))


def test_learned_distances_beyond_the_table_are_its_last() -> None:
    attention = LearnedRelativeAttention(12, 2, 5, max_len=4)
    r, bias = attention.project_positions(torch.tensor([9, 4, 3, 1, 0]))
    assert torch.equal(r[:, 0], attention.distance_embedding[3])
    assert torch.equal(r[:, 1], r[:, 2])
    assert torch.equal(r[:, 4], attention.distance_embedding[0])
    assert bias.shape == (2, 5)


def test_mistakes_are_named() -> None:
    given: list[Any] = inputs(3, 5, False)
    with pytest.raises(ShapeError, match="5 queries but only 3 keys"):
        relative_attention(given[1], given[0], given[0], given[3][:, :3], *given[4:])
    with pytest.raises(ShapeError, match="4 encoded distances for 5 keys"):
        relative_attention(*given[:3], given[3][:, :4], *given[4:])
    with pytest.raises(ConfigError, match="at least 1"):
        RelativeAttention(12, 0, 4)


@pytest.mark.parametrize("memory_len", [0, 3])
@pytest.mark.parametrize("batch", [0, 2])
def test_no_positions_or_no_rows(batch: int, memory_len: int) -> None:
    attention = RelativeAttention(12, 2)
    for q_len in (0, 2 - batch):
        x, memory = torch.randn(batch, q_len, 12, requires_grad=True), torch.randn(batch, memory_len, 12)
        out = attention(x, memory)
        assert out.shape == x.shape
        out.sum().backward()
        assert attention(x.detach(), memory, need_weights=True)[1].shape == (batch, 2, q_len, memory_len + q_len)


def both_ways(q_len: int, k_len: int) -> list[Any]:
    """As `inputs`, with a row for every distance from k_len - 1 down to -(q_len - 1), and with scores of distances."""
    given: list[Any] = inputs(q_len, k_len, True)
    given[3] = torch.randn(H, q_len + k_len - 1, D)
    given[6] = torch.randn(H, q_len + k_len - 1)
    return given


BOTH_WAYS = [(5, 5), (3, 8), (8, 3), (1, 4), (4, 1), (1, 1)]


@pytest.mark.parametrize(("q_len", "k_len"), BOTH_WAYS)
def test_both_ways_against_the_loop(make_mask: MakeMask, q_len: int, k_len: int) -> None:
    """The last query stands at the last key; later keys have distances below 0."""
    given = both_ways(q_len, k_len)
    mask = make_mask(B, q_len, k_len)
    query, key, value, positions, u, _, bias = given
    wanted = naive_relative_attention(
        query,
        key,
        value,
        lambda distance: positions[:, k_len - 1 - distance],
        u,
        torch.zeros_like(u),
        lambda distance: bias[:, k_len - 1 - distance],
        dense_mask(mask, q_len, k_len, query.device, k_len - q_len),
    )
    leaves, grads = [x.requires_grad_() for x in given if x is not None], []
    for path in ("products", "sdpa"):
        with modes.using_relative_path(path):
            found = relative_attention(*given, mask, causal=False)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        grads.append(torch.autograd.grad(found.square().sum(), leaves, allow_unused=True))
    torch.testing.assert_close(grads[1], grads[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("q_len", "k_len"), [size for size in BOTH_WAYS if size[0] <= size[1]])
def test_both_ways_under_a_causal_mask_is_one_way(q_len: int, k_len: int) -> None:
    given = both_ways(q_len, k_len)
    one_way = [*given[:3], given[3][:, :k_len], *given[4:6], given[6][:, :k_len]]
    found = relative_attention(*given, Causal(), causal=False)
    torch.testing.assert_close(found, relative_attention(*one_way), atol=1e-5, rtol=1e-5)


def test_distances_of_the_future_have_rows_of_their_own() -> None:
    """max_len rows from distance 0 up, num_future below it; beyond either end all are one."""
    attention = LearnedRelativeAttention(12, 2, 5, max_len=3, num_future=2)
    assert attention.distance_embedding.shape == (5, 2, 5)
    r, bias = attention.project_positions(torch.tensor([4, 2, 1, 0, -1, -2, -7]))
    rows = [4, 4, 3, 2, 1, 0, 0]
    assert torch.equal(r, attention.distance_embedding[rows].transpose(0, 1))
    assert bias is not None
    assert torch.equal(bias, attention.distance_bias[rows].t())
    assert not attention.causal
    assert LearnedRelativeAttention(12, 2, 5, max_len=3).causal


@pytest.mark.parametrize("num_future", [None, 0, 3])
@pytest.mark.parametrize("memory_len", [0, 2])
def test_places_need_not_be_given(num_future: int | None, memory_len: int) -> None:
    """What a Transformer-XL hands in is what the module makes for itself; without a batch too, and with weights."""
    torch.manual_seed(0)
    if num_future is None:
        attention: RelativeAttention = RelativeAttention(12, 2)
    else:
        attention = LearnedRelativeAttention(12, 2, max_len=4, num_future=num_future)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, memory = torch.randn(B, 5, 12), torch.randn(B, memory_len, 12) if memory_len else None
    distances = torch.arange(4 + memory_len, -5 if num_future else -1, -1)
    places = distances if num_future is not None else DistanceEncoding(12)(distances, 4 + memory_len)
    wanted = attention(x, memory, places)
    torch.testing.assert_close(attention(x, memory), wanted, atol=1e-5, rtol=1e-5)
    out, weights = attention(x, memory, need_weights=True)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert weights.shape == (B, 2, 5, 5 + memory_len)
    sees_the_future = bool(weights[:, :, 0, memory_len + 1 :].any())
    assert sees_the_future == bool(num_future)
    alone, alone_weights = attention(x[1], None if memory is None else memory[1], need_weights=True)
    torch.testing.assert_close(alone, wanted[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone_weights, weights[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attention(x[1], None if memory is None else memory[1]), wanted[1], atol=1e-5, rtol=1e-5)


def test_biases_by_name() -> None:
    attention = RelativeAttention(12, 3, bias=("v_proj", "out_proj"))
    assert attention.head_dim == 4
    assert {name for name, _ in attention.named_parameters() if name.endswith(".bias")} == {
        "v_proj.bias",
        "out_proj.bias",
    }
    torch.nn.init.ones_(attention.v_proj.bias)
    x = torch.randn(40, 12)
    _, value = attention.project_memory(x[None])
    torch.testing.assert_close(merge_heads(value)[0], attention.v_proj(x), atol=1e-5, rtol=1e-5)


def test_mistakes_both_ways() -> None:
    with pytest.raises(ShapeError, match="directions needs 7"):
        relative_attention(*inputs(3, 5, True), causal=False)
    with pytest.raises(ConfigError, match="num_future -1"):
        LearnedRelativeAttention(12, 2, max_len=3, num_future=-1)
    with pytest.raises(ConfigError, match="10 is not divisible"):
        RelativeAttention(10, 3)
    with pytest.raises(ConfigError, match="bias is"):
        RelativeAttention(12, 3, bias=("gate",))
    with pytest.raises(ShapeError, match="q_len, d_model"):
        RelativeAttention(12, 3)(torch.zeros(1, 2, 3, 12))


@pytest.mark.parametrize("asks", [False, True], ids=["memory without gradient", "memory with gradient"])
@pytest.mark.parametrize("precision", ["float64", "float32", "bf16 autocast"])
def test_keys_behind_a_memory_are_those_of_both_in_one_piece(precision: str, asks: bool) -> None:
    """As many rows as pay for one product; values and gradients as by plain autograd on memory and segment joined."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    attention = RelativeAttention(16, 2, 8).to(dtype)
    memory = torch.randn(4, 6, 16, dtype=dtype, requires_grad=asks)
    x = torch.randn(4, 5, 16, dtype=dtype, requires_grad=True)
    weights = [attention.k_proj.weight, attention.v_proj.weight]
    wanted = [x, *weights, *([memory] if asks else [])]
    tolerance = {"atol": 0.05, "rtol": 0.05} if "bf16" in precision else {"atol": 1e-5, "rtol": 1e-5}

    def gradients(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        loss = sum((y.to(dtype) * torch.randn(y.shape, dtype=dtype)).sum() for y in (k, v))
        return torch.autograd.grad(loss, wanted)  # type: ignore[arg-type]

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bf16" in precision):
        found = attention.project_memory(x, memory)
    joined = torch.cat([memory, x], dim=1)
    expected = [(joined @ weight.t()).view(4, 11, 2, 8).transpose(1, 2) for weight in weights]
    assert found[0].dtype is (torch.bfloat16 if "bf16" in precision else dtype)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.to(dtype), theirs, **tolerance)
    for mine, theirs in zip(gradients(*found), gradients(*expected), strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine, theirs, **tolerance)
