"""`manyheads inspect embeddings`: neighbours by name, the map, and what is refused."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.extras.inspect.embeddings import embedding_map_figure
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def language_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = TransformerXLConfig(
        vocab_size=256, d_model=16, num_heads=2, d_ff=32, num_layers=1, cutoffs=(100,), div_value=2, memory_len=6
    )
    folder = tmp_path_factory.mktemp("xl") / "model"
    save_pretrained(build_model(config), folder, tokenizer=ByteVocabulary())
    return folder


@pytest.fixture(scope="module")
def word_folder(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> Path:
    """A classifier whose vocabulary has whole words."""
    tokenizer = Tokenizer.train([pair[0] for pair in pairs], TokenizerSettings(kind="word", vocab_size=60))
    config = dataclasses.replace(
        ARCHITECTURES["transformer-classifier"].presets["debug"], vocab_size=tokenizer.vocab_size
    )
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("words") / "model"
    save_pretrained(build_model(config), folder, tokenizer=tokenizer)
    return folder


def test_neighbours_of_words_and_of_ids(manyheads, printed, model_folder, tmp_path, capsys):
    output = tmp_path / "map.svg"
    arguments = ("--words", "the", "stations", "--ids", "7", "--neighbours", "3", "--tokens", "4", "--output", output)
    assert manyheads("inspect", "embeddings", model_folder, *arguments, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err.endswith(f"{output}\n")
    found = json.loads(captured.out)
    # A no-break space is not printable, and JSON has no escape of the form \\xa0.
    assert (
        manyheads(
            "inspect", "embeddings", model_folder, "--words", "a\u00a0b", "--output", tmp_path / "b.svg", "--json"
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["words"][0]["word"] == "a\u00a0b"
    assert found["table"] == "source and target"
    weights = load(model_folder).body.source_embedding.weight.double()
    for word in found["words"]:
        vector = weights[word["ids"]].mean(0)
        cosines = torch.cosine_similarity(vector[None], weights)
        cosines[word["ids"]] = -2
        best = cosines.sort(descending=True, stable=True)
        assert [one["id"] for one in word["neighbours"]] == best.indices[:3].tolist()
        assert [one["cosine"] for one in word["neighbours"]] == pytest.approx(best.values[:3].tolist(), abs=1e-6)
    assert [len(word["tokens"]) > 1 for word in found["words"]] == [False, True, False]
    assert found["words"][2]["word"] == "<0x03>"
    kinds = [point["kind"] for point in found["map"]["points"]]
    assert kinds == ["word"] * 3 + ["neighbour"] * kinds.count("neighbour") + ["frequent"] * kinds.count("frequent")
    assert 0 < kinds.count("frequent") <= 4
    picture = output.read_text(encoding="utf-8")
    assert ">stations<" in picture
    assert "of the variance" in picture
    line = printed("inspect", "embeddings", model_folder, *arguments).split("\n")[1]
    assert re.match(r"stations \(mean of ▁s\w* [\w ]+\): (\S+ -?\d\.\d\d(  |$)){3}", line)


@pytest.mark.parametrize("folder", ["language_folder", "word_folder"])
def test_other_models(manyheads, folder, request, tmp_path, capsys):
    output = tmp_path / "map.png"
    model = request.getfixturevalue(folder)
    assert manyheads("inspect", "embeddings", model, "--words", "I", "--tokens", "9", "--output", output) == 0
    assert capsys.readouterr().out.startswith("I: ")
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("MODEL", "--words", ""), "has no token"),
        (("MODEL", "--ids", "100000"), "the vocabulary has the ids 0 to"),
        (("MODEL", "--ids", "-1"), "the vocabulary has the ids 0 to"),
        (("MODEL", "--neighbours", "0"), "from 1 to 50"),
        (("MODEL", "--neighbours", "60000"), "from 1 to 50"),
        (("MODEL", "--tokens", "60000"), "from 0 to 500"),
        (("MODEL", "--words", *"abc" * 17), "give at most 50"),
        (("MODEL", "--tokens", "0"), "no token to draw"),
        (("MODEL", "--output", "map.html"), "must end in .png, .svg, .pdf"),
        (("LANGUAGE", "--side", "target"), "--side target: the model has no embedding 'target'; there are: tokens"),
        (("WORDS", "--words", "xylophone"), "does not know this word"),
    ],
)
def test_mistakes(
    manyheads, model_folder, language_folder, word_folder, tmp_path, monkeypatch, capsys, arguments, said
):
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": str(model_folder), "LANGUAGE": str(language_folder), "WORDS": str(word_folder)}
    assert manyheads("inspect", "embeddings", *(places.get(word, word) for word in arguments)) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_labels_do_not_cover_each_other_or_points() -> None:
    random = torch.Generator().manual_seed(1)
    places = torch.randn(150, 2, generator=random).tolist()
    kinds = ["word"] * 5 + ["neighbour"] * 40 + ["frequent"] * 105
    points = [
        SimpleNamespace(token=f"token{number}", kind=kind, x=x, y=y)
        for number, (kind, (x, y)) in enumerate(zip(kinds, places, strict=True))
    ]
    figure = embedding_map_figure(points, (0.5, 0.2), title="Map")
    [axes] = figure.axes
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text().startswith("token")]
    drawn = [*(text.get_text() for text in axes.texts), axes.get_title(loc="right")]
    assert len(boxes) < 150
    assert any(label == f"{150 - len(boxes)} of 150 labels have no space and are left out" for label in drawn)
    assert {f"token{number}" for number in range(5)} <= set(drawn)
    for number, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[:number])
    centres = axes.transData.transform(places)
    assert not any(box.contains(x, y) for box in boxes for x, y in centres)


def test_signs_that_could_hide_others_are_shown() -> None:
    points = [SimpleNamespace(token=f"a\u202e{'b' * 30}", kind="word", x=0.0, y=0.0)]
    [text] = embedding_map_figure(points, (0.0, 0.0), title="$x$").axes[0].texts
    assert text.get_text() == "a⟨202E⟩bbbbbbbbbb…"
