"""The parts of `gpu.py` that do not compare with peers: ceilings of the card, profiles, and whether results are right.

`correct` compares with float64 at the sizes of training; what it shows is the condition for a line of
`policy._PROVEN` or `policy._PROVEN_TRITON`, which it prints.
"""

from __future__ import annotations

import copy
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gpu_sides import BOTH, Maker, Options, Side, compare, of_a_run, pairs, reason, report, segments, train_step, wait
from torch import Tensor, nn

from manyheads.data.batch import PackedBatch
from manyheads.decoding.model_runner import pack
from manyheads.models.reformer import config as reformers
from manyheads.models.reformer.model import build as build_reformer
from manyheads.models.transformer import config as transformers
from manyheads.models.transformer.model import build as build_transformer
from manyheads.models.transformer_xl import config as xls
from manyheads.models.transformer_xl.model import build as build_xl
from manyheads.nn.attention.local import local_attention
from manyheads.nn.attention.lsh import LSHSettings, lsh_attention
from manyheads.nn.attention.masks import Segments
from manyheads.nn.attention.relative_bias import ByDistance
from manyheads.nn.heads.linear import LinearHead
from manyheads.nn.kernels import modes, policy
from manyheads.nn.kernels.attention import dot_product_attention
from manyheads.nn.kernels.relative import relative_attention
from manyheads.training.settings import OptimiserSettings

TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"


@contextmanager
def with_triton() -> Iterator[None]:
    """Fewer launches, and the Triton kernels."""
    with modes.saving_launches(), modes.using_triton():
        yield


def has_triton(options: Options) -> bool:
    return triton_lack(options) is None


def triton_lack(options: Options) -> str | None:
    return policy.triton_lack(torch.device(options.device), options.dtype)


def ceilings(options: Options) -> dict[str, Any]:
    """Products, copies in memory (bytes/s are 2 x its bytes) and a launch: what no step can pass."""
    size = 1 << (10 if options.tiny else 28)
    one = torch.zeros(size, device=options.device)
    other, small = torch.empty_like(one), torch.zeros(1, device=options.device)
    made: dict[str, Maker] = {
        "copy": lambda: Side("copy", lambda: other.copy_(one), tokens=2 * one.nbytes),
        "launch": lambda: Side("launch", lambda: small.add_(1)),
    }
    return compare(made, options)


def profile(name: str, config: Any, options: Options) -> dict[str, Any]:
    """Kernels of a step, the share of time in which the device computes, its longest kernels, and waits."""
    if name == "xl":
        rows, length = (2, config.memory_len) if options.tiny else (22, 512)
        batch: Any = segments(rows, length, config.vocab_size, options)
    else:
        rows, length = (2, 8) if options.tiny else (128, 16) if name == "demo" else (128, 64)
        batch = pairs(config, rows, length, length, options)
    facts: dict[str, Any] = {}
    for way, inside in BOTH.items():
        torch.manual_seed(0)
        model: nn.Module = (build_xl if name == "xl" else build_transformer)(config).to(options.device)
        side = of_a_run(model, [batch], options, 0, 0.0, inside, of_demo=name == "demo")
        found = _profiled(side, 2 if options.tiny else 10, options)
        report(f"{way}: {', '.join(f'{what} {number}' for what, number in list(found.items())[:4])}")
        facts |= {f"{way}: {what}": number for what, number in found.items()}
        del model, side
    return {"facts": facts}


def _profiled(side: Side, steps: int, options: Options) -> dict[str, Any]:
    for _ in range(3):
        side.step()
    wait(options)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + (options.device != "cpu")]
    with torch.profiler.profile(activities=kinds) as profiled:
        began = time.perf_counter()
        for _ in range(steps):
            side.step()
        wait(options)
        spent = time.perf_counter() - began
    return _facts_of(profiled.events(), steps, spent, options.device == "cuda")


def _facts_of(events: Any, steps: int, spent: float, has_kernels: bool = False) -> dict[str, Any]:
    """What a profile says of a step. A range that a user has named is no kernel, and the last wait is the profile's."""
    on_device = [
        one
        for one in events
        if one.device_type != torch.autograd.DeviceType.CPU and not getattr(one, "is_user_annotation", False)
    ]
    by_name: dict[str, float] = {}
    for one in on_device:
        by_name[one.name] = by_name.get(one.name, 0.0) + one.time_range.elapsed_us() / steps
    if has_kernels and not on_device:
        raise RuntimeError("the profiler saw no kernel; it may lack the permission to read the GPU's counters")
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


