"""Draws every picture of docs/pictures, each with a small JSON file: its command, versions, and the numbers drawn.

    python docs/_site/pictures.py [NAME ...]          # make pictures
    python docs/_site/pictures.py --untrained         # only those that need no training

Models that are not there are trained or written first, into the working folder (`RUNS`). A page in a
browser needs chromium and playwright. Pictures of benchmarks belong to `benchmarks/curves.py` and are not drawn here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
TEXT = "She does not want to speak to him."
CATS = "the cat sat on the mat and the dog sat on the cat and the cat sat on the dog and the mat lay under the cat"
_STEPS = "--precision fp32 --training.max-minutes 0 --training.max-steps"
RUNS = {
    "models/en-de": "sample-model models/en-de",
    "runs/novel": f"train --preset xl-demo {_STEPS} 300 --run-dir runs/novel",
    "runs/long": f"train --preset reformer-demo {_STEPS} 60 --run-dir runs/long",
}
"""Steps instead of the minutes of the pages, which are other steps on every machine."""
UNTRAINED = "runs/untrained"
"""A model with the sizes of the preset demo: its blocks are those of a trained one."""


@dataclass(frozen=True)
class Picture:
    """Files that one command draws.

    files: below docs/pictures; the first is what `--output` names. view, layer, head, keys, scheme: of a page in a
    browser, or view and layer of a drawing; layers and heads are counted from 1.
    """

    command: str
    files: tuple[str, ...]
    view: str = ""
    layer: int = 0
    head: int = 0
    keys: str = ""
    scheme: str = ""

    @property
    def is_trained(self) -> bool:
        return any(run in self.command for run in RUNS)

    @property
    def name(self) -> str:
        return self.files[0]


def _page(name: str, **more: Any) -> Picture:
    return Picture(f"inspect attention models/en-de --text '{TEXT}' --output attention.html", (name,), **more)


PICTURES = (
    Picture("inspect positions --d-model 20 --length 60 --features 4 5 6 7", ("positions.png",)),
    Picture("inspect smoothing --smoothing 0 0.1 0.4", ("smoothing.png",)),
    Picture("inspect schedule --d-model 256 512 --warmup-steps 4000 8000", ("schedule.png",)),
    Picture("inspect schedule 512:4000 512:8000 256:4000", ("rates.png",)),
    Picture("inspect segments --layers 3 --segment 4 --memory 4 --eval-segment 2 --eval-memory 6", ("segments.png",)),
    Picture(f"inspect architecture {UNTRAINED} --operations operations.png", ("architecture.png", "operations.png")),
    Picture("inspect embeddings models/en-de --words man woman red walking dog", ("embeddings.png",)),
    Picture(
        f"inspect attention models/en-de --text '{TEXT}' --view encoder --layer 1",
        ("heads.png",),
        view="encoder",
        layer=1,
    ),
    Picture(f"inspect attention models/en-de --text '{TEXT}' --view cross --layer 2", ("cross.png",), "cross", 2),
    Picture(
        "inspect attention runs/novel --text 'He opened the door and he went in. He sat down.' --memory 24 --layer 1",
        ("memory.png",),
        view="decoder",
        layer=1,
    ),
    Picture(f"inspect buckets runs/long --text '{CATS}'", ("tutorial-buckets.png",)),
    _page("attention-matrix-light.png", view="cross", layer=2, head=1, keys="m", scheme="light"),
    _page("attention-matrix-dark.png", view="cross", layer=2, head=1, keys="m", scheme="dark"),
    _page("attention-grid-light.png", view="cross", layer=2, head=1, keys="g", scheme="light"),
    _page("attention-lines-light.png", view="cross", layer=2, head=1, keys="l", scheme="light"),
    Picture("serve en-de=models/en-de --port 0 --source-lang en --target-lang de", ("translator.png",), scheme="light"),
)
SIZE = {"width": 1160, "height": 640}


def numbers_of(figure: Any) -> list[dict[str, Any]]:
    """What the axes of a figure show: points of lines, values of images, words. Long rows are thinned."""
    shown = []
    for axes in figure.axes:
        lines = [_thinned(line.get_ydata()) for line in axes.get_lines()]
        images = [
            {"shape": list(image.get_array().shape), "values": _thinned(image.get_array().ravel())}
            for image in axes.get_images()
        ]
        words = sorted(filter(None, (text.get_text() for text in axes.texts)))
        shown.append({"title": axes.get_title(), "lines": lines, "images": images, "words": words})
    return shown


def _thinned(values: Any, most: int = 24) -> list[float]:
    row = [float(value) for value in values]
    step = max(1, len(row) // most)
    return [float(f"{value:.5g}") for value in row[::step]]


def drawn(picture: Picture, folder: Path) -> list[list[dict[str, Any]]]:
    """Run a command of `inspect` here; its pictures go to `folder`. Returns: the numbers of each file."""
    from manyheads.cli.main import main
    from manyheads.extras.inspect.drawings import figure

    numbers = []
    save = figure.save_by_name

    def kept(sheet: Any, name: str) -> Path:
        numbers.append(numbers_of(sheet))
        return save(sheet, str(folder / Path(name).name))

    command = [*shlex.split(picture.command), "--output", picture.name]
    figure.save_by_name = kept
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = main(command)
    finally:
        figure.save_by_name = save
    if code:
        raise SystemExit(code)
    return numbers


def save_untrained(folder: Path) -> None:
    """Write a model with the sizes of the preset demo, if it is not there."""
    if (folder / "config.json").is_file():
        return
    from manyheads.catalogue import build_model
    from manyheads.models.pretrained import save_pretrained
    from manyheads.tasks.translation.settings import demo

    config = demo("fp32")
    size = config.tokenizer.vocab_size
    model = replace(config.model, source_vocab_size=size, target_vocab_size=size)
    save_pretrained(build_model(model), folder)


@contextlib.contextmanager
def browser_page(picture: Picture) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    program = os.environ.get("MANYHEADS_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=program, args=arguments)
        page = browser.new_page(color_scheme=picture.scheme, viewport=SIZE, device_scale_factor=1)
        page.set_default_timeout(200_000)
        yield page
        browser.close()


def shoot_attention(picture: Picture) -> dict[str, Any]:
    """The page of `inspect attention` in a browser. Returns: what its status line and sentence say."""
    from manyheads.cli.main import main

    with tempfile.TemporaryDirectory() as aside, browser_page(picture) as page:
        path = Path(aside) / "attention.html"
        with contextlib.redirect_stdout(io.StringIO()):
            main([str(path) if word == "attention.html" else word for word in shlex.split(picture.command)])
        page.goto(path.as_uri())
        page.locator("#sentence").filter(has_text="layer").wait_for()
        page.locator("#views button", has_text=picture.view).click()
        page.locator("#layer").select_option(label=str(picture.layer))
        page.locator("#head").select_option(label=str(picture.head))
        page.keyboard.press(picture.keys)
        page.wait_for_timeout(1500)
        page.screenshot(path=str(FOLDER / picture.name))
        return {"status": page.locator("#status").text_content(), "sentence": page.locator("#sentence").text_content()}


def shoot_translator(picture: Picture) -> dict[str, Any]:
    """The page of the server. Returns: source and translation."""
    source = "I am very hungry.\nWhere is the station?\nShe does not want to speak to him."
    command = [sys.executable, "-m", "manyheads", *shlex.split(picture.command)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            address = next(line for line in server.stderr if "http://" in line).strip().rpartition(" ")[2]
            with browser_page(picture) as page:
                page.goto(address)
                page.fill("#t-source", source)
                page.locator(".sentence").nth(2).wait_for()
                page.wait_for_timeout(1500)
                page.screenshot(path=str(FOLDER / picture.name))
                return {"source": source, "translation": page.inner_text("#t-target")}
        finally:
            server.terminate()


def record(picture: Picture, numbers: Sequence[Any]) -> None:
    """Write the JSON of each file of a picture."""
    versions = {name: metadata.version(name) for name in ("torch", "matplotlib", "numpy")}
    facts = {key: value for key, value in asdict(picture).items() if value and key not in ("command", "files")}
    for file, content in zip(picture.files, numbers, strict=True):
        known = {
            "command": f"manyheads {picture.command}",
            "trained": RUNS[next(run for run in RUNS if run in picture.command)] if picture.is_trained else None,
            "versions": {"python": platform.python_version(), **versions},
            **facts,
            "numbers": content,
        }
        text = json.dumps(known, ensure_ascii=False, indent=1)
        (FOLDER / file).with_suffix(".json").write_text(f"{text}\n", encoding="utf-8")


def make(picture: Picture) -> None:
    for run, command in RUNS.items():
        if run in picture.command and not Path(run).exists():
            subprocess.run([sys.executable, "-m", "manyheads", *shlex.split(command)], check=True)
    if UNTRAINED in picture.command:
        save_untrained(Path(UNTRAINED))
    if picture.keys:
        record(picture, [shoot_attention(picture)])
    elif picture.command.startswith("serve"):
        record(picture, [shoot_translator(picture)])
    else:
        record(picture, drawn(picture, FOLDER))
    for file in picture.files:
        _reduce(FOLDER / file)
    print(*picture.files)


def _reduce(path: Path) -> None:
    """Store a picture in 128 colours, in a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a file, such as heads.png; default: all")
    parser.add_argument("--untrained", action="store_true", help="only what needs no training")
    options = parser.parse_args()
    unknown = set(options.names) - {name for picture in PICTURES for name in picture.files}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for picture in PICTURES:
        chosen = not options.names or set(options.names) & set(picture.files)
        if chosen and not (options.untrained and picture.is_trained):
            make(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
