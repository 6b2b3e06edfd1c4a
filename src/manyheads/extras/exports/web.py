"""A folder for a static web server: a page that translates in the browser, without a server of ours.

index.html style.css app.js page.json
model/     as the format onnx writes it
runtime/   transformers.js and the WebAssembly of onnxruntime-web, from npm, with their licences
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from manyheads.errors import ConfigError
from manyheads.extras.exports import Check, ExportOptions, check_architecture, onnx
from manyheads.extras.exports.engine import tokenizer_of
from manyheads.models.pretrained import read_config

_NPM = "ONNXRUNTIME_NODE_INSTALL=skip npm install --prefix web-runtime @huggingface/transformers@4"
_PAGE = ("index.html", "style.css", "app.js")
# The second pair is for Safari; a browser loads one.
_WASM = tuple(f"ort-wasm-simd-threaded{kind}.{end}" for kind in (".asyncify", "") for end in ("mjs", "wasm"))
_MOST_TOKENS = 512


def write(model: Path, target: Path, options: ExportOptions) -> list[str]:
    """See `extras.exports`.

    Raises: ConfigError: --runtime is missing or incomplete, or the model does not translate.
    """
    config = read_config(model)
    check_architecture("web", config.architecture)
    tokenizer = tokenizer_of(model, "web")
    if tokenizer.in_pieces is None:
        raise ConfigError(
            f"the format web needs a tokenizer.json, but the model's tokenizer is of the kind {tokenizer.kind}; use the"
            " format onnx, or serve."
        )
    runtime = _runtime_files(options.runtime)
    (target / "model").mkdir()
    notes = onnx.write(model, target / "model", replace(options, to="onnx", runtime=None))
    (target / "runtime").mkdir()
    for source, name in runtime:
        shutil.copyfile(source, target / "runtime" / name)
    page = files("manyheads.extras.exports") / "web_page"
    for name in _PAGE:
        (target / name).write_bytes((page / name).read_bytes())
    settings = {
        "dtype": "q8" if options.quantization else "fp32",
        "max_len": config.longest_input or _MOST_TOKENS,
        "max_len_offset": 50,
    }
    (target / "page.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    kept = [note for note in notes if not note.startswith("Generation differs")]
    return [*kept, "The page translates greedily: transformers.js has no beam search."]


def deviation(model: Path, target: Path, sentences: list[list[int]], options: ExportOptions) -> Check:
    """See `extras.exports`. The graphs are compared in onnxruntime, with the operations that a browser runs."""
    return onnx.deviation(model, target / "model", sentences, replace(options, to="onnx", runtime=None))


def _runtime_files(folder: str | None) -> list[tuple[Path, str]]:
    """Return the files of npm's packages and the names to give them.

    Raises: ConfigError: no folder is given, or a file is missing there.
    """
    how = f"Install it with: {_NPM}; then give --runtime web-runtime."
    if folder is None:
        raise ConfigError(f"the format web needs transformers.js and onnxruntime-web from npm. {how}")
    root = Path(folder)
    modules = root if root.name == "node_modules" else root / "node_modules"
    transformers, onnxruntime = modules / "@huggingface" / "transformers", modules / "onnxruntime-web"
    found = [
        (transformers / "dist" / "transformers.min.js", "transformers.min.js"),
        *((onnxruntime / "dist" / name, name) for name in _WASM),
        (transformers / "LICENSE", "transformers.LICENSE.txt"),
        (transformers / "package.json", "transformers.json"),
        # This package has its licence (MIT) in these two.
        (onnxruntime / "package.json", "onnxruntime-web.json"),
        (onnxruntime / "README.md", "onnxruntime-web.README.md"),
    ]
    missing = next((path for path, _ in found if not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"--runtime {folder} is incomplete: there is no {missing}. {how}")
    return found
