"""What the Triton kernels cannot compute is refused where they are asked for by name; otherwise nothing changes."""

import pytest
import torch

from manyheads.cli.commands.doctor import triton_line
from manyheads.errors import RequestError
from manyheads.nn import RelativeMultiHeadAttention, fused_relative_attention
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.lsh import LSHSelfAttention, LSHSettings
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import modes, policy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU of compute capability 9.0, Triton and a C compiler."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(policy, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(policy.shutil, "which", lambda name: f"/usr/bin/{name}")


REFUSED = {
    "needs an NVIDIA GPU of compute capability 8.0, but this is on cpu": (CPU, torch.float32, 64, 0.0),
    "float32, float16 and, on a GPU, bfloat16, not in torch.float64": (GPU, torch.float64, 64, 0.0),
    "has heads of at most 128 numbers, not 129": (GPU, torch.bfloat16, 129, 0.0),
    "has no dropout of attention weights, here 0.1": (GPU, torch.bfloat16, 64, 0.1),
}


@pytest.mark.parametrize(("message", "given"), REFUSED.items(), ids=REFUSED)
def test_what_a_kernel_lacks(card, message, given):
    assert message in (policy.triton_lack(*given) or "")
    assert policy.triton_lack(GPU, torch.bfloat16, 128) is None


def test_an_old_card_and_a_machine_without_compiler(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.shutil, "which", lambda name: None)
    assert "needs a C compiler" in (policy.triton_lack(GPU, torch.float32) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "needs an NVIDIA GPU of compute capability 8.0" in (policy.triton_lack(GPU, torch.float32) or "")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it is refused in one sentence; otherwise the plain path computes, as it did."""
    monkeypatch.setattr(policy, "_has_triton", lambda: False)
    attention, x = RelativeMultiHeadAttention(8, 2), torch.randn(1, 3, 8)
    wanted = attention(x)
    message = "needs the package triton, which is not installed: pip install triton"
    with modes.using_triton(), pytest.raises(RequestError, match=message):
        attention(x)
    attention.fused = True
    with pytest.raises(RequestError, match=message):
        attention(x)
    heads, vector, distances = torch.randn(1, 2, 3, 4), torch.randn(2, 4), torch.randn(2, 3, 4)
    with pytest.raises(RequestError, match=message):
        fused_relative_attention(heads, heads, heads, distances, vector)
    head, ids = LinearHead(8, 5), torch.ones(1, 3, dtype=torch.int64)
    for is_fast in (False, True):
        with modes.fast(is_fast), modes.using_triton(), pytest.raises(RequestError, match=message):
            head.loss(x, ids, ids > 0)
    _, weights = attention(x, need_weights=True)
    assert weights.shape == (1, 2, 3, 3)
    attention.fused = False
    torch.testing.assert_close(attention(x), wanted)


def test_doctor_says_what_is_missing(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_line() == "can be asked for"
    monkeypatch.setattr(policy, "_has_triton", lambda: False)
    assert triton_line().startswith("not used; a kernel needs the package triton, which is not installed")


def test_nothing_is_a_default_before_it_is_proven(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCUDA:
        device, dtype, is_cuda = GPU, torch.bfloat16, True

    def uses(rate: float = 0.0) -> bool:
        return policy.uses_triton("relative attention", OnCUDA(), width=64, rate=rate)  # type: ignore[arg-type]

    monkeypatch.setattr(policy, "version", lambda name: "3.7.1")
    with modes.fast():
        assert not policy._PROVEN_TRITON
        assert not uses()
        monkeypatch.setattr(
            policy, "_PROVEN_TRITON", frozenset({((9, 0), torch.__version__, "3.7.1", "relative attention")})
        )
        assert uses()
        assert not uses(rate=0.1)
        monkeypatch.setattr(policy, "version", lambda name: "3.6.0")
        assert not uses()
    with modes.using_triton():
        assert uses()
        with pytest.raises(RequestError, match="The Triton kernel of relative attention has no dropout"):
            uses(rate=0.1)


def test_hashed_and_local_attention_are_refused_by_name_alone(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they are computed by torch, and so are weights that are asked for."""
    once = LSHSelfAttention(8, 2, settings=LSHSettings(chunk_len=4, correct_duplicates=True), max_len=16)
    hashed, local = (
        LSHSelfAttention(8, 2, settings=LSHSettings(chunk_len=4), max_len=16, dropout=0.1),
        LocalSelfAttention(8, 2, chunk_len=4, dropout=0.1),
    )
    x = torch.randn(1, 9, 8)
    wanted = once(x, seed=0)
    with modes.using_triton():
        with pytest.raises(RequestError, match="The Triton kernel of chunk attention needs an NVIDIA GPU"):
            local.eval()(x)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(RequestError, match="meets; set correct_duplicates to false, or leave it out"):
            once(x, seed=0)
        for module in (hashed, local.train()):
            given = {} if module is local else {"buckets": torch.zeros(1, 2, 4, 9, dtype=torch.int64)}
            with pytest.raises(RequestError, match="of chunk attention has no dropout of attention weights"):
                module(x, **given)
        assert local(x, need_weights=True)[1].shape == (1, 2, 9, 9)
        with modes.using_triton(False):
            torch.testing.assert_close(once(x, seed=0), wanted)
    monkeypatch.setattr(policy, "_has_triton", lambda: False)
    torch.testing.assert_close(once(x, seed=0), wanted)
    with modes.using_triton(), pytest.raises(RequestError, match="needs the package triton, which is not installed"):
        hashed(x, seed=0)
