"""Segments without and with memory: the drawing says what the models do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.errors import ShapeError
from manyheads.extras.inspect.commands import run
from manyheads.extras.inspect.drawings.segments import (
    SegmentSizes,
    segment_examples,
    segment_record,
    segment_text,
    segments_figure,
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "sizes",
    [
        SegmentSizes(layers=2, segment_len=3, memory_len=2, eval_segment_len=2, eval_memory_len=3, segments=3),
        SegmentSizes(layers=2, segment_len=2, memory_len=1, eval_segment_len=1, eval_memory_len=2, segments=4),
        SegmentSizes(layers=1, segment_len=4, memory_len=0, eval_segment_len=5, eval_memory_len=4, segments=2),
    ],
    ids=str,
)
def test_a_model_depends_on_what_is_drawn(sizes: SegmentSizes) -> None:
    """Another token at a position changes the last output if and only if the drawing says so."""
    from manyheads.models.transformer_xl.config import TransformerXLConfig

    training, _, with_memory, evaluation = segment_examples(sizes)
    lengths = [
        (sizes.segment_len, 0),
        (sizes.segment_len, sizes.memory_len),
        (sizes.eval_segment_len, sizes.eval_memory_len),
    ]
    for example, (segment_len, memory_len) in zip((training, with_memory, evaluation), lengths, strict=True):
        torch.manual_seed(0)
        config = TransformerXLConfig(
            vocab_size=9, d_model=8, num_heads=2, d_ff=16, num_layers=sizes.layers, memory_len=memory_len
        )
        body: Any = build_model(config).body.double().eval()
        for parameter in body.parameters():
            torch.nn.init.normal_(parameter, std=0.4)

        def last(ids: torch.Tensor, body: Any = body, segment_len: int = segment_len) -> torch.Tensor:
            state = body.start(1, projected=False)
            for part in ids.split(segment_len, dim=1):
                hidden, state = body(part, None, state)
            return hidden[0, -1]

        ids = torch.randint(0, 8, (1, sizes.length))
        with torch.no_grad():
            for position, is_read in enumerate(example.reach(sizes.layers)[0].tolist()):
                other = ids.clone()
                other[0, position] += 1
                assert torch.equal(last(other), last(ids)) is not is_read


def test_numbers_and_pictures() -> None:
    sizes = SegmentSizes(layers=2, segment_len=2, memory_len=1, segments=3, eval_segment_len=1, eval_memory_len=3)
    examples = segment_examples(sizes)
    assert [example.context(2) for example in examples] == [2, 2, 5, 6]
    assert segment_text(examples[2], 2).splitlines()[1:] == [
        "  layer 2  ..|..|.#",
        "  layer 1  ..|.#|##",
        "  input    .#|##|##",
    ]
    assert segment_record(examples[1], 2)["reach"] == [[0, 0, 0, 0, 1, 1]] * 2 + [[0, 0, 0, 0, 0, 1]]
    figure = segments_figure(examples, 2)
    assert [axes.get_title(loc="left").splitlines()[0] for axes in figure.axes] == [
        "training without memory: 2 of 6 positions",
        "evaluation without memory: 2 of 6 positions",
        "training with a memory of 1: 5 of 6 positions",
        "evaluation with a memory of 3: 6 of 6 positions",
    ]
    with pytest.raises(ShapeError, match="give at least one"):
        segments_figure([], 2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "xl.svg"
    assert run(["segments", "--count", "2", "--json", "--output", str(picture)]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["context"] for record in records] == [4, 4, 8, 8]
    assert "training with a memory of 4" in picture.read_text(encoding="utf-8")
