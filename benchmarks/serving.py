"""The server under load: the figures of docs/serving.md.

    python benchmarks/serving.py load hostile restarts soak --output serving.json
    python benchmarks/serving.py speed single ready --model runs/demo --source sample/sentences.en --output serving.json

Each part is written to the file when it is done, and not measured again; `--again` does. `restarts` also goes on from
the last restart. `--short` does everything in a minute or two, to see that it works. Needs Linux (/proc).

- `load`: 200 clients for 60 s against a server that answers about 10 requests a second (--debug-delay).
- `hostile`: 500 slow or half-open connections beside an honest client; tricks with paths, framings and chunks.
- `restarts`: the server is stopped 100 times under load; no request that was sent to it may be lost.
- `soak`: 30 minutes of mixed requests: memory, threads and files.
- `speed`: sentences per second of `Translator` (32 a batch), of the server with 32 clients, and of one request at a
  time, in turn A B A B; greedy and 4 beams; with ctranslate2 too if it is installed.
- `single`: one sentence at a time, the server against `Translator`, in turn. `ready`: seconds until it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serving_client import Connection, Process, ask
from serving_hostile import hostile
from serving_load import FULL, SHORT, Sizes, load, restarts, soak

OURS = Path(__file__).resolve().parents[1] / "tests/clients"


@contextlib.contextmanager
def tiny_models() -> Iterator[list[Path]]:
    """An untrained translator and a language model."""
    sys.path.insert(0, str(OURS))
    from serve_tiny_models import save_novel, save_translator

    with tempfile.TemporaryDirectory() as name:
        yield [save_translator(Path(name) / "en-de"), save_novel(Path(name) / "novel")]


class Translators:
    """`Translator` in a process of its own, which waits for work in a read."""

    def __init__(self, model: str) -> None:
        command = [sys.executable, __file__, "--child", model]
        self._running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, texts: Sequence[str], rows: int, num_beams: int) -> list[float]:
        """Return the seconds of each batch."""
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        self._running.stdin.write(json.dumps([list(texts), rows, num_beams]) + "\n")
        self._running.stdin.flush()
        found: list[float] = json.loads(self._running.stdout.readline())
        return found

    def close(self) -> None:
        """End the process."""
        self._running.terminate()
        self._running.wait()


def child(model: str) -> None:
    """Translate what is asked for on standard input."""
    import manyheads

    translator = manyheads.Translator.from_pretrained(model, "cpu")
    for line in sys.stdin:
        texts, rows, num_beams = json.loads(line)
        seconds = []
        for begin in range(0, len(texts), rows):
            began = time.perf_counter()
            translator.translate(texts[begin : begin + rows], num_beams=num_beams, max_tokens=1 << 14)
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), flush=True)


async def served(port: int, texts: Sequence[str], clients: int, num_beams: int) -> list[float]:
    """Return the seconds of each request. Every client sends one sentence at a time."""
    waiting = list(texts)
    seconds: list[float] = []

    async def client() -> None:
        connection = Connection(port)
        while waiting:
            body = {"text": waiting.pop(), "num_beams": num_beams, "split_sentences": False}
            found = await connection.ask("/v1/translate", body)
            if found.status != 200:
                raise RuntimeError(f"the server answered {found.status}: {found.body[:200]!r}")
            seconds.append(found.seconds)
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds


async def speed(model: str, texts: list[str], work: Path, sizes: Sizes) -> dict[str, Any]:
    """Sentences per second, in turn."""
    texts = (texts * (sizes.sentences // len(texts) + 1))[: sizes.sentences]
    found: dict[str, Any] = {}
    others = importlib.util.find_spec("ctranslate2") is not None
    with contextlib.ExitStack() as stack:
        servers = {"server": stack.enter_context(Process.start([model], work / "speed.log", "--quiet"))}
        if others:
            options = ("--quiet", "--engine", "ctranslate2")
            servers["ctranslate2"] = stack.enter_context(Process.start([model], work / "speed2.log", *options))
        translators = Translators(model)
        stack.callback(translators.close)
        for num_beams in (1, 4):
            rates: dict[str, list[float]] = {}
            for turn in range(sizes.rounds + 1):  # the first is a warm-up
                part = texts if turn else texts[:64]
                now = {"translate": len(part) / sum(translators.seconds(part, 32, num_beams))}
                for name, server in servers.items():
                    began = time.monotonic()
                    await served(server.port, part, 32, num_beams)
                    now[name] = len(part) / (time.monotonic() - began)
                few = part[: max(16, len(part) // 8)]
                now["one_at_a_time"] = len(few) / sum(await served(servers["server"].port, few, 1, num_beams))
                for name, rate in now.items() if turn else ():
                    rates.setdefault(name, []).append(rate)
            rounds = {name: [round(rate, 2) for rate in values] for name, values in rates.items()}
            ratios = {
                name: statistics.median(a / b for a, b in zip(rates["server"], values, strict=True))
                for name, values in rates.items() if name != "server"
            }  # fmt: skip
            found[f"beams_{num_beams}"] = {"per_second": rounds, "server_to": ratios}
    return found


async def single(model: str, texts: list[str], work: Path, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of a sentence, in turn."""
    part = texts[: max(8, sizes.sentences // 32)]
    found: dict[str, Any] = {}
    with Process.start([model], work / "single.log", "--quiet") as server:
        translators = Translators(model)
        for num_beams in (1, 4):
            times: dict[str, list[float]] = {"translator": [], "server": []}
            for turn in range(sizes.rounds + 1):
                now = {
                    "translator": translators.seconds(part, 1, num_beams),
                    "server": await served(server.port, part, 1, num_beams),
                }
                for name, seconds in now.items() if turn else ():
                    times[name].append(1000 * statistics.median(seconds))
            added = statistics.median(b - a for a, b in zip(*times.values(), strict=True))
            found[f"beams_{num_beams}"] = {"milliseconds": times, "added": added}
        translators.close()
    return found


async def ready(model: str, work: Path, sizes: Sizes) -> dict[str, Any]:
    """Seconds from the start of the process until it serves, and until a process has just loaded the model."""
    code = "import sys, manyheads; manyheads.Translator.from_pretrained(sys.argv[1], 'cpu')"
    times: dict[str, list[float]] = {"loaded": [], "ready": []}
    for turn in range(sizes.rounds + 1):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code, model], check=True)
        loaded = time.monotonic() - began
        with Process.start([model], work / "ready.log", "--quiet") as server:
            assert (await ask(server.port, "/readyz")).status == 200
            if turn:
                times["loaded"].append(loaded)
                times["ready"].append(server.ready_seconds)
    return {**times, "added": statistics.median(b - a for a, b in zip(times["loaded"], times["ready"], strict=True))}


