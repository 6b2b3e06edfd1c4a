"""The parts that `gpu.py` measures. Every part returns `sides` and `ratios`, or `facts`, or `skipped` with the reason;
`error` if it failed.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_sides import (
    BOTH,
    Decoder,
    Maker,
    Options,
    Side,
    StaticDecoder,
    TorchTransformer,
    compare,
    count_flops,
    of_a_run,
    pairs,
    random_ids,
    segments,
    spread,
    static_steps,
    training,
    wait,
)
from torch import Tensor, nn

from manyheads.decoding.model_runner import pack
from manyheads.models.reformer import config as reformers
from manyheads.models.reformer.model import build as build_reformer
from manyheads.models.transformer import config as transformers
from manyheads.models.transformer.model import build as build_transformer
from manyheads.models.transformer_xl import config as xls
from manyheads.models.transformer_xl.model import build as build_xl
from manyheads.nn.attention.local import local_attention
from manyheads.nn.attention.lsh import LSHSettings, lsh_attention
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.relative import relative_attention

# Tokens (words and marks) of the 17,023 sentences of WMT's newstest2009 to 2014, English and German: the middles of
# twenty classes of equally many sentences. Subwords are more; a source and a target of one class go together.
_ENGLISH = (5, 8, 10, 12, 14, 15, 17, 18, 20, 21, 23, 25, 27, 29, 31, 33, 36, 40, 46, 59)
_GERMAN = (5, 8, 10, 12, 13, 15, 16, 17, 19, 20, 22, 24, 26, 28, 30, 32, 36, 39, 45, 57)


# The model of `manyheads train --preset demo` in bf16 (`tasks.presets`).
DEMO = transformers.TransformerConfig(
    d_model=256, num_heads=4, d_ff=1024, num_encoder_layers=2, num_decoder_layers=2, dropout=0.0, norm_position="pre",
    positions="none", relative_bias=16,
)  # fmt: skip


def _transformer_config(size: str, options: Options) -> Any:
    vocab = 100 if options.tiny else 8000 if size == "demo" else 32_000
    config = DEMO if size == "demo" else transformers.PRESETS["debug" if options.tiny else size]
    return replace(config, source_vocab_size=vocab, target_vocab_size=vocab)


def _transformer(size: str, options: Options, is_real: bool = False) -> dict[str, Any]:
    """Training on sentences of one length, without padding; is_real: of many lengths, each batch of one."""
    config = _transformer_config(size, options)
    # The tokens of the demo's run are 2,048.
    batch, length = (2, 8) if options.tiny else (128, 16) if size == "demo" else (64 if size == "big" else 128, 64)
    sizes, facts = [(length, length)], {}
    if is_real:
        classes = list(zip(_ENGLISH, _GERMAN, strict=True))
        sizes = [classes[number * 7 % len(classes)] for number in range(3 if options.tiny else len(classes))]
        facts["lengths"] = (
            f"{len(sizes)} batches, sources of {', '.join(str(one) for one, _ in sizes)} tokens: a twentieth of"
            " newstest2009 to 2014 (en-de) each, in words and marks; the words are random"
        )
    rows = [max(1, batch * length // max(size)) for size in sizes]
    batches = [pairs(config, many, *size, options) for many, size in zip(rows, sizes, strict=True)]
    on_device = [one.to(options.device) for one in batches]
    tokens = sum(one.target_input.numel() for one in batches) // len(batches)
    # Of the encoder, the decoder and between them: scores and sums, d_model multiply-adds for each query and key.
    attention = 0.0
    for many, (source, target) in zip(rows, sizes, strict=True):
        queries = config.num_encoder_layers * source**2 + config.num_decoder_layers * (target**2 + source * target)
        attention += 2.0 * many * queries * config.d_model / len(sizes)
    longest = max(max(size) for size in sizes)

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            model = build_transformer(config).to(options.device)
            flops = count_flops(model, tokens, attention)
            return of_a_run(model, batches, options, tokens, flops, inside, of_demo=size == "demo")

        return make

    def torch_transformer(compiled: bool) -> Maker:
        def make() -> Side:
            model: Any = TorchTransformer(config, longest).to(options.device)
            flops = count_flops(model, tokens, attention)
            run, turn = torch.compile(model, dynamic=is_real) if compiled else model, itertools.cycle(on_device)

            def loss() -> Tensor:
                data = next(turn)
                out: Tensor = run(data.source, data.target_input, data.target_labels)
                return out

            return training("nn.Transformer", model, loss, options, tokens, flops, ours=False)

        return make

    def marian() -> Side:
        model, turn = _marian(config, longest).to(options.device), itertools.cycle(on_device)

        def loss() -> Tensor:
            data = next(turn)
            logits = model(input_ids=data.source, decoder_input_ids=data.target_input, use_cache=False).logits
            labels = data.target_labels.flatten()
            return F.cross_entropy(logits.flatten(0, 1).float(), labels, label_smoothing=0.1)

        flops = count_flops(model, tokens, attention)
        return training("MarianMT", model, loss, options, tokens, flops, ours=False)

    makers: dict[str, Maker] = {name: ours(inside) for name, inside in BOTH.items()}
    makers["nn.Transformer"] = torch_transformer(False)
    if options.compiles:
        makers["nn.Transformer, compiled"] = torch_transformer(True)
    return {**compare({**makers, "MarianMT": marian}, options), "facts": facts}


def _marian(config: Any, length: int) -> Any:
    """A MarianMT of the same widths, for sentences of that length."""
    from transformers import MarianConfig, MarianMTModel

    sizes = {
        f"{side}_{name}": value
        for side, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers))
        for name, value in (("layers", layers), ("attention_heads", config.num_heads), ("ffn_dim", config.d_ff))
    }
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 1}
    return MarianMTModel(
        MarianConfig(
            vocab_size=config.target_vocab_size, d_model=config.d_model, dropout=config.dropout,
            activation_function="relu", max_position_embeddings=max(length, 64), scale_embedding=True, **sizes, **ids,
        )
    )  # fmt: skip


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
            return training(name, model, loss, options, batch * length, flops, ours=False)

        return make

    kinds = {name: False, f"{name}, compiled": True} if options.compiles else {name: False}
    return {**makers, **{one: decoder(compiled) for one, compiled in kinds.items()}}


def _xl(preset: str, options: Options) -> dict[str, Any]:
    """A model for enwik8 with a full memory, by each implementation of relative attention."""
    config = xls.PRESETS["debug" if options.tiny else preset]
    # The decoder has no dropout, so no side has.
    config = replace(config, vocab_size=32 if options.tiny else 204, dropout=0.0, attention_dropout=0.0)
    rows = {"enwik8-base": 22, "enwik8-large": 4}[preset]
    batch, length = (2, config.memory_len) if options.tiny else (rows, config.memory_len)
    data = segments(batch, length, config.vocab_size, options)
    tokens, inner = batch * length, config.num_heads * config.width_of_heads
    keys = length + config.memory_len
    # Scores by content and by distance, and the sums of values.
    attention = 3.0 * config.num_layers * batch * length * keys * inner

    def ours(inside: Callable[[], AbstractContextManager[Any]]) -> Maker:
        def make() -> Side:
            model = build_xl(config).to(options.device)
            return of_a_run(model, [data], options, tokens, count_flops(model, tokens, attention), inside)

        return make

    makers = {name: ours(inside) for name, inside in BOTH.items()}
    if policy.triton_lack(torch.device(options.device), torch.bfloat16) is None:
        makers["ours, Triton"] = ours(modes.using_triton)
    return compare(_with_decoders(makers, config, data, options, "SDPA decoder without memory"), options)


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
    return compare(_with_decoders(makers, config, data, options, "SDPA decoder"), options)


def _ceilings(options: Options) -> dict[str, Any]:
    """Products, copies in memory (bytes/s are 2 x its bytes) and a launch: what no step can pass."""
    size = 1 << (10 if options.tiny else 28)
    one = torch.zeros(size, device=options.device)
    other, small = torch.empty_like(one), torch.zeros(1, device=options.device)
    made: dict[str, Maker] = {
        "copy": lambda: Side("copy", lambda: other.copy_(one), tokens=2 * one.nbytes),
        "launch": lambda: Side("launch", lambda: small.add_(1)),
    }
    return compare(made, options)


def _profile(name: str, options: Options) -> dict[str, Any]:
    """Kernels of a step, the share of time in which the device computes, its longest kernels, and waits."""
    if name == "xl":
        config: Any = replace(xls.PRESETS["debug" if options.tiny else "enwik8-base"], vocab_size=204)
        model: nn.Module = build_xl(config).to(options.device)
        batch: Any = segments(2 if options.tiny else 22, 8 if options.tiny else 512, 204, options)
    else:
        config = _transformer_config(name, options)
        model = build_transformer(config).to(options.device)
        batch = pairs(
            config, *((2, 8, 8) if options.tiny else (128, 16, 16) if name == "demo" else (128, 64, 64)), options
        )
    side, steps = of_a_run(model, [batch], options, 0, 0.0, of_demo=name == "demo"), 2 if options.tiny else 10
    for _ in range(3):
        side.step()
    wait(options)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + (options.device != "cpu")]
    with torch.profiler.profile(activities=kinds) as profile:
        began = time.perf_counter()
        for _ in range(steps):
            side.step()
        wait(options)
        spent = time.perf_counter() - began
    return {"facts": _facts_of(profile.events(), steps, spent)}


def _facts_of(events: Any, steps: int, spent: float) -> dict[str, Any]:
    """What a profile says of a step. A range that a user has named is no kernel, and the last wait is the profile's."""
    on_device = [
        one
        for one in events
        if one.device_type != torch.autograd.DeviceType.CPU and not getattr(one, "is_user_annotation", False)
    ]
    by_name: dict[str, float] = {}
    for one in on_device:
        by_name[one.name] = by_name.get(one.name, 0.0) + one.time_range.elapsed_us() / steps
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:10]
    synchronised = sum("Synchronize" in one.name for one in events) - 1
    # On a CPU nothing waits; what would wait for a GPU is the reading of a number.
    waits = synchronised if on_device else sum(one.name == "aten::_local_scalar_dense" for one in events)
    facts = {
        "ms a step, profiled": round(1e3 * spent / steps, 3),
        "kernels a step": len(on_device) / steps,
        "busy share": round(sum(by_name.values()) * steps / 1e6 / spent, 3),
        "waits a step": max(0, waits) / steps,
    }
    return {**facts, **{f"us in {kernel[:80]}": round(us, 1) for kernel, us in longest}}