def tests(options: Options, which: str) -> dict[str, Any]:
    """tests/gpu on the device: `slow` are those that compile, `not slow` the others."""
    if not TESTS.is_dir():
        return {"skipped": f"there is no folder {TESTS}"}
    marks = f"({which}) and {'gpu' if options.device == 'cuda' else 'not gpu'}"
    command = [sys.executable, "-m", "pytest", "-c", str(TESTS / "pytest.ini"), "--confcutdir", str(TESTS), str(TESTS)]
    command += ["-p", "no:cacheprovider", "-q", "--tb=line", "-m", marks]
    if options.tiny:
        command += ["-k", "causal or transformer-xl"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        report(lines[-1])
    if process.wait() == 1 and any("No module named pytest" in line for line in lines):
        return {"skipped": "pytest is not installed: pip install pytest"}
    summary = next((line for line in reversed(lines) if re.search(r"\d+ passed|\d+ failed|error", line)), "no test ran")
    facts = {"tests": summary}
    if process.returncode:
        return {"facts": facts, "error": f"pytest ended with {process.returncode}: {summary}", "trace": lines[-30:]}
    return {"facts": facts}


@dataclass
class Comparison:
    """Errors of results against float64, as parts of their norms; those of the plain formula in the same type beside.

    wrong: by way, what passes its limit or fails: twice the error of the formula, and `slack`.
    """

    options: Options
    ways: dict[str, Callable[[], AbstractContextManager[Any]]]
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def check(self, what: str, results: Callable[[bool], list[Tensor]], slack: float = 1e-3) -> None:
        """Args: results: computes them within a way; given True, in float64."""
        with modes.fast(False):
            true, rough = results(True), results(False)
        for way, inside in self.ways.items():
            began = time.monotonic()
            try:
                with modes.fast(), inside():
                    found = results(False)
            except Exception as error:
                self._note(f"{what}, {way}", way, reason(error), is_right=False)
                continue
            worst = 0.0
            for number, (mine, plain, exact) in enumerate(zip(found, rough, true, strict=True)):
                size = exact.norm().clamp(min=1e-30)
                error, allowed = (float((x.double() - exact).norm() / size) for x in (mine, plain))
                is_right = bool(mine.isfinite().all()) and error <= 2 * allowed + slack
                said = f"{error:.2e}, plain {allowed:.2e}"
                self._note(f"{what}, {way}, {number or 'output'}", way, said, is_right)
                worst = max(worst, error / (2 * allowed + slack))
            report(f"{what}, {way}: at most {worst:.2f} of the limit, {time.monotonic() - began:.1f} s")
            del found

    def _note(self, what: str, way: str, said: str, is_right: bool) -> None:
        self.facts[what] = said
        if not is_right:
            self.wrong.setdefault(way, []).append(what)
            report(f"WRONG: {what}: {said}")


def correct(options: Options) -> dict[str, Any]:
    """Kernels at the sizes of training and whole steps against float64; anything above its limit fails the part."""
    torch.manual_seed(0)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"default": BOTH["ours, plain"]}
    ways["fewer launches"] = modes.saving_launches
    if has_triton(options):
        ways["Triton"] = with_triton
    comparison = Comparison(options, ways)
    if "Triton" not in ways:
        comparison.facts["Triton"] = f"left out: it {triton_lack(options)}"
    for check in (_check_attention, _check_loss, _check_steps, _check_decoding):
        check(comparison)
    found: dict[str, Any] = {"facts": comparison.facts | _lines_of_policy(options, comparison.wrong)}
    wrong = [what for of_way in comparison.wrong.values() for what in of_way]
    return {**found, "error": f"wrong: {'; '.join(wrong)}"} if wrong else found


def _lines_of_policy(options: Options, wrong: dict[str, list[str]]) -> dict[str, str]:
    """Return what the tables of `policy` may now name for this card and these versions."""
    if options.device != "cuda":
        return {}
    card, lines = (torch.cuda.get_device_capability(), torch.__version__), {}
    if not {"default", "fewer launches"} & wrong.keys():
        lines["for policy._PROVEN"] = repr(card)
    if has_triton(options) and "Triton" not in wrong:
        kernels = ("the loss", "relative attention", "chunk attention")
        found = [repr((*card, version("triton"), kernel)) for kernel in kernels]
        lines["for policy._PROVEN_TRITON"] = ", ".join(found)
    return lines


