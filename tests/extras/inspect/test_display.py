"""What notebooks show of models, masks and attention, and what a kernel shows of a run and of an error."""

import base64
import html
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyheads
from manyheads.decoding.translator import Translator
from manyheads.errors import RequestError
from manyheads.extras.inspect.blocks import example_inputs
from manyheads.nn import Bias, Causal, Dense, KeyPadding, Lengths, MultiHeadAttention, Window, observe
from manyheads.nn.attention.observing import Observed, attentions_of

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def translator(model_folder: Path) -> Translator:
    return Translator.from_pretrained(model_folder)


def forms(shown: Any) -> dict[str, str]:
    found: dict[str, str] = shown._repr_mimebundle_(include=None, exclude=None)
    return found


def page(shown: Any) -> str:
    """The page within the frame."""
    frame = re.fullmatch(
        r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts allow-downloads".*</iframe>', forms(shown)["text/html"]
    )
    return html.unescape(frame[1])


def test_models_masks_and_attention_have_three_forms(translator: Translator) -> None:
    model = translator.model
    assert isinstance(model, nn.Module)
    inputs = example_inputs(model).values()
    with observe(model) as observed:
        model.log_probs(*inputs)  # type: ignore[operator]
    shown = {
        "Translator(transformer": translator,
        "Causal()": Causal(),
        "Attentions, (batch, heads": attentions_of(model, *inputs),
        "observed, a tensor for each call": observed,
        "attention for 'I am'": manyheads.show_attention(translator, "I am"),
        "parameters": manyheads.inspect_model(model),
    }
    for text, one in shown.items():
        found = forms(one)
        assert text in found["text/plain"]
        assert base64.b64decode(found["image/png"]).startswith(b"\x89PNG"), text
        assert page(one).startswith("<!doctype html>"), text
    assert "tensor(" not in repr(observed) + forms(observed)["text/plain"]
    assert repr(model).startswith("Seq2Seq(\n")  # torch's own


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (Causal() & Lengths(torch.tensor([2, 1])), ["■ · · · · · · ·", "■ ■ · · · · · ·"]),
        (Window(left=1, right=0), ["■ · · · · · · ·", "■ ■ · · · · · ·", "· ■ ■ · · · · ·"]),
        (KeyPadding(torch.tensor([[True, False, True]])), ["■ · ■"] * 3),
        (Dense(torch.eye(2, 3)), ["■ · ·", "· ■ ·"]),
        (Bias(torch.tensor([[0.0, -torch.inf]])), ["■ ·"] * 2),
        (Causal() & Dense(torch.ones(2, 4)), ["■ ■ ■ ·", "■ ■ ■ ■"]),  # queries that follow cached keys
    ],
    ids=str,
)
def test_a_mask_is_shown_at_its_own_size(mask: Any, rows: list[str]) -> None:
    lines = [line.strip() for line in forms(mask)["text/plain"].split("\n") if set(line) <= set(" ■·")]
    assert lines[: len(rows)] == rows
    width = rows[0].count("■") + rows[0].count("·")
    cells = sum(int(found) for found in re.findall(r'<rect [^>]*width="(\d+)" height="1"/>', page(mask)))
    assert cells == "".join(lines).count("■")
    assert f'viewBox="0 0 {width} ' in page(mask)


def test_a_large_mask_is_shown_in_part() -> None:
    for mask in (
        Causal() & Lengths(torch.tensor([300_000])),
        Causal() & KeyPadding(torch.ones(6, 300_000, dtype=torch.bool)),
    ):
        assert "the first 48 queries and 48 keys" in forms(mask)["text/plain"]
    assert "of 6" in forms(mask)["text/plain"]


