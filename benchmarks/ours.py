"""Our sides that compute: training through the run's own step, evaluation and decoding as the commands do them.

Widths, batches and lengths are those of the shared peers. Random ids, no padding, on the CPU.
"""

from __future__ import annotations

from manyheads.cli.process import set_up_machine

set_up_machine()  # before torch is imported, as the command line does

import itertools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Literal, cast  # noqa: E402

import flops  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from harness import Step  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from manyheads.catalogue import build_model  # noqa: E402
from manyheads.data.batch import PairBatch  # noqa: E402
from manyheads.data.language.segments import SegmentBatch  # noqa: E402
from manyheads.decoding.model_runner import CompiledSteps, inference, narrow, pack  # noqa: E402
from manyheads.decoding.search import search_steps  # noqa: E402
from manyheads.decoding.search_problem import run_to_end  # noqa: E402
from manyheads.decoding.settings import DecodingSettings  # noqa: E402
from manyheads.extras.peers import PEERS  # noqa: E402
from manyheads.extras.peers.marian import Marian  # noqa: E402
from manyheads.extras.peers.marian_generation import settings_from_peer  # noqa: E402
from manyheads.extras.shortlists.shortlist import Shortlist  # noqa: E402
from manyheads.models.composites import LanguageModel  # noqa: E402
from manyheads.models.decoder.config import DecoderConfig  # noqa: E402
from manyheads.models.reformer.config import ReformerConfig  # noqa: E402
from manyheads.models.transformer.config import TransformerConfig  # noqa: E402
from manyheads.models.transformer_xl.config import Attending, TransformerXLConfig  # noqa: E402
from manyheads.nn import MultiHeadAttention  # noqa: E402
from manyheads.nn.kernels.modes import fast  # noqa: E402
from manyheads.tasks.language_modelling.objective import begin_hashing  # noqa: E402
from manyheads.tasks.language_modelling.settings import TextConfig  # noqa: E402
from manyheads.tasks.translation.settings import TrainConfig  # noqa: E402
from manyheads.training.optim.optimiser import build_optimiser  # noqa: E402
from manyheads.training.run.device import settled  # noqa: E402
from manyheads.training.run.step import TrainStep  # noqa: E402
from manyheads.training.settings import OptimiserSettings, RunConfig, TrainingSettings  # noqa: E402

Precision = Literal["fp32", "bf16"]

CPU = torch.device("cpu")
RATE = 1e-4
PAIRS: dict[str, Any] = {
    "source_vocab_size": 8000, "target_vocab_size": 8000, "d_model": 256, "num_heads": 4, "d_ff": 1024,
    "num_encoder_layers": 3, "num_decoder_layers": 3,
}  # fmt: skip
LIKE: dict[str, dict[str, Any]] = {
    # Dropout on attention weights and between the two maps as well, two norms at the ends, an output table with a bias.
    "torch.nn.Transformer": {
        "tie_embeddings": "embeddings", "head_bias": True, "final_norm": True, "attention_dropout": 0.1,
        "feed_forward_dropout": 0.1,
    },
    "MarianMT": {"tie_embeddings": "all", "activation": "gelu"},
    "x-transformers": {"tie_embeddings": "none", "activation": "gelu", "norm_position": "pre", "dropout": 0.0},
}  # fmt: skip
"""Where peers differ from one another: tables of the vocabulary, and where dropout is."""
XL = TransformerXLConfig(
    vocab_size=10_000, d_model=256, num_heads=4, head_dim=64, d_ff=1024, num_layers=6, dropout=0.1, memory_len=128
)
DECODER = DecoderConfig(vocab_size=10_000, d_model=256, num_heads=4, d_ff=1024, num_layers=4)
XL_READING = Attending(memory_len=640, clamp_len=400, same_length=True)
ATTENTION_WIDTH, ATTENTION_HEADS = 512, 8
_HELD = ExitStack()  # until the process ends


def seq2seq(precision: Precision, like: str) -> Step:
    """Training an encoder-decoder on 64 x 32 tokens, label smoothing 0.1. like: which peer's tables and dropout."""
    model_config = TransformerConfig(**{**PAIRS, **LIKE[like]})
    config = TrainConfig(
        model=model_config, precision=precision, training=TrainingSettings(label_smoothing=0.1), optimiser=_adam()
    )
    rows, length = 64, 32
    source, target = (torch.randint(4, 8000, (rows, columns)) for columns in (length, length + 1))
    whole = torch.full((rows,), length)
    batch = PairBatch(source, whole, target, whole + 1, torch.arange(rows))
    step, parameters = _training(config, batch)
    work = flops.transformer(model_config, rows, length, length).training
    return Step(step, rows * length, precision=precision, parameters=parameters, flops=work)


