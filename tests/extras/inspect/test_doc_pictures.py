"""The pictures of the documents: those that need no training are drawn again, and their numbers are compared."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from doc_pages import site_script

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def pictures() -> Any:
    return site_script("pictures")


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / name).with_suffix(".json").read_text(encoding="utf-8")))


def test_every_picture_is_made_by_a_command(pictures: Any) -> None:
    made = {file: picture for picture in pictures.PICTURES for file in picture.files}
    files = {path.name for path in FOLDER.glob("*.png") if not path.name.startswith("quality-")}
    assert files == made.keys()
    for name in files:
        record = recorded(name)
        assert record["command"] == f"manyheads {made[name].command}"
        assert {"python", "torch", "matplotlib", "numpy"} <= record["versions"].keys()
        assert record["numbers"]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other if isinstance(one, str) else one == pytest.approx(other, rel=1e-4, abs=1e-5))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["positions.png", "smoothing.png", "schedule.png", "rates.png", "segments.png", "architecture.png"]
)
def test_the_numbers_come_again(pictures: Any, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib; pip install '.[plot]'")
    [picture] = [picture for picture in pictures.PICTURES if name in picture.files]
    assert not picture.is_trained
    with contextlib.chdir(tmp_path):
        if pictures.UNTRAINED in picture.command:
            pictures.save_untrained(Path(pictures.UNTRAINED))
        numbers = pictures.drawn(picture, tmp_path)
    assert len(numbers) == len(picture.files)
    for file, content in zip(picture.files, numbers, strict=True):
        assert same(recorded(file)["numbers"], json.loads(json.dumps(content))), f"{file}: make pictures NAMES={name}"


def test_what_needs_no_training_is_compared(pictures: Any) -> None:
    [mark, _] = test_the_numbers_come_again.pytestmark  # type: ignore[attr-defined]
    assert set(mark.args[1]) == {picture.name for picture in pictures.PICTURES if not picture.is_trained}


def test_captions_name_the_layer_and_the_head_that_are_drawn(pictures: Any) -> None:
    """A caption that names a layer or a head names the drawn one; one head that is shown is named by some caption."""
    made = {file: picture for picture in pictures.PICTURES for file in picture.files}
    captions = [
        (name, caption)
        for page in PAGES
        for caption, name in re.findall(r"!\[([^\]]*)\]\([^)]*?([\w-]+\.png)\)", page.read_text(encoding="utf-8"))
        if name in made
    ]
    for name, caption in captions:
        for word, drawn in (("layer", made[name].layer), ("head", made[name].head)):
            for number in re.findall(rf"\b{word} (\d+)", caption, re.IGNORECASE):
                assert int(number) == drawn, f"{name}: {caption}"
    for name, picture in made.items():
        if picture.head:
            assert any(file == name and f"head {picture.head}" in caption for file, caption in captions), name
