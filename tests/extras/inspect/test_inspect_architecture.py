"""`manyheads inspect architecture`: what is drawn, that it can be read, and what is refused."""

import dataclasses
import json
import re
from typing import Any

import pytest

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.extras.inspect.blocks import blocks_of
from manyheads.extras.inspect.drawings.architecture import architecture_figure, operations_figure

pytest.importorskip("matplotlib")


def config_of(architecture: str, **changes: Any) -> Any:
    config = ARCHITECTURES[architecture].presets["debug"]
    sizes = [size for size in ("vocab_size", "source_vocab_size", "target_vocab_size") if hasattr(config, size)]
    return dataclasses.replace(config, **{**dict.fromkeys(sizes, 50), **changes})


CONFIGS = {
    **{name: config_of(name) for name in ARCHITECTURES},
    "pre-norm": config_of("transformer", norm_position="pre", encoder_heads=(4, 1)),
    "no encoder": config_of("transformer", num_encoder_layers=0),
    "clusters": config_of("transformer-xl", cutoffs=(10, 20, 30), div_value=2, norm_position="pre"),
    "trained positions": config_of("transformer-xl", attention="absolute_learned"),
    "pattern": config_of("reformer", num_layers=14, layers=("local", "local", "lsh", "full", "lsh")),
    "wide": config_of("transformer", source_vocab_size=999_999, target_vocab_size=999_999, num_heads=32, head_dim=None),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_texts_do_not_cover_each_other_and_stay_in_their_boxes(name: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    found = blocks_of(build_model(CONFIGS[name]).eval())
    for figure in (architecture_figure(found, "a model" * 20), operations_figure(found.operations, "a model" * 20)):
        figure.draw_without_rendering()
        [axes] = figure.axes
        boxes = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
        for number, (_, one) in enumerate(boxes):
            assert one.x0 >= 0
            assert one.y0 >= 0
            assert one.x1 <= figure.bbox.x1
            assert one.y1 <= figure.bbox.y1
            assert [other for other, place in boxes[:number] if one.overlaps(place)] == []
        drawn = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
        for text, one in boxes:
            centre = ((one.x0 + one.x1) / 2, (one.y0 + one.y1) / 2)
            for box in drawn:
                if box.contains(*centre):
                    assert box.x0 <= one.x0, text
                    assert one.x1 <= box.x1, text


def test_pictures_and_numbers(manyheads, model_folder, tmp_path, capsys):
    output, operations = tmp_path / "blocks.svg", tmp_path / "operations.svg"
    arguments = ("--output", output, "--operations", operations, "--json")
    assert manyheads("inspect", "architecture", model_folder, *arguments) == 0
    captured = capsys.readouterr()
    assert captured.err.endswith(f"{output}\n{operations}\n")
    found = json.loads(captured.out)
    assert [stack["name"] for stack in found["stacks"]] == ["encoder", "decoder"]
    assert found["operations"][0]["num_heads"] == 4
    texts = re.findall(r">([^<>]+)</text>", output.read_text(encoding="utf-8"))
    assert texts.count("Add, norm") == 5
    assert texts.count("2 x") == 2
    assert "Masked multi-head attention" in texts
    assert "Scaled dot-product attention" in re.findall(r">([^<>]+)</text>", operations.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("MODEL", "--output", "x.gif"), "--output x.gif: it must end in"),
        (("MODEL", "--operations", "x.html"), "--operations x.html: it must end in"),
        (("nowhere",), "nowhere"),
    ],
)
def test_mistakes(manyheads, model_folder, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert manyheads("inspect", "architecture", *(str(model_folder) if a == "MODEL" else a for a in arguments)) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_model_is_in_its_diagrams() -> None:
    found = blocks_of(build_model(config_of("transformer-classifier")).eval())
    name = "runs/" + "long-name-" * 6
    for figure in (architecture_figure(found, name), operations_figure(found.operations, name)):
        lines = sorted(figure.axes[0].texts, key=lambda text: -text.get_position()[1])
        assert name in "".join(text.get_text() for text in lines)
