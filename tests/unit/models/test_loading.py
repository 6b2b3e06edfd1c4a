"""Loading a model takes no longer than it must."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from manyheads.catalogue import ARCHITECTURES
from manyheads.models.pretrained import save_pretrained

LOADED = """
import sys
from manyheads.models.pretrained import load
for folder in sys.argv[1:]:
    load(folder)
    assert "torch._dynamo" not in sys.modules, folder
"""


def test_no_compiler_is_imported(tmp_path: Path) -> None:
    """torch imports its own for operations on the meta device: as much again as torch itself takes."""
    folders = [tmp_path / name for name in ARCHITECTURES]
    for folder in folders:
        entry = ARCHITECTURES[folder.name]
        config = entry.presets["debug"]
        sizes = {field.name: 23 for field in fields(config) if field.name.endswith("vocab_size")}
        save_pretrained(entry.build(replace(config, **sizes)), folder)
    done = subprocess.run([sys.executable, "-c", LOADED, *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