async def measure(part: str, options: argparse.Namespace, models: list[Path], work: Path) -> dict[str, Any]:
    """Measure one part."""
    sizes = SHORT if options.short else FULL
    if part in ("speed", "single"):
        texts = Path(options.source).read_text("utf-8").splitlines()
        return await (speed if part == "speed" else single)(options.model, texts, work, sizes)
    if part == "ready":
        return await ready(options.model, work, sizes)
    if part == "hostile":
        return await hostile(models, work, sizes.slow)
    return await (load if part == "load" else soak)(models, work, sizes)


PARTS = ("load", "hostile", "restarts", "soak", "speed", "single", "ready")


def main() -> int:
    """Measure what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--model", help="a translation model, for speed, single and ready")
    parser.add_argument("--source", help="its sentences, one a line")
    parser.add_argument("--output", type=Path, default=Path("serving.json"))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    if set(options.parts) & {"speed", "single", "ready"} and not (options.model and options.source):
        parser.error("speed, single and ready need --model and --source")
    record = json.loads(options.output.read_text()) if options.output.exists() else {}
    record |= {"machine": platform.processor() or platform.machine(), "short": options.short}
    with tiny_models() as models, tempfile.TemporaryDirectory() as name:
        for part in options.parts:
            most = (SHORT if options.short else FULL).restarts
            known = {} if options.again else record.get(part, {})
            while not known or (part == "restarts" and known["restarts"] < most):
                if part == "restarts":
                    known = asyncio.run(restarts(models, Path(name), SHORT if options.short else FULL, known))
                else:
                    known = asyncio.run(measure(part, options, models, Path(name)))
                record[part] = known
                options.output.write_text(json.dumps(record, indent=1) + "\n")
            print(part, json.dumps(known, indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
