"""A run with each logger's own package, resumed once; what was stored is read back. See `make check-loggers`.

Nothing is sent: Weights & Biases is offline (WANDB_MODE), the others keep files in a temporary folder.
"""

import json
import math
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

NAMES = ["csv", "tensorboard", "wandb", "mlflow", "trackio"]
SMALL = {"log_every": 2, "save_every": 2, "plots": False}
BLOCK_BYTES = 32 * 1024
Stored = set[tuple[int, str, float]]


def no_network(address: Any, *rest: Any, **others: Any) -> Any:
    """In place of the function that finds an address. Raises: OSError: it is not of this machine."""
    if address not in ("localhost", "127.0.0.1", "::1", None, ""):
        raise OSError(f"there is no network in this check ({address})")
    return _find(address, *rest, **others)


_find, socket.getaddrinfo = socket.getaddrinfo, no_network


def of_metrics(run: Path) -> Stored:
    """The numbers of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        (line["step"], name, float(value))
        for line in lines
        for name, value in line.items()
        if isinstance(value, int | float) and name != "step" and math.isfinite(value)
    }


def of_csv(run: Path) -> Stored:
    import csv

    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    as_number = {"True": 1.0, "False": 0.0}
    return {
        (int(row["step"]), name, as_number.get(value) if value in as_number else float(value))
        for row in rows
        for name, value in row.items()
        if name != "step" and not name.endswith("_signature")
    }


def of_tensorboard(run: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {(one.step, tag, one.value) for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}


def records_of(file: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: 7 bytes, then a log of LevelDB, blocks of parts (CRC, length, kind)."""
    content, place, begun = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        begun += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield begun
            begun = b""


def of_wandb(run: Path) -> Stored:
    from wandb.proto import wandb_internal_pb2

    found: Stored = set()
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1, files  # one run, in two parts
    for file in files:
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            found |= {(items["step"], name, float(value)) for name, value in items.items() if name[0] != "_"}
    return {one for one in found if one[1] != "step"}


def of_mlflow(run: Path) -> Stored:
    import mlflow

    client = mlflow.MlflowClient()
    known = client.get_run(json.loads((run / "loggers.json").read_text("utf-8"))["mlflow"])
    assert known.info.status == "FINISHED", known.info.status
    assert known.data.params["training.log_every"] == "2"
    names = known.data.metrics
    return {(one.step, name, one.value) for name in names for one in client.get_metric_history(known.info.run_id, name)}


def of_trackio(run: Path) -> Stored:
    from trackio.sqlite_storage import SQLiteStorage

    name = json.loads((run / "loggers.json").read_text("utf-8"))["trackio"]
    rows = SQLiteStorage.get_logs("manyheads", name)
    return {
        (int(row["step"]), key, float(value))
        for row in rows
        for key, value in row.items()
        if key not in ("step", "timestamp") and isinstance(value, int | float)
    }


def same(stored: Stored, wanted: Stored) -> str:
    """Compare to seven digits, which is what TensorBoard keeps. Returns: what is missing or differs; else empty."""

    def rounded(numbers: Stored) -> set[tuple[int, str, str]]:
        return {(step, name, f"{value:.6g}") for step, name, value in numbers}

    missing, more = rounded(wanted) - rounded(stored), rounded(stored) - rounded(wanted)
    more = {one for one in more if one[1] != "of_the_first"}
    missing = {one for one in missing if one[1] != "of_the_first"}
    return f"missing {sorted(missing)[:3]}, more {sorted(more)[:3]}" if missing or more else ""


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ |= {"TRACKIO_DIR": f"{place}/trackio", "MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db"}
        import manyheads

        run = folder / "run"
        for steps in (4, 8):
            training = {**SMALL, "max_steps": steps}
            manyheads.train("debug", run_dir=run, training=training, validation={"every_steps": 4}, callbacks=NAMES)
        wanted, failed = of_metrics(run), 0
        for name in NAMES:
            fault = same(globals()[f"of_{name}"](run), wanted)
            failed += bool(fault)
            shown = "" if name == "csv" else f" {version('mlflow-skinny' if name == 'mlflow' else name)}"
            print(f"{name}{shown}: {fault or f'{len(wanted)} numbers of 8 steps, in one run over a resume'}")
        return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
