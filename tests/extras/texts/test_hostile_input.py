"""Every module and function of the texts with arguments that do not fit: no error of torch reaches the reader bare.

The checks of shapes in the tests would see some of these mistakes first, hence `unhooked`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.errors import ManyHeadsError
from manyheads.extras.texts import annotated_transformer as at
from manyheads.extras.texts import d2l, fused_qkv, labml
from manyheads.extras.texts import reformer as rf
from manyheads.extras.texts import transformer_xl as xl

pytestmark = pytest.mark.unhooked

X, H, L = torch.randn(2, 5, 8), torch.randn(2, 2, 5, 4), torch.tensor([2, 3])
IDS, S = torch.randint(1, 20, (2, 5)), torch.randn(5, 2, 8)
Call = Callable[[Any], Any]

VECTORS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "list": lambda x: [[1.0]],
    "width": lambda x: x[..., :-1],
    "one axis": lambda x: x.flatten()[:8],
    "more axes": lambda x: x[None, None],
    "integers": lambda x: x.long(),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "no rows": lambda x: x[:0],
    "no length": lambda x: x[..., :0, :],
    "bools": lambda x: x > 0,
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda i: None,
    "list": lambda i: [1],
    "floats": lambda i: i.float(),
    "too large": lambda i: i + 20,
    "negative": lambda i: i - 30,
    "bools": lambda i: i > 3,
    "one number": lambda i: i.flatten()[0],
    "more axes": lambda i: i[None, None],
}
LENGTHS: dict[str, Any] = {
    "other batch": torch.tensor([1, 2, 3]),
    "three axes": torch.zeros(2, 2, 2).long(),
    "negative": torch.tensor([-1, 2]),
    "list": [1, 2],
    "bools": torch.tensor([True, False]),
    "empty": torch.zeros(0).long(),
    "one number": torch.tensor(3),
}
MASKS: dict[str, Any] = {
    "other keys": torch.ones(2, 1, 6),
    "six axes": torch.ones(2, 2, 2, 5, 5, 2),
    "one axis": torch.ones(7),
    "numbers": torch.rand(2, 1, 5),
    "list": [[True]],
    "other batch": torch.ones(3, 1, 5),
}


def vectors() -> dict[str, tuple[Call, Tensor]]:
    """Name of an argument -> a call with it, and the right argument."""
    calls: dict[str, tuple[Call, Tensor]] = {}
    three: dict[str, Call] = {
        "d2l multi-head": lambda *x: d2l.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)(*x, L),
        "d2l dot": lambda *x: d2l.DotProductAttention(0.0)(*x, L),
        "d2l additive": lambda *x: d2l.AdditiveAttention(8, 8, 6, 0.0)(*x, L),
        "annotated multi-head": at.MultiHeadedAttention(2, 8),
    }
    for name, call in three.items():
        calls[f"{name} query"] = (lambda x, call=call: call(x, X, X), X)
        calls[f"{name} key"] = (lambda x, call=call: call(X, x, X), X)
        calls[f"{name} value"] = (lambda x, call=call: call(X, X, x), X)
    for name, call in {"fused": fused_qkv.scaled_dot_product, "annotated": at.attention}.items():
        calls[f"{name} query"] = (lambda x, call=call: call(x, H, H), H)
        calls[f"{name} key"] = (lambda x, call=call: call(H, x, H), H)
        calls[f"{name} value"] = (lambda x, call=call: call(H, H, x), H)
    for name, module in {
        "labml": labml.MultiHeadAttention(2, 8), "labml relative": labml.RelativeMultiHeadAttention(2, 8)
    }.items():  # fmt: skip
        calls[f"{name} query"] = (lambda x, m=module: m(query=x, key=S, value=S), S)
        calls[f"{name} key"] = (lambda x, m=module: m(query=S, key=x, value=S), S)
        calls[f"{name} value"] = (lambda x, m=module: m(query=S, key=S, value=x), S)
    norm, block = d2l.AddNorm([5, 8], 0.0), d2l.EncoderBlock(8, 8, 8, 8, [5, 8], 8, 16, 2, 0.0)
    position, relative = xl.PositionalEmbedding(8), xl.RelPartialLearnableMultiHeadAttn(2, 8, 4, 0.0)
    learned, official = xl.RelLearnableMultiHeadAttn(2, 8, 4, 0.0), xl.MultiHeadAttn(2, 8, 4, 0.0)
    distances, bias = position(torch.arange(4, -1, -1.0)), torch.randn(2, 4)
    rows, row_bias, in_heads = torch.randn(5, 2, 4), torch.randn(5, 2), torch.randn(5, 2, 2, 4)
    hashed, hashing, full = rf.LSHSelfAttention(8, 2, 2, 2), rf.LSHAttention(0.0, 2, 2), rf.FullQKAttention()
    halves = rf.FeedForward(4)
    targets, softmax = IDS.flatten(), xl.ProjectedAdaptiveLogSoftmax(20, 8, 8, [5, 10], div_val=2)
    return calls | {
        "d2l softmax": (lambda x: d2l.masked_softmax(x, L), X),
        "d2l softmax of all": (lambda x: d2l.masked_softmax(x, None), X),
        "d2l sequence_mask": (lambda x: d2l.sequence_mask(x, L), X),
        "d2l transpose_qkv": (lambda x: d2l.transpose_qkv(x, 2), X),
        "d2l transpose_output": (lambda x: d2l.transpose_output(x, 2), torch.randn(4, 5, 4)),
        "d2l positions": (d2l.PositionalEncoding(8, 0.0), X),
        "d2l feed-forward": (d2l.PositionWiseFFN(8, 16, 8), X),
        "d2l norm": (lambda x: norm(x, X), X),
        "d2l norm's second": (lambda x: norm(X, x), X),
        "d2l block": (lambda x: block(x, L), X),
        "d2l loss": (lambda x: d2l.MaskedSoftmaxCELoss()(x, IDS, L), torch.randn(2, 5, 20)),
        "d2l heat maps": (lambda x: d2l.show_heatmaps(x, "a", "b"), H),
        "fused multi-head": (fused_qkv.MultiheadAttention(8, 8, 2), X),
        "labml split": (labml.PrepareForMultiHeadAttention(8, 2, 4, True), X),
        "labml shift": (labml.shift_right, X),
        "labml scores": (lambda x: labml.MultiHeadAttention(2, 8).get_scores(x, in_heads), in_heads),
        "annotated feed-forward": (at.PositionwiseFeedForward(8, 16), X),
        "annotated norm": (at.LayerNorm(8), X),
        "annotated positions": (at.PositionalEncoding(8, 0.0), X),
        "annotated generator": (at.Generator(8, 20), X),
        "annotated sublayer": (lambda x: at.SublayerConnection(8, 0.0)(x, nn.Identity()), X),
        "annotated smoothing": (lambda x: at.LabelSmoothing(20, 0, 0.1)(x, targets), torch.randn(10, 20)),
        "xl positions": (position, torch.arange(5.0)[None]),
        "xl attention": (official, S),
        "xl attention memory": (lambda x: official(S, mems=x), S),
        "xl relative": (lambda x: relative(x, distances, bias, bias), S),
        "xl relative distances": (lambda x: relative(S, x, bias, bias), distances),
        "xl relative bias": (lambda x: relative(S, distances, x, bias), bias),
        "xl relative memory": (lambda x: relative(S, distances, bias, bias, mems=x), S),
        "xl learned": (lambda x: learned(x, rows, bias, row_bias), S),
        "xl learned rows": (lambda x: learned(S, x, bias, row_bias), rows),
        "xl learned bias": (lambda x: learned(S, rows, x, row_bias), bias),
        "xl learned row bias": (lambda x: learned(S, rows, bias, x), row_bias),
        "xl feed-forward": (xl.PositionwiseFF(8, 16, 0.0), X),
        "xl softmax": (lambda x: softmax(x, targets), torch.randn(10, 8)),
        "reformer attention": (hashed, X),
        "reformer keys": (lambda x: hashed(X, keys=x), X),
        "reformer positions": (lambda x: hashed(X, pos_emb=x), torch.randn(1, 5, 4)),
        "reformer hashed qk": (lambda x: hashing(x, X), X),
        "reformer hashed v": (lambda x: hashing(X, x), X),
        "reformer full qk": (lambda x: full(x, X), X),
        "reformer full v": (lambda x: full(X, x), X),
        "reformer buckets": (lambda x: hashing.hash_vectors(2, x), X),
        "reformer feed-forward": (rf.FeedForward(8), X),
        "reformer chunk": (rf.Chunk(2, nn.Identity()), X),
        "reformer norm": (rf.PreNorm(nn.LayerNorm, 8, nn.Identity()), X),
        "reformer learned positions": (rf.AbsolutePositionalEmbedding(8, 9), X),
        "reformer fixed positions": (rf.FixedPositionalEmbedding(8), X),
        "reformer sequence": (rf.ReversibleSequence([(halves, halves)]), X),
        "reformer block": (rf.ReversibleBlock(halves, halves), X),
        "reformer stack": (rf.Reformer(8, 1, heads=2, bucket_size=2), X),
        "reformer top_k": (rf.top_k, X),
        "reformer top_p": (rf.top_p, X),
        "reformer sorted": (lambda x: rf.sort_key_val(x, X), X),
        "reformer sorted values": (lambda x: rf.sort_key_val(X, x), X),
        "reformer selected": (lambda x: rf.batched_index_select(x, IDS % 5), X),
        "reformer lowest": (rf.max_neg_value, X),
        "reformer rotated": (lambda x: rf.apply_rotary_pos_emb(x, torch.randn(1, 5, 8)), X),
        "reformer rotation": (lambda x: rf.apply_rotary_pos_emb(X, x), torch.randn(1, 5, 8)),
    }


def chapter() -> tuple[Any, Any, Any]:
    """The d2l chapter's encoder, the two together, and the Annotated Transformer's model."""
    sizes = (20, 8, 8, 8, 8, [5, 8], 8, 16, 2, 1, 0.0)
    encoder = d2l.TransformerEncoder(*sizes)
    both = d2l.EncoderDecoder(encoder, d2l.TransformerDecoder(*sizes))
    return encoder, both, at.make_model(20, 20, N=1, d_model=8, d_ff=16, h=2)


def ids() -> dict[str, tuple[Call, Tensor]]:
    """The same for ids."""
    encoder, both, model = chapter()
    source, target = torch.ones(2, 1, 5), at.subsequent_mask(5)
    language = rf.ReformerLM(20, 8, 1, 16, heads=2, dim_head=4, bucket_size=2)
    wrapper = rf.TrainingWrapper(language)
    memory = xl.MemTransformerLM(20, 1, 2, 8, 4, 16, 0.0, 0.0, tgt_len=5, mem_len=5, ext_len=0)
    adaptive = xl.ProjectedAdaptiveLogSoftmax(20, 8, 8, [5, 10], div_val=2)
    return {
        "d2l encoder": (lambda i: encoder(i, L), IDS),
        "d2l source": (lambda i: both(i, IDS, L), IDS),
        "d2l target": (lambda i: both(IDS, i, L), IDS),
        "d2l label": (lambda i: d2l.MaskedSoftmaxCELoss()(torch.randn(2, 5, 20), i, L), IDS),
        "annotated embeddings": (at.Embeddings(8, 20), IDS),
        "annotated source": (lambda i: model(i, IDS, source, target), IDS),
        "annotated target": (lambda i: model(IDS, i, source, target), IDS),
        "annotated batch": (lambda i: at.Batch(i, IDS, 0), IDS),
        "annotated batch's target": (lambda i: at.Batch(IDS, i, 0), IDS),
        "annotated greedy": (lambda i: at.greedy_decode(model, i, source[:1], 3, 1), IDS[:1]),
        "annotated smoothing": (lambda i: at.LabelSmoothing(20, 0, 0.1)(torch.randn(10, 20), i), IDS.flatten()),
        "xl embedding": (xl.AdaptiveEmbedding(20, 8, 8, [5, 10], div_val=2), IDS),
        "xl softmax": (lambda i: adaptive(torch.randn(10, 8), i), IDS.flatten()),
        "xl data": (lambda i: memory(i, IDS.t()), IDS.t()),
        "xl target": (lambda i: memory(IDS.t(), i), IDS.t()),
        "reformer": (language, IDS),
        "reformer wrapper": (wrapper, IDS),
        "reformer loss": (lambda i: wrapper(i, return_loss=True), IDS),
        "reformer samples": (lambda i: wrapper.generate(i, 2), IDS),
        "reformer selected": (lambda i: rf.batched_index_select(X, i), IDS % 5),
    }


def lengths() -> dict[str, Call]:
    encoder, both, _ = chapter()
    block = d2l.EncoderBlock(8, 8, 8, 8, [5, 8], 8, 16, 2, 0.0)
    return {
        "multi-head": lambda lens: d2l.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)(X, X, X, lens),
        "dot": lambda lens: d2l.DotProductAttention(0.0)(X, X, X, lens),
        "additive": lambda lens: d2l.AdditiveAttention(8, 8, 6, 0.0)(X, X, X, lens),
        "softmax": lambda lens: d2l.masked_softmax(X, lens),
        "sequence_mask": lambda lens: d2l.sequence_mask(X, lens),
        "block": lambda lens: block(X, lens),
        "encoder": lambda lens: encoder(IDS, lens),
        "both": lambda lens: both(IDS, IDS, lens),
        "loss": lambda lens: d2l.MaskedSoftmaxCELoss()(torch.randn(2, 5, 20), IDS, lens),
    }


def masks() -> dict[str, Call]:
    model, hashed = chapter()[2], rf.LSHSelfAttention(8, 2, 2, 2)
    return {
        "fused": lambda m: fused_qkv.scaled_dot_product(H, H, H, m),
        "fused multi-head": lambda m: fused_qkv.MultiheadAttention(8, 8, 2)(X, mask=m),
        "labml": lambda m: labml.MultiHeadAttention(2, 8)(query=S, key=S, value=S, mask=m),
        "annotated": lambda m: at.attention(H, H, H, m),
        "annotated multi-head": lambda m: at.MultiHeadedAttention(2, 8)(X, X, X, m),
        "annotated source": lambda m: model(IDS, IDS, m, at.subsequent_mask(5)),
        "annotated target": lambda m: model(IDS, IDS, torch.ones(2, 1, 5), m),
        "xl": lambda m: xl.MultiHeadAttn(2, 8, 4, 0.0)(S, attn_mask=m),
        "reformer input": lambda m: hashed(X, input_mask=m),
        "reformer pairs": lambda m: hashed(X, input_attn_mask=m),
        "reformer context": lambda m: hashed(X, keys=X, context_mask=m),
        "reformer full": lambda m: rf.FullQKAttention()(X, X, input_mask=m),
    }


NONE_IS_RIGHT = {
    "annotated batch's target", "xl attention memory", "xl relative memory", "reformer keys", "reformer positions"
}  # fmt: skip


def cases() -> Iterator[Any]:
    for calls, spoilt in ((vectors(), VECTORS), (ids(), WHOLE)):
        for name, (call, right) in calls.items():
            for what, spoil in spoilt.items():
                refused = what in ("none", "list", "floats") and not (what == "none" and name in NONE_IS_RIGHT)
                refused &= not (what == "floats" and name.startswith("annotated batch"))
                yield pytest.param(call, spoil(right), refused, id=f"{name}: {what}")
    for named, given in ((lengths(), LENGTHS), (masks(), MASKS)):
        for name, call in named.items():
            for what, value in given.items():
                yield pytest.param(call, value, what in ("list", "six axes"), id=f"{name}: {what}")


@pytest.mark.parametrize(("call", "given", "refused"), list(cases()))
def test_no_error_is_bare(call: Call, given: Any, refused: bool) -> None:
    """A result, or our sentence; what is no tensor never has a result. Of the types that torch raises, too."""
    error: ManyHeadsError | None = None
    try:
        call(given)
    except ManyHeadsError as caught:
        error = caught
    if error is None:
        assert not refused, "it has a result"
        return
    assert isinstance(error, RuntimeError | TypeError | IndexError | ValueError | AssertionError)
    assert "\n" not in str(error)
    assert len(str(error)) > 20
    if given is None or isinstance(given, list):
        assert isinstance(error, TypeError | AttributeError)


MODULES = {
    "d2l": lambda: d2l.PositionWiseFFN(8, 16, 8),
    "fused": lambda: fused_qkv.MultiheadAttention(8, 8, 2),
    "labml": lambda: labml.PrepareForMultiHeadAttention(8, 2, 4, True),
    "annotated": lambda: at.Generator(8, 20),
    "xl": lambda: xl.PositionwiseFF(8, 16, 0.0),
    "reformer": lambda: rf.FeedForward(8),
}


@pytest.mark.parametrize("text", MODULES)
def test_other_numbers_are_named(text: str) -> None:
    """float64 for weights in float32, and whole numbers: torch's RuntimeError with the remedy."""
    module = MODULES[text]()
    for given, said in ((X.double(), r"float64, but .*weight.* of torch\.float32.*\.to\("), (X.long(), r"\.float\(\)")):
        with pytest.raises(RuntimeError, match=said) as caught:
            module(given)
        assert isinstance(caught.value, ManyHeadsError)