def xl_training(precision: Precision) -> Step:
    """A Transformer-XL on segments of 128 in 16 lanes with a memory of 128."""
    config = TextConfig(
        model=XL, precision=precision, training=TrainingSettings(label_smoothing=0.0), optimiser=_adam()
    )
    lanes, length = 16, 128
    step, parameters = _training(config, _segment(lanes, length, XL.vocab_size))
    work = flops.transformer_xl(XL, lanes, length, XL.memory_len).training
    return Step(step, lanes * length, precision=precision, parameters=parameters, flops=work)


def xl_evaluation(precision: Precision) -> Step:
    """Segments of 64 in 8 lanes with a memory of 640, clamp 400, same_length; the warm-up fills the memory."""
    torch.manual_seed(0)
    model = build_model(XL).eval()
    lanes, length = 8, 64
    batch = _segment(lanes, length, XL.vocab_size)
    state: Any = None

    @torch.no_grad()
    def step() -> None:
        nonlocal state
        with fast(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            if state is None:
                state = model.start(lanes, XL_READING)
            state = model(batch, state).state

    work = flops.transformer_xl_cached(XL, lanes, length, XL_READING.memory_len)
    return Step(step, lanes * length, 12, precision, _count(model), work)


def reformer(precision: Precision, length: int) -> Step:
    """A Reformer of four hashing layers on one sequence: chunks of 64, 4 rounds, axial positions."""
    model_config = ReformerConfig(
        vocab_size=320, d_model=256, num_heads=4, d_ff=1024, num_layers=4, dropout=0.0, layers=("lsh",), chunk_len=64,
        num_hashes=4, max_len=length, positions="axial", axial_shape=(64, length // 64), axial_dims=(64, 192),
        keep_attention=True,
    )  # fmt: skip
    training = TrainingSettings(label_smoothing=0.0)
    config = TextConfig(model=model_config, precision=precision, training=training, optimiser=_adam())
    step, parameters = _training(config, _segment(1, length, model_config.vocab_size))
    work = flops.reformer(model_config, 1, length).training
    return Step(step, length, 1, precision, parameters, work)


def decoder_training(precision: Precision) -> Step:
    """A decoder of GPT-2's kind on 16 rows of 128 tokens."""
    config = TextConfig(
        model=DECODER, precision=precision, training=TrainingSettings(label_smoothing=0.0), optimiser=_adam()
    )
    lanes, length = 16, 128
    step, parameters = _training(config, _segment(lanes, length, DECODER.vocab_size))
    return Step(step, lanes * length, precision=precision, parameters=parameters)


def decoder_generation(rows: int, compiles: bool = False) -> Step:
    """Prompts of 32 tokens, 128 new ones by greedy search, fp32. compiles: the steps, before anything is timed."""
    torch.manual_seed(0)
    model = build_model(DECODER).eval()
    pack(model)
    searched: Any = CompiledSteps(model) if compiles else model
    prompts = torch.randint(0, DECODER.vocab_size, (rows, 32))

    def step() -> None:
        with inference(CPU, "fp32"):
            scores, state = searched.step(prompts, searched.start(rows), logits=True)
            for _ in range(127):
                scores, state = searched.step(scores.argmax(-1, keepdim=True), state, logits=True)

    return Step(step, rows * 128, 1, "fp32", _count(model))


def decode(folder: str, precision: Precision = "fp32", compiles: bool = False) -> Step:
    """Decoding with a peer's weights, the source and the beams that it left in a folder.

    Args: compiles: with the steps of the search compiled, before anything is timed.

    Raises: RuntimeError: in fp32, the ids found are not the peer's.
    """
    place = Path(folder)
    told = json.loads((place / "ids.json").read_text("utf-8"))
    options = json.loads((place / "config.json").read_text("utf-8"))
    loaded = PEERS["transformers/Marian"].from_peer({"model": options}, load_file(place / "model.safetensors"))
    marian = cast(Marian, loaded)
    model = marian.module.eval()
    parameters = _count(model)
    narrow(model, precision)
    pack(model)
    searched = CompiledSteps(model) if compiles else model
    source, length = torch.tensor(told["source"]), len(told["found"][0])
    lengths = torch.full((len(source),), source.shape[1])
    generation = {"num_beams": told["num_beams"], "max_new_tokens": length, "min_new_tokens": length}
    settings = settings_from_peer(generation, marian.ids)

    def step() -> list[list[int]]:
        ids = marian.ids
        with inference(CPU, precision):
            steps = search_steps(searched, source, lengths, settings, pad_id=ids.pad, bos_id=ids.start, eos_id=ids.eos)
            found = run_to_end(steps)
        return [hypotheses[0].ids for hypotheses in found]

    different = sum(mine != theirs for mine, theirs in zip(step(), told["found"], strict=True))
    if different and precision == "fp32":
        raise RuntimeError(f"{different} of {len(source)} outputs have other ids than MarianMT's; nothing is timed.")
    work = flops.decoding(model.config, len(source), source.shape[1], length, settings.num_beams)
    return Step(step, len(source) * length, 1, precision, parameters, work)


def shortlisted(vocab_size: int, count: int = 0) -> Step:
    """Greedy search with random weights and words that are as frequent as in text (Zipf's law), also as candidates.

    Args: count: of the shortlist, as `--shortlist` takes it; 0: the whole vocabulary.
    """
    torch.manual_seed(0)
    config = TransformerConfig(**PAIRS | {"source_vocab_size": vocab_size, "target_vocab_size": vocab_size})
    model = build_model(config).eval()
    pack(model)
    sentences, length, special = 32, 32, 3
    frequencies = 1 / torch.arange(1, vocab_size - special + 1)

    def words(*shape: int) -> Tensor:
        return special + torch.multinomial(frequencies, math.prod(shape), replacement=True).view(shape)

    shortlist = None
    if count:
        candidates = words(vocab_size, count)
        shortlist = Shortlist(
            frequent=torch.arange(vocab_size),
            offsets=torch.arange(0, candidates.numel() + 1, count),
            candidates=candidates.flatten(),
            is_shared=False,
            vocabulary="",
            count=count,
        )
    source, lengths = words(sentences, length), torch.full((sentences,), length)
    settings = DecodingSettings(num_beams=1, max_new_tokens=2 * length, min_new_tokens=2 * length)

    def step() -> None:
        with inference(CPU, "fp32"):
            steps = search_steps(model, source, lengths, settings, pad_id=0, bos_id=1, eos_id=2, shortlist=shortlist)
            run_to_end(steps)

    return Step(step, sentences * 2 * length, 1, "fp32", _count(model))


def attention(kind: str, precision: Precision, batch: int, length: int) -> Step:
    """A module of 512 features and 8 heads, forward and backward, without mask or dropout.

    Args: kind: `ours`; `torch`, nn.MultiheadAttention without weights; `bare`, two projections around SDPA. All have
        the machine set up as ours has it: what is compared is the module.
    """
    torch.manual_seed(0)
    module: nn.Module
    if kind == "ours":
        module = ours = MultiHeadAttention(ATTENTION_WIDTH, ATTENTION_HEADS)
        run: Callable[[Tensor], Tensor] = lambda x: ours(x)[0]  # noqa: E731
    elif kind == "torch":
        module = theirs = nn.MultiheadAttention(ATTENTION_WIDTH, ATTENTION_HEADS, batch_first=True)
        run = lambda x: theirs(x, x, x, need_weights=False)[0]  # noqa: E731
    else:
        module = run = _Bare()
    x = torch.randn(batch, length, ATTENTION_WIDTH, requires_grad=True)

    def step() -> None:
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            out = run(x)
        out.float().sum().backward()  # type: ignore[no-untyped-call]

    width = ATTENTION_WIDTH
    work = 3.0 * batch * length * (8 * width**2 + 4 * length * width)
    return Step(step, batch * length, 2, precision, _count(module), work)


class _Bare(nn.Module):
    """Nothing but the products: what anybody would write."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(ATTENTION_WIDTH, 3 * ATTENTION_WIDTH)
        self.out_proj = nn.Linear(ATTENTION_WIDTH, ATTENTION_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (ATTENTION_HEADS, -1)).transpose(1, 2) for y in self.in_proj(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.out_proj(attended)
        return out


def _adam() -> OptimiserSettings:
    return OptimiserSettings(name="adam", learning_rate=RATE)


def _training(config: RunConfig, batch: Any) -> tuple[Callable[[], None], int]:
    """The step of a run, on the same batch again and again; and the number of parameters.

    Raises: RuntimeError: from the step, if there was no update.
    """
    torch.manual_seed(0)
    model = build_model(config.model)  # type: ignore[attr-defined]
    begin = partial(begin_hashing, config, cast(LanguageModel, model)) if isinstance(config, TextConfig) else None
    train_step = TrainStep(model, build_optimiser(model, config.optimiser), config, CPU, begin=begin)
    numbers = itertools.count(1)
    _HELD.enter_context(settled())  # as a run does

    def step() -> None:
        with fast():  # as a run does
            result = train_step.run([batch], next(numbers), RATE)
        if result.fault is not None:
            raise RuntimeError(f"there was no update: {result.fault}")

    return step, _count(model)


def _segment(lanes: int, length: int, vocab_size: int) -> SegmentBatch:
    ids = torch.randint(0, vocab_size, (lanes, length + 1))
    whole, none = torch.full((lanes,), length), torch.zeros(lanes, dtype=torch.bool)
    return SegmentBatch(ids[:, :-1], ids[:, 1:], whole, none, torch.arange(lanes))


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
