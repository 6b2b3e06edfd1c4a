"""Makes docs/notebooks from pages, by jupytext, and runs them whole in a kernel.

    python docs/_site/notebooks.py [PAGE ...]          # make notebooks; a page: tutorials/attention
    python docs/_site/notebooks.py --text [PAGE ...]   # runs nothing; keeps the outputs of cells that did not change

A block of code becomes a cell, and what the page shows as its output is left out, because the real one stands there.
Blocks that cannot run stay text, and so do those with `<!-- not in the notebook: why -->` above them. A page in Chinese
has the same cells, so its notebook gets the outputs of the English one, and is written together with it. The
environment needs `docs/_site/requirements.txt`, `ipykernel` and `nbclient`.
"""

from __future__ import annotations

import argparse
import atexit
import base64
import io
import itertools
import os
import posixpath
import re
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import chinese

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDER = DOCS / "notebooks"
_OF_TEXTS = ("annotated-transformer", "transformer-xl", "reformer", "d2l", "labml", "fused-qkv")
PAGES = (
    *(f"tutorials/{name}" for name in ("attention", "transformer", "transformer-xl", "reformer")),
    "own-data",
    "language-models",
    "heads",
    *(f"sources/{name}" for name in _OF_TEXTS),
)
SUPPOSED = {
    "tutorials/attention": "manyheads train --preset demo --minutes 6 --run-dir runs/small",
    "own-data": """manyheads sample-data sample
cp sample/train.en a.en; cp sample/train.de a.de; cp sample/valid.en v.en; cp sample/valid.de v.de
manyheads sample-model runs/demo""",
    "language-models": """manyheads sample-data sample
head -c 300000 sample/novel.txt > a.txt
tail -c 300000 sample/novel.txt | gzip > b.txt.gz
tail -c 20000 sample/novel.txt | tee c.txt > other.txt
printf 'He \\nShe \\n' > prompts.txt
mkdir wikitext-2
for split in train valid test; do cp a.txt wikitext-2/wiki.$split.tokens; done
manyheads train --preset xl-demo --minutes 2 --run-dir runs/xl-demo
manyheads train --preset lm-demo --minutes 2 --run-dir runs/lm-demo""",
    "heads": "manyheads sample-model models/en-de",
}
"""Commands that write what a page supposes to be there; they are the second cell."""
IN_CHINESE = "zh/"
_OF_SUPPOSED = "The next cell writes what this page supposes to be there. If it trains a model, it takes minutes."
_OF_SUPPOSED_IN_CHINESE = "下一格生成本页所需的文件。如果其中要训练模型，需要几分钟。"
MOST_NOTEBOOK_BYTES = 1_000_000
MOST_PICTURE_BYTES = 100_000
MOST_LINES = 200
"""Lines that a cell may print; of one that trains the last TRAINING_LINES are kept."""
TRAINING_LINES = 20
CELL_SECONDS = 3600

_FENCE = re.compile(r"^(?P<note><!--[^\n]*-->\n+)?```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^```$\n?", re.M | re.S)
_NOT_RUN = re.compile(r"<!-- not (?:run|in the notebook): (.+?) -->")
_PYTHON = "---\njupyter:\n  jupytext:\n    main_language: python\n---\n\n"
"""Without it jupytext takes the language of most blocks for the kernel's."""
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_PICTURE = re.compile(r"(!\[[^\]]*\]\()([^):\s]+\.png)(?=\))")
_TRAINING = re.compile(r"manyheads train\b|\btrain\w*\(")


class NotebookError(Exception):
    """Something to be repaired, in one sentence."""


def notebook_of(page: str) -> Any:
    """Return the notebook of a page, without outputs.

    Raises: NotebookError: there is no such page, or it has no block to run; jupytext is missing.
    """
    try:
        import jupytext
    except ImportError:
        raise NotebookError("jupytext is missing; pip install -r docs/_site/requirements.txt.") from None
    import nbformat

    path = DOCS / f"{page}.md"
    if not path.resolve().is_relative_to(DOCS) or not path.is_file():
        raise NotebookError(f"there is no page docs/{page}.md; pages with notebooks: {', '.join(PAGES)}.")
    text = path.read_text(encoding="utf-8")
    if page.startswith(IN_CHINESE):
        text = chinese.in_one_line(chinese.pair_of(f"docs/{page}.md").text())
    notebook = jupytext.reads(_PYTHON + _with_cells(text, page), fmt="md")
    if not any(cell.cell_type == "code" for cell in notebook.cells):
        raise NotebookError(f"{path.relative_to(ROOT)} has no block of code to run, so it makes no notebook.")
    first = [nbformat.v4.new_code_cell(installation(page))]
    supposed = SUPPOSED.get(page.removeprefix(IN_CHINESE))
    if supposed:
        note = _OF_SUPPOSED_IN_CHINESE if page.startswith(IN_CHINESE) else _OF_SUPPOSED
        first += [nbformat.v4.new_markdown_cell(note), nbformat.v4.new_code_cell(f"%%sh\n{supposed}")]
    title, _, rest = notebook.cells[0].source.partition("\n\n")  # these cells follow the title, not a half of the page
    texts = [nbformat.v4.new_markdown_cell(title)], [nbformat.v4.new_markdown_cell(rest)] if rest else []
    notebook.cells = [*texts[0], *first, *texts[1], *notebook.cells[1:]]
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:03d}", {}
        if cell.cell_type == "markdown":
            _put_pictures_into(cell, (FOLDER / page).parent)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    }
    return notebook


