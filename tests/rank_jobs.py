"""Jobs on several ranks, for tests: see `integration/rank_worker.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Ranks"]


class Ranks:
    """One process that forks the ranks of each job."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("integration") / "rank_worker.py"
        environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, world: int, job: str, **options: Any) -> list[Any]:
        """What each rank's job returned; a rank that raised makes this raise."""
        answers = self.try_run(world, job, **options)
        errors = [answer["error"] for answer in answers if isinstance(answer, dict) and "error" in answer]
        assert not errors, errors
        return answers

    def try_run(self, world: int, job: str, **options: Any) -> list[Any]:
        """The same, errors included."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
        self._process.stdin.write(json.dumps({"world": world, "job": job, **plain}) + "\n")
        self._process.stdin.flush()
        answers: list[Any] = json.loads(self._process.stdout.readline())
        return answers

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=300)
