"""`make check-long`: the long tests in parts of at most half an hour, which can be interrupted and go on.

`python tests/long_parts.py FILE [PART ...]` runs the parts that have not passed at this commit, and adds their figures
to FILE (reliability.json). Without names, all of them; `--list` shows them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from figures import commit, machine, merged

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 1800
FUZZ = "fuzz"


@dataclass(frozen=True)
class Part:
    """selection: arguments of pytest. minutes: what it takes on two cores, about. what: for people."""

    what: str
    selection: tuple[str, ...]
    minutes: int


def _files(*names: str, only: str = "") -> tuple[str, ...]:
    return (*(f"tests/{name}.py" for name in names), *(("-k", only) if only else ()))


PARTS = {
    "R1-kills": Part("500 SIGKILLs over three models", _files("integration/test_kill_resume"), 12),
    "R1-torchrun": Part("50 SIGKILLs under torchrun",
                        _files("integration/test_torchrun", only="five_kills or killed_rank"), 20),
    "R2": Part("1,000 saves under a reader, every prefix of a run's operations",
               _files("integration/test_durable_saves", "integration/test_power_cuts"), 8),
    "R3": Part("an error at every operation of saves, runs and preparations", _files("integration/test_io_errors"), 15),
    "R4": Part("10,000 mutations", _files("integration/test_corruption"), 20),
    "R5": Part("hostile artefacts, offered to everyone", _files("integration/test_hostile"), 10),
    "R6-words": Part("words without end", _files("fuzz/test_fuzz"), 8),
    "R6": Part("a campaign of random cases, 1,000 of them real processes", (FUZZ,), 30),
    "R7-translate": Part("10,000 random files", _files("integration/test_random_files"), 20),
    "R7-table": Part("the whole table of text oddities",
                     _files("integration/test_text_oddities", "integration/test_text_oddities_lm"), 20),
    "R8-R9": Part("a server with little memory, and with a full disk", _files("integration/test_serving_limits"), 1),
    "R10": Part("ranks against one rank, 200 steps", _files("integration/test_ranks"), 15),
    "R11-ddp": Part("100 signals, DDP, and lost ranks",
                    _files("integration/test_torchrun", only="(signal or lost) and not five_kills and not fsdp"), 25),
    "R11-fsdp": Part("100 signals, FSDP",
                     _files("integration/test_torchrun", only="(signal or lost) and fsdp"), 25),
    "R11-network": Part("a lost network between two network namespaces", _files("integration/test_lost_network"), 2),
    "R12": Part("216 injections", _files("integration/test_nonfinite"), 6),
    "soak-training": Part("10,000 steps", _files("integration/test_soak", only="steps or slopes"), 10),
    "soak-translation": Part("25 minutes of translation", _files("integration/test_soak", only="translation"), 27),
    "growth-prepare": Part("prepare: a million pairs, and kills",
                           _files("integration/test_growth", only="preparation"), 10),
    "growth-shards": Part("a corpus of many shards, 1 GB or MANYHEADS_CORPUS_BYTES, killed twice",
                          _files("integration/test_large_corpus"), 20),
    "growth-records": Part("scores, checkpoints and records that are large",
                           _files("integration/test_growth", only="not preparation"), 10),
    "recipes": Part("every recipe on a small part of its data",
                    _files("integration/test_recipes", "integration/test_ablation", "integration/test_copy_task"), 25),
    "triton": Part("the Triton kernels with the version that torch 2.11 brings",
                   _files("unit/nn/kernels/test_triton_older"), 3),
    "mutants-files": Part("mechanisms of files and checkpoints, removed one by one",
                          _files("mutants/test_mutants", only="files- or checkpoint-"), 28),
    "mutants-models": Part("mechanisms of models and numbers, removed one by one",
                           _files("mutants/test_mutants", only="not files- and not checkpoint-"), 28),
}  # fmt: skip
"""Name -> part."""


def rest(parts: dict[str, Part]) -> Part:
    """Every slow test that is in no other part."""
    files = sorted({word for part in parts.values() for word in part.selection if word.endswith(".py")})
    return Part("all other slow tests", ("tests", *(f"--ignore={name}" for name in files)), 20)


def command_of(part: Part, file: Path, jobs: str) -> list[str]:
    """The command line of a part."""
    if part.selection == (FUZZ,):
        folder = [str(ROOT / ".fuzz"), "--found", str(ROOT / "tests" / "fuzz" / "found")]
        return [
            sys.executable, "-m", "fuzz.campaign", *folder, "--minutes", "28", "--processes", "1000",
            "--figures", str(file),
        ]  # fmt: skip
    return [sys.executable, "-m", "pytest", "-n", jobs, "-m", "slow", *part.selection, "--figures", str(file)]


def main() -> int:
    """See the module. Returns: 1 if a part failed."""
    parser = argparse.ArgumentParser(description="Run the long checks in parts.")
    parser.add_argument("file", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", default="2")
    given = parser.parse_args()
    file = given.file.resolve()
    parts = {**PARTS, "rest": rest(PARTS)}
    unknown = [name for name in given.parts if name not in parts]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; choose among {', '.join(parts)}")
    done = merged(file).get("parts", {})
    failed = []
    for name in given.parts or parts:
        part, here = parts[name], commit()
        told = done.get(name, {})
        passed = told.get("commit") == here and told.get("outcome") == "passed"
        print(f"{name:<17}{part.minutes:>3} min  {'passed' if passed else 'to do ':<7} {part.what}", flush=True)
        if given.list or passed:
            continue
        command, began = command_of(part, file, given.jobs), time.monotonic()
        try:
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
            code = process.wait(MOST_SECONDS)
            outcome = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            end(process, signal.SIGKILL)
            outcome = "not finished in half an hour"
        except KeyboardInterrupt:  # its group gets no Ctrl-C of the terminal
            end(process, signal.SIGINT)
            raise
        shown = " ".join(["python", *command[1:]]).replace(f"{ROOT}/", "")
        record = {"commit": here, "outcome": outcome, "command": shown, "machine": machine()}
        record["seconds"] = round(time.monotonic() - began)
        content = merged(file)
        content.setdefault("parts", {})[name] = record
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        failed += [name] * (outcome != "passed")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a part and its children, and wait for it."""
    os.killpg(process.pid, number)
    process.wait()


def environment() -> dict[str, str]:
    """For the campaign, which is no test: where its modules are, and one thread."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
