"""The notebooks of docs/notebooks: cells of the pages, run whole, within their limits; and what is said of bad ones."""

import base64
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doc_pages import REPOSITORY, blocks_of, differing, site_script

FOLDER = REPOSITORY / "docs" / "notebooks"
STORED = sorted(
    path.relative_to(FOLDER).with_suffix("").as_posix()
    for path in FOLDER.rglob("*.ipynb")
    if path.parent.name != ".ipynb_checkpoints"  # JupyterLab's own
)

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def script() -> Any:
    pytest.importorskip("jupytext", reason="no jupytext; pip install -r docs/_site/requirements.txt")
    return site_script("notebooks")


def cells(page: str) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads((FOLDER / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    return content


@pytest.mark.parametrize("page", STORED)
def test_cells_are_the_blocks_of_the_page(page: str, script: Any) -> None:
    """Code by our own reader of pages; text as jupytext makes it now."""
    english = page.removeprefix(script.IN_CHINESE)
    assert english in script.PAGES
    supposed = [f"%%sh\n{script.SUPPOSED[english]}"] if english in script.SUPPOSED else []
    wanted = [script.installation(page), *supposed]
    for block in blocks_of(f"docs/{page}.md"):
        if not block.not_run and not block.not_in_notebook:
            wanted.append(("" if block.language == "python" else "%%sh\n") + block.text.rstrip("\n"))
    stored = cells(page)
    assert ["".join(cell["source"]) for cell in stored if cell["cell_type"] == "code"] == wanted
    texts = [cell.source for cell in script.notebook_of(page).cells if cell.cell_type == "markdown"]
    assert ["".join(cell["source"]) for cell in stored if cell["cell_type"] == "markdown"] == texts


def printed_by(cell: dict[str, Any]) -> str:
    return "".join("".join(one["text"]) for one in cell["outputs"] if one["output_type"] == "stream")


@pytest.mark.parametrize("page", [page for page in STORED if not page.startswith("zh/")])
def test_figures_that_are_not_compared_are_those_of_the_notebook(page: str) -> None:
    """What a page shows of a run of minutes is what that run printed, also what does not depend on the machine."""
    printed = {"".join(cell["source"]).removeprefix("%%sh\n"): cell for cell in cells(page) if "outputs" in cell}
    for block in blocks_of(f"docs/{page}.md"):
        if block.output is not None and block.not_compared:
            difference = differing(f"... {block.output} ...", printed_by(printed[block.text.rstrip("\n")]))
            assert not difference, f"{block.place} shows something else than the notebook. {difference}"


def test_a_page_in_chinese_has_the_outputs_of_the_english_one(script, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    for page in ("docs/en.md", "docs/zh/en.md", "release/addresses.toml"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "release" / "addresses.toml").write_text('index_name = ""\nrepository = ""\n')
    code = "\n\n```python\nprint(6 * 7)\n```\n"
    (tmp_path / "docs" / "en.md").write_text(f"# Title{code}", encoding="utf-8")
    (tmp_path / "docs" / "zh" / "en.md").write_text(
        f"<!-- follows docs/en.md at 0a -->\n\n# 题目{code}", encoding="utf-8"
    )
    for module in (script, script.chinese):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(script, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(script, "FOLDER", tmp_path / "docs" / "notebooks")

    def run(notebook: Any, page: str, folder: Path) -> None:
        assert page == "en"
        notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="42\n")]
        notebook.cells[2].execution_count = 2

    monkeypatch.setattr(script, "run", run)
    assert [path.relative_to(script.FOLDER).as_posix() for path in script.make("zh/en", runs=True)] == [
        "en.ipynb",
        "zh/en.ipynb",
    ]
    title, installs, cell = nbformat.read(script.FOLDER / "zh" / "en.ipynb", as_version=4).cells
    assert (title.source, cell.source, cell.outputs[0].text) == ("# 题目", "print(6 * 7)", "42\n")
    assert "'../../..[plot]'" in installs.source


@pytest.mark.parametrize("page", STORED)
def test_a_notebook_ran_whole_and_is_small(page: str, script: Any) -> None:
    path = FOLDER / f"{page}.ipynb"
    assert path.stat().st_size <= script.MOST_NOTEBOOK_BYTES
    assert "/tmp/" not in path.read_text(encoding="utf-8")  # noqa: S108
    for cell in cells(page):
        for picture in cell.get("attachments", {}).values():
            assert len(base64.b64decode(picture["image/png"])) <= script.MOST_PICTURE_BYTES
        if cell["cell_type"] != "code":
            continue
        assert cell["execution_count"] is not None
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr" or not "".join(cell["source"]).startswith("%%sh")
            assert len(base64.b64decode(output.get("data", {}).get("image/png", ""))) <= script.MOST_PICTURE_BYTES
            most = script.TRAINING_LINES if "manyheads train" in "".join(cell["source"]) else script.MOST_LINES
            assert len(output.get("text", ())) <= most


@pytest.mark.parametrize("page", STORED)
def test_pictures_of_a_page_are_in_its_notebook(page: str, script: Any) -> None:
    """As they are, but for one that is too large; whoever opens one notebook alone has no other files."""
    text = (REPOSITORY / "docs" / f"{page}.md").read_text(encoding="utf-8")
    shown = [path for path in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", text) if ":" not in path]
    stored = cells(page)
    named = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", "".join("".join(cell["source"]) + "\n" for cell in stored))
    assert named == [f"attachment:{Path(path).name}" for path in shown]
    attached = {name: one["image/png"] for cell in stored for name, one in cell.get("attachments", {}).items()}
    assert attached.keys() == {Path(path).name for path in shown}
    for path in shown:
        file = REPOSITORY / "docs" / Path(page).parent / path
        if file.stat().st_size <= script.MOST_PICTURE_BYTES:
            assert base64.b64decode(attached[file.name]) == file.read_bytes()


def test_links_of_notebooks_lead_to_files() -> None:
    texts = [
        (page, "".join(cell["source"])) for page in STORED for cell in cells(page) if cell["cell_type"] == "markdown"
    ]
    links = [(page, link) for page, text in texts for link in re.findall(r"\]\(([^)\s#:]+)[#)]", text)]
    assert links
    assert not [(page, link) for page, link in links if not (FOLDER / page).parent.joinpath(link).exists()]


class Output(dict[str, Any]):
    """An output as nbformat has it."""

    __getattr__ = dict.__getitem__


def stream(text: str) -> Output:
    return Output(output_type="stream", name="stdout", text=text)


def test_outputs_have_limits(script: Any) -> None:
    training = SimpleNamespace(source="%%sh\nmanyheads train --preset debug", outputs=[])
    training.outputs = [stream("".join(f"{i}\n" for i in range(90))), stream("/run/a/model is written\n")]
    [kept] = script.limited(training, "page", "/run/a")
    assert kept["text"].splitlines() == [*(str(i) for i in range(71, 90)), "model is written"]
    progress = Output(output_type="stream", name="stderr", text="step 1\n")
    shell, code = (SimpleNamespace(source=source, outputs=[Output(progress)]) for source in ("%%sh\nls", "ls()"))
    assert [script.limited(cell, "page", "/run/a")[0]["name"] for cell in (shell, code)] == ["stdout", "stderr"]
    printing = SimpleNamespace(source="print()", outputs=[stream("x\n" * 201)])
    with pytest.raises(script.NotebookError, match=r"docs/a\.md, cell 3 prints 201 lines, more than 200"):
        script.limited(printing, "docs/a.md, cell 3", "/run/a")


def test_a_picture_becomes_small_enough(script: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    content = io.BytesIO()
    image.effect_noise((900, 900), 80).convert("RGB").save(content, format="PNG")
    assert len(content.getvalue()) > script.MOST_PICTURE_BYTES
    smaller = script.smaller(base64.b64encode(content.getvalue()).decode(), "page")
    assert len(base64.b64decode(smaller)) <= script.MOST_PICTURE_BYTES


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("no-such-page", "there is no page docs/no-such-page.md; pages with notebooks: tutorials/attention, "),
        ("../README", "there is no page docs/../README.md; pages with notebooks: "),
        ("/etc/hostname", "there is no page docs//etc/hostname.md; pages with notebooks: "),
        ("words", "docs/words.md has no block of code to run, so it makes no notebook"),
    ],
)
def test_bad_pages_get_one_sentence(script: Any, capsys: pytest.CaptureFixture[str], page: str, said: str) -> None:
    assert script.main([page]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_no_kernel_and_too_large_get_one_sentence(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = script.notebook_of("sources/labml")
    kernelspec = pytest.importorskip("jupyter_client.kernelspec")

    def no_kernel(*_: Any, **__: Any) -> None:
        raise kernelspec.NoSuchKernel("python3")

    monkeypatch.setattr("nbclient.NotebookClient.execute", no_kernel)
    with pytest.raises(script.NotebookError, match="there is no kernel python3 here; pip install ipykernel"):
        script.run(notebook, "sources/labml", tmp_path)
    monkeypatch.setitem(sys.modules, "nbclient", None)
    with pytest.raises(script.NotebookError, match="nbclient is missing; pip install nbclient ipykernel"):
        script.run(notebook, "sources/labml", tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(script, "MOST_NOTEBOOK_BYTES", 100)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(script.NotebookError, match=r"a\.ipynb would have [0-9,]+ bytes, more than 100"):
        script.write(notebook, tmp_path / "a.ipynb")
    assert not (tmp_path / "a.ipynb").exists()
    for content in ("", "{", "[]", "{}", '{"nbformat": 4, "nbformat_minor": 5, "cells": 3}'):
        (tmp_path / "b.ipynb").write_text(content)
        with pytest.raises(script.NotebookError, match=r"b\.ipynb is damaged; restore it"):
            script.keep_outputs(notebook, tmp_path / "b.ipynb")


@pytest.mark.parametrize("program", ["/no/such/python", sys.executable])
def test_a_kernel_that_cannot_be_started_gets_one_sentence(script, tmp_path, monkeypatch, program):
    nbformat = pytest.importorskip("nbformat")
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    kernel = {"argv": [program, "-c", "raise SystemExit(1)"], "display_name": "Python 3", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setattr("jupyter_client.kernelspec.KernelSpecManager.ensure_native_kernel", False)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    with pytest.raises(script.NotebookError, match="the kernel python3 cannot be started"):
        script.run(notebook, "heads", tmp_path)


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("import os; os._exit(3)", 600, r"docs/heads\.md ended its kernel"),
        ("while True: pass", 1, r"runs for more than 1 s; do less"),
    ],
)
def test_a_kernel_that_ends_or_does_not_end_gets_one_sentence(script, tmp_path, monkeypatch, code, seconds, said):
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setattr(script, "CELL_SECONDS", seconds)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    with pytest.raises(script.NotebookError, match=said):
        script.run(notebook, "heads", tmp_path)


def test_the_first_cell_installs_from_where_the_addresses_say(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.installation("heads").endswith("%pip install -q '../..[plot]'")
    assert script.installation("sources/d2l").endswith("%pip install -q '../../..[plot]'")
    for name, repository, wanted in (
        ("manyheads", "", "'manyheads[plot]'"),
        ("", "https://git.example/mh", "'manyheads[plot] @ git+https://git.example/mh'"),
    ):
        known = {"index_name": name, "repository": repository}
        monkeypatch.setattr(script.tomllib, "loads", lambda _, known=known: known)
        assert script.installation("heads").endswith(f"%pip install -q {wanted}")
