"""`manyheads doctor`: checks this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.command_line.command import command
from manyheads.cli.lines.record import lines_of
from manyheads.cli.machine import set_up_machine
from manyheads.cli.machine_report import examine
from manyheads.cli.printing import say_or_json
from manyheads.config.options import CommandPage, Shared


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `manyheads doctor`."""

    json: bool = Shared.json("Print JSON.")


PAGE = CommandPage(
    DoctorOptions,
    "Check this machine: versions, devices, cores, speed, optional packages, free disk space. It changes nothing.",
    ("manyheads doctor", "manyheads doctor --json"),
)


@command(PAGE, "doctor")
def run(options: DoctorOptions) -> int:
    """Returns: 0, or 2 if something must be repaired before manyheads can work here."""
    kept = set_up_machine()
    record = examine(Path.cwd())
    record["machine"]["big_blocks_kept"] = kept
    lines = lines_of({name: value for name, value in record.items() if name != "problems"})
    verdict = [f"problem: {problem}" for problem in record["problems"]] or ["ready"]
    say_or_json(record, "\n".join([*lines, "", *verdict]), as_json=options.json)
    return 2 if record["problems"] else 0
