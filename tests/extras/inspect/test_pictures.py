"""Pictures: what is in them, what is refused, and that they are written whole and always alike."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyheads.extras.inspect.drawings
from manyheads.errors import DataError, MissingExtraError, RequestError, SaveError, ShapeError
from manyheads.extras.inspect.drawings.attention import MAX_LABELS, attention_figure, buckets_figure
from manyheads.extras.inspect.drawings.curves import (
    compared_curves_figure,
    confusion_figure,
    learning_curve_figure,
    memory_figure,
    series,
)
from manyheads.extras.inspect.drawings.figure import as_array, new_figure, save_figure
from manyheads.extras.inspect.drawings.formulas import (
    first_table,
    label_smoothing_figure,
    positions_figure,
    schedule_figure,
)
from manyheads.nn.attention.local import LocalSelfAttention
from manyheads.nn.attention.relative_bias import RelativeBias
from manyheads.training.record.log import MOST_POINTS, Metrics

pytest.importorskip("matplotlib")


def attention(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).softmax(-1)


@pytest.mark.parametrize(("shape", "panels"), [((5, 7), 1), ((1, 5, 7), 1), ((4, 5, 7), 5), ((16, 3, 3), 17)])
def test_a_heat_map_a_head_and_one_for_their_mean(shape: tuple[int, ...], panels: int) -> None:
    weights = attention(*shape)
    figure = attention_figure(weights)
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert len(images) == panels
    heads = weights.reshape(-1, *shape[-2:])
    expected = [heads.mean(0), *heads] if len(heads) > 1 else [*heads]
    for image, values in zip(images, expected, strict=True):
        np.testing.assert_allclose(image.get_array(), values.double().numpy(), atol=1e-7)
        assert image.get_clim() == (0.0, pytest.approx(float(weights.max())))


def test_tokens_name_the_rows_and_columns() -> None:
    axes = attention_figure(attention(2, 3), query_tokens=["ich", "$x$"], key_tokens=["a", "b\n", "c" * 40]).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["ich", "$x$"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b�", "c" * 15 + "…"]
    assert not any(text.get_parse_math() for text in [*axes.get_xticklabels(), *axes.get_yticklabels()])


def test_long_inputs_are_named_now_and_then() -> None:
    axes = attention_figure(attention(90, 300), query_tokens=[f"t{place}" for place in range(90)]).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()][:3] == ["t0", "t3", "t6"]
    assert len(axes.get_xticks()) <= MAX_LABELS
    assert list(axes.get_xticks()[:2]) == [0, 8]


def test_short_names_stand_upright_and_long_ones_slant() -> None:
    """A slanted `▁` is a slash."""
    axes = attention_figure(attention(3, 30), key_tokens=["▁", "ä₁", *["standing"] * 28]).axes[0]
    assert [text.get_rotation() for text in axes.get_xticklabels()] == [0, 0, *[55] * 28]
    assert [text.get_horizontalalignment() for text in axes.get_xticklabels()] == ["center"] * 2 + ["right"] * 28


def test_among_many_keys_small_weights_are_seen() -> None:
    """One weight of 1, as a causal model's first, beside even ones of 1/512: those are no longer paper on paper."""
    weights = np.full((512, 512), 1 / 512)
    weights[0] = np.eye(512)[0]
    for length, least in ((512, 0.04), (40, 0.0)):
        figure = attention_figure(weights[:length, :length])
        image = figure.axes[0].images[0]
        assert (float(image.norm(1 / 512)) > 0.04) == (least > 0)
        assert float(image.norm(1.0)) == 1.0
        assert ("root" in figure.axes[-1].get_ylabel()) == (length > MAX_LABELS)


