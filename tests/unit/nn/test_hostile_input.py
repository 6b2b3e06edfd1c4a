"""Every public module and function of `nn` with arguments that do not fit: a sentence of ours, of torch's type too.

The checks of shapes in the tests would see most of these mistakes first, hence `unhooked`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyheads.nn as ours
from manyheads.errors import ConfigError, ManyHeadsError
from manyheads.extras.peers import conventions
from manyheads.nn.positions import FeatureEmbedding, TokenEmbedding
from manyheads.nn.shapes import explained

pytestmark = pytest.mark.unhooked

X, HEADS, IDS = torch.randn(2, 5, 8), torch.randn(2, 2, 5, 4), torch.randint(0, 20, (2, 5))
KEEP, ROWS = torch.ones(2, 5, dtype=torch.bool), torch.randn(10, 8)
Call = Callable[[Any], Any]

SPOILT: dict[str, tuple[Callable[[Tensor], Any], tuple[type[Exception], ...], str]] = {
    "none": (lambda x: None, (TypeError, AttributeError), "NoneType"),
    "list": (lambda x: [[1.0]], (TypeError, AttributeError), "list"),
    "width": (lambda x: x[..., :-1], (RuntimeError, ValueError), r"\d"),
    "one axis": (lambda x: x.flatten()[:8], (RuntimeError, IndexError), r"\(8,\)|axes|numbers|floating|float32"),
    "more axes": (lambda x: x[None, None], (RuntimeError, IndexError), r"\(1, 1, |float32"),
    "integers": (lambda x: x.long(), (RuntimeError,), "int64|shape"),
    "double": (lambda x: x.double(), (RuntimeError,), "float64|shape"),
    "half": (lambda x: x.half(), (RuntimeError,), "float16|shape"),
    "bools": (lambda x: x > 0, (RuntimeError,), "bool|shape"),
    "no rows": (lambda x: x[:0], (RuntimeError, IndexError), r"\(0|float32"),
    "no length": (lambda x: x[..., :0, :], (RuntimeError, IndexError), "0|float32"),
}
"""What is done to vectors, the types that torch raises for them, and what the sentence has."""
SPOILT_IDS: dict[str, tuple[Callable[[Tensor], Any], tuple[type[Exception], ...], str]] = {
    "none": (lambda x: None, (TypeError, AttributeError), "NoneType"),
    "list": (lambda x: [1], (TypeError, AttributeError), "list"),
    "floats": (lambda x: x.float(), (RuntimeError, TypeError), r"float32; give whole numbers: \w+\.long\(\)"),
    "too large": (lambda x: x + 20, (RuntimeError, IndexError), r"from \d+ to \d\d"),
    "negative": (lambda x: x - 30, (RuntimeError, IndexError), r"from -\d+ to"),
    "one number": (lambda x: x.flatten()[0], (RuntimeError, IndexError), r"\(\)"),
    "no rows": (lambda x: x[:0], (RuntimeError, IndexError), r"\(0"),
}
EMPTY = "no rows, no length"


def modules() -> dict[str, tuple[Call, Tensor, str]]:
    """Name of a public name and its argument -> call, a right argument, and what is right among the spoilt ones."""
    settings = ours.LSHSettings(num_hashes=2, chunk_len=2)
    lsh = ours.LSHSelfAttention(8, 2, settings=settings, max_len=64)
    mha, local = ours.MultiHeadAttention(8, 2), ours.LocalSelfAttention(8, 2, chunk_len=2)
    relative = ours.RelativeMultiHeadAttention(8, 2)
    learned = ours.LearnedRelativeMultiHeadAttention(8, 2, max_len=8)
    dot, additive, score = ours.DotProductAttention(), ours.AdditiveAttention(8, 8, 6), ours.AdditiveScore(2, 4)
    torchs = ours.TorchMultiheadAttention(8, 2, batch_first=True)
    plain, chunked = ours.FeedForward(8, 16), ours.FeedForward(8, 16, chunk_len=2)
    pre, post = (ours.Residual(nn.LayerNorm(8), position=p, dropout=0.0) for p in ("pre", "post"))
    reversible = ours.ReversibleSequence([(plain, plain)])
    head = ours.LinearHead(8, 20)
    adaptive = ours.AdaptiveLogSoftmax(20, 8, cutoffs=(5, 10), d_embed=8, div_value=2)
    changes_type = "integers, double, half, bools"
    calls: dict[str, tuple[Call, Tensor, str]] = {
        "MultiHeadAttention query": (mha, X, EMPTY),
        "MultiHeadAttention key": (lambda x: mha(X, x, X), X, "none"),
        "MultiHeadAttention value": (lambda x: mha(X, X, x), X, "none"),
        "MultiHeadAttention memory": (lambda x: mha(X, x), X, "none, no length"),
        "MultiHeadAttention state": (lambda x: mha(x, state=mha.empty_cache(2, X)), X, "no length"),
        "RotaryPositions attention": (ours.MultiHeadAttention(8, 2, rotary=ours.RotaryPositions(4)), X, EMPTY),
        "LocalSelfAttention": (local, X, EMPTY),
        "LSHSelfAttention": (lambda x: lsh(x, seed=1), X, EMPTY),
        "LSHSelfAttention exact": (lambda x: lsh(x, num_hashes=0), X, EMPTY),
        "RelativeMultiHeadAttention": (relative, X, EMPTY),
        "RelativeMultiHeadAttention memory": (
            lambda x: relative(X, x), X, "none, integers, half, bools, no length"),
        "LearnedRelativeMultiHeadAttention": (learned, X, EMPTY),
        "AdditiveAttention query": (lambda x: additive(x, X, X), X, "no length"),
        "AdditiveAttention key": (lambda x: additive(X, x, X), X, ""),
        "AdditiveAttention value": (lambda x: additive(X, X, x), X, "width"),
        "DotProductAttention query": (lambda x: dot(x, X, X), X, "no length"),
        "DotProductAttention key": (lambda x: dot(X, x, X), X, ""),
        "DotProductAttention value": (lambda x: dot(X, X, x), X, "width"),
        "DotProductAttention weights": (
            lambda x: dot(x, X, X, need_weights=True), X, "integers, bools, no length"),
        "AdditiveScore query": (lambda x: score(x, HEADS), HEADS, "no length"),
        "AdditiveScore key": (lambda x: score(HEADS, x), HEADS, "no length"),
        "dot_product_attention query": (lambda x: ours.dot_product_attention(x, HEADS, HEADS), HEADS, "no length"),
        "dot_product_attention key": (lambda x: ours.dot_product_attention(HEADS, x, HEADS), HEADS, ""),
        "dot_product_attention value": (lambda x: ours.dot_product_attention(HEADS, HEADS, x), HEADS, "width, no rows"),
        "dot_product_weights": (
            lambda x: ours.dot_product_weights(x, HEADS), HEADS, "integers, bools, no length"),
        "masked_softmax scores": (
            lambda x: ours.masked_softmax(x, None), HEADS, f"width, one axis, more axes, double, half, {EMPTY}"),
        "masked_softmax allowed": (lambda x: ours.masked_softmax(HEADS, x), HEADS, "none, bools"),
        "split_heads": (lambda x: ours.split_heads(x, 2), X, f"more axes, {changes_type}, {EMPTY}"),
        "merge_heads": (ours.merge_heads, HEADS, f"width, more axes, {changes_type}, {EMPTY}"),
        "relative_shift": (ours.relative_shift, HEADS, f"width, more axes, {changes_type}, {EMPTY}"),
        "TorchMultiheadAttention query": (lambda x: torchs(x, X, X), X, "no length"),
        "TorchMultiheadAttention key": (lambda x: torchs(X, x, X), X, ""),
        "TorchMultiheadAttention value": (lambda x: torchs(X, X, x), X, ""),
        "TorchMultiheadAttention key_padding_mask": (lambda x: torchs(X, X, X, x), X, "none"),
        "TorchMultiheadAttention attn_mask": (lambda x: torchs(X, X, X, attn_mask=x), X, "none"),
        "FeedForward": (plain, X, f"one axis, more axes, {EMPTY}"),
        "FeedForward chunked": (chunked, X, EMPTY),
        "Residual pre": (lambda x: pre(x, nn.Identity()), X, f"one axis, more axes, half, {EMPTY}"),
        "Residual post": (lambda x: post(x, nn.Identity()), X, f"one axis, more axes, half, {EMPTY}"),
        "ReversibleSequence x1": (lambda x: reversible(x, X), X, "integers, half, bools"),
        "ReversibleSequence x2": (lambda x: reversible(X, x), X, ""),
        "SinusoidalPositions": (ours.SinusoidalPositions(8), X, f"{changes_type}, {EMPTY}"),
        "LearnedPositions": (ours.LearnedPositions(8, max_len=9), X, f"{changes_type}, {EMPTY}"),
        "AxialPositions": (ours.AxialPositions((3, 3), (4, 4)), X, f"{changes_type}, {EMPTY}"),
        "RotaryPositions": (ours.RotaryPositions(4), HEADS, f"{changes_type}, {EMPTY}"),
        "sinusoidal_table": (lambda x: ours.sinusoidal_table(x, 8), X, "one axis"),
        "LinearHead log_probs": (head.log_probs, X, f"one axis, more axes, {EMPTY}"),
        "LinearHead hidden": (lambda x: head.loss(x, IDS, KEEP), X, "integers?, double?, half?"),
        "LinearHead keep": (lambda x: head.loss(X, IDS, x), X, ""),
        "LinearHead token_losses": (lambda x: head.token_losses(x, IDS.flatten()), ROWS, ""),
        "AdaptiveLogSoftmax log_probs": (adaptive.log_probs, X, f"one axis, more axes, {EMPTY}"),
        "AdaptiveLogSoftmax logits": (adaptive.logits, X, f"one axis, more axes, {EMPTY}"),
        "AdaptiveLogSoftmax hidden": (lambda x: adaptive.loss(x, IDS, KEEP), X, ""),
        "AdaptiveLogSoftmax keep": (lambda x: adaptive.loss(X, IDS, x), X, ""),
        "AdaptiveLogSoftmax token_losses": (lambda x: adaptive.token_losses(x, IDS.flatten()), ROWS, ""),
    }  # fmt: skip
    for name in ("SinusoidalPositions", "LearnedPositions", "AxialPositions"):
        calls[f"{name} first_position"] = (lambda x, m=calls[name][0]: m(X, x), X, "")
    return calls


def tables() -> dict[str, tuple[Call, Tensor, str]]:
    """The same for ids."""
    options: dict[str, Any] = {"cutoffs": (5, 10), "d_embed": 8, "div_value": 2}
    head, adaptive = ours.LinearHead(8, 20), ours.AdaptiveLogSoftmax(20, 8, **options)
    one_table = ours.AdaptiveEmbedding(20, 8, cutoffs=(), d_embed=8, div_value=1)
    return {
        "TokenEmbedding": (TokenEmbedding(20, 8), IDS, "one number, no rows"),
        "FeatureEmbedding": (FeatureEmbedding(20, 8), IDS[..., None], "no rows"),
        "AdaptiveEmbedding": (ours.AdaptiveEmbedding(20, 8, **options), IDS, "one number, no rows"),
        "AdaptiveEmbedding one table": (one_table, IDS, "one number, no rows"),
        "LinearHead targets": (lambda x: head.loss(X, x, KEEP), IDS, ""),
        "AdaptiveLogSoftmax targets": (lambda x: adaptive.loss(X, x, KEEP), IDS, ""),
        "LinearHead tokens": (lambda x: head.token_losses(ROWS, x), IDS.flatten(), ""),
        "AdaptiveLogSoftmax tokens": (lambda x: adaptive.token_losses(ROWS, x), IDS.flatten(), "no rows?"),
    }


def cases() -> Iterator[Any]:
    for calls, spoilt in ((modules(), SPOILT), (tables(), SPOILT_IDS)):
        for name, (call, right, runs) in calls.items():
            for what, (spoil, kinds, said) in spoilt.items():
                if f"{what}?" not in runs.split(", "):  # what the machine's kernel makes of it
                    yield pytest.param(call, spoil(right), kinds, said, what in runs.split(", "), id=f"{name}: {what}")


@pytest.mark.parametrize(("call", "given", "kinds", "said", "runs"), list(cases()))
def test_a_spoilt_tensor(call: Call, given: Any, kinds: tuple[type[Exception], ...], said: str, runs: bool) -> None:
    """It has a result where that means something; otherwise the sentence names what is wrong."""
    if runs:
        call(given)
        return
    with pytest.raises(ManyHeadsError, match=said) as caught:
        call(given)
    for kind in kinds:
        assert isinstance(caught.value, kind)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_every_public_name_is_covered() -> None:
    """Descriptions of masks have tests below; these names compute nothing of a tensor."""
    names = {name.partition(" ")[0] for name in (*modules(), *tables())}
    masks = {"Bias", "Causal", "Dense", "KeyPadding", "Lengths", "Mask", "Window"}
    others = {"KeyValueCache", "LSHSettings", "fast", "observe"}
    for_gpus = {"fused_relative_attention", "fused_relative_attention_of_segments"}
    assert set(ours.__all__) - masks - others - for_gpus == names - {"TokenEmbedding", "FeatureEmbedding"}


ATTENTIONS: dict[str, Call] = {
    "MultiHeadAttention": lambda mask: ours.MultiHeadAttention(8, 2)(X, mask=mask),
    "DotProductAttention": lambda mask: ours.DotProductAttention()(X, X, X, mask=mask),
    "AdditiveAttention": lambda mask: ours.AdditiveAttention(8, 8, 6)(X, X, X, mask=mask),
    "RelativeMultiHeadAttention": lambda mask: ours.RelativeMultiHeadAttention(8, 2)(X, mask=mask),
}


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=list(ATTENTIONS))
@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (lambda: ours.Lengths(torch.tensor([1, 2, 3])), "3 rows for a batch of 2"),
        (lambda: ours.Lengths(torch.tensor(3)), r"lengths of shape \(\) do not fit"),
        (lambda: ours.Lengths(torch.zeros(2, 2, 2).long()), r"lengths of shape \(2, 2, 2\)"),
        (lambda: ours.Lengths([1, 2]), "lengths is list"),  # type: ignore[arg-type]
        (lambda: conventions.from_valid_lens(torch.tensor([0.5, 2.0])), "float32"),
        (lambda: conventions.from_valid_lens(None), "valid_lens is NoneType"),  # type: ignore[arg-type]
        (lambda: ours.KeyPadding(torch.ones(2, 6, dtype=torch.bool)), "covers 6 keys but there are 5"),
        (lambda: ours.KeyPadding(torch.ones(3, 5, dtype=torch.bool)), "3 rows for a batch of 2"),
        (lambda: ours.KeyPadding(torch.ones(5, dtype=torch.bool)), r"keep has shape \(5,\)"),
        (lambda: ours.KeyPadding(None), "keep is NoneType"),  # type: ignore[arg-type]
        (lambda: ours.Dense(torch.ones(2, 4, 5)), r"\(2, 4, 5\) does not fit 5 queries and 5 keys"),
        (lambda: ours.Dense(torch.tensor(True)), r"dense mask of shape \(\) does not fit"),
        (lambda: ours.Dense(None), "is NoneType"),  # type: ignore[arg-type]
        (lambda: torch.ones(5, 5), "a mask is a description, not a tensor"),
        (lambda: [[True]], "mask is list"),
        (lambda: 3, "mask is int"),
    ],
)
def test_a_mask_that_does_not_fit(attention: Call, mask: Callable[[], Any], said: str) -> None:
    with pytest.raises(ManyHeadsError, match=said) as caught:
        attention(mask())
    assert isinstance(caught.value, ValueError | RuntimeError)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ours.MultiHeadAttention(8, 3), "d_model 8 is not divisible by num_heads 3"),
        (lambda: ours.MultiHeadAttention(8, 0), "num_heads is 0; it must be a whole number of at least 1"),
        (lambda: ours.MultiHeadAttention(8, 2.0), r"num_heads is 2\.0"),  # type: ignore[arg-type]
        (lambda: ours.MultiHeadAttention(8, None), "num_heads is None"),  # type: ignore[arg-type]
        (lambda: ours.MultiHeadAttention("8", 2), "d_model is '8'"),  # type: ignore[arg-type]
        (lambda: ours.MultiHeadAttention(8, 2, dropout=2.0), r"dropout is 2\.0; it must be a number from 0 to 1"),
        (lambda: ours.LocalSelfAttention(8, 3, chunk_len=2), "num_heads 3"),
        (lambda: ours.LSHSelfAttention(8, 3, settings=ours.LSHSettings(), max_len=64), "num_heads 3"),
        (lambda: ours.RelativeMultiHeadAttention(8, 3), "num_heads 3"),
        (lambda: ours.LearnedRelativeMultiHeadAttention(8, 3, max_len=4), "num_heads 3"),
        (lambda: ours.AdditiveAttention(-1, 8, 8), "query_dim is -1"),
        (lambda: ours.AdditiveScore(-2, 4), "num_heads is -2"),
        (lambda: ours.DotProductAttention(dropout=-0.5), r"dropout is -0\.5"),
        (lambda: ours.FeedForward(0, 8), "d_model is 0"),
        (lambda: ours.FeedForward(8, 8, dropout=3.0), r"dropout is 3\.0"),
        (lambda: ours.LinearHead(-8, 8), "d_model is -8"),
        (lambda: ours.LearnedPositions(8, max_len=0), "max_len is 0"),
        (lambda: ours.SinusoidalPositions(8.5), r"d_model is 8\.5"),  # type: ignore[arg-type]
        (lambda: TokenEmbedding(-1, 8), "vocab_size is -1"),
    ],
)
def test_a_size_out_of_range(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make()
    for kind in (ValueError, TypeError, RuntimeError, AssertionError):
        assert isinstance(caught.value, kind)


def test_other_errors_stay_as_they_are() -> None:
    """A fault in a reader's own module, or of memory, is no fault of the arguments."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of the reader")

    with pytest.raises(RuntimeError, match="of the reader") as caught:
        ours.Residual(nn.LayerNorm(8), position="pre", dropout=0.0)(X, Broken())
    assert not isinstance(caught.value, ManyHeadsError)


@pytest.mark.parametrize(
    "said", ["CUDA out of memory. Tried to allocate 2.00 GiB", "DefaultCPUAllocator: can't allocate memory"]
)
def test_memory_is_no_fault_of_the_arguments(said: str) -> None:
    """Although a batch of one beside a batch of two would be one, if torch had refused it."""

    class Large(ours.AdditiveScore):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said[:10]) as caught:
        ours.MultiHeadAttention(8, 2, score=Large(2, 4))(X, X[:1])
    assert not isinstance(caught.value, ManyHeadsError)


def test_a_call_that_works_is_only_called() -> None:
    """No argument is looked at before a call has failed."""

    class Unread:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    assert explained(lambda x: 3)(Unread()) == 3
