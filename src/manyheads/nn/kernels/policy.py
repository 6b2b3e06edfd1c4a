"""Selects the implementation: the only file that asks about processors, compilers, dtypes and sizes for speed.

Outside `fast()` the answer is torch's own operations, which autograd, transforms and hooks of torch know. Within it, a
kernel asks one question and uses the fastest implementation, which the answer names. What saves memory (tiles, chunks,
reversible layers) and the random numbers are the same in both modes. The rules of training are fixed and cite
their measurements, because a resumed run must compute as before; so must its validations (`by_fixed_rules`).
`kernels.precision` measures at run time, and the run stores the result. In inference, measurements also choose packed
weights and the attention of beams.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import RequestError
from manyheads.nn.kernels.measuring import MOST_PACKED_ROWS, packing_gain, products_gain
from manyheads.nn.kernels.modes import (
    RelativePath,
    asked,
    asked_relative_path,
    compiles_a_step,
    is_compiled,
    is_fast,
    is_transformed,
    measures,
)

AttentionPath = Literal["products", "rounded products", "sums", "sdpa"]
SegmentsPath = Literal["products", "loop", "varlen", "triton"]


# Cards, as (compute capability, torch's version), on which `benchmarks/gpu.py correct` has passed with the operations
# that `saves_launches` selects. Its record lies in benchmarks/.
_PROVEN: frozenset[tuple[tuple[int, int], str]] = frozenset()


def saves_launches(device: torch.device) -> bool:
    """Return whether to take fewer and larger operations, of which a GPU's host starts each in 20 to 26 us.

    On CUDA only where they have been tried. `meta` stands for a GPU that has, so that launches can be counted there.
    """
    if device.type != "cuda" or not is_fast():
        return device.type == "meta" and is_fast()
    return asked.saves_launches or (torch.cuda.get_device_capability(device), torch.__version__) in _PROVEN


def has_autocast(device: torch.device) -> bool:
    """Return whether torch's autocast knows the device; `meta` stands for a GPU whose weights are cast by the step."""
    return device.type != "meta"


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which torch's autocast is off."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()


def has_generator(device: torch.device) -> bool:
    """Return whether the device has random numbers of its own."""
    return device.type not in ("cpu", "meta")


def _is_new_nvidia(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def tf32_lack(device: torch.device) -> str | None:
    """Return why the device has no TF32, as the end of a sentence; None: it has."""
    if _is_new_nvidia(device):
        return None
    return f"which only NVIDIA GPUs of compute capability 8.0 or higher have, and {device} is none; use fp32"


def can_look(x: Tensor) -> bool:
    """Return whether reading values of x costs nothing.

    On a GPU reading waits for the computation; a compiler has no values, and a transform has several.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()


def steps_between_reads(device: torch.device) -> int:
    """Return every how many steps a search reads which sentences are finished: reading waits for a GPU."""
    return 8 if saves_launches(device) else 1


def reads_late(device: torch.device) -> bool:
    """Return whether a generation reads its tokens while the next step runs. A row that has ended takes part in it."""
    return saves_launches(device)


def waiting_for(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until the device has done what it has been given so far, and for nothing later."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.current_stream(device).record_event()
    return lambda: event.synchronize()


def steps_made_ahead(device: torch.device) -> int:
    """Return for how many steps a thread makes batches in advance, which are the same; on a CPU it gains nothing."""
    return 4 if device.type == "cuda" and saves_launches(device) else 0


def writes_beside(device: torch.device) -> bool:
    """Return whether a thread writes checkpoints while the next steps run, from a copy on the host.

    On a CPU the steps need the cores that would write, and the copy takes longer than it saves (decision 073).
    """
    return device.type == "cuda" and saves_launches(device)


def pinning(device: torch.device) -> AbstractContextManager[object] | None:
    """Return a block in which memory is pinned for this GPU; None if the device copies nothing by itself."""
    return torch.cuda.device(device) if device.type == "cuda" else None


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device. A GPU reads it from pinned memory, for which the host does not wait."""
    pins = pinning(device)
    if pins is None:
        return x.to(device)
    with pins:
        return x.pin_memory().to(device, non_blocking=True)


def lines_together(device: torch.device) -> int:
    """Return how many lines of a file are sorted by length and translated together.

    Batches of a GPU have more rows, so more lines are needed to fill them with equal lengths.
    """
    return 4096 if device.type == "cuda" else 256


def has_values(x: Tensor) -> bool:
    """Return whether x can be read at all, if need be after a wait: a compiler and `meta` have shapes only."""
    return x.device.type != "meta" and not torch.compiler.is_compiling()


# Linear maps (decision 015).

# Smaller products take microseconds in either library, and oneDNN compiles a kernel for each new shape. With a packed
# weight oneDNN is faster for smaller products too.
_LEAST_WORK, _LEAST_PACKED_WORK = 1 << 20, 1 << 17
# Where oneDNN is not faster in general, one measurement decides for all weights with at least this many numbers and at
# least as many rows as columns (decision 023). All other weights are about as fast in either layout.
_LEAST_PACKED_WEIGHT, _LEAST_PACKING_GAIN = 1 << 17, 1.15


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN computes float32 products: on AVX-512 processors for which MKL has no AVX-512 code."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and _maker() not in ("GenuineIntel", "")
        and has_packing()
    )