def test_buckets_that_touch_are_told_apart() -> None:
    """Buckets 3 and 23 have one colour, as many more do."""
    figure = buckets_figure(np.array([[[3, 23, 3, 23], [3, 3, 3, 3]]]), tokens=list("▁bcd"), chunk_len=3)
    above, below = figure.axes
    drawn = [(set(line.get_xdata()), sorted(line.get_ydata())) for line in below.lines]
    assert ({1.5}, [-0.5, 0.5]) in drawn  # round 1: 3 3 | 23 23
    assert len(drawn) == 2  # and the edge of a chunk
    assert [text.get_rotation() for text in above.get_xticklabels()] == [0] * 4


def test_attention_of_another_shape_is_refused() -> None:
    for shape in ((3,), (2, 2, 3, 3), (0, 3), (2, 0, 3)):
        with pytest.raises(ShapeError, match=r"expected \(q_len, k_len\)"):
            attention_figure(np.zeros(shape))
    with pytest.raises(ShapeError, match="2 key tokens for weights with 3 key positions"):
        attention_figure(attention(2, 3), key_tokens=["a", "b"])


def test_all_zero_weights_can_be_drawn(tmp_path: Path) -> None:
    save_figure(attention_figure(torch.zeros(2, 3, 3)), tmp_path / "zeros")


def test_tensors_of_any_float_type() -> None:
    values = torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)
    assert as_array(values).tolist() == [0.5, 2.0]
    assert as_array([[1, 2]]).dtype == np.float64


def test_a_series_is_in_order_and_the_later_record_wins() -> None:
    records = [
        {"step": 10, "train_nll": 5.0},
        {"step": 20, "train_nll": 4.0},
        {"step": 30, "train_nll": float("nan")},
        {"step": 20, "valid_nll": 9.0},
        {"step": 20, "train_nll": 3.0},
        {"step": 40, "train_nll": None},
        {"train_nll": 1.0},
    ]
    steps, values = series(records, "train_nll")
    assert steps.tolist() == [10, 20]
    assert values.tolist() == [5.0, 3.0]


def run_records(steps: int, *, scored: bool) -> list[dict[str, float]]:
    records: list[dict[str, float]] = []
    for step in range(10, steps + 1, 10):
        records.append({"step": step, "train_nll": 2 + 100 / step, "learning_rate": step * 1e-5, "grad_norm": 1.0})
        if step % 100 == 0:
            records.append(
                {"step": step, "valid_nll": 2.1 + 100 / step} | ({"bleu": 20.0, "chrf": 45.0} if scored else {})
            )
    return records


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("steps", "scored"), [(0, False), (10, False), (90, False), (1000, False), (1000, True)])
def test_learning_curves_of_any_run(steps: int, scored: bool, tmp_path: Path) -> None:
    figure = learning_curve_figure(run_records(steps, scored=scored), title="a $run$")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert ("Validation scores" in titles) == scored
    png, svg = save_figure(figure, tmp_path / "curve")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_a_figure_is_laid_out_once_for_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the layout that matplotlib computes, and can be laid out again."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = attention_figure(attention(2, 3, 3), title="t")
    layouts: list[Any] = []
    execute = ConstrainedLayoutEngine.execute

    def counted(engine: Any, fig: Any) -> Any:
        layouts.append(fig)
        return execute(engine, fig)

    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", counted)
    save_figure(figure, tmp_path / "t", ("png", "svg", "pdf"))
    assert layouts == [figure]
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    boxes = [axes.get_position().bounds for axes in figure.axes[:-1]]  # without the colour bar, which keeps its aspect
    engine.execute(figure)
    assert [axes.get_position().bounds for axes in figure.axes[:-1]] == [pytest.approx(box, abs=0.01) for box in boxes]


def test_metrics_file_with_a_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste', encoding="utf-8")
    assert Metrics(path).read() == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        Metrics(path).read()
    path.write_text("3\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1 is not a JSON object but a "):
        Metrics(path).read()
    with pytest.raises(DataError, match="cannot be read"):
        Metrics(tmp_path / "none.jsonl").read()


