"""A small HTTP client and a process of `manyheads serve`, for the measurements of `serving.py`. Knows no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Connection", "Process", "ask", "percentile", "request_bytes", "slope"]

LIMIT = 120.0
"""Seconds after which an answer counts as lost."""


@dataclass(frozen=True)
class Answer:
    """An answer of the server. status: 0 if the connection ended before the answer did."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(path: str, body: Any = None, *, close: bool = False, method: str | None = None) -> bytes:
    """Return a request."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += ["Connection: close"] if close else []
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Connection:
    """A connection that is kept open between requests."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.requests = 0

    async def ask(self, path: str, body: Any = None) -> Answer:
        """Send a request and return the answer; status 0 if it is lost."""
        began = time.monotonic()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        try:
            async with asyncio.timeout(LIMIT):
                writer.write(request_bytes(path, body))
                await writer.drain()
                status, headers, content = await _read(reader)
        except (OSError, EOFError, TimeoutError):
            self.close()
            return Answer(0, {}, b"", time.monotonic() - began)
        self.requests += 1
        if headers.get("connection") == "close":
            self.close()
        return Answer(status, headers, content, time.monotonic() - began)

    def close(self) -> None:
        """Close it; the next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _read(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return int(head[0].split()[1]), headers, body


async def ask(port: int, path: str, body: Any = None) -> Answer:
    """Ask once, on a connection of its own."""
    connection = Connection(port)
    try:
        return await connection.ask(path, body)
    finally:
        connection.close()


@dataclass
class Process:
    """A running server. ready_seconds: from its start until it said that it serves."""

    running: subprocess.Popen[bytes]
    port: int
    ready_seconds: float
    log: Path
    codes: list[int] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def start(cls, models: Sequence[str | Path], log: Path, *options: str, threads: int = 0) -> Iterator[Process]:
        """Start a server on a free port, and kill it at the end if it still runs. Args: threads: 0: as it likes."""
        command = [sys.executable, "-m", "manyheads", "serve", *map(str, models), "--port", "0", "--device", "cpu"]
        command += ["--source-lang", "en", "--target-lang", "de", *options]
        environment = dict(os.environ)
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        began = time.monotonic()
        with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=environment) as running:
            try:
                port = _port(running, log)
                yield cls(running, port, time.monotonic() - began, log)
            finally:
                if running.poll() is None:
                    running.kill()

    def stop(self, seconds: float = 120) -> int:
        """Send SIGTERM. Returns: the exit code."""
        self.running.send_signal(signal.SIGTERM)
        return self.running.wait(seconds)

    def usage(self) -> dict[str, float]:
        """Return memory in MiB, threads and open files."""
        folder = Path(f"/proc/{self.running.pid}")
        status = (folder / "status").read_text()
        found = {name: int(re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[1]) for name in ("VmRSS", "Threads")}  # type: ignore[index]
        return {
            "mib": found["VmRSS"] / 1024,
            "threads": found["Threads"],
            "files": len(list((folder / "fd").iterdir())),
        }


def _port(running: subprocess.Popen[bytes], log: Path) -> int:
    while running.poll() is None:
        if found := re.search(rb"serving .* at http://127\.0\.0\.1:(\d+)", log.read_bytes()):
            return int(found[1])
        time.sleep(0.005)
    raise RuntimeError(f"the server ended with {running.returncode}: {log.read_text()[-2000:]}")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line that fits the points best."""
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
