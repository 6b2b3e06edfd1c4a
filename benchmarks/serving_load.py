"""Many honest clients at once: the parts `load`, `restarts` and `soak` of `serving.py`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_client import Answer, Connection, Process, ask, percentile, slope

__all__ = ["FULL", "SHORT", "Sizes", "load", "restarts", "soak"]

STEPS = 12
SENTENCE = "I am hungry. "


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Seconds, but for counts."""

    load: float = 60
    clients: int = 200
    slow: int = 500
    restarts: int = 100
    soak: float = 1800
    rounds: int = 4
    sentences: int = 1024


FULL = Sizes()
SHORT = Sizes(load=8, clients=60, slow=80, restarts=3, soak=20, rounds=1, sentences=64)


async def load(models: list[Path], work: Path, sizes: Sizes) -> dict[str, Any]:
    """Many clients against a slow server."""
    queue, rows, delay = 64, 6, 0.05
    row = STEPS + 10  # cost of a sentence in tokens: its own and those of its translation
    options = ["--debug-delay", str(delay), "--max-requests", str(queue), "--max-batch-tokens", str(rows * row)]
    body = {"text": SENTENCE, "num_beams": 1, "min_new_tokens": STEPS, "max_new_tokens": STEPS}
    with Process.start(models[:1], work / "load.log", *options, "--quiet", threads=1) as server:
        idle = [(await ask(server.port, "/v1/translate", body)).seconds for _ in range(5)]
        answers: list[Answer] = []
        health: list[float] = []
        memory: list[float] = []
        end = time.monotonic() + sizes.load

        async def client(number: int) -> None:
            draw, connection = random.Random(number), Connection(server.port)  # noqa: S311
            while time.monotonic() < end:
                try:
                    answers.append(found := await connection.ask("/v1/translate", body))
                except OSError:
                    answers.append(found := Answer(0, {}, b"", 0))
                if found.status != 200:
                    await asyncio.sleep(float(found.headers.get("retry-after", 1)) * draw.uniform(0.5, 1))
            connection.close()

        async def watch() -> None:
            connection = Connection(server.port)
            while time.monotonic() < end:
                found = await connection.ask("/healthz")
                health.append(found.seconds if found.status == 200 else float("inf"))
                memory.append(server.usage()["mib"])
                await asyncio.sleep(0.1)

        began = time.monotonic()
        await asyncio.gather(watch(), *(client(number) for number in range(sizes.clients)))
        took = time.monotonic() - began
        await asyncio.sleep(5)
        after = [(await ask(server.port, "/v1/translate", body)).seconds for _ in range(5)]
        accepted = [one.seconds for one in answers if one.status == 200]
        rate = len(accepted) / took
        code = server.stop()
    tenth = memory[len(memory) // 6]
    return {
        "statuses": dict(Counter(str(one.status) for one in answers)), "answers_per_second": rate,
        "p50": percentile(accepted, 0.5), "p99": percentile(accepted, 0.99), "bound_of_p99": 1.2 * queue / rate,
        "health_p50": percentile(health, 0.5), "health_p99": percentile(health, 0.99), "health_max": max(health),
        "mib_after_a_sixth": tenth, "mib_end": memory[-1], "memory_growth": memory[-1] / tenth - 1,
        "idle_before": statistics.median(idle), "idle_after_5_s": statistics.median(after), "exit_code": code,
    }  # fmt: skip


async def restarts(models: list[Path], work: Path, sizes: Sizes, done: dict[str, Any]) -> dict[str, Any]:
    """One more restart: clients send without a pause, the server is told to stop at a random moment."""
    draw = random.Random(done.get("restarts", 0))  # noqa: S311
    body = {"text": SENTENCE * 3, "num_beams": 2}
    counts = Counter({name: done.get(name, 0) for name in ("answered", "lost", "refused", "bad_exits", "restarts")})
    options = ["--debug-delay", "0.02", "--drain-delay", "0.5", "--quiet"]
    with Process.start(models[:1], work / "restarts.log", *options, threads=1) as server:

        async def client() -> None:
            connection = Connection(server.port)
            while True:
                try:
                    found = await connection.ask("/v1/translate", body)
                except OSError:  # refused: nothing was sent
                    counts["refused"] += 1
                    return
                counts["answered" if found.status == 200 else "lost"] += 1
                if found.headers.get("connection") == "close" or not found.status:
                    return  # a balancer sends the next one elsewhere

        clients = [asyncio.create_task(client()) for _ in range(16)]
        await asyncio.sleep(draw.uniform(0.1, 1.0))
        code = await asyncio.to_thread(server.stop)
        await asyncio.gather(*clients)
    counts["bad_exits"] += code != 0
    counts["restarts"] += 1
    return {**counts, "of": sizes.restarts}


async def soak(models: list[Path], work: Path, sizes: Sizes) -> dict[str, Any]:
    """Requests of all kinds, some wrong, some left in the middle."""
    text = {"text": SENTENCE * 4}
    kinds: list[tuple[str, Any]] = [
        ("/v1/translate", text), ("/v1/translate", {**text, "num_beams": 4, "alignments": True, "top_log_probs": 3}),
        ("/v1/translate", {**text, "stream": True}), ("/v1/generate", {"prompt": "It is", "max_new_tokens": 40}),
        ("/v1/generate", {"prompt": "It " * 300, "max_new_tokens": 5, "stream": True}),
        ("/v1/score", {"source": ["I am hungry."], "target": ["Ich habe Hunger."]}),
        ("/v1/score", {"text": ["It"] * 9}),
        ("/v1/attention", {"source": "I am hungry."}), ("/metrics", None), ("/v1/models", None), ("/", None),
        ("/v1/completions", {"prompt": "It", "max_tokens": 9, "echo": True, "logprobs": 2}), ("/v1/translate", b"{"),
        ("/translate", {"q": "I <b>am</b> hungry.", "source": "en", "target": "de", "format": "html"}),
        ("/v2/translate", {"text": ["I am hungry."], "target_lang": "DE"}), ("/v1/none", {}),
    ]  # fmt: skip
    statuses: Counter[str] = Counter()
    points: list[dict[str, float]] = []
    with Process.start(models, work / "soak.log", "--quiet", "--prefix-cache", "16", threads=1) as server:
        end = time.monotonic() + sizes.soak

        async def client(number: int) -> None:
            draw, connection = random.Random(number), Connection(server.port)  # noqa: S311
            while time.monotonic() < end:
                path, body = draw.choice(kinds)
                if draw.random() < 0.1:  # leave in the middle
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(draw.uniform(0, 0.05)):
                            await ask(server.port, path, body)
                    statuses["left"] += 1
                    continue
                statuses[str((await connection.ask(path, body)).status)] += 1
                await asyncio.sleep(draw.uniform(0, 0.02))
            connection.close()

        async def watch() -> None:
            while time.monotonic() < end:
                points.append({"seconds": time.monotonic() - end + sizes.soak, **server.usage()})
                await asyncio.sleep(min(10, sizes.soak / 20))

        await asyncio.gather(watch(), *(client(number) for number in range(8)))
        await asyncio.sleep(6)  # idle connections are closed
        last = server.usage()
        code = server.stop()
    warm = points[len(points) // 5 :]
    return {
        "statuses": dict(statuses), "mib_per_minute": slope([(one["seconds"] / 60, one["mib"]) for one in warm]),
        "mib_begin": points[0]["mib"], "mib_warm": warm[0]["mib"], "mib_end": last["mib"],
        "threads": [warm[0]["threads"], last["threads"]], "files": [points[0]["files"], last["files"]],
        "exit_code": code,
    }  # fmt: skip
