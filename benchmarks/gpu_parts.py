"""The parts that `gpu.py` measures. Every part returns `sides` and `ratios`, or `facts`, or `skipped` with the reason;
`error` if it failed.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_checks import ceilings, correct, has_triton, profile, tests, with_triton
from gpu_peers import (
    Decoder,
    StaticDecoder,
    TorchTransformer,
    ctranslate2,
    disentangled_flash,
    marian,
    reformer_pytorch,
    smoothed,
    static_steps,
    transfo_xl,
    x_transformers,
)
from gpu_sides import (
    BOTH,
    Maker,
    Options,
    Side,
    compare,
    count_flops,
    of_a_run,
    of_layer,
    pairs,
    random_ids,
    segments,
    spread,
    training,
    wait,
)
from torch import Tensor, nn

from manyheads.data.batch import PackedBatch, PackedShape, PairBatch
from manyheads.decoding.model_runner import pack
from manyheads.models.reformer import config as reformers
from manyheads.models.reformer.model import build as build_reformer
from manyheads.models.transformer import config as transformers
from manyheads.models.transformer.model import build as build_transformer
from manyheads.models.transformer_xl import config as xls
from manyheads.models.transformer_xl.model import build as build_xl
from manyheads.nn.attention.relative import LearnedRelativeAttention
from manyheads.nn.kernels import modes

# Tokens (words and marks) of the 17,023 sentences of WMT's newstest2009 to 2014, English and German: the middles of
# twenty classes of equally many sentences. Subwords are more; a source and a target of one class go together.
_ENGLISH = (5, 8, 10, 12, 14, 15, 17, 18, 20, 21, 23, 25, 27, 29, 31, 33, 36, 40, 46, 59)
_GERMAN = (5, 8, 10, 12, 13, 15, 16, 17, 19, 20, 22, 24, 26, 28, 30, 32, 36, 39, 45, 57)


_LIGER = "nn.Transformer, Liger's loss"

# The model of `manyheads train --preset demo` in bf16 (`tasks.translation.settings`).
DEMO = transformers.TransformerConfig(
    d_model=256, num_heads=4, d_ff=1024, num_encoder_layers=2, num_decoder_layers=2, dropout=0.0, norm_position="pre",
    positions="none", relative_bias=16,
)  # fmt: skip


def _transformer_config(size: str, options: Options) -> Any:
    vocab = 100 if options.tiny else 8000 if size == "demo" else 32_000
    config = DEMO if size == "demo" else transformers.PRESETS["debug" if options.tiny else size]
    return replace(config, source_vocab_size=vocab, target_vocab_size=vocab)


def _transformer(size: str, options: Options) -> dict[str, Any]:
    """Training on sentences of one length, without padding."""
    config = _transformer_config(size, options)
    # The tokens of the demo's run are 2,048.
    batch, length = (2, 8) if options.tiny else (128, 16) if size == "demo" else (64 if size == "big" else 128, 64)
    data = pairs(config, batch, length, length, options)
    there, tokens = data.to(options.device), batch * length
    attention = _products_of_attention(config, [(length, length)] * batch)
    makers = {
        name: _ours(config, [data], tokens, attention, options, inside, size == "demo") for name, inside in BOTH.items()
    }
    peers = {"nn.Transformer": False} | ({"nn.Transformer, compiled": True} if options.compiles else {})
    for name, compiled in peers.items():
        makers[name] = _torch_transformer(config, [there], tokens, attention, options, compiled)
    makers[_LIGER] = _torch_transformer(config, [there], tokens, attention, options, False, by_liger=True)
    makers["MarianMT"] = _marian(config, [there], tokens, attention, options)
    if size != "demo":
        makers["x-transformers"] = lambda: x_transformers(config, there, options, tokens, attention)
    return compare(makers, options)


def _products_of_attention(config: Any, sizes: list[tuple[int, int]]) -> float:
    """Multiply-adds of scores and weighted sums, d_model for each query and key, of sources and targets so long."""
    total = 0.0
    for source, target in sizes:
        queries = config.num_encoder_layers * source**2 + config.num_decoder_layers * (target**2 + source * target)
        total += 2.0 * queries * config.d_model
    return total


def _ours(
    config: Any, batches: list[Any], tokens: int, attention: float, options: Options,
    inside: Callable[[], AbstractContextManager[Any]], of_demo: bool = False,
) -> Maker:  # fmt: skip
    def make() -> Side:
        model = build_transformer(config).to(options.device)
        return of_a_run(model, batches, options, tokens, count_flops(model, tokens, attention), inside, of_demo)

    return make


def _torch_transformer(
    config: Any, batches: list[Any], tokens: int, attention: float, options: Options, compiled: bool,
    dynamic: bool = False, by_liger: bool = False,
) -> Maker:  # fmt: skip
    """Args: batches: on the device; with several, sources are padded."""

    def make() -> Side:
        longest = max(max(one.source.shape[1], one.target.shape[1]) for one in batches)
        model: Any = TorchTransformer(config, longest, len(batches) > 1, by_liger).to(options.device)
        run, turn = torch.compile(model, dynamic=dynamic) if compiled else model, itertools.cycle(batches)

        def loss() -> Tensor:
            data = next(turn)
            out: Tensor = run(data.source, data.target_input, data.target_labels)
            return out

        flops = count_flops(model, tokens, attention)
        return training("nn.Transformer", model, loss, options, tokens, flops, cycle=len(batches))

    return make


def _marian(config: Any, batches: list[Any], tokens: int, attention: float, options: Options) -> Maker:
    def make() -> Side:
        longest = max(max(one.source.shape[1], one.target.shape[1]) for one in batches)
        model, turn = marian(config, longest).to(options.device), itertools.cycle(batches)

        def loss() -> Tensor:
            data = next(turn)
            given = {"attention_mask": (data.source != 0).long()} if len(batches) > 1 else {}
            logits = model(input_ids=data.source, decoder_input_ids=data.target_input, use_cache=False, **given).logits
            return smoothed(logits, data.target_labels)

        flops = count_flops(model, tokens, attention)
        return training("MarianMT", model, loss, options, tokens, flops, cycle=len(batches))

    return make


def _real(options: Options) -> dict[str, Any]:
    """Training on sentences of many lengths: padded, as peers do, and packed. Tokens are real ones of the target.

    A peer is compiled for any shape, or for few: batches padded to multiples of 16.
    """
    config = _transformer_config("base", options)
    many, slots = (24, 128) if options.tiny else (8192, 8192)
    lengths = real_lengths(many)
    padded, packed, buckets = (
        [_pairs_of(config, lengths[rows], options) for rows in kind] for kind in cut_batches(lengths, slots)
    )
    buckets = [_padded_to(one, -(-max(one.source.shape[1], one.target.shape[1] - 1) // 16) * 16) for one in buckets]
    shape = PackedShape(slots, slots, max(len(one.sample_ids) for one in packed), 64)
    filled = PackedBatch.of(packed[0], shape)
    facts = {
        "lengths": f"{len(padded)} batches of {slots} slots, as in newstest2009 to 2014 (en-de), in words and marks;"
        " the words are random",
        "filled": f"{_filled(padded):.0%} padded, {_filled(buckets):.0%} in buckets,"
        f" {sum(one.num_target_tokens() for one in packed) / len(packed) / filled.target_input.numel():.0%} packed",
    }
    makers: dict[str, Maker] = {}
    for name, inside in BOTH.items():
        makers[name] = _ours(config, padded, *_sizes(config, padded), options, inside)
    sizes = _sizes(config, packed)
    in_one = [PackedBatch.of(one, shape) for one in packed]
    makers["ours, fewer launches, packed"] = _ours(config, in_one, *sizes, options, modes.saving_launches)
    there, sizes = [one.to(options.device) for one in padded], _sizes(config, padded)
    makers["nn.Transformer"] = _torch_transformer(config, there, *sizes, options, compiled=False)
    makers[_LIGER] = _torch_transformer(config, there, *sizes, options, compiled=False, by_liger=True)
    if options.compiles:
        of_buckets = [one.to(options.device) for one in buckets]
        makers["nn.Transformer, compiled"] = _torch_transformer(config, there, *sizes, options, True, dynamic=True)
        makers["nn.Transformer, compiled, buckets"] = _torch_transformer(
            config, of_buckets, *_sizes(config, buckets), options, compiled=True
        )
    makers["MarianMT"] = _marian(config, there, *sizes, options)
    return {**compare(makers, options), "facts": facts}


def real_lengths(many: int) -> Tensor:
    """Return the tokens of sources and targets of sentences as in newstest, always the same. (many, 2)"""
    generator = np.random.default_rng(0)
    places = generator.random(many) * len(_ENGLISH) - 0.5  # between the middles of classes
    other = places + generator.normal(size=many) * 1.5
    middles = np.arange(len(_ENGLISH))
    found = [np.interp(places, middles, _ENGLISH), np.interp(other, middles, _GERMAN)]
    return torch.from_numpy(np.stack(found, 1).round()).long()


def cut_batches(lengths: Tensor, slots: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return which sentences, sorted by length, each batch has: padded, packed, and padded to multiples of 16.

    Args: slots: of each side of a batch, padding and, of packed ones, filler included.
    """
    longest = lengths.amax(1)
    order = torch.argsort(longest, stable=True)
    padded: list[list[int]] = [[]]
    packed: list[list[int]] = [[]]
    buckets: dict[int, list[list[int]]] = {}
    room = slots - -(-slots // 64)  # see `PackedShape.num_fillers`
    for number in order.tolist():
        if (len(padded[-1]) + 1) * int(longest[number]) > slots:
            padded.append([])
        padded[-1].append(number)
        if int(lengths[[*packed[-1], number]].sum(0).max()) > room:
            packed.append([])
        packed[-1].append(number)
        size = -(-int(longest[number]) // 16) * 16
        of_size = buckets.setdefault(size, [[]])
        if len(of_size[-1]) == slots // size:
            of_size.append([])
        of_size[-1].append(number)
    # The last batch of each is not full.
    full = [one for size, batches in buckets.items() for one in batches if len(one) == slots // size]
    kinds = [[torch.tensor(one) for one in kind] for kind in (padded[:-1], packed[:-1], full)]
    return kinds[0], kinds[1], kinds[2]


def _pairs_of(config: Any, lengths: Tensor, options: Options) -> PairBatch:
    """Return random sentences of these lengths, on the CPU."""
    source, target = lengths.amax(0).tolist()
    batch = pairs(config, len(lengths), source, target, options)
    for ids, own in ((batch.source, lengths[:, 0]), (batch.target, lengths[:, 1] + 1)):
        ids[torch.arange(ids.shape[1]) >= own[:, None]] = 0
    return replace(batch, source_lengths=lengths[:, 0], target_lengths=lengths[:, 1] + 1)


def _padded_to(batch: PairBatch, length: int) -> PairBatch:
    source, target = F.pad(batch.source, (0, length - batch.source.shape[1])), batch.target
    return replace(batch, source=source, target=F.pad(target, (0, length + 1 - target.shape[1])))


def _filled(batches: list[PairBatch]) -> float:
    """Return which part of the target's cells are tokens."""
    return sum(one.num_target_tokens() for one in batches) / sum(one.target_labels.numel() for one in batches)


def _sizes(config: Any, batches: list[PairBatch]) -> tuple[int, float]:
    """Return the real target tokens of a step, and the products of their attention."""
    tokens = sum(one.num_target_tokens() for one in batches) // len(batches)
    each = [
        (source, target - 1)
        for one in batches
        for source, target in zip(one.source_lengths.tolist(), one.target_lengths.tolist(), strict=True)
    ]
    return tokens, _products_of_attention(config, each) / len(batches)


def _with_decoders(makers: dict[str, Maker], config: Any, data: Any, options: Options, name: str) -> dict[str, Maker]:
    """Return the sides with a decoder of the same widths around causal SDPA, eager and compiled."""
    batch, length = data.tokens.shape
    there = data.to(options.device)

    def decoder(compiled: bool) -> Maker:
        def make() -> Side:
            width = (config.d_model, config.num_heads, config.d_ff, config.num_layers, config.vocab_size, length)
            model = Decoder(*width).to(options.device)
            products = 2.0 * config.num_layers * batch * length**2 * config.d_model
            flops = count_flops(model, batch * length, products, [model.embedding.weight, model.positions])
            run: Any = torch.compile(model) if compiled else model
            loss = lambda: run(there.tokens, there.targets)  # noqa: E731
            return training(name, model, loss, options, batch * length, flops)

        return make

    kinds = {name: False, f"{name}, compiled": True} if options.compiles else {name: False}
    return {**makers, **{one: decoder(compiled) for one, compiled in kinds.items()}}


def _xl_config(preset: str, options: Options) -> Any:
    config = xls.PRESETS["debug" if options.tiny else preset]
    # The decoder has no dropout, so no side has.
    return replace(config, vocab_size=32 if options.tiny else 204, dropout=0.0, attention_dropout=0.0)


def _xl(preset: str, options: Options) -> dict[str, Any]:
    """A model for enwik8 with a full memory, by each implementation of relative attention."""
    config = _xl_config(preset, options)
    rows = {"enwik8-base": 22, "enwik8-large": 4}[preset]
    batch, length = (2, config.memory_len) if options.tiny else (rows, config.memory_len)
    data = segments(batch, length, config.vocab_size, options)
    tokens, inner = batch * length, config.num_heads * config.width_of_heads
    keys = length + config.memory_len
    # Scores by content and by distance, and the sums of values.
    attention = 3.0 * config.num_layers * batch * length * keys * inner
    # Keys and values of the memory, and the vectors of distances, need no gradient of their inputs: 4 and not 6.
    rows = 2 * batch * config.memory_len + keys
    attention += config.num_layers * config.d_model * inner * rows * 4 / 6

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            model = build_xl(config).to(options.device)
            of_distances = [p for name, p in model.named_parameters() if "position_proj" in name]
            flops = count_flops(model, tokens, attention, of_distances)
            return of_a_run(model, [data], options, tokens, flops, inside)

        return make

    makers = {name: ours(inside) for name, inside in BOTH.items()}
    if has_triton(options):
        makers["ours, Triton"] = ours(with_triton)
    makers = _with_decoders(makers, config, data, options, "SDPA decoder without memory")
    makers["TransfoXL, TF32"] = lambda: transfo_xl(config, data.to(options.device), options)
    return compare(makers, options)


def _attention(options: Options) -> dict[str, Any]:
    """A layer of self-attention with a vector for each distance, both ways, forward and backward pass."""
    rows, length, heads = (2, 16, 2) if options.tiny else (16, 1024, 12)
    width = heads * (8 if options.tiny else 64)
    shape = rows, length, width

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            layer = LearnedRelativeAttention(width, heads, max_len=length, num_future=length - 1)
            layer.to(options.device, options.dtype)

            def run(x: Tensor) -> Tensor:
                with inside():
                    out: Tensor = layer(x)
                    return out

            return of_layer("ours", layer, run, shape, options, ours=True)

        return make

    def exact() -> Side:
        """The same maps around SDPA, which knows no distances: what they cost."""
        maps = nn.ModuleList([nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)])
        maps = maps.to(options.device, options.dtype)

        def run(x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in maps[0](x).chunk(3, dim=-1))
            out: Tensor = maps[1](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return out

        return of_layer("SDPA without distances", maps, run, shape, options)

    makers = {name: ours(inside) for name, inside in BOTH.items()}
    if has_triton(options):
        makers["ours, Triton"] = ours(with_triton)
    makers |= {"SDPA without distances": exact}
    makers["disentangled-flash"] = lambda: disentangled_flash(*shape, heads, options)
    return compare(makers, options)


def _reformer(length: int, options: Options) -> dict[str, Any]:
    """One sequence a step; beside it exact attention of the same widths."""
    if options.tiny:
        config = replace(reformers.PRESETS["debug"], vocab_size=32)
        length = config.max_len
    else:
        config = replace(reformers.PRESETS["small"], vocab_size=256, max_len=length)
    data = segments(1, length, config.vocab_size, options)

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        return lambda: of_a_run(build_reformer(config).to(options.device), [data], options, length, 0.0, inside)

    makers = {name: ours(inside) for name, inside in BOTH.items()}
    if has_triton(options):
        makers["ours, Triton"] = ours(with_triton)
    makers = _with_decoders(makers, config, data, options, "SDPA decoder")
    if options.tiny or length <= 65_536:
        makers["reformer-pytorch"] = lambda: reformer_pytorch(config, data.to(options.device), options)
    return compare(makers, options)


def _decoding(beams: int, options: Options) -> dict[str, Any]:
    """A search in bfloat16 with random weights, every sentence to the full length; with and without `--compile`.

    A step of `Side` is one batch, whose tokens are all that it wrote. A side named `steps` takes the most probable
    token and reads nothing, as the static cache does.
    """
    config = _transformer_config("base", options)
    batch, source_len, length = (2, 5, 4) if options.tiny else (64 if beams == 1 else 32, 32, 64)
    source = random_ids((batch, source_len), config.source_vocab_size, options)
    lengths = torch.full((batch,), source_len, device=options.device)

    def ours(is_search: bool, compiled: bool, inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            torch.manual_seed(0)
            model = build_transformer(config).to(options.device, torch.bfloat16).eval()
            steps: Any = model
            with inside():
                pack(model)
                if compiled:
                    from manyheads.decoding.model_runner import CompiledSteps

                    steps = CompiledSteps(model)
            run = _search(steps, source, lengths, beams, length) if is_search else lambda: _steps(steps, length)

            def step() -> None:
                with torch.inference_mode(), modes.fast(), inside():
                    run()

            return Side("search", step, batch * length, 0.0, ours=True)

        def _steps(steps: Any, length: int) -> None:
            tokens, state = torch.full((batch, 1), 1, device=options.device), steps.start(source, lengths)
            for _ in range(length):
                log_probs, state = steps.step(tokens, state)
                tokens = log_probs.argmax(dim=-1, keepdim=True)

        return make

    def static(compiled: bool) -> Maker:
        widths = (config.d_model, config.num_heads, config.d_ff, config.num_decoder_layers, config.target_vocab_size)
        decoder = lambda: StaticDecoder(*widths, batch * beams, length, source_len)  # noqa: E731
        return lambda: static_steps(decoder(), options, batch, 0, length, compiled)

    def of_marian() -> Side:
        model = marian(config, length + 2).to(options.device, torch.bfloat16).eval()
        numbers = {"max_new_tokens": length, "min_new_tokens": length, "num_beams": beams}
        step = torch.no_grad()(lambda: model.generate(source, do_sample=False, **numbers))
        return Side("MarianMT", step, batch * length)

    makers = {f"{name}, search": ours(True, False, inside) for name, inside in BOTH.items()}
    if beams == 1:
        makers |= {f"{name}, steps": ours(False, False, inside) for name, inside in BOTH.items()}
    if options.compiles:
        makers["ours, compiled, search"] = ours(True, True, BOTH["ours, plain"])
        makers["static cache, compiled"] = static(True)
    makers |= {"static cache": static(False), "MarianMT": of_marian}
    makers["CTranslate2"] = lambda: ctranslate2(build_transformer(config), source, beams, length, options)
    return compare(makers, options)


def _search(steps: Any, source: Tensor, lengths: Tensor, beams: int, length: int) -> Callable[[], Any]:
    from manyheads.decoding.search import search_steps
    from manyheads.decoding.search_problem import run_to_end
    from manyheads.decoding.settings import DecodingSettings

    settings = DecodingSettings(num_beams=beams, max_new_tokens=length + 1, min_new_tokens=length)
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    return lambda: run_to_end(search_steps(steps, source, lengths, settings, **ids))


def _generate(options: Options) -> dict[str, Any]:
    """Greedy continuations of the Transformer-XL for enwik8, 1 and 32 rows, each token read by the host."""
    config = replace(xls.PRESETS["debug" if options.tiny else "enwik8-base"], vocab_size=204)
    first, length = (8, 4) if options.tiny else (512, 64)

    def ours(rows: int, inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            model = build_xl(config).to(options.device, torch.bfloat16).eval()
            prompt = random_ids((rows, first), config.vocab_size, options)
            with torch.inference_mode(), modes.fast(), inside():
                pack(model)
                _, begun = model.step(prompt, model.start(rows))

            def step() -> None:
                with torch.inference_mode(), modes.fast(), inside():
                    state, tokens = begun.clone(), prompt[:, -1:]
                    for _ in range(length):
                        log_probs, state = model.step(tokens, state)
                        tokens = log_probs.argmax(dim=-1, keepdim=True)
                        tokens.tolist()

            return Side("generate", step, rows * length, 0.0, ours=True)

        return make

    def static(rows: int, compiled: bool) -> Maker:
        widths = (config.d_model, config.num_heads, config.d_ff, config.num_layers, config.vocab_size)
        width = (config.num_heads * config.width_of_heads, *widths[1:]) if options.tiny else widths
        return lambda: static_steps(StaticDecoder(*width, rows, first + length), options, rows, first, length, compiled)

    found: dict[str, Any] | None = None
    half = replace(options, limit=options.limit / 2)
    for rows in (1, 32):
        makers = {f"{name}, {rows} rows": ours(rows, inside) for name, inside in BOTH.items()}
        kinds = {"static cache": False, "static cache, compiled": True} if options.compiles else {"static cache": False}
        makers |= {f"{name}, {rows} rows": static(rows, compiled) for name, compiled in kinds.items()}
        if not options.only or options.only in makers:
            found = compare(makers, half, found)
    assert found is not None
    return found


def _ddp(options: Options) -> dict[str, Any]:
    """The base model on one GPU alone and on all of them, in turn, with the same batch on each."""
    ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    if ranks < 2:
        return {"skipped": "this machine has one GPU"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, options, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads((Path(folder) / "rank0.json").read_text(encoding="utf-8"))
    return found


def _rank(rank: int, ranks: int, options: Options, folder: str) -> None:
    """One process of `_ddp`; the first writes the result."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    init = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("nccl" if cuda else "gloo", init_method=init, rank=rank, world_size=ranks)
    try:
        config = _transformer_config("base", options)
        batch, length = (2, 8) if options.tiny else (128, 64)
        data = pairs(config, batch, length, length, options).to(options.device)
        models = {"one GPU": build_transformer(config).to(options.device)}
        together = build_transformer(config).to(options.device)
        models[f"{ranks} GPUs"] = nn.parallel.DistributedDataParallel(together, device_ids=[rank] if cuda else None)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        steps, sides = 1 if options.tiny else 40, {}
        for name, model in models.items():

            def loss(model: nn.Module = model) -> Tensor:
                output = model(data, label_smoothing=0.1)
                loss: Tensor = output.loss_sum / output.num_tokens
                return loss

            sides[name] = training(name, model, loss, options, batch * length, 0.0)
        for number in range(options.rounds + 1):  # the first one warms up
            for name, side in sides.items():
                dist.barrier()
                wait(options)
                began = time.perf_counter()
                if rank == 0 or name != "one GPU":
                    for _ in range(steps):
                        side.step()
                wait(options)
                if number or options.tiny:
                    seconds[name].append((time.perf_counter() - began) / steps)
        if rank == 0:
            alone, all_of_them = seconds["one GPU"], seconds[f"{ranks} GPUs"]
            found = {
                "sides": {
                    name: {
                        "step_seconds": spread(seconds[name]),
                        "tokens_per_second": spread([count * batch * length / one for one in seconds[name]]),
                    }
                    for name, count in zip(models, (1, ranks), strict=True)
                },
                "ratios": {
                    f"{ranks} GPUs / one GPU": spread([ranks * a / b for a, b in zip(alone, all_of_them, strict=True)])
                },
            }
            (Path(folder) / "rank0.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "ceilings": ceilings,
    "correct": correct,
    "tests": lambda options: tests(options, "not slow"),
    "profile-base": lambda options: profile("base", _transformer_config("base", options), options),
    "profile-demo": lambda options: profile("demo", _transformer_config("demo", options), options),
    "profile-xl": lambda options: profile("xl", _xl_config("enwik8-base", options), options),
    "base-real": _real,
    "demo": lambda options: _transformer("demo", options),
    "xl": lambda options: _xl("enwik8-base", options),
    "decode-greedy": lambda options: _decoding(1, options),
    "reformer-64k": lambda options: _reformer(65_536, options),
    "base": lambda options: _transformer("base", options),
    "big": lambda options: _transformer("big", options),
    "xl-large": lambda options: _xl("enwik8-large", options),
    "attention": _attention,
    "reformer-16k": lambda options: _reformer(16_384, options),
    "reformer-256k": lambda options: _reformer(262_144, options),
    "decode-beam4": lambda options: _decoding(4, options),
    "generate": _generate,
    "tests-slow": lambda options: tests(options, "slow"),
    "ddp": _ddp,
}

FIRST = [
    "ceilings", "correct", "tests", "profile-base", "profile-demo", "profile-xl", "base-real", "demo", "xl",
    "decode-greedy", "reformer-64k",
]  # fmt: skip
"""The most important parts, in their order."""

# With less time than this no part begins. Guesses, since no GPU has run them: to start, to build the sides (of which
# those that torch compiles have been compiled before), and two rounds of 3 s for each.
LEAST_SECONDS = dict.fromkeys(PARTS, 45) | {"ceilings": 25, "tests": 40, "base-real": 60, "xl": 50, "decode-greedy": 55}
LEAST_SECONDS |= dict.fromkeys(("profile-base", "profile-demo", "profile-xl"), 30)

_SDPA = "SDPA decoder, compiled"
_STATIC = "static cache, compiled"
COMPILED: dict[str, list[str]] = {
    "base-real": ["nn.Transformer, compiled", "nn.Transformer, compiled, buckets"],
    **{name: ["nn.Transformer, compiled"] for name in ("demo", "base", "big")},
    **{name: ["SDPA decoder without memory, compiled"] for name in ("xl", "xl-large")},
    **{name: [_SDPA] for name in ("reformer-16k", "reformer-64k", "reformer-256k")},
    **{name: ["ours, compiled, search", _STATIC] for name in ("decode-greedy", "decode-beam4")},
    "generate": [f"{_STATIC}, {rows} rows" for rows in (1, 32)],
}
"""The sides of each part that torch compiles."""