def installation(page: str) -> str:
    """Return the first cell: it installs manyheads where it is missing, from where release/addresses.toml says."""
    addresses = tomllib.loads((ROOT / "release" / "addresses.toml").read_text(encoding="utf-8"))
    if addresses["index_name"]:
        what = f"'{addresses['index_name']}[plot]'"
    elif addresses["repository"]:
        what = f"'manyheads[plot] @ git+{addresses['repository']}'"
    else:
        what = f"'{posixpath.relpath('.', posixpath.dirname(f'docs/notebooks/{page}'))}[plot]'"
    return f'import importlib.util\n\nif importlib.util.find_spec("manyheads") is None:\n    %pip install -q {what}'


def _with_cells(text: str, page: str) -> str:
    """Return a page whose blocks that run have a language that jupytext makes cells of, without their outputs."""
    parts, end = [], 0
    previous = -1  # where a block ended whose output may follow
    for match in _FENCE.finditer(text):
        parts.append(_relinked(text[end : match.start()], page))
        is_output = match["language"] == "text" and previous >= 0 and not text[previous : match.start()].strip()
        end, previous = match.end(), -1
        if is_output:
            continue
        reason = _NOT_RUN.search(match["note"] or "")
        if reason is not None:
            parts.append(f"*Not run here: {reason[1]}.*\n\n```{match['language']} .noeval\n{match['text']}```\n")
        elif match["language"] in ("", "sh", "python"):
            parts.append(f"```{match['language'] or 'sh'}\n{match['text']}```\n")
            previous = end
        else:
            parts.append(f"```{match['language']}\n{match['text']}```\n")
    return "".join([*parts, _relinked(text[end:], page)])


def _relinked(text: str, page: str) -> str:
    """Return text with links to files as they are from the notebook's folder."""
    here, there = posixpath.dirname(f"docs/{page}"), posixpath.dirname(f"docs/notebooks/{page}")

    def linked(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match[1]):
            return match[0]
        return posixpath.relpath(posixpath.normpath(posixpath.join(here, match[1])), there) + (match[2] or "")

    return _LINK.sub(linked, text)


def _put_pictures_into(cell: Any, folder: Path) -> None:
    """Attach the pictures that a text shows: what opens a notebook may not find files beside its folder."""
    attached: dict[str, dict[str, str]] = {}

    def put(match: re.Match[str]) -> str:
        path = folder / match[2]
        content = base64.b64encode(path.read_bytes()).decode("ascii")
        if path.stat().st_size > MOST_PICTURE_BYTES:
            content = smaller(content, path.name)
        attached[path.name] = {"image/png": content}
        return f"{match[1]}attachment:{path.name}"

    cell.source = _PICTURE.sub(put, cell.source)
    if attached:
        cell.attachments = attached


def run(notebook: Any, page: str, folder: Path) -> None:
    """Run all cells in a new kernel, in a folder, and keep what they show, within limits.

    Raises: NotebookError: there is no kernel, it ends, a cell fails or takes too long, or its output is too large.
    """
    try:
        import nbclient
    except ImportError:
        raise NotebookError("nbclient is missing; pip install nbclient ipykernel.") from None
    from jupyter_client.kernelspec import NoSuchKernel

    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT / "src")}
    client = nbclient.NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", record_timing=False)
    try:
        client.execute(cwd=str(folder), env=environment)
    except NoSuchKernel:
        raise NotebookError("there is no kernel python3 here; pip install ipykernel.") from None
    except nbclient.exceptions.CellExecutionError as error:
        raise NotebookError(f"docs/{page}.md does not run in a kernel: {str(error).strip()[-2000:]}") from None
    except nbclient.exceptions.DeadKernelError:
        raise NotebookError(
            f"docs/{page}.md ended its kernel; look at what its cells start, and at the memory."
        ) from None
    except nbclient.exceptions.CellTimeoutError:
        raise NotebookError(
            f"docs/{page}.md has a cell that runs for more than {CELL_SECONDS:,} s; do less there."
        ) from None
    except (OSError, RuntimeError) as error:  # its program is gone, or ends at its start
        raise NotebookError(
            f"the kernel python3 cannot be started: {error}; pip install --force-reinstall ipykernel."
        ) from None
    finally:
        atexit.unregister(client._cleanup_kernel)  # of a kernel that never was it would print a traceback
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.outputs = limited(cell, f"docs/{page}.md, cell {number}", str(folder))


