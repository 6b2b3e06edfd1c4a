"""The files of the package whose code runs when somebody trains, translates or generates, by public entries alone.

    python journeys.py JOURNEY FOLDER

runs one journey in this process and prints its files as JSON. A module's top level does not count; a function or the
body of a class does. FOLDER holds the runs: `train` makes them, the others read them.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PRESETS = ("debug", "xl-debug", "reformer-debug")
JOURNEYS = (*(f"train {name}" for name in PRESETS), "translate", *(f"generate {name}" for name in PRESETS[1:]))


class Watch:
    """Within it, the files of all code that starts to run are noted, in every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name != "<module>":
            self.files.add(frame.f_code.co_filename)

    def __enter__(self) -> set[str]:
        threading.settrace(self._note)
        sys.settrace(self._note)
        return self.files

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def travel(journey: str, folder: Path) -> set[str]:
    """Go on a journey. Returns: the files that ran, of all packages."""
    kind, _, preset = journey.partition(" ")
    run = folder / (preset or PRESETS[0])
    if kind == "train":
        sys.argv = ["manyheads", "train", "--preset", preset, "--run-dir", str(run), "--resume", "none"]
        sys.argv += ["--training.max_steps", "3", "--quiet"]
        with Watch() as files:
            try:
                runpy.run_module("manyheads", run_name="__main__")
            except SystemExit as stop:
                if stop.code:
                    raise
        return files
    import manyheads

    if kind == "translate":
        translator = manyheads.Translator.from_pretrained(run)
        translator.translate("A man.")
        with Watch() as files:
            translator.translate("A man walks.")
        return files
    generator = manyheads.Generator.from_pretrained(run)
    generator.generate("He ", max_new_tokens=2)
    with Watch() as files:
        generator.generate("He opened ", max_new_tokens=4)
    return files


def files_of_journeys(root: Path) -> dict[str, set[str]]:
    """Journey -> files below `root/src/manyheads`, each run in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "MANYHEADS_PRECISION": "fp32"}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for journey in JOURNEYS:
            command = [sys.executable, __file__, journey, folder]
            child = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
            if child.returncode:
                sys.exit(f"{journey}: {' '.join(command)} ends with {child.returncode}\n{child.stdout}{child.stderr}")
            found[journey] = set(json.loads(child.stdout.splitlines()[-1]))
    return found


if __name__ == "__main__":
    ran = travel(sys.argv[1], Path(sys.argv[2]))
    import manyheads

    package = Path(manyheads.__file__).resolve().parent
    paths = (Path(name).resolve() for name in ran)
    print(json.dumps(sorted(str(path.relative_to(package)) for path in paths if path.is_relative_to(package))))
