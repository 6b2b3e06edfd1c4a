"""A side's process: builds what it is told to, warms up, then takes steps when it is asked. Started by `harness.Child`.

python side.py module:function '{"keyword": "value"}'
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from typing import Any

from harness import Step


def threads() -> int | None:
    """torch's, where torch was imported."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def peak_bytes() -> int:
    """The highest resident set so far, of this process or of one that it started and that has ended."""
    unit = 1 if sys.platform == "darwin" else 1024
    own, others = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return unit * max(own, others)


def about(step: Step) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "units": step.units,
        "precision": step.precision,
        "parameters": step.parameters,
        "flops": step.flops,
        "threads": threads(),
        "torch": None if torch is None else torch.__version__,
    }


def work(step: Step, seconds: float) -> dict[str, Any]:
    """Steps until the time is over, one at least."""
    steps, start = 0, time.perf_counter()
    while True:
        step.run()
        steps += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            break
    extra = {} if step.extra is None else dict(step.extra())
    return {"rate": steps * step.units / elapsed, "steps": steps, "peak_bytes": peak_bytes(), "extra": extra}


def main() -> None:
    # What libraries print must not come between the answers.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        channel.write(json.dumps(content) + "\n")
        channel.flush()

    module, _, function = sys.argv[1].partition(":")
    step: Step = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
    answer({"built": True})  # from here on the parent counts the time of the warm-up
    for _ in range(step.warm):
        step.run()
    if step.extra is not None:
        step.extra()  # of the warm-up
    answer(about(step))
    for line in sys.stdin:
        answer(work(step, json.loads(line)["seconds"]))


if __name__ == "__main__":
    main()