def _with_gradients(run: Callable[..., Tensor], given: list[Tensor]) -> Callable[[bool], list[Tensor]]:
    """Return a function that computes the output and the gradients of a weighted sum of it."""

    def results(is_exact: bool) -> list[Tensor]:
        leaves = [(x.double() if is_exact else x).detach().requires_grad_() for x in given]
        out = run(*leaves)
        factor = torch.sin(torch.arange(out.numel(), device=out.device)).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * factor.to(out.dtype)).sum(), leaves)]

    return results


def _check_attention(comparison: Comparison) -> None:
    options = comparison.options
    draw = partial(torch.randn, device=options.device)
    rows, heads, q_len, k_len, width = (2, 2, 8, 16, 8) if options.tiny else (22, 8, 512, 1024, 64)
    shapes = [(rows, heads, q_len, width), (rows, heads, k_len, width), (rows, heads, k_len, width)]
    shapes += [(heads, k_len, width), (heads, width), (heads, width)]
    given = [draw(shape).to(options.dtype) for shape in shapes]
    comparison.check("relative attention", _with_gradients(relative_attention, given))
    shape = (2, heads, 40 if options.tiny else 16_384, width)
    given = [draw(shape).to(options.dtype) for _ in range(3)]
    local = partial(local_attention, chunk_len=16 if options.tiny else 128)
    comparison.check("local attention", _with_gradients(local, given))
    _check_packed_attention(comparison)
    settings = LSHSettings(chunk_len=8 if options.tiny else 64)
    buckets = torch.randint(0, 4 if options.tiny else 256, (*shape[:2], 4, shape[2]), device=options.device)
    hashed = partial(lsh_attention, buckets=buckets, settings=settings)
    comparison.check("hashed attention", _with_gradients(hashed, given[:2]))


def _check_packed_attention(comparison: Comparison) -> None:
    """Sentences of 1 to 256 tokens in one row, each side causal or not, without and with numbers for distances."""
    options = comparison.options
    tokens, bound, heads, width, reach = (40, 16, 2, 8, 4) if options.tiny else (8192, 256, 8, 64, 16)
    each = itertools.cycle([bound, bound // 2, bound // 8, 3 * bound // 4])
    ends = [0, 1]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + next(each)))
    starts = torch.tensor(ends, dtype=torch.int32, device=options.device)
    given = [torch.randn(1, heads, tokens, width, device=options.device).to(options.dtype) for _ in range(3)]
    for causal in (False, True):
        mask = Segments(starts, starts, bound, causal)
        comparison.check(
            f"packed attention{', causal' * causal}", _with_gradients(partial(dot_product_attention, mask=mask), given)
        )
        if not packs_with_bias(options):
            comparison.facts["packed attention with a relative bias"] = f"left out: it {triton_lack(options)}"
            continue

        def attend(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, mask: Segments = mask) -> Tensor:
            return dot_product_attention(q, k, v, ByDistance(numbers, reach) & mask)

        numbers = torch.randn(heads, reach + 1 if causal else 2 * reach + 1, device=options.device)
        what = f"packed attention with a relative bias{', causal' * causal}"
        # The gradient of a number is a sum over all pairs of its distance.
        comparison.check(what, _with_gradients(attend, [*given, numbers]), slack=5e-3)


def packs_with_bias(options: Options) -> bool:
    """Whether packed attention with a relative bias is computed: on a GPU by Triton alone."""
    return options.device == "cpu" or has_triton(options)


def _check_loss(comparison: Comparison) -> None:
    options = comparison.options
    tokens, size, vocab = (8, 16, 50) if options.tiny else (8192, 512, 32_000)
    head = LinearHead(size, vocab, bias=False).to(options.device)
    targets = torch.randint(1, vocab, (1, tokens), device=options.device)
    keep = torch.arange(tokens, device=options.device)[None] % 7 > 0

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        own = head._parameters["weight"]
        del head._parameters["weight"]
        head.weight = weight  # type: ignore[assignment]
        try:
            return head.loss(hidden, targets, keep, label_smoothing=0.1)[0] / tokens
        finally:
            del head.weight
            head._parameters["weight"] = own

    hidden = torch.randn(1, tokens, size, device=options.device).to(options.dtype)
    comparison.check("loss", _with_gradients(loss, [hidden, head.weight.detach().to(options.dtype)]))


