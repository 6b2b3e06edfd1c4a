"""`manyheads inspect`: tables and pictures of a model, and what is refused."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from offline_pages import record_of

from manyheads.catalogue import build_model
from manyheads.extras.inspect.commands import KINDS
from manyheads.models.pretrained import save_pretrained
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.text.vocabulary import ByteVocabulary

pytest.importorskip("matplotlib")

Program = Callable[..., int]


@pytest.fixture(scope="module")
def reformer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = dataclasses.replace(REFORMERS["debug"], vocab_size=256)
    folder = tmp_path_factory.mktemp("reformer") / "model"
    save_pretrained(build_model(config), folder, tokenizer=ByteVocabulary())
    return folder


def test_buckets_of_a_reformer(manyheads, refused, reformer_folder, tmp_path, capsys):
    output, text = tmp_path / "buckets.svg", "he opened the door"
    assert manyheads("inspect", "buckets", reformer_folder, "--text", text, "--output", output) == 0
    assert "head 2, round 2" in output.read_text(encoding="utf-8")
    page = tmp_path / "look.html"
    assert manyheads("inspect", "attention", reformer_folder, "--text", text, "--output", page) == 0
    [view] = record_of(page.read_text("utf-8"))["views"]
    assert view["buckets"][0] is None  # the local layer
    assert [len(rounds) for rounds in view["buckets"][1]] == [2, 2]
    assert len(view["buckets"][1][0][0]) == len(text)
    assert manyheads("inspect", "shapes", reformer_folder, "--text", text) == 0
    capsys.readouterr()
    for more, said in ((("--layer", "2"), "these layers hash: 1 ("), (("--head", "3"), "heads 1 to 2")):
        assert said in refused("inspect", "buckets", reformer_folder, "--text", text, *more)


@pytest.mark.parametrize(("visible", "cut"), [("bucket", False), ("chunk", True)])
def test_chunks_are_drawn_where_they_are_what_is_seen(manyheads, tmp_path, visible, cut):
    config = dataclasses.replace(REFORMERS["debug"], vocab_size=256, visible=visible)
    save_pretrained(build_model(config), tmp_path / "model", tokenizer=ByteVocabulary())
    output = tmp_path / "buckets.svg"
    assert manyheads("inspect", "buckets", tmp_path / "model", "--text", "he opened the door", "--output", output) == 0
    assert ("cut into chunks" in output.read_text(encoding="utf-8")) is cut


def test_buckets_of_another_model(refused, language_folder):
    assert "no layer of this model hashes" in refused("inspect", "buckets", language_folder, "--text", "abc")


def test_attention_as_a_page_and_as_pictures(manyheads, model_folder, tmp_path, capsys):
    names = [str(tmp_path / f"look.{kind}") for kind in ("html", "png", "svg", "pdf")]
    assert manyheads("inspect", "attention", model_folder, "--text", "I am hungry. 你", "--output", *names) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == names
    [encoder, decoder, cross] = record_of((tmp_path / "look.html").read_text("utf-8"))["views"]
    assert [view["name"] for view in (encoder, decoder, cross)] == ["encoder", "decoder", "cross"]
    assert encoder["keys"] == encoder["queries"] == cross["keys"]
    assert encoder["queries"][-4:] == ["你₁", "你₂", "你₃", "</s>"]
    assert decoder["queries"] == cross["queries"]
    assert decoder["queries"][-1] == "</s>"
    assert decoder["keys"] == ["<s>", *decoder["queries"][:-1]]
    for name, start in zip(names[1:], (b"\x89PNG", b"<?xml", b"%PDF"), strict=True):
        assert Path(name).read_bytes().lstrip().startswith(start)


def test_a_given_translation_is_looked_at(manyheads: Program, model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "look.html"
    arguments = ("--text", "I am hungry.", "--target", "Ich habe Hunger.", "--output", output)
    assert manyheads("inspect", "attention", model_folder, *arguments) == 0
    cross = record_of(output.read_text("utf-8"))["views"][2]
    assert "".join(cross["queries"][:-1]).replace("▁", " ").strip() == "Ich habe Hunger."


@pytest.mark.parametrize(("memory", "columns"), [(None, 6), (4, 4), (0, 0), (9, 6)])
def test_memory_of_a_language_model(manyheads, language_folder, tmp_path, memory, columns):
    output, text = tmp_path / "look.html", "fifteen letters"
    more = () if memory is None else ("--memory", str(memory))
    assert manyheads("inspect", "attention", language_folder, "--text", text, "--output", output, *more) == 0
    [view] = record_of(output.read_text("utf-8"))["views"]
    read = list(text.replace(" ", "▁"))
    first = 6 if memory is None else memory  # half of fifteen, at most what the model remembers
    assert view["queries"] == read[first:]
    assert view["memory"] == columns
    assert view["keys"] == read[first - columns :]


def test_shapes_as_a_table_and_as_json(printed, model_folder, language_folder):
    table = printed("inspect", "shapes", model_folder, "--text", "I am hungry.")
    assert table.startswith("module ")
    assert "A = softmax(Q Kᵀ / √d_k)" in table
    assert "as in encoder.layers.0" in table
    lines = json.loads(printed("inspect", "shapes", language_folder, "--text", "abc", "--json", "--every-layer"))
    assert lines[0] == {"module": "", "name": "tokens", "shape": [1, 3], "equation": "input"}
    assert lines[-1]["shape"] == [1, 3, 256]
    assert any(line["module"].startswith("layers.1") for line in lines)


def test_shapes_of_one_module(manyheads: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that names its tensors, and one of another text, operation by operation."""
    assert manyheads("inspect", "shapes", "nn.MultiHeadAttention(16, 4)", "--inputs", "2x5x16", "2x3x16", "--json") == 0
    lines = json.loads(capsys.readouterr().out)
    assert [(line["name"], line["shape"]) for line in lines[2:]] == [
        ("queries", [2, 4, 5, 4]), ("keys", [2, 4, 3, 4]), ("values", [2, 4, 3, 4]), ("weights", [2, 4, 5, 3]),
        ("output", [2, 5, 16]),
    ]  # fmt: skip
    text = "extras.texts.d2l.MultiHeadAttention(100, 100, 100, 100, 5, 0.5)"
    inputs = ("2x4x100", "keys=2x6x100", "values=2x6x100", "valid_lens=[3, 2]")
    assert manyheads("inspect", "shapes", text, "--inputs", *inputs, "--json") == 0
    lines = json.loads(capsys.readouterr().out)
    shapes = [[2, 4, 100], [2, 4, 5, 20], [2, 5, 4, 20], [10, 4, 20]]
    assert [line["shape"] for line in lines[4:8]] == shapes
    assert [line["module"] for line in lines if line["name"] == "linear"] == ["W_q", "W_k", "W_v", "W_o"]
    assert {"module": "attention", "name": "softmax", "shape": [10, 4, 6], "equation": "softmax(10 x 4 x 6)"} in lines


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ("positions", "--d-model", "20", "--length", "30", "--features", "4", "5"),
        ("positions", "MODEL", "--length", "12"),
        ("positions", "LANGUAGE", "--length", "12"),
        ("positions", "REFORMER", "--length", "12"),
        ("schedule",),
        ("schedule", "base", "big", "--steps", "9000"),
        ("schedule", "512:4000", "base"),
        ("smoothing", "--smoothing", "0", "0.3"),
        ("smoothing", "--smoothing", "0.3", "--kind", "others", "--targets", "2", "0"),
    ],
)
def test_pictures(manyheads, model_folder, language_folder, reformer_folder, tmp_path, arguments):
    places = {"MODEL": str(model_folder), "LANGUAGE": str(language_folder), "REFORMER": str(reformer_folder)}
    output = tmp_path / "picture.svg"
    assert manyheads("inspect", *(places.get(word, word) for word in arguments), "--output", output) == 0
    picture = output.read_text(encoding="utf-8")
    assert picture.startswith("<?xml")
    if arguments[0] == "positions":
        drawn = {
            "MODEL": "Sinusoidal positions",
            "LANGUAGE": "Sinusoidal distances",
            "REFORMER": "Axial positions, 8 x 8",
        }
        assert drawn.get(arguments[1], "Sinusoidal positions, width 20") in picture
        assert (">distance<" if arguments[1] == "LANGUAGE" else ">position<") in picture
    if arguments[0] == "schedule":
        named = {
            "512:4000": ["width 512, warm-up 4,000"],  # that pair alone
            "schedule": [f"width {width}, warm-up {steps}" for width in (256, 512) for steps in ("4,000", "8,000")],
        }
        assert re.findall(">(width [^<]+)<", picture) == named.get(arguments[1] if arguments[1:] else "schedule", [])
    if arguments[0] == "smoothing":
        assert "Targets with smoothing 0.3" in picture  # the last that was given
        assert ">padding<" in picture
        kind = "others" if "others" in arguments else "all"
        assert f"({kind})" in picture


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("attention", "MODEL", "--text", "a", "--output", "x.gif"), "must end in .png, .svg, .pdf, .html"),
        (("attention", "MODEL", "--text", "a", "--output", "x.png", "--layer", "9"), "has layers 1 to 2"),
        (("attention", "MODEL", "--text", "a", "--output", "x.png", "--view", "self"), "shows encoder, decoder, cross"),
        (
            ("attention", "MODEL", "--text", "a", "--view", "cross", "--layer", "2"),
            "--view and --layer: this is for pic",
        ),
        (("attention", "MODEL", "--text", "a", "--memory", "2"), "has no memory"),
        (("attention", "MODEL", "--text", "a", "--max-cells", "0"), "from 1 to 4,096"),
        (("attention", "MODEL", "--text", ""), "no text"),
        (("attention", "LANGUAGE", "--text", ""), "no text"),
        (("attention", "LANGUAGE", "--text", "ab", "--target", "b"), "leave --target out"),
        (("attention", "LANGUAGE", "--text", "ab", "--memory", "2"), "leave one to read"),
        (("shapes", "LANGUAGE", "--text", "ab", "--target", "b"), "leave the target out"),
        (("shapes", "MODEL"), "give --text"),
        (("shapes", "nn.MultiHeadAttention(8, 2)", "--text", "a"), "give --inputs"),
        (("shapes", "nn.MultiHeadAttention(8, 3)", "--inputs", "1x2x8"), "8 is not divisible by num_heads 3"),
        (("shapes", "nn.MultiHeadAttention(8, 2)", "--inputs", "1x2x9"), "cannot be called with --inputs 1x2x9"),
        (("shapes", "nn.MultiHeadAttention(8, 2)", "--inputs", "a"), "a shape such as 2x4x100"),
        (("shapes", "nn.Multihead(8, 2)", "--inputs", "1x2x8"), "manyheads.nn.Multihead is no module"),
        (("shapes", "nn.Linear(open('x'))", "--inputs", "1x2x8"), "no module with plain arguments"),
        (("positions", "MODEL", "--d-model", "8"), "leave them out"),
        (("positions", "--length", "0"), "from 1 to 20,000"),
        (("positions", "--length", "100000000"), "from 1 to 20,000"),
        (("positions", "--d-model", "100000000"), "from 1 to 4,096"),
        (("smoothing", "--vocab-size", "60000"), "from 2 to 1,000"),
        (("schedule", "bsae"), "Did you mean base?"),
        (("schedule", "demo"), "has a time limit and no number of steps"),
        (("schedule", "--d-model", "0"), "at least 1"),
        (("schedule", "512:0"), "at least 1"),
        (("schedule", "512:4k"), "512:4k names no curve"),
        (("schedule", "512:4000", "--d-model", "8"), "leave out 512:4000"),
        (("smoothing", "--smoothing", "1.0"), "below 1"),
        (("smoothing", "--targets", "7"), "below --vocab-size 5"),
        (("smoothing", "--pad-id", "5"), "below --vocab-size 5"),
        (("smoothing", "--kind", "others", "--vocab-size", "2", "--targets", "1"), "at least 3 tokens, not 2"),
        (("masks", "causl"), "Did you mean causal?"),
        (("masks", "--length", "4", "--lengths", "5"), "from 0 to --length 4"),
        (("masks", "causal", "--memory", "6"), "--memory is for masks of the kind memory, but only causal is drawn"),
        (("masks", "window", "blocks", "--lengths", "5"), "--lengths is for masks of the kind padding or target, but"),
        (("masks", "--length", "100000"), "from 1 to 512"),
        (("segments", "--segment", "65"), "--segment is 65; it must be from 1 to 64"),
        (("segments", "--count", "30"), "--count is 30; it must be from 1 to 16"),
        (("segments", "--output", "a.txt"), "must end in .png"),
        (("atention",), "Did you mean attention?"),
    ],
)
def test_mistakes(manyheads, model_folder, language_folder, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": str(model_folder), "LANGUAGE": str(language_folder)}
    assert manyheads("inspect", *(places.get(word, word) for word in arguments)) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_masks_are_drawn_and_printed(manyheads, printed, tmp_path, capsys):
    output = tmp_path / "masks.svg"
    arguments = ("--length", "4", "--lengths", "3", "--memory", "2", "--left", "1", "--block", "2", "--output", output)
    assert manyheads("inspect", "masks", *arguments, "--json") == 0
    captured = capsys.readouterr()
    numbers = captured.out
    assert captured.err == f"{output}\n"
    assert "memory, then segment" in output.read_text(encoding="utf-8")
    found = {one["title"]: ["".join(map(str, row)) for row in one["allowed"]] for one in json.loads(numbers)}
    assert found == {
        "padding, 3 real tokens": ["1110"] * 4,
        "causal": ["1000", "1100", "1110", "1111"],
        "causal and padding, 3 real tokens": ["1000", "1100", "1110", "1110"],
        "window, 1 before and 0 after": ["1000", "1100", "0110", "0011"],
        "memory of 2": ["111000", "111100", "111110", "111111"],
        "memory of 2, same length": ["011000", "001100", "000110", "000011"],
        "blocks of 2, 1 before and 0 after": ["1000", "1100", "1110", "1111"],
    }
    more = ("--block", "2", "--before", "0", "--after", "1", "--length", "6")
    title, *rows = printed("inspect", "masks", "blocks", *more, "--output", output).split("\n")[:7]
    assert title.endswith("-0 <= j // 2 - i // 2 <= 1")
    assert [row.replace(" ", "") for row in rows] == ["111100"] * 2 + ["001111"] * 2 + ["000011"] * 2
    assert manyheads("inspect", "masks", "causal", "--length", "20", "--output", output) == 0
    assert not re.search(r">\d+\.\d</text>", output.read_text("utf-8"))  # places of tokens are whole numbers


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_help(printed, kind):
    assert printed("inspect", kind, "--help").count(f"manyheads inspect {kind} ") >= 2
