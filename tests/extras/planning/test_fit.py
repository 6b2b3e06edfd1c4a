"""The largest step for a given memory."""

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from tiny_run import TINY, TINY_TEXT, changed

from manyheads.catalogue import PRESETS
from manyheads.cli.main import main
from manyheads.errors import ConfigError
from manyheads.extras.planning.planner import MIB, Footprint, Planner
from manyheads.training.run.device import free_memory_bytes


def footprint(total: int, length: int, rows: int) -> Footprint:
    return Footprint(
        program_bytes=0, state_bytes=0, step_bytes=total, length=length, rows=rows, precision="fp32", probes=(length,)
    )


def test_a_tiny_model_grows_although_the_size_of_the_process_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three footprints as they were measured: the program and the overhead vary by more than the steps grow."""
    measured = {
        16: Footprint(
            program_bytes=371_253_248, state_bytes=496_980, step_bytes=1_973_334, length=16, rows=2, precision="fp32",
            probes=(16,), overhead=3.0,
        ),
        32: Footprint(
            program_bytes=368_246_784, state_bytes=496_980, step_bytes=511_962, length=32, rows=2, precision="fp32",
            probes=(32,),
        ),
        64: Footprint(
            program_bytes=354_419_456, state_bytes=496_980, step_bytes=1_022_746, length=64, rows=2, precision="fp32",
            probes=(64,),
        ),
    }  # fmt: skip
    monkeypatch.setattr(Planner, "memory", lambda self, length, rows: measured[length])
    planned = Planner(PRESETS["xl-debug"]())
    size_setting = next(one for one in planned.synthetic_run.size_settings() if one.setting == "data.segment_len")
    monkeypatch.setattr(type(planned.synthetic_run), "size_settings", lambda self: [size_setting])
    few, more = (planned.largest(mib * MIB)[0] for mib in (1000, 20_000))
    # A step of 1,024 tokens takes 73 MiB besides the program.
    assert 1024 < few.value < more.value < 50_000
    for fit, mib in ((few, 1000), (more, 20_000)):
        assert 0.9 * mib * MIB < fit.predicted_bytes <= mib * MIB


def test_largest_values_meet_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of 100 MiB, 2 MiB a row and 1 KiB a pair of positions: what fits is known."""

    def text(length: int, rows: int) -> Footprint:
        return footprint(100 * MIB + rows * (length * MIB // 4 + 1024 * length**2), length, rows)

    def pairs(length: int, rows: int) -> Footprint:
        return footprint(100 * MIB + rows * length * (MIB // 8 + 64 * length), length, rows)

    monkeypatch.setattr(Planner, "memory", lambda self, length, rows: text(length, rows))
    lanes, length = Planner(TINY_TEXT).largest(200 * MIB)
    a_row = 2 * MIB + 1024 * 64
    assert (lanes.size_setting.setting, lanes.value) == ("data.lanes", 2 * (100 * MIB // a_row))
    rows = TINY_TEXT.data.lanes // 2

    def peak(length: int) -> int:
        return text(length, rows).total_bytes

    assert length.size_setting.setting == "data.segment_len"
    assert peak(length.value) <= 200 * MIB < peak(length.value + 1)
    assert length.predicted_bytes == pytest.approx(peak(length.value))
    with pytest.raises(ConfigError, match=r"Not even the smallest step fits: 102 MiB .* 50 MiB"):
        Planner(TINY_TEXT).largest(50 * MIB)
    monkeypatch.setattr(Planner, "memory", lambda self, length, rows: pairs(length, rows))
    [tokens] = Planner(TINY).largest(200 * MIB)
    assert (tokens.size_setting.setting, tokens.value) == ("data.max_tokens", 2 * (100 * MIB // (MIB // 8 + 64 * 16)))


FITTED_TWICE = """
import sys
from manyheads.cli.main import main
for mib in ("1500", "3000"):
    assert main(["train", "--config", sys.argv[1], "--fit", "--memory-mib", mib]) == 0
"""


def test_the_command_prints_what_to_type(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """More memory, more tokens; in a process of its own, since what a process holds already is counted."""
    settings = tmp_path / "run.yaml"
    from manyheads.config.files import to_yaml

    wide = changed(TINY, model={"d_model": 64, "d_ff": 256})
    settings.write_text(to_yaml(wide), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", FITTED_TWICE, str(settings)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    few, more = map(int, re.findall(r"--data.max_tokens (\d+)", done.stdout))
    assert 500 < few < more
    assert main(["train", "--config", str(settings), "--memory-mib", "5"]) == 2
    assert "--memory-mib 5 needs --fit." in capsys.readouterr().err


def test_free_memory() -> None:
    free = free_memory_bytes(torch.device("cpu"))
    assert free is not None
    assert 0 < free < 1 << 50