def test_without_matplotlib_the_rest_is_shown(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = forms(manyheads.show_attention(translator, "I am"))
    assert [*found] == ["text/plain", "text/html"]
    assert "without a picture: plots need matplotlib" in found["text/plain"]


def test_models_of_other_kinds(translator: Translator) -> None:
    attention = MultiHeadAttention(16, 4)
    assert "q_proj              272  Linear" in repr(manyheads.inspect_model(attention))
    buckets = Observed({"layers.0": [torch.zeros(1, 2, 1, 5, dtype=torch.int64)]})
    assert [*forms(buckets)] == ["text/plain"]
    translator.model.train()  # type: ignore[attr-defined]
    before = torch.get_rng_state()
    manyheads.inspect_model(translator)
    assert translator.model.training  # type: ignore[attr-defined]
    assert torch.equal(before, torch.get_rng_state())
    translator.model.eval()  # type: ignore[attr-defined]
    for call, said in (
        (lambda: manyheads.inspect_model(3), "not a int"),
        (lambda: manyheads.show_attention("runs/demo", "I"), "not a str; load one with from_pretrained"),
        (lambda: manyheads.show_attention(translator, ""), "give at least one word"),
    ):
        with pytest.raises(RequestError, match=said):
            call()


def test_attention_is_saved_as_its_name_ends(translator: Translator, tmp_path: Path) -> None:
    shown = manyheads.show_attention(translator, "I am", "Ich bin")
    assert shown.save(tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert shown.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match=r"must end in \.html"):
        shown.save(tmp_path / "a.txt")


Kernel = Callable[..., list[list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Runs cells in a real kernel, the same for all tests of this file. Returns: the outputs of each."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(), timeout=300, kernel_name="python3", allow_errors=True,
        resources={"metadata": {"path": str(tmp_path_factory.mktemp("kernel"))}},
    )  # fmt: skip

    def run(*sources: str) -> list[list[dict[str, Any]]]:
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        client.nb.cells = cells
        for place, cell in enumerate(cells):
            client.execute_cell(cell, place)
        return [cell.outputs for cell in cells]

    with client.setup_kernel(env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}):
        yield run


def printed(outputs: list[dict[str, Any]], name: str) -> str:
    return "".join(output["text"] for output in outputs if output.get("name") == name)


@pytest.mark.one_in(2, "runs in a kernel")
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("no-such-backend", marks=pytest.mark.slow),
        "module://of_another.environment",
    ],
)
def test_a_run_in_a_kernel_has_few_lines_and_a_learning_curve(kernel, warm_program, tmp_path, backend):
    """The second backend is to matplotlib what a notebook's is to one of another environment."""
    train = f"{shlex.join(warm_program)} train --preset debug --run-dir {tmp_path}"
    setting = f"export MPLBACKEND={backend}\n" if backend else ""
    outputs = kernel(f"%%sh\n{setting}{train}", f"%%sh\nls {tmp_path}/plots; env | grep FORCE_COLOR")
    told, said = printed(outputs[0], "stderr"), printed(outputs[0], "stdout")
    assert "best so far" in told
    assert "a bug of ours" not in told
    assert ("no-such-backend is unknown here" in told) == (backend == "no-such-backend")
    assert (told + said).count("\n") <= 40
    assert "\x1b[1;36mvalidation at step 20" in told  # colours, and
    assert not re.search(r"\x1b\[[0-9;?]*[^0-9;?m]|\r", told + said)  # nothing moves
    assert printed(outputs[1], "stdout").split() == ["learning-curve.png", "learning-curve.svg", "FORCE_COLOR=1"]


def test_a_kernel_shows_pictures_and_one_paragraph_of_an_error(kernel: Kernel, model_folder: Path) -> None:
    first, second, third, fourth = kernel(
        f"import os, manyheads\nmanyheads.Translator.from_pretrained({str(model_folder)!r})",
        "manyheads.nn.Causal()",
        "manyheads.load('/no/such/model')",
        "os.environ['MANYHEADS_DEBUG'] = '1'\nmanyheads.load('/no/such/model')",
    )
    for [output] in (first, second):
        assert {"text/plain", "text/html", "image/png"} <= {*output["data"]}
    assert "iframe" in first[0]["data"]["text/html"]
    [short] = third[0]["traceback"]
    assert short.startswith("ModelFileError: there is no folder /no/such/model")
    assert "Traceback (most recent call last)" in "".join(fourth[0]["traceback"])


@pytest.mark.one_in(2, "runs in a kernel")
def test_training_in_a_kernel_has_one_line_and_the_curve(kernel: Kernel) -> None:
    start = "import manyheads, os\nos.environ['MANYHEADS_PRECISION'] = 'fp32'\n"
    first, second, third = kernel(
        f"{start}result = manyheads.train('debug', run_dir='run', training={{'max_steps': 4}})",
        "manyheads.train('debug', run_dir='other', training={'max_steps': 2, 'plots': False})",
        "manyheads.train('debug', training={'no_such': 1})",
    )
    line, curve = first
    ended = r"ended at step 4 after \S+ \(steps done\); best: step 4, .* \| run"
    assert re.fullmatch(ended, line["data"]["text/plain"])
    assert base64.b64decode(curve["data"]["image/png"]).startswith(b"\x89PNG")
    line, result = second
    assert line["data"]["text/plain"].startswith("ended at step 2 ")
    assert result["data"]["text/plain"].startswith("TrainResult of other: ended at step 2; best: step 2, ")
    assert [output["output_type"] for output in third] == ["error"]