def limited(cell: Any, place: str, folder: str) -> list[Any]:
    """Return a cell's outputs within the limits. place: for messages. folder: where it ran; outputs do not name it.

    Raises: NotebookError: it prints too many lines.
    """
    outputs: list[Any] = []
    for output in cell.outputs:
        before = outputs[-1] if outputs else {}
        if output.output_type == "stream" and before.get("output_type") == "stream" and before["name"] == output.name:
            before["text"] += output.text
        else:
            outputs.append(output)
    for output in outputs:
        if output["output_type"] == "stream":
            lines = output["text"].replace(f"{folder}/", "").replace(folder, ".").splitlines(keepends=True)
            if _TRAINING.search(cell.source):
                lines = lines[-TRAINING_LINES:]
            if len(lines) > MOST_LINES:
                raise NotebookError(
                    f"{place} prints {len(lines)} lines, more than {MOST_LINES}; show less on the page."
                )
            output["text"] = "".join(lines)
        elif "image/png" in output.get("data", {}):
            output["data"].pop("text/html", None)  # the page in a frame; the picture shows the same
            output["data"]["image/png"] = smaller(output["data"]["image/png"], place)
    return plain(cell.source, outputs)


def plain(source: str, outputs: list[Any]) -> list[Any]:
    """Return a cell's outputs, in a shell cell all as standard output: notebooks colour the other stream as a failure.

    A cell that fails is not kept, and our commands write their progress to standard error.
    """
    for output in outputs:
        if source.startswith("%%sh") and output["output_type"] == "stream":
            output["name"] = "stdout"
    return outputs


def smaller(picture: str, place: str) -> str:
    """Return a PNG in base64 of at most MOST_PICTURE_BYTES: in 128 or 32 colours, with fewer points if need be."""
    from PIL import Image  # comes with matplotlib

    with Image.open(io.BytesIO(base64.b64decode(picture))) as opened:
        drawn = opened.convert("RGB")
    for part, colours in itertools.product((1.0, 0.8, 0.6, 0.4, 0.3), (128, 32)):
        size = (max(1, round(drawn.width * part)), max(1, round(drawn.height * part)))
        content = io.BytesIO()
        drawn.resize(size).quantize(colours, dither=Image.Dither.NONE).save(content, format="PNG", optimize=True)
        if len(content.getvalue()) <= MOST_PICTURE_BYTES:
            return base64.b64encode(content.getvalue()).decode("ascii")
    raise NotebookError(
        f"{place} draws a picture of {len(content.getvalue()):,} bytes even at {part:g} of its size, more than"
        f" {MOST_PICTURE_BYTES:,}; draw a simpler one."
    )


def keep_outputs(notebook: Any, path: Path) -> None:
    """Give cells the outputs of a stored notebook with the same cells of code, but for the one that installs.

    Raises: NotebookError: there is none, or it has other cells of code.
    """
    import nbformat

    try:
        stored = nbformat.read(path, as_version=4) if path.is_file() else None
    except (ValueError, LookupError, TypeError, AttributeError, nbformat.ValidationError):
        raise NotebookError(
            f"{path.relative_to(ROOT)} is damaged; restore it, or run its page: make notebooks."
        ) from None
    old = [cell for cell in stored.cells if cell.cell_type == "code"] if stored else []
    new = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.source for cell in old[1:]] != [cell.source for cell in new[1:]] or not old:
        raise NotebookError(f"{path.relative_to(ROOT)} has other cells of code than its page; run it: make notebooks.")
    for cell, before in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = plain(cell.source, before.outputs), before.execution_count


def write(notebook: Any, path: Path) -> None:
    """Raises: NotebookError: it is too large."""
    import nbformat

    notebook.metadata["language_info"] = {"name": "python"}
    content = nbformat.writes(notebook)
    if len(content.encode()) > MOST_NOTEBOOK_BYTES:
        raise NotebookError(
            f"{path.relative_to(ROOT)} would have {len(content.encode()):,} bytes, more than {MOST_NOTEBOOK_BYTES:,};"
            " show less on the page."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8", newline="\n")


def make(page: str, *, runs: bool) -> list[Path]:
    """Write the notebook of a page, and of the one in Chinese that follows it.

    runs: run it; otherwise keep the outputs that it has. Returns: the files.
    """
    english = page.removeprefix(IN_CHINESE)
    notebook, path = notebook_of(english), FOLDER / f"{english}.ipynb"
    if runs:
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, english, Path(folder))
    else:
        keep_outputs(notebook, path)
    write(notebook, path)
    followed = chinese.chinese_of(f"docs/{english}.md")
    if followed is None or chinese.pair_of(followed).end:  # the cells of a first part alone would be others
        return [path]
    other, other_path = notebook_of(f"{IN_CHINESE}{english}"), FOLDER / f"{IN_CHINESE}{english}.ipynb"
    keep_outputs(other, path)
    write(other, other_path)
    return [path, other_path]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as tutorials/attention; default: all")
    parser.add_argument("--text", action="store_true", help="run nothing; keep the outputs that are there")
    options = parser.parse_args(arguments)
    stored = [page for page in PAGES if (FOLDER / f"{page}.ipynb").is_file()]
    try:
        for page in options.pages or (stored if options.text else PAGES):
            print(*(path.relative_to(ROOT) for path in make(page, runs=not options.text)), sep="\n", flush=True)
    except (NotebookError, chinese.ChineseError) as error:
        print(f"notebooks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
