"""R8 and R9 where the machine has no more to give: little memory (`ulimit -v`) and a full disk."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer import config as presets
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a running process, reads /proc"),
]

WORDS = "I am hungry and the cat sees the dog "
SPARE_BYTES = 96 << 20
ANSWERS = {200, 429, 503}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.train([WORDS] * 9, TokenizerSettings(vocab_size=300))
    config = replace(
        presets.PRESETS["debug"], source_vocab_size=tokenizer.vocab_size, target_vocab_size=tokenizer.vocab_size
    )
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("limits") / "en-de"
    save_pretrained(build_model(config), path, tokenizer=tokenizer)
    return path


@pytest.fixture
def serve(folder: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """Start a server on a port. Args: log: where its standard error goes."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str, log: str | None = None, port: int = 0) -> tuple[subprocess.Popen[bytes], int]:
        file = Path(log or tmp_path / "log")
        command = [sys.executable, "-m", "manyheads", "serve", str(folder), "--port", str(port), "--device", "cpu"]
        with file.open("wb") as opened:
            process = subprocess.Popen([*command, *options], stderr=opened, env=os.environ | {"OMP_NUM_THREADS": "1"})
        started.append(process)
        deadline = time.monotonic() + 120
        while not port:
            assert process.poll() is None, file.read_text()
            assert time.monotonic() < deadline
            said = file.read_text()
            if "127.0.0.1:" in said and said.endswith("\n"):
                port = int(said.split("127.0.0.1:")[1].split()[0])
            time.sleep(0.05)
        while status(port, "/readyz") != 200:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process, port

    yield start
    for process in started:
        process.kill()
        process.wait()


def status(port: int, path: str, body: Any = None) -> int:
    """Return the status of an answer; 0: there was none."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_little_memory(serve: Any, figure: Callable[..., None]) -> None:
    """Requests that do not fit get 503; the server lives, and small requests are answered during and after that."""
    most = ("--max-batch-tokens", "1000000", "--max-waiting-tokens", "400000", "--max-requests", "64")
    process, port = serve(*most, "--quiet")
    small = {"text": "I am hungry", "num_beams": 1, "max_new_tokens": 5}
    large = {"text": [WORDS * 10] * 60, "num_beams": 16, "min_new_tokens": 100, "max_new_tokens": 100}
    large["split_sentences"] = False
    assert status(port, "/v1/translate", small) == 200
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_BYTES
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    found: Counter[int] = Counter()

    def client(body: Any, times: int) -> None:
        for _ in range(times):
            found[status(port, "/v1/translate", body)] += 1

    # Of different options, so that three of them are computed at the same time.
    bodies = [{**large, "length_penalty": 1 + number / 10} if number < 4 else small for number in range(12)]
    clients = [threading.Thread(target=client, args=(body, 4)) for body in bodies]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    figure("R8", "requests to a server with little memory", **{f"answered_{code}": found[code] for code in found})
    assert set(found) <= ANSWERS, found
    assert found[503], found
    assert process.poll() is None
    assert status(port, "/healthz") == 200
    assert status(port, "/v1/translate", small) == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk(serve: Any, figure: Callable[..., None]) -> None:
    """A log that cannot be written costs no request and not the server."""
    process, port = serve("--log-format", "json", log="/dev/full", port=free_port())
    bodies: list[Any] = [{"text": "I am hungry"}, {"text": 3}, {"text": "a", "num_beams": 10**9}]
    found = Counter(status(port, "/v1/translate", body) for body in bodies * 20)
    figure(
        "R8", "requests to a server whose log is on a full disk", **{f"answered_{code}": found[code] for code in found}
    )
    assert found == {200: 20, 422: 40}
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