@cache
def has_packing() -> bool:
    """Return whether this build of torch has oneDNN and its operations on packed weights."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")  # type: ignore[no-untyped-call]


@cache
def has_bf16() -> bool:
    """Return whether oneDNN has bfloat16 products on this processor."""
    return has_packing() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _maker() -> str:
    """Return the processor's vendor string, such as `AuthenticAMD`; empty if the system does not provide it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor().rpartition(", ")[2]  # Windows: `AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD`
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes x W^T, and not the library that torch chooses."""
    return (
        not torch.compiler.is_compiling()  # first, because a compiler would also trace the following lines
        and onednn_is_faster()
        and is_fast()
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and _is_plain(x)
    )


def packs(*weights: Tensor) -> bool:
    """Return whether products with these weights, one below the other, are faster from a packed copy of them."""
    first = weights[0]
    if len(weights) > 1 and saves_launches(first.device):
        return True  # side by side, one product instead of three
    if first.device.type != "cpu" or any(weight.is_inference() for weight in weights):
        return False
    if first.dtype is not torch.float32:
        return first.dtype is torch.bfloat16 and has_bf16()
    height, width = sum(len(weight) for weight in weights), first.shape[1]
    is_measured = measures() and height * width >= _LEAST_PACKED_WEIGHT and height >= width and has_packing()
    return onednn_is_faster() or (is_measured and packing_gain() >= _LEAST_PACKING_GAIN)


def uses_packed(x: Tensor, dtype: torch.dtype, out_features: int) -> bool:
    """Return whether to multiply x by a packed weight of this dtype with `out_features` rows."""
    if not is_fast():
        return False
    if saves_launches(x.device):
        return x.dtype is dtype and not torch.is_grad_enabled()
    compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    least = 0 if dtype is torch.bfloat16 else _LEAST_PACKED_WORK
    is_large = x.numel() * out_features >= least
    if dtype is torch.float32 and not onednn_is_faster() and x.numel() > MOST_PACKED_ROWS * x.shape[-1]:
        return False
    return compute is dtype and not torch.is_grad_enabled() and is_large and _is_plain(x)


def joins_weights(rows: int, out_features: int) -> bool:
    """Return whether maps of one input are computed as one product with their concatenated weights.

    With fewer rows, as in a step of decoding, the concatenation costs more than the larger product saves.
    """
    return is_fast() and rows >= out_features


def _is_plain(x: Tensor) -> bool:
    """Return whether x is a plain CPU tensor, no tracer or counter is active, and oneDNN is not disabled."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and torch._C._get_mkldnn_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


# Attention (decision 001).

# The largest q_len x k_len for which matrix products may be faster than SDPA on a CPU.
_SHORT = 128 * 128
# A step of a search has at most this many queries and keys, and at least this many (batch, head) pairs.
_FEW_QUERIES, _FEW_KEYS, _MANY_PAIRS = 8, 512, 64
_LEAST_PRODUCTS_GAIN = 1.2
KEYS_MULTIPLE = 16
"""The number of keys is rounded up to a multiple of this for the path "rounded products"."""


