"""What every architecture of the table must hold, on its debug preset and on variants with its other parts.

A newcomer is tested as soon as it stands in the table: translators as `subject`, language models with a memory of
segments as `language_model`, those that read a sequence at once as `reformer`, classifiers as `classifier`, chart
parsers as `span_parser`, all of them as `any_subject`. One that cannot hold a contract, or holds it already in another
variant, says so in exemptions.json:
{"architecture/test_name": "reason"}, of one variant alone {"architecture/variant/test_name": "reason"}, of one
parameter alone {".../test_name[parameter]": "reason"}; `*` stands for every test. The test is then skipped under that
reason.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thinning import is_in_sample
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES
from manyheads.data.batch import PairBatch
from manyheads.nn.attention.settings import AdditiveAttentionConfig
from manyheads.nn.kernels import modes, policy

torch.set_num_threads(1)  # tensors this small only wait for one another

SUBJECTS = (
    "subject",
    "language_model",
    "memoryless",
    "hashing",
    "reversible",
    "classifier",
    "reversible_classifier",
    "span_parser",
    "any_subject",
)
"""Fixtures that give an architecture of the table with its settings."""
VOCAB = 23
PAD, BOS, EOS = 0, 1, 2

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "transformer": {
        "debug": {},
        "debug on SDPA": {},
        "additive": {"attention": AdditiveAttentionConfig()},
        "pre-norm on SDPA": {
            "norm_position": "pre",
            "norm": "unbiased",
            "positions": "learned",
            "tie_embeddings": "none",
            "head_bias": True,
            "activation": "gelu",
        },
        "stacks unlike": {
            "num_decoder_heads": 2,
            "decoder_d_ff": 48,
            "tie_embeddings": "embeddings",
            "positions": "sinusoidal_halves",
            "scale_embedding": False,
            "activation": "gelu_tanh",
        },
        "relative bias": {"relative_bias": 3},
        "relative bias, no positions": {
            "relative_bias": 2,
            "positions": "none",
            "norm_position": "pre",
            "activation": "gelu",
        },
        "heads of their own width": {"head_dim": 12, "value_dim": 6, "initialisation": "glorot"},
        "rotary, grouped, gated": {
            "positions": "rotary",
            "rotary_scaling": "ntk",
            "rotary_factor": 2.0,
            "num_kv_heads": 2,
            "norm": "rms",
            "norm_position": "pre",
            "ffn": "swiglu",
            "bias": False,
        },
        "rotary, relative bias, one kv head": {"positions": "rotary", "relative_bias": 3, "num_kv_heads": 1},
    },
    "reformer": {
        "debug": {},
        "four rounds, sinusoids": {
            "layers": ("lsh",),
            "num_hashes": 4,
            "positions": "sinusoidal",
            "correct_duplicates": True,
            "num_buckets": (4, 2),
            "head_dim": 0,
        },
        "exact, learned, plain": {"layers": ("full",), "positions": "learned", "reversible": False, "ff_chunk_len": 0},
        "first positions exact": {"layers": ("lsh", "full"), "exact_len": 6, "activation": "gelu", "num_buckets": (4,)},
        "attention kept": {"layers": ("lsh", "local"), "keep_attention": True, "exact_len": 3},
        "slopes in local layers": {"local_slopes": True, "local_chunks_before": 2},
        "trained slopes, no positions": {"local_slopes": True, "train_slopes": True, "positions": "none"},
    },
    "decoder": {
        "debug": {},
        "rotary, grouped, gated": {
            "positions": "rotary",
            "rotary_scaling": "linear",
            "rotary_factor": 2.0,
            "num_kv_heads": 2,
            "norm": "rms",
            "ffn": "swiglu",
            "bias": False,
        },
        "post-norm, sinusoids, untied": {
            "norm_position": "post",
            "positions": "sinusoidal",
            "scale_embedding": True,
            "tie_embeddings": False,
            "head_bias": True,
            "head_dim": 12,
        },
    },
    "reformer-seq2seq": {
        "debug": {},
        "exact": {"attention": "full", "tie_embeddings": "decoder", "ff_chunk_len": 3},
        "attention kept": {"keep_attention": True},
        "plain, learned": {"reversible": False, "positions": "learned", "tie_embeddings": "none", "num_hashes": 1},
    },
    "transformer-xl": {
        "debug": {},
        "pre-norm, each layer its biases": {"norm_position": "pre", "share_biases": False, "tie_embeddings": False},
        "learned distances": {"attention": "relative_learned", "max_len": 6},
        "adaptive": {"cutoffs": (7, 15), "div_value": 2, "d_embed": 16, "tie_projections": (False, True, True)},
        "adaptive, one width": {"cutoffs": (7, 15), "d_embed": 12, "tie_projections": (False, True, True)},
        "same length, clamped": {"same_length": True, "clamp_len": 5, "head_dim": 0, "d_embed": 12},
        "relative bias": {"relative_bias": 3},
        "absolute": {"attention": "absolute", "clamp_len": 20},
        "absolute, learned, pre-norm": {"attention": "absolute_learned", "max_len": 6, "norm_position": "pre"},
    },
    "transformer-classifier": {
        "debug": {},
        "first position, post-norm": {"pooling": "first", "norm_position": "post", "positions": "learned"},
        "relative bias, no positions": {"relative_bias": 3, "positions": "none"},
    },
    "reformer-classifier": {
        "debug": {},
        "exact, first position, plain": {"layers": ("full",), "pooling": "first", "reversible": False},
        "slopes in local layers": {"local_slopes": True},
    },
    "transformer-spans": {
        "debug": {},
        "no window, post-norm": {"window": 1, "norm_position": "post"},
        "relative bias": {"relative_bias": 3},
    },
}
"""Changes to the debug preset. `on SDPA` sends dot products there, which short sequences never reach by themselves."""


@dataclass(frozen=True)
class Subject:
    """A model under contract. name: architecture/variant."""

    name: str
    config: Any

    @property
    def architecture(self) -> str:
        return self.name.partition("/")[0]

    @property
    def task(self) -> str:
        return ARCHITECTURES[self.architecture].task

    @property
    def hashes(self) -> bool:
        """Whether a translator attends by hashing."""
        return getattr(self.config, "attention", None) == "lsh"

    def say(self, model: Any) -> Tensor:
        """Log-probabilities of something fixed, whatever the task."""
        ids = torch.arange(20).view(2, 10) % VOCAB
        if self.task == "translation":
            return model.log_probs(ids, torch.tensor([10, 7]), ids.flip(1))  # type: ignore[no-any-return]
        if self.task == "spans":
            return model.log_probs(ids[:, :, None], ids[:, :, None] + 1, torch.tensor([10, 7]))  # type: ignore[no-any-return]
        return model.log_probs(ids, torch.tensor([10, 7]))  # type: ignore[no-any-return]

    def build(self, **changes: Any) -> Any:
        """A fresh model in evaluation mode, the same each time, with no parameter at 0 or 1."""
        torch.manual_seed(1)
        config = replace(self.config, **changes)
        model = ARCHITECTURES[self.architecture].build(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model

    def without_dropout(self) -> Any:
        """A fresh model that drops nothing in training."""
        return self.build(**({"dropout": 0.0} if hasattr(self.config, "dropout") else {}))


def subjects(task: str | None = None, memory: bool | None = None) -> list[Subject]:
    """Args: memory: whether a model remembers segments; None: either."""
    found = []
    for name, entry in ARCHITECTURES.items():
        if task not in (None, entry.task):
            continue
        config = entry.presets["debug"]
        if memory not in (None, hasattr(config, "memory_len")):
            continue
        sizes = {f.name: VOCAB for f in fields(config) if f.name.endswith("vocab_size")}
        for variant, changes in VARIANTS.get(name, {"debug": {}}).items():
            found.append(Subject(f"{name}/{variant}", replace(config, **sizes, **changes)))
    return found


def exemptions() -> dict[str, str]:
    return json.loads(Path(__file__).with_name("exemptions.json").read_text("utf-8"))  # type: ignore[no-any-return]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    exempt = exemptions()
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        given = item.callspec.params
        subject = next((given[name] for name in SUBJECTS if name in given), None)
        if subject is None:
            continue
        is_first = subject.name.endswith("/debug") and given.get("precision", "fp32") == "fp32"
        first = item.get_closest_marker("first_variant")
        if first and (not is_first or subject.architecture in first.args):
            item.add_marker(pytest.mark.slow)
        if not subject.name.endswith("/debug"):
            if given.get("precision") == "bf16" and not is_in_sample(item.name, 4):
                item.add_marker(pytest.mark.slow)
            if not item.get_closest_marker("golden"):
                item.add_marker(pytest.mark.one_in(2))
        for owner in (subject.architecture, subject.name):
            for test in (item.originalname, "*"):
                for case in (test, *(f"{test}[{part}]" for part in item.callspec._idlist)):
                    if reason := exempt.get(f"{owner}/{case}"):
                        item.add_marker(pytest.mark.skip(reason=f"exempt: {reason}"))


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    """The fast implementations; `test_modes` compares them with the plain ones."""
    with modes.fast():
        yield


def each(chosen: list[Subject]) -> Any:
    """A fixture: one model after the other, with the same random numbers."""

    @pytest.fixture(params=chosen, ids=lambda subject: subject.name)
    def one(request: pytest.FixtureRequest) -> Subject:
        torch.manual_seed(0)
        return request.param  # type: ignore[no-any-return]

    return one


language_model = each(subjects("language-modelling", memory=True))
memoryless = each(subjects("language-modelling", memory=False))  # remembers no earlier segment
hashing = each([one for one in subjects("language-modelling") if one.config.draws_hashes])
reversible = each([one for one in subjects("language-modelling") if hasattr(one.config, "reversible")])
classifier = each(subjects("classification"))
reversible_classifier = each([one for one in subjects("classification") if getattr(one.config, "reversible", False)])
span_parser = each(subjects("spans"))
any_subject = each(subjects())


@pytest.fixture(params=subjects("translation"), ids=lambda subject: subject.name)
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    torch.manual_seed(0)
    by_products = "on SDPA" not in request.param.name

    def path(query: Tensor, key: Tensor, value: Tensor, dropout_rate: float) -> policy.AttentionPath:
        if modes.compiles_a_step():
            return "sums"
        is_part = key.element_size() < 4 and not key.is_contiguous() and not (dropout_rate or torch.is_grad_enabled())
        return "sdpa" if not by_products else "rounded products" if is_part else "products"

    monkeypatch.setattr(policy, "attention_path", path)
    return request.param  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Precision:
    """fp32, or bf16: autocast with float32 masters."""

    name: str

    def on(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.name == "bf16")

    def tolerance(self, model: Any, plain: Callable[[Any], Tensor]) -> float:
        """1e-5 in fp32; in bf16 twice what plain(model) itself loses there against float64."""
        return self._wanted(model, plain)[1]

    def _wanted(self, model: Any, plain: Callable[[Any], Tensor]) -> tuple[Tensor, float]:
        """plain(model), in bf16 that of float64, and the tolerance."""
        with torch.no_grad():
            if self.name == "fp32":
                return plain(model).double(), 1e-5
            exact = plain(copy.deepcopy(model).double()).double()
            with self.on():
                low = plain(model)
        return exact, 2 * (low.double() - exact).abs().max().item()

    def assert_same(self, model: Any, plain: Callable[[Any], Tensor], *others: Callable[[Any], Tensor]) -> None:
        """Each of the others says what `plain` says: in bf16, as near to float64 as twice plain's own distance."""
        wanted, atol = self._wanted(model, plain)
        for other in others:
            with torch.no_grad(), self.on():
                got = other(model).double()
            assert got.shape == wanted.shape
            distance = (got - wanted).abs().max().item()
            assert distance <= atol, f"{distance} apart, {atol} allowed"


@pytest.fixture(params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> Precision:
    return Precision(request.param)


@pytest.fixture
def make_batch() -> Callable[..., PairBatch]:
    """make_batch([source lengths], [target lengths], seed=0): random pairs; lengths count EOS, and the target's BOS."""

    def make(source: list[int], target: list[int], seed: int = 0) -> PairBatch:
        generator = torch.Generator().manual_seed(seed)

        def side(lengths: list[int], begin: list[int]) -> Tensor:
            rows = torch.full((len(lengths), max(lengths)), PAD)
            for row, length in zip(rows, lengths, strict=True):
                inner = torch.randint(4, VOCAB, (max(0, length - 1 - len(begin)),), generator=generator).tolist()
                row[:length] = torch.tensor([*begin, *inner, EOS][:length], dtype=torch.int64)
            return rows

        return PairBatch(
            source=side(source, []),
            source_lengths=torch.tensor(source),
            target=side(target, [BOS]),
            target_lengths=torch.tensor(target),
            sample_ids=torch.arange(len(source)),
        )

    return make
