"""Slow and hostile clients, for the part `hostile` of `serving.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from serving_client import Connection, Process, percentile, request_bytes

__all__ = ["hostile"]

HOST = b"Host: 127.0.0.1\r\n"
CLOSE = b"Connection: close\r\n\r\n"
POST = b"POST /v1/translate HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
BODY = {"text": "I am hungry."}
# Beginnings of requests, and what is then sent, a byte a second.
SLOW: list[tuple[bytes, bytes]] = [
    (b"", b""),
    (b"GET /healthz HTT", b""),
    (b"", request_bytes("/healthz") * 9),
    (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: ", b"a" * 200),
    (POST + b"Content-Length: 200\r\n\r\n", b" " * 200),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 40),
]
SMUGGLED = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
FRAMINGS = [
    POST + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(SMUGGLED)) + SMUGGLED,
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n" + SMUGGLED,
    POST + b"Content-Length: +2\r\n\r\n{}" + SMUGGLED,
    POST + b"Content-Length: 0x2\r\n\r\n{}" + SMUGGLED,
    POST + b"Content-Length: 2, 2\r\n\r\n{}",
    POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}" + SMUGGLED,
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    POST + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"a" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n" + SMUGGLED,
    b"GET /healthz\r\n\r\n",
    b"GET /healthz HTTP/1.1\n" + HOST + b"\n",
    b"GET /healthz HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: 1\r\n" * 200 + b"\r\n",
    b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /healthz HTTP/9.9\r\n" + HOST + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    POST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    POST + b"Content-Length: 20000\r\n\r\n" + b"[" * 10_000 + b"]" * 10_000,
    POST + b"Expect: 100-continue\r\nContent-Length: 9999999\r\n\r\n",
]


def paths() -> list[bytes]:
    """Return 200 and more ways to ask for files that are none of the server's."""
    up = [b"../", b"..%2f", b"%2e%2e/", b"%2e%2e%2f", b"..\\", b"..%5c", b"....//", b"..%252f", b"..%c0%af", b".%00./",
          b"/", b"%2f", b"~/", b"..;/", b"file:"]  # fmt: skip
    files = [b"etc/passwd", b"app.py", b"../pyproject.toml", b"app.js%00.py", b"serving/app.py", b"proc/self/environ",
             b"%65tc/passwd"]  # fmt: skip
    return [b"/static/" + many * count + name for many in up for count in (1, 6) for name in files]


async def _drip(port: int, start: bytes, rest: bytes) -> float:
    """Open a slow connection. Returns: seconds until the server closed it."""
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return time.monotonic() - began

    async def send() -> None:
        with contextlib.suppress(OSError):
            writer.write(start)
            for place in range(len(rest)):
                writer.write(rest[place : place + 1])
                await writer.drain()
                await asyncio.sleep(1)

    sending = asyncio.create_task(send())
    with contextlib.suppress(OSError):
        async with asyncio.timeout(60):
            while await reader.read(65536):
                pass
    sending.cancel()
    writer.close()
    return time.monotonic() - began


async def _raw(port: int, content: bytes) -> tuple[bytes, float]:
    """Send bytes. Returns: all that comes back, and the seconds until the answer has begun or the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    found, first = b"", 0.0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(20):
            writer.write(content)
            while part := await reader.read(65536):
                found, first = found + part, first or time.monotonic() - began
    writer.close()
    return found, first or time.monotonic() - began


async def _honest(port: int, until: asyncio.Event, seconds: list[float], statuses: Counter[str]) -> None:
    while not until.is_set():
        connection = Connection(port)  # each time anew: it must never be locked out
        with contextlib.suppress(OSError):
            found = await connection.ask("/v1/translate", BODY)
            seconds.append(found.seconds)
            statuses[str(found.status)] += 1
        connection.close()
        await asyncio.sleep(0.05)


async def _drips(port: int, count: int) -> list[float]:
    """Open slow connections at once. Returns: seconds until the server closed each."""
    return await asyncio.gather(*(_drip(port, *SLOW[number % len(SLOW)]) for number in range(count)))


async def _slow(port: int, count: int) -> dict[str, Any]:
    """Half-open connections and connections of a byte a second, beside honest requests.

    They are those of another process: opening them must not delay the honest client, only the server.
    """
    found: dict[str, Any] = {}
    for name, slow in (("alone", 0), ("beside", count)):
        seconds: list[float] = []
        statuses: Counter[str] = Counter()
        end = asyncio.Event()
        honest = asyncio.create_task(_honest(port, end, seconds, statuses))
        if slow:
            command = (sys.executable, __file__, str(port), str(slow))
            running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            closed = json.loads((await running.communicate())[0])
        else:
            await asyncio.sleep(10)
        end.set()
        await honest
        found[f"honest_{name}"] = {
            "p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99), "statuses": dict(statuses)
        }  # fmt: skip
        if slow:
            found |= {"slow": slow, "closed_after_at_most": max(closed)}
    return found


async def hostile(models: list[Path], work: Path, count: int) -> dict[str, Any]:
    """See `serving.py`. Args: count: of slow connections."""
    with Process.start(models[:1], work / "hostile.log", "--quiet", threads=1) as server:
        found = await _slow(server.port, count)
        failed, leaks, slowest = 0, 0, 0.0
        tricks = paths()
        for path in tricks:
            answer, seconds = await _raw(
                server.port, b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
            )
            failed += b"HTTP/1.1 5" in answer
            leaks += (
                b"root:" in answer or b"import annotations" in answer or b"[project]" in answer or b"PATH=" in answer
            )
            slowest = max(slowest, seconds)
        smuggled = 0
        for content in FRAMINGS:
            answer, seconds = await _raw(server.port, content)
            failed += b"HTTP/1.1 5" in answer
            smuggled += b"manyheads_num_requests" in answer
            slowest = max(slowest, seconds)
        draw, noise = random.Random(1), 0  # noqa: S311
        for _ in range(100):
            answer, _ = await _raw(server.port, draw.randbytes(draw.randrange(1, 400)) + b"\r\n\r\n")
            noise += b"HTTP/1.1 5" in answer
        connection, statuses = Connection(server.port), Counter[int]()
        for _ in range(20 * count):
            statuses[(await connection.ask("/healthz")).status] += 1
        kept = connection.requests
        connection.close()
        await asyncio.sleep(6)
        usage = server.usage()
        code = server.stop()
    return found | {
        "path_tricks": len(tricks), "framings": len(FRAMINGS), "leaks": leaks, "smuggled": smuggled,
        "answers_of_5xx": failed + noise, "slowest_answer": slowest, "keep_alive_requests": kept,
        "keep_alive_statuses": {str(status): number for status, number in statuses.items()}, "usage": usage,
        "exit_code": code,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_drips(int(sys.argv[1]), int(sys.argv[2])))))
