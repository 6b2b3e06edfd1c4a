"""The exported page in Chromium: it translates in the browser, as the model does, and without a network."""

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import Translator
from manyheads.catalogue import build_model
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.engine import export_model
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unhooked

LINES = ["the cat sees two dogs", "", "one red house"]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def _model(folder: Path) -> Path:
    tokenizer = Tokenizer.train(LINES * 20, TokenizerSettings(kind="bpe", vocab_size=300))
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_encoder_layers": 1, "num_decoder_layers": 1}
    size = tokenizer.vocab_size
    torch.manual_seed(1)
    model = build_model(
        TransformerConfig(source_vocab_size=size, target_vocab_size=size, tie_embeddings="none", **sizes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        # Bytes that are no UTF-8 are shown otherwise there, so none is produced.
        model.head.weight[4:260] = 0
    save_pretrained(model, folder, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of an exported page, and the model."""
    pytest.importorskip("onnxruntime", reason="no onnxruntime; pip install '.[onnx]'")
    pytest.importorskip("onnx", reason="no onnx; pip install '.[onnx]'")
    runtime = os.environ.get("MANYHEADS_WEB_RUNTIME")
    if not runtime:
        pytest.skip("MANYHEADS_WEB_RUNTIME does not name a folder with transformers.js from npm (docs/exporting.md)")
    base = tmp_path_factory.mktemp("web")
    model = _model(base / "model")
    export_model(model, base / "site", ExportOptions(to="web", runtime=runtime))
    handler = functools.partial(_Quiet, directory=str(base / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", model
        server.shutdown()


def test_the_page_translates_as_the_model_does_and_offline(browser: Any, site: tuple[str, Path]) -> None:
    address, folder = site
    context = browser.new_context(viewport={"width": 360, "height": 740})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    requested: list[str] = []
    context.on("request", lambda request: requested.append(request.url))
    page.goto(address)
    page.locator("#translate:not([disabled])").wait_for(timeout=90_000)
    assert all(url.startswith((address, "data:", "blob:")) for url in requested), requested
    context.set_offline(True)
    page.fill("#source", "\n".join(LINES))
    page.press("#source", "Control+Enter")
    page.get_by_text("Ready.", exact=True).wait_for(timeout=60_000)
    found = page.text_content("#target").split("\n")
    ours = Translator.from_pretrained(folder).translate([line for line in LINES if line], num_beams=1)
    expected = [str(one).strip() for one in ours]
    assert [found[0], found[2]] == expected
    assert found[1] == ""
    assert any(expected)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not problems
    page.fill("#source", "  ")
    page.click("#translate")
    assert page.text_content("#message") == "Enter a text."
    if pictures := os.environ.get("MANYHEADS_SCREENSHOTS"):
        page.screenshot(path=f"{pictures}/web-narrow.png")
    context.close()