def attention_path(query: Tensor, key: Tensor, value: Tensor, dropout_rate: float) -> AttentionPath:
    """Return the fastest implementation of dot-product attention for these tensors.

    On a CPU, at short lengths, matrix products are faster than SDPA in three cases. With dropout SDPA has no fused
    kernel there. In 16 bits its backward pass has a fixed cost per (batch, head) pair, which is too high for short
    sentences. Its forward pass also has one if there are few queries, as in a step of a search: where MKL has no
    AVX-512 code, and where it is measured for the beams of a sentence. 16-bit keys that are a part of a cache are
    padded as well (decision 006).
    """
    if is_transformed():
        return "products"
    if query.device.type != "cpu":
        return "sdpa"
    if compiles_a_step():
        return "sums"
    q_len, k_len = query.shape[2], key.shape[2]
    if q_len * k_len > _SHORT:
        return "sdpa"
    if dropout_rate:
        return "products"
    if not is_fast():
        return "sdpa"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "products" if query.element_size() < 4 else "sdpa"
    few = q_len <= _FEW_QUERIES and k_len <= _FEW_KEYS and query.shape[0] * query.shape[1] >= _MANY_PAIRS
    if not few or torch.compiler.is_compiling():
        return "sdpa"
    if not onednn_is_faster():
        is_measured = measures() and q_len > 1 and key.element_size() == 4
        is_faster = is_measured and products_gain() >= _LEAST_PRODUCTS_GAIN
        return "products" if is_faster else "sdpa"
    return "rounded products" if key.element_size() < 4 and not key.is_contiguous() else "products"


def segments_path(query: Tensor, value: Tensor, has_bias: bool = False) -> SegmentsPath:
    """Return the implementation of attention over packed sequences: torch's kernel on a GPU, a loop elsewhere.

    Torch's kernel has no bias. Packed batches are asked for by name, and so the Triton kernel with them.
    Raises: RequestError: the kernel cannot compute it. `meta`, which stands for a GPU, would accept all.
    """
    has_kernel = has_segments_kernel(query.device)
    width = max(query.shape[3], value.shape[3])
    if has_bias and uses_triton("relative attention", query, width=width, by_name=has_kernel):
        return "triton"
    if is_compiled() and (has_bias or not has_kernel):
        return "products"
    if not has_kernel:
        return "loop"
    lack = segments_lack(query.device, query.dtype, query.shape[3], value.shape[3])
    if lack is not None:
        raise RequestError(f"Attention over packed sequences {lack}")
    return "varlen"


def has_segments_kernel(device: torch.device) -> bool:
    """Return whether attention over packed sequences is computed by torch's kernel, or refused (`segments_lack`)."""
    return is_fast() and device.type in ("cuda", "meta")


def segments_lack(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, has_bias: bool = False
) -> str | None:
    """Return why the kernels of packed sequences cannot compute this, as the end of a sentence; None: they can.

    Args: has_bias: whether the Triton kernel of relative attention is needed beside torch's.
    """
    if device.type != "meta" and not _is_new_nvidia(device):
        return f"needs an NVIDIA GPU of compute capability 8.0, which {device} is not; use padded batches there."
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"is computed in bfloat16 or float16 on a GPU, not in {name}; train in bf16, or use padded batches."
    if head_dim != value_dim or head_dim % 8 or not 0 < head_dim <= 256:
        return (
            "needs heads of one width for queries, keys and values, a multiple of 8 up to 256, here"
            f" {head_dim} and {value_dim}; change num_heads, head_dim or value_dim, or use padded batches."
        )
    lack = triton_lack(device, dtype, head_dim) if has_bias else None
    return lack and f"with a relative bias {lack} Padded batches need no kernel."


def sdpa_zeroes_empty_rows(mask: Tensor) -> bool:
    """Return whether torch's kernel gives zeros for rows without allowed keys: on a CPU with a boolean mask."""
    return mask.device.type == "cpu" and mask.dtype is torch.bool


def wants_contiguous(x: Tensor) -> bool:
    """Return whether products copy x if it is not contiguous; oneDNN's 16-bit products do, and transpose keys first."""
    return x.element_size() < 4 and x.device.type == "cpu"


def adds_masks(scores: Tensor, blocked: Tensor) -> bool:
    """Return whether to add a mask to the scores instead of filling them: if several queries or heads share it.

    Not in float16, where score + lowest number can differ from the lowest number.
    """
    return blocked.numel() < scores.numel() and scores.dtype is not torch.float16


# Attention with relative positions.

# Scores per tile on a CPU: they stay in the caches of the cores from the product that computes them to the product that
# uses them. Smaller tiles need more calls, in which one thread waits for the other.
_RELATIVE_SCORES = 1 << 19


# The implementation on CUDA: the fastest one there (experiments, 2026-11-26), without a compiler and with dropout.
# `benchmarks/gpu.py` measures all; `using_relative_path` selects another one.
_RELATIVE_ON_CUDA: RelativePath = "sdpa"


