"""The Triton kernels with the version of torch 2.11, in processes of their own, with the numpy that it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[4] / ".venv-triton" / "3.6.0"


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER / "ready").exists(), reason="make check-long installs Triton 3.6.0")
@pytest.mark.parametrize(
    ("file", "interprets"),
    [
        ("test_triton_interpreted", "1"),
        ("test_triton_loss", "1"),
        ("test_triton_chunks", "1"),
        ("test_triton_compiled", "0"),
    ],
)
def test_with_triton_3_6(file: str, interprets: str) -> None:
    paths = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": paths, "TRITON_INTERPRET": interprets, "MANYHEADS_TYPECHECK": "0"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__).with_name(f"{file}.py"))]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
    assert " passed" in done.stdout
