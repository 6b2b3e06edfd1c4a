"""The readers under coverage-guided fuzzing by atheris: `python -m fuzz.guided FOLDER --minutes N`.

atheris (libFuzzer for Python) keeps the inputs that reach new code. It is installed apart: `make fuzz-atheris`.
Each reader gets an equal part of the time, in a process of its own, with the seed file and its mutations as the corpus.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from random import Random

from fuzz.campaign import Campaign
from fuzz.mutations import mutate
from fuzz.readers import fault_of

__all__ = ["main"]

SEEDS = 50
LONGEST = 20_000


def guide(folder: Path, name: str, seconds: int) -> int:
    """In a process of its own: fuzz one reader until the time is over or a fault is found."""
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["manyheads"]):
        campaign = Campaign.start(folder)
    reader = campaign.readers[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    for seed in range(SEEDS):
        content = reader.seed if seed == 0 else mutate(reader.kind, reader.seed, Random(f"guided {name} {seed}"))
        (corpus / str(seed)).write_bytes(content)

    def one(content: bytes) -> None:
        fault = fault_of(reader, content, folder / "copies")
        if fault:
            raise RuntimeError(fault)

    limits = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=2048", f"-max_len={LONGEST}"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", str(corpus)], one)
    atheris.Fuzz()
    return 0


def main() -> int:
    """See the module. Returns: 1 if a fault was found."""
    parser = argparse.ArgumentParser(description="Fuzz the readers by coverage.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--reader", default="", help="one of them, in this process")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.reader:
        return guide(folder, given.reader, max(1, round(given.minutes * 60)))
    names = sorted(Campaign.start(folder / "names").readers)
    faults = {}
    for number, name in enumerate(names):
        minutes = str(given.minutes / len(names))
        command = [
            sys.executable,
            "-m",
            "fuzz.guided",
            str(folder / str(number)),
            "--reader",
            name,
            "--minutes",
            minutes,
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            faults[name] = {"output": result.stderr[-1000:], "files": str(folder / str(number))}
    print(json.dumps({"readers": len(names), "minutes": given.minutes, "faults": faults}, indent=1))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
