"""What a call of the Triton kernels launches, compiled for GPUs without one: shared memory, registers, spills, grids.

Nothing is refused when they are compiled; a card refuses too much shared memory, or too large a grid, only when it runs
them. The calls are those of a user, on CPU tensors that no kernel reads or writes.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyheads.nn import fused_relative_attention, fused_relative_attention_of_segments
from manyheads.nn.attention.local import local_attention
from manyheads.nn.attention.lsh import LSHSettings, lsh_attention, rotations
from manyheads.nn.attention.masks import Dense
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.loss import smoothed_loss
from manyheads.nn.kernels.lsh import hashed_order

triton = pytest.importorskip("triton", reason="the package triton is not installed; make check-triton installs it")

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 compiles nothing"),
]

SHARED_BYTES = {80: 166_912, 90: 232_448}
WIDEST = policy._WIDEST_TRITON_HEAD
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def spilled(code: Any, card: int, folder: Path) -> tuple[int, int]:
    """Return a kernel's registers per thread and bytes of spill stores, from the assembler of Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    text = folder / "kernel.ptx"
    text.write_text(code.asm["ptx"], encoding="utf-8")
    name = f"sm_{card}a" if card == 90 else f"sm_{card}"
    command = [str(tool), "-v", f"--gpu-name={name}", str(text), "-o", str(folder / "kernel.cubin")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return (
        int(re.search(r"Used (\d+) registers", printed).group(1)),  # type: ignore[union-attr]
        int(re.search(r"(\d+) bytes spill stores", printed).group(1)),  # type: ignore[union-attr]
    )


@pytest.fixture(params=SHARED_BYTES)
def launched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[int], set[str]]:
    """Compile what is launched for a card instead of running it.

    Returns: a function of a number of bytes, which checks each kernel, with at most so much shared memory, and returns
        the names of the kernels.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    card, codes, run = request.param, [], JITFunction.run

    def compile_(kernel: Any, *given: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> None:
        assert all(size <= most for size, most in zip(grid, (2**31 - 1, 65_535, 65_535), strict=False))
        codes.append(run(kernel, *given, grid=grid, warmup=True, **constants))

    def check(most_shared: int) -> set[str]:
        for code in codes:
            assert code.metadata.shared <= most_shared <= SHARED_BYTES[card]
            assert not re.search(r"tf32|\b(atom|red)\.", code.asm["ptx"])  # in full precision; sums in a fixed order
            registers, bytes_stored = spilled(code, card, tmp_path)
            assert not bytes_stored, f"{code.metadata.name}: {registers} registers, {bytes_stored} bytes spilled"
            assert 0 < registers * 32 * code.metadata.num_warps <= 65536  # of one block of threads
        return {code.metadata.name.removesuffix("_kernel") for code in codes}

    monkeypatch.setattr(JITFunction, "run", compile_)
    monkeypatch.setattr(policy, "_is_new_nvidia", lambda device: True)
    here = SimpleNamespace(
        get_current_device=lambda: card, get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", card, 32),
    )  # fmt: skip
    monkeypatch.setattr(triton.runtime.driver, "_active", here)
    return check


@pytest.mark.parametrize(("dtype", "whole"), [("bf16", True), ("fp32", True), ("bf16", False)])
def test_loss(dtype: str, whole: bool, launched: Callable[[int], set[str]]) -> None:
    hidden, weight = torch.zeros(3, 8, dtype=DTYPES[dtype]), torch.zeros(5000, 8, dtype=DTYPES[dtype])
    keep = torch.tensor([True, False, True]) if whole else None
    with modes.using_triton():
        smoothed_loss(hidden.requires_grad_(whole), torch.zeros(3, dtype=torch.int64), weight, None,
                      0.1 * whole, 2048, "others", 1, keep)  # fmt: skip
    assert launched(1024) == {"loss"}


ROWS = {  # queries and keys; whether their numbers are multiples of 16 decides how they are loaded
    "mask": (50, 83), "masked multiples of 16": (48, 80), "segments": (50, 83), "plain": (50, 83), "one": (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("width", [64, WIDEST])
@pytest.mark.parametrize(
    ("dtype", "rows"), [*(("bf16", rows) for rows in ROWS), ("fp32", "mask"), ("fp32", "segments")]
)
def test_relative_attention(rows: str, dtype: str, width: int, launched: Callable[[int], set[str]]) -> None:
    """With what costs registers (a bias of distances, and a mask or segments, which never meet), with nothing, and
    with one position of one head, as sizes of 1 are constants.
    """
    (q_len, k_len), heads = ROWS[rows], 1 if rows == "one" else 2
    lanes = heads
    both_ways = rows == "plain"
    distances = k_len + (q_len - 1) * both_ways
    make = lambda *shape: torch.zeros(shape, dtype=DTYPES[dtype]).requires_grad_()  # noqa: E731
    parts = (make(heads, distances, width), make(heads, width), make(heads, width))
    parts = (*parts, None if both_ways else make(heads, distances))
    q, k, v = (make(lanes, n, heads, width) for n in (q_len, k_len, k_len))
    if rows == "segments":
        starts = [torch.arange(lanes + 1) * n for n in (q_len, k_len)]
        tokens = [x.flatten(0, 1) for x in (q, k, v)]
        out = fused_relative_attention_of_segments(*tokens, *parts, *starts, q_len, k_len)
    else:
        mask = Dense(torch.ones(lanes, 1, q_len, k_len, dtype=torch.bool)) if "mask" in rows else None
        out = fused_relative_attention(*(x.transpose(1, 2) for x in (q, k, v)), *parts, mask, not both_ways)
    out.sum().backward()
    assert launched(68 * 1024) == {"forward", "queries", "keys"}


HASHED = {
    "bucket": LSHSettings(chunk_len=64, num_hashes=2),
    "ring": LSHSettings(
        chunk_len=64, num_hashes=2, visible="chunk", wrap=True, look_across_rounds=True, causal=False,
        within_bucket=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("width", [64, WIDEST])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bucket", "ring", "local", "local, both ways", "one"])
def test_chunks(kind: str, dtype: str, width: int, launched: Callable[[int], set[str]]) -> None:
    """Hashed attention by the rule of buckets, and with chunks around the end; local attention with and without
    penalties; and one position of one head.
    """
    length, heads = (1, 1) if kind == "one" else (150, 2)
    q, k, v = (torch.zeros(heads, length, heads, width, dtype=DTYPES[dtype]).transpose(1, 2).requires_grad_()
               for _ in range(3))  # fmt: skip
    lengths = torch.full((heads,), length)
    with modes.using_triton():
        if kind in HASHED:
            order = hashed_order(q, rotations(0, heads, width, 2, (8, 4)), (8, 4), HASHED[kind], lengths)
            assert order.shape == (heads, heads, 2, 192)
            out = lsh_attention(q, v, torch.zeros(heads, heads, 2, length).long(), HASHED[kind], lengths=lengths)
        else:
            penalties = None if kind == "local, both ways" else torch.zeros(heads, 4 * length, requires_grad=True)
            out = local_attention(
                q, k, v, chunk_len=64, causal=penalties is not None, chunks_after=int(penalties is None),
                penalties=penalties, lengths=lengths,
            )  # fmt: skip
    out.sum().backward()
    more = {"hash", "order", "combine"} if kind in HASHED else set()
    assert launched(57 * 1024) == {"forward", "queries", "keys", *more}