def test_metrics_that_grow_are_read_on_and_thinned_alike(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"step": step, "train_nll": 1.0} | ({"valid_nll": 2.0} if step % 1000 == 7 else {}))
        for step in range(3 * MOST_POINTS)
    ]
    path.write_text("\n".join(lines[:100]) + "\n" + lines[100][:9], encoding="utf-8")
    growing = Metrics(path)
    assert [record["step"] for record in growing.read()] == [*range(100)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = growing.read()
    assert found == Metrics(path).read() == growing.read()
    assert [one["step"] for one in found] == [step for step in range(len(lines)) if step % 4 == 0 or step % 1000 == 7]
    with path.open("a", encoding="utf-8") as file:
        file.write("[]\n")
    with pytest.raises(DataError, match=r"line 1 after byte [\d,]+ is not a JSON object but a list"):
        growing.read()


def test_positions_as_heat_map_and_curves() -> None:
    table = np.arange(12.0).reshape(4, 3)
    image, curves = positions_figure(table, features=[0, 2]).axes[:2]
    np.testing.assert_array_equal(image.images[0].get_array(), table.T)
    assert [list(line.get_ydata()) for line in curves.lines] == [table[:, 0].tolist(), table[:, 2].tolist()]
    with pytest.raises(ShapeError, match="expected"):
        positions_figure(np.zeros(3))
    with pytest.raises(ShapeError, match="features"):
        positions_figure(table, features=[3])


def test_penalties_of_distances_of_a_model_without_positions() -> None:
    layer = LocalSelfAttention(8, 2, chunk_len=4, sloped=True, train_slopes=True)
    found = first_table(layer, "model", 5)
    assert found.place_name == "distance"
    assert found.table.tolist() == pytest.approx(np.outer(range(5), [1 / 2, 1 / 128]))
    with pytest.raises(RequestError, match="no table of positions to draw: it has no positions"):
        first_table(LocalSelfAttention(8, 2, chunk_len=4), "model", 5)


def test_relative_bias_of_earlier_tokens() -> None:
    found = first_table(RelativeBias(2, 3, causal=False), "model", 3)
    assert found.place_name == "distance"
    assert found.table.tolist() == pytest.approx(-np.outer(range(3), [1 / 2, 1 / 128]))


def test_one_curve_per_schedule() -> None:
    axes = schedule_figure({"up": ([1, 2], [1.0, 2.0]), "down": ([1, 2], [2.0, 1.0])}).axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2], [1, 2]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["up", "down"]
    with pytest.raises(ShapeError, match="steps"):
        schedule_figure({"up": ([1], [1.0, 2.0])})


def test_label_smoothing() -> None:
    sure = np.array([0.1, 0.9])
    padded = label_smoothing_figure([[0.0, 1.0], [0.0, 0.0]], sure, {}, pad_id=0).axes[0]
    assert [text.get_text() for text in padded.texts] == ["0", "1"]  # the row of padding has no numbers
    assert [label.get_text() for label in padded.get_xticklabels()] == ["0\npadding", "1"]
    left, right = label_smoothing_figure([[0.9, 0.1]], sure, {"0.1": [2.0, 0.3]}).axes[:2]
    assert [text.get_text() for text in left.texts] == ["0.9", "0.1"]
    assert list(right.lines[0].get_ydata()) == [2.0, 0.3]
    with pytest.raises(ShapeError):
        label_smoothing_figure([0.9, 0.1], sure, {})
    with pytest.raises(ShapeError, match="probabilities"):
        label_smoothing_figure([[0.9, 0.1]], sure, {"0.1": [2.0]})


def test_the_same_picture_gives_the_same_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save_figure(attention_figure(attention(2, 3, 3), title="t"), tmp_path / folder / "picture.png")
    for kind in ("png", "svg"):
        assert (tmp_path / f"a/picture.{kind}").read_bytes() == (tmp_path / f"b/picture.{kind}").read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["picture.png", "picture.svg"]


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SaveError, match="Cannot save"):
        save_figure(new_figure(1, 1), tmp_path / "file" / "picture")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[plot\]"):
        attention_figure(attention(2, 2))


