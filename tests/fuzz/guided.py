"""Cases for the readers, guided by coverage: atheris keeps a case that reaches new lines of ours, and changes it again.

    PYTHONPATH=src:tests python -m fuzz.guided .fuzz-guided --minutes 30 --found tests/fuzz/found

Half of the changes respect the structure of a file, as in `fuzz.mutations`; the others are atheris's own. The first
byte of a case is the number of its reader. What is found is minimised and written as by `fuzz.campaign`. Needs atheris
(`make fuzz-guided` installs it).
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

STUCK_SECONDS = 30
"""Seconds of one case after which atheris ends the search and keeps the case as `timeout-...`."""


def search(folder: Path, minutes: float, seed: int) -> None:
    """Run cases until the time is over, and end the process: libFuzzer does not return.

    New faults are written to folder/faults.jsonl, the number of cases to folder/count.
    """
    import atheris

    with atheris.instrument_imports(include=["manyheads"]):
        from fuzz.campaign import Found, load_everything, readers_in
        from fuzz.mutations import mutate
        from fuzz.readers import fault_of

        load_everything()
    readers = list(readers_in(folder).values())
    corpus, work = folder / "corpus", folder / "work"
    corpus.mkdir()
    work.mkdir()
    for number, reader in enumerate(readers):
        (corpus / str(number)).write_bytes(bytes([number]) + reader.seed)
    most_bytes = 2 * max(len(reader.seed) for reader in readers) + 1
    known: set[tuple[str, str]] = set()
    count = 0

    def offer(data: bytes) -> None:
        nonlocal count
        count += 1
        if count % 100 == 0:
            (folder / "count").write_text(str(count), encoding="ascii")
        if not data:
            return
        reader = readers[data[0] % len(readers)]
        fault = fault_of(reader, data[1:], work)
        if fault and (fault, reader.name) not in known:
            known.add((fault, reader.name))
            print(f"found: {fault}: {reader.name}", file=sys.stderr, flush=True)
            with (folder / "faults.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(Found(fault, seed, reader.name, data[1:]).record()) + "\n")

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        if not data:
            return bytes([seed % len(readers)])
        random = Random(seed)
        kind = readers[data[0] % len(readers)].kind
        if random.random() < 0.5:
            return data[:1] + mutate(kind, data[1:], random)[: max_size - 1]
        return data[:1] + atheris.Mutate(data[1:], max_size - 1)

    limits = [f"-max_len={most_bytes}", f"-timeout={STUCK_SECONDS}", f"-max_total_time={round(60 * minutes)}"]
    options = [*limits, "-rss_limit_mb=0", f"-seed={seed}", f"-artifact_prefix={folder}/", str(corpus)]
    atheris.Setup([sys.argv[0], *options], offer, custom_mutator=change)
    atheris.Fuzz()


def main() -> int:
    """See the module. Returns: 1 if a fault was found, or the search ended early."""
    parser = argparse.ArgumentParser(description="Fuzz the readers of files, guided by coverage.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--found", type=Path, default=None, help="a folder for minimised cases")
    parser.add_argument("--search", action="store_true", help="of this program alone: the process that searches")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.search:
        search(folder, given.minutes, given.seed)
    from fuzz.campaign import Campaign, Found, load_everything, write_found

    shutil.rmtree(folder, ignore_errors=True)
    load_everything()
    campaign = Campaign.start(folder)
    shutil.rmtree(folder / "copies")  # the search makes its own
    command = [sys.executable, "-m", "fuzz.guided", str(folder), "--search", "--minutes", str(given.minutes)]
    code = subprocess.run([*command, "--seed", str(given.seed)], check=False).returncode
    faults = folder / "faults.jsonl"
    lines = faults.read_text(encoding="utf-8").splitlines() if faults.is_file() else []
    campaign.found = [Found.from_record(json.loads(line)) for line in lines]
    names = [] if given.found is None else write_found(campaign, given.found)
    stuck = sorted(path.name for pattern in ("timeout-*", "crash-*") for path in folder.glob(pattern))
    told = {"seed": given.seed, "cases": int((folder / "count").read_text("ascii")), "exit_code": code}
    shown = [{"fault": one.fault, "case": one.reader} for one in campaign.found]
    print(json.dumps({**told, "faults": shown, "stuck": stuck, "written": names}, indent=1))
    return int(bool(shown or stuck or code))


if __name__ == "__main__":
    sys.exit(main())
