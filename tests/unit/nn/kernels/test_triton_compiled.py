"""The Triton kernels, compiled for GPUs without one: shared memory, registers and spills are within limits.

Nothing is refused when they are compiled; a card refuses too much shared memory only when it runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manyheads.nn.kernels import policy

triton = pytest.importorskip("triton", reason="the package triton is not installed; make check-triton installs it")

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 compiles nothing"),
]

SHARED_BYTES = {80: 166_912, 90: 232_448}
ROWS = ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "grad_row", "grad_head")
"""Distances in memory that are multiples of 16 numbers."""


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], card: int, **options: int) -> Any:
    """Compile a kernel. Args: types: of arguments, by name; all others are int32."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    # As at run time: tensors begin at multiples of 16 bytes, and their rows at multiples of 16 numbers.
    aligned = [n for n, name in enumerate(kernel.arg_names) if name in types or name in ROWS]
    hints = {(n,): [["tt.divisibility", 16]] for n in aligned if types.get(kernel.arg_names[n]) != "fp32"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


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


def check(code: Any, card: int, folder: Path) -> None:
    assert code.metadata.shared <= SHARED_BYTES[card]
    registers, bytes_stored = spilled(code, card, folder)
    assert not bytes_stored, f"{registers} registers, {bytes_stored} bytes spilled"
    assert 0 < registers * 32 * code.metadata.num_warps <= 65536  # of one block of threads


@pytest.mark.parametrize("card", SHARED_BYTES)
@pytest.mark.parametrize(("dtype", "whole"), [("bf16", True), ("fp32", True), ("bf16", False)])
def test_loss(dtype: str, whole: bool, card: int, tmp_path: Path) -> None:
    from manyheads.nn.kernels.triton.loss import COLUMNS, WARPS, loss_kernel

    types = {
        "logits": f"*{dtype}", "targets": "*i64", "keep": "*u8", "numbers": "*fp32",
        "on_target": "fp32", "share": "fp32", "count": "fp32",
    }  # fmt: skip
    constants = dict.fromkeys(("HAS_KEEP", "SMOOTHS", "NEEDS_ERROR"), whole) | {"BLOCK": COLUMNS}
    check(compiled(loss_kernel, types, constants, card, num_warps=WARPS), card, tmp_path)


@pytest.mark.parametrize("card", SHARED_BYTES)
@pytest.mark.parametrize("width", [64, policy._WIDEST_TRITON_HEAD])
@pytest.mark.parametrize(
    ("dtype", "rows"), [("bf16", "mask"), ("bf16", "segments"), ("bf16", "plain"), ("fp32", "mask")]
)
@pytest.mark.parametrize("name", ["forward_kernel", "queries_kernel", "keys_kernel"])
def test_relative_attention(name: str, rows: str, dtype: str, width: int, card: int, tmp_path: Path) -> None:
    """With what costs registers (a bias of distances, and a mask or segments, which never meet), and with nothing."""
    from manyheads.nn.kernels.triton import relative

    kernel = getattr(relative, name)
    chosen = relative.tiles(kernel, width, 4 if dtype == "fp32" else 2)
    names = ("query", "key", "value", "by_distance", "bias", "out", "grad_out")
    types = dict.fromkeys((*names, *(f"grad_{name}" for name in names[:4])), f"*{dtype}")
    types |= dict.fromkeys(("normalisers", "deltas"), "*fp32") | dict.fromkeys(("q_starts", "k_starts"), "*i32")
    types |= {"allowed": "*u8", "scale": "fp32"}
    constants = {
        "WIDTH": width, "VALUE": width, "BLOCK_WIDTH": width, "BLOCK_VALUE": width, "QUERIES": chosen.queries,
        "KEYS": chosen.keys, "CAUSAL": rows != "plain", "HAS_STARTS": rows == "segments", "HAS_BIAS": rows != "plain",
        "HAS_MASK": rows == "mask", "PRECISION": "ieee",
    }  # fmt: skip
    check(compiled(kernel, types, constants, card, num_warps=chosen.warps, num_stages=chosen.stages), card, tmp_path)


CHUNKS = [
    ("bucket", "bf16", 64), ("bucket", "bf16", 128), ("ring", "bf16", 128), ("local", "bf16", 64),
    ("local", "bf16", 128), ("one", "bf16", 64),
    *((kind, "fp32", width) for kind in ("bucket", "ring", "local") for width in (64, 128)),
]  # fmt: skip


@pytest.mark.parametrize("card", SHARED_BYTES)
@pytest.mark.parametrize(("kind", "dtype", "width"), CHUNKS)
@pytest.mark.parametrize("name", ["forward_kernel", "queries_kernel", "keys_kernel"])
def test_chunks(name: str, kind: str, dtype: str, width: int, card: int, tmp_path: Path) -> None:
    """Hashed attention by the rule of buckets, and with chunks around the end; local attention with penalties; and one
    position of one head, as sizes of 1 are constants.
    """
    from manyheads.nn.kernels.triton import chunks

    kernel, is_local = getattr(chunks, name), kind in ("local", "one")
    chosen = chunks.tiles(kernel, width, 4 if dtype == "fp32" else 2, not is_local)
    names = ("query", "key", "value", "out", "grad_out", "grad_query", "grad_key", "grad_value", "grad_scores")
    types = dict.fromkeys(names, f"*{dtype}") | dict.fromkeys(("normalisers", "deltas", "penalties"), "*fp32")
    types |= {"lengths": "*i64", "order": "*i32", "buckets": "*i32", "scale": "fp32", "key_eps": "fp32"}
    constants = {
        "WIDTH": width, "VALUE": width, "BLOCK_WIDTH": width, "BLOCK_VALUE": width, "QUERIES": chosen.queries,
        "KEYS": chosen.keys, "HASHED": not is_local, "CAUSAL": kind != "ring", "SLIDES": kind == "bucket",
        "IN_BUCKET": not is_local, "WRAPS": kind == "ring", "HAS_LENGTHS": True, "HAS_PENALTIES": is_local,
        "PRECISION": "ieee",
    }  # fmt: skip
    if name == "queries_kernel":
        constants["KEEPS_SCORES"] = is_local
    if kind == "one":
        constants |= dict.fromkeys(("heads", "length", "rounds", "slots", "ring", "unit", "before", "distances"), 1)
    code = compiled(kernel, types, constants, card, num_warps=chosen.warps, num_stages=chosen.stages)
    assert code.metadata.shared <= 64 * 1024
    check(code, card, tmp_path)


@pytest.mark.parametrize("card", SHARED_BYTES)
@pytest.mark.parametrize("name", ["hash_kernel", "order_kernel", "combine_kernel"])
def test_hashing_and_rounds(name: str, card: int, tmp_path: Path) -> None:
    from manyheads.nn.kernels.triton import chunks, hashing

    types = dict.fromkeys(("vectors", "parts", "value", "out"), "*bf16") | {"lengths": "*i64", "keys": "*i64"}
    types |= {"rotations": "*fp32", "order": "*i32", "part_normalisers": "*fp32", "normalisers": "*fp32"}
    widest = policy._WIDEST_TRITON_HEAD
    constants = {
        "hash_kernel": {
            "FACTORS": (16, 64), "WIDTH": widest, "POSITIONS": hashing.POSITIONS, "COLUMNS": hashing.COLUMNS,
            "DIRECTIONS": hashing.DIRECTIONS, "HAS_LENGTHS": True, "PRECISION": "ieee",
        },
        "order_kernel": {"SLOTS": hashing.SLOTS},
        "combine_kernel": {"VALUE": widest, "BLOCK_VALUE": widest, "SIZE": chunks.POSITIONS, "HAS_LENGTHS": True},
    }[name]  # fmt: skip
    kernel = getattr(chunks if name == "combine_kernel" else hashing, name)
    check(compiled(kernel, types, constants, card, num_warps=4, num_stages=1), card, tmp_path)
