"""A page's blocks as cells of one kernel; `manyheads` in `%%sh` cells runs in the kernel, which takes less time."""

import os
from pathlib import Path

__all__ = ["run_cells"]

_TESTS = Path(__file__).resolve().parent
_FIRST = f"""import sys
sys.path.insert(0, {str(_TESTS)!r})
import torch
from IPython.core.magic import register_cell_magic
from page_shell import run_line
torch.manual_seed(0)
@register_cell_magic
def sh(line, cell):
    for one in cell.strip().split("\\n"):
        print(run_line(one).out, end="")
"""


def run_cells(cells: list[str], folder: Path) -> list[str]:
    """Run cells in a new kernel, in a folder. Returns: the standard output of each.

    Raises: nbclient's CellExecutionError: one fails; with its traceback.
    """
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (_FIRST, *cells)])
    environment = {**os.environ, "PYTHONPATH": str(_TESTS.parent / "src")}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(folder), env=environment)
    return [
        "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells[1:]
    ]