def _models(options: Options) -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    """Return models of two layers, which make a step of each architecture, and their batches."""
    wide = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.0}
    size, vocab, length = ("debug", 50, 16) if options.tiny else ("base", 32_000, 64)
    seq2seq = replace(transformers.PRESETS[size], source_vocab_size=vocab, target_vocab_size=vocab, **wide)
    relative = replace(seq2seq, positions="none", relative_bias=16, norm_position="pre")
    xl = replace(xls.PRESETS["debug" if options.tiny else "enwik8-base"], vocab_size=204, dropout=0.0, num_layers=2)
    xl = replace(xl, attention_dropout=0.0)
    hashing = reformers.PRESETS["debug" if options.tiny else "small"]
    hashing = replace(hashing, vocab_size=256, dropout=0.0, num_layers=2, **({} if options.tiny else {"max_len": 4096}))
    sentences = pairs(seq2seq, 4, length, length - 3, options)
    with_bias = "transformer with a relative bias"
    packed = {f"{with_bias}, packed": (lambda: build_transformer(relative), PackedBatch.of(sentences))}
    return {
        "transformer": (lambda: build_transformer(seq2seq), sentences),
        "transformer, packed": (lambda: build_transformer(seq2seq), PackedBatch.of(sentences)),
        with_bias: (lambda: build_transformer(relative), sentences),
        **(packed if packs_with_bias(options) else {}),
        "Transformer-XL": (lambda: build_xl(xl), segments(2, xl.memory_len, 204, options)),
        "Reformer": (lambda: build_reformer(hashing), segments(1, hashing.max_len, 256, options)),
    }


def _check_steps(comparison: Comparison) -> None:
    """The loss and all gradients of the second step of a run, with weights that do not change."""
    options = comparison.options
    for name, (build, batch) in _models(options).items():
        torch.manual_seed(0)
        model = build()

        def results(is_exact: bool, model: nn.Module = model, batch: Any = batch) -> list[Tensor]:
            own = copy.deepcopy(model).to(options.device)
            optimiser = OptimiserSettings(clip_norm=0.0, weight_decay=0.0)
            runner = train_step(own.double() if is_exact else own, options, optimiser, "fp32" if is_exact else None)
            for number in (1, 2):
                result = runner.run([batch], number, 0.0)
                assert result.fault is None, result.fault
            grads = [p.grad.flatten() for p in own.parameters() if p.grad is not None]
            loss = torch.tensor([result.loss_sum / result.num_tokens], dtype=torch.float64, device=options.device)
            return [loss, torch.cat(grads)]

        # Where rounding moves a vector to another bucket, some gradients differ, in one way as in another.
        comparison.check(f"step of {name}", results, slack=5e-2 if name == "Reformer" else 5e-3)


def _check_decoding(comparison: Comparison) -> None:
    """Log-probabilities of given tokens, step by step, with fewer launches; Triton kernels are for training."""
    options = comparison.options
    built = _models(options)
    for name in ("transformer", "transformer with a relative bias", "Transformer-XL"):
        build, batch = built[name]
        torch.manual_seed(0)
        model = build().eval()

        def results(is_exact: bool, model: nn.Module = model, batch: Any = batch) -> list[Tensor]:
            own: Any = copy.deepcopy(model).to(options.device, torch.float64 if is_exact else options.dtype)
            there, found = batch.to(options.device), []
            is_pair = hasattr(batch, "source")
            tokens = there.target if is_pair else there.tokens
            with torch.inference_mode(), modes.using_triton(False):
                if modes.is_fast():
                    pack(own)
                state = own.start(there.source, there.source_lengths) if is_pair else own.start(len(tokens))
                for column in tokens[:, :8].split(1, dim=1):
                    log_probs, state = own.step(column, state)
                    found.append(log_probs.double())
            return [torch.stack(found)]

        comparison.check(f"decoding by {name}", results, slack=5e-3)