def relative_path(query: Tensor, causal: bool) -> RelativePath:
    """Return the implementation of attention with relative positions for these queries.

    "sums" and "tiles" are for CPUs. "products" is the formula under autograd, which a compiler fuses. "sdpa" passes the
    scores of the distances to torch's fused kernel as an additive mask.
    """
    path = asked_relative_path()
    if path is not None and not is_transformed():
        return path
    if not is_fast():
        return "products"
    if query.device.type in ("cuda", "meta"):
        return _RELATIVE_ON_CUDA
    if compiles_a_step() and query.shape[2] == 1 and query.device.type == "cpu":
        return "sums"
    # A compiler cannot trace the autograd function of "tiles", which supports causal attention only.
    return "products" if torch.compiler.is_compiling() or not causal else "tiles"


def lanes_at_once(batch: int, scores_each: int, device: torch.device) -> int:
    """Return how many lanes (rows of the batch) with so many scores each make a tile; all except on a CPU."""
    return max(1, _RELATIVE_SCORES // max(1, scores_each)) if device.type == "cpu" else max(1, batch)


# Hashed attention.

# Scores per tile: on a CPU they stay in the cache of a core, in bfloat16, from one operation to the next.
_LSH_SCORES, _LSH_SCORES_ON_A_GPU = 1 << 19, 1 << 26
# Slots (rows x rounds x length) that are processed at once on a CPU; at least those of one row.
_LSH_SLOTS = 1 << 16
# Numbers of rotated vectors that exist at once.
_LSH_ROTATED, _LSH_ROTATED_ON_A_GPU = 1 << 22, 1 << 26
# Positions of a row that are converted to float32 at once on a CPU.
_LSH_PIECE_LEN = 1 << 13


def lsh_chunks_at_once(scores_each: int, device: torch.device) -> int:
    """Return how many query chunks with so many scores each make a tile."""
    most = _LSH_SCORES if device.type == "cpu" else _LSH_SCORES_ON_A_GPU
    return max(1, most // scores_each)


def lsh_hashed_at_once(numbers_each: int, device: torch.device) -> int:
    """Return how many positions with so many rotated numbers each to hash at once."""
    most = _LSH_ROTATED_ON_A_GPU if saves_launches(device) else _LSH_ROTATED
    return max(1, most // max(1, numbers_each))


def lsh_rows_at_once(rows: int, slots_each: int, device: torch.device) -> int:
    """Return how many of `rows` rows, each with rounds x length slots, to process at once."""
    slots = max(1, round(slots_each * asked.times_longer))
    return max(1, _LSH_SLOTS // slots if device.type == "cpu" else rows)


def lsh_piece(rows: int, length: int, device: torch.device) -> tuple[int, int]:
    """Return how many rows and positions to convert to a wider dtype at once."""
    return (1, _LSH_PIECE_LEN) if device.type == "cpu" else (max(1, rows), length)


def hides_by_codes(dtype: torch.dtype) -> bool:
    """Return whether further columns in a product cost less than passes over the scores."""
    return dtype is torch.bfloat16


def has_embedding_bag(device: torch.device) -> bool:
    """Return whether `F.embedding_bag` works; its library for CPUs cannot start without /proc/cpuinfo."""
    return device.type != "cpu" or _cpu_has_embedding_bag()


@cache
def _cpu_has_embedding_bag() -> bool:
    try:
        F.embedding_bag(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1), mode="sum")
    except RuntimeError:
        return False
    return True


# Dropout (decision 007).


def shares_draws(device: torch.device) -> bool:
    """Return whether four elements share 64 random bits: on a CPU, where torch draws in one thread."""
    return device.type == "cpu"


def uses_torch_dropout(x: Tensor) -> bool:
    """Return whether torch's dropout is faster: on GPUs and in compiled code, which fuses it with its neighbours."""
    return torch.compiler.is_compiling() or not shares_draws(x.device)


# Losses (decisions 002 and 006).

# Numbers per thread and tile on a CPU: 1 MB in float32, which stays in the cache of a core from one operation to the
# next.
_TILE_NUMBERS = 1 << 18
# Logits per chunk on a CPU at most: 80 MB in float32. Each chunk reads the weight and adds to its gradient once, so
# large chunks are faster.
_CHUNK_NUMBERS = 20 << 20
# On a processor with AMX a product of logits that did not fit into the shared cache was slow (25 instead of 5 ms, at a
# small vocabulary). So a chunk has at most 10 MB in bf16, or 512 rows, except where large chunks were measured to be
# faster (decision 002).
_CACHED_NUMBERS, _WORTHWHILE_ROWS = 5 << 20, 512
# Rows of a product on a CPU are a multiple of this: oneDNN compiles a kernel for each number of rows, and the number of
# real tokens changes with each batch.
_ROWS_MULTIPLE = 64


def logit_rows_at_once(chunk_tokens: int, vocab_size: int, device: torch.device) -> int:
    """Return how many rows of logits exist at once: `chunk_tokens`, or fewer on a CPU."""
    if device.type != "cpu":
        return chunk_tokens
    fitting = _CHUNK_NUMBERS // vocab_size
    if torch.compiler.is_compiling() or not onednn_is_faster():  # in this order, for compilers
        fitting = min(fitting, max(_CACHED_NUMBERS // vocab_size, _WORTHWHILE_ROWS))
    return min(chunk_tokens, max(fitting // _ROWS_MULTIPLE * _ROWS_MULTIPLE, _ROWS_MULTIPLE))


def logit_rows_of_a_gpu(vocab_size: int, dtype: torch.dtype) -> int:
    """Return how many rows of logits exist at once where `saves_launches`: 2 GiB of them."""
    return max(1, (2 << 30) // (vocab_size * dtype.itemsize))


def logit_rows_in_a_tile(rows: int, vocab_size: int, device: torch.device) -> int:
    """Return how many of `rows` rows to process at once in elementwise operations."""
    return max(1, torch.get_num_threads() * _TILE_NUMBERS // vocab_size) if device.type == "cpu" else rows


def pads_rows_to(count: int, device: torch.device) -> int:
    """Return the number of rows to which `count` rows are padded before a product."""
    return -(-count // _ROWS_MULTIPLE) * _ROWS_MULTIPLE if device.type == "cpu" else count


# Triton kernels (decision 071).

TritonKernel = Literal["the loss", "relative attention", "chunk attention"]
# As `_PROVEN`, with the version of Triton and the kernel.
_PROVEN_TRITON: frozenset[tuple[tuple[int, int], str, str, TritonKernel]] = frozenset()
_WIDEST_TRITON_HEAD = 128


def uses_triton(
    kernel: TritonKernel,
    x: Tensor,
    dtype: torch.dtype | None = None,
    width: int = 0,
    rate: float = 0.0,
    by_name: bool = False,
    lack: str | None = None,
) -> bool:
    """Return whether a Triton kernel computes this: if asked by name, or on a card where it has been tried.

    Not under a transform, nor in compiled code, which fuses the formula itself.
    Args: lack: what this kernel alone cannot compute, as the end of a sentence; otherwise see `triton_lack`.
    Raises: RequestError: it is asked for by name, and cannot.
    """
    if is_transformed() or torch.compiler.is_compiling():
        return False
    by_name = by_name or asked.asks_triton
    if not by_name and not (x.is_cuda and _PROVEN_TRITON and is_fast()):
        return False
    lack = triton_lack(x.device, dtype or x.dtype, width, rate) or lack
    if by_name and lack is not None:
        raise RequestError(f"The Triton kernel of {kernel} {lack}")
    if by_name:
        return True
    here = (torch.cuda.get_device_capability(x.device), torch.__version__, version("triton"), kernel)
    return lack is None and here in _PROVEN_TRITON


def triton_lack(device: torch.device, dtype: torch.dtype, width: int = 0, rate: float = 0.0) -> str | None:
    """Return why the Triton kernels cannot compute this, as the end of a sentence; None: they can."""
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    if not _has_triton():
        return "needs the package triton, which is not installed: pip install triton, or leave the kernel out."
    if not interprets and not _is_new_nvidia(device):
        where = f"this is on {device}; move it there"
        return f"needs an NVIDIA GPU of compute capability 8.0, but {where}, or leave the kernel out."
    if not interprets and not any(map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])):
        return "needs a C compiler, and there is none: install gcc, or leave the kernel out."
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or (interprets and dtype is torch.bfloat16):
        return f"computes in float32, float16 and, on a GPU, bfloat16, not in {dtype}; convert, or leave it out."
    if width > _WIDEST_TRITON_HEAD:
        return f"has heads of at most {_WIDEST_TRITON_HEAD} numbers, not {width}; use more heads, or leave it out."
    if rate:
        return f"has no dropout of attention weights, here {rate}; set attention_dropout to 0, or leave it out."
    return None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def searches_blocks(device: torch.device) -> bool:
    """Return whether a vectorised pass over blocks of numbers is faster than torch's topk: on CPUs, where that compares
    one number at a time.
    """
    return device.type == "cpu"
