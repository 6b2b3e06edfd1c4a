"""One process for the tests: `python -m fuzz.suite FOLDER quick|whole|slow FOUND` prints one JSON object.

`cases`: what is wrong with each of `cases.make_cases`, of which `quick` takes a slice. `found`: what is wrong with each
file of tests/fuzz/found.
`slice`: a short campaign.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from slices import drawn

from fuzz.campaign import STUCK_SECONDS, Campaign, Found
from fuzz.cases import Case, make_cases
from fuzz.commands import LEFT_OUT
from fuzz.forks import MOST_SECONDS, forked

__all__ = ["main"]

READ_EACH = 3
COMMANDS = 4


def wrong_with(case: Case, folder: Path) -> str:
    """What is wrong with a case; empty: nothing."""
    from manyheads.cli.main import main as program

    outcome = forked(
        lambda: program(case.arguments),
        seconds=600 if case.slow else STUCK_SECONDS,
        work_seconds=600 if case.slow else MOST_SECONDS,
        folder=folder,
        environment=case.environment,
    )
    fault = outcome.fault(trains=case.trains)
    if fault:
        return f"{fault}: {outcome.stderr[-500:]}"
    shown = [text for text in case.silent if text in outcome.stdout + outcome.stderr]
    if shown:
        return f"{shown} in its output"
    if case.says == "either":
        return ""
    if outcome.code != (0 if case.says is None else 2):
        return f"exit code {outcome.code}: {outcome.stderr[-500:]}"
    said = " ".join(outcome.stderr.split())
    return "" if case.says is None or case.says in said else f"{case.says!r} is not in {said[-500:]!r}"


def replayed(campaign: Campaign, path: Path) -> str:
    """What is wrong with a case that was found before; empty: nothing."""
    found = Found.from_record(json.loads(path.read_text(encoding="utf-8")))
    if found.reader:
        return campaign.reader_fault(found.reader, found.content)
    return campaign.command_fault([word.replace("{folder}", str(campaign.folder)) for word in found.command])


def main() -> int:
    """See the module."""
    folder, mode, kept = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    import manyheads.cli.records
    import manyheads.decoding.generator
    import manyheads.decoding.translator
    import manyheads.training.run.components  # noqa: F401  (what most commands import)
    from manyheads.cli import main as program

    for name in program.COMMANDS:
        if name not in LEFT_OUT:
            program.module_of(name)
    campaign = Campaign.start(folder)
    report: dict[str, Any] = {}
    times = {}
    cases = [case for case in make_cases(folder / "honest", folder / "cases") if case.slow == (mode == "slow")]
    report["cases"] = {}
    chosen = drawn(len(cases), 8, "reported cases") if mode == "quick" else range(len(cases))
    for case in (cases[place] for place in sorted(chosen)):
        begun = time.monotonic()
        report["cases"][case.name] = wrong_with(case, folder / "cases")
        times[case.name] = round(time.monotonic() - begun, 2)
    report["found"] = {path.name: replayed(campaign, path) for path in sorted(kept.glob("*.json"))}
    if mode == "quick":
        begun = time.monotonic()
        campaign.read_cases([(name, seed) for name in sorted(campaign.readers) for seed in range(READ_EACH)])
        for seed in range(COMMANDS):
            campaign.run_command(seed)
        times["slice"] = round(time.monotonic() - begun, 2)
    report |= {"slice": [one.record() for one in campaign.found], "counts": campaign.counts, "seconds": times}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
