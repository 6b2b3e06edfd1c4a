"""deploy/ray_serve.py with two replicas, of which one is killed under load. Needs ray[serve] and manyheads.

    MANYHEADS_MODELS=en-de python tests/clients/check_ray.py --seconds 30

Clients send without a pause. After a third of the time one replica is killed. What the other replica accepted must all
be answered; what the killed one was computing is lost, and at most so many requests are.
"""

import argparse
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

PORT = 18_800
CLIENTS = 8


def ask(path: str, body: object = None) -> tuple[int, float, bytes]:
    """Return status (0: the connection broke), seconds and body."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, time.monotonic() - began, answer.read()
    except OSError:
        return 0, time.monotonic() - began, b""
    finally:
        connection.close()


def texts_of(content: bytes) -> list[str]:
    """Return the translations; the scores are equal up to rounding only, in different batches."""
    return [one["text"] for one in json.loads(content)["translations"]]


def main() -> int:
    """Start Ray with the application, load it, kill a replica, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    os.environ["MANYHEADS_REPLICAS"] = "2"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy"))

    import ray
    from ray import serve

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    from ray_serve import app

    serve.run(app, name="manyheads", route_prefix="/")
    assert ask("/readyz")[0] == 200
    body = {"text": "I am hungry. Where is the station?", "num_beams": 2}
    status, _, content = ask("/v1/translate", body)
    assert status == 200, content
    expected = texts_of(content)
    found: list[tuple[float, int, float]] = []
    health: list[float] = []
    wrong: list[bytes] = []
    end = time.monotonic() + options.seconds

    def client() -> None:
        while time.monotonic() < end:
            status, seconds, content = ask("/v1/translate", body)
            found.append((time.monotonic(), status, seconds))
            if status == 200 and texts_of(content) != expected:
                wrong.append(content)
            if status != 200:
                time.sleep(0.2)

    def watch() -> None:
        while time.monotonic() < end:
            status, seconds, _ = ask("/healthz")
            health.append(seconds if status == 200 else float("inf"))
            time.sleep(0.1)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)] + [threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    time.sleep(options.seconds / 3)
    pids = sorted(replica_pids())
    assert len(pids) == 2, pids
    killed = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    after = Counter(status for at, status, _ in found if at > killed + 10)
    record = {
        "statuses": dict(Counter(status for _, status, _ in found)),
        "after_10_s": dict(after),
        "health_median": sorted(health)[len(health) // 2], "health_max": max(health),
        "replicas_at_the_end": len(replica_pids()), "wrong": len(wrong),
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    serve.shutdown()
    ray.shutdown()
    lost = sum(status != 200 for _, status, _ in found)
    return int(bool(wrong) or lost > CLIENTS or set(after) != {200})


def replica_pids() -> list[int]:
    """Return the processes of the replicas, by the title that Ray gives them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::ServeReplica:manyheads"):
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