def test_neither_torch_nor_pyplot_is_imported() -> None:
    script = (
        "import sys, json\n"
        "from manyheads.extras.inspect.drawings import attention, curves, figure\n"
        "before = sorted(m for m in ('torch', 'matplotlib') if m in sys.modules)\n"
        "attention.attention_figure([[1.0]])\n"
        "print(json.dumps([before, 'torch' in sys.modules, 'matplotlib.pyplot' in sys.modules]))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [[], False, False]


def test_every_head_at_the_edge_has_tokens() -> None:
    tokens = ["the", "cat", "sees"]
    figure = attention_figure(attention(4, 3, 3), query_tokens=tokens, key_tokens=tokens)
    heads = [axes for axes in figure.axes if axes.get_title(loc="left").startswith("head")]
    assert [len(axes.get_yticklabels()) for axes in heads] == [3, 0, 3, 0]
    assert [len(axes.get_xticklabels()) for axes in heads] == [0, 0, 3, 3]


def test_a_score_of_zero_looks_like_zero() -> None:
    figure = learning_curve_figure([{"step": step, "valid_nll": 3.0, "bleu": 0.0} for step in (1, 2, 3)])
    [scores] = [axes for axes in figure.axes if axes.get_title(loc="left") == "Validation scores"]
    assert scores.get_ylim() == (0.0, 13.0)


@pytest.mark.parametrize(("points", "label"), [(59, "training  2.169"), (60, "training, smoothed  2.168")])
def test_a_running_mean_is_called_one(points: int, label: str) -> None:
    """It is not the last loss of metrics.jsonl, here 2.167 after 600 steps."""
    legend = learning_curve_figure(run_records(10 * points, scored=False)).axes[0].get_legend()
    assert legend.get_texts()[0].get_text() == label


def test_the_legend_does_not_cover_the_curve_of_a_short_run() -> None:
    records = [{"step": 20, "train_nll": 6.2}, {"step": 26, "train_nll": 4.7}, {"step": 26, "valid_nll": 4.8}]
    figure = learning_curve_figure(records)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    legend, (line, *_) = axes.get_legend(), axes.get_lines()
    path = line.get_path().transformed(line.get_transform())
    assert not path.intersects_bbox(legend.get_window_extent(), filled=False)


def test_a_run_whose_name_begins_with_an_underscore_is_in_the_legend() -> None:
    runs = {name: [{"step": step, "valid_nll": 3.0 - step} for step in (1, 2)] for name in ("_first", "second")}
    legend = compared_curves_figure(runs).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["./_first  1", "second  1"]


def test_only_the_ending_of_a_picture_is_replaced(tmp_path: Path) -> None:
    for name in ("loss-0.1", "loss-0.2", "loss-0.2.png"):
        save_figure(new_figure(1, 1), tmp_path / name, ["png"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss-0.1.png", "loss-0.2.png"]


def test_a_title_is_no_formula(tmp_path: Path) -> None:
    figure = memory_figure([0, 8], [2.0, 1.0], unit="nats", title="Loss on a$\\x$.txt")
    save_figure(figure, tmp_path / "loss", ["png"])


def test_a_long_title_stays_on_the_picture() -> None:
    figure = confusion_figure([[1, 0], [0, 1]], ["a", "b"], title="runs/" + "a-long-name-" * 9 + " on data/other test")
    figure.draw_without_rendering()
    title = figure.get_suptitle()
    assert "".join(title.split()).endswith("ondata/othertest")
    [drawn] = [text for text in figure.texts if text.get_text() == title]
    assert drawn.get_window_extent().x1 <= figure.bbox.x1


def test_every_legend_has_a_place() -> None:
    """Without one, matplotlib warns on a slow machine that the best place was searched for a second."""
    found = {
        f"{path.name}: {ast.unparse(node)[:60]}"
        for path in Path(manyheads.extras.inspect.drawings.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "legend"
        and "loc" not in {word.arg for word in node.keywords}
    }  # fmt: skip
    assert not found
