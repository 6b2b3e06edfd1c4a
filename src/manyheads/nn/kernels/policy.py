"""Decides which implementation is faster here: the only file that asks about processors, compilers, types and sizes.

A kernel asks one question and takes the implementation that the answer names. The rules are fixed, and cite where they
were measured: a run that is resumed must compute as it did before. Only `kernels.precision` measures, and the run
stores its result.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "KEYS_MULTIPLE",
    "adds_masks",
    "attention_path",
    "can_look",
    "compiles_a_step",
    "compiling_a_step",
    "has_bf16",
    "has_embedding_bag",
    "has_packing",
    "hides_by_codes",
    "is_compiled",
    "joins_weights",
    "lanes_at_once",
    "logit_rows_at_once",
    "logit_rows_in_a_tile",
    "lsh_chunks_at_once",
    "lsh_piece",
    "lsh_rows_at_once",
    "onednn_is_faster",
    "pads_rows_to",
    "packs",
    "relative_path",
    "runs_flex_eagerly",
    "sdpa_zeroes_empty_rows",
    "searches_blocks",
    "shares_draws",
    "sums_relative_scores",
    "uses_onednn",
    "uses_packed",
    "uses_torch_dropout",
    "using_relative_path",
    "wants_contiguous",
]

AttentionPath = Literal["products", "rounded products", "sums", "sdpa"]
RelativePath = Literal["products", "tiles", "sums", "sdpa", "flex"]

_compiles = False


def compiles_a_step() -> bool:
    """Whether a compiler reads this for one step of a search (`decoding.compiled`), and not for another purpose."""
    return torch.compiler.is_compiling() and _compiles


@contextmanager
def compiling_a_step() -> Iterator[None]:
    """Within the block, what is compiled is a step of a search. Not for several threads at once."""
    global _compiles
    before, _compiles = _compiles, True
    try:
        yield
    finally:
        _compiles = before


def can_look(x: Tensor) -> bool:
    """Whether a number of x can be read at once: on a GPU the program would wait, and a compiler has no numbers."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_compiled() -> bool:
    """Return whether a compiler is tracing this code. Sizes that depend on values are then symbols, not numbers."""
    return torch.compiler.is_compiling()


# Linear maps (decision 015).

# Products with fewer multiplications take microseconds in either library, and oneDNN makes a kernel for each new shape.
# With a packed weight oneDNN is faster from fewer on.
_LEAST_WORK, _LEAST_PACKED_WORK = 1 << 20, 1 << 17


@cache
def onednn_is_faster() -> bool:
    """Whether float32 products go to oneDNN: on a processor with AVX-512 whose maker MKL has no AVX-512 code for."""
    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and _maker() not in ("GenuineIntel", "")
        and has_packing()
    )


@cache
def has_packing() -> bool:
    """Whether this build of torch has oneDNN, and its operations on packed weights."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")  # type: ignore[no-untyped-call]


@cache
def has_bf16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    return has_packing() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _maker() -> str:
    """The processor's vendor as it names itself, such as `AuthenticAMD`; empty where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor().rpartition(", ")[2]  # Windows: `AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD`
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether x W^T goes to oneDNN and not to the library that torch chooses."""
    return (
        not torch.compiler.is_compiling()  # first, because a compiler also reads what follows
        and onednn_is_faster()
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.numel() * weight.shape[0] >= _LEAST_WORK
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and _is_plain(x)
    )


def packs(weight: Tensor) -> bool:
    """Whether products with this weight are faster from a packed copy of it."""
    if weight.device.type != "cpu" or weight.is_inference():
        return False
    return onednn_is_faster() if weight.dtype is torch.float32 else weight.dtype is torch.bfloat16 and has_bf16()


def uses_packed(x: Tensor, dtype: torch.dtype, out_features: int) -> bool:
    """Whether x is multiplied by a packed weight of that type and so many rows."""
    compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    least = 0 if dtype is torch.bfloat16 else _LEAST_PACKED_WORK
    is_large = x.numel() * out_features >= least
    return compute is dtype and not torch.is_grad_enabled() and is_large and _is_plain(x)


def joins_weights(rows: int, out_features: int) -> bool:
    """Whether maps of one input, out_features each, are one product with their joined weights.

    With fewer rows (a step of decoding) joining the weights costs more than the product saves.
    """
    return rows >= out_features


def _is_plain(x: Tensor) -> bool:
    """Whether x is a tensor on a CPU whose operations no tracer or counter follows, and oneDNN is not turned off."""
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
# At most so many queries and keys, and at least so many (batch, head) pairs: a step of a search.
_FEW_QUERIES, _FEW_KEYS, _MANY_PAIRS = 8, 512, 64
KEYS_MULTIPLE = 16
"""The number of keys is rounded up to a multiple of this for the path "rounded products"."""


def attention_path(query: Tensor, key: Tensor, value: Tensor, dropout_rate: float) -> AttentionPath:
    """The fastest implementation of dot-product attention for these heads.

    On a CPU, at short lengths, matrix products are faster in three cases. With dropout SDPA has no kernel but draws a
    number for every weight. In 16 bits its backward pass has a cost for each (batch, head) pair, which short sentences
    never earn back. Where MKL has no AVX-512 code, so has its forward pass with few queries a pair, as in a step of a
    search; there, keys of 16 bits that are a part of a cache are also rounded up in length (decision 006).
    """
    if query.device.type != "cpu":
        return "sdpa"
    if compiles_a_step():
        return "sums"
    q_len, k_len = query.shape[2], key.shape[2]
    if q_len * k_len > _SHORT:
        return "sdpa"
    if dropout_rate:
        return "products"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "products" if query.element_size() < 4 else "sdpa"
    few = q_len <= _FEW_QUERIES and k_len <= _FEW_KEYS and query.shape[0] * query.shape[1] >= _MANY_PAIRS
    if not few or torch.compiler.is_compiling() or not onednn_is_faster():
        return "sdpa"
    return "rounded products" if key.element_size() < 4 and not key.is_contiguous() else "products"


def sdpa_zeroes_empty_rows(mask: Tensor) -> bool:
    """Whether torch's kernel gives zeros for a fully masked row: on a CPU, under a mask of True and False."""
    return mask.device.type == "cpu" and mask.dtype is torch.bool


