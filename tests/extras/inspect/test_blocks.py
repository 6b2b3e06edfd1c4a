"""The blocks of a model follow from the model: every choice of a config that changes them is seen."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.catalogue import ARCHITECTURES, ATTENTIONS, build_model
from manyheads.extras.inspect.blocks import Block, ModelBlocks, Stack, blocks_of
from manyheads.nn.attention.observing import attentions_of

VOCAB = 50


def config_of(architecture: str, **changes: Any) -> Any:
    config = ARCHITECTURES[architecture].presets["debug"]
    sizes = [size for size in ("vocab_size", "source_vocab_size", "target_vocab_size") if hasattr(config, size)]
    return replace(config, **{**dict.fromkeys(sizes, VOCAB), **changes})


def blocks(architecture: str, **changes: Any) -> ModelBlocks:
    torch.manual_seed(1)
    return blocks_of(build_model(config_of(architecture, **changes)).eval())


def names(some: tuple[Block, ...]) -> list[str]:
    return [block.name for block in some]


def sublayers(stack: Stack) -> list[tuple[str, str | None, tuple[str, ...]]]:
    [kind] = stack.kinds
    return [(block.name, block.wiring, block.lines) for block in kind.blocks]


def test_the_transformer_of_the_paper() -> None:
    found = blocks("transformer", num_encoder_layers=3, target_vocab_size=VOCAB)
    encoder, decoder = found.stacks
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert (encoder.num_layers, decoder.num_layers) == (3, 2)
    assert names(encoder.before) == ["Embedding", "Sinusoidal positions"]
    assert encoder.before[0].lines == ("50 tokens x 32, times √32", "matrix E, shared")
    assert encoder.before[0].shape == "n x 32"
    heads, inner = ("4 heads of 8",), ("32 → 64 → 32, ReLU",)
    assert sublayers(encoder) == [("Multi-head attention", "post", heads), ("Feed-forward", "post", inner)]
    assert sublayers(decoder) == [
        ("Masked multi-head attention", "post", heads),
        ("Multi-head attention", "post", heads),
        ("Feed-forward", "post", inner),
    ]
    assert [block.is_cross for block in decoder.kinds[0].blocks] == [False, True, False]
    assert encoder.after == decoder.after == ()
    [head] = found.output
    assert head.lines == ("32 → 50", "matrix E, shared")
    assert head.shape == "n x 50"


@pytest.mark.parametrize(
    ("tied", "shared"),
    [
        ("all", [True, True, True]),
        ("decoder", [False, True, True]),
        ("embeddings", [True, True, False]),
        ("none", [False, False, False]),
    ],
)
def test_shared_matrices(tied: str, shared: list[bool]) -> None:
    found = blocks("transformer", tie_embeddings=tied)
    boxes = [*(stack.before[0] for stack in found.stacks), *found.output]
    assert ["matrix E, shared" in box.lines for box in boxes] == shared


def test_choices_of_the_transformer() -> None:
    found = blocks("transformer", norm_position="pre", positions="learned", max_len=9, activation="gelu", d_ff=70)
    encoder, decoder = found.stacks
    assert {wiring for stack in found.stacks for _, wiring, _ in sublayers(stack)} == {"pre"}
    assert names(encoder.after) == names(decoder.after) == ["Norm"]
    assert encoder.before[1].lines == ("9 positions",)
    assert sublayers(encoder)[1][2] == ("32 → 70 → 32, GELU",)
    assert blocks("transformer", scale_embedding=False).stacks[0].before[0].lines[0] == "50 tokens x 32"
    found = blocks("transformer", num_decoder_heads=2, decoder_d_ff=80, head_dim=6, value_dim=5)
    assert sublayers(found.stacks[0])[0][2] == ("4 heads of 6, values 5",)
    assert [lines for _, _, lines in sublayers(found.stacks[1])[1:]] == [
        ("2 heads of 6, values 5",),
        ("32 → 80 → 32, ReLU",),
    ]
    assert found.operations[0].has_other_sizes


def test_layers_with_other_heads() -> None:
    found = blocks("transformer", encoder_heads=(4, 1))
    first, second = found.stacks[0].kinds
    assert [kind.blocks[0].lines for kind in (first, second)] == [("4 heads of 8",), ("1 heads of 8",)]


@pytest.mark.parametrize(
    ("kind", "sides", "before", "name"),
    [
        ("relative", ["Memory", "Distances"], ["Embedding"], "Masked relative attention"),
        ("relative_learned", ["Memory"], ["Embedding"], "Masked relative attention"),
        ("absolute", ["Memory"], ["Embedding", "Distances"], "Masked multi-head attention"),
        ("absolute_learned", ["Memory", "Trained positions"], ["Embedding"], "Masked multi-head attention"),
    ],
)
def test_attention_of_a_transformer_xl(kind: str, sides: list[str], before: list[str], name: str) -> None:
    [stack] = blocks("transformer-xl", attention=kind, share_biases=False).stacks
    assert names(stack.sides) == sides
    assert names(stack.before) == before
    assert sublayers(stack)[0][0] == name
    [stack] = blocks("transformer-xl", attention=kind, share_biases=False, memory_len=0).stacks
    assert names(stack.sides) == sides[1:]


def test_clusters_of_a_transformer_xl() -> None:
    found = blocks("transformer-xl", cutoffs=(10, 30), div_value=2)
    [stack] = found.stacks
    assert stack.before[0].lines[:3] == ("10 tokens x 32 → 32", "20 tokens x 16 → 32", "20 tokens x 8 → 32")
    assert found.output[0].lines == ("clusters of 10, 20, 20", "matrix E, shared")
    assert "matrix E, shared" not in blocks("transformer-xl", tie_embeddings=False).output[0].lines


def test_layers_of_a_reformer_in_their_pattern() -> None:
    found = blocks("reformer", num_layers=5, layers=("local", "lsh", "full"))
    [stack] = found.stacks
    assert {kind.layers: kind.blocks[0].name for kind in stack.kinds} == {
        (1, 4): "Masked local attention",
        (2, 5): "Masked LSH attention",
        (3,): "Masked full attention, shared Q and K",
    }
    assert {block.wiring for kind in stack.kinds for block in kind.blocks} == {"reversible"}
    assert stack.kinds[1].blocks[0].lines[1] == "2 rounds, 16 buckets, 4 keys each"
    local = ("2 heads of 12", "chunks of 4: its own, 1 before, 0 after")
    assert stack.kinds[0].blocks[0].lines == local
    [kind] = blocks("reformer", layers=("local",), local_slopes=True).stacks[0].kinds
    assert kind.blocks[0].lines == (*local, "scores fall with the distance")
    [kind] = blocks("reformer", layers=("local",), local_slopes=True, train_slopes=True).stacks[0].kinds
    assert kind.blocks[0].lines == (*local, "trained penalties for distances")
    assert stack.after[0].shape == "n x 64"  # both streams
    assert [one.kind for one in found.operations] == [
        "Local attention",
        "LSH attention",
        "Full attention, shared Q and K",
    ]


def test_hashing_is_seen_behind_positions_that_are_exact() -> None:
    [_, lsh] = blocks("reformer", exact_len=20).operations
    assert [step for step, _ in lsh.steps][1:4] == ["Hash", "Sort", "Cut"]


def test_encoders_are_not_masked() -> None:
    for architecture in ("transformer-classifier", "reformer-classifier"):
        found = blocks(architecture)
        [stack] = found.stacks
        assert not any("asked" in block.name for kind in stack.kinds for block in kind.blocks)
        assert names(found.output) == ["Pooling", "Linear, softmax"]
        assert found.output[1].shape == "2"
        assert found.result == "probabilities of the labels"


def test_a_chart_parser_has_features_in_and_spans_out() -> None:
    found = blocks("transformer-spans")
    [stack] = found.stacks
    features = ["Sum of features"] * 3
    assert names(stack.before) == [*features, "Norm", "Windows", "Trained positions"]
    assert stack.before[4].lines[0].endswith("max(0, windows) is added to x")
    assert names(blocks("transformer-spans", window=1).stacks[0].before) == [*features, "Norm", "Trained positions"]
    assert not any("asked" in block.name for kind in stack.kinds for block in kind.blocks)
    assert names(found.output) == ["Spans, softmax"]
    assert found.output[0].lines == ("differences of fenceposts", "32 → 32 → 3, ReLU")
    assert found.result == "probabilities of the labels of each span"


def test_shapes_of_the_operations_are_those_of_the_tensors() -> None:
    config = config_of("transformer", head_dim=6, value_dim=5)
    model = build_model(config).eval()
    [one] = blocks_of(model).operations
    source, target = torch.zeros(1, 7, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)
    lengths = torch.tensor([7])
    weights = attentions_of(model, source, lengths, target).cross[0]
    layer = model.body.decoder.layers[0].cross_attn
    _, heads, n, m = weights.shape
    sizes = {"n": n, "m": m}
    read = lambda shape: [sizes.get(part) or int(part) for part in shape.split(" x ")]  # noqa: E731
    assert [read(shape) for *_, shape in one.inputs] == [
        [heads, n, layer.q_proj.out_features // heads],
        [heads, m, layer.k_proj.out_features // heads],
        [heads, m, layer.v_proj.out_features // heads],
    ]
    assert (one.num_heads, one.d_model) == (heads, layer.out_proj.out_features)
    assert len(one.places) == 6


def test_operations_of_every_kind() -> None:
    steps = {
        one.kind: [step for step, _ in one.steps]
        for found in (blocks("transformer-xl"), blocks("reformer"))
        for one in found.operations
    }
    assert steps == {
        "Relative attention": ["MatMul", "MatMul, shift, add", "Scale", "Mask", "Softmax", "MatMul"],
        "Local attention": ["Cut", "MatMul", "Scale", "Mask", "Softmax", "MatMul", "Join the chunks"],
        "LSH attention": [
            *("Normalise", "Hash", "Sort", "Cut", "MatMul", "Mask", "Softmax", "MatMul"),
            "Undo the sort, add rounds",
        ],
    }
    [one] = blocks("reformer", layers=("local",), local_slopes=True).operations
    assert [step for step, _ in one.steps][1:4] == ["MatMul", "Scale", "Add distances"]
    [one] = blocks("reformer", layers=("local",), local_slopes=True, train_slopes=True).operations
    assert one.steps[3][1] == "- a trained number for each head and |i - j|"
    [one] = blocks("transformer", attention=ATTENTIONS["additive"]()).operations
    assert [step for step, _ in one.steps] == ["Additive score", "Mask", "Softmax", "MatMul"]
    [one] = blocks("transformer-xl", memory_len=0).operations
    assert [source for _, source, _ in one.inputs] == ["x", "x", "distances R", "x"]
    [one] = blocks("transformer-xl").operations
    assert [source for _, source, _ in one.inputs] == ["x", "memory and x", "distances R", "memory and x"]
