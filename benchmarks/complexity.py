"""The papers' tables of complexity, measured: Vaswani et al. 2017, table 1; Kitaev et al. 2020, tables 1 and 3.

    python benchmarks/complexity.py [--length 2048]

Forward and backward pass, counted: FLOPs of matrix products, and the largest sum of bytes that torch holds at once
beside the weights, with one thread, because torch's attention holds a buffer for each. FLOPs are then the same on every
machine with this version of torch; bytes differ by a few percent where another implementation is chosen. A factor says
what twice the length, or twice the number of layers, does to them. The chain is the longest sequence of operations of
which each needs the one before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from harness import markdown_table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from manyheads.catalogue import build_model
from manyheads.data.batch import SegmentBatch
from manyheads.extras.planning.planner import peak_bytes
from manyheads.models.reformer.config import LayerKind, ReformerConfig
from manyheads.nn import Causal, LocalSelfAttention, LSHSettings, MultiHeadAttention, dot_product_attention
from manyheads.nn.attention.local import local_attention
from manyheads.nn.attention.lsh import hash_vectors, lsh_attention, rotations
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.attention import plain_attention

HEADS, HEAD_DIM, CHUNK, ROUNDS = 4, 64, 64, 4
LAYERS, D_FF = 2, 1024

ATTENTIONS = {
    # name: (the paper's operations, the paper's memory); b is 1.
    "scaled dot product": ("b h l² d", "max(b h l d, b h l²)"),
    "memory-efficient": ("b h l² d", "max(b h l d, b h l²), in parts"),
    "local (restricted), chunks of c": ("b h l c d", "max(b h l d, b h l c)"),
    "LSH, r rounds, chunks of c": ("b h r l c d", "max(b h l d, b h l r c)"),
}
LAYERS_OF_TABLE_1 = {
    # name: (the paper's operations, its sequential operations, its longest path); n positions, k columns of a kernel.
    "self-attention (ours)": ("n² d + n d²", "1", "1"),
    "self-attention (torch)": ("n² d + n d²", "1", "1"),
    "recurrent (torch's RNN)": ("n d²", "n", "n"),
    "recurrent (torch's LSTM)": ("n d²", "n", "n"),
    "convolutional (torch's Conv1d)": ("k n d²", "1", "n / k"),
    "restricted self-attention": ("r n d + n d²", "1", "n / r"),
}
KERNEL = 3
MODELS: dict[str, tuple[LayerKind, bool, int, str, str]] = {
    # name: (attention, reversible, ff_chunk_len, the paper's operations, its memory); n layers.
    "Transformer": ("full", False, 0, "(b l d_ff + b h l²) n", "max(b l d_ff, b h l²) n"),
    "Reversible Transformer": ("full", True, 0, "(b l d_ff + b h l²) n", "max(b l d_ff, b h l²)"),
    "Chunked Reversible Transformer": ("full", True, CHUNK, "(b l d_ff + b h l²) n", "max(b l d, b h l²)"),
    "LSH Transformer": ("lsh", False, 0, "(b l d_ff + b h r l c) n", "max(b l d_ff, b h l r c) n"),
    "Reformer": ("lsh", True, CHUNK, "(b l d_ff + b h r l c) n", "max(b l d, b h l r c)"),
}


@dataclass(frozen=True)
class Cost:
    """Of a forward and a backward pass."""

    flops: int
    peak: int


class Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products within a block, also in the recomputation of reversible layers, where torch's
    own counter fails.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aten, kind = torch.ops.aten, func.overloadpacket
        shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
        if kind is aten.baddbmm_:
            batch, rows, inner = shapes[1]
            self.total += 2 * batch * rows * inner * shapes[2][2]
        elif kind is aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += sdpa_flop_count(*shapes[:3])
        elif kind is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.total += sdpa_backward_flop_count(*shapes[:4])
        elif kind in flop_registry:
            self.total += flop_registry[kind](*args, **(kwargs or {}), out_val=out)
        return out


def cost(run: Callable[[], object]) -> Cost:
    """Measure `run`, which is called three times: the first call makes what stays, such as gradients of weights."""
    with modes.fast():
        run()
        _, peak = peak_bytes(run)
        with Flops() as counter:
            run()
    return Cost(int(counter.total), peak)


def attention(name: str, length: int) -> Cost:
    """Attention alone, causal: queries, keys and values of one sequence."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    settings = LSHSettings(num_hashes=ROUNDS, num_buckets=2 * length // CHUNK, chunk_len=CHUNK)
    directions = rotations(0, HEADS, HEAD_DIM, ROUNDS, settings.factors(length))

    def lsh() -> Tensor:
        return lsh_attention(q, v, hash_vectors(q, directions, settings.factors(length)), settings)

    forward: dict[str, Callable[[], Tensor]] = {
        "scaled dot product": lambda: plain_attention(q, k, v, Causal()),
        "memory-efficient": lambda: dot_product_attention(q, k, v, Causal()),
        "local (restricted), chunks of c": lambda: local_attention(q, k, v, chunk_len=CHUNK),
        "LSH, r rounds, chunks of c": lsh,
    }
    with mock.patch.object(policy, "attention_path", return_value="sdpa"):
        return cost(lambda: forward[name]().sum().backward())