def wants_contiguous(x: Tensor) -> bool:
    """Return whether products copy x if it is not contiguous; oneDNN's 16-bit products do, and transpose keys first."""
    return x.element_size() < 4 and x.device.type == "cpu"


def adds_masks(scores: Tensor, blocked: Tensor) -> bool:
    """Whether a mask is added to the scores and not filled in: if it serves many queries or heads at once.

    Not in float16, where the lowest number does not absorb every score.
    """
    return blocked.numel() < scores.numel() and scores.dtype is not torch.float16


# Attention with relative positions.

# Scores worked on at once on a CPU: those of a few lanes, which stay in the cores' own caches from the product that
# makes them to the one that uses them. Fewer cost more calls, in which one thread waits for the other.
_RELATIVE_SCORES = 1 << 19


def sums_relative_scores(query: Tensor) -> bool:
    """Whether sums are faster than products: for one query in a compiled step on a CPU."""
    return compiles_a_step() and query.shape[2] == 1 and query.device.type == "cpu"


# The implementation on CUDA. "sdpa" is a default, not a measurement: it needs no compiler, has dropout, and its
# gradients have been in torch for longest. `benchmarks/gpu.py` measures all of them, and `using_relative_path` takes
# another one.
_RELATIVE_ON_CUDA: RelativePath = "sdpa"
_relative_path: RelativePath | None = None


def relative_path(query: Tensor, dropout_rate: float, causal: bool) -> RelativePath:
    """The implementation of attention with relative positions for these queries.

    "sums" and "tiles" are for CPUs. "products" is the formula by autograd, which a compiler fuses. "sdpa" gives torch's
    fused kernel the scores of the distances as an additive mask, and "flex" is FlexAttention, which reads them by
    distance; it has no dropout, and on a CPU no gradients.
    """
    if _relative_path is not None:
        return "sdpa" if _relative_path == "flex" and dropout_rate else _relative_path
    if query.device.type == "cuda":
        return _RELATIVE_ON_CUDA
    if sums_relative_scores(query):
        return "sums"
    # Compilers do not see through our own autograd function, and both ways there is none.
    return "products" if torch.compiler.is_compiling() or not causal else "tiles"


def runs_flex_eagerly(query: Tensor) -> bool:
    """Whether FlexAttention is not compiled by itself: on a CPU, for tests, or as part of what is compiled anyway."""
    return query.device.type == "cpu" or torch.compiler.is_compiling()


@contextmanager
def using_relative_path(path: RelativePath) -> Iterator[None]:
    """Within the block, relative attention takes this implementation, to measure or test it; "flex" where it can.

    Not for several threads at once.
    """
    global _relative_path
    before, _relative_path = _relative_path, path
    try:
        yield
    finally:
        _relative_path = before


