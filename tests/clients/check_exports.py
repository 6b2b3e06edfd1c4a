"""Exports in the runtimes that others wrote: writes models and exports, runs each runtime in its own environment.

    python tests/clients/check_exports.py [--model DIR] [--sentences N] --python5 P --python4 P [--node DIR]

python5, python4: of the environments with transformers 5 and 4 (`exports-transformers5.txt`, `...4.txt`). node: the
folder into which npm installed transformers.js. Exits with 1 after a failure. `make check-export` calls this.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from exports_to_check import copy_given, write_expected, write_exports, write_tiny

from manyheads.extras.peers.convert import import_folder
from manyheads.extras.peers.marian import fitted
from manyheads.models.pretrained import load, portable_state

_HERE = Path(__file__).resolve().parent
_ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--sentences", type=int, default=0, help="40 for tiny models, 1,000 for a given one")
    parser.add_argument("--python5", required=True)
    parser.add_argument("--python4", required=True)
    parser.add_argument("--node")
    parser.add_argument("--work", help="keep all files in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(options.work or name).resolve()
        folders = copy_given(work, options.model) if options.model else write_tiny(work)
        for folder in folders:
            write_exports(folder)
            write_expected(folder, options.sentences or (1000 if options.model else 40))
        failed = 0
        for python, checks in (
            (options.python5, ["transformers", "ctranslate2", "onnxruntime"]),
            (options.python4, ["transformers", "optimum"]),
        ):
            for check in checks:
                failed += _run([python, str(_HERE / "load_exports.py"), check, *map(str, folders)])
        failed += sum(_come_back(folder) for folder in folders if (folder / "transformers").is_dir())
        failed += _run_node(options.node, folders)
    print("exports: all good" if not failed else f"exports: {failed} failed")
    return failed > 0


def _run(command: list[str]) -> int:
    return int(subprocess.run(command, check=False, env=_ENVIRONMENT).returncode != 0)


def _run_node(modules: str | None, folders: list[Path]) -> int:
    if shutil.which("node") is None or not modules or not (Path(modules) / "node_modules").is_dir():
        print("transformers.js: NOT RUN; node or its packages are not installed", file=sys.stderr)
        return 0
    translators = [folder for folder in folders if (folder / "onnx" / "onnx" / "encoder_model.onnx").is_file()]
    return _run(["node", str(_HERE / "load_exports.mjs"), modules, *map(str, translators)])


def _come_back(folder: Path) -> int:
    """Convert the export, and what each transformers saved of it, to our format. Returns: the number of failures.

    A peer's classes always have biases; those that our model lacks come back as zeros.
    """
    module: Any = load(folder / "model")
    wanted = portable_state(module if module.config.architecture == "reformer" else fitted(module))
    failed = 0
    for source in sorted(path for path in folder.iterdir() if path.name.startswith("transformers")):
        output = folder / f"again-{source.name}"
        import_folder(source, output)
        found = portable_state(load(output))
        equal = all(name in found and torch.equal(found[name], one) for name, one in wanted.items())
        equal = equal and not any(one.any() for name, one in found.items() if name not in wanted)
        failed += not equal
        print(f"back from {source.name}, {folder.name}: {'equal' if equal else 'DIFFERENT'} weights")
    return failed


if __name__ == "__main__":
    sys.exit(main())