def layer(name: str) -> nn.Module:
    """A layer of table 1, of width d, causal."""
    torch.manual_seed(0)
    width = HEADS * HEAD_DIM
    if name == "self-attention (torch)":
        return nn.MultiheadAttention(width, HEADS, bias=False, batch_first=True)
    if name == "convolutional (torch's Conv1d)":
        return nn.Conv1d(width, width, KERNEL)
    if name.startswith("recurrent"):
        return (nn.LSTM if "LSTM" in name else nn.RNN)(width, width, batch_first=True)
    if name == "restricted self-attention":
        return LocalSelfAttention(width, HEADS, chunk_len=CHUNK)
    return MultiHeadAttention(width, HEADS, bias=False)


def run_layer(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a layer of `layer`, (1, length, d)."""
    length = x.shape[1]
    if isinstance(module, nn.MultiheadAttention):
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        out: Tensor = module(x, x, x, attn_mask=mask, need_weights=False)[0]
    elif isinstance(module, nn.Conv1d):
        out = module(F.pad(x.transpose(1, 2), (KERNEL - 1, 0))).transpose(1, 2)
    elif isinstance(module, MultiHeadAttention):
        out = module(x, mask=Causal())[0]
    else:
        out = module(x)
        out = out[0] if isinstance(out, tuple) else out
    return out


def chain(out: Tensor) -> int:
    """Return the number of operations on the longest path from the inputs to an output, by autograd's graph."""
    lengths: dict[Any, int] = {}
    stack = [out.grad_fn]
    while stack:
        node = stack[-1]
        below = [next_node for next_node, _ in node.next_functions if next_node is not None]
        waiting = [one for one in below if one not in lengths]
        if waiting:
            stack.extend(waiting)
            continue
        lengths[stack.pop()] = 1 + max((lengths[one] for one in below), default=0)
    return lengths[out.grad_fn]


@torch.no_grad()
def layers_needed(name: str, length: int) -> int:
    """Return how many such layers the last output needs to depend on the first input."""
    module = layer(name).double()
    one = torch.randn(1, length, HEADS * HEAD_DIM, dtype=torch.float64)
    other = one.clone()
    other[0, 0] += 1
    for count in range(1, length + 1):
        one, other = run_layer(module, one), run_layer(module, other)
        if not torch.equal(one[0, -1], other[0, -1]):
            return count
        one, other = one / one.std(), other / one.std()
    return length


def layer_table(length: int) -> list[str]:
    """The rows of Vaswani et al. 2017, table 1. The path is measured at 256 positions and at twice as many."""
    rows = []
    for name, (operations, steps, path) in LAYERS_OF_TABLE_1.items():
        costs, chains = [], []
        for count in (length, 2 * length):
            module, x = layer(name), torch.randn(1, count, HEADS * HEAD_DIM, requires_grad=True)

            def both(module: nn.Module = module, x: Tensor = x) -> None:
                run_layer(module, x).sum().backward()

            # oneDNN's recurrent layer is one operation, whose products are not counted.
            torch._C._set_mkldnn_enabled(False)
            costs.append(cost(both))
            chains.append(chain(run_layer(module, x)))
            torch._C._set_mkldnn_enabled(True)
        needed = [layers_needed(name, count) for count in (256, 512)]
        one, two = costs
        flops = [f"{one.flops / 1e9:.2f}", factor(two.flops, one.flops)]
        peaks = [f"{one.peak / 2**20:.1f}", factor(two.peak, one.peak)]
        sequential = [f"{chains[0]:,}", factor(chains[1], chains[0])]
        rows.append([name, operations, *flops, *peaks, steps, *sequential, path, *map(str, needed)])
    head = ["layer", "operations", "GFLOP", "2 n", "MiB", "2 n", "sequential", "chain", "2 n"]
    return markdown_table([*head, "path", "layers at 256", "at 512"], rows)


def model(name: str, length: int, num_layers: int) -> Cost:
    """A language model over bytes with the loss of a sequence."""
    torch.manual_seed(0)
    kind, reversible, ff_chunk_len, *_ = MODELS[name]
    width = HEADS * HEAD_DIM
    config = ReformerConfig(
        vocab_size=256, d_model=width, num_heads=HEADS, d_ff=D_FF, num_layers=num_layers, layers=(kind,), dropout=0.0,
        max_len=length, chunk_len=CHUNK, num_hashes=ROUNDS, positions="sinusoidal", reversible=reversible,
        ff_chunk_len=ff_chunk_len,
    )  # fmt: skip
    built = build_model(config).train()
    ids = torch.randint(256, (1, length + 1))
    batch = SegmentBatch(
        ids[:, :-1],
        ids[:, 1:],
        torch.tensor([length]),
        torch.zeros(1, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int64),
    )
    return cost(lambda: built(batch).loss_sum.backward())


def factor(cost: int, before: int) -> str:
    return f"{cost / before:.2f}"


def attention_table(length: int) -> list[str]:
    rows = []
    for name, (time, memory) in ATTENTIONS.items():
        one, two = attention(name, length), attention(name, 2 * length)
        counts = [f"{one.flops / 1e9:.2f}", factor(two.flops, one.flops)]
        rows.append([name, time, *counts, memory, f"{one.peak / 2**20:.1f}", factor(two.peak, one.peak)])
    return markdown_table(["attention", "operations", "GFLOP", "2 l", "memory", "MiB", "2 l"], rows)


def model_table(length: int) -> list[str]:
    rows = []
    for name, (*_, time, memory) in MODELS.items():
        one = model(name, length, LAYERS)
        others = model(name, 2 * length, LAYERS), model(name, length, 2 * LAYERS)
        flops = [factor(other.flops, one.flops) for other in others]
        peaks = [factor(other.peak, one.peak) for other in others]
        rows.append([name, time, f"{one.flops / 1e9:.1f}", *flops, memory, f"{one.peak / 2**20:.1f}", *peaks])
    return markdown_table(["model", "operations", "GFLOP", "2 l", "2 n", "memory", "MiB", "2 l", "2 n"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048, help="l; it is measured at twice this length, too")
    length: int = parser.parse_args().length
    torch.set_num_threads(1)
    print(
        f"b = 1, h = {HEADS} heads of {HEAD_DIM}, l = {length:,}, c = {CHUNK}, r = {ROUNDS}; below n = {LAYERS} layers,"
        f" d = {HEADS * HEAD_DIM}, d_ff = {D_FF:,}\n"
    )
    print("\n".join([*layer_table(length // 4), "", *attention_table(length), "", *model_table(length)]))


if __name__ == "__main__":
    main()