def lanes_at_once(batch: int, scores_each: int, device: torch.device) -> int:
    """How many lanes of so many scores each make a tile; on other devices than a CPU all do."""
    return max(1, _RELATIVE_SCORES // max(1, scores_each)) if device.type == "cpu" else max(1, batch)


# Hashed attention.

# Scores that a CPU works on at once: in bfloat16 they stay in a core's own cache from one operation to the next.
_LSH_SCORES, _LSH_SCORES_ON_A_GPU = 1 << 19, 1 << 26
# Places (rows x rounds x length) whose results exist in sorted order at once on a CPU; those of one row at least.
_LSH_PLACES = 1 << 16
# Positions of a row that a CPU converts to float32 at once, where all are converted.
_LSH_PIECE_LEN = 1 << 13


def lsh_chunks_at_once(scores_each: int, device: torch.device) -> int:
    """Query chunks with so many scores each that make a tile."""
    most = _LSH_SCORES if device.type == "cpu" else _LSH_SCORES_ON_A_GPU
    return max(1, most // scores_each)


def lsh_rows_at_once(rows: int, places_each: int, device: torch.device) -> int:
    """Of `rows` rows, each with rounds x length places, how many to sort and attend at once."""
    return max(1, _LSH_PLACES // max(1, places_each) if device.type == "cpu" else rows)


def lsh_piece(rows: int, length: int, device: torch.device) -> tuple[int, int]:
    """Rows and positions to convert to a wider type at once."""
    return (1, _LSH_PIECE_LEN) if device.type == "cpu" else (max(1, rows), length)


def hides_by_codes(dtype: torch.dtype) -> bool:
    """Whether more columns in a product cost less than passes over the scores."""
    return dtype is torch.bfloat16


def has_embedding_bag(device: torch.device) -> bool:
    """Whether torch can sum chosen rows; its library for CPUs cannot start without /proc/cpuinfo."""
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
    """Whether four numbers share one draw of 64 bits: on a CPU, where torch draws in one thread."""
    return device.type == "cpu"


def uses_torch_dropout(x: Tensor) -> bool:
    """Whether torch's own dropout is faster: GPUs and compilers fuse it with what stands around it."""
    return torch.compiler.is_compiling() or not shares_draws(x.device)


# Losses (decisions 002 and 006).

# Numbers that each thread of a CPU works on at once: 1 MB in float32, which stays in a core's own cache from one
# operation to the next.
_TILE_NUMBERS = 1 << 18
# Logits at once on a CPU, whatever `chunk_tokens` allows: 80 MB in float32. For every chunk the whole weight is read
# again and its gradient added up again, so large ones pay.
_CHUNK_NUMBERS = 20 << 20
# On a processor with AMX a product of logits that had left the cores' shared cache was slow (5 ms against 25 ms, at a
# small vocabulary). So, but where large chunks were measured to be faster, a chunk is kept to 10 MB in bf16, as long as
# it has rows enough to be worth the reading.
_CACHED_NUMBERS, _WORTHWHILE_ROWS = 5 << 20, 512
# Rows of a product on a CPU: oneDNN makes a kernel for every number of rows, and the count of real tokens is always
# another.
_ROWS_MULTIPLE = 64


def logit_rows_at_once(chunk_tokens: int, vocab_size: int, device: torch.device) -> int:
    """Rows of logits that exist at once: `chunk_tokens`, or fewer on a CPU."""
    if device.type != "cpu":
        return chunk_tokens
    fitting = _CHUNK_NUMBERS // vocab_size
    if torch.compiler.is_compiling() or not onednn_is_faster():  # in this order: a compiler reads on from here
        fitting = min(fitting, max(_CACHED_NUMBERS // vocab_size, _WORTHWHILE_ROWS))
    return min(chunk_tokens, max(fitting // _ROWS_MULTIPLE * _ROWS_MULTIPLE, _ROWS_MULTIPLE))


def logit_rows_in_a_tile(rows: int, vocab_size: int, device: torch.device) -> int:
    """Of `rows` rows, how many to work on at once, element by element."""
    return max(1, torch.get_num_threads() * _TILE_NUMBERS // vocab_size) if device.type == "cpu" else rows


def pads_rows_to(count: int, device: torch.device) -> int:
    """The number of rows that `count` rows are padded to before a product."""
    return -(-count // _ROWS_MULTIPLE) * _ROWS_MULTIPLE if device.type == "cpu" else count


# Top-k.


# So many numbers are needed before a search by blocks pays.
_WORTH_BLOCKS = 1 << 15


def searches_blocks(device: torch.device, count: int = _WORTH_BLOCKS) -> bool:
    """Return whether a vectorised pass over blocks of `count` numbers is faster than torch's topk or argmax.

    It is on CPUs, where these compare one number at a time.
    """
    return device.type == "cpu" and count >= _WORTH_BLOCKS