def _correct(options: Options) -> dict[str, Any]:
    """Errors against float64, and against those of the formula in the same type; any above its limit fails the part."""
    torch.manual_seed(0)
    device, facts, failed = torch.device(options.device), {}, []
    has_triton = policy.triton_lack(device, torch.bfloat16) is None
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "default": modes.fast, "fewer launches": lambda: _both(modes.fast(), modes.saving_launches()),
    }  # fmt: skip
    if has_triton:
        ways["Triton"] = lambda: _both(modes.fast(), modes.using_triton())
    else:
        facts["Triton"] = f"left out: it {policy.triton_lack(device, torch.bfloat16)}"

    def compare(what: str, run: Callable[..., Tensor], given: list[Tensor]) -> None:
        def results(inputs: list[Tensor]) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = run(*leaves)
            factor = torch.sin(torch.arange(out.numel(), device=device)).view(out.shape)
            return [out.detach(), *torch.autograd.grad((out * factor.to(out.dtype)).sum(), leaves)]

        with modes.fast(False):
            true, rough = results([x.double() for x in given]), results(given)
        for way, inside in ways.items():
            with inside():
                found = results(given)
            for number, (mine, plain, exact) in enumerate(zip(found, rough, true, strict=True)):
                size = exact.norm().clamp(min=1e-30)
                error, allowed = ((x.double() - exact).norm() / size for x in (mine, plain))
                passed = bool(mine.isfinite().all()) and float(error) <= 2 * float(allowed) + 1e-3
                facts[f"{what}, {way}, {number or 'output'}"] = f"{float(error):.2e}, plain {float(allowed):.2e}"
                failed.extend([] if passed else [f"{what}, {way}, {number or 'output'}"])
            del found

    rows, heads, q_len, k_len, width = (2, 2, 8, 16, 8) if options.tiny else (22, 8, 512, 1024, 64)
    shapes = [(rows, heads, q_len, width), (rows, heads, k_len, width), (rows, heads, k_len, width)]
    shapes += [(heads, k_len, width), (heads, width), (heads, width)]
    given = [torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes]
    compare("relative attention", relative_attention, given)
    shape = (2, heads, 40 if options.tiny else 16_384, width)
    given = [torch.randn(shape, device=device).bfloat16() for _ in range(3)]
    compare("local attention", partial(local_attention, chunk_len=16 if options.tiny else 128), given)
    hashing = LSHSettings(chunk_len=8 if options.tiny else 64)
    buckets = torch.randint(0, 4 if options.tiny else 256, (*shape[:2], 4, shape[2]), device=device)
    compare("hashed attention", partial(lsh_attention, buckets=buckets, settings=hashing), given[:2])
    del given
    tokens, size, vocab = (8, 16, 50) if options.tiny else (8192, 512, 32_000)
    head = LinearHead(size, vocab, bias=False).to(device)
    targets = torch.randint(1, vocab, (1, tokens), device=device)
    keep = torch.arange(tokens, device=device)[None] % 7 > 0

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        call = lambda *inputs: head.loss(*inputs, label_smoothing=0.1)  # noqa: E731
        found: Tensor = _with_weight(head, weight, lambda: call(hidden, targets, keep)[0])
        return found / tokens

    compare("loss", loss, [torch.randn(1, tokens, size, device=device).bfloat16(), head.weight.detach().bfloat16()])
    return {"facts": facts, **({"error": "wrong: " + "; ".join(failed)} if failed else {})}


def _with_weight(head: LinearHead, weight: Tensor, call: Callable[[], Tensor]) -> Tensor:
    before = head.weight
    del head._parameters["weight"]
    head.weight = weight  # type: ignore[assignment]
    try:
        return call()
    finally:
        del head.weight
        head.weight = before


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


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

    def marian() -> Side:
        model = _marian(config, length + 2).to(options.device, torch.bfloat16).eval()
        numbers = {"max_new_tokens": length, "min_new_tokens": length, "num_beams": beams}
        step = torch.no_grad()(lambda: model.generate(source, do_sample=False, **numbers))
        return Side("MarianMT", step, batch * length)

    makers = {f"{name}, search": ours(True, False, inside) for name, inside in BOTH.items()}
    if beams == 1:
        makers |= {f"{name}, steps": ours(False, False, inside) for name, inside in BOTH.items()}
    if options.compiles:
        makers["ours, compiled, search"] = ours(True, True, BOTH["ours, plain"])
        makers["static cache, compiled"] = static(True)
    return compare({**makers, "static cache": static(False), "MarianMT": marian}, options)


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

    found: dict[str, Any] = {"sides": {}, "ratios": {}}
    for rows in (1, 32):
        makers = {f"{name}, {rows} rows": ours(rows, inside) for name, inside in BOTH.items()}
        kinds = {"static cache": False, "static cache, compiled": True} if options.compiles else {"static cache": False}
        makers |= {f"{name}, {rows} rows": static(rows, compiled) for name, compiled in kinds.items()}
        for kind, values in compare(makers, replace(options, limit=options.limit / 2)).items():
            found[kind] |= values
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

            sides[name] = training(name, model, loss, options, batch * length, 0.0, ours=False)
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
    "ceilings": _ceilings,
    "correct": _correct,
    "profile-base": lambda options: _profile("base", options),
    "profile-demo": lambda options: _profile("demo", options),
    "profile-xl": lambda options: _profile("xl", options),
    "base": lambda options: _transformer("base", options),
    "base-real": lambda options: _transformer("base", options, is_real=True),
    "demo": lambda options: _transformer("demo", options),
    "big": lambda options: _transformer("big", options),
    "xl": lambda options: _xl("enwik8-base", options),
    "xl-large": lambda options: _xl("enwik8-large", options),
    "reformer-16k": lambda options: _reformer(16_384, options),
    "reformer-64k": lambda options: _reformer(65_536, options),
    "reformer-256k": lambda options: _reformer(262_144, options),
    "decode-greedy": lambda options: _decoding(1, options),
    "decode-beam4": lambda options: _decoding(4, options),
    "generate": _generate,
    "ddp": _ddp,
}

FIRST = [
    "ceilings", "correct", "profile-base", "profile-demo", "profile-xl", "base-real", "demo", "xl", "decode-greedy",
    "reformer-64k",
]  # fmt: skip
"""The most important parts, in their order."""

# With less time than this no part begins. Guesses, since no GPU has run them: five sides of 3 s, their start, and where
# something is compiled its compilation.
LEAST_SECONDS = dict.fromkeys(PARTS, 45) | {"ceilings": 30, "base-real": 75, "xl": 75, "decode-greedy": 75}
